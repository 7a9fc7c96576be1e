"""ARC-Challenge: school science questions with three to five options; 1,172 in test, 299 in
validation, 1,119 in train.

    python evals/arc_c.py --model llada-8b --data dare
    python evals/arc_c.py --completions FILE.jsonl --data rows.jsonl

The prompt is OpenCompass' ARC_c_gen_1e0de5, without worked examples. DARE's number is for the 295
validation questions that have four options: --data dare gives these for every --split (lengths
there: LLaDA, Dream and LLaDA2 512, SDAR 4,096). DARE's table: LLaDA-8B-Instruct 87.80 (259 of 295),
Dream-7B-Instruct 81.36, SDAR-8B-Chat 86.78, LLaDA2.0-mini 85.76. --likelihood
compares the options on test, as for base models (LLaDA-8B-Base 45.9): a different quantity.
"""

if __name__ == "__main__":
    import command  # noqa: F401

from evals.choices import LETTERS, Choices, Form


class ArcC(Choices):
    HUB, parts, PRESETS = "allenai/ai2_arc", ("ARC-Challenge",), {"dare": ""}
    splits = {name: name for name in ("train", "validation", "test")}
    needs = "question, choices.text, choices.label and answerKey, which is one of the labels"
    forms = {"": Form("Question: {question}\n{options}\nAnswer:")}
    base = Form("Question: {question}\nAnswer:", " {option}")  # lm-eval arc_challenge

    def load(self, split, path=None, limit=None):
        """As Choices.load. "dare": the validation rows with four options."""
        if path != "dare":
            return super().load(split, path, limit)
        return [one for one in super().load("validation") if len(one["options"]) == 4][:limit]

    def read(self, row):
        # some rows label their options 1 to 4: only the position counts
        gold = LETTERS[row["choices"]["label"].index(row["answerKey"])]
        return {"question": row["question"], "options": row["choices"]["text"], "gold": gold}


task = ArcC()
