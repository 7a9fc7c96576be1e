"""MBPP+: 378 tasks of MBPP with about a hundred inputs each (EvalPlus).

    python evals/mbpp_plus.py --model llada-8b  evalplus/mbppplus
    python evals/mbpp_plus.py --completions FILE.jsonl --data rows.jsonl

The prompt is EvalPlus' own, a docstring with the first test; the words that EvalPlus puts in front
of the answer are left out. Completions are read as for HumanEval. The hub's tests of three tasks
(check_str, text_match_three, text_starta_endb) compare and assert nothing: that is mended here.
"""

if __name__ == "__main__":
    import command  # noqa: F401

import re

from evals.examples import read_examples, user
from evals.humaneval import answer, extract, job, score  # noqa: F401
from evals.humaneval_plus import TIMEOUT

HUB = "evalplus/mbppplus"
COLUMNS = "prompt, code, test_imports, test_list and test"
INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown "
    "code block:"
)
COMPARED = "exact_match = exp == (out is not None)\n"


def load(split, path=None, limit=None):
    """As humaneval.load, of HUB."""
    return read_examples(_problem, COLUMNS, path, split, limit, HUB)


def prompt(example):
    """One user message, EvalPlus' to the byte."""
    return user(f"{INSTRUCTION}\n```\n{example['prompt'].strip()}\n```\n")


def _problem(row):
    tests = row["test"].replace(COMPARED, f"{COMPARED}    assert exact_match\n")
    return {
        "prompt": f'"""\n{row["prompt"]}\n{row["test_list"][0]}\n"""\n',
        "entry_point": re.search(r"(\w+)\(\*inp\)", tests)[1],
        "tests": "\n".join([*row["test_imports"], tests]),
        "solution": f"{row['code']}\n",
        "seconds": TIMEOUT,
    }
