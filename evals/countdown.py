"""Countdown: reach a target with every given number exactly once.

    python evals/countdown.py --model tiny-sdar                                         preset "small", two tokens per step
    python evals/countdown.py --model sdar-8b --data cd3 --gen-length 256 --denoising-steps 4
    python evals/countdown.py --completions FILE.jsonl --data countdown_cd3_test.jsonl

The metric is exact: 1.0 for a legal expression over exactly the given numbers that equals the target, else 0.0. A legal
expression has integer literals, + - * /, unary minus and brackets, and is evaluated in fractions. `//`, `**`, decimals,
digits of other scripts and leading zeros (07) are not legal: d1's rule, eval() after a character filter, accepts
100//30 = 3, hangs on 93**100**30 and reads 30.100 as the two numbers 30 and 100.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.planning import COUNTDOWN, countdown, countdown_solutions, stable_hash
from data.rows import describe_columns, read_rows
from evals.arithmetic import evaluate
from evals.run import tagged_answer

PRESETS = COUNTDOWN  # names that `load` takes besides files and hub ids; "small" is the default

VERSION = {"compact": "compact", "tags": "d1, training"}  # name of the prompt, by style
# The training prompt of d1 and DARE to the byte, so that scores can be compared (a test holds it against DARE's file).
PROMPT = """Respond in the following format:
<reasoning>
...
</reasoning>
<answer>
...
</answer>

Using only the numbers {numbers}, create an arithmetic expression that evaluates to exactly {target}. \
You must use all numbers from the list, and each number must be used exactly once. \
You may use the operations +, -, *, and / as needed. \
After reasoning, provide only your final expression inside <answer></answer> tags without including an equals sign \
or the target number. For example, if the numbers are [2, 3, 4] and the target is 5, a valid answer is: <answer>
2*4-3
</answer>"""

COLUMNS = "numbers (or nums) and target, input and output (d1, Dream), or extra_info.numbers and reward_model.ground_truth (DARE)"


def load(split: str, path: str | None = None, limit: int | None = None) -> list[dict]:
    """Examples {"numbers": list, "target": int, "style": "compact" | "tags"}, at most `limit`, always the first.

    path: empty for "small"; a preset of data/planning.py; a .jsonl, .csv or .parquet file; or a hub id. Rows may be ours,
    d1's, Dream's or DARE's (COLUMNS). A file has no splits: it gives the same rows for every one. Rows that do not come
    from a preset are asked in style "tags". SystemExit with one line on an unknown path or a row of another form.
    """
    path = path or "small"
    if path in PRESETS:
        return countdown(path, split, limit)
    examples = []
    for number, row in enumerate(read_rows(path, split, PRESETS, limit), 1):
        problem = _problem(row)
        if problem is None:
            raise SystemExit(
                f"{path} row {number}: cannot read a problem from {describe_columns(row)}; needs {COLUMNS}"
            )
        examples.append({"numbers": problem[0], "target": problem[1], "style": "tags"})
    return examples


def prompt(example: dict) -> list[dict]:
    """Messages. "compact" is fixed width (`12  7  3 =   8`, 14 characters for three numbers): no padding in a batch."""
    numbers, target = example["numbers"], example["target"]
    if example["style"] == "compact":
        content = f"{' '.join(f'{n:2d}' for n in numbers)} = {target:3d}"
    else:
        content = PROMPT.format(numbers=numbers, target=target)
    return [{"role": "user", "content": content}]


def extract(completion: str, example: dict) -> str | None:
    r"""The expression of a completion, not checked; None where there is none.

    "compact": the whole completion. "tags": the last complete answer tag, with \times, \cdot and \div as operators and
    without a final "= number", whose value is not looked at.
    """
    if example["style"] == "compact":
        return completion.strip() or None
    text = tagged_answer(completion) or ""
    for latex, sign in ((r"\times", "*"), (r"\cdot", "*"), (r"\div", "/")):
        text = text.replace(latex, sign)
    expression, _, result = text.partition("=")
    if re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", result.strip()):
        text = expression
    return text.strip() or None


def score(completion: str, example: dict) -> float:
    """1.0 for a legal expression over exactly the given numbers that equals the target, else 0.0. Never raises."""
    return float(
        evaluate(extract(completion, example) or "")
        == (example["target"], sorted(example["numbers"]))
    )


def answer(example: dict, draw: int = 0) -> str:
    """A gold completion in the form that the prompt asks for: one of all solutions, drawn by a hash of (example, draw).

    A compact example is answered with + and - only. ValueError where the example has no solution.
    """
    numbers, target, style = example["numbers"], example["target"], example["style"]
    solutions = countdown_solutions(numbers, target, "+-" if style == "compact" else "+-*/")
    if not solutions:
        raise ValueError(f"no expression over {numbers} equals {target}")
    expression = solutions[stable_hash("countdown", numbers, target, draw) % len(solutions)]
    return expression if style == "compact" else f"<answer>\n{expression}\n</answer>"


def _problem(row: dict) -> tuple[list[int], int] | None:
    """(numbers, target) of a row in any of the formats of COLUMNS; None where columns or values fit none of them."""
    extra, reward_model = row.get("extra_info"), row.get("reward_model")
    if isinstance(extra, dict) and isinstance(reward_model, dict):
        numbers, target = (
            _integers(extra.get("numbers")),
            _integers(reward_model.get("ground_truth")),
        )
    elif "input" in row and "output" in row:
        numbers, target = _integers(row["input"]), _integers(row["output"])
        if "=" in str(
            row["output"]
        ):  # Dream: the output is one way, step by step, and the input ends with the target
            numbers, target = numbers[:-1], numbers[-1:]
            if _integers(row["output"].rpartition("=")[2]) != target:
                return None
    else:
        numbers, target = (
            _integers(row.get("numbers", row.get("nums"))),
            _integers(row.get("target")),
        )
    return (numbers, target[0]) if numbers and len(target) == 1 else None


def _integers(value: object) -> list[int]:
    """Integers of 7, "7", [1, 2], "[1, 2]" or "1,2" (none negative); [] for anything else."""
    text = str(value).strip().removeprefix("[").removesuffix("]")
    return (
        [int(n) for n in text.split(",")] if re.fullmatch(r" *[0-9]+ *(, *[0-9]+ *)*", text) else []
    )


if __name__ == "__main__":
    from evals.run import main

    main("countdown")
