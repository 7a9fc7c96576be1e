"""Scorers, loaders, rewards and the command line of the planning tasks, on tables of strings and on the papers' files.

The files are read from the folder in CLEANDLLM_DATA; without it their tests are skipped.
"""

import contextlib
import csv
import json
import math
import os
import subprocess
import sys
import time
import warnings
from fractions import Fraction
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data.planning import countdown_solutions, sudoku_solutions
from evals import countdown, gsm8k, math500, run, score_all, sudoku
from evals.rewards import REWARDS, TASKS, load_reward
from rollout.masked import MaskedEngine

FILES = Path(os.environ.get("CLEANDLLM_DATA", "")) if os.environ.get("CLEANDLLM_DATA") else None
needs_files = pytest.mark.skipif(
    FILES is None, reason="set CLEANDLLM_DATA to the folder with the papers' files"
)

SMALL = {"numbers": [12, 7, 3], "target": 8, "style": "compact"}
TAGS = {"numbers": [30, 100, 93], "target": 23, "style": "tags"}
BOARD = {"puzzle": "3102200002100320", "solution": "3142243142131324", "style": "compact"}
TAGS_BOARD = BOARD | {"style": "tags"}
MANY_WAYS = {"puzzle": "0012120000212100", "solution": "3412123443212143", "style": "compact"}
WORDS = {"question": "How many?", "gold": "18", "solution": "20 - 2 = 18", "style": "tags"}


def one_line(call):
    """The message of the SystemExit that `call` must raise, which must be one line."""
    with pytest.raises(SystemExit) as exit:
        call()
    message = str(exit.value)
    assert message and "\n" not in message
    return message


@contextlib.contextmanager
def quick_and_silent(seconds):
    """A block that gives no warning and takes less than `seconds` of this process's time, whatever else the machine does."""
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert time.process_time() - began < seconds


# ---------------------------------------------------------------------------------------------------------------------
# countdown

COMPACT_COMPLETIONS = {
    "12-7+3": 1.0,
    "  3+12-7\n": 1.0,
    "3 - 7 + 12": 1.0,
    "-7+12+3": 1.0,
    "-(7-3-12)": 1.0,
    "(12)-(7-3)": 1.0,
    "--12-7+3": 1.0,
    "12-7*3": 0.0,  # wrong value
    "12-7+3=8": 0.0,  # the whole completion is the expression
    "12-7+3 because": 0.0,
    "<answer>12-7+3</answer>": 0.0,
    "": 0.0,
    "   ": 0.0,
    "8": 0.0,  # the target is not an expression over the numbers
    "5+3": 0.0,
    "12-7+3-0": 0.0,  # one number too many
    "12-7+3+3-3": 0.0,
    "12-7": 0.0,
    "1+2-7+3": 0.0,
    "12-07+3": 0.0,  # leading zero
    "12-7+003": 0.0,
    "+12-7+3": 0.0,  # unary plus
    "12-7+3#": 0.0,  # Python would read a comment
    "12-7\n+3": 0.0,
    "12-7+3\x00": 0.0,
    "12−7+3": 0.0,  # minus sign U+2212
    "1２-7+3": 0.0,  # full-width digit
    "١٢-٧+٣": 0.0,  # Arabic digits, which int() would read
    "(12-7+3": 0.0,
    "12-7+3)": 0.0,
    "12 7 3": 0.0,
    "12(7)3": 0.0,
    "()": 0.0,
    "12-7+3,": 0.0,
    "12_-7+3": 0.0,
    "0xc-7+3": 0.0,
    "12.0-7+3": 0.0,
    "1.2e1-7+3": 0.0,
    "__import__('os')": 0.0,
}

TAGS_COMPLETIONS = {
    "<answer>30+93-100</answer>": 1.0,
    "<reasoning>\n30-7\n</reasoning>\n<answer>\n93-(100-30)\n</answer>": 1.0,
    "<answer>30+93-100 = 23</answer>": 1.0,
    "<answer>30+93-100=23.0</answer>": 1.0,
    "<answer>30+93-100 = 24</answer>": 1.0,  # the result is not looked at, as in d1
    "<answer>1</answer> wait <answer>30+93-100</answer> done": 1.0,
    "<answer>30+93-100</answer> so <answer>30+": 1.0,  # the last complete one
    "<answer>no <answer>30+93-100</answer>": 1.0,
    "<answer>30+93-100</answer></answer>": 1.0,
    "<answer>30+93-100</answer> <answer>1</answer>": 0.0,
    "<answer>30+93-100": 0.0,
    "30+93-100</answer>": 0.0,
    "30+93-100": 0.0,
    "<answer></answer>": 0.0,  # 0.1 in the papers
    "<answer>the answer is 30+93-100</answer>": 0.0,
    "<answer>23</answer>": 0.0,
    "<answer>23 = 30+93-100</answer>": 0.0,
    "<answer>30+93-100==23</answer>": 0.0,
    "<answer>30+93-100=23=23</answer>": 0.0,
    "<answer>30+93-100=23-0</answer>": 0.0,
    "<answer>30.100</answer>": 0.0,  # the papers find 30 and 100 in it
    "<answer>30/0*93+100</answer>": 0.0,
    "<answer>93/(30-30)+100</answer>": 0.0,
    "<answer>93**100**30</answer>": 0.0,  # hangs where eval() is used
    "<ANSWER>30+93-100</ANSWER>": 0.0,
    "": 0.0,
}


@pytest.mark.parametrize(("completion", "want"), COMPACT_COMPLETIONS.items(), ids=repr)
def test_countdown_compact(completion, want):
    assert countdown.score(completion, SMALL) == want


@pytest.mark.parametrize(("completion", "want"), TAGS_COMPLETIONS.items(), ids=repr)
def test_countdown_tags(completion, want):
    assert countdown.score(completion, TAGS) == want


