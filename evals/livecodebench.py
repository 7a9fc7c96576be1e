r"""LiveCodeBench, code generation: problems of programming contests, by release and date; right if all tests pass.

    python evals/livecodebench.py --model sdar-8b --gen-length 4096 --denoising-steps 4                 all 1,055, release_v6
    python evals/livecodebench.py --model sdar-8b --data release_v5@2024-08-01..2025-01-31
    python evals/livecodebench.py --completions FILE.jsonl --data test6.jsonl

pass@1: 1.0 if every public and private test passes in evals/sandbox.py, mode "proxy", else 0.0. Tests of LeetCode call a method
and compare values; the others give stdin and compare stdout by lines, a line that differs by its numbers. Prompt and rules are
those of LiveCodeBench's own runner (6 seconds for each test), but a program that reads stdin runs anew for every test, as a
process of its own, where the runner calls it as a function with a false stdin. There is no train split.
LLaDA2.0-mini's report: 31.50, with a window that it does not give.
"""

import json
import re
import sys
from datetime import datetime
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.rows import describe_columns
from evals.contests import FUNCTION, IMPORTS, JUDGE, PROGRAM, rows_of, tests_in, tests_of
from evals.programs import code_of, pass_or_fail
from evals.sandbox import Job

HUB = "livecodebench/code_generation_lite"
VERSION = "LiveCodeBench generic"  # name of the prompt
# of HUB: each release has the files of those before it; v3 is what the third added
RELEASES = {f"release_v{n}": range(1, n + 1) for n in range(1, 7)} | {
    f"v{n}": (n,) for n in range(1, 7)
}
PRESETS = (*RELEASES, "release_v6@2024-08-01..2025-01-31")
WINDOW = re.compile(r"(.*)@(\d{4}-\d\d-\d\d)?\.\.(\d{4}-\d\d-\d\d)?")
COLUMNS = "question_content, starter_code, contest_date, public_test_cases, private_test_cases and metadata"
TIMEOUT = 6  # seconds of each test; (TIMEOUT + 1) * tests + 5 for all together
MEMORY = 4 << 30  # bytes
LARGE = (
    32 << 20
)  # bytes of a problem's packed tests from which it is judged alone: judging takes about 15 times as much

SYSTEM = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a correct "
    "Python program that matches the specification and passes all tests."
)
WITH_STARTER = "You will use the following starter code to write the solution to the problem and enclose your code within delimiters."
WITHOUT_STARTER = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the sample inputs). "
    "Enclose your code within delimiters as follows. Ensure that when the python program runs, it reads the inputs, runs the "
    "algorithm and writes output to STDOUT."
)


def load(split: str, path: str | None = None, limit: int | None = None) -> list[dict]:
    """Examples {"question", "starter": code, "" if there is none, "name": method, "" for stdin, "public": tests, "private":
    text, or (file, offset, bytes) of a row that has it, "source": file and row}, at most `limit`, the first.

    path: empty for release_v6 of HUB; another release, release_v1 to release_v6, or what one added, v1 to v6; a .jsonl (such
    as test6.jsonl of HUB), .jsonl.gz or .parquet file with the columns of HUB; or a hub id. Behind any of them @FIRST..LAST
    keeps the contests of these days, both included, either left out. Private tests, gigabytes of them, are decoded when they
    are needed. SystemExit for a split that the hub does not have, and with one line on all else (COLUMNS).
    """
    path, first, last = (
        window.groups() if (window := WINDOW.fullmatch(path or "")) else (path, None, None)
    )
    path = HUB if not path or path == "release_latest" else path
    if (path in RELEASES or path == HUB) and split != "test":
        raise SystemExit(
            f"--split {split}: {HUB} has test alone; train on --task mbpp, or name a file with --data"
        )
    days = [
        datetime.fromisoformat(day) if day else default
        for day, default in ((first, datetime.min), (last, datetime.max))
    ]
    examples = []
    for number, (source, row, place) in enumerate(rows_of(path, split, HUB, RELEASES, PRESETS), 1):
        problem = _problem(row, f"{source} row {number}")
        if days[0] <= problem.pop("date") <= days[1]:
            examples.append(problem | ({"private": place} if place else {}))
        if len(examples) == limit:
            break
    if not examples and (first or last):
        raise SystemExit(
            f"--data {path}: no contest from {first or 'the first'} to {last or 'the last'}"
        )
    return examples


