r"""AIME 2024: 30 problems whose answers are integers from 0 to 999.

    python evals/aime24.py --model sdar-8b --gen-length 4096 --denoising-steps 4 --temperature 1.0 --repeats 8
    python evals/aime24.py --completions FILE.jsonl --data test_aime2024.parquet

The metric is exact: the last complete box, or nothing, as an integer: 033 is 33. One problem is 3.3 points. Published values
are means of eight runs: --repeats 8, at the temperature above 0 that was published; at 0 all eight are the same.
There is no train split.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.rows import describe_columns, read_rows
from evals.gsm8k import INSTRUCTION
from evals.math500 import COLUMNS, _problem
from evals.math_grader import last_box, number

HUB, HUB_SPLIT = "HuggingFaceH4/aime_2024", "train"  # the hub calls its only split so
VERSION = "OpenCompass aime2024, DARE"  # name of the prompt
APPENDED = INSTRUCTION


def load(split: str, path: str | None = None, limit: int | None = None) -> list[dict]:
    """Examples {"question", "gold": integer as text, "solution": worked, "" if unknown}.

    path: empty for the hub's rows, which are "test" alone; a .jsonl, .csv or .parquet file, which gives the same rows for every
    split; or a hub id. At most `limit` rows, always the first. SystemExit with one line on an unknown path, a split that the
    hub does not have, or a row of another form.
    """
    return problems("aime24", HUB, HUB_SPLIT, APPENDED, split, path, limit)


def prompt(example: dict) -> list[dict]:
    """One user message, no examples, as in DARE."""
    return [{"role": "user", "content": f"{example['question']}\n{APPENDED}"}]


def extract(completion: str, example: dict) -> str | None:
    """What stands in the last complete box; None without one. Never raises."""
    return last_box(completion)


def score(completion: str, example: dict) -> float:
    """1.0 if the last complete box holds the gold integer, else 0.0. Never raises."""
    found = last_box(completion)
    # x = 204 is 204
    return float(found is not None and number(found.rpartition("=")[2]) == int(example["gold"]))


def problems(
    task: str,
    hub: str,
    hub_split: str,
    appended: str,
    split: str,
    path: str | None,
    limit: int | None,
) -> list[dict]:
    """What `load` of aime24 and aime25 gives; `appended`: the instruction that may stand behind a question of a file."""
    if (path or hub) == hub and split != "test":
        raise SystemExit(
            f"--split {split}: {task} has test alone; train on another task, such as math500"
        )
    rows = read_rows(path or hub, hub_split if (path or hub) == hub else split, (), limit)
    examples = []
    for index, row in enumerate(rows, 1):
        problem = _problem(row)
        value = number(problem["gold"]) if problem else None  # AIME 2025 has a gold of 336^\circ
        if value is None or value.denominator != 1 or not 0 <= value <= 999:
            need = f"{COLUMNS}, with an integer from 0 to 999 as answer"
            raise SystemExit(
                f"{path or hub} row {index}: cannot read a problem from {describe_columns(row)}; needs {need}"
            )
        question = problem["question"].removesuffix(appended).strip()
        examples.append({"question": question, "gold": str(value), "solution": problem["solution"]})
    return examples


if __name__ == "__main__":
    from evals.run import main

    main("aime24")
