"""Tests from a row of EvalPlus' own files, HumanEvalPlus-*.jsonl.gz and MbppPlus-*.jsonl.gz.

A row has inputs but no outputs: the reference solution runs beside the program, in the process of
the tests, and every result is compared as EvalPlus does, with its exceptions for single tasks. A
result has four times as long as the reference took, at least 4 seconds. Mbpp/255 cannot be solved:
one of its results has a million tuples, more than a program may send (evals/sandbox_child.py).

The tests begin with the text of this file, which therefore imports the standard library alone.
"""

import copy
import json
import math
import signal
import time
from pathlib import Path

TIMEOUT = 120.0  # seconds of wall time for all inputs: a minute each for program and reference
COLUMNS = "task_id, prompt, entry_point, canonical_solution, base_input, plus_input and atol"

# JSON has no tuples, sets and complex numbers: how to read the arguments of these tasks of MBPP,
# one letter for each argument, the last one for all that follow (evalplus/data/mbpp.py)
ARGUMENTS = """
t  2 116 132 143 222 261 273 394 399 421 424 429 470 560 579 596 616 630 726 740 744 809
i  63 64 70 94 120 237 272 299 400 409 417 438 473 614 780
i- 75 413 444 753
-t 106 750
t- 250 307 405 446 617 720 763 808
T  259 278 401 445 580 615 791
s  115
fc 124
c  252
d- 722
"""
LETTERS = {}
for letters, *numbers in map(str.split, ARGUMENTS.strip().splitlines()):
    LETTERS |= {f"Mbpp/{number}": letters for number in numbers}

# functions whose results are compared as sets, and as whether there is one
SETS = """similar_elements find_char_long common_in_nested_lists extract_singly larg_nnum
intersection_array find_dissimilar Diff""".split()
NOT_NONE = "check_str text_match_three text_starta_endb".split()


def example_of(row):
    """The example of a row, as humaneval.load describes it."""
    names = COLUMNS.replace(" and ", ", ").split(", ")
    kept, name = {name: row[name] for name in names}, row["entry_point"]
    source = Path(__file__).read_text(encoding="utf-8")
    return {
        "prompt": row["prompt"],
        "entry_point": name,
        "solution": row["canonical_solution"],
        "tests": f"program = {name}\n{source}\njudge(json.loads({json.dumps(kept)!r}), program)",
        "seconds": TIMEOUT,
    }


def judge(row, program):
    """Raise if a result of the program is wrong or late."""
    name, space = row["entry_point"], {}
    letters = LETTERS.get(row["task_id"], "-")
    exec(row["prompt"] + row["canonical_solution"], space)
    signal.signal(signal.SIGALRM, late)
    for inputs in (row["base_input"], row["plus_input"]):
        atol = row["atol"]
        for number, given in enumerate(inputs):
            given = [
                READ[letters[i : i + 1] or letters[-1]](value) for i, value in enumerate(given)
            ]
            began = time.monotonic()
            want = space[name](*copy.deepcopy(given))
            signal.setitimer(signal.ITIMER_REAL, max(4, 4 * (time.monotonic() - began)))
            got = program(*given)
            signal.setitimer(signal.ITIMER_REAL, 0)
            atol = atol or 1e-6 * is_floats(want)
            assert same(name, got, want, given, atol), f"input {number}"


def late(*_):
    raise TimeoutError("no answer in time")


def nested(value):
    return tuple(map(nested, value)) if isinstance(value, list) else value


READ = {
    "-": lambda value: value,
    "t": tuple,
    "i": lambda value: [*map(tuple, value)],
    "T": nested,
    "s": lambda value: [set(item) if item and isinstance(item, list) else {} for item in value],
    "d": lambda value: {key: tuple(item) for key, item in value.items()},
    "f": float,
    "c": complex,
}


def is_floats(value):
    if isinstance(value, (list, tuple)) and value:
        return all(isinstance(item, float) for item in value)
    return isinstance(value, float)


def same(name, got, want, given, atol):
    """Whether a result is right, by the rules of function `name`."""
    if name == "find_zero":
        return abs(sum(factor * math.pow(got, i) for i, factor in enumerate(*given))) <= atol
    if name == "are_equivalent" or name == "sum_div" and got == 0:
        return True
    if name == "surface_Area":
        base, height = given
        slanted = 2 * base * math.sqrt((base / 2) ** 2 + height**2)
        if abs(got - round(base**2 + slanted)) <= atol:
            return True
    elif name == "digit_distance_nums":
        width = max(len(str(number)) for number in given)
        digits = zip(*(map(int, str(number).zfill(width)) for number in given), strict=True)
        if got == sum(abs(a - b) for a, b in digits):
            return True
    elif name in SETS:
        got, want = set(got), set(want)
    elif name in NOT_NONE:
        got, want = got if isinstance(got, bool) else got is not None, want is not None
    if got == want or not atol:
        return got == want
    import numpy  # installed with torch; few tasks need it

    alike = type(got) is type(want) and numpy.shape(got) == numpy.shape(want)
    return alike and numpy.allclose(got, want, rtol=1e-07, atol=atol)
