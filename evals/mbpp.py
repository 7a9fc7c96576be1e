"""MBPP: write a Python function from one sentence and three tests; right if those tests pass.

    python evals/mbpp.py --model llada-8b  DARE's setting
    python evals/mbpp.py --completions FILE.jsonl --data mbpp.jsonl

1.0 if the tests pass within 10 seconds in evals/sandbox.py, else 0.0. Splits are the paper's: tasks
   11-510 are test, 511-600 validation, 601-974 train, also in a file whose rows have task_id. DARE
   leaves out the set-up code, so that nobody solves 367 there, and its RL reward keeps the quotes
   around an answer.
"""

if __name__ == "__main__":
    import command  # noqa: F401

import ast
import builtins
import json
import re
import sys

from data.rows import is_of, read_rows
from evals.examples import as_text, chat_row, parse_rows, user, worked
from evals.programs import code_of, passed
from evals.sandbox import Job

HUB = "google-research-datasets/mbpp"
SPLITS = {"test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}
TIMEOUT = 10.0  # seconds of wall time for the three tests; the slowest reference takes 2
MODULES = "import collections, heapq, itertools, math, re, sys"  # that tests may use
TASK = (
    "You are an expert Python programmer, and here is your task: {text} Your code should pass "
    "these tests:\n\n {tests}  \n"
)
COLUMNS = (
    "text, code and test_list (test_setup_code), or prompt and reward_model.ground_truth (DARE)"
)
# tasks 2, 3 and 4 as OpenCompass' mbpp_gen_830460 shows them, to the byte of DARE's file
SHOWN = """\
You are an expert Python programmer, and here is your task: Write a function to find the similar \
elements from the given two tuple lists. Your code should pass these tests:

 assert similar_elements((3, 4, 5, 6),(5, 7, 4, 10)) == (4, 5)
assert similar_elements((1, 2, 3, 4),(5, 4, 3, 7)) == (3, 4)\x20
assert similar_elements((11, 12, 14, 13),(17, 15, 14, 13)) == (13, 14)\x20
[BEGIN]
 'def similar_elements(test_tup1, test_tup2):\r
  res = tuple(set(test_tup1) & set(test_tup2))\r
  return (res)'\x20
[DONE]\x20

 You are an expert Python programmer, and here is your task: Write a python function to identify \
non-prime numbers. Your code should pass these tests:

 assert is_not_prime(2) == False\x20
assert is_not_prime(10) == True\x20
assert is_not_prime(35) == True\x20
[BEGIN]
 'import math\r
def is_not_prime(n):\r
    result = False\r
    for i in range(2,int(math.sqrt(n)) + 1):\r
        if n % i == 0:\r
            result = True\r
    return result'\x20
[DONE]\x20

 You are an expert Python programmer, and here is your task: Write a function to find the largest \
integers from a given list of numbers using heap queue algorithm. Your code should pass these tests:

 assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],3)==[85, 75, 65]\x20
assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],2)==[85, 75]\x20
assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],5)==[85, 75, 65, 58, 35]\x20
[BEGIN]
 'import heapq as hq\r
def heap_queue_largest(nums,n):\r
  largest_nums = hq.nlargest(n, nums)\r
  return largest_nums'\x20
[DONE]\x20

 """
# (question, answer)
SHOTS = re.findall(r"(You are.*?)(\[BEGIN\].*?\[DONE\] \n\n )", SHOWN, re.DOTALL)


def load(split, path=None, limit=None):
    """The first `limit` examples {"text", "tests": list, "setup", "solution": "" if unknown}.

    path: empty for the hub's rows; a .jsonl, .jsonl.gz, .csv or .parquet file; or a hub id.
    """
    path = path or HUB
    rows = read_rows(path, split, config="full" if is_of(path, HUB) else None)
    ours = lambda number: not number.isdigit() or int(number) in SPLITS[split]
    rows = [row for row in rows if ours(str(row.get("task_id", "")))]
    return parse_rows(_problem, COLUMNS, rows[:limit])


def prompt(example):
    """Three solved tasks as chat turns, then the task; DARE's file also opens the last answer."""
    task = TASK.format(text=example["text"], tests="\n".join(example["tests"]))
    return user(task, SHOTS)


def extract(completion, example):
    r"""The code of a completion, not checked; None if there is none.

    It is in the text before the first [DONE], from the last [BEGIN] there, without a pair of single
    quotes around it, of which the last may be missing (evals/programs.py: code_of). \_ is _.
    """
    text = completion.replace("\\_", "_").partition("[DONE]")[0].rpartition("[BEGIN]")[2]
    if re.match(r"\s*'(?!')", text):
        text = text.strip()[1:].removesuffix("'")
    return code_of(text, names_of(example))


def names_of(example):
    """What a program must define: names that the set-up code and the tests use and neither they nor
    Python and its library define."""
    nodes = [*ast.walk(ast.parse(_tests(example)))]
    names = {(node.id, type(node.ctx)) for node in nodes if isinstance(node, ast.Name)}
    # of functions, classes, imports, arguments
    own = {getattr(node, key, None) for node in nodes for key in ("name", "asname", "arg")}
    own |= {name for name, context in names if context is ast.Store}
    used = {name for name, _ in names} - own
    # task 126 asks for a function sum
    return sorted(used - {*dir(builtins), *sys.stdlib_module_names}) or sorted(used)


def job(completion, example):
    """The program of a completion and its tests; None if it is empty."""
    code, names = extract(completion, example), tuple(names_of(example))
    return code and Job(code, _tests(example), names, MODULES, TIMEOUT)


def score(completion, example):
    """Whether the program passes its tests."""
    return passed(job(completion, example))


def answer(example, draw=0):
    """The reference solution in the form of the solved tasks. SystemExit if unknown."""
    return f"[BEGIN]\n '{worked(example)}' \n[DONE]"


def _tests(example):
    return "\n".join([example["setup"], *example["tests"]])


def _problem(row):
    if chat := chat_row(row):
        asked = row["prompt"][2 * len(SHOTS)]["content"]
        text = asked.partition(" task: ")[2].rpartition(" Your code should pass")[0]
        tests = json.loads(chat[1])
    else:
        text, tests = row["text"], row["test_list"]
    if not isinstance(tests, list) or not tests:
        raise ValueError("no list of tests")
    setup, solution = row.get("test_setup_code") or "", row.get("code") or ""
    return {"text": text, "tests": [*map(as_text, tests)], "setup": setup, "solution": solution}
