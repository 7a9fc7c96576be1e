"""4x4 sudoku: fill the blanks so that rows, columns and 2x2 boxes hold 1 to 4 once each.

    python evals/sudoku.py --model tiny-sdar   preset "sudoku4"
    python evals/sudoku.py --model sdar-8b --data 4x4_test_sudoku.csv
    python evals/sudoku.py --completions FILE.jsonl --data 4x4_test_sudoku.csv

The metric is exact: 1.0 for 16 digits that keep the given cells and form a legal grid, else 0.0.
Any legal grid counts: 124 of the 500 boards in the papers' test file have several. The papers
report the share of blank cells that equal the one stored solution, where sixteen 1s score 25 %;
--reward sudoku_d1 pays it.
"""

if __name__ == "__main__":
    import command  # noqa: F401

import re

from data.planning import SUDOKU, stable_hash, sudoku, sudoku_solutions
from evals import final_answer, tagged_answer
from evals.examples import planning_row, read_examples, user

PRESETS = SUDOKU  # names that `load` takes besides files and hub ids; "sudoku4" is the default

# The prompt of d1 and DARE to the byte, so that scores can be compared (tested against DARE's
# file).
PROMPT = """Please solve the following 4x4 Sudoku puzzle. The puzzle is provided as a 16-character \
string reading \
left-to-right, top-to-bottom, where '0' represents empty cells.

Rules:
- Fill empty cells with digits 1-4
- Each row must contain digits 1-4 exactly once
- Each column must contain digits 1-4 exactly once
- Each 2x2 box must contain digits 1-4 exactly once

Important: Your solution must be a COMPLETE 16-character string with only the digits 1-4, \
representing your final solved grid.

Respond in this exact format:
<reasoning>
Your step-by-step solving process
</reasoning>
<answer>
[16-character solution string with no spaces or separators]
</answer>


Solve the following Sudoku puzzle: {puzzle}
"""

COLUMNS = (
    "16 digits as text in Puzzle and Solution, input and output (Dream), "
    "or extra_info.puzzle and reward_model.ground_truth (DARE), where the solution completes the "
    "puzzle"
)


def load(split, path=None, limit=None):
    """The first `limit` examples {"puzzle": 16 digits, 0 = blank, "solution": 16 digits, "style":
    "compact" | "tags"}.

    path: empty for "sudoku4"; a preset of data/planning.py; a .jsonl, .csv or .parquet file; or a
    hub id. Rows may have our columns, d1's and SPG's, Dream's (grids with newlines) or DARE's
    (COLUMNS). A file gives the same rows for every split, in style "tags".
    """
    path = path or "sudoku4"
    if path in PRESETS:
        return sudoku(path, split, limit)
    return read_examples(_problem, COLUMNS, path, split, limit, presets=PRESETS)


def prompt(example):
    """Messages. "compact" is `sud:` and the 16 cells, 20 characters."""
    puzzle = example["puzzle"]
    content = f"sud:{puzzle}" if example["style"] == "compact" else PROMPT.format(puzzle=puzzle)
    return user(content)


def extract(completion, example):
    """The grid of a completion, not checked; None where there is none. "compact": all of it;
    "tags": the last answer tag, else the final answer."""
    if example["style"] == "compact":
        return completion.strip() or None
    return tagged_answer(completion) or final_answer(completion)


def score(completion, example):
    """Whether it is a legal grid that keeps the given cells. Never raises.

    "compact": nothing but white space may be between its cells; "tags": anything but digits.
    A grid may be repeated.
    """
    apart = r"\s" if example["style"] == "compact" else "[^0-9]"
    grid = re.sub(apart, "", extract(completion, example) or "")
    found = re.fullmatch(r"([1-4]{16})\1*", grid)
    return bool(found) and found[1] in sudoku_solutions(example["puzzle"])


def answer(example, draw=0):
    """A gold completion in the form that the prompt asks for: one of all solutions, drawn by a hash
    of (example, draw)."""
    solutions = sudoku_solutions(example["puzzle"])
    grid = solutions[stable_hash("sudoku", example["puzzle"], draw) % len(solutions)]
    return grid if example["style"] == "compact" else f"<answer>\n{grid}\n</answer>"


def _problem(row):
    row = {str(name).lower(): value for name, value in row.items()}
    board = planning_row(row, "puzzle", "solution")
    # text only: a file that was read as numbers has lost its leading zeros
    puzzle, solution = ("".join(part.split()) for part in board)
    if not re.fullmatch("[0-4]{16}", puzzle) or solution not in sudoku_solutions(puzzle):
        raise ValueError("not a board and its solution")
    return {"puzzle": puzzle, "solution": solution, "style": "tags"}
