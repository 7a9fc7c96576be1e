"""Countdown and 4x4 sudoku in pure Python: the same rows everywhere, no problem in two splits.

Order and splits come from `stable_hash`, draws from `random.Random` with a string seed, so nothing
depends on the interpreter's hash seed, the platform or a file. The solvers are exact and complete.

    countdown("small", "train")[0]    ->  {"numbers": [6, 9, 4], "target": 7, "style": "compact"}
    sudoku("sudoku4", "test", 1)[0]   ->  {"puzzle": 16 characters, 0 = blank, "solution": ...,
                                           "style": "compact"}

`style` tells evals/ how to ask: "compact" is a fixed-width line for the tiny models, "tags" is the
papers' prompt.
"""

import hashlib
import random
from fractions import Fraction
from functools import cache, lru_cache
from itertools import combinations_with_replacement, islice, permutations
from operator import add, mul, sub, truediv

# "small" is enumerated completely. The others are drawn, from the ranges of the papers' training
# data (Countdown-Tasks-3to4).
DRAWN = {"largest": 99, "operators": "+-*/", "targets": range(10, 101), "style": "tags"}
COUNTDOWN = {
    "small": {
        "count": 3, "largest": 12, "operators": "+-", "targets": range(1, 37), "style": "compact"
    },
    "cd3": {"count": 3} | DRAWN,
    "cd4": {"count": 4} | DRAWN,
}  # fmt: skip
SUDOKU = {"sudoku4": "compact", "sudoku4-tags": "tags"}  # the same boards, asked in two styles
ROWS = {"train": 20_000, "validation": 512, "test": 512}  # rows of a split that is drawn
OPERATORS = {"+": add, "-": sub, "*": mul, "/": truediv}


