"""Shaped rewards by name: function(completion, example) -> finite components, whose sum is the reward.

They are for training and live beside the metric, never in it: without --reward a run is trained on the task's score().
`load_reward` gives the scripts the reward of a whole rollout at once.
"""

import math
import re
from collections.abc import Callable
from types import ModuleType

from data.planning import sudoku_solutions
from evals import countdown, gsm8k, math500, mbpp, score_all, sudoku
from evals.math_grader import grade, in_threads
from evals.programs import parsed, pass_or_fail
from evals.run import tagged_answer


def countdown_partial(completion: str, example: dict) -> dict[str, float]:
    """1.0 solved; 0.1 for a legal expression over exactly the given numbers that misses the target; else 0.

    d1, SPG, CJ-GRPO and DARE also pay 0.1 for free text, an empty answer tag and wrong numbers; d1's paper does not.
    """
    evaluated = countdown.evaluate(countdown.extract(completion, example) or "")
    uses_numbers = evaluated is not None and evaluated[1] == sorted(example["numbers"])
    solved = uses_numbers and evaluated[0] == example["target"]
    return {"solved": float(solved), "partial": 0.1 if uses_numbers and not solved else 0.0}


def countdown_d1(completion: str, example: dict) -> dict[str, float]:
    """1.0 solved; 0.1 for an answer, whatever stands in it; else 0: the released code of d1, SPG and CJ-GRPO, behind their
    numbers. It also takes 100//30 and 2**3 for legal expressions.
    """
    solved, answers = (
        countdown.score(completion, example),
        (tagged_answer(completion), countdown.extract(completion, example)),
    )
    return {"solved": solved, "answered": 0.0 if solved or answers == (None, None) else 0.1}


def sudoku_cells(completion: str, example: dict) -> dict[str, float]:
    """Share of the blank cells that agree with the nearest legal solution; 0 if a given cell is changed or it is no grid.

    The papers compare with the one stored solution, repair grids of other lengths and do not look at the given cells.
    """
    grid = sudoku.cells(completion, example)
    if grid is None:
        return {"cells": 0.0}
    blanks = [i for i, given in enumerate(example["puzzle"]) if given == "0"]
    agreeing = [
        sum(grid[i] == solution[i] for i in blanks)
        for solution in sudoku_solutions(example["puzzle"])
    ]
    # a full board has no blank cell; it earns 1.0 when it is legal
    return {"cells": max(agreeing, default=0.0) / len(blanks) if blanks else float(bool(agreeing))}


def gsm8k_boxed(completion: str, example: dict) -> dict[str, float]:
    r"""1.0 for the right number, and 0.1 for exactly one complete \boxed{...} that holds a number."""
    boxes = gsm8k.boxes(completion)
    one_number = len(boxes) == 1 and gsm8k.normalised(boxes[0]) is not None
    return {"correct": gsm8k.score(completion, example), "format": 0.1 if one_number else 0.0}


def math500_hendrycks(completion: str, example: dict) -> dict[str, float]:
    """1.0 where the last box is the gold answer as a normalised string: the matcher of DARE's MATH of 5,000 problems."""
    return {"correct": float(grade(completion, example["gold"], "hendrycks"))}


def math500_last_number(completion: str, example: dict) -> dict[str, float]:
    """1.0 where the last number of the last box, or without one of the completion, is the gold answer."""
    return {"correct": float(grade(completion, example["gold"], "last_number"))}


