"""MBPP: write a Python function from one sentence and three tests; right if those tests pass.

    python evals/mbpp.py --model llada-8b --gen-length 512 --block-length 32 --denoising-steps 32          DARE's setting
    python evals/mbpp.py --completions FILE.jsonl --data mbpp.jsonl

1.0 if the tests pass within 10 seconds in evals/sandbox.py, else 0.0: mode "proxy", or "nonce" for the few problems whose
tests make objects of the program's own classes or use its imports: 367 of test, some of train.
Splits are the paper's: tasks 11-510 are test, 511-600 validation, 601-974 train; also for a file whose rows have task_id.
DARE leaves out the set-up code, so nobody solves 367 there, and its RL reward keeps the quotes around an answer.
"""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.rows import describe_columns, read_rows
from evals.programs import code_of, defines, names_of, pass_or_fail, unquoted
from evals.sandbox import Job

HUB = "google-research-datasets/mbpp"
PRESETS = ()
SPLITS = {"test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}
TIMEOUT = 10.0  # seconds of wall time for the three tests; the slowest reference takes 2
VERSION = "OpenCompass mbpp_gen_830460"  # name of the prompt
TASK = "You are an expert Python programmer, and here is your task: {text} Your code should pass these tests:\n\n {tests}  \n"
COLUMNS = "text (or prompt), code, test_list (test_setup_code, test_imports); or prompt and reward_model.ground_truth (DARE)"
# The tasks 2, 3 and 4 as OpenCompass' mbpp_gen_830460 shows them, to the byte of DARE's file (a test).
TASK_2 = """Write a function to find the similar elements from the given two tuple lists.
 assert similar_elements((3, 4, 5, 6),(5, 7, 4, 10)) == (4, 5)
assert similar_elements((1, 2, 3, 4),(5, 4, 3, 7)) == (3, 4)\x20
assert similar_elements((11, 12, 14, 13),(17, 15, 14, 13)) == (13, 14)
def similar_elements(test_tup1, test_tup2):\r
  res = tuple(set(test_tup1) & set(test_tup2))\r
  return (res)"""
TASK_3 = """Write a python function to identify non-prime numbers.
 assert is_not_prime(2) == False\x20
assert is_not_prime(10) == True\x20
assert is_not_prime(35) == True
import math\r
def is_not_prime(n):\r
    result = False\r
    for i in range(2,int(math.sqrt(n)) + 1):\r
        if n % i == 0:\r
            result = True\r
    return result"""
TASK_4 = """Write a function to find the largest integers from a given list of numbers using heap queue algorithm.
 assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],3)==[85, 75, 65]\x20
assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],2)==[85, 75]\x20
assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],5)==[85, 75, 65, 58, 35]
import heapq as hq\r
def heap_queue_largest(nums,n):\r
  largest_nums = hq.nlargest(n, nums)\r
  return largest_nums"""
SHOTS = []  # messages
for shown in (TASK_2, TASK_3, TASK_4):
    text, *tests, code = shown.split("\n", 4)
    task = TASK.format(text=text, tests="\n".join(tests)[1:]).replace("  \n", " \n")
    SHOTS += [
        {"role": "user", "content": task},
        {"role": "assistant", "content": f"[BEGIN]\n '{code}' \n[DONE] \n\n "},
    ]


def load(split: str, path: str | None = None, limit: int | None = None) -> list[dict]:
    """Examples {"text", "tests": list, "setup", "solution": "" if unknown}, at most `limit`, always the first.

    path: empty for the hub's rows; a .jsonl, .jsonl.gz, .csv or .parquet file; or a hub id. SystemExit with one line on an
    unknown path or a row of another form (COLUMNS).
    """
    path = path or HUB
    rows = read_rows(path, split, PRESETS, config="full" if path == HUB else None)
    examples = []
    for number, row in enumerate(rows, 1):
        problem = _problem(row)
        if problem is None:
            raise SystemExit(
                f"{path} row {number}: cannot read a problem from {describe_columns(row)}; needs {COLUMNS}"
            )
        if not str(row.get("task_id", "")).isdigit() or int(row["task_id"]) in SPLITS[split]:
            examples.append(problem)
    return examples[:limit]


def prompt(example: dict) -> list[dict]:
    """Three solved tasks as chat turns, then the task: DARE's file but for its last turn, an answer that is opened."""
    task = TASK.format(text=example["text"], tests="\n".join(example["tests"]))
    return [*SHOTS, {"role": "user", "content": task}]


def extract(completion: str, example: dict) -> str | None:
    r"""The code of a completion, not checked; None where there is none.

    The first of these that defines a function of the tests: what stands from the last [BEGIN] to the next [DONE] or the end,
    without its quotes; the same of the text in front of the first [DONE]; in each, first the fenced blocks
    (evals/programs.py: code_of). \_ is _.
    """
    text = completion.replace("\\_", "_")
    names = names_of(example)
    begun = text.rpartition("[BEGIN]")[2].partition("[DONE]")[0]
    parts = begun, text.partition("[DONE]")[0], text
    codes = [code for part in parts if (code := code_of(unquoted(part), names))]
    return next((code for code in codes if defines(code, names)), codes[0] if codes else None)


def job(completion: str, example: dict) -> Job | None:
    """The program of a completion with its tests, for the sandbox; None where it is empty."""
    code, names = extract(completion, example), names_of(example)
    if code is None:
        return None
    own_objects = len(names) > 1 or any(name in example["setup"] for name in names)
    tests = "\n".join([example["setup"], *example["tests"]])
    return Job(code, tests, tuple(names), timeout=TIMEOUT, mode="nonce" if own_objects else "proxy")


def score(completion: str, example: dict) -> float:
    """1.0 if the tests pass, else 0.0."""
    return score_batch([completion], [example])[0]


def score_batch(completions: list[str], examples: list[dict]) -> list[float]:
    """`score` of each, on all cores."""
    return pass_or_fail(
        [
            job(completion, example)
            for completion, example in zip(completions, examples, strict=True)
        ]
    )


def answer(example: dict, draw: int = 0) -> str:
    """The reference solution in the form of the shown tasks, one for every draw. SystemExit where the rows have none."""
    if not example["solution"]:
        raise SystemExit(f"mbpp: these rows have no solutions; take those of {HUB}, or mbpp.jsonl")
    return f"[BEGIN]\n '{example['solution']}' \n[DONE]"


def _problem(row: dict) -> dict | None:
    """The example of a row in one of the formats of COLUMNS; None where it fits none of them."""
    reward_model, text, setup = (
        row.get("reward_model"),
        row.get("text"),
        row.get("test_setup_code") or "",
    )
    if isinstance(reward_model, dict) and isinstance(row.get("prompt"), list):
        users = [
            message.get("content") for message in row["prompt"] if message.get("role") == "user"
        ] or [""]
        match = re.fullmatch(
            re.escape(TASK).replace(r"\{text\}", "(.*)").replace(r"\{tests\}", ".*"),
            str(users[-1]),
            re.S,
        )
        try:
            tests = json.loads(reward_model.get("ground_truth"))
        except (TypeError, ValueError):
            return None
        text = match and match[1]
    else:
        text, tests = text or row.get("prompt"), row.get("test_list")
        setup = "\n".join([*(row.get("test_imports") or []), setup]).strip("\n")
    good = (
        isinstance(text, str)
        and isinstance(tests, list)
        and tests
        and all(isinstance(test, str) for test in tests)
    )
    return (
        {"text": text, "tests": tests, "setup": setup, "solution": row.get("code") or ""}
        if good
        else None
    )


if __name__ == "__main__":
    from evals.run import main

    main("mbpp")
