"""GPQA diamond: 198 graduate-level questions, four options. Gated: accept its terms on the hub, and
publish no rows.

    python evals/gpqa.py --model llada-8b  Idavidrein/gpqa
    python evals/gpqa.py --completions FILE.jsonl --data gpqa_diamond.csv

Prompt and order of options are those of OpenCompass' gpqa_gen_4baadb (no worked examples; the right
option is D, C, B, A in turn), as in DARE's lmdeploy runs of SDAR (4,096 tokens, 41.40 in its
table). For LLaDA (128 tokens in blocks of 64), Dream and LLaDA2 (128) DARE puts five worked
questions of the authors in front and shuffles the options with one generator. No questions are kept
here, so those numbers are not reproduced: LLaDA-8B-Instruct 31.82 (63 of 198), Dream-7B-Instruct
26.77, LLaDA2.0-mini 34.34. One question is half a point; the standard error is 3.3 points.
"""

import sys

sys.path.insert(0, __file__.rpartition("/evals/")[0])
from evals import choices, main
from evals.choices import lettered
from evals.examples import as_text, one_split, read_examples, user

HUB = "Idavidrein/gpqa"
VERSION = "OpenCompass gpqa_gen_4baadb"  # name of the prompt
COLUMNS = ("Question", "Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)))
FORMAT = 'Format your response as follows: "The correct answer is (insert answer here)"'
extract, score = choices.extract, choices.score


def load(split, path=None, limit=None):
    """The first `limit` examples {"question", "options": 4, "gold": letter}; only split "test",
    which the hub calls train.

    path: empty for the hub's rows, or a .jsonl, .csv or .parquet file or hub id with COLUMNS.
    """
    split = one_split("gpqa", split, {"test": "train"})
    examples = read_examples(
        _problem, ", ".join(COLUMNS), path or HUB, split, (), limit, "gpqa_diamond"
    )
    for number, example in enumerate(examples, 1):
        first = number % 4  # the options rotate: B C D A in row 1, then C D A B
        example["options"] = example["options"][first:] + example["options"][:first]
        example["gold"] = "ADCB"[first]
    return examples


def prompt(example):
    """One user message."""
    question = f"What is the correct answer to this question: {example['question']}"
    content = f"{question}\nChoices:\n{lettered(example['options'], '({}){}')}\n{FORMAT}"
    return user(content)


def answer(example, draw=0):
    """The gold letter as the prompt asks for it."""
    return f"The correct answer is ({example['gold']})"


def _problem(row):
    question, *options = (as_text(row[name]) for name in COLUMNS)
    return {"question": question, "options": options}


if __name__ == "__main__":
    main("gpqa")