def prompt(example: dict) -> list[dict]:
    """A system and a user message, as LiveCodeBench's runner asks chat models. OpenCompass leaves the system message out."""
    starter = example["starter"]
    ask = f"{WITH_STARTER if starter else WITHOUT_STARTER}\n```python\n{starter or '# YOUR CODE HERE'}\n```"
    content = f"### Question:\n{example['question']}\n\n### Format: {ask}\n\n### Answer: (use the provided format with backticks)\n\n"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]


def extract(completion: str, example: dict) -> str | None:
    """The program of a completion, not checked (evals/programs.py: code_of); None where there is none. The runner takes the
    last block, and nothing where it is not closed."""
    return code_of(completion, ["Solution", example["name"]] if example["name"] else [])


def job(completion: str, example: dict) -> Job | None:
    """The program of a completion with its tests, for the sandbox; None where it is empty."""
    code, name = extract(completion, example), example["name"]
    if code is None:
        return None
    code = (
        IMPORTS + FUNCTION.format(code=code, name=name)
        if name
        else PROGRAM.format(code=code, imports=IMPORTS)
    )
    tests = tests_of(example)
    judge = JUDGE.format(tests=json.dumps(tests), functional=bool(name), timeout=TIMEOUT)
    return Job(
        code, judge, ("_judged_call",), timeout=(TIMEOUT + 1) * len(tests) + 5, memory=MEMORY
    )


def score(completion: str, example: dict) -> float:
    """1.0 if all tests pass, else 0.0."""
    return score_batch([completion], [example])[0]


def score_batch(completions: list[str], examples: list[dict]) -> list[float]:
    """`score` of each, on all cores; tests are in memory only while their program runs, and LARGE ones of one problem."""
    pairs = list(zip(completions, examples, strict=True))
    jobs = [partial(job, *pair) if extract(*pair) is not None else None for pair in pairs]
    private = [example["private"] for example in examples]
    is_large = [(len(tests) if isinstance(tests, str) else tests[2]) >= LARGE for tests in private]
    scores = pass_or_fail(
        [None if large else job for job, large in zip(jobs, is_large, strict=True)]
    )
    return [
        pass_or_fail([job])[0] if large else score
        for job, large, score in zip(jobs, is_large, scores, strict=True)
    ]


def answer(example: dict, draw: int = 0) -> str:
    """SystemExit: the benchmark has no reference solutions."""
    raise SystemExit("livecodebench: the benchmark has no solutions")


def _problem(row: dict, source: str) -> dict:
    """The example of a row, with its date; private tests stay as they are. SystemExit names the row."""
    try:
        text, starter, private = (
            row["question_content"],
            row.get("starter_code") or "",
            row["private_test_cases"],
        )
        metadata = json.loads(row.get("metadata") or "{}")
        public = tests_in(row["public_test_cases"])
        kinds = {test["testtype"] for test in json.loads(row["public_test_cases"])}
        name = metadata.get("func_name") or ""
        good = (
            isinstance(text, str)
            and text.strip()
            and isinstance(private, str)
            and isinstance(starter, str)
        )
        if not good or not isinstance(name, str) or not public or kinds - {"stdin", "functional"}:
            raise ValueError("a column of another type")
        if bool(name) != ("functional" in kinds):
            raise ValueError("func_name and testtype do not agree")
        example = {
            "question": text,
            "starter": starter,
            "name": name,
            "public": public,
            "private": private,
            "source": source,
        }
        return example | {
            "date": datetime.fromisoformat(str(row["contest_date"])).replace(tzinfo=None)
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        said = f"{type(error).__name__}: {error}"
        found = describe_columns(row)
        raise SystemExit(
            f"{source}: cannot read a problem from {found}; needs {COLUMNS} ({said})"
        ) from error


if __name__ == "__main__":
    from evals.run import main

    main("livecodebench")