@pytest.mark.parametrize(
    ("text", "numbers", "target", "want"),
    [
        (r"3 \times 4", [3, 4], 12, 1.0),
        (r"3 \cdot 4 = 12", [3, 4], 12, 1.0),
        (r"12 \div 4", [12, 4], 3, 1.0),
        ("100/30", [100, 30], 3, 0.0),  # 3.33
        ("100//30", [100, 30], 3, 0.0),  # 3 where eval() is used
        ("8/(3-8/3)", [3, 3, 8, 8], 24, 1.0),  # 23.999999999999996 in floats
        ("3*4/3", [3, 4], 4, 0.0),
        ("0+7", [0, 7], 7, 1.0),
        ("00+7", [0, 7], 7, 0.0),
        ("10/4+1/2", [10, 4, 1, 2], 3, 1.0),
    ],
)
def test_countdown_arithmetic_is_exact(text, numbers, target, want):
    example = {"numbers": numbers, "target": target, "style": "tags"}
    assert countdown.score(f"<answer>{text}</answer>", example) == want


HOSTILE = [
    "9" * 10**6,
    "(" * 10**6,
    "<answer>" * 10**5,
    "</answer>" * 10**5,
    "<answer>" + "(" * 10**6 + "</answer>",
    "<answer>" + "-" * 500 + "1</answer>",
    "(" * 250 + "1" + ")" * 250,
    "-" * 500 + "1",
    "1+" * 255 + "1",
    "9" * 500 + "*9",
    "99**99**99**99",
    " " * 10**6 + "=",
    "=" * 10**6,
    "\x00",
    "\ud800",
    "\r\n\t\v\f",
    "1" + "\n" * 10**6,
    "{}{}}{{",
    "f'{1}'",
    "lambda: 1",
    "1 if 1 else 1",
    "[1]*10**9",
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:12]))
def test_hostile_text_scores_zero_quickly_and_silently(text):
    with quick_and_silent(seconds=2.0):
        for completion in (text, f"<answer>{text}</answer>"):
            for example in (SMALL, TAGS):
                assert countdown.score(completion, example) == 0.0
                assert REWARDS["countdown_partial"](completion, example) == {
                    "solved": 0.0,
                    "partial": 0.0,
                }
            for board in (BOARD, TAGS_BOARD):
                assert sudoku.score(completion, board) == 0.0
                assert REWARDS["sudoku_cells"](completion, board) == {"cells": 0.0}


def test_length_and_depth_limits_leave_room_for_honest_answers():
    at_limit = "(" * 31 + "12-7" + ")" * 31 + "+3"
    assert countdown.score(at_limit, SMALL) == 1.0
    assert countdown.evaluate("-" * 63 + "1+1") == (0, [1, 1])
    assert countdown.evaluate("-" * 64 + "1+1") is None
    assert countdown.evaluate("1" + " " * 511) == (1, [1])
    assert countdown.evaluate("1" + " " * 512) is None


@pytest.mark.parametrize(
    "text", ["1+2*3", "(1+2)*3", "8/(3-8/3)", "-(4-9)*2", "7/2-1/2", "2*(3+4)*(5-6/7)"]
)
def test_evaluate_agrees_with_python(text):
    value, literals = countdown.evaluate(text)
    digits = "".join(c if c.isdigit() else " " for c in text).split()
    assert literals == sorted(map(int, digits))
    assert value == eval(
        "".join(f"Fraction({c})" if c.isdigit() else c for c in text), {"Fraction": Fraction}
    )


@pytest.mark.parametrize(("data", "limit"), [("small", 600), ("cd3", 100), ("cd4", 8)])
@pytest.mark.parametrize("split", ["train", "test"])
def test_countdown_answers_score_one(data, limit, split):
    for example in countdown.load(split, data, limit):
        gold = [countdown.answer(example, draw) for draw in range(2 if data == "cd4" else 5)]
        assert all(countdown.score(text, example) == 1.0 for text in gold)
        assert gold[0] == countdown.answer(example)
        asked = countdown.prompt(example)[0]["content"]
        assert not any(countdown.extract(text, example) in asked for text in gold)
        if data == "small":
            assert len(asked) == 14 and all(len(text) <= 11 for text in gold), (
                "gold and an EOS fit into 12 tokens"
            )


def test_answers_cover_the_solutions_evenly():
    drawn = [countdown.answer(SMALL, draw) for draw in range(400)]
    assert {text: 80 <= drawn.count(text) <= 120 for text in drawn} == dict.fromkeys(
        countdown_solutions([12, 7, 3], 8, "+-"), True
    )
    assert {sudoku.answer(MANY_WAYS, draw) for draw in range(20)} == set(
        sudoku_solutions(MANY_WAYS["puzzle"])
    )
    with pytest.raises(ValueError, match="no expression over"):
        countdown.answer(SMALL | {"target": 500})
    with pytest.raises(ValueError, match="has no solution"):
        sudoku.answer(BOARD | {"puzzle": "11" + "0" * 14})


def test_prompts():
    assert countdown.prompt(SMALL) == [{"role": "user", "content": "12  7  3 =   8"}]
    assert "the numbers [30, 100, 93]," in countdown.prompt(TAGS)[0]["content"]
    assert sudoku.prompt(BOARD) == [{"role": "user", "content": "sud:3102200002100320"}]
    assert sudoku.prompt(TAGS_BOARD)[0]["content"].endswith("puzzle: 3102200002100320\n")
    assert BOARD["solution"] not in sudoku.prompt(TAGS_BOARD)[0]["content"]


# ---------------------------------------------------------------------------------------------------------------------
# sudoku

GRIDS_OF_BOARD = {
    "3142243142131324": 1.0,
    "3142 2431 4213 1324": 1.0,
    "3142\n2431\n4213\n1324\n": 1.0,
    "1111111111111111": 0.0,
    "314224314213132": 0.0,
    "31422431421313244": 0.0,
    "3142243142131320": 0.0,
    "3142243142131325": 0.0,
    "3142,2431,4213,1324": 0.0,
    "1. 3142243142131324": 0.0,  # shifts everything by one where only digits are kept
    "1342243142133124": 0.0,  # a given cell is changed
    "1234341221434321": 0.0,  # legal, but another board
    "3142243142131342": 0.0,  # a column twice
    "３142243142131324": 0.0,  # full-width digit
    "": 0.0,
}


