r"""MATH: competition problems with an answer in LaTeX. MATH-500 by default, the whole test set of 5,000 with --data full.

    python evals/math500.py --model sdar-8b --gen-length 512 --denoising-steps 4       HuggingFaceH4/MATH-500, test
    python evals/math500.py --model llada-8b --data full --gen-length 512 --reward math500_hendrycks
    python evals/math500.py --completions FILE.jsonl --data test_math500_1.parquet
    python algos/d1.py --task math500 --model sdar-8b                                  trains on MATH's train split

The metric is Math-Verify on the last complete box (evals/math_grader.py): SDAR's published setting, with MATH-500.
DARE's rows of LLaDA, Dream and LLaDA2 are of 5,000 problems and a matcher of strings: --data full, and math500_hendrycks.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.planning import stable_hash
from data.rows import describe_columns, read_rows
from evals.gsm8k import INSTRUCTION, TAGS
from evals.math_grader import grade, grade_batch, last_box

HUB, FULL = "HuggingFaceH4/MATH-500", "EleutherAI/hendrycks_math"
PRESETS = (
    "full",
    "d1",
)  # that `load` takes besides files and hub ids: the test split is FULL's; asked as d1 asks in training
VERSION = {
    "": "OpenCompass math_0shot_gen_11c4b5",
    "tags": "d1, training",
}  # name of the prompt, by style
PARTS = (  # of FULL, which the hub keeps apart
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
VALIDATION = (
    512  # rows of the train split that are the validation split, which the hub does not have
)
D1 = (
    TAGS + "You are a math expert. You will be given a question to solve. Solve it step by step. "
)  # to the byte
D1 += "Wrap the final answer in a \\boxed{}. \n\n"
COLUMNS = "problem and answer, or problem and solution with a box, or prompt and reward_model.ground_truth (DARE)"


def load(split: str, path: str | None = None, limit: int | None = None) -> list[dict]:
    r"""Examples {"question", "gold": LaTeX, "solution": worked, "" if unknown}, and "style": "tags" with --data d1.

    path: empty or "d1" for the hub's rows: "test" is MATH-500, or with "full" all 5,000 test rows; of the train split the 512
    rows with the smallest `stable_hash` are "validation" and the others "train". Or a .jsonl, .csv or .parquet file, or a hub
    id. A file has no splits: it gives the same rows for every one. At most `limit` rows, always the first. Rows without an
    answer (DARE's train file has four) are left out and counted on stderr. SystemExit with one line on an unknown path or a
    row of another form (COLUMNS).
    """
    path = path or HUB
    if path in (HUB, "full") and split != "test":
        return _train(split)[:limit]
    if path == "full":
        return _problems(_parts("test"), FULL)[:limit]
    if path == "d1":
        return [problem | {"style": "tags"} for problem in load(split, HUB, limit)]
    return _problems(read_rows(path, split, PRESETS, limit), path)


def prompt(example: dict) -> list[dict]:
    """One user message, no examples: that of SDAR and of DARE's math_0shot_gen_11c4b5; with --data d1 d1's training prompt."""
    question = example["question"]
    content = D1 + question if example.get("style") == "tags" else f"{question}\n{INSTRUCTION}"
    return [{"role": "user", "content": content}]


def extract(completion: str, example: dict) -> str | None:
    """What stands in the last complete box; None without one. Never raises."""
    return last_box(completion)


def score(completion: str, example: dict) -> float:
    """1.0 if Math-Verify reads the last box as the gold answer, else 0.0. Never raises."""
    return float(grade(completion, example["gold"]))


def score_batch(completions: list[str], examples: list[dict]) -> list[float]:
    """`score` of many, on several cores."""
    return [
        float(right)
        for right in grade_batch(completions, [example["gold"] for example in examples])
    ]


def answer(example: dict, draw: int = 0) -> str:
    """The worked solution, which ends in the box; one for every draw."""
    if not example["solution"]:
        raise SystemExit(
            f"math500: these rows have no worked solutions; train on {FULL} or on a file with problem and solution"
        )
    boxed = last_box(example["solution"]) == example["gold"]
    return (
        example["solution"]
        if boxed
        else f"{example['solution']}\nThe answer is $\\boxed{{{example['gold']}}}$."
    )


def _train(split: str) -> list[dict]:
    """ "train" or "validation" of FULL's train rows, in the hub's order."""
    examples = _problems(_parts("train"), FULL)
    order = sorted(range(len(examples)), key=lambda i: stable_hash("math", examples[i]["question"]))
    return [
        examples[i]
        for i in sorted(order[:VALIDATION] if split == "validation" else order[VALIDATION:])
    ]


def _parts(split: str) -> list[dict]:
    """Rows of all parts of FULL."""
    return [row for part in PARTS for row in read_rows(FULL, split, PRESETS, config=part)]


def _problems(rows: list[dict], path: str) -> list[dict]:
    """Problems of rows; those without an answer are left out, and counted on stderr."""
    examples = []
    for number, row in enumerate(rows, 1):
        problem = _problem(row)
        if problem is None:
            raise SystemExit(
                f"{path} row {number}: cannot read a problem from {describe_columns(row)}; needs {COLUMNS}"
            )
        if problem["gold"]:
            examples.append(problem)
    if len(examples) < len(rows):
        print(
            f"{path}: {len(rows) - len(examples)} of {len(rows)} rows left out: they have no answer",
            file=sys.stderr,
        )
    return examples


def _problem(row: dict) -> dict | None:
    """{"question", "gold": "" if it has none, "solution"} of a row in a format of COLUMNS; None where it fits none of them."""
    messages, reward_model = row.get("prompt"), row.get("reward_model")
    solution = row.get("solution") if isinstance(row.get("solution"), str) else ""
    if (
        isinstance(reward_model, dict)
        and isinstance(messages, list)
        and messages
        and isinstance(messages[-1], dict)
    ):
        question, gold = messages[-1].get("content"), reward_model.get("ground_truth", False)
    else:
        question, gold = row.get("problem"), row.get("answer", False if not solution else None)
        gold = last_box(solution) if gold is None else gold
    gold = str(gold) if type(gold) in (int, float) else gold or "" if gold is not False else None
    if not (isinstance(question, str) and question.strip() and isinstance(gold, str)):
        return None
    question = question.strip().removesuffix(INSTRUCTION).strip()
    return {
        "question": question,
        "gold": last_box(gold) or gold.strip(),
        "solution": solution.strip(),
    }


if __name__ == "__main__":
    from evals.run import main

    main("math500")
