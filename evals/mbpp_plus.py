"""MBPP+: 378 tasks of MBPP with about a hundred inputs each (EvalPlus).

    python evals/mbpp_plus.py --model llada-8b  evalplus/mbppplus
    python evals/mbpp_plus.py --model llada-8b --data MbppPlus-v0.2.0.jsonl.gz
    python evals/mbpp_plus.py --completions FILE.jsonl --data MbppPlus-v0.2.0.jsonl.gz

The prompt is EvalPlus' own, a docstring with the first test; the words that EvalPlus puts in front
of the answer are left out. Completions are read as for HumanEval.
"""

import sys

sys.path.insert(0, __file__.rpartition("/evals/")[0])
from evals import evalplus, humaneval, humaneval_plus, main, mbpp
from evals.examples import user

HUB = "evalplus/mbppplus"
VERSION = "EvalPlus"  # name of the prompt
INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown "
    "code block:"
)
COLUMNS = f"prompt, code, test_imports, test_list and test; or {evalplus.COLUMNS} (EvalPlus)"
extract, job, answer = humaneval.extract, humaneval_plus.job, humaneval.answer
score, score_batch = humaneval_plus.score, humaneval_plus.score_batch


def load(split, path=None, limit=None):
    """As humaneval.load, of HUB."""
    return humaneval.load(split, path, limit, HUB, _problem, COLUMNS)


def prompt(example):
    """One user message, EvalPlus' to the byte."""
    return user(f"{INSTRUCTION}\n```\n{example['prompt'].strip()}\n```\n")


def _problem(row):
    if "plus_input" in row:
        return evalplus.example_of(row)
    tests, setup = row["test_list"], "\n".join(row["test_imports"])
    [name] = mbpp.names_of({"setup": setup, "tests": tests})
    text = f'"""\n{row["prompt"]}\n{tests[0]}\n"""\n'
    example = {"prompt": text, "entry_point": name, "solution": f"{row['code']}\n"}
    return example | {"tests": f"{setup}\n{row['test']}"}


if __name__ == "__main__":
    main("mbpp_plus")
