"""MMLU-Pro: 14 categories, up to ten options, 12,032 questions (validation 70).

    python evals/mmlu_pro.py --model llada-8b --cache dual
    python evals/mmlu_pro.py --completions FILE.jsonl --data rows.jsonl

The prompt asks for reasoning and shows no examples: OpenCompass' mmlu_pro_0shot_cot_gen_08c1de,
which DARE uses for LLaDA (256 tokens), Dream (128) and LLaDA2 (256). So few tokens cut off many
answers: look at `answered` and `truncated` in result.json. Its macro_accuracy, the plain mean of
the categories, is what DARE's table prints: LLaDA-8B-Instruct 36.82, Dream-7B-Instruct 31.89,
LLaDA2.0-mini 57.10.
"""

if __name__ == "__main__":
    import command  # noqa: F401

from evals.choices import Choices, Form

INSTRUCTION = (
    "Answer the following multiple choice question. The last line of your response should be of "
    "the following format: 'ANSWER: $LETTER' (without quotes) where LETTER is one of Options(e.g. "
    "one of ABCDEFGHIJKLMNOP). Think step by step before answering."
)


class MmluPro(Choices):
    HUB = "TIGER-Lab/MMLU-Pro"
    needs = "question, options (up to 16), answer (letter of one of them) and category"
    forms = {
        "": Form(  # OpenCompass mmlu_pro_0shot_cot_gen_08c1de
            INSTRUCTION + "\n\nQuestion:\n\n{question}\n\nOptions:\n\n{stripped_options}",
            "ANSWER: {gold}",
        )
    }

    def read(self, row):
        return {
            "question": row["question"],
            "options": row["options"],
            "gold": row["answer"],
            "subject": row["category"],
        }


task = MmluPro()
