"""Generators and solvers of data/planning.py against brute force, their splits, golden rows."""

import re
import subprocess
import sys
from fractions import Fraction
from itertools import permutations, product
from pathlib import Path

import pytest

from data.planning import (
    GRIDS,
    ROWS,
    countdown,
    countdown_solutions,
    stable_hash,
    sudoku,
    sudoku_solutions,
)

ROOT = Path(__file__).resolve().parents[1]


def value_of(text):
    """eval() of an expression in fractions; None if it divides by zero."""
    spaced = "".join(f" {c} " if c in "+-*/()" else c for c in text).split()
    fractions = (f"Fraction({t})" if t.isdigit() else t for t in spaced)
    try:
        return eval("".join(fractions), {"Fraction": Fraction})
    except ZeroDivisionError:
        return None


def every_text(numbers, operators):
    """All expressions over three numbers whose brackets hold a sum inside a product."""
    for (a, b, c), o, q in product(set(permutations(numbers)), operators, operators):
        yield f"{a}{o}{b}{q}{c}"
        if o in "+-" and q in "*/":
            yield f"({a}{o}{b}){q}{c}"
        if o in "*/" and q in "+-":
            yield f"{a}{o}({b}{q}{c})"


def every_value(pool):
    """Values of all binary trees over the numbers: combine any two until one is left."""
    if len(pool) == 1:
        return {pool[0]}
    values = set()
    for i, j in permutations(range(len(pool)), 2):
        a, b = pool[i], pool[j]
        rest = [pool[k] for k in range(len(pool)) if k not in (i, j)]
        for value in (a + b, a - b, a * b, *([a / b] if b else [])):
            values |= every_value([value, *rest])
    return values


def is_legal(grid):
    rows = [grid[4 * i : 4 * i + 4] for i in range(4)]
    boxes = [grid[i : i + 2] + grid[i + 4 : i + 6] for i in (0, 2, 8, 10)]
    units = rows + boxes + [grid[i::4] for i in range(4)]
    return all(sorted(unit) == list("1234") for unit in units)


@pytest.mark.parametrize("operators", ["+-", "+-*/"])
@pytest.mark.parametrize("numbers", [[12, 7, 3], [1, 1, 2], [6, 6, 6], [0, 5, 5], [99, 3, 33]])
def test_solutions_are_exactly_the_enumerated_ones(numbers, operators):
    texts = {text: value_of(text) for text in every_text(numbers, operators)}
    reachable = {value for value in texts.values() if value is not None and value.denominator == 1}
    for target in [*reachable, max(reachable) + 1]:
        want = sorted(text for text, value in texts.items() if value == target)
        assert countdown_solutions(numbers, target, operators) == want


@pytest.mark.parametrize("numbers", [[3, 3, 8, 8], [2, 5, 7, 44]])
def test_leaving_out_needless_brackets_loses_no_target(numbers):
    values = every_value([Fraction(n) for n in numbers])
    for target in range(1, 101, 3):
        assert bool(countdown_solutions(numbers, target)) == (target in values), target
    assert countdown_solutions([3, 3, 8, 8], 24) == ["8/(3-8/3)"]  # needs a fraction on the way


def test_sudoku_solutions_against_filling_every_blank():
    halves = ["".join(rows) for rows in product(map("".join, permutations("1234")), repeat=2)]
    halves = [half for half in halves if all(half[i] != half[4 + i] for i in range(4))]
    assert [grid for grid in map("".join, product(halves, repeat=2)) if is_legal(grid)] == GRIDS
    assert len(GRIDS) == 288 == len(sudoku_solutions("0" * 16))
    counts = set()
    for number in range(30):
        grid = GRIDS[stable_hash("grid", number) % 288]
        blanks = sorted(range(16), key=lambda i: stable_hash(number, i))[:6]
        puzzle = "".join("0" if i in blanks else digit for i, digit in enumerate(grid))
        solutions = [grid for grid in GRIDS if re.fullmatch(puzzle.replace("0", "."), grid)]
        assert sudoku_solutions(puzzle) == solutions
        counts.add(len(solutions))
    assert counts > {1}, "boards with several solutions are among them"
    assert sudoku_solutions("11" + "0" * 14) == sudoku_solutions("5" + "0" * 15) == []


def test_no_problem_is_in_two_splits_in_any_order():
    key = lambda row: (tuple(sorted(row["numbers"])), row["target"])
    for preset, N in (("small", 1264), ("cd3", 3024)):
        keys = [
            {key(row) for row in countdown(preset, split, 6000 if preset == "small" else 2000)}
            for split in ROWS
        ]
        assert sum(map(len, keys)) == len(set.union(*keys)) == N
    boards = [sudoku("sudoku4", split, 3000) for split in ROWS]
    assert all(
        sudoku_solutions(r["puzzle"]) == [r["solution"]] for part in boards for r in part[:512]
    )
    solutions = [{row["solution"] for row in part} for part in boards]
    assert [len(part) for part in solutions] == [232, 28, 28]
    assert set.union(*solutions) == set(GRIDS)


GOLDEN = {
    "small": "a8df4de69fd7",
    "cd3": "ef4de84caadb",
    "cd4": "02ef0465d92d",
    "sudoku4": "e53bdd52aad2",
}


def test_rows_are_golden_whatever_the_hash_seed_of_the_interpreter():
    """The first 300 rows of every split, as recorded when they were checked by enumeration."""
    program = """
import hashlib, json
from data.planning import ROWS, countdown, sudoku
for preset in ("small", "cd3", "cd4", "sudoku4"):
    make = sudoku if preset == "sudoku4" else countdown
    rows = [make(preset, split, 300) for split in ROWS]
    print(hashlib.blake2b(json.dumps(rows).encode(), digest_size=6).hexdigest())
"""
    for seed in "12":
        options = {"cwd": ROOT, "env": {"PYTHONHASHSEED": seed}, "capture_output": True}
        out = subprocess.run([sys.executable, "-c", program], **options, check=True).stdout
        assert out.decode().split() == list(GOLDEN.values())
    tags = sudoku("sudoku4-tags", "test", 5)
    assert tags == [row | {"style": "tags"} for row in sudoku("sudoku4", "test", 5)]
