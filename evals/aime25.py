r"""AIME 2025: 30 problems whose answers are integers from 0 to 999.

    python evals/aime25.py --model sdar-8b --temperature 1.0 --repeats 8
    python evals/aime25.py --completions FILE.jsonl --data test_aime2025.parquet

Metric, repeats and splits as in evals/aime24.py; DARE uses another prompt here.
"""

import sys

sys.path.insert(0, __file__.rpartition("/evals/")[0])
from evals import aime24, main
from evals.examples import user

HUB, HUB_SPLIT = "math-ai/aime25", "test"
VERSION = "OpenCompass aime2025, DARE"  # name of the prompt
INSTRUCTION = r"Remember to put your final answer within \boxed{}."
extract, score = aime24.extract, aime24.score


def load(split, path=None, limit=None):
    """As `load` of evals/aime24.py."""
    examples = aime24.load(split, path, limit, "aime25", HUB, HUB_SPLIT)
    bare = lambda question: question.removesuffix(INSTRUCTION).strip()
    return [example | {"question": bare(example["question"])} for example in examples]


def prompt(example):
    """One user message, no examples, as in DARE."""
    return user(f"{example['question']}\n{INSTRUCTION}")


if __name__ == "__main__":
    main("aime25")
