"""MBPP+: 378 tasks of MBPP with about a hundred inputs each (EvalPlus).

    python evals/mbpp_plus.py --model llada-8b --data MbppPlus-v0.2.0.jsonl.gz
    python evals/mbpp_plus.py --completions FILE.jsonl --data MbppPlus-v0.2.0.jsonl.gz

The prompt is EvalPlus' own, a docstring with the first test; the words that EvalPlus puts in front
of the answer are left out. Completions are read as for HumanEval.
"""

import sys

sys.path.insert(0, __file__.rpartition("/evals/")[0])
from evals import evalplus, main
from evals.examples import read_examples, user
from evals.humaneval import answer, extract, job, score, score_batch  # noqa: F401

VERSION = "EvalPlus"  # name of the prompt
INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown "
    "code block:"
)


def load(split, path=None, limit=None):
    """As humaneval.load, of EvalPlus' file."""
    if not path:
        raise SystemExit("mbpp_plus: name EvalPlus' file, MbppPlus-v0.2.0.jsonl.gz, with --data")
    return read_examples(evalplus.example_of, evalplus.COLUMNS, path, split, limit=limit)


def prompt(example):
    """One user message, EvalPlus' to the byte."""
    return user(f"{INSTRUCTION}\n```\n{example['prompt'].strip()}\n```\n")


if __name__ == "__main__":
    main("mbpp_plus")
