"""Countdown and 4x4 sudoku, made in pure Python: the same rows on every machine, and no problem in two splits.

Order and splits come from `stable_hash`, draws from `random.Random` with a string seed, so nothing depends on the
interpreter's hash seed, the platform or a file. Solvers stand beside the generators: they are exact and complete.

    countdown("small", "train")[0]      ->  {"numbers": [6, 9, 4], "target": 7, "style": "compact"}
    sudoku("sudoku4", "test", 1)[0]     ->  {"puzzle": 16 characters, 0 = blank, "solution": ..., "style": "compact"}

`style` tells evals/ how to ask: "compact" is a fixed-width line for the tiny models, "tags" the papers' prompt.
"""

import hashlib
import random
from collections.abc import Iterator
from fractions import Fraction
from functools import cache, lru_cache
from itertools import combinations, combinations_with_replacement, islice, permutations

# "small" is enumerated to the end. The others are drawn with the ranges of the papers' training data (Countdown-Tasks-3to4).
COUNTDOWN = {
    "small": {
        "count": 3,
        "largest": 12,
        "operators": "+-",
        "targets": range(1, 37),
        "style": "compact",
    },
    "cd3": {
        "count": 3,
        "largest": 99,
        "operators": "+-*/",
        "targets": range(10, 101),
        "style": "tags",
    },
    "cd4": {
        "count": 4,
        "largest": 99,
        "operators": "+-*/",
        "targets": range(10, 101),
        "style": "tags",
    },
}
SUDOKU = {"sudoku4": "compact", "sudoku4-tags": "tags"}  # the same boards, asked in two styles
ROWS = {
    "train": 20_000,
    "validation": 512,
    "test": 512,
}  # rows of a split where they are drawn, not enumerated


def stable_hash(*key: object) -> int:
    """64 bits that depend on the `repr` of plain values only: equal on every machine, unlike the builtin `hash`."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def countdown(preset: str, split: str, limit: int | None = None) -> list[dict]:
    """Solvable problems: reach `target` with every one of `numbers` exactly once.

    preset: a key of COUNTDOWN; split: train, validation or test (80/10/10); limit: at most so many rows, always the first.
    The split is a hash of (sorted numbers, target), so other orders of the same numbers stay together. "small" holds
    every number order of every solvable problem; the drawn presets hold each problem once. ValueError on an unknown name.
    """
    _check("preset", preset, COUNTDOWN)
    _check("split", split, ROWS)
    problems = (
        _every_problem(preset, split)
        if preset == "small"
        else islice(_drawn_problems(preset, split), ROWS[split])
    )
    style = COUNTDOWN[preset]["style"]
    return [
        {"numbers": list(numbers), "target": target, "style": style}
        for numbers, target in islice(problems, limit)
    ]


def countdown_solutions(numbers: list[int], target: int, operators: str = "+-*/") -> list[str]:
    """Every expression over all of `numbers` that equals `target`, sorted; [] where there is none. Exact (Fraction).

    Numbers come in every order that works, brackets only where a sum is multiplied or divided: `a-(b-c)` and `a/(b*c)`
    are not listed, because `a-b+c` and `a/b/c` say the same. Time grows fast: about 10 ms for four numbers, 1 s for five.
    """
    expressions = _expressions(tuple(sorted(numbers)), operators)
    return sorted(text for text, (value, _) in expressions.items() if value == target)


def sudoku(preset: str, split: str, limit: int | None = None) -> list[dict]:
    """Distinct 4x4 boards with 6 to 11 blanks (each count equally often drawn) and exactly one solution.

    preset: a key of SUDOKU; limit: at most so many rows, always the first. The split is by solution: of the 288 grids,
    in hash order, 232 are for train, 28 for validation, 28 for test. ValueError on an unknown name.
    """
    _check("preset", preset, SUDOKU)
    _check("split", split, ROWS)
    boards = islice(_drawn_boards(split), ROWS[split] if limit is None else min(limit, ROWS[split]))
    return [
        {"puzzle": puzzle, "solution": solution, "style": SUDOKU[preset]}
        for puzzle, solution in boards
    ]


def sudoku_solutions(puzzle: str) -> list[str]:
    """Every legal completion of a 16-character board (0 = blank), sorted; [] where there is none."""
    matching = _matching_grids(puzzle)
    return [grid for number, grid in enumerate(GRIDS) if matching >> number & 1]


def _check(what: str, name: str, known: dict) -> None:
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(known)}")


def _countdown_split(numbers: tuple[int, ...], target: int) -> str:
    """The split of a problem; `numbers` are sorted, so that every order of them is in the same one."""
    bucket = stable_hash(numbers, target) % 10
    return {0: "test", 1: "validation"}.get(bucket, "train")


def _every_problem(preset: str, split: str) -> list[tuple[tuple[int, ...], int]]:
    """All (numbers, target) of one split, each in all distinct number orders, shuffled by hash."""
    settings = COUNTDOWN[preset]
    problems = []
    for numbers in combinations_with_replacement(
        range(1, settings["largest"] + 1), settings["count"]
    ):
        values = {value for value, _ in _expressions(numbers, settings["operators"]).values()}
        targets = [
            t for t in settings["targets"] if t in values and _countdown_split(numbers, t) == split
        ]
        problems += [(order, target) for order in set(permutations(numbers)) for target in targets]
    return sorted(problems, key=lambda problem: stable_hash(*problem))


def _drawn_problems(preset: str, split: str) -> Iterator[tuple[tuple[int, ...], int]]:
    """Distinct problems of one split without end, each solvable because its target is the value of a drawn expression."""
    settings = COUNTDOWN[preset]
    rng, seen = random.Random(f"countdown {preset} {split}"), set()
    while True:
        numbers = tuple(rng.randint(1, settings["largest"]) for _ in range(settings["count"]))
        target = _drawn_value(numbers, settings["operators"], rng)
        key = (tuple(sorted(numbers)), target)
        if target in settings["targets"] and key not in seen and _countdown_split(*key) == split:
            seen.add(key)
            yield numbers, target


def _drawn_value(numbers: tuple[int, ...], operators: str, rng: random.Random) -> int | None:
    """Value of a random expression over all numbers; None where a division leaves a rest (such draws are only skipped)."""
    values = list(numbers)
    while len(values) > 1:
        a, b = (values.pop(rng.randrange(len(values))) for _ in range(2))
        operator = rng.choice(operators)
        if operator == "/" and (b == 0 or a % b):
            return None
        values.append(a // b if operator == "/" else _apply(operator, a, b))
    return values[0]


@lru_cache(
    maxsize=1
)  # the answers of one problem are asked for one after the other; more would take much memory
def _expressions(numbers: tuple[int, ...], operators: str) -> dict[str, tuple[Fraction, int]]:
    """text -> (value, rank) of all expressions over all numbers; rank 0 is a sum, 1 a product, 2 a single number."""

    @cache
    def over(numbers: tuple[int, ...]) -> dict[str, tuple[Fraction, int]]:
        if len(numbers) == 1:
            return {str(numbers[0]): (Fraction(numbers[0]), 2)}
        found = {}
        for left, right in _partitions(numbers):
            for left_text, (a, left_rank) in over(left).items():
                for right_text, (b, right_rank) in over(right).items():
                    for operator in operators:
                        rank = 0 if operator in "+-" else 1
                        # a-(b-c) is a-b+c and a/(b*c) is a/b/c: the form without a bracket stands for both
                        if right_rank == rank or (operator == "/" and b == 0):
                            continue
                        first = f"({left_text})" if left_rank < rank else left_text
                        second = f"({right_text})" if right_rank < rank else right_text
                        found[first + operator + second] = (_apply(operator, a, b), rank)
        return found

    return over(numbers)


def _apply(operator: str, a: Fraction, b: Fraction) -> Fraction:
    if operator == "+":
        return a + b
    if operator == "-":
        return a - b
    return a * b if operator == "*" else a / b


def _partitions(numbers: tuple[int, ...]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All ways to deal sorted numbers to a left and a right side, neither empty; sides stay sorted."""
    sides = set()
    for size in range(1, len(numbers)):
        for chosen in combinations(range(len(numbers)), size):
            rest = tuple(n for i, n in enumerate(numbers) if i not in chosen)
            sides.add((tuple(numbers[i] for i in chosen), rest))
    return sides


