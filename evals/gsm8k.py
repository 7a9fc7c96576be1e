r"""GSM8K: word problems of primary school, whose answer is one number.

    python evals/gsm8k.py --model sdar-8b --gen-length 256 --denoising-steps 4      openai/gsm8k, test
    python evals/gsm8k.py --completions FILE.jsonl --data test.jsonl

The metric is exact: 1.0 if the number of the completion (`extract`) equals the gold one in fractions, else 0.0. So 18.00,
\$18 and 18 dollars are 18, and 1,450,000 is one number: OpenCompass reads the last run of digits, which is 000.
Units are not interpreted: 50\% is 50, and 2 dozen is 2.
"""

import re
import sys
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.planning import stable_hash
from data.rows import describe_columns, read_rows
from evals.math_grader import MAX_LENGTH, boxes
from evals.numerals import final_numbers, normalised, plain
from evals.run import tagged_answer

HUB = "openai/gsm8k"
PRESETS = (
    "d1",
)  # names that `load` takes besides files and hub ids: the rows of HUB, asked with d1's training prompt
VALIDATION = (
    512  # rows of the hub's train split that are the validation split, which the hub does not have
)

VERSION = {
    "boxed": "OpenCompass gsm8k_0shot_v2_gen_17d799",
    "tags": "d1, training",
}  # name of the prompt, by style
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."  # as in SDAR's evaluation
APPENDED = (
    INSTRUCTION,
    'Let\'s think step by step and output the final answer after "####".',
)  # verl's, in some parquets
TAGS = "\nRespond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n\n\n"  # d1, training
COLUMNS = (
    "question and answer (a number, or a solution that ends in #### and a number), "
    "or prompt and reward_model.ground_truth (DARE)"
)


def load(split: str, path: str | None = None, limit: int | None = None) -> list[dict]:
    """Examples {"question", "gold": number as text, "solution": worked, "" if unknown, "style": "boxed" | "tags"}.

    path: empty for the hub's rows; "d1" for the same in style "tags"; a .jsonl, .csv or .parquet file; or a hub id. At most
    `limit` rows, always the first. Of the hub's 7,473 train rows the 512 with the smallest `stable_hash` of their question
    are "validation" and the others "train". A file has no splits: it gives the same rows for every one. SystemExit with one
    line on an unknown path or a row of another form (COLUMNS).
    """
    path = path or HUB
    style = "tags" if path in PRESETS else "boxed"
    rows = (
        _hub_rows(split)[:limit]
        if path in (HUB, *PRESETS)
        else read_rows(path, split, PRESETS, limit)
    )
    examples = []
    for number, row in enumerate(rows, 1):
        problem = _problem(row)
        if problem is None:
            raise SystemExit(
                f"{path} row {number}: cannot read a problem from {describe_columns(row)}; needs {COLUMNS}"
            )
        examples.append(problem | {"style": style})
    return examples


def prompt(example: dict) -> list[dict]:
    """One user message, no examples. "tags" is d1's training prompt to the byte."""
    question = example["question"]
    content = TAGS + question if example["style"] == "tags" else f"{question}\n{INSTRUCTION}"
    return [{"role": "user", "content": content}]


def extract(completion: str, example: dict) -> str | None:
    r"""The answer of a completion, normalised if it is a number (`normalised`); None where there is none. Never raises.

    "boxed", the first rule that finds something:
      1. the last complete \boxed{...} that is not empty, also if one behind it is not closed or too long;
      2. the number right behind the last "####";
      3. the sentence behind the last "answer is": the first number of it, behind its last "=";
      4. the last number.
    "tags": the last complete answer tag, or the last complete box in it.
    """
    tags = example["style"] == "tags"
    text = (tagged_answer(completion) or "") if tags else completion
    answers = [box for box in boxes(text) if box.strip()] or (
        [text] if tags else final_numbers(plain(text))
    )
    last = answers[-1].strip() if answers else ""
    return normalised(last) or last if 0 < len(last) <= MAX_LENGTH else None


def score(completion: str, example: dict) -> float:
    """1.0 if the number of the completion is the gold one, else 0.0. Never raises."""
    found = normalised(extract(completion, example) or "")
    return float(found is not None and Fraction(found) == Fraction(example["gold"]))


def answer(example: dict, draw: int = 0) -> str:
    """The worked solution in the form that the prompt asks for, without the calculator's <<48/2=24>>; one for every draw."""
    if not example["solution"]:
        raise SystemExit(
            f"gsm8k: these rows have no worked solutions; train on {HUB} or on a file with question and answer"
        )
    steps = re.sub(r"<<[^<>\n]*>>", "", example["solution"])
    if example["style"] == "tags":
        return f"<reasoning>\n{steps}\n</reasoning>\n<answer>\n{example['gold']}\n</answer>"
    return f"{steps}\nThe answer is \\boxed{{{example['gold']}}}."


def _hub_rows(split: str) -> list[dict]:
    """Rows of `split` of HUB, in the hub's order."""
    rows = read_rows(HUB, "test" if split == "test" else "train", PRESETS, config="main")
    if split == "test":
        return rows
    order = sorted(range(len(rows)), key=lambda i: stable_hash("gsm8k", rows[i]["question"]))
    return [
        rows[i] for i in sorted(order[:VALIDATION] if split == "validation" else order[VALIDATION:])
    ]


def _problem(row: dict) -> dict | None:
    """{"question", "gold", "solution"} of a row in any of the formats of COLUMNS; None where it fits none of them."""
    messages, reward_model = row.get("prompt"), row.get("reward_model")
    if (
        isinstance(reward_model, dict)
        and isinstance(messages, list)
        and messages
        and isinstance(messages[-1], dict)
    ):
        question, solution, gold = (
            messages[-1].get("content"),
            "",
            str(reward_model.get("ground_truth")),
        )
    else:
        question = row.get("question")
        solution, _, gold = str(row.get("answer")).rpartition("####")
    gold = normalised(gold)
    if not isinstance(question, str) or not question.strip() or gold is None:
        return None
    for instruction in APPENDED:
        question = question.strip().removesuffix(instruction).strip()
    return {"question": question, "gold": gold, "solution": solution.strip()}


if __name__ == "__main__":
    from evals.run import main

    main("gsm8k")