def math500_d1(completion: str, example: dict) -> dict[str, float]:
    r"""d1's two parts, for the prompt of `--data d1`: 2.0 for the gold answer as a normalised string in the last box, and for
    the layout 1.0 with a box in answer tags, 0.75 with the tags alone, 0.5 with a box alone, 0.25 with neither.

    The code of d1 looks for "oxed" with its  read as a backspace, so that it pays 0.75 or 0.25; takes an answer tag that is
    never closed; and reads a text without a box as the answer.
    """
    if example.get("style") != "tags":
        raise SystemExit(
            "--reward math500_d1 pays for a layout that only the prompt of --data d1 asks for"
        )
    answer = tagged_answer(completion)
    is_boxed = math500.extract(completion if answer is None else answer, example) is not None
    layout = 0.25 + 0.25 * is_boxed + 0.5 * (answer is not None)
    return {"correctness": 2.0 * grade(completion, example["gold"], "hendrycks"), "layout": layout}


def math500_deepscaler(completion: str, example: dict) -> dict[str, float]:
    """1.0 where the last box is the gold answer by DeepScaleR's rule: what DARE trains MATH on."""
    return {"correct": float(grade(completion, example["gold"], "deepscaler"))}


def gsm8k_deepscaler(completion: str, example: dict) -> dict[str, float]:
    """The same, for GSM8K: what DARE trains it on. Without a box the answer is wrong."""
    return math500_deepscaler(completion, example)


def gsm8k_d1(completion: str, example: dict) -> dict[str, float]:
    """d1's five parts, for the prompt of `--data d1`: at most 0.5 for each of four, and 2.0 for the right number.

    xmlcount: 0.125 for each tag that stands once with its newlines, less 0.001 for each character behind the last one, not
    below 0. soft_format: the four tags once and in order, with blanks only before and between the two parts. strict_format:
    soft_format with exactly d1's newlines. integer: an integer stands in the answer tag. correctness: the task's score.
    The code of d1 differs where it did not do what it says: its two format patterns fail on reasoning of more than one line,
    it takes 0.001 for every character of a text without </answer>, reads a text without tags as the answer, and does not
    know -3 and 1,000 as integers.
    """
    if example["style"] != "tags":
        raise SystemExit(
            "--reward gsm8k_d1 pays for a layout that only the prompt of --data d1 asks for"
        )
    before, *rest = re.split("(</?(?:reasoning|answer)>)", completion)
    soft = (
        rest[::2] == ["<reasoning>", "</reasoning>", "<answer>", "</answer>"]
        and not (before + rest[3]).strip()
    )
    strict = soft and (before, rest[3]) == ("", "\n") and rest[7] in ("", "\n")
    strict = strict and all(re.fullmatch(r"\n.*\n", part, re.DOTALL) for part in (rest[1], rest[5]))
    tags = sum(
        completion.count(tag) == 1
        for tag in ("<reasoning>\n", "\n</reasoning>\n", "\n<answer>\n", "\n</answer>")
    )
    behind = (
        len(completion.rpartition("</answer>")[2].removeprefix("\n"))
        if "</answer>" in completion
        else 0
    )
    integer = re.fullmatch("-?([0-9]{1,3}(,[0-9]{3})+|[0-9]+)", tagged_answer(completion) or "")
    return {
        "xmlcount": max(0.0, 0.125 * tags - 0.001 * behind),
        "soft_format": 0.5 if soft else 0.0,
        "strict_format": 0.5 if strict else 0.0,
        "integer": 0.5 if integer else 0.0,
        "correctness": 2.0 * gsm8k.score(completion, example),
    }


def code_format(completion: str, example: dict) -> dict[str, float]:
    """DiffuCoder's format reward at its weight of 0.5: 0.25 where a completion is text and then one whole ```python block, with
    nothing behind it; 0.25 more where that code is not empty and parses. It runs nothing.

    DiffuCoder also asks for a newline behind the block, which an answer that ends there does not have, pays for an empty block,
    and fails on code whose parsing raises anything but a SyntaxError.
    """
    before, *rest = re.split(r"^```", completion.rstrip(), flags=re.MULTILINE)
    whole = (
        len(rest) == 2
        and rest[0].startswith("python\n")
        and not rest[1]
        and "```" not in before + rest[0]
    )
    code = rest[0].removeprefix("python\n").strip() if whole else ""
    return {"block": 0.25 if whole else 0.0, "syntax": 0.25 if code and parsed(code) else 0.0}


