"""Shaped rewards by name: function(completion, example) -> finite components, whose sum is the
reward. A function of your own, --reward path.py:function, may also return one number.

They are for training and live beside the metric, never in it: without --reward a run is trained on
the task's score(), which pays for nothing but right answers. Rewards called ..._d1 pay what the
released code of d1 pays, errors included, to reproduce numbers that were made with it. Those called
countdown_partial, sudoku_cells, gsm8k_tags and math500_tags are the same ideas without the errors.
`load_reward` gives the scripts the reward of a whole rollout at once.
"""

import ast
import math
import operator
import re
from numbers import Real

from data.planning import sudoku_solutions
from evals import (
    countdown,
    gsm8k,
    load_file,
    mbpp,
    score_all,
    sudoku,
    tagged_answer,
)
from evals.math_grader import MATHD, MAX_LENGTH, MAX_TEXT, boxes, grade, last_box, rewritten
from evals.programs import first_program, pass_or_fail
from evals.sandbox import in_threads


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


def d1_answer(completion, example):
    """What d1's countdown and sudoku rewards read: the last answer tag with all that follows its
    first opening. None without one."""
    if example["style"] == "compact":
        return completion.strip() or None
    closed = [part for part in completion.split("</answer>")[:-1] if "<answer>" in part]
    return closed[-1].partition("<answer>")[2].strip() if closed else None


def countdown_d1(completion, example):
    """1.0 solved; 0.1 for any other answer tag, also an empty one; else 0: the released code of d1,
    SPG and CJ-GRPO, which their numbers come from.

    It calculates in floats and takes 100//30, 2**3 and the numbers 30 and 100 in 30.100 for legal.
    It knows no box, LaTeX or equals sign.
    """
    text, solved = d1_answer(completion, example), False
    short = text if text and len(text) <= MAX_LENGTH else ""
    numbers = sorted(map(int, re.findall(r"\d+", short)))
    if numbers == sorted(example["numbers"]) and re.fullmatch(r"[\d+\-*/().\s]+", short):
        try:
            body = ast.parse(short, mode="eval").body
            value = countdown.calculated(body, PYTHON_OPERATIONS, lambda literal: literal)
            solved = abs(value - example["target"]) < 1e-5
        except (SyntaxError, ArithmeticError, TypeError, MemoryError, RecursionError):
            pass
    return {"solved": float(solved), "answered": 0.0 if solved or text is None else 0.1}


def power(base, exponent):
    """base ** exponent. OverflowError where the result is too large to wait for."""
    if exponent > 1000 and abs(base) > 1:
        raise OverflowError
    return base**exponent


PYTHON_OPERATIONS = countdown.OPERATIONS | {
    ast.UAdd: operator.pos,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: power,
}


def sudoku_cells(completion, example):
    """Share of the blank cells that agree with the nearest legal solution; 0 if a given cell is
    changed or it is no grid."""
    grid = sudoku.cells(completion, example)
    if grid is None:
        return {"cells": 0.0}
    blanks = [i for i, given in enumerate(example["puzzle"]) if given == "0"]
    solutions = sudoku_solutions(example["puzzle"])
    agreeing = [sum(grid[i] == solution[i] for i in blanks) for solution in solutions]
    # a full board has no blank cell; it earns 1.0 when it is legal
    return {"cells": max(agreeing, default=0.0) / len(blanks) if blanks else float(bool(agreeing))}


def sudoku_d1(completion, example):
    """Share of the blank cells that agree with the stored solution: the released code of d1.

    It takes all digits of the answer, whatever stands between them, fills them up to 16 or cuts
    them there, and does not look at the given cells: sixteen 1s earn a quarter.
    """
    digits = "".join(filter(str.isdigit, d1_answer(completion, example) or ""))
    cells = zip(example["puzzle"], example["solution"], digits.ljust(16, "0"), strict=False)
    right = [cell == solution for given, solution, cell in cells if given == "0"]
    return {"cells": sum(right) / len(right) if digits and right else 0.0}


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
            f"--reward {reward} pays for a layout that only the prompt of --data d1 asks for; "
            "for a file: --data FILE@d1"
        )


