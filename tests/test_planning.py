"""Generators and solvers of data/planning.py against brute force, their splits, and golden first rows."""

import hashlib
import json
import subprocess
import sys
from fractions import Fraction
from itertools import combinations_with_replacement, permutations, product
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data.planning import (
    COUNTDOWN,
    GRIDS,
    ROWS,
    SUDOKU,
    countdown,
    countdown_solutions,
    stable_hash,
    sudoku,
    sudoku_solutions,
)


def key(row):
    return tuple(sorted(row["numbers"])), row["target"]


def fraction_value(text):
    """eval() of an expression in fractions; None where it divides by zero. Shares no code with the solver or the scorer."""
    tokens = "".join(f" {c} " if c in "+-*/()" else c for c in text).split()
    try:
        return eval(
            "".join(f"Fraction({t})" if t.isdigit() else t for t in tokens), {"Fraction": Fraction}
        )
    except ZeroDivisionError:
        return None


def every_text(numbers, operators):
    """All expressions over three numbers whose brackets hold a sum inside a product, by writing them all down."""
    for (a, b, c), o, q in product(set(permutations(numbers)), operators, operators):
        yield f"{a}{o}{b}{q}{c}"
        if o in "+-" and q in "*/":
            yield f"({a}{o}{b}){q}{c}"
        if o in "*/" and q in "+-":
            yield f"{a}{o}({b}{q}{c})"


def every_value(pool):
    """Values of all binary trees over the numbers, brackets anywhere: combine any two until one is left."""
    if len(pool) == 1:
        return {pool[0]}
    values = set()
    for i, j in permutations(range(len(pool)), 2):
        a, b = pool[i], pool[j]
        rest = [pool[k] for k in range(len(pool)) if k not in (i, j)]
        for value in (a + b, a - b, a * b, *([a / b] if b else [])):
            values |= every_value([value, *rest])
    return values


def legal(grid):
    """Rows, columns and 2x2 boxes of 16 digits, each by itself."""
    rows = [grid[4 * i : 4 * i + 4] for i in range(4)]
    columns = [grid[i::4] for i in range(4)]
    boxes = [grid[i : i + 2] + grid[i + 4 : i + 6] for i in (0, 2, 8, 10)]
    return all(sorted(unit) == list("1234") for unit in rows + columns + boxes)


@pytest.mark.parametrize("operators", ["+-", "+-*/", "*-"])
@pytest.mark.parametrize("numbers", [[12, 7, 3], [1, 1, 2], [6, 6, 6], [4, 2, 8], [99, 3, 33]])
def test_solutions_are_exactly_the_enumerated_ones(numbers, operators):
    texts = {text: fraction_value(text) for text in every_text(numbers, operators)}
    reachable = {value for value in texts.values() if value is not None and value.denominator == 1}
    for target in sorted(reachable) + [max(reachable) + 1]:
        assert countdown_solutions(numbers, target, operators) == sorted(
            t for t, v in texts.items() if v == target
        )


@pytest.mark.parametrize("numbers", [[3, 3, 8, 8], [2, 5, 7, 44], [1, 5, 5, 5]])
def test_leaving_out_needless_brackets_loses_no_target(numbers):
    values = every_value([Fraction(n) for n in numbers])
    for target in range(1, 101, 3):
        assert bool(countdown_solutions(numbers, target)) == (target in values), target
    assert countdown_solutions([3, 3, 8, 8], 24) == ["8/(3-8/3)"]  # needs a fraction on the way


def test_solutions_by_hand():
    assert countdown_solutions([12, 7, 3], 8, "+-") == ["12+3-7", "12-7+3", "3+12-7", "3-7+12"]
    assert countdown_solutions([5], 5) == ["5"]
    assert countdown_solutions([5], 6) == []
    assert countdown_solutions([0, 5, 5], 7) == []


def test_small_is_complete():
    rows = [row for split in ROWS for row in countdown("small", split)]
    signs = list(product((1, -1), repeat=3))
    want = {
        (numbers, total)
        for numbers in combinations_with_replacement(range(1, 13), 3)
        for total in (sum(s * n for s, n in zip(sign, numbers, strict=True)) for sign in signs)
        if total > 0
    }
    assert {key(row) for row in rows} == want and len(want) == 1264
    orders = {(order, target) for numbers, target in want for order in permutations(numbers)}
    assert (
        len(rows) == len(orders) == 6294
        and {(tuple(row["numbers"]), row["target"]) for row in rows} == orders
    )
    assert {split: len(countdown("small", split)) for split in ROWS} == {
        "train": 5052,
        "validation": 673,
        "test": 569,
    }


@pytest.mark.parametrize("preset", COUNTDOWN)
def test_countdown_rows(preset):
    settings = COUNTDOWN[preset]
    rows = {split: countdown(preset, split, limit=512) for split in ROWS}
    for split, chosen in rows.items():
        assert len(chosen) >= 512, split
        for row in chosen:
            assert len(row["numbers"]) == settings["count"] and row["target"] in settings["targets"]
            assert (
                all(1 <= n <= settings["largest"] for n in row["numbers"])
                and row["style"] == settings["style"]
            )
        for row in chosen[:10]:
            assert countdown_solutions(row["numbers"], row["target"], settings["operators"])
    assert len({tuple(row["numbers"]) for row in rows["train"]}) > 300, (
        "rows are shuffled, not sorted"
    )


