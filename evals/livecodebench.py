r"""LiveCodeBench, code generation: programming contest problems, by release and date; right if all
tests pass.

    python evals/livecodebench.py --model sdar-8b  all 1,055, release_v6
    python evals/livecodebench.py --model sdar-8b --data release_v5@2024-08-01..2025-01-31
    python evals/livecodebench.py --completions FILE.jsonl --data test6.jsonl

pass@1: 1.0 if every public and private test passes in evals/sandbox.py, else 0.0.
LeetCode's tests call a method and compare values; the others give stdin and compare stdout line by
line, and lines that differ as numbers. Prompt and rules are those of LiveCodeBench's own runner (6
seconds per test), except that a program that reads stdin runs as a new process for every test; the
runner calls it as a function with a fake stdin. There is no train split. LLaDA2.0-mini's report:
31.50, for a window of dates that it does not give.
"""

if __name__ == "__main__":
    import command  # noqa: F401

import base64
import json
import pickletools
import re
import zlib
from functools import partial
from pathlib import Path

from data.rows import Row, objects, one_line, reach_hub
from evals.examples import as_text, one_split, parse_rows
from evals.programs import code_of, passed
from evals.sandbox import Job

HUB = "livecodebench/code_generation_lite"
# files of HUB: each release has those of the releases before it; v3 is what the third one added
RELEASES = {f"release_v{n}": range(1, n + 1) for n in range(1, 7)}
RELEASES |= {f"v{n}": (n,) for n in range(1, 7)}
PRESETS = (*RELEASES, "release_v6@2024-08-01..2025-01-31")
RELEASES[HUB] = RELEASES[""] = RELEASES["release_v6"]
WINDOW = re.compile(r"(.*?)(?:@(\d{4}-\d\d-\d\d)?\.\.(\d{4}-\d\d-\d\d)?)?")
COLUMNS = (
    "question_content, starter_code, contest_date, public_test_cases, private_test_cases and "
    "metadata"
)
TIMEOUT = 6  # seconds per test; (TIMEOUT + 1) * tests + 5 for all of them
MEMORY = 4 << 30  # bytes

SYSTEM = (
    "You are an expert Python programmer. You will be given a question (problem specification) "
    "and will generate a correct Python program that matches the specification and passes all "
    "tests."
)
WITH_STARTER = (
    "You will use the following starter code to write the solution to the problem and enclose "
    "your code within delimiters."
)
WITHOUT_STARTER = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly "
    "test on the sample inputs). Enclose your code within delimiters as follows. Ensure that when "
    "the python program runs, it reads the inputs, runs the algorithm and writes output to STDOUT."
)

# the runner's imports in front of every program: starter code uses names such as List without
# importing them
IMPORTS = """\
from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from statistics import *
from itertools import *
from functools import *
from operator import *
from io import *
from sys import *
from json import *
from builtins import *
from typing import *
import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics, \
itertools, functools, operator, io, sys, json
sys.setrecursionlimit(50000)
"""

# runs in the program's process; its names are unlikely in a program
FUNCTION = """
exec({imports!r})
exec(compile({code!r}, "<solution>", "exec"), globals())
def _judged_call(*arguments):
    owner = Solution() if "class Solution" in {code!r} else None
    function = globals()[{name!r}] if owner is None else getattr(owner, {name!r})
    return function(*arguments)
"""
PROGRAM = """
import os as _os, select as _select, sys as _sys, time as _time
def _judged_call(stdin):
    "stdout of the program, in a process of its own that reads stdin"
    to_read, feed = _os.pipe()
    output, to_write = _os.pipe()
    for seconds in range(5, -1, -1):  # other programs may have all processes for a while
        try:
            pid = _os.fork()
            break
        except BlockingIOError:
            if not seconds:
                raise
            _time.sleep(1)
    if not pid:
        status = 1
        try:
            _os.dup2(to_read, 0)
            _os.dup2(to_write, 1)
            _os.closerange(3, 64)
            _sys.stdin, _sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
            _sys.stdout.reconfigure(newline="\\n")
            space = {{"__name__": "__main__", "__builtins__": __builtins__}}
            try:
                exec({imports!r}, space)
                exec(compile({code!r}, "<solution>", "exec"), space)
            except SystemExit:
                pass
            import atexit, threading
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
            atexit._run_exitfuncs()
            _sys.stdout.flush()
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
            _sys.stderr.flush()
        finally:
            _os._exit(status)
    _os.close(to_read)
    _os.close(to_write)
    _os.set_blocking(feed, False)
    rest, parts, size = memoryview(stdin.encode()), [], 0
    poll = _select.poll()
    poll.register(feed, _select.POLLOUT)
    poll.register(output, _select.POLLIN)
    while output is not None:
        for fd, event in poll.poll():
            if fd == feed:
                try:
                    rest = rest[_os.write(feed, rest[: 1 << 16]) :]
                except BrokenPipeError:
                    rest = rest[:0]
                if not rest:
                    poll.unregister(feed)
                    _os.close(feed)
            elif part := _os.read(output, 1 << 16):
                parts.append(part)
                size += len(part)
                if size > 8 << 20:
                    raise RuntimeError("more than 8 MiB on stdout")
            else:
                poll.unregister(output)
                _os.close(output)
                output = None
    status = _os.waitstatus_to_exitcode(_os.waitpid(pid, 0)[1])
    if status:
        raise RuntimeError(f"the program ended with {{status}}")
    return b"".join(parts).decode(errors="replace")
"""