@pytest.mark.parametrize(("grid", "want"), GRIDS_OF_BOARD.items(), ids=repr)
def test_sudoku_score(grid, want):
    assert sudoku.score(grid, BOARD) == want
    assert sudoku.score(f"<reasoning>4</reasoning><answer>\n{grid}\n</answer>", TAGS_BOARD) == want
    assert sudoku.score(grid, TAGS_BOARD) == 0.0, "without the tag there is no answer"
    assert sudoku.score(f"<answer>{grid}</answer>", BOARD) == 0.0, "the compact style has no tag"


def test_any_legal_solution_counts():
    solutions = sudoku_solutions(MANY_WAYS["puzzle"])
    assert len(solutions) > 1 and MANY_WAYS["solution"] in solutions
    for grid in solutions:
        assert sudoku.score(grid, MANY_WAYS) == 1.0 and REWARDS["sudoku_cells"](
            grid, MANY_WAYS
        ) == {"cells": 1.0}


@pytest.mark.parametrize("data", ["sudoku4", "sudoku4-tags"])
def test_sudoku_answers_score_one(data):
    for example in sudoku.load("test", data):
        assert sudoku.score(sudoku.answer(example), example) == 1.0
        assert sudoku.extract(sudoku.answer(example), example) == example["solution"]
        assert example["solution"] not in sudoku.prompt(example)[0]["content"]


# ---------------------------------------------------------------------------------------------------------------------
# rewards


def test_countdown_partial():
    reward = REWARDS["countdown_partial"]
    solved, partial, nothing = [
        {"solved": s, "partial": p} for s, p in ((1.0, 0.0), (0.0, 0.1), (0.0, 0.0))
    ]
    assert reward("12-7+3", SMALL) == solved
    assert reward("12+7+3", SMALL) == reward("-12*7/3", SMALL) == partial
    for text in (
        "12-7",
        "12-7+4",
        "12-7+3=8",
        "12/(7-7)+3",
        "12**7+3",
        "",
        "the numbers 12 7 3",
        "8",
    ):
        assert reward(text, SMALL) == nothing, text
    assert reward("<answer>30+93+100</answer>", TAGS) == partial
    assert reward("<answer></answer>", TAGS) == reward("<answer>30.100</answer>", TAGS) == nothing


def test_countdown_d1():
    """The released code: 0.1 for any answer, nothing without one. 2, 3, 4 and target 5 are the example of its prompt."""
    example = {"numbers": [2, 3, 4], "target": 5, "style": "tags"}
    pay = lambda text, example=example: tuple(REWARDS["countdown_d1"](text, example).values())
    assert pay("<answer>\n2*4-3\n</answer>") == (1.0, 0.0)
    for text in ("2+3", "", "no idea", "2+3+4", "2*4-4"):
        assert pay(f"<answer>{text}</answer>") == (0.0, 0.1), text
    assert pay("2*4-3") == pay("") == pay("<answer>2*4-3") == (0.0, 0.0)
    assert (
        pay("12-7+3", SMALL) == (1.0, 0.0)
        and pay("12", SMALL) == (0.0, 0.1)
        and pay("", SMALL) == (0.0, 0.0)
    )


def test_reward_by_name():
    texts = ["12-7+3", "", "12+7+3", "12-7+3"]
    want = [REWARDS["countdown_partial"](text, SMALL) for text in texts]
    assert load_reward("countdown_partial", countdown)(texts, [SMALL] * 4) == want
    assert load_reward("", countdown)(texts, [SMALL] * 4) == [
        {"score": score} for score in (1.0, 0.0, 0.0, 1.0)
    ]
    assert (
        load_reward("", sudoku)([""], [BOARD]) == [{"score": 0.0}]
        and load_reward("", sudoku)([], []) == []
    )
    assert (
        one_line(lambda: load_reward("cells", sudoku))
        == f"--reward cells: no such reward; {FITTING}"
    )


FITTING = "known: countdown_partial for countdown; countdown_d1 for countdown; sudoku_cells for sudoku; gsm8k_boxed for gsm8k"
FITTING += "; gsm8k_d1 for gsm8k; math500_d1 for math500; gsm8k_deepscaler for gsm8k; math500_hendrycks for math500"
FITTING += (
    "; math500_deepscaler for math500; math500_last_number for math500; mbpp_diffucoder for mbpp"
)
FITTING += "; code_format for every task"


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize(
    ("task", "example"), [(countdown, SMALL), (sudoku, BOARD), (gsm8k, WORDS), (math500, WORDS)]
)
def test_rewards_work_for_their_task_and_refuse_the_others(name, task, example):
    task_name = task.__name__.removeprefix("evals.")
    if name.startswith(task_name):
        example = (
            example | {"style": "boxed"} if name == "gsm8k_deepscaler" else example
        )  # it pays for nothing but a box
        assert sum(load_reward(name, task)([task.answer(example)], [example])[0].values()) >= 1.0
    else:
        assert (
            one_line(lambda: load_reward(name, task))
            == f"--reward {name}: does not fit {task_name}; {FITTING}"
        )


def test_a_reward_without_a_task_fits_every_task(monkeypatch):
    monkeypatch.setitem(REWARDS, "length", lambda completion, example: {"length": len(completion)})
    assert [load_reward("length", task)(["12"], [{}]) for task in (countdown, sudoku, gsm8k)] == [
        [{"length": 2}]
    ] * 3
    message = one_line(lambda: load_reward("gsm8k_d1", countdown))
    assert message == f"--reward gsm8k_d1: does not fit countdown; {FITTING}; length for every task"


WHOLE, BLOCK, NOTHING = [
    {"block": b, "syntax": s} for b, s in ((0.25, 0.25), (0.25, 0.0), (0.0, 0.0))
]
DEF = "def f(x):\n    return x\n"
CODE_FORMAT = {
    "text and a block": (f"Here it is:\n```python\n{DEF}```\n", WHOLE),
    "the block alone, no newline behind it": (f"```python\n{DEF}```", WHOLE),
    "a fence inside a line of code is no end": ("```python\nx = '```'\n```", NOTHING),
    "a missing colon": ("```python\ndef f(x)\n    return x\n```\n", BLOCK),
    "an empty block": ("```python\n\n```\n", BLOCK),
    "a null byte": ("```python\nx = '\0'\n```\n", BLOCK),
    "brackets without end": ("```python\n" + "(" * 5000 + "\n```\n", BLOCK),
    "nested too deeply": ("```python\n" + "-" * 100000 + "1\n```\n", BLOCK),
    "an escape that only warns": ("```python\nx = '\\d'\n```\n", WHOLE),
    "no end": (f"```python\n{DEF}\n", NOTHING),
    "text behind it": (f"```python\n{DEF}```\nThat was it.", NOTHING),
    "another language": (f"```\n{DEF}```\n", NOTHING),
    "two blocks": (f"```python\n{DEF}```\n```python\n{DEF}```\n", NOTHING),
    "the end on a line of code": ("```python\nx = 1```\n", NOTHING),
    "nothing": ("", NOTHING),
}


