"""Shaped rewards by name: function(completion, example) -> finite components, whose sum is the reward.

They are for training and live beside the metric, never in it: without --reward a run is trained on the task's score().
"""

from collections.abc import Callable
from types import ModuleType

from data.planning import sudoku_solutions
from evals import countdown, sudoku


def countdown_partial(completion: str, example: dict) -> dict[str, float]:
    """1.0 solved; 0.1 for a legal expression over exactly the given numbers that misses the target; else 0.

    d1, SPG, CJ-GRPO and DARE also pay 0.1 for free text, an empty answer tag and wrong numbers; d1's paper does not.
    """
    evaluated = countdown.evaluate(countdown.extract(completion, example) or "")
    uses_numbers = evaluated is not None and evaluated[1] == sorted(example["numbers"])
    solved = uses_numbers and evaluated[0] == example["target"]
    return {"solved": float(solved), "partial": 0.1 if uses_numbers and not solved else 0.0}


def sudoku_cells(completion: str, example: dict) -> dict[str, float]:
    """Share of the blank cells that agree with the nearest legal solution; 0 if a given cell is changed or it is no grid.

    The papers compare with the one stored solution, repair grids of other lengths and do not look at the given cells.
    """
    grid = sudoku.cells(completion, example)
    if grid is None:
        return {"cells": 0.0}
    blanks = [i for i, given in enumerate(example["puzzle"]) if given == "0"]
    agreeing = [sum(grid[i] == solution[i] for i in blanks) for solution in sudoku_solutions(example["puzzle"])]
    # a full board has no blank cell; it earns 1.0 when it is legal
    return {"cells": max(agreeing, default=0.0) / len(blanks) if blanks else float(bool(agreeing))}


REWARDS = {"countdown_partial": countdown_partial, "sudoku_cells": sudoku_cells}


def load_reward(name: str, task: ModuleType) -> Callable[[str, dict], dict[str, float]]:
    """--reward NAME -> its function; an empty name -> the score of `task`, as {"score": ...}. SystemExit lists the names."""
    if not name:
        return lambda completion, example: {"score": task.score(completion, example)}
    if name not in REWARDS:
        raise SystemExit(f"--reward {name}: no such reward; known: {', '.join(REWARDS)}")
    return REWARDS[name]