# runs in the process of the tests
JUDGE = """
import json, signal
from decimal import Decimal, InvalidOperation

def late(*_):
    raise TimeoutError("no answer within {timeout} seconds")

def lines(text):
    return [line.strip() for line in text.strip().split("\\n")]

def same_line(got, want):
    if got == want:
        return True
    try:
        return [Decimal(word) for word in got.split()] == [Decimal(word) for word in want.split()]
    except InvalidOperation:
        return False

def same(got, want):
    if {functional}:
        return (list(got) if isinstance(got, tuple) else got) == json.loads(want)
    got, want = lines(got), lines(want)
    return len(got) == len(want) and all(map(same_line, got, want))

signal.signal(signal.SIGALRM, late)
for number, (given, want) in enumerate(json.loads({tests!r})):
    arguments = [json.loads(line) for line in given.split("\\n")] if {functional} else [given]
    signal.setitimer(signal.ITIMER_REAL, {timeout})
    got = _judged_call(*arguments)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert same(got, want), "test %d" % number
"""


def load(split, path=None, limit=None):
    """The first `limit` examples {"question", "starter": code or "", "name": method, "" for stdin,
    "public": tests, "private": packed tests, or their place (file, offset)}.

    path: empty for release_v6 of HUB; another release, release_v1 to release_v6, or what one added,
    v1 to v6; or a .jsonl file with HUB's columns, such as its test6.jsonl. With @FIRST..LAST behind
    it only the contests of these days, both included; either day may be left out. Private tests
    take gigabytes, so they are read when their program is judged.
    """
    source, first, last = WINDOW.fullmatch(path or "").groups("")
    examples = []
    for name in files_of(source, split):
        with open(name, "rb") as file:
            rows = objects(name, iter(file.readline, b""))
            for number, (line, row) in enumerate(rows, 1):
                [example] = parse_rows(_problem, COLUMNS, [Row(f"{name} row {number}", row)])
                if first <= example.pop("date") <= (last or "9999"):
                    examples.append(example | {"private": (name, file.tell() - len(line))})
                if len(examples) == limit:
                    return examples
    return examples


def files_of(path, split):
    """The files of a release, or the one at `path`."""
    if path not in RELEASES:
        if not Path(path).is_file():
            known = ", ".join(PRESETS)
            raise SystemExit(f"{path}: no such preset or file; presets: {known}")
        return [path]
    import huggingface_hub  # here, because scoring a file does not need it

    one_split(HUB, split, {"test": "test"})
    reach_hub()
    fetch = partial(huggingface_hub.hf_hub_download, HUB, repo_type="dataset")
    try:
        return [fetch(f"test{n if n > 1 else ''}.jsonl") for n in RELEASES[path]]
    except Exception as error:  # no network, no such file; httpx has errors of its own
        raise SystemExit(
            f"{path}: {HUB} is not available from the hub ({one_line(error)}); "
            "--data FILE.jsonl reads a copy"
        ) from error


def prompt(example):
    """A system and a user message, as LiveCodeBench's runner asks chat models. OpenCompass has no
    system message."""
    starter = example["starter"]
    ask = WITH_STARTER if starter else WITHOUT_STARTER
    ask = f"{ask}\n```python\n{starter or '# YOUR CODE HERE'}\n```"
    question = f"### Question:\n{example['question']}\n\n### Format: {ask}"
    content = f"{question}\n\n### Answer: (use the provided format with backticks)\n\n"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]


def extract(completion, example):
    """The program of a completion, not checked (evals/programs.py: code_of); None if there is none.
    The runner takes the last block, and nothing if it is not closed."""
    return code_of(completion, ["Solution", example["name"]] if example["name"] else [])


def job(completion, example):
    """The program of a completion and its tests; None if it is empty."""
    code, name = extract(completion, example), example["name"]
    if code is None:
        return None
    code = (FUNCTION if name else PROGRAM).format(code=code, name=name, imports=IMPORTS)
    tests = tests_of(example)
    judge = JUDGE.format(tests=json.dumps(tests), functional=bool(name), timeout=TIMEOUT)
    seconds = (TIMEOUT + 1) * len(tests) + 5
    return Job(code, judge, ("_judged_call",), timeout=seconds, memory=MEMORY)


def score(completion, example):
    """Whether the program passes its tests."""
    return passed(job(completion, example))


def _problem(row):
    """Example of a row, with its date; private tests stay packed."""
    return {
        "question": row["question_content"],
        "starter": row.get("starter_code") or "",
        "name": json.loads(row.get("metadata") or "{}").get("func_name") or "",
        "public": _tests(row["public_test_cases"]),
        "private": as_text(row["private_test_cases"]),
        "date": row["contest_date"][:10],
    }


def tests_of(example):
    """[input, output] of all tests, the public ones first."""
    text = example["private"]
    if not isinstance(text, str):
        with open(text[0], "rb") as file:
            file.seek(text[1])
            text = json.loads(file.readline())["private_test_cases"]
    return example["public"] + _tests(text if text.lstrip()[:1] == "[" else unpacked(text))


def _tests(text):
    return [[as_text(test["input"]), as_text(test["output"])] for test in json.loads(text)]


def unpacked(text):
    """The text in base64 of zlib of a pickle of it. The pickle is parsed, not loaded: loading one
    can run anything. ValueError or zlib.error if it does not hold one text."""
    data = zlib.decompress(base64.b64decode(text, validate=True))
    [packed] = (value for _, value, _ in pickletools.genops(data) if isinstance(value, str))
    return packed