@pytest.mark.parametrize(("completion", "paid"), CODE_FORMAT.values(), ids=list(CODE_FORMAT))
def test_code_format(completion, paid, recwarn):
    assert REWARDS["code_format"](completion, {}) == paid and not recwarn.list


def test_sudoku_cells_is_the_agreement_with_the_nearest_solution():
    reward = REWARDS["sudoku_cells"]
    blanks = [i for i, given in enumerate(BOARD["puzzle"]) if given == "0"]
    grid = BOARD["solution"]
    for wrong in range(len(blanks) + 1):
        cells = {i: str(int(grid[i]) % 4 + 1) for i in blanks[:wrong]}
        text = "".join(cells.get(i, digit) for i, digit in enumerate(grid))
        # several solutions can be nearer than the stored one
        near = max(
            sum(text[i] == s[i] for i in blanks) for s in sudoku_solutions(BOARD["puzzle"])
        ) / len(blanks)
        assert reward(text, BOARD) == {"cells": near} and near >= 1 - wrong / len(blanks)
    assert reward("4" + grid[1:], BOARD) == {"cells": 0.0}, "a given cell is changed"
    assert reward(grid[:-1], BOARD) == {"cells": 0.0}
    full = BOARD | {"puzzle": grid}
    assert reward(grid, full) == {"cells": 1.0} and reward("1" * 16, full) == {"cells": 0.0}


# ---------------------------------------------------------------------------------------------------------------------
# loading

COUNTDOWN_ROWS = [
    ({"numbers": [30, 100, 93], "target": 23}, "jsonl"),
    ({"nums": [30, 100, 93], "target": 23, "id": 4}, "jsonl"),
    ({"input": "30,100,93", "output": "23"}, "jsonl"),
    ({"input": "30,100,93,23", "output": "30+93=123,123-100=23"}, "jsonl"),
    ({"extra_info": {"numbers": "[30, 100, 93]"}, "reward_model": {"ground_truth": "23"}}, "jsonl"),
    (
        {"extra_info": {"numbers": "[30, 100, 93]"}, "reward_model": {"ground_truth": "23"}},
        "parquet",
    ),
    ({"numbers": "[30, 100, 93]", "target": "23"}, "csv"),
]

BAD_COUNTDOWN_ROWS = [
    {"question": "?"},
    {"numbers": [30, 100, 93]},
    {"numbers": [], "target": 3},
    {"numbers": [30, -1], "target": 3},
    {"numbers": [30, 1.5], "target": 3},
    {"numbers": [3, 4], "target": 3.5},
    {"input": "30,100,93", "output": "23,4"},
    {"input": "30,100,93", "output": "two"},
    {
        "input": "30,100,93,24",
        "output": "30+93=123,123-100=23",
    },  # the steps end elsewhere than the input says
    {"input": "x", "output": "1+2=3"},
    {"extra_info": None, "reward_model": None},
    {"extra_info": {"puzzle": "1"}, "reward_model": {"ground_truth": "23"}},
]

SUDOKU_ROWS = [
    ({"puzzle": BOARD["puzzle"], "solution": BOARD["solution"]}, "jsonl"),
    ({"Puzzle": BOARD["puzzle"], "Solution": BOARD["solution"]}, "csv"),
    ({"input": "3102\n2000\n0210\n0320", "output": "3142\n2431\n4213\n1324"}, "jsonl"),
    (
        {
            "extra_info": {"puzzle": BOARD["puzzle"]},
            "reward_model": {"ground_truth": BOARD["solution"]},
        },
        "parquet",
    ),
]

BAD_SUDOKU_ROWS = [
    {"Puzzle": BOARD["puzzle"]},
    {
        "puzzle": int(BOARD["puzzle"]),
        "solution": int(BOARD["solution"]),
    },  # who reads numbers loses leading zeros
    {"puzzle": BOARD["puzzle"][1:], "solution": BOARD["solution"]},
    {"puzzle": BOARD["puzzle"], "solution": "1" * 16},
    {"puzzle": BOARD["puzzle"].replace("0", "."), "solution": BOARD["solution"]},
]


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    elif path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


@pytest.mark.parametrize(("row", "suffix"), COUNTDOWN_ROWS)
def test_countdown_rows_of_every_format(tmp_path, row, suffix):
    path = write(tmp_path / f"rows.{suffix}", [row] * 3)
    assert countdown.load("test", path) == countdown.load("train", path) == [TAGS] * 3
    assert countdown.load("test", path, limit=2) == [TAGS] * 2


@pytest.mark.parametrize(("row", "suffix"), SUDOKU_ROWS)
def test_sudoku_rows_of_every_format(tmp_path, row, suffix):
    path = write(tmp_path / f"rows.{suffix}", [row] * 3)
    assert sudoku.load("test", path) == sudoku.load("train", path) == [TAGS_BOARD] * 3


def test_csv_keeps_leading_zeros(tmp_path):
    path = write(
        tmp_path / "rows.csv", [{"Puzzle": "0012120000212100", "Solution": "3412123443212143"}]
    )
    assert sudoku.load("test", path)[0]["puzzle"] == "0012120000212100"


@pytest.mark.parametrize(
    ("task", "good", "bad"),
    [(countdown, COUNTDOWN_ROWS[0][0], row) for row in BAD_COUNTDOWN_ROWS]
    + [(sudoku, SUDOKU_ROWS[0][0], row) for row in BAD_SUDOKU_ROWS],
)
def test_bad_rows_are_named(tmp_path, task, good, bad):
    path = write(tmp_path / "rows.jsonl", [good, bad])
    message = one_line(lambda: task.load("test", path))
    assert (
        message.startswith(f"{path} row 2: ")
        and "needs" in message
        and "input and output" in message
    )
    assert all(name in message for name in bad)
    assert len(task.load("test", path, limit=1)) == 1