def stable_hash(*key):
    """64 bits of the `repr` of plain values: equal on every machine, unlike the builtin `hash`."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def countdown(preset, split, limit=None):
    """Solvable problems: reach `target` with every one of `numbers` exactly once. -> list of dicts

    preset: a key of COUNTDOWN; split: train, validation or test (80/10/10); limit: how many rows at
    most, always the first. The split is a hash of (sorted numbers, target), so that all orders of
    the same numbers stay together. "small" holds every number order of every solvable problem; the
    drawn presets hold each problem once.
    """
    drawn = islice(drawn_problems(preset, split), ROWS[split])
    problems = small_problems(split) if preset == "small" else drawn
    return [
        {"numbers": list(numbers), "target": target, "style": COUNTDOWN[preset]["style"]}
        for numbers, target in islice(problems, limit)
    ]


def countdown_solutions(numbers, target, operators="+-*/"):
    """-> every expression over all of `numbers` that equals `target`, sorted. Exact (Fraction).

    Brackets appear only where a sum is multiplied or divided: `a-(b-c)` and `a/(b*c)` are not
    listed, because `a-b+c` and `a/b/c` say the same. About 10 ms for four numbers, 1 s for five.
    """
    found = expressions(tuple(sorted(numbers)), operators)
    return sorted(text for text, (value, _) in found.items() if value == target)


def sudoku(preset, split, limit=None):
    """Distinct 4x4 boards with 6 to 11 blanks (each count equally often) and exactly one solution.

    preset: a key of SUDOKU; limit: how many rows at most, always the first. Splits
    share no grid, not even with its digits relabeled: of the 12 kinds of the 288 grids 7 are for
    train, 2 for validation, 3 for test, whose problems are that much alike.
    -> list of dicts
    """
    boards = islice(islice(drawn_boards(split), ROWS[split]), limit)
    return [{"puzzle": puzzle, "solution": s, "style": SUDOKU[preset]} for puzzle, s in boards]


def sudoku_solutions(puzzle):
    """-> every legal completion of a 16-character board (0 = blank), sorted."""
    found = list(GRIDS)
    for i, digit in enumerate(puzzle):
        if digit != "0":
            found = [grid for grid in found if grid[i] == digit]
    return found


def split_of(*problem):
    """The split of a problem, by its hash. Countdown: sorted numbers and target, so that all orders
    of the numbers are in one split."""
    return {0: "test", 1: "validation"}.get(stable_hash(*problem) % 10, "train")


@cache
def small_problems(split):
    """-> all (numbers, target) of a split, in all distinct number orders, shuffled by hash"""
    settings, problems = COUNTDOWN["small"], []
    pool = range(1, settings["largest"] + 1)
    for numbers in combinations_with_replacement(pool, settings["count"]):
        values = {value for value, _ in expressions(numbers, settings["operators"]).values()}
        for target in map(int, values.intersection(settings["targets"])):
            if split_of(numbers, target) == split:
                problems += [(order, target) for order in set(permutations(numbers))]
    return sorted(problems, key=lambda problem: stable_hash(*problem))


def drawn_problems(preset, split):
    """Distinct problems of one split without end, each the value of a random expression."""
    settings = COUNTDOWN[preset]
    rng, seen = random.Random(f"countdown {preset} {split}"), set()
    while True:
        numbers = tuple(rng.randint(1, settings["largest"]) for _ in range(settings["count"]))
        target = drawn_value(list(numbers), settings["operators"], rng)
        key = (tuple(sorted(numbers)), target)
        if target in settings["targets"] and key not in seen and split_of(*key) == split:
            seen.add(key)
            yield numbers, target


def drawn_value(values, operators, rng):
    """Value of a random expression over all values; None if a division leaves a remainder."""
    while len(values) > 1:
        a, b = (values.pop(rng.randrange(len(values))) for _ in range(2))
        operator = rng.choice(operators)
        if operator == "/" and (b == 0 or a % b):
            return None
        values.append(int(OPERATORS[operator](a, b)))
    return values[0]


@lru_cache(maxsize=32)  # five numbers have 31 parts; those of more problems take much memory
def expressions(numbers, operators):
    """-> {text: (value, rank)} of all expressions over all of the sorted numbers.

    rank: 0 for a sum, 1 for a product, 2 for a single number.
    """
    if len(numbers) == 1:
        return {str(numbers[0]): (Fraction(numbers[0]), 2)}
    found, N = {}, len(numbers)
    pick = lambda chosen: tuple(numbers[i] for i in range(N) if chosen >> i & 1)
    for left, right in {(pick(c), pick(~c)) for c in range(1, 2**N - 1)}:
        for left_text, (a, left_rank) in expressions(left, operators).items():
            for right_text, (b, right_rank) in expressions(right, operators).items():
                for operator in operators:
                    rank = 0 if operator in "+-" else 1
                    # a-(b-c) is a-b+c and a/(b*c) is a/b/c: only those without brackets
                    if right_rank == rank or (operator == "/" and b == 0):
                        continue
                    first = f"({left_text})" if left_rank < rank else left_text
                    second = f"({right_text})" if right_rank < rank else right_text
                    found[first + operator + second] = (OPERATORS[operator](a, b), rank)
    return found


def drawn_boards(split):
    """Distinct (puzzle, solution) of one split without end."""
    # the 24 that differ only in their labels stay together
    relabeled = lambda grid: stable_hash(grid.translate(str.maketrans(grid[:4], "1234")))
    grids = sorted(GRIDS, key=relabeled)
    grids = {"train": grids[:168], "validation": grids[168:216], "test": grids[216:]}[split]
    rng, seen = random.Random(f"sudoku {split}"), set()
    while True:
        solution, blanks, puzzle = rng.choice(grids), rng.randint(6, 11), "0" * 16
        # Drawn again with the same number of blanks; otherwise boards with many would be rare.
        while len(sudoku_solutions(puzzle)) > 1:
            cells = rng.sample(range(16), blanks)
            puzzle = "".join("0" if i in cells else solution[i] for i in range(16))
        if puzzle not in seen:
            seen.add(puzzle)
            yield puzzle, solution


def legal_grids():
    """-> the 288 complete 4x4 grids as 16 digits, row by row, sorted."""
    rows = [*map("".join, permutations("1234"))]
    halves = [a + b for a in rows for b in rows if len({*a[:2], *b[:2]}) == 4]  # with two boxes
    grids = [top + bottom for top in halves for bottom in halves]
    return [grid for grid in grids if all(len({*grid[i::4]}) == 4 for i in range(4))]


GRIDS = legal_grids()
