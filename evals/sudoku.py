"""4x4 sudoku: fill the blanks so that rows, columns and 2x2 boxes hold 1 to 4 once each.

    python evals/sudoku.py --model tiny-sdar --gen-length 16                             preset "sudoku4"
    python evals/sudoku.py --model sdar-8b --data 4x4_test_sudoku.csv --gen-length 256 --denoising-steps 16
    python evals/sudoku.py --completions FILE.jsonl --data 4x4_test_sudoku.csv --reward sudoku_cells

The metric is exact: 1.0 for 16 digits that keep the given cells and form a legal grid, else 0.0. Any legal grid counts: 124
of the 500 boards of the papers' test file have several. The papers' own number is the share of blank cells that equal the
stored solution, where sixteen 1s score 25 %; evals/rewards.py has a cell reward without that hole.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.planning import SUDOKU, stable_hash, sudoku, sudoku_solutions
from data.rows import describe_columns, read_rows
from evals.run import tagged_answer

PRESETS = SUDOKU  # names that `load` takes besides files and hub ids; "sudoku4" is the default

VERSION = {"compact": "compact", "tags": "d1, training"}  # name of the prompt, by style
# The prompt of d1 and DARE to the byte, so that scores can be compared (a test holds it against DARE's file).
PROMPT = """Please solve the following 4x4 Sudoku puzzle. The puzzle is provided as a 16-character string reading \
left-to-right, top-to-bottom, where '0' represents empty cells.

Rules:
- Fill empty cells with digits 1-4
- Each row must contain digits 1-4 exactly once
- Each column must contain digits 1-4 exactly once
- Each 2x2 box must contain digits 1-4 exactly once

Important: Your solution must be a COMPLETE 16-character string with only the digits 1-4, representing your final solved grid.

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
    "or extra_info.puzzle and reward_model.ground_truth (DARE), where the solution completes the puzzle"
)


def load(split: str, path: str | None = None, limit: int | None = None) -> list[dict]:
    """Examples {"puzzle": 16 digits, 0 = blank, "solution": 16 digits, "style": "compact" | "tags"}, the first `limit`.

    path: empty for "sudoku4"; a preset of data/planning.py; a .jsonl, .csv or .parquet file; or a hub id. Rows may be ours,
    d1's and SPG's, Dream's (grids with newlines) or DARE's (COLUMNS). A file has no splits: it gives the same rows for
    every one, asked in style "tags". SystemExit with one line on an unknown path or a row of another form.
    """
    path = path or "sudoku4"
    if path in PRESETS:
        return sudoku(path, split, limit)
    examples = []
    for number, row in enumerate(read_rows(path, split, PRESETS, limit), 1):
        board = _board(row)
        if board is None:
            raise SystemExit(
                f"{path} row {number}: cannot read a board from {describe_columns(row)}; needs {COLUMNS}"
            )
        examples.append({"puzzle": board[0], "solution": board[1], "style": "tags"})
    return examples


def prompt(example: dict) -> list[dict]:
    """Messages. "compact" is `sud:` and the 16 cells, 20 characters."""
    puzzle = example["puzzle"]
    content = f"sud:{puzzle}" if example["style"] == "compact" else PROMPT.format(puzzle=puzzle)
    return [{"role": "user", "content": content}]


def extract(completion: str, example: dict) -> str | None:
    """The grid of a completion, not checked; None where there is none. "compact": the whole; "tags": the last answer tag."""
    text = completion.strip() if example["style"] == "compact" else tagged_answer(completion)
    return text or None


def cells(completion: str, example: dict) -> str | None:
    """The 16 digits of a completion if there are exactly 16 of 1 to 4, whitespace aside, and the given cells are kept."""
    grid = "".join((extract(completion, example) or "").split())
    if not re.fullmatch("[1-4]{16}", grid):
        return None
    return (
        grid
        if all(given in ("0", digit) for given, digit in zip(example["puzzle"], grid, strict=True))
        else None
    )


def score(completion: str, example: dict) -> float:
    """1.0 for a legal grid that keeps the given cells, be it the stored solution or another, else 0.0. Never raises."""
    return float(cells(completion, example) in sudoku_solutions(example["puzzle"]))


def answer(example: dict, draw: int = 0) -> str:
    """A gold completion in the form that the prompt asks for: one of all solutions, drawn by a hash of (example, draw)."""
    solutions = sudoku_solutions(example["puzzle"])
    if not solutions:
        raise ValueError(f"board {example['puzzle']} has no solution")
    grid = solutions[stable_hash("sudoku", example["puzzle"], draw) % len(solutions)]
    return grid if example["style"] == "compact" else f"<answer>\n{grid}\n</answer>"


def _board(row: dict) -> tuple[str, str] | None:
    """(puzzle, solution) of a row in any of the formats of COLUMNS; None where columns or values fit none of them."""
    row = {str(name).lower(): value for name, value in row.items()}
    extra, reward_model = row.get("extra_info"), row.get("reward_model")
    if isinstance(extra, dict) and isinstance(reward_model, dict):
        board = extra.get("puzzle"), reward_model.get("ground_truth")
    elif "input" in row and "output" in row:
        board = row["input"], row["output"]
    else:
        board = row.get("puzzle"), row.get("solution")
    # numbers are refused: whoever read the file as numbers lost the leading zeros
    puzzle, solution = ("".join(text.split()) if isinstance(text, str) else "" for text in board)
    legal = re.fullmatch("[0-4]{16}", puzzle) and solution in sudoku_solutions(puzzle)
    return (puzzle, solution) if legal else None


if __name__ == "__main__":
    from evals.run import main

    main("sudoku")