def mbpp_diffucoder(completion: str, example: dict) -> dict[str, float]:
    """DiffuCoder's reward: code_format, and where that is whole 2.0 times the share of the tests that pass, each run alone.

    There a test is passed by exit status 0, so sys.exit(0) earns all of it, and one timeout voids the completion.
    """
    form = code_format(completion, example)
    jobs = (
        [mbpp.job(completion, example | {"tests": [test]}) for test in example["tests"]]
        if form["syntax"]
        else []
    )
    return form | {"passed": 2.0 * sum(pass_or_fail(jobs)) / len(jobs) if jobs else 0.0}


REWARDS = {
    "countdown_partial": countdown_partial,
    "countdown_d1": countdown_d1,
    "sudoku_cells": sudoku_cells,
    "gsm8k_boxed": gsm8k_boxed,
    "gsm8k_d1": gsm8k_d1,
    "math500_d1": math500_d1,
    "gsm8k_deepscaler": gsm8k_deepscaler,
    "math500_hendrycks": math500_hendrycks,
    "math500_deepscaler": math500_deepscaler,
    "math500_last_number": math500_last_number,
    "mbpp_diffucoder": mbpp_diffucoder,
    "code_format": code_format,
}
# the task whose examples a reward reads; one that is not named here fits every task
TASKS = {
    "countdown_partial": countdown,
    "countdown_d1": countdown,
    "sudoku_cells": sudoku,
    "mbpp_diffucoder": mbpp,
}
TASKS |= {"gsm8k_boxed": gsm8k, "gsm8k_d1": gsm8k, "gsm8k_deepscaler": gsm8k, "math500_d1": math500}
TASKS |= {
    "math500_hendrycks": math500,
    "math500_deepscaler": math500,
    "math500_last_number": math500,
}


def load_reward(
    name: str, task: ModuleType
) -> Callable[[list[str], list[dict]], list[dict[str, float]]]:
    """--reward NAME -> function(completions, examples) -> components of each; an empty name -> the score of `task`, "score".

    A rollout is one batch: programs and mathematical answers are judged in processes of their own, on all cores of this rank,
    while the calling thread waits; equal completions of one example are judged once. The function ends in SystemExit where a
    reward is not finite, with the place in the batch. SystemExit here where there is no such reward, or where it reads the
    examples of another task, with the rewards that fit.
    """
    short = lambda module: module.__name__.removeprefix("evals.")
    if name and not (name in REWARDS and TASKS.get(name, task) is task):
        fitting = "; ".join(
            f"{reward} for {short(TASKS[reward]) if reward in TASKS else 'every task'}"
            for reward in REWARDS
        )
        problem = f"does not fit {short(task)}" if name in REWARDS else "no such reward"
        raise SystemExit(f"--reward {name}: {problem}; known: {fitting}")

    def rewards(completions: list[str], examples: list[dict]) -> list[dict[str, float]]:
        keys = [
            (completion, id(example))
            for completion, example in zip(completions, examples, strict=True)
        ]
        once = {key: example for key, example in zip(keys, examples, strict=True)}
        texts, asked = [text for text, _ in once], list(once.values())
        if name:
            parts = in_threads(REWARDS[name], texts, asked)
        else:
            parts = [{"score": score} for score in score_all(task, texts, asked)]
        found = dict(zip(once, parts, strict=True))
        for i, key in enumerate(keys):
            for part, value in found[key].items():
                if not math.isfinite(value):
                    where = f"--task {short(task)}: {part} of completion {i} of {len(keys)} is {value}, not finite"
                    raise SystemExit(
                        f"{where}; --reward {name or 'none: the score'}, completion {key[0][:60]!a}"
                    )
        return [dict(found[key]) for key in keys]

    return rewards