@pytest.mark.parametrize(
    ("task", "presets"), [(countdown, "small, cd3, cd4"), (sudoku, "sudoku4, sudoku4-tags")]
)
def test_unknown_data_lists_the_presets(tmp_path, monkeypatch, task, presets):
    for path in (
        "tiny",
        "missing.csv",
        "folder/missing.jsonl",
        str(tmp_path),
        str(tmp_path / "missing.parquet"),
    ):
        message = one_line(lambda path=path: task.load("test", path))
        assert path in message and message.endswith(f"presets: {presets}"), message
    (tmp_path / "rows.txt").write_text("1")
    assert "must end in .jsonl, .csv, .parquet" in one_line(
        lambda: task.load("test", str(tmp_path / "rows.txt"))
    )
    (tmp_path / "rows.jsonl").write_text('{"numbers": [1], "target": 1}\n{"numbers": [1]')
    assert "rows.jsonl line 2: not JSON" in one_line(
        lambda: countdown.load("test", str(tmp_path / "rows.jsonl"))
    )
    (tmp_path / "rows.jsonl").write_text("[1]\n")
    assert "line 1: a JSON object is needed, not list" in one_line(
        lambda: task.load("test", str(tmp_path / "rows.jsonl"))
    )


def test_default_presets():
    assert countdown.load("test") == countdown.load("test", "") == countdown.load("test", "small")
    assert (
        sudoku.load("test", limit=5)
        == sudoku.load("test", "", 5)
        == sudoku.load("test", "sudoku4", 5)
    )


def test_hub_id_is_loaded_with_datasets(monkeypatch):
    import datasets

    asked = []

    def load_dataset(path, split):
        asked.append((path, split))
        if split == "validation":
            raise ValueError('Unknown split "validation".\nShould be one of ["train"].')
        return datasets.Dataset.from_list([{"nums": [30, 100, 93], "target": 23}] * 4)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert countdown.load("train", "owner/name") == [TAGS] * 4
    assert countdown.load("train", "owner/name", limit=3) == [TAGS] * 3
    assert asked == [("owner/name", "train")] * 2
    assert one_line(lambda: countdown.load("validation", "owner/name")).startswith(
        "--data owner/name: no file, and the hub says: "
    )


# ---------------------------------------------------------------------------------------------------------------------
# the papers' files