def math500_tags(completion, example):
    r"""d1's two parts, for the prompt of `--data d1`: 2.0 for the gold answer as a normalised
    string in the last box, and for the layout 1.0 with a box in answer tags, 0.75 with the tags
    alone, 0.5 with a box alone, 0.25 with neither.
    """
    needs_tags("math500_tags", example)
    answer = tagged_answer(completion)
    is_boxed = last_box(completion if answer is None else answer) is not None
    layout = 0.25 + 0.25 * is_boxed + 0.5 * (answer is not None)
    return {"correctness": 2.0 * grade(completion, example["gold"], "hendrycks"), "layout": layout}


def math500_d1(completion, example):
    r"""The same as d1's released code pays it: the layout earns 0.75 with an answer tag, also one
    that is never closed, else 0.25, because it looks for \boxed with its \b read as a backspace. A
    text without a box is the answer itself."""
    needs_tags("math500_d1", example)
    answer = boxes(completion[max(completion.rfind("\\boxed"), 0) :])
    answer = answer[0] if answer else completion
    # the first rule is DeepScaleR's
    correct = rewritten(answer, MATHD[1:]) == rewritten(example["gold"], MATHD[1:])
    layout = 0.25 + 0.5 * ("<answer>" in completion)
    return {"correctness": 2.0 * correct, "layout": layout}


def math500_deepscaler(completion, example):
    """1.0 if the last box is the gold answer by DeepScaleR's rule, which DARE uses to train on
    MATH."""
    return graded(completion, example, "deepscaler")


def gsm8k_deepscaler(completion, example):
    """The same for GSM8K, also used by DARE. Without a box the answer is wrong."""
    return math500_deepscaler(completion, example)


TAGS = ("<reasoning>\n", "\n</reasoning>\n", "\n<answer>\n", "\n</answer>")  # d1's layout


def gsm8k_d1(completion, example):
    """The five parts that d1's released code pays, for the prompt of `--data d1`.

    xmlcount: 0.125 for each tag that occurs once with its newlines, less 0.001 for each character
    behind the last "</answer>" and a newline, if "<answer>" occurs once, and for each but the first
    behind the last "</answer>", if that does. A text that ends in "</answer>" without a newline
    lacks the former place, so that all its characters count; there is no lower limit. soft_format
    and strict_format: 0.5 each for the layout with reasoning and answer of one line. integer: 0.5
    for digits, without sign or comma, and correctness: 2.0 for the gold answer as the data set
    writes it, behind the last "<answer>", or as the whole text.
    """
    needs_tags("gsm8k_d1", example)
    xmlcount = 0.125 * sum(completion.count(tag) == 1 for tag in TAGS)
    if completion.count(TAGS[2]) == 1:
        xmlcount -= 0.001 * len(completion.split("\n</answer>\n")[-1])
    if completion.count(TAGS[3]) == 1:
        xmlcount -= 0.001 * (len(completion.split("\n</answer>")[-1]) - 1)
    soft = "<reasoning>.*</reasoning>\\s*<answer>.*</answer>"
    strict = "<reasoning>\n.*\n</reasoning>\n<answer>\n.*\n</answer>\n\n?"
    answer = completion.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    return {
        "xmlcount": xmlcount,
        "soft_format": 0.5 * bool(re.match(soft, completion[:MAX_TEXT])),
        "strict_format": 0.5 * bool(re.fullmatch(strict, completion)),
        "integer": 0.5 * answer.isdigit(),
        "correctness": 2.0 * (answer == example.get("written", example["gold"])),
    }


