"""MMLU-Pro: 14 categories, up to ten options, 12,032 questions (validation 70).

    python evals/mmlu_pro.py --model llada-8b --cache dual
    python evals/mmlu_pro.py --completions FILE.jsonl --data rows.jsonl

The default asks for reasoning and shows no examples: OpenCompass' mmlu_pro_0shot_cot_gen_08c1de,
which DARE uses for LLaDA (256 tokens), Dream (128) and LLaDA2 (256). So few tokens cut off many
answers: look at `answered` and `truncated` in result.json. Its macro_accuracy, the plain mean of
the categories, is what DARE's table prints: LLaDA-8B-Instruct 36.82, Dream-7B-Instruct 31.89,
LLaDA2.0-mini 57.10. `--data 5-shot` shows the first five validation rows of the category with their
reasoning as chat turns, as the authors do (OpenCompass' mmlu_pro_gen_cdbebf). Of a file with
@5-shot behind it the rows with cot_content are the examples.
"""

if __name__ == "__main__":
    from command import main

    main("mmlu_pro")

from evals.choices import LETTERS, Choices, Form

INSTRUCTION = (
    "Answer the following multiple choice question. The last line of your response should be of "
    "the following format: 'ANSWER: $LETTER' (without quotes) where LETTER is one of Options(e.g. "
    "one of ABCDEFGHIJKLMNOP). Think step by step before answering."
)
ASK = "Question:\n{question}\nOptions:\n{stripped_options}"
STEPS = "Let's think step by step."


class MmluPro(Choices):
    HUB = "TIGER-Lab/MMLU-Pro"
    needs = "question, options (up to 16), answer (letter of one of them) and category"
    styles = PRESETS = {"5-shot": "reasons"}
    forms = {
        "": Form(
            "OpenCompass mmlu_pro_0shot_cot_gen_08c1de",
            INSTRUCTION + "\n\nQuestion:\n\n{question}\n\nOptions:\n\n{stripped_options}",
            "ANSWER: {gold}",
        ),
        "reasons": Form(
            "OpenCompass mmlu_pro_gen_cdbebf",
            ASK,
            "ANSWER: {gold}",
            shot=(ASK, "Answer: " + STEPS + " {reason}"),
        ),
    }

    def rows(self, path, part, style):
        """With worked examples: "dev" are the validation rows that have them."""
        rows, is_shot = super().rows(path, part.replace("dev", "validation"), style), part == "dev"
        return [row for row in rows if not style or bool(row.get("cot_content")) == is_shot]

    def read(self, row):
        """Options "N/A" are left out; the others keep their letters."""
        labelled = zip(LETTERS, row["options"], strict=False)
        example = {
            "question": row["question"],
            "options": {label: text for label, text in labelled if text != "N/A"},
            "gold": row["answer"],
            "subject": row["category"],
        }
        reason = (row.get("cot_content") or "").removeprefix(f"A: {STEPS}").strip()
        return example | ({"reason": reason} if reason else {})


task = MmluPro()