@needs_files
@pytest.mark.parametrize(
    ("task", "name", "rows"),
    [
        (countdown, "d1/countdown_cd3_test.jsonl", 256),
        (countdown, "dare/test_countdown_1.parquet", 256),
        (countdown, "dare/train_countdown-n20000_1.parquet", 20000),
        *[(countdown, f"dream/cd{n}_test.jsonl", 1000) for n in (3, 4, 5)],
        (sudoku, "d1/4x4_test_sudoku.csv", 500),
        (sudoku, "spg/test_sudoku_split_new.csv", 256),
        (sudoku, "dare/test_sudoku_1.parquet", 500),
        (sudoku, "dare/train_sudoku-n20000_1.parquet", 20000),
        *[(sudoku, f"dream/sudoku_4x4_{n}.jsonl", 108) for n in range(4, 13)],
    ],
)
def test_files_have_their_rows(task, name, rows):
    examples = task.load("test", str(FILES / name))
    assert len(examples) == rows
    if name.startswith("dream/cd"):
        assert {len(example["numbers"]) for example in examples} == {int(name[8])}
    few = examples[:: max(1, rows // 10)] if "cd5" not in name else examples[:1]
    assert all(task.score(task.answer(example), example) == 1.0 for example in few)


@needs_files
def test_d1_countdown_file():
    examples = countdown.load("test", str(FILES / "d1/countdown_cd3_test.jsonl"))
    assert examples == countdown.load("test", str(FILES / "dare/test_countdown_1.parquet"))
    assert all(countdown_solutions(example["numbers"], example["target"]) for example in examples)
    for floor in ("", "<answer></answer>", "<answer>{target}</answer>", "<answer>1</answer>"):
        completions = [floor.format(target=example["target"]) for example in examples]
        assert sum(map(countdown.score, completions, examples)) == 0.0
        assert not any(
            sum(REWARDS["countdown_partial"](c, e).values())
            for c, e in zip(completions, examples, strict=True)
        )
    sums = [
        "<answer>" + "+".join(map(str, example["numbers"])) + "</answer>" for example in examples
    ]
    paid = [
        sum(REWARDS["countdown_partial"](c, e).values())
        for c, e in zip(sums, examples, strict=True)
    ]
    assert set(paid) <= {0.1, 1.0} and paid.count(1.0) == sum(
        sum(e["numbers"]) == e["target"] for e in examples
    )


@needs_files
def test_d1_sudoku_file():
    examples = sudoku.load("test", str(FILES / "d1/4x4_test_sudoku.csv"))
    assert examples == sudoku.load("test", str(FILES / "dare/test_sudoku_1.parquet"))
    assert all(example["puzzle"].count("0") == 8 for example in examples)
    assert sum(len(sudoku_solutions(example["puzzle"])) > 1 for example in examples) == 124
    assert len({example["solution"] for example in examples}) == 229
    assert any(example["puzzle"][0] == "0" for example in examples), "leading zeros are kept"
    for example in examples:
        for solution in sudoku_solutions(example["puzzle"]):
            assert sudoku.score(f"<answer>{solution}</answer>", example) == 1.0
        assert sudoku.score("<answer>" + "1" * 16 + "</answer>", example) == 0.0
        assert REWARDS["sudoku_cells"]("<answer>" + "1" * 16 + "</answer>", example) == {
            "cells": 0.0
        }
    # the papers' floor: sixteen 1s against the stored solution, over all blank cells
    ones = [
        digit == "1"
        for e in examples
        for given, digit in zip(e["puzzle"], e["solution"], strict=True)
        if given == "0"
    ]
    assert round(100 * sum(ones) / len(ones), 2) == 24.95


@needs_files
@pytest.mark.parametrize(("task", "name"), [(countdown, "countdown"), (sudoku, "sudoku")])
def test_tags_prompt_is_the_one_of_dare(task, name):
    import pyarrow.parquet

    for path in sorted((FILES / "dare").glob(f"*_{name}*.parquet")):
        rows = pyarrow.parquet.read_table(path).to_pylist()[:300]
        assert [task.prompt(example) for example in task.load("test", str(path), limit=300)] == [
            row["prompt"] for row in rows
        ]


# ---------------------------------------------------------------------------------------------------------------------
# command line


def command(task, *flags):
    return subprocess.run(
        [sys.executable, f"evals/{task}.py", *flags], cwd=ROOT, capture_output=True, text=True
    )


def gold_and_wrong(task, path, n, right):
    rows = [
        {"index": i, "completion": task.answer(e) if i < right else ""}
        for i, e in enumerate(task.load("test", limit=n))
    ]
    return write(path, rows[::-1])


@pytest.mark.parametrize(("task", "name"), [(countdown, "countdown"), (sudoku, "sudoku")])
def test_completions_are_scored_end_to_end(tmp_path, task, name):
    path = gold_and_wrong(task, tmp_path / "c.jsonl", n=8, right=6)
    done = command(name, "--completions", path, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "out/result.json").read_text())
    keys = [
        "task",
        "n",
        "accuracy",
        "stderr",
        "answered",
        "truncated",
        "failed",
        "unused",
        "missing",
        "settings",
    ]
    assert list(result) == keys and (result["failed"], result["unused"]) == (0, 0)
    assert (
        result["missing"] == len(task.load("test")) - 8
        and "problems without a completion, not in the mean" in done.stderr
    )
    assert (result["task"], result["n"], result["accuracy"], result["answered"]) == (
        name,
        8,
        0.75,
        0.75,
    )
    assert (
        math.isclose(result["stderr"], math.sqrt(0.75 * 0.25 / 8)) and result["truncated"] is None
    )
    assert result["settings"]["completions"] == path and result["settings"]["split"] == "test"
    assert result["settings"]["evals_hash"] == run.hash_of_evals()
    samples = [
        json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_text().splitlines()
    ]
    assert [row["index"] for row in samples] == list(range(8))[::-1] and sum(
        row["score"] for row in samples
    ) == 6


def cli(monkeypatch, capsys, *flags, task="countdown"):
    """run.main in this process -> the JSON object of its last line."""
    monkeypatch.setattr(sys, "argv", [f"evals/{task}.py", *flags])
    run.main(task)
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_samples_can_be_scored_again_with_a_reward(tmp_path, monkeypatch, capsys):
    path = gold_and_wrong(countdown, tmp_path / "c.jsonl", n=4, right=1)
    first = cli(monkeypatch, capsys, "--completions", path, "--out", str(tmp_path / "a"))
    flags = [
        "--completions",
        str(tmp_path / "a/samples.jsonl"),
        "--out",
        str(tmp_path / "b"),
        "--reward",
        "countdown_partial",
    ]
    again = cli(monkeypatch, capsys, *flags)
    assert again["accuracy"] == first["accuracy"] == 0.25
    assert again["reward"] == {
        "name": "countdown_partial",
        "mean": 0.25,
        "components": {"solved": 0.25, "partial": 0.0},
    }


BAD_COMPLETIONS = {
    '{"index": 9, "completion": "1"}': "line 1: index 9 is outside 0..4; check --data and --split",
    '{"index": -1, "completion": "1"}': "line 1: index -1 is outside 0..4",
    '\n{"completion": "1"}': 'line 2: needs {"index": integer, "completion": text}',
    '{"index": 0}': "line 1: needs",
    '{"index": "0", "completion": "1"}': "line 1: needs",
    '{"index": true, "completion": "1"}': "line 1: needs",
    '{"index": 0.0, "completion": "1"}': "line 1: needs",
    '{"index": 0, "completion": null}': "line 1: needs",
    '{"index": 0, "completion": "1"': "line 1: not JSON",
    "[0]": "line 1: a JSON object is needed, not list",
    "": "no completions",
}


@pytest.mark.parametrize(("text", "want"), BAD_COMPLETIONS.items())
def test_bad_completions_are_named(tmp_path, monkeypatch, capsys, text, want):
    path = tmp_path / "c.jsonl"
    path.write_text(text)
    message = one_line(
        lambda: cli(
            monkeypatch, capsys, "--completions", str(path), "--limit", "5", "--out", str(tmp_path)
        )
    )
    assert message.startswith(str(path)) and want in message and not message.endswith((" ", ";"))
    assert not (tmp_path / "samples.jsonl").exists()


def test_command_line_errors_are_one_line(tmp_path, monkeypatch, capsys):
    def message(*flags):
        return one_line(lambda: cli(monkeypatch, capsys, "--out", str(tmp_path), *flags))

    assert message() == message("--model", "m", "--completions", "c") != ""
    assert FITTING in message("--model", "m", "--reward", "cells")
    assert "does not fit countdown" in message("--model", "m", "--reward", "gsm8k_boxed")
    assert "presets: small, cd3, cd4" in message("--model", "m", "--data", "cd9")
    assert "must be at least 1" in message("--model", "m", "--limit", "0")
    assert "must be at least 1" in message("--model", "m", "--batch-size", "0")
    (tmp_path / "empty.csv").write_text("numbers,target\n")
    assert "empty.csv: no rows" in message("--model", "m", "--data", str(tmp_path / "empty.csv"))
    assert "no such file" in message("--completions", str(tmp_path / "none.jsonl"))
    shown = command("countdown", "--completions", str(tmp_path / "none.jsonl"))
    assert (
        shown.returncode == 1
        and shown.stderr.strip() == f"{tmp_path / 'none.jsonl'}: no such file"
        and shown.stdout == ""
    )


class CharTokenizer:
    """One id per character; 0 is <eos>, which decoding leaves out as a special token."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return "".join(chr(i) for i in ids if i)


class GoldEngine:
    """Answers the problem that it reads in the prompt, every third one wrongly and without an end."""

    calls = []
    refills = False
    model = SimpleNamespace(
        checkpoint_config={"model_type": "sdar"}, eos_token_ids=[0], sources=(None, [])
    )
    device, dtype = torch.device("cpu"), torch.float32

    def block_length(self, asked):
        return asked or 4

    def plan(self, **settings):
        return "answers the problem"

    def generate(self, prompt_ids, **settings):
        self.calls.append((len(prompt_ids), settings))
        texts = []
        for row, ids in enumerate(prompt_ids):
            numbers, target = "".join(map(chr, ids)).split("=")
            example = {
                "numbers": [int(n) for n in numbers.split()],
                "target": int(target),
                "style": "compact",
            }
            wrong = (settings["sample_offset"] + row) % 3 == 0
            texts.append("9" * 12 if wrong else countdown.answer(example) + "\0")
        mask = torch.tensor([[i < len(text) for i in range(12)] for text in texts])
        # what stands behind the first EOS must not be decoded
        ids = torch.tensor([[*map(ord, text), *[ord("?")] * (12 - len(text))] for text in texts])
        return SimpleNamespace(
            prompt_ids=prompt_ids,
            completion_ids=ids,
            completion_mask=mask,
            num_forwards=torch.full((len(texts),), 6),
            truncated=torch.tensor(["\0" not in text for text in texts]),
        )


@pytest.fixture
def fake_services(monkeypatch):
    made = {}
    models, rollout = ModuleType("models"), ModuleType("rollout")
    models.load_tokenizer = lambda name: CharTokenizer()
    models.prompt_ids = lambda tokenizer, messages: [ord(c) for c in messages[0]["content"]]
    rollout.make_engine = lambda model, backend, device, max_batch_size: (
        made.update(model=model, backend=backend, max_batch_size=max_batch_size) or GoldEngine()
    )
    monkeypatch.setitem(sys.modules, "models", models)
    monkeypatch.setitem(sys.modules, "rollout", rollout)
    monkeypatch.setattr(GoldEngine, "calls", [])
    return made


def test_a_model_is_evaluated(tmp_path, monkeypatch, capsys, fake_services):
    flags = [
        "--limit",
        "10",
        "--batch-size",
        "4",
        "--seed",
        "5",
        "--rollout-backend",
        "block",
        "--temperature",
        "0.5",
    ]
    result = cli(monkeypatch, capsys, "--model", "some/dir", *flags, "--out", str(tmp_path))
    assert fake_services == {"model": "some/dir", "backend": "block", "max_batch_size": 4}
    assert [(n, s["sample_offset"]) for n, s in GoldEngine.calls] == [(4, 0), (4, 4), (2, 8)]
    sampling = {
        "num_samples": 1,
        "gen_length": 12,
        "block_length": 4,
        "denoising_steps": 2,
        "temperature": 0.5,
        "seed": 5,
    }
    assert all(settings.items() >= sampling.items() for _, settings in GoldEngine.calls)
    assert (result["n"], result["accuracy"], result["answered"], result["truncated"]) == (
        10,
        0.6,
        1.0,
        0.4,
    )
    assert (
        result["settings"].items()
        >= {"model": "some/dir", "seed": 5, "limit": 10, "denoising_steps": 2}.items()
    )
    assert result["settings"]["block_length"] == 4, "what the engine settled on"
    assert (
        result["settings"]["torch"] == torch.__version__.split("+")[0]
        or "+" in result["settings"]["torch"]
    )
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [row["index"] for row in samples] == list(range(10))
    for row, example in zip(samples, countdown.load("test", limit=10), strict=True):
        assert row["prompt"] == countdown.prompt(example) and row["truncated"] == (
            row["index"] % 3 == 0
        )
        assert row["completion"] == ("9" * 12 if row["truncated"] else countdown.answer(example))
        assert row["score"] == countdown.score(row["completion"], example) and row["seconds"] >= 0


def test_sampling_that_the_model_cannot_do_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    flags = ["--model", "tiny-llada", "--limit", "2"]
    for number, (change, words) in enumerate(
        {
            (
                "--gen-length",
                "10",
            ): "--gen-length 10 is no multiple of the block length 4: give 8 or 12",
            ("--block-length", "5"): "--gen-length 12 is no multiple of the block length 5",
            (
                "--factor",
                "0",
                "--remasking",
                "low_confidence_factor",
            ): "--factor 0.0 must be above 0",
            ("--confidence-threshold", "1.5"): "--confidence-threshold 1.5",
            ("--alg-temp", "0.5", "--remasking", "random"): "--alg-temp 0.5 must be",
            (
                "--schedule",
                "ascending",
                "--denoising-steps",
                "4",
            ): "--schedule ascending reveals 12 tokens in 3 steps",
        }.items()
    ):
        out = ["--out", str(tmp_path / str(number))]
        assert words in one_line(lambda: cli(monkeypatch, capsys, *flags, *change, *out))  # noqa: B023


def test_what_the_masked_sampler_offers_can_be_asked_for(tmp_path, monkeypatch, capsys):
    """Schedules, drawn orders, caches and the policies for the end of a text, the early exit among them."""
    ran = {}
    real = MaskedEngine.generate
    monkeypatch.setattr(
        MaskedEngine,
        "generate",
        lambda self, *a, **k: ran.update(trace=real(self, *a, **k), asked=k) or ran["trace"],
    )
    for number, change in enumerate(
        (
            {"schedule": "ascending", "eos_policy": "eoser", "stop_at_eos": False},
            {
                "schedule": "timesteps",
                "remasking": "entropy",
                "alg_temp": 0.5,
                "eos_policy": "demote",
            },
            {
                "remasking": "origin",
                "cache": "dual",
                "eos_policy": "suppress",
                "stop_at_eos": False,
            },
        )
    ):
        flags = ["--model", "tiny-llada", "--limit", "2", "--out", str(tmp_path / str(number))]
        for name, value in change.items():
            name = name.replace("_", "-")
            flags += [f"--no-{name}"] if value is False else [f"--{name}", str(value)]
        result = cli(monkeypatch, capsys, *flags)
        assert result["settings"].items() >= change.items() and ran["asked"][
            "stop_at_eos"
        ] == change.get("stop_at_eos", True)
        assert (
            ran["trace"].settings.items()
            >= {k: v for k, v in change.items() if k != "stop_at_eos"}.items()
        )
        assert (ran["trace"].step_map >= 0).all() or change.get("stop_at_eos", True)


def test_batch_size_does_not_change_the_result(tmp_path, monkeypatch, capsys, fake_services):
    results = []
    for size in ("1", "7", "64"):
        flags = [
            "--model",
            "m",
            "--limit",
            "9",
            "--batch-size",
            size,
            "--out",
            str(tmp_path / size),
        ]
        results.append(cli(monkeypatch, capsys, *flags))
        results[-1]["settings"].pop("batch_size"), results[-1].pop("tokens_per_s")
    assert results[0] == results[1] == results[2]


def test_an_engine_that_refills_gets_more_than_a_batch(
    tmp_path, monkeypatch, capsys, fake_services
):
    monkeypatch.setattr(GoldEngine, "refills", True)
    cli(
        monkeypatch,
        capsys,
        "--model",
        "m",
        "--limit",
        "19",
        "--batch-size",
        "4",
        "--out",
        str(tmp_path),
    )
    assert [(n, s["sample_offset"]) for n, s in GoldEngine.calls] == [(16, 0), (3, 16)]
    assert fake_services["max_batch_size"] == 4


def test_default_output_directory_and_score_batch(tmp_path, monkeypatch, capsys, fake_services):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        countdown, "score_batch", lambda completions, examples: [0.5] * len(examples), raising=False
    )
    assert cli(monkeypatch, capsys, "--model", "some/dir", "--limit", "3")["accuracy"] == 0.5
    (out,) = (tmp_path / "runs").iterdir()
    files = {path.name for path in out.iterdir()}
    assert files == {"config.json", "settings.json", "samples.jsonl", "result.json"}
    assert out.name.startswith("eval-countdown-dir-")


def test_evaluations_of_one_second_get_directories_of_their_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "20260102-030405")
    for right in range(3):
        path = gold_and_wrong(countdown, tmp_path / "c.jsonl", n=2, right=right)
        assert cli(monkeypatch, capsys, "--completions", path)["accuracy"] == right / 2
    names = [f"eval-countdown-c-20260102-030405{number}" for number in ("", "-2", "-3")]
    assert sorted(path.name for path in Path("runs").iterdir()) == names
    assert [
        json.loads((Path("runs") / name / "result.json").read_text())["accuracy"] for name in names
    ] == [0.0, 0.5, 1.0]
    monkeypatch.chdir(tmp_path / "runs")
    Path("runs").write_text("")
    assert "cannot be made" in one_line(lambda: cli(monkeypatch, capsys, "--completions", path))


def test_results_are_not_overwritten(tmp_path, monkeypatch, capsys):
    path, out = gold_and_wrong(countdown, tmp_path / "c.jsonl", n=2, right=1), tmp_path / "out"
    out.mkdir()
    (out / "log.txt").write_text("from `> out/log.txt`")
    evaluate = lambda completions: cli(
        monkeypatch, capsys, "--completions", str(completions), "--out", str(out)
    )
    evaluate(path)

    def files():
        return {file.name: file.read_text() for file in out.iterdir()}

    before = files()
    assert before.keys() == {"log.txt", "config.json", "samples.jsonl", "result.json"}
    for completions in (path, out / "samples.jsonl"):
        message = one_line(lambda completions=completions: evaluate(completions))
        assert (
            "samples.jsonl and config.json and result.json would be overwritten; " in message
            and files() == before
        )
    for name in ("samples.jsonl", "config.json", "result.json"):
        (out / name).unlink()
    for name in (
        "samples.jsonl",
        "config.json",
        "result.json",
    ):  # any alone, as an evaluation that was killed leaves it
        (out / name).write_text(before[name])
        assert f": {name} would be overwritten" in one_line(lambda: evaluate(path))
        (out / name).unlink()
    evaluate(path)
    assert files() == before
    out = tmp_path / "c.jsonl"
    assert (
        one_line(lambda: evaluate(path))
        == f"--out {out}: the directory cannot be made (File exists)"
    )


def test_the_same_out_serves_again_after_a_model_that_does_not_load(
    tmp_path, monkeypatch, capsys, fake_services
):
    flags = ["--limit", "2", "--out", str(tmp_path)]

    def no_model(*_, **__):
        raise SystemExit("--model m: no such model")

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["rollout"], "make_engine", no_model)
        assert "no such model" in one_line(lambda: cli(monkeypatch, capsys, "--model", "m", *flags))
    assert cli(monkeypatch, capsys, "--model", "m", *flags)["n"] == 2


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("<answer>1</answer>", "1"),
        ("<answer> 1 \n</answer> x", "1"),
        ("<answer>1</answer><answer>2", "1"),
        ("<answer>1<answer>2</answer>3</answer>", "2"),
        ("</answer><answer>", None),
        ("<answer></answer>", ""),
        ("", None),
    ],
)
def test_tagged_answer(text, want):
    assert run.tagged_answer(text) == want


def test_no_module_of_evals_or_data_hides_another():
    """`python evals/x.py` puts evals/ first on the path: a file json.py there would be found before the real one."""
    own = {path.stem for folder in ("evals", "data") for path in (ROOT / folder).glob("*.py")} - {
        "__init__"
    }
    assert not own & set(sys.stdlib_module_names)
    dependencies = {
        "torch",
        "transformers",
        "tokenizers",
        "peft",
        "datasets",
        "pandas",
        "pyarrow",
        "safetensors",
        "tyro",
        "wandb",
    }
    assert not own & (
        dependencies | {"math_verify", "matplotlib", "tqdm", "pytest", "numpy", "evaluate"}
    )


def test_evaluations_score_all_at_once_where_the_task_can():
    """Where a task has score_batch, one call of it gets every completion, and score() is not called."""
    calls = []

    class Task:
        def score_batch(completions, examples):
            calls.append((completions, examples))
            return [1.0, 0.5]

    assert score_all(Task, ["a", "b"], [1, 2]) == [1.0, 0.5] and calls == [(["a", "b"], [1, 2])]
    del Task.score_batch
    Task.score = lambda completion, example: len(completion) * example
    assert score_all(Task, ["a", "bb"], [1, 2]) == [1, 4] and len(calls) == 1
