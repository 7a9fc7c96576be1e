"""ARC-Challenge: school science questions with three to five options; 1,172 in test, 299 in
validation, 1,119 in train.

    python evals/arc_c.py --model llada-8b --data dare
    python evals/arc_c.py --completions FILE.jsonl --data rows.jsonl

The prompt is OpenCompass' ARC_c_gen_1e0de5, without worked examples. DARE's number is for the 295
validation questions that have four options: --data dare gives these for every --split (lengths
there: LLaDA, Dream and LLaDA2 512, SDAR 4,096). DARE's table: LLaDA-8B-Instruct 87.80 (259 of 295),
Dream-7B-Instruct 81.36, SDAR-8B-Chat 86.78, LLaDA2.0-mini 85.76. lm-eval compares the likelihoods
of the options on test and gets 45 to 60 % for the same models: a different quantity.
"""

import sys

sys.path.insert(0, __file__.rpartition("/evals/")[0])
from evals import main
from evals.choices import LETTERS, answer, extract, lettered, score  # noqa: F401
from evals.examples import read_examples, user

HUB, CONFIG = "allenai/ai2_arc", "ARC-Challenge"
PRESETS = ("dare",)  # names that `load` takes besides files and hub ids
VERSION = "OpenCompass ARC_c_gen_1e0de5"  # name of the prompt
NEEDS = "question, choices.text, choices.label and answerKey, which is one of the labels"


def load(split, path=None, limit=None):
    """The first `limit` examples {"question", "options": 3 to 5, "gold": letter}.

    path: empty for the hub's rows, "dare", or a .jsonl or .parquet file or hub id with HUB's
    columns.
    """
    if path in PRESETS:
        examples = read_examples(_problem, NEEDS, HUB, "validation", config=CONFIG)
        return [example for example in examples if len(example["options"]) == 4][:limit]
    return read_examples(_problem, NEEDS, path or HUB, split, PRESETS, limit, CONFIG)


def prompt(example):
    """One user message."""
    content = f"Question: {example['question']}\n{lettered(example['options'])}\nAnswer:"
    return user(content)


def _problem(row):
    options, labels = row["choices"]["text"], row["choices"]["label"]
    if not 2 <= len(options) == len(labels) <= 5:
        raise ValueError("not two to five labelled options")
    # some rows label their options 1 to 4: only the position counts
    gold = LETTERS[labels.index(row["answerKey"])]
    return {"question": row["question"], "options": options, "gold": gold}


if __name__ == "__main__":
    main("arc_c")
