"""HellaSwag: which of four endings continues a text; 10,042 rows, the hub's validation split,
because test has no labels.

    python evals/hellaswag.py --model llada-8b  Rowan/hellaswag
    python evals/hellaswag.py --completions FILE.jsonl --data rows.jsonl

The only split, test, is the hub's validation split. The prompt is OpenCompass'
hellaswag_gen_6faab5, without worked examples and without the activity in front of the text. DARE's
lengths: LLaDA 3, Dream 128, LLaDA2 256, SDAR 4,096. DARE's table: LLaDA-8B-Instruct 75.30,
Dream-7B-Instruct 63.23, SDAR-8B-Chat 87.59, LLaDA2.0-mini 82.35. --likelihood compares endings, as
for base models: LLaDA-8B-Base 70.5, a different quantity.
"""

if __name__ == "__main__":
    import command  # noqa: F401

import re

from evals.choices import LETTERS, Choices, Form


class HellaSwag(Choices):
    HUB, splits = "Rowan/hellaswag", {"test": "validation"}
    needs = "activity_label, ctx_a, ctx_b, four endings and label (0 to 3)"
    forms = {
        "": Form(  # OpenCompass hellaswag_gen_6faab5
            "{text}\nQuestion: Which ending makes the most sense?\n{options}\n"
            "You may choose from 'A', 'B', 'C', 'D'.\nAnswer:",
        )
    }
    base = Form("{titled}", " {option}")  # lm-eval hellaswag

    def read(self, row):
        text = f"{row['ctx_a']} {str(row['ctx_b']).capitalize()}"
        options, gold = [*map(cleaned, row["endings"])], LETTERS[int(row["label"])]
        titled = cleaned(f"{row['activity_label']}: {text}")
        return {"text": cleaned(text), "titled": titled, "options": options, "gold": gold}


def cleaned(text):
    """Text without WikiHow's marks, as in lm-eval: "Wash. [title] Dry [step] it" -> "Wash. . Dry
    it"."""
    return re.sub(r"\[[^\]]*\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


task = HellaSwag()
