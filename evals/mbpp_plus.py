"""MBPP+: 378 tasks of MBPP with about a hundred inputs each (EvalPlus).

    python evals/mbpp_plus.py --model llada-8b --data MbppPlus-v0.2.0.jsonl.gz
    python evals/mbpp_plus.py --completions FILE.jsonl --data MbppPlus-v0.2.0.jsonl.gz

The prompt is EvalPlus' own, a docstring with the first test; the words that EvalPlus puts in front
of the answer are left out. Completions are read as for HumanEval.
"""

import sys

sys.path.insert(0, __file__.rpartition("/evals/")[0])
from evals import evalplus, humaneval, humaneval_plus, main
from evals.examples import read_examples, user

VERSION = "EvalPlus"  # name of the prompt
INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown "
    "code block:"
)
extract, job, answer = humaneval.extract, humaneval_plus.job, humaneval.answer
score, score_batch = humaneval_plus.score, humaneval_plus.score_batch


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
