r"""OlympiadBench: open-ended olympiad problems in English without pictures, 674 of mathematics (OE_TO_maths_en_COMP).

    python evals/olympiad.py --model llada-8b --gen-length 2048 --block-length 64 --denoising-steps 64
    python evals/olympiad.py --completions FILE.jsonl --data rows.jsonl

The prompt is that of OpenCompass (OlympiadBench_0shot_gen_be8b13), in which DARE asks. The metric follows the benchmark's own
judge: answers between commas are matched one to one in any order, members of a tuple or an interval in theirs, and a number may
be wrong by the `error` of its row. Other than there, only the last complete box counts, two answers are the same if
Math-Verify says so, and a hundredth or a hundred times a number is not that number.
DARE's row (LLaDA-8B-Instruct 9.70, Dream-7B-Instruct 12.22, SDAR-8B-Chat 24.93, LLaDA2.0-mini 38.82) is not this number: it is
of five sets, three of them Chinese and two of physics, and its judge never sees `error`. There is no train split.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.rows import describe_columns, read_rows
from evals.answer_lists import answers_in, bare, both_signs, matched
from evals.gsm8k import INSTRUCTION
from evals.math_grader import in_threads, last_box

HUB, CONFIG, HUB_SPLIT = (
    "Hothan/OlympiadBench",
    "OE_TO_maths_en_COMP",
    "train",
)  # the hub calls its only split so
VERSION = "OpenCompass OlympiadBench_0shot_gen_be8b13"  # name of the prompt
COLUMNS = "question, final_answer (list of texts), answer_type, is_multiple_answer, unit, error, subject; English, no proofs"
TYPES = {
    "Numerical": "a numerical value",
    "Expression": "an expression",
    "Equation": "an equation",
    "Interval": "an interval",
}
FREE = ("Need_human_evaluate", "Tuple")  # answer types that the prompt does not name


def load(split: str, path: str | None = None, limit: int | None = None) -> list[dict]:
    """Examples {"question", "gold": LaTeX, "error": list of tolerances, "multiple": bool, "type", "unit": bool, "field"}.

    path: empty for the hub's rows, which are "test" alone; a .jsonl or .parquet file with the hub's columns, which gives the
    same rows for every split; or a hub id. At most `limit` rows, always the first. SystemExit with one line on an unknown
    path, a split that the hub does not have, or a row of another form (COLUMNS).
    """
    if (path or HUB) == HUB:
        if split != "test":
            raise SystemExit(
                f"--split {split}: olympiad has test alone; train on another task, such as math500"
            )
        rows = read_rows(HUB, HUB_SPLIT, (), limit, CONFIG)
    else:
        rows = read_rows(path, split, (), limit)
    return [_problem(row, f"{path or HUB} row {index}") for index, row in enumerate(rows, 1)]


def prompt(example: dict) -> list[dict]:
    """One user message, no examples: the task, what the answer is, its form, the problem."""
    box = (
        r"\boxed{multiple answers connected with commas}"
        if example["multiple"]
        else r"\boxed{answer}"
    )
    unit = (
        r", note that the unit of the answer should not be included in \boxed{}"
        if example["unit"]
        else ""
    )
    content = (
        f"The following is an open-ended problem from an International {example['field']} competition. "
        f"{_type_sentence(example)}Please calculate the answer according to the given requirements and the information "
        "provided. Please use LaTeX format to represent the variables and formulas used in the solution process and results. "
        f'Please end your solution with "So the final answer is {box}{"(unit)" if unit else ""}." and give the result '
        f"explicitly{unit}.\n{example['question']}\n\n{INSTRUCTION}"
    )
    return [{"role": "user", "content": content}]


def extract(completion: str, example: dict) -> str | None:
    """What stands in the last complete box; None without one. Never raises."""
    return last_box(completion)


def score(completion: str, example: dict) -> float:
    """1.0 if the answers in the last box are the gold ones, else 0.0. Never raises."""
    found = last_box(completion)
    if found is None:
        return 0.0
    answers, golds = (
        answers_in(found, example["multiple"]),
        answers_in(example["gold"], example["multiple"]),
    )
    # one tolerance for all, or one each; \pm stands for two answers of one tolerance
    errors = (
        example["error"]
        if len(example["error"]) == len(golds)
        else example["error"][:1] * len(golds)
    )
    answers, golds = (
        both_signs([(text, 0.0) for text in answers]),
        both_signs(list(zip(golds, errors, strict=True))),
    )
    return float(len(answers) == len(golds) and matched([text for text, _ in answers], golds))


def score_batch(completions: list[str], examples: list[dict]) -> list[float]:
    """`score` of many, on several cores."""
    return in_threads(score, completions, examples)


def _type_sentence(example: dict) -> str:
    """What the prompt says of the answer's type, with a blank behind it; "" where it says nothing."""
    if any(name in example["type"] for name in FREE):
        return ""
    kinds = [_kind(name) for name in example["type"].split(",")]
    if not example["multiple"]:
        return f"The answer of The problem should be {_kind(example['type'])}. "
    if len(set(kinds)) == 1:
        return f"The problem has multiple answers, each of them should be {kinds[0]}. "
    return f"The problem has multiple answers, with the answers in order being {', '.join(kinds)}. "


def _kind(name: str) -> str | None:
    """ "a numerical value" of "Numerical"; None for an unknown type."""
    return next((text for kind, text in TYPES.items() if kind in name.partition("-")[0]), None)


def _problem(row: dict, where: str) -> dict:
    """A row of the hub. SystemExit says what it lacks."""
    question, final, kind, multiple = (
        row.get(key) for key in ("question", "final_answer", "answer_type", "is_multiple_answer")
    )
    try:
        error = [float(part.strip() or 0) for part in str(row.get("error") or "0").split(",")]
    except ValueError:
        error = []
    good = (
        isinstance(question, str)
        and question.strip()
        and isinstance(kind, str)
        and type(multiple) is bool
    )
    good = (
        good
        and isinstance(final, list)
        and final
        and all(isinstance(text, str) and text.strip() for text in final)
    )
    good = (
        good
        and error
        and all(0 <= part < float("inf") for part in error)
        and row.get("language", "English") == "English"
    )
    good = good and (
        any(name in kind for name in FREE) or all(_kind(part) for part in kind.split(","))
    )
    if not good:
        raise SystemExit(
            f"{where}: cannot read a problem from {describe_columns(row)}; needs {COLUMNS}"
        )
    return {
        "question": question,
        "gold": ", ".join(bare(text) for text in final),
        "error": error,
        "multiple": multiple,
        "type": kind,
        "unit": bool(row.get("unit")),
        "field": "Math" if row.get("subject", "Math") == "Math" else "Physics",
    }


if __name__ == "__main__":
    from evals.run import main

    main("olympiad")
