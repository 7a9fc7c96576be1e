r"""AIME 2024: 30 problems whose answers are integers from 0 to 999.

    python evals/aime24.py --model sdar-8b --temperature 1.0 --repeats 8
    python evals/aime24.py --completions FILE.jsonl --data test_aime2024.parquet

The metric is exact: the final answer, in practice the last box, as an integer; 033 is 33. One
problem is 3.3 points. Published values are means of eight runs: --repeats 8, at the published
temperature above 0; at 0 all eight are the same. There is no train split.
"""

import sys

sys.path.insert(0, __file__.rpartition("/evals/")[0])
from data.rows import is_of
from evals import main
from evals.examples import one_split, read_examples, user
from evals.gsm8k import INSTRUCTION
from evals.math500 import COLUMNS, extract, problem
from evals.math_grader import number

HUB, HUB_SPLIT = "HuggingFaceH4/aime_2024", "train"  # the hub's name of the only split
VERSION = "OpenCompass aime2024, DARE"  # name of the prompt


def load(split, path=None, limit=None, task="aime24", hub=HUB, hub_split=HUB_SPLIT):
    """The first `limit` examples {"question", "gold": integer as text, "solution": worked, "" if
    unknown}.

    path: empty for the hub's rows, which are "test" only; a .jsonl, .csv or .parquet file, which
    gives the same rows for every split; or a hub id.
    """
    path = path or hub
    split = one_split(task, split, {"test": hub_split}) if is_of(path, hub) else split
    needs = f"{COLUMNS}, with an integer from 0 to 999 as answer"
    return read_examples(_problem, needs, path, split, limit=limit)


def prompt(example):
    """One user message, no examples, as in DARE."""
    return user(f"{example['question']}\n{INSTRUCTION}")


def score(completion, example):
    """1.0 if the final answer is the gold integer, else 0.0. Never raises."""
    found = extract(completion, example) or ""
    return float(number(found.rpartition("=")[2]) == int(example["gold"]))  # x = 204 is 204


def _problem(row):
    example = problem(row)
    value = number(example["gold"])  # one gold of AIME 2025 is 336^\circ
    if value not in range(1000):
        raise ValueError(f"answer {example['gold']!r:.40}")
    return example | {"gold": str(value)}


if __name__ == "__main__":
    main("aime24")
