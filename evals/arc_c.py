"""ARC-Challenge: questions of school science, 1,172 in test, 299 in validation, 1,119 in train; three to five options.

    python evals/arc_c.py --model llada-8b --data dare --gen-length 512 --block-length 512 --denoising-steps 512
    python evals/arc_c.py --completions FILE.jsonl --data rows.jsonl

No examples; the prompt is OpenCompass' ARC_c_gen_1e0de5. DARE's number is that of the 295 questions of the validation split
that have four options: --data dare gives them for every --split (lengths there: LLaDA, Dream and LLaDA2 512, SDAR 4,096).
DARE's table: LLaDA-8B-Instruct 87.80 (259 of 295), Dream-7B-Instruct 81.36, SDAR-8B-Chat 86.78, LLaDA2.0-mini 85.76.
lm-eval compares the likelihood of the options' texts on test: 45 to 60 % for the same models, another quantity.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.rows import describe_columns, read_rows
from evals.choices import LETTERS, letter, lettered

HUB = "allenai/ai2_arc"
PRESETS = (
    "dare",
)  # names that `load` takes besides files and hub ids: the validation rows of HUB with four options
VERSION = "OpenCompass ARC_c_gen_1e0de5"  # name of the prompt


def load(split: str, path: str | None = None, limit: int | None = None) -> list[dict]:
    """Examples {"question", "options": 3 to 5, "gold": letter}.

    path: empty for the hub's rows, "dare", a .jsonl or .parquet file, or a hub id, with the columns of HUB. At most
    `limit` rows, always the first. SystemExit with one line on an unknown path or a row of another form.
    """
    if path in PRESETS:
        rows = [
            _problem(row, path)
            for row in read_rows(HUB, "validation", PRESETS, config="ARC-Challenge")
        ]
        return [row for row in rows if len(row["options"]) == 4][:limit]
    rows = read_rows(path or HUB, split, PRESETS, limit, config="ARC-Challenge")
    return [_problem(row, path or HUB) for row in rows]


def prompt(example: dict) -> list[dict]:
    """One user message."""
    return [
        {
            "role": "user",
            "content": f"Question: {example['question']}\n{lettered(example['options'])}\nAnswer:",
        }
    ]


def extract(completion: str, example: dict) -> str | None:
    """The letter of the completion (`choices.letter`), or None."""
    return letter(completion, LETTERS[: len(example["options"])])


def score(completion: str, example: dict) -> float:
    """1.0 if the letter is the gold one, else 0.0. Never raises."""
    return float(extract(completion, example) == example["gold"])


def answer(example: dict, draw: int = 0) -> str:
    """The gold letter."""
    return example["gold"]


def _problem(row: dict, path: str) -> dict:
    """A row of the hub; keys are letters in most rows and 1 to 4 in some, and count by their place."""
    choices = row.get("choices")
    texts, labels = (
        (choices.get("text"), choices.get("label")) if isinstance(choices, dict) else (None, None)
    )
    whole = (
        isinstance(texts, list) and isinstance(labels, list) and 2 <= len(texts) == len(labels) <= 5
    )
    if not whole or row.get("answerKey") not in labels or not isinstance(row.get("question"), str):
        needs = "question, choices.text, choices.label and answerKey, which is one of the labels"
        raise SystemExit(
            f"{path}: cannot read a question from {describe_columns(row)}; needs {needs}"
        )
    return {
        "question": row["question"],
        "options": texts,
        "gold": LETTERS[labels.index(row["answerKey"])],
    }


if __name__ == "__main__":
    from evals.run import main

    main("arc_c")
