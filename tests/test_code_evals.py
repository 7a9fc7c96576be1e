"""HumanEval, HumanEval+ and MBPP: which part of a completion is the program, rows, prompts, and reference solutions.

The files are read from the folder in CLEANDLLM_DATA; without it their tests are skipped.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_evals import FILES, cli, needs_files, one_line, write

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data.rows import read_rows
from evals import humaneval, humaneval_plus, load_task, mbpp
from evals.programs import code_of, fenced, trimmed

pytestmark = pytest.mark.usefixtures("patient")

STUB = "from typing import List\n\n\ndef helper(x):\n    return x * 2\n\n\n"
STUB += 'def add(a: int, b: int) -> int:\n    """ Add.\n    """\n'
TESTS = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == helper(2)\n\ncheck(add)\n"
ADD = {"prompt": STUB, "entry_point": "add", "tests": TESTS, "solution": "    return a + b\n"}
WHOLE = "def add(a, b):\n    return a + b\n"

COMPLETIONS = {  # completion: score
    WHOLE: 1.0,
    f"```python\n{WHOLE}```": 1.0,
    f"```\n{WHOLE}```": 1.0,
    f"```py\n{WHOLE}```\nThis adds.": 1.0,
    f"Here it is:\n\n```python\n{WHOLE}": 1.0,  # the block is not closed
    f"Here it is:\n{WHOLE}\nThis adds two numbers.": 1.0,
    f"    ```python\n{WHOLE}    ```": 1.0,
    "```python\n    def add(a, b):\n        return a + b\n```": 1.0,
    f"```python\nx = 1\n```\n```python\n{WHOLE}```\n```python\nadd(1, 2)\n```": 1.0,
    f"```python\ndef add(a, b): return 0\n```\nNo:\n```python\n{WHOLE}```": 1.0,  # the last that defines it
    f"```python\n{WHOLE}```\nNo:\n```python\ndef add(a, b): return 0\n```": 0.0,
    f"```text\n1 2 3\n```\n```\n{WHOLE}```": 1.0,
    "    return a + b": 1.0,
    "return a + b": 1.0,
    "```python\nreturn a + b\n```": 1.0,
    "```python\n    return a + b\n```": 1.0,
    "c = a\nfor _ in range(b):\n    c += 1\nreturn c": 1.0,
    "c = a\n    for _ in range(b):\n        c += 1\n    return c": 1.0,  # only the first line lost its blanks
    "    return a + b\n\n\ndef other():\n    pass\nsome prose": 1.0,
    "    c = helper(a)\n    return c - a + b": 1.0,
    "    # a comment\n    return a + b": 1.0,
    f"{STUB}    return a + b": 1.0,
    "def plus(a, b):\n    return a + b\ndef add(a, b):\n    return plus(a, b)": 1.0,
    "import operator\nadd = operator.add": 1.0,
    "return a - b": 0.0,
    "    pass": 0.0,
    "": 0.0,
    "  \n ": 0.0,
    "```python\n```": 0.0,
    "I cannot do that.": 0.0,
    "import sys; sys.exit(0)": 0.0,
    "    raise SystemExit(0)": 0.0,
    "    import os; os._exit(0)": 0.0,
    "class E:\n    def __eq__(self, other): return True\ndef add(a, b): return E()": 0.0,
    "def helper(x): return 3\ndef add(a, b): return 3": 0.0,  # the tests use the helper of the prompt
    f"```python\n{WHOLE}\0```": 0.0,
    "(" * 5000: 0.0,
    "x" * 1_000_001: 0.0,
}


def test_completions_of_humaneval():
    got = humaneval.score_batch(list(COMPLETIONS), [ADD] * len(COMPLETIONS))
    wrong = {
        text[:60]: score
        for (text, want), score in zip(COMPLETIONS.items(), got, strict=True)
        if score != want
    }
    assert not wrong
    assert humaneval.score(WHOLE, ADD) == 1.0 and humaneval_plus.score(WHOLE, ADD) == 1.0
    assert humaneval.extract("", ADD) is None and humaneval.extract("```python\n```", ADD) is None


def test_blocks():
    assert fenced("a\n```python\nb\n```\n```\nc") == [("python", "b\n", True), ("", "c", False)]
    assert fenced("no block, `x` and ``` inline ```") == []
    assert (
        code_of("```python\nf = 1\n```\n```\nf = 2\n```", ["f"]) == "f = 1\n"
    )  # python before any
    assert code_of("x ```", ["f"]) == "x ```"
    assert (
        trimmed("prose\nimport a\n\ndef f():\n    return 1\nmore prose")
        == "import a\n\ndef f():\n    return 1"
    )
    assert trimmed("N = 3\ndef f():\n    return N") == "N = 3\ndef f():\n    return N"


PRODUCT = {
    "text": "Multiply.",
    "tests": ["assert mul(2, 3) == 6", "assert mul(0, 1) == 0"],
    "setup": "",
    "solution": "def mul(a, b):\r\n  return a * b",
}
NODE = PRODUCT | {
    "setup": "one = Node(1)",
    "tests": ["assert value(one) == 1", "assert value(Node(2)) == 2"],
}
MUL = "def mul(a, b):\n  return a * b"
MBPP_COMPLETIONS = {
    f"[BEGIN]\n '{MUL}' \n[DONE] \n\n ": 1.0,
    f"[BEGIN]\n '{MUL.replace(chr(10), chr(13) + chr(10))}' \n[DONE]": 1.0,
    f"[BEGIN]\n{MUL}\n[DONE]": 1.0,
    f"[BEGIN]\n '{MUL}": 1.0,
    f" '{MUL}' \n[DONE]\nYou are an expert ... def mul(a, b): return 0": 1.0,
    f"[BEGIN]\n```python\n{MUL}\n```\n[DONE]": 1.0,
    f"```python\n{MUL}\n```": 1.0,
    f"```python\nx = 1\n```\nand\n```python\n{MUL}\n```": 1.0,
    f"[BEGIN]\n'def mul(a, b): return 0'\n[DONE] no: [BEGIN]\n'{MUL}'\n[DONE]": 1.0,
    "[BEGIN]\n'N = 1\ndef mul(a, b):\n  return a * b * N'\n[DONE]": 1.0,
    r"def mul(a, b):" + "\n  c\\_d = a * b\n  return c\\_d": 1.0,
    "def mul(a, b):\n  return 'DONE' and a * b": 1.0,
    "mul = lambda a, b: a * b": 1.0,
    "[BEGIN]\n'def mul(a, b): return 0'\n[DONE]": 0.0,
    "[BEGIN]\n[DONE]": 0.0,
    "": 0.0,
    "import sys; sys.exit(0)": 0.0,
    "class E:\n  def __eq__(s, o): return True\ndef mul(a, b): return E()": 0.0,
}


def test_completions_of_mbpp():
    got = mbpp.score_batch(list(MBPP_COMPLETIONS), [PRODUCT] * len(MBPP_COMPLETIONS))
    wrong = {
        text[:60]: score
        for (text, want), score in zip(MBPP_COMPLETIONS.items(), got, strict=True)
        if score != want
    }
    assert not wrong
    node = "class Node:\n  def __init__(self, v): self.v = v\ndef value(node): return node.v"
    assert mbpp.job(node, NODE).mode == "nonce" and mbpp.job(MUL, PRODUCT).mode == "proxy"
    assert mbpp.score_batch(
        [node, node.replace("node.v", "1"), "import os; os._exit(0)"], [NODE] * 3
    ) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("tests", "names"),
    [
        (["assert f(1) == sorted([1])"], ["f"]),
        (["assert sum(1, 2) == 3"], ["sum"]),  # task 126
        (["import math\nassert math.isclose(f(1), 1)"], ["f"]),
        (["assert g(P(1)) == 1"], ["P", "g"]),
        (["assert f(lambda x: x, [y for y in range(3)]) == 1"], ["f"]),
    ],
)
def test_names_that_a_program_must_define(tests, names):
    assert mbpp.names_of(PRODUCT | {"tests": tests}) == names


HUMANEVAL_ROW = {
    "task_id": "x/0",
    "prompt": STUB,
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
    "test": TESTS,
}
MBPP_ROW = {
    "task_id": 11,
    "text": "Multiply.",
    "code": "x",
    "test_list": ["assert mul(2, 3) == 6"],
    "test_setup_code": "",
}
DARE_ROW = {
    "prompt": [{"role": "user", "content": humaneval.INSTRUCTION + STUB}],
    "reward_model": {"ground_truth": TESTS},
}


def test_rows_of_every_format(tmp_path):
    for row, want in (
        (HUMANEVAL_ROW, ADD),
        (
            HUMANEVAL_ROW | {"test": TESTS.removesuffix("\ncheck(add)\n")},
            ADD,
        ),  # the hub's: without the call
        (DARE_ROW, ADD | {"solution": ""}),
    ):
        assert humaneval.load("test", write(tmp_path / "rows.jsonl", [row])) == [want]
        assert humaneval_plus.load("train", write(tmp_path / "rows.jsonl", [row])) == [want]
    want = {"text": "Multiply.", "tests": ["assert mul(2, 3) == 6"], "setup": "", "solution": "x"}
    rows = [MBPP_ROW | {"task_id": number} for number in (1, 10, 11, 510, 511, 600, 601, 974)]
    path = write(tmp_path / "rows.jsonl", rows)
    assert [len(mbpp.load(split, path)) for split in ("test", "validation", "train")] == [2, 2, 2]
    assert mbpp.load("test", path, 1) == [want]
    sanitized = {
        "task_id": 11,
        "prompt": "Multiply.",
        "code": "x",
        "test_list": want["tests"],
        "test_imports": ["import math"],
    }
    assert mbpp.load("test", write(tmp_path / "rows.jsonl", [sanitized])) == [
        want | {"setup": "import math"}
    ]
    messages = mbpp.prompt(want)
    dare = {"prompt": messages, "reward_model": {"ground_truth": json.dumps(want["tests"])}}
    assert mbpp.load("train", write(tmp_path / "rows.jsonl", [dare])) == [want | {"solution": ""}]


@pytest.mark.parametrize(
    ("task", "row"),
    [
        (humaneval, {"prompt": STUB}),
        (humaneval, HUMANEVAL_ROW | {"entry_point": None}),
        (humaneval, {"prompt": [], "reward_model": {"ground_truth": TESTS}}),
        (humaneval_plus, {"a": 1}),
        (mbpp, {"text": "a"}),
        (mbpp, MBPP_ROW | {"test_list": []}),
        (mbpp, MBPP_ROW | {"test_list": "assert"}),
        (
            mbpp,
            {"prompt": [{"role": "user", "content": "x"}], "reward_model": {"ground_truth": "["}},
        ),
        (mbpp, {"prompt": [], "reward_model": {"ground_truth": "[]"}}),
    ],
)
def test_bad_rows_are_named(tmp_path, task, row):
    path = write(tmp_path / "rows.jsonl", [row])
    assert "row 1: cannot read a problem" in one_line(lambda: task.load("test", path))


def test_missing_splits_and_solutions_are_one_line():
    assert "--task mbpp" in one_line(lambda: humaneval.load("train"))
    assert "evalplus" in one_line(lambda: humaneval_plus.load("validation"))
    assert "solutions" in one_line(lambda: humaneval.answer(ADD | {"solution": ""}))
    assert "solutions" in one_line(lambda: mbpp.answer(PRODUCT | {"solution": ""}))
    assert all(load_task(name) for name in ("humaneval", "humaneval_plus", "mbpp"))


def test_command_line(tmp_path, monkeypatch, capsys):
    data = write(tmp_path / "rows.jsonl", [HUMANEVAL_ROW] * 3)
    completions = write(
        tmp_path / "c.jsonl",
        [{"index": i, "completion": text} for i, text in enumerate([WHOLE, "pass", ""])],
    )
    flags = ["--completions", completions, "--data", data, "--out", str(tmp_path / "out")]
    result = cli(monkeypatch, capsys, *flags, "--reward", "code_format", task="humaneval")
    assert (result["n"], result["accuracy"], result["answered"]) == (3, 1 / 3, 2 / 3)


# ---------------------------------------------------------------------------------------------------------------------
# real files


def examples_of(task, name, split="test"):
    return task.load(split, str(FILES / name))


def count_solved(task, examples, completions=None):
    return sum(
        task.score_batch(completions or [task.answer(example) for example in examples], examples)
    )


@needs_files
def test_real_rows_and_prompts():
    """The prompts of DARE's files to the byte; the last turn of MBPP's, an opened answer, is left out."""
    gz, dare = (
        examples_of(humaneval, "human_eval/HumanEval.jsonl.gz"),
        examples_of(humaneval, "dare/test_humaneval_1.parquet"),
    )
    assert [example | {"solution": ""} for example in gz] == dare and len(gz) == 164
    assert all(example["solution"] for example in gz)
    rows = read_rows(str(FILES / "dare/test_humaneval_1.parquet"), "test", ())
    assert [humaneval.prompt(example) for example in gz] == [row["prompt"] for row in rows]
    full, dare = examples_of(mbpp, "mbpp/mbpp.jsonl"), examples_of(mbpp, "dare/test_mbpp_1.parquet")
    assert len(full) == 500 and [
        len(examples_of(mbpp, "mbpp/mbpp.jsonl", split)) for split in ("train", "validation")
    ] == [
        374,
        90,
    ]
    rows = read_rows(str(FILES / "dare/test_mbpp_1.parquet"), "test", ())
    assert [mbpp.prompt(example) for example in dare] == [row["prompt"][:-1] for row in rows]
    assert [example["tests"] for example in dare] == [example["tests"] for example in full]
    assert len(examples_of(humaneval_plus, "dare/test_humanevalplus_1.parquet")) == 163
    for examples, task in ((gz, humaneval), (full, mbpp)):
        assert not [e for e in examples if e["solution"].strip() in json.dumps(task.prompt(e)[-1])]
    nonce = [
        i + 11
        for i, example in enumerate(full)
        if mbpp.job(mbpp.answer(example), example).mode == "nonce"
    ]
    assert nonce == [367]


@needs_files
def test_a_sample_of_the_reference_solutions():
    """Whole functions, bodies, and those with helpers; without their body they fail."""
    examples = examples_of(humaneval, "human_eval/HumanEval.jsonl.gz")
    some = [examples[i] for i in (0, 10, 32, 38, 50, 64, 115, 163)]
    assert count_solved(humaneval, some) == 8
    assert count_solved(humaneval, some, [example["solution"] for example in some]) == 8
    assert count_solved(humaneval, some, ["    pass"] * 8) == 0
    examples = examples_of(mbpp, "mbpp/mbpp.jsonl")
    some = [examples[task - 11] for task in (11, 18, 40, 88, 122, 126, 367, 510)]
    assert count_solved(mbpp, some) == 8
    empty = [
        re.sub(r"(?m)^(def \w+\(.*\)):[^\0]*", r"\1: pass", example["solution"]) for example in some
    ]
    assert count_solved(mbpp, some, empty) == 0


@needs_files
@pytest.mark.full
def test_every_reference_solution_end_to_end(tmp_path):
    """164 and 500 through the command line; a body without work scores 0."""
    for task, name, n in (
        (humaneval, "human_eval/HumanEval.jsonl.gz", 164),
        (mbpp, "mbpp/mbpp.jsonl", 500),
    ):
        examples = examples_of(task, name)
        rows = [
            {"index": i, "completion": task.answer(example)} for i, example in enumerate(examples)
        ]
        flags = [
            "--completions",
            write(tmp_path / f"{n}.jsonl", rows),
            "--data",
            str(FILES / name),
            "--out",
            str(tmp_path / str(n)),
        ]
        program = [sys.executable, f"{task.__name__.replace('.', '/')}.py", *flags]
        done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout.splitlines()[-1])
        assert (result["n"], result["accuracy"], result["answered"]) == (n, 1.0, 1.0)
    examples = examples_of(humaneval, "human_eval/HumanEval.jsonl.gz")
    assert count_solved(humaneval, examples, [example["solution"] for example in examples]) == 164
    assert count_solved(humaneval, examples, ["    pass"] * 164) == 0


# Original solutions that HumanEval+ finds wrong; of the slow ones it depends on the machine
PLUS_WRONG = {22, 44, 49, 64, 76, 91, 95, 97, 111, 122, 123, 124, 125, 132, 140, 150}
PLUS_SLOW = {39, 55, 63, 96, 127, 139}


@needs_files
@pytest.mark.full
def test_humaneval_plus_is_stricter():
    """Of 163 original solutions, the listed 16 fail."""
    original = examples_of(humaneval, "human_eval/HumanEval.jsonl.gz")
    examples = examples_of(humaneval_plus, "dare/test_humanevalplus_1.parquet")
    numbers = [number for number in range(164) if number != 32]
    assert [example["entry_point"] for example in examples] == [
        original[number]["entry_point"] for number in numbers
    ]
    completions = [humaneval.answer(original[number]) for number in numbers]
    scores = dict(zip(numbers, humaneval_plus.score_batch(completions, examples), strict=True))
    assert {number for number, score in scores.items() if not score} - PLUS_SLOW == PLUS_WRONG