def gsm8k_tags(completion, example):
    """The same five parts without the errors: at most 0.5 for each of four, and 2.0 for the right
    number.

    xmlcount: 0.125 for each tag that occurs once with its newlines, less 0.001 for each character
    after the last one, at least 0. soft_format: the four tags once and in order, with only white
    space before and between the two parts. strict_format: soft_format with exactly d1's newlines.
    integer: the answer tag holds an integer. correctness: the task's score.
    """
    needs_tags("gsm8k_tags", example)
    before, *rest = re.split("(</?(?:reasoning|answer)>)", completion)
    in_order = rest[::2] == ["<reasoning>", "</reasoning>", "<answer>", "</answer>"]
    soft = in_order and not (before + rest[3]).strip()
    strict = soft and (before, rest[3]) == ("", "\n") and rest[7] in ("", "\n")
    strict = strict and all(re.fullmatch(r"\n.*\n", part, re.DOTALL) for part in (rest[1], rest[5]))
    xmlcount = 0.125 * sum(completion.count(tag) == 1 for tag in TAGS)
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
    return {"block": 0.25 * whole, "syntax": 0.25 * bool(code and first_program([code]))}


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
    sudoku_d1,
    gsm8k_tags,
    gsm8k_d1,
    math500_tags,
    math500_d1,
    gsm8k_deepscaler,
    math500_hendrycks,
    math500_deepscaler,
    math500_last_number,
    mbpp_diffucoder,
)
REWARDS = {reward.__name__: reward for reward in REWARDS}

METRICS = {"mean", "std", "square", "zero_std_frac"}  # reward/... of rollout_metrics


def load_reward(name, task):
    """--reward NAME or path.py:function -> function(completions, examples) -> [{component: value}];
    "" -> the score of the task, as "score".

    The function judges a whole rollout: programs and mathematical answers in processes of their
    own, on all cores of this rank, and equal completions of one example once. It ends in SystemExit
    if a reward is not finite, has other components than the first, or one of METRICS. load_reward
    ends in SystemExit if there is no such reward or file, or if it reads the examples of another
    task, and lists the rewards.
    """
    own, function = task.__name__.removeprefix("evals."), REWARDS.get(name)
    file, _, function_name = name.rpartition(":")
    if file.endswith(".py"):
        module = load_file(file, {function_name: 2})
        function = getattr(module, function_name)
    elif name and not (function and name.startswith(f"{own}_")):
        problem = f"does not fit {own}" if function else "no such reward"
        raise SystemExit(
            f"--reward {name}: {problem}; known: path.py:function, {', '.join(REWARDS)}"
        )

    def parts_of(completion, example):
        paid = function(completion, example)
        return paid if isinstance(paid, dict) else {"reward": paid}

    names = {}  # of the components of the first completion, the trial: the same on all ranks

    def rewards(completions, examples):
        keys = [(text, id(example)) for text, example in zip(completions, examples, strict=True)]
        once = dict(zip(keys, examples, strict=True))
        texts, asked = [text for text, _ in once], once.values()
        if function:
            parts = in_threads(parts_of, texts, asked)
        else:
            parts = [{"score": score} for score in score_all(task, texts, asked)]
        found = dict(zip(once, parts, strict=True))
        for i, key in enumerate(keys):
            which = f"completion {i} of {len(keys)}"
            said = f"--reward {name or 'none: the score'}, completion {key[0][:60]!a}"
            names.update(names or dict.fromkeys(found[key]))
            if taken := names.keys() & METRICS:
                raise SystemExit(f"--reward {name}: {taken.pop()} is a metric: rename that part")
            if not found[key] or found[key].keys() != names.keys():
                odd = f"{which} has the parts {[*found[key]]}"
                odd += f", the first had {[*names]}" if names else ""
                raise SystemExit(f"--task {own}: {odd}: give 0 for what is not earned; {said}")
            for part, value in found[key].items():
                if not (isinstance(value, Real) and math.isfinite(value)):
                    problem = f"{part} of {which} is {value!r}, not a finite number"
                    raise SystemExit(f"--task {own}: {problem}; {said}")
        return [{part: float(found[key][part]) for part in names} for key in keys]

    return rewards
