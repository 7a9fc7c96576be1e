"""Generators and solvers of data/planning.py against brute force, their splits, golden rows."""

import re
import subprocess
import sys
from fractions import Fraction
from itertools import permutations, product

import pytest
from sync_shared import ROOT

from data.planning import GRIDS, countdown_solutions, sudoku, sudoku_solutions


def value_of(text):
    """eval() of an expression in fractions; None if it divides by zero."""
    try:
        return eval(re.sub(r"\d+", r"Fraction(\g<0>)", text), {"Fraction": Fraction})
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


@pytest.mark.parametrize("operators", ["+-", "+-*/"])
@pytest.mark.parametrize("numbers", [[12, 7, 3], [1, 1, 2], [6, 6, 6], [0, 5, 5], [99, 3, 33]])
def test_solutions_are_exactly_the_enumerated_ones(numbers, operators):
    texts = {text: value_of(text) for text in every_text(numbers, operators)}
    reachable = {value for value in texts.values() if value is not None and value.denominator == 1}
    for target in [*reachable, max(reachable) + 1]:
        want = sorted(text for text, value in texts.items() if value == target)
        assert countdown_solutions(numbers, target, operators) == want
    assert countdown_solutions([3, 3, 8, 8], 24) == ["8/(3-8/3)"]  # needs a fraction on the way


def test_sudoku_solutions_against_all_legal_grids():
    units = [range(4 * i, 4 * i + 4) for i in range(4)] + [range(i, 16, 4) for i in range(4)]
    units += [(i, i + 1, i + 4, i + 5) for i in (0, 2, 8, 10)]
    grids = map("".join, product(map("".join, permutations("1234")), repeat=4))
    is_legal = lambda grid: all(len({grid[i] for i in unit}) == 4 for unit in units[4:])
    assert [*filter(is_legal, grids)] == GRIDS and len(GRIDS) == 288
    assert sudoku_solutions("0" * 16) == GRIDS and sudoku_solutions("11" + "0" * 14) == []
    assert sudoku_solutions("0" + GRIDS[9][1:]) == [GRIDS[9]]


GOLDEN = "a8df4de69fd7 ef4de84caadb 02ef0465d92d b3b06003f924"  # small, cd3, cd4, sudoku4


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
        options = {"cwd": ROOT, "env": {"PYTHONHASHSEED": seed}, "text": True}
        out = subprocess.check_output([sys.executable, "-c", program], **options)
        assert out.split() == GOLDEN.split()
    tags = sudoku("sudoku4-tags", "test", 5)
    assert tags == [row | {"style": "tags"} for row in sudoku("sudoku4", "test", 5)]