@pytest.mark.parametrize("preset", ["small", "cd3"])  # cd4 runs the code of cd3
def test_no_problem_is_in_two_splits_in_any_order(preset):
    keys = {split: {key(row) for row in countdown(preset, split)} for split in ROWS}
    assert sum(map(len, keys.values())) == len(set.union(*keys.values()))
    if preset == "cd3":
        assert {split: len(chosen) for split, chosen in keys.items()} == ROWS, (
            "each problem once, every row there"
        )


def test_split_ignores_the_order_but_not_the_target():
    rows = {
        (tuple(row["numbers"]), row["target"]): split
        for split in ROWS
        for row in countdown("small", split)
    }
    assert all(
        rows[order, target] == split
        for (n, target), split in rows.items()
        for order in permutations(n)
    )
    by_numbers = {}
    for (numbers, _), split in rows.items():
        by_numbers.setdefault(tuple(sorted(numbers)), set()).add(split)
    assert any(len(splits) > 1 for splits in by_numbers.values())


def test_grids_are_the_legal_ones():
    rows = ["".join(row) for row in permutations("1234")]
    halves = [
        a + b for a, b in product(rows, repeat=2) if all(x != y for x, y in zip(a, b, strict=True))
    ]
    assert [
        grid for grid in map("".join, product(halves, repeat=2)) if legal(grid)
    ] == GRIDS and len(GRIDS) == 288


def test_sudoku_solutions_against_filling_every_blank():
    checked = 0
    for number in range(40):
        grid, blanks = (
            GRIDS[stable_hash("grid", number) % 288],
            sorted(range(16), key=lambda i: stable_hash(number, i))[:6],
        )
        puzzle = "".join("0" if i in blanks else digit for i, digit in enumerate(grid))
        want = []
        for filling in product("1234", repeat=6):
            digits = iter(filling)
            candidate = "".join(next(digits) if given == "0" else given for given in puzzle)
            want += [candidate] if legal(candidate) else []
        assert sudoku_solutions(puzzle) == want
        checked += len(want) > 1
    assert checked, "boards with several solutions are among them"
    assert sudoku_solutions("0" * 16) == GRIDS
    assert sudoku_solutions("11" + "0" * 14) == sudoku_solutions("5" + "0" * 15) == []


@pytest.mark.parametrize("preset", SUDOKU)
def test_sudoku_rows(preset):
    solutions = {}
    for split in ROWS:
        rows = sudoku(preset, split)
        assert len(rows) == len({row["puzzle"] for row in rows}) == ROWS[split]
        assert all(sudoku_solutions(row["puzzle"]) == [row["solution"]] for row in rows[:512])
        blanks = [row["puzzle"].count("0") for row in rows]
        assert (
            set(blanks) == set(range(6, 12))
            and min(map(blanks.count, range(6, 12))) > len(rows) / 10
        )
        assert {row["style"] for row in rows} == {SUDOKU[preset]}
        solutions[split] = {row["solution"] for row in rows}
    assert {split: len(grids) for split, grids in solutions.items()} == {
        "train": 232,
        "validation": 28,
        "test": 28,
    }
    assert set.union(*solutions.values()) == set(GRIDS), (
        "232 + 28 + 28 = 288: no grid in two splits"
    )


def digest(rows):
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=6).hexdigest()


GOLDEN = {
    ("countdown", "small", "train"): "96be60387684",
    ("countdown", "small", "test"): "93a77784ae76",
    ("countdown", "cd3", "train"): "7ea229ee38ec",
    ("countdown", "cd4", "validation"): "d665dd0950c3",
    ("sudoku", "sudoku4", "train"): "c55030548da2",
    ("sudoku", "sudoku4", "test"): "f92c41d9b012",
}


@pytest.mark.parametrize("name", GOLDEN, ids="-".join)
def test_first_rows_are_golden(name):
    task, preset, split = name
    assert (
        digest({"countdown": countdown, "sudoku": sudoku}[task](preset, split, limit=50))
        == GOLDEN[name]
    )


def test_rows_do_not_depend_on_the_hash_seed_of_the_interpreter():
    program = "import json; from data.planning import *; print(json.dumps([countdown('small', 'test'), sudoku('sudoku4', 'test')]))"
    for seed in "12":
        out = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        )
        assert json.loads(out.stdout) == [countdown("small", "test"), sudoku("sudoku4", "test")]


@pytest.mark.parametrize("limit", [0, 1, 7, 10**9])
def test_limit_keeps_the_first_rows(limit):
    for make, preset in ((countdown, "small"), (sudoku, "sudoku4")):
        assert make(preset, "test", limit) == make(preset, "test")[:limit]


def test_unknown_names_are_refused():
    for make in (countdown, sudoku):
        with pytest.raises(ValueError, match="unknown preset 'cd9'; known: "):
            make("cd9", "train")
    with pytest.raises(ValueError, match="unknown split 'dev'; known: train, validation, test"):
        countdown("small", "dev")
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        sudoku("sudoku4", "dev")


def test_brute_force_would_notice_a_missing_expression():
    """Negative control: the enumeration of the first test is not the solver in disguise."""
    assert len(set(every_text([1, 2, 3], "+-"))) == 6 * 4
    assert len(set(every_text([1, 2, 3], "+-*/"))) == 6 * (16 + 4 + 4)
    assert fraction_value("8/(3-8/3)") == 24 and fraction_value("1/(2-2)") is None
    assert not legal("1234" * 4) and not legal("1" * 16) and legal("1234341221434321")
