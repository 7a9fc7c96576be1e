"""Shaped rewards by name: function(completion, example) -> finite components, whose sum is the
reward.

They are for training and live beside the metric, never in it: without --reward a run is trained on
the task's score(). `load_reward` gives the scripts the reward of a whole rollout at once.
"""

import math
import re

from data.planning import sudoku_solutions
from evals import TRAIN_TASKS, countdown, gsm8k, math500, mbpp, score_all, sudoku, tagged_answer
from evals.math_grader import grade, in_threads
from evals.programs import parsed, pass_or_fail


def countdown_partial(completion, example):
    """1.0 solved; 0.1 for a legal expression over exactly the given numbers that misses the target;
    else 0.

    d1, SPG, CJ-GRPO and DARE also pay 0.1 for free text, an empty answer tag and wrong numbers;
    d1's paper does not.
    """
    evaluated = countdown.evaluate(countdown.extract(completion, example) or "")
    uses_numbers = evaluated is not None and evaluated[1] == sorted(example["numbers"])
    solved = uses_numbers and evaluated[0] == example["target"]
    return {"solved": float(solved), "partial": 0.1 if uses_numbers and not solved else 0.0}


def countdown_d1(completion, example):
    """1.0 solved; 0.1 for an answer with any content; else 0: the released code of d1, SPG and
    CJ-GRPO, which their numbers come from. That code also takes 100//30 and 2**3 for legal
    expressions.
    """
    solved = countdown.score(completion, example)
    answers = tagged_answer(completion), countdown.extract(completion, example)
    return {"solved": solved, "answered": 0.0 if solved or answers == (None, None) else 0.1}


def sudoku_cells(completion, example):
    """Share of the blank cells that agree with the nearest legal solution; 0 if a given cell is
    changed or it is no grid.

    The papers compare with the one stored solution, repair grids of other lengths and do not look
    at the given cells.
    """
    grid = sudoku.cells(completion, example)
    if grid is None:
        return {"cells": 0.0}
    blanks = [i for i, given in enumerate(example["puzzle"]) if given == "0"]
    solutions = sudoku_solutions(example["puzzle"])
    agreeing = [sum(grid[i] == solution[i] for i in blanks) for solution in solutions]
    # a full board has no blank cell; it earns 1.0 when it is legal
    return {"cells": max(agreeing, default=0.0) / len(blanks) if blanks else float(bool(agreeing))}


def gsm8k_boxed(completion, example):
    r"""1.0 for the right number, and 0.1 for exactly one complete \boxed{...} with a number."""
    boxes = gsm8k.boxes(completion)
    one_number = len(boxes) == 1 and gsm8k.normalised(boxes[0]) is not None
    return {"correct": gsm8k.score(completion, example), "format": 0.1 if one_number else 0.0}


def graded(completion, example, grader):
    return {"correct": float(grade(completion, example["gold"], grader))}


def math500_hendrycks(completion, example):
    """1.0 if the last box equals the gold answer as a normalised string: the matcher of DARE's MATH
    of 5,000 problems."""
    return graded(completion, example, "hendrycks")


def math500_last_number(completion, example):
    """1.0 if the last number of the last box (without one: of all) is the gold answer."""
    return graded(completion, example, "last_number")


def needs_tags(reward, example):
    """SystemExit if the prompt does not ask for d1's tags."""
    if example.get("style") != "tags":
        raise SystemExit(
            f"--reward {reward} pays for a layout that only the prompt of --data d1 asks for"
        )


def math500_d1(completion, example):
    r"""d1's two parts, for the prompt of `--data d1`: 2.0 for the gold answer as a normalised
    string in the last box, and for the layout 1.0 with a box in answer tags, 0.75 with the tags
    alone, 0.5 with a box alone, 0.25 with neither.

    The code of d1 looks for "oxed" with its  read as a backspace, so that it pays 0.75 or 0.25;
    takes an answer tag that is never closed; and reads a text without a box as the answer.
    """
    needs_tags("math500_d1", example)
    answer = tagged_answer(completion)
    is_boxed = math500.extract(completion if answer is None else answer, example) is not None
    layout = 0.25 + 0.25 * is_boxed + 0.5 * (answer is not None)
    return {"correctness": 2.0 * grade(completion, example["gold"], "hendrycks"), "layout": layout}


def math500_deepscaler(completion, example):
    """1.0 if the last box is the gold answer by DeepScaleR's rule, which DARE uses to train on
    MATH."""
    return graded(completion, example, "deepscaler")


def gsm8k_deepscaler(completion, example):
    """The same for GSM8K, also used by DARE. Without a box the answer is wrong."""
    return math500_deepscaler(completion, example)


