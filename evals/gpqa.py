"""GPQA diamond: 198 questions of graduate level, four options. Gated: accept its terms on the hub, and publish no rows.

    python evals/gpqa.py --model llada-8b --gen-length 128 --block-length 64 --denoising-steps 64      Idavidrein/gpqa
    python evals/gpqa.py --completions FILE.jsonl --data gpqa_diamond.csv

No examples: the prompt of OpenCompass' gpqa_gen_4baadb, in which SDAR's lmdeploy runs ask (4,096 tokens; DARE's table:
41.40), with its order of options: the right one stands at D, C, B, A in turn, by the number of the row. DARE asks LLaDA
(128 tokens in blocks of 64), Dream and LLaDA2 (128) with five worked questions of the authors and options shuffled by one
generator. Questions are not kept here, so those rows of its table are not reproduced: LLaDA-8B-Instruct 31.82 (63 of 198),
Dream-7B-Instruct 26.77, LLaDA2.0-mini 34.34. One question is half a point, the standard error 3.3 points.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.rows import describe_columns, read_rows
from evals.choices import letter, lettered, one_split

HUB = "Idavidrein/gpqa"
PRESETS = ()  # names that `load` takes besides files and hub ids
VERSION = "OpenCompass gpqa_gen_4baadb"  # name of the prompt
COLUMNS = (
    "Question",
    "Correct Answer",
    "Incorrect Answer 1",
    "Incorrect Answer 2",
    "Incorrect Answer 3",
)
FORMAT = 'Format your response as follows: "The correct answer is (insert answer here)"'


def load(split: str, path: str | None = None, limit: int | None = None) -> list[dict]:
    """Examples {"question", "options": 4, "gold": letter}; only split "test", which the hub calls train.

    path: empty for the hub's rows, or a .jsonl, .csv or .parquet file or hub id with COLUMNS. At most `limit` rows, always
    the first. SystemExit with one line on an unknown path or a row of another form.
    """
    rows = read_rows(
        path or HUB,
        one_split("gpqa", split, {"test": "train"}),
        PRESETS,
        limit,
        config="gpqa_diamond",
    )
    examples = []
    for number, row in enumerate(rows, 1):
        question, *texts = (row.get(name) for name in COLUMNS)
        if not all(isinstance(text, str) and text.strip() for text in (question, *texts)):
            needs = ", ".join(COLUMNS)
            raise SystemExit(
                f"{path or HUB} row {number}: cannot read a question from {describe_columns(row)}; needs {needs}"
            )
        first = number % 4  # the options go round: B C D A in row 1, then C D A B
        examples.append(
            {"question": question, "options": texts[first:] + texts[:first], "gold": "ADCB"[first]}
        )
    return examples


def prompt(example: dict) -> list[dict]:
    """One user message."""
    options = lettered(example["options"], "({}){}")
    content = f"What is the correct answer to this question: {example['question']}\nChoices:\n{options}\n{FORMAT}"
    return [{"role": "user", "content": content}]


def extract(completion: str, example: dict) -> str | None:
    """The letter of the completion (`choices.letter`), or None."""
    return letter(completion)


def score(completion: str, example: dict) -> float:
    """1.0 if the letter is the gold one, else 0.0. Never raises."""
    return float(extract(completion, example) == example["gold"])


def answer(example: dict, draw: int = 0) -> str:
    """The gold letter as the prompt asks for it."""
    return f"The correct answer is ({example['gold']})"


if __name__ == "__main__":
    from evals.run import main

    main("gpqa")
