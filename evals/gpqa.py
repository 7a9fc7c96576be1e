"""GPQA diamond: 198 graduate-level questions, four options. Gated: accept its terms on the hub, and
publish no rows.

    python evals/gpqa.py --model llada-8b  Idavidrein/gpqa
    python evals/gpqa.py --model llada-8b --data gpqa_diamond.csv@gpqa_fewshot_gen.py
    python evals/gpqa.py --completions FILE.jsonl --data gpqa_diamond.csv

Prompt and order of options are those of OpenCompass' gpqa_gen_4baadb (no worked examples; the right
option is D, C, B, A in turn), as in DARE's lmdeploy runs of SDAR (4,096 tokens, 41.40 in its
table). For LLaDA (128 tokens in blocks of 64), Dream and LLaDA2 (128) DARE puts five questions of
the authors in front and shuffles the options: LLaDA-8B-Instruct 31.82 (63 of 198),
Dream-7B-Instruct 26.77, LLaDA2.0-mini 34.34. The authors ask not to publish their questions, so the
five are read from the file that has them, opencompass/configs/datasets/gpqa/gpqa_fewshot_gen.py of
ML-GSAI/LLaDA and yjyddq/DARE. One question is half a point; the standard error is 3.3 points.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, __file__.rpartition("/evals/")[0])
from random import Random

from evals import main
from evals.choices import LETTERS, extract, lettered, score  # noqa: F401
from evals.examples import as_text, one_split, read_examples, user

HUB = "Idavidrein/gpqa"
# name of the prompt, by style
VERSION = {"": "OpenCompass gpqa_gen_4baadb", "shown": "OpenCompass gpqa_fewshot_gen (DARE)"}
COLUMNS = ("Question", "Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)))
FORMAT = 'Format your response as follows: "The correct answer is (insert answer here)"'
SHOWN_FORMAT = (
    "When you're ready to answer, please use the format 'The correct answer is (X)' where X is the "
    "correct letter choice from 'ABCD'."
)


def load(split, path=None, limit=None):
    """The first `limit` examples {"question", "options": 4, "gold": letter}, and with worked
    questions "style" and "shots": their text; only split "test", which the hub calls train.

    path: empty for the hub's rows, or a .jsonl, .csv or .parquet file or hub id with COLUMNS; with
    @FILE.py behind it DARE's prompt, whose five worked questions are read from that file.
    """
    split = one_split("gpqa", split, {"test": "train"})
    path, _, file = path.rpartition("@") if (path or "").endswith(".py") else (path, "", "")
    more = {"style": "shown", "shots": _worked(file)} if file else {}
    needs, shuffle = ", ".join(COLUMNS), Random(0).shuffle
    examples = read_examples(_problem, needs, path or HUB, split, (), limit, "gpqa_diamond")
    for number, example in enumerate(examples, 1):
        options = example["options"]
        right, first = options[0], number % 4
        if file:
            shuffle(options)
        else:  # the options rotate: B C D A in row 1, then C D A B
            options[:] = options[first:] + options[:first]
        example |= {"gold": LETTERS[options.index(right)]} | more
    return examples


def prompt(example):
    """One user message."""
    question, options = example["question"], example["options"]
    if example.get("style") == "shown":
        question = f"{example['shots']}\nQuestion:\n{question}\nChoices:\n{lettered(options)}"
        return user(f"{question}\n{SHOWN_FORMAT}")
    question = f"What is the correct answer to this question: {question}"
    return user(f"{question}\nChoices:\n{lettered(options, '({}){}')}\n{FORMAT}")


def answer(example, draw=0):
    """The gold letter as the prompt asks for it."""
    return f"The correct answer is ({example['gold']})"


def _problem(row):
    question, *options = (as_text(row[name]) for name in COLUMNS)
    return {"question": question, "options": options}


def _worked(path):
    """The text `five_shot_prompt` in a configuration of OpenCompass, which is not run. SystemExit
    if there is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return re.search(r'five_shot_prompt = """(.*?)"""', text, re.DOTALL)[1]
    except (OSError, TypeError) as error:
        raise SystemExit(f'--data @{path}: no five_shot_prompt = """...""" there') from error


if __name__ == "__main__":
    main("gpqa")