def gsm8k_d1(completion, example):
    """d1's five parts, for the prompt of `--data d1`: at most 0.5 for each of four, and 2.0 for the
    right number.

    xmlcount: 0.125 for each tag that occurs once with its newlines, less 0.001 for each character
    after the last one, at least 0. soft_format: the four tags once and in order, with only white
    space before and between the two parts. strict_format: soft_format with exactly d1's newlines.
    integer: the answer tag holds an integer. correctness: the task's score. d1's code does not
    always do this: its format patterns fail on reasoning of more than one line, it subtracts 0.001
    for every character of a text without </answer>, reads a text without tags as the answer, and
    does not accept -3 and 1,000 as integers.
    """
    needs_tags("gsm8k_d1", example)
    before, *rest = re.split("(</?(?:reasoning|answer)>)", completion)
    in_order = rest[::2] == ["<reasoning>", "</reasoning>", "<answer>", "</answer>"]
    soft = in_order and not (before + rest[3]).strip()
    strict = soft and (before, rest[3]) == ("", "\n") and rest[7] in ("", "\n")
    strict = strict and all(re.fullmatch(r"\n.*\n", part, re.DOTALL) for part in (rest[1], rest[5]))
    tags = ("<reasoning>\n", "\n</reasoning>\n", "\n<answer>\n", "\n</answer>")
    xmlcount = 0.125 * sum(completion.count(tag) == 1 for tag in tags)
    _, closed, after = completion.rpartition("</answer>")
    if closed:
        xmlcount = max(0.0, xmlcount - 0.001 * len(after.removeprefix("\n")))
    integer = re.fullmatch("-?([0-9]{1,3}(,[0-9]{3})+|[0-9]+)", tagged_answer(completion) or "")
    return {
        "xmlcount": xmlcount,
        "soft_format": 0.5 * bool(soft),
        "strict_format": 0.5 * bool(strict),
        "integer": 0.5 * bool(integer),
        "correctness": 2.0 * gsm8k.score(completion, example),
    }


def code_format(completion, example):
    """DiffuCoder's format reward with its weight of 0.5: 0.25 for a completion that is text
    followed by one complete ```python block at its end; 0.25 more if the code in it is not empty
    and parses. It runs nothing.

    DiffuCoder also requires a newline after the block, which an answer that ends there does not
    have, pays for an empty block, and fails on code whose parsing raises anything but a
    SyntaxError.
    """
    before, *rest = re.split(r"^```", completion.rstrip(), flags=re.MULTILINE)
    whole = len(rest) == 2 and rest[0].startswith("python\n") and not rest[1]
    whole = whole and "```" not in before + rest[0]
    code = rest[0].removeprefix("python\n").strip() if whole else ""
    return {"block": 0.25 * whole, "syntax": 0.25 * bool(code and parsed(code))}


def mbpp_diffucoder(completion, example):
    """DiffuCoder's reward: code_format, and if that is complete 2.0 times the share of tests that
    pass, each run alone.

    There a test passes by exit status 0, so that sys.exit(0) earns everything, and one timeout
    voids the completion.
    """
    form, jobs = code_format(completion, example), []
    if form["syntax"]:
        jobs = [mbpp.job(completion, example | {"tests": [test]}) for test in example["tests"]]
    return form | {"passed": 2.0 * sum(pass_or_fail(jobs)) / len(jobs) if jobs else 0.0}


REWARDS = (
    countdown_partial,
    countdown_d1,
    sudoku_cells,
    gsm8k_boxed,
    gsm8k_d1,
    math500_d1,
    gsm8k_deepscaler,
    math500_hendrycks,
    math500_deepscaler,
    math500_last_number,
    mbpp_diffucoder,
    code_format,
)
REWARDS = {reward.__name__: reward for reward in REWARDS}


def task_of(name):
    """The task whose examples the reward `name` reads, which its name starts with; "" if it suits
    every task."""
    task = name.partition("_")[0]
    return task if task in TRAIN_TASKS else ""


def load_reward(name, task):
    """--reward NAME -> function(completions, examples) -> [{component: value}]; "" -> the score of
    the task, as "score".

    The function judges a whole rollout: programs and mathematical answers in processes of their
    own, on all cores of this rank, and equal completions of one example once. It ends in SystemExit
    if a reward is not finite. load_reward ends in SystemExit if there is no such reward, or if it
    reads the examples of another task, and lists the rewards.
    """
    own = task.__name__.removeprefix("evals.")
    if name and (name not in REWARDS or task_of(name) not in (own, "")):
        problem = f"does not fit {own}" if name in REWARDS else "no such reward"
        known = "; ".join(f"{reward} for {task_of(reward) or 'every task'}" for reward in REWARDS)
        raise SystemExit(f"--reward {name}: {problem}; known: {known}")

    def rewards(completions, examples):
        keys = [(text, id(example)) for text, example in zip(completions, examples, strict=True)]
        once = dict(zip(keys, examples, strict=True))
        texts, asked = [text for text, _ in once], once.values()
        if name:
            parts = in_threads(REWARDS[name], texts, asked)
        else:
            parts = [{"score": score} for score in score_all(task, texts, asked)]
        found = dict(zip(once, parts, strict=True))
        for i, key in enumerate(keys):
            for part, value in found[key].items():
                if not math.isfinite(value):
                    raise SystemExit(
                        f"--task {own}: {part} of completion {i} of {len(keys)} is {value}, "
                        "not finite; "
                        f"--reward {name or 'none: the score'}, completion {key[0][:60]!a}"
                    )
        return [dict(found[key]) for key in keys]

    return rewards
