"""Generators and solvers of data/planning.py against brute force, their splits, golden rows."""

import hashlib
import json
import subprocess
import sys
from fractions import Fraction
from itertools import combinations_with_replacement, permutations, product
from pathlib import Path

import pytest

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


def test_small_is_complete_and_no_problem_is_in_two_splits_in_any_order():
    rows = {split: countdown("small", split) for split in ROWS}
    assert {split: len(found) for split, found in rows.items()} == {
        "train": 5052, "validation": 673, "test": 569}  # fmt: skip
    want = {
        (order, sum(s * n for s, n in zip(signs, numbers, strict=True)))
        for numbers in combinations_with_replacement(range(1, 13), 3)
        for signs in product((1, -1), repeat=3)
        for order in permutations(numbers)
    }
    found = [(tuple(r["numbers"]), r["target"]) for part in rows.values() for r in part]
    assert sorted(found) == sorted(problem for problem in want if problem[1] > 0)
    keys = lambda part: {(tuple(sorted(row["numbers"])), row["target"]) for row in part}
    drawn = {split: countdown("cd3", split) for split in ROWS}
    for parts in (rows, drawn):
        assert sum(len(keys(part)) for part in parts.values()) == len(keys(sum(parts.values(), [])))
    assert {split: len(keys(part)) for split, part in drawn.items()} == ROWS  # each problem once


@pytest.mark.parametrize("preset", COUNTDOWN)
def test_countdown_rows(preset):
    settings = COUNTDOWN[preset]
    for split in ROWS:
        rows = countdown(preset, split, limit=512)
        assert len(rows) == 512
        for row in rows:
            assert len(row["numbers"]) == settings["count"] and row["target"] in settings["targets"]
            assert all(1 <= n <= settings["largest"] for n in row["numbers"])
            assert row["style"] == settings["style"]
        for row in rows[:10]:
            assert countdown_solutions(row["numbers"], row["target"], settings["operators"])


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
        fill = lambda digits: "".join(next(digits) if d == "0" else d for d in puzzle)  # noqa: B023
        filled = [fill(iter(digits)) for digits in product("1234", repeat=6)]
        assert sudoku_solutions(puzzle) == [grid for grid in filled if is_legal(grid)]
        counts.add(len(sudoku_solutions(puzzle)))
    assert counts > {1}, "boards with several solutions are among them"
    assert sudoku_solutions("11" + "0" * 14) == sudoku_solutions("5" + "0" * 15) == []


@pytest.mark.parametrize("preset", SUDOKU)
def test_sudoku_rows(preset):
    solutions = {}
    for split in ROWS:
        rows = sudoku(preset, split)
        assert len(rows) == len({row["puzzle"] for row in rows}) == ROWS[split]
        assert all(sudoku_solutions(row["puzzle"]) == [row["solution"]] for row in rows[:512])
        blanks = [row["puzzle"].count("0") for row in rows]
        assert set(blanks) == set(range(6, 12))
        assert min(map(blanks.count, range(6, 12))) > len(rows) / 10
        assert {row["style"] for row in rows} == {SUDOKU[preset]}
        solutions[split] = {row["solution"] for row in rows}
    assert [len(grids) for grids in solutions.values()] == [232, 28, 28]
    assert set.union(*solutions.values()) == set(GRIDS), "no grid is in two splits"


GOLDEN = {
    (countdown, "small", "train"): "96be60387684",
    (countdown, "cd3", "train"): "7ea229ee38ec",
    (countdown, "cd4", "validation"): "d665dd0950c3",
    (sudoku, "sudoku4", "train"): "c55030548da2",
    (sudoku, "sudoku4", "test"): "f92c41d9b012",
}


def test_first_rows_are_golden_whatever_the_hash_seed_of_the_interpreter():
    for (make, preset, split), digest in GOLDEN.items():
        rows = json.dumps(make(preset, split, limit=50)).encode()
        assert hashlib.blake2b(rows, digest_size=6).hexdigest() == digest
        assert make(preset, split, 7) == make(preset, split, 50)[:7] and not make(preset, split, 0)
    program = (
        "from data.planning import *; print(countdown('small', 'test'), sudoku('sudoku4', 'test'))"
    )
    command, outs = [sys.executable, "-c", program], []
    for seed in "12":
        env = {"PYTHONHASHSEED": seed}
        outs.append(
            subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=True).stdout
        )
    assert (
        outs[0] == outs[1] == f"{countdown('small', 'test')} {sudoku('sudoku4', 'test')}\n".encode()
    )