def _drawn_boards(split: str) -> Iterator[tuple[str, str]]:
    """Distinct (puzzle, solution) of one split without end."""
    grids = sorted(GRIDS, key=stable_hash)
    grids = {"train": grids[:232], "validation": grids[232:260], "test": grids[260:]}[split]
    rng, seen = random.Random(f"sudoku {split}"), set()
    while True:
        solution, blanks = rng.choice(grids), rng.randint(6, 11)
        puzzle = _blanked(solution, rng.sample(range(16), blanks))
        while (
            _matching_grids(puzzle).bit_count() > 1
        ):  # redrawn with the same count, or many blanks would be rare
            puzzle = _blanked(solution, rng.sample(range(16), blanks))
        if puzzle not in seen:
            seen.add(puzzle)
            yield puzzle, solution


def _blanked(grid: str, cells: list[int]) -> str:
    return "".join("0" if i in cells else digit for i, digit in enumerate(grid))


def _matching_grids(puzzle: str) -> int:
    """Bit n is set where grid n of GRIDS agrees with every given cell; a cell that is no digit of 0..4 agrees with none."""
    matching = (1 << len(GRIDS)) - 1
    for cell, digit in enumerate(puzzle):
        if digit != "0":
            matching &= HOLDS.get((cell, digit), 0)
    return matching


def _legal_grids() -> list[str]:
    """The 288 complete 4x4 grids as 16 digits, row by row, sorted."""

    def clash(i: int, j: int) -> bool:
        return i // 4 == j // 4 or i % 4 == j % 4 or (i // 8, i % 4 // 2) == (j // 8, j % 4 // 2)

    grids = [""]
    for i in range(16):
        before = [j for j in range(i) if clash(i, j)]
        grids = [
            grid + digit
            for grid in grids
            for digit in "1234"
            if all(grid[j] != digit for j in before)
        ]
    return grids


GRIDS = _legal_grids()
# (cell, digit) -> the grids that hold it, one bit each: a board's solutions are one `&` per given cell
HOLDS = {
    (cell, digit): sum(1 << number for number, grid in enumerate(GRIDS) if grid[cell] == digit)
    for cell in range(16)
    for digit in "1234"
}
