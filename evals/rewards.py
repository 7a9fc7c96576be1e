"""Shaped rewards by name: function(completion, example) -> finite components, whose sum is the
reward. A function of your own, --reward path.py:function, may also return one number.

They are for training and live beside the metric, never in it: without --reward a run is trained on
the task's score(), which pays for nothing but right answers, less what the task's is_copy() finds.
Each reward pays what the released code of its paper pays, errors included, to reproduce numbers
that were made with it. `load_reward` gives the scripts the reward of a whole rollout at once.
"""

import os
import re
from contextlib import suppress
from numbers import Real

import torch

from evals import mbpp, score_all
from evals.math500 import is_copy
from evals.math_grader import (
    MAX_LENGTH,
    MAX_TEXT,
    ask,
    boxes,
    hendrycks,
    last_box,
    rewritten,
    rules,
)
from evals.own import SECONDS, guarded, load_file
from evals.programs import first_program
from evals.sandbox import in_threads


def d1_answer(completion, example):
    """What d1's countdown and sudoku rewards read: the last answer tag with all that follows its
    first opening. None without one."""
    if example["style"] == "compact":
        return completion.strip() or None
    closed = completion[: completion.rfind("</answer>") + 9]  # else quadratic
    found = re.findall("<answer>(.*?)</answer>", closed, re.DOTALL)
    return found[-1].strip() if found else None


# d1's characters; 2(3) is no product
LEGAL = re.compile(r"(?!(?s:.*)[\d)]\s*\()[\d+\-*/().\s]+")


def countdown_d1(completion, example):
    """1.0 solved; 0.1 for any other answer tag, also an empty one; else 0: the released code of d1,
    SPG and CJ-GRPO, which their numbers come from.

    It calculates in floats and takes 100//30, 2**3 and the numbers 30 and 100 in 30.100 for legal.
    It knows no box, LaTeX or equals sign.
    """
    text, solved = d1_answer(completion, example), False
    short = text if text and len(text) <= MAX_LENGTH else ""
    is_given = sorted(map(int, re.findall(r"\d+", short))) == sorted(example["numbers"])
    # a tower like 93**100**30 never ends
    if is_given and LEGAL.fullmatch(short) and short.count("**") < 2:
        with suppress(Exception):
            solved = abs(eval(short) - example["target"]) < 1e-5
    return {"solved": solved, "answered": 0.0 if solved or text is None else 0.1}


def sudoku_d1(completion, example):
    """Share of the blank cells that agree with the stored solution: the released code of d1.

    It takes all digits of the answer, whatever stands between them, fills them up to 16 or cuts
    them there, and does not look at the given cells: sixteen 1s earn a quarter.
    """
    digits = "".join(filter(str.isdigit, d1_answer(completion, example) or ""))
    cells = zip(example["puzzle"], example["solution"], digits.ljust(16, "0"), strict=False)
    right = [cell == solution for given, solution, cell in cells if given == "0"]
    return {"cells": sum(right) / len(right) if digits and right else 0.0}


def needs_tags(reward, example):
    """SystemExit if the prompt does not ask for d1's tags."""
    if example.get("style") != "tags":
        raise SystemExit(
            f"--reward {reward} pays for a layout that only the prompt of --data d1 asks for; "
            "for a file: --data FILE@d1"
        )


# rewriting rules of MATH's authors, in this order
MATHD = rules(r"""
\n|\\! =>
\\\\ => \\
[td]frac => frac
\\left|\\right|\^\{\\circ\}|\^\\circ|\\\$|\\text\{ [^\0]*|\\% =>
(?<=[ {])\.|^\. => 0.
^([^=]{0,2})=([^=]*)$ => \2
\\sqrt([^{]) => \\sqrt{\1}
[ ] =>
\\frac([^{])([^{]) => \\frac{\1}{\2}
\\frac([^{])(?=\{) => \\frac{\1}
^0\.5$ => \\frac{1}{2}
^(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)$ => \\frac{\1}{\2}
""")


def math500_d1(completion, example):
    r"""d1's two parts, for the prompt of `--data d1`: 2.0 for the gold answer as a normalised
    string in the last box, or as the whole text if it has no box, and for the layout 0.75 with an
    answer tag, also one that is never closed, else 0.25, because d1 looks for \boxed with its \b
    read as a backspace."""
    needs_tags("math500_d1", example)
    [answer, *_] = [*boxes(completion[max(completion.rfind("\\boxed"), 0) :]), completion]
    correct = rewritten(answer, MATHD) == rewritten(example["gold"], MATHD)
    layout = 0.25 + 0.5 * ("<answer>" in completion)
    return {"correctness": 2.0 * correct, "layout": layout}


def math500_hendrycks(completion, example):
    """1.0 if the last box equals the gold answer as a normalised string: the matcher of DARE's MATH
    of 5,000 problems."""
    return {"correct": hendrycks(last_box(completion) or "", example["gold"])}


# PRM800K's normal form: without units and signs, LaTeX as text, mixed numbers as sums
PLAIN = r"""
^\\text\{(.+?)\} => \1
\\?[$%] =>
[ ](?:or|and)[ ] => ,
million => *10^6
billion => *10^9
trillion => *10^12
(?:degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard)(?:es)?s? *(?:\^[0-9]+)?|\^ *\\circ =>
^\{([^\0]*)\}$ => \1
,\\! * =>
\\[td]?frac *(?:([0-9])([0-9])|\{([^{}]*)\} *\{([^{}]*)\}) =>  \1\3/\2\4
\\sqrt *(?:\[[^\]]*\])? *(?:\{([^{}]*)\}|(\\?\w)) => sqrt(\1\2)
\\(?:text|textbf|mathrm|mathbf|mbox) *\{([^{}]*)\} => \1
\\((?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|ln|exp|min|max)(?![A-Za-z]) => \1
"""  # noqa: E501
SYMBOLS = r"""
\\pi(?![A-Za-z]) => pi
\\infty => inf
\\cup => U
\\cdot(?![A-Za-z])|\\times => *
\\leq?(?![A-Za-z]) => ≤
\\geq?(?![A-Za-z]) => ≥
\\alpha => α
\\beta => β
\\gamma => γ
\\[Dd]elta => δ
\\theta => θ
\\lambda => λ
\\mu(?![A-Za-z]) => μ
\\phi => φ
\\[Oo]mega => ω
\\(?:[A-Za-z]+|.) =>
- * => -
([0-9]) +([0-9]) => \1+\2
[ {}]|(?<=\d),(?=\d\d\d(?:\D|$)) =>
^(-?)\+?0*([0-9]+)(?:\.0*)?$ => \1\2
"""
PRM800K = rules(3 * PLAIN + SYMBOLS)  # LaTeX is nested


def math500_deepscaler(completion, example):
    """1.0 if the last box is the gold answer by DeepScaleR's rule: what BGPO and DARE train with.

    It is if it is the same string by the rule of MATH's authors or by PRM800K's, or if sympy finds
    no difference between them (for tuples and intervals in equal brackets: between their parts).
    Fractions must be in lowest terms, and an integer must be written as one; nothing is calculated
    with more than two letters. Unlike there, no formula of the question is paid for its value.
    """
    answers = last_box(completion) or "", example["gold"]
    authors = [(r"^\\text\{(.+?)\}$", r"\1"), *MATHD]
    texts = ours, theirs = [rewritten(text, PRM800K).lower() for text in answers]
    parts, golds = (
        inside[1].split(",")
        if (inside := re.fullmatch(r"[\[(]([^()\[\]]+)[\])]", text))
        else [text]
        for text in texts
    )
    ends = len(golds) == 1 or ours[:1] + ours[-1:] == theirs[0] + theirs[-1]
    equal = ours == theirs or len({rewritten(text, authors) for text in answers}) == 1
    alike = len(parts) == len(golds) and ends and not is_copy(f"\\boxed{{{answers[0]}}}", example)
    return {"correct": equal or alike and all(map(same_part, parts, golds))}


def same_part(answer, gold):
    """Whether sympy finds no difference. It is not asked about powers of two digits, which can take
    it for ever."""
    is_fraction = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?").fullmatch
    if is_fraction(answer) and is_fraction(gold):
        return answer == gold
    is_whole = re.compile(r"[-+]?[0-9]+(?:\.0*)?").fullmatch
    difference = f"({gold})-({answer})"
    letters = {*filter(str.isalpha, difference.replace("sqrt", "").replace("frac", ""))}
    calculated = r"(?!.*(?:_|\^[{(]|\^[0-9]+\^|\^[0-9][0-9]))[\w\s+\-*/^().!]*"
    return (
        len(letters) <= 2
        and bool(is_whole(answer)) == bool(is_whole(gold))
        and re.fullmatch(calculated, difference)
        and ask("zero", difference)
    )


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


def mbpp_diffucoder(completion, example):
    """DiffuCoder's reward. block: 0.25 for a completion that is text followed by one complete
    ```python block at its end, whose fences may stand in a line. syntax: 0.25 more if the code in
    it is not empty and parses. passed: with both, 2.0 times the share of tests that pass, each run
    alone.

    DiffuCoder also requires a newline after the block, which an answer that ends there does not
    have, pays for an empty block, and fails on code whose parsing raises anything but a
    SyntaxError. There a test passes by exit status 0, so that sys.exit(0) earns everything, and one
    timeout voids the completion.
    """
    code, closing, rest = completion.partition("```python\n")[2].partition("```")
    whole = bool(closing) and completion.count("```") == 2 and not rest.strip()
    valid = bool(whole and code.strip() and first_program([code.strip()]))
    tests = example["tests"]
    alone = [mbpp.score(completion, example | {"tests": [test]}) for test in tests if valid]
    passed = 2.0 * sum(alone) / len(tests)
    return {"block": 0.25 * whole, "syntax": 0.25 * valid, "passed": passed}


def tokens_per_forward(completion, example):
    """Speed, of any task: tokens up to the EOS over the forwards that revealed them."""
    if completion.forwards is None:
        raise SystemExit("--reward tokens_per_forward: nothing tells the forwards of completions")
    return {"tokens_per_forward": completion.tokens / completion.forwards}


REWARDS = {
    reward.__name__: reward
    for reward in (
        tokens_per_forward,
        countdown_d1,
        sudoku_d1,
        gsm8k_d1,
        math500_d1,
        math500_hendrycks,
        math500_deepscaler,
        mbpp_diffucoder,
    )
}

METRICS = "mean", "std", "square", "zero_std_frac", "error_frac"  # reward/... of a rollout
MOST = 1e18  # of a reward: fp32 holds its square


def reward_names(name):
    """--reward a+b -> [a, b]; a path may have a + as well"""
    file, _, function = name.rpartition(":")
    return [name] if os.path.isfile(file) and "+" not in function else name.split("+")


def sum_of_parts(values):
    """Rewards of --reward a+b as one, each normalised in its group by itself (LightningRL, arXiv
    2603.13319): the group's mean of the first, plus the sum of (value - mean) / biased std. A
    reward with a range under 0.01 counts 0, and all do where the first pays nobody.

    values [groups, G, rewards] -> [groups, G]
    """
    std, mean = torch.std_mean(values, 1, correction=0, keepdim=True)
    spread = values.amax(1, keepdim=True) - values.amin(1, keepdim=True)
    counts = (spread >= 0.01) & (values[..., :1] > 0).any(1, keepdim=True)
    return mean[..., 0] + torch.where(counts, (values - mean) / std, 0.0).sum(2)


def load_reward(name, task, instead=None):
    """--reward NAME or path.py:function -> function(completions, examples) -> [{component: value}];
    "" or "score" -> the score of the task, as "score", 0.0 for copies of the question. Of a+b each
    has one component, called like it.

    The function judges a whole rollout: programs and mathematical answers in processes of their
    own, on all cores of this rank, and equal completions of one example once. A completion is a
    text, or a Completion, which a function may ask for its tokens. It ends in SystemExit
    if a reward is not finite, has other components than the first, or one of METRICS. instead: see
    evals/own.py; it counts as the first component. load_reward
    ends in SystemExit if there is no such reward or file, or if it reads the examples of another
    task, and lists the rewards.
    """
    if len(names := reward_names(name)) > 1:
        pays = {one.rpartition("/")[2]: load_reward(one, task, instead) for one in names}

        def together(*asked):
            paid = zip(*(pay(*asked) for pay in pays.values()), strict=True)
            totals = ([sum(parts.values()) for parts in row] for row in paid)
            return [dict(zip(pays, row, strict=True)) for row in totals]

        return together
    name = "" if name == "score" else name
    function = REWARDS.get(name)
    file, _, function_name = name.rpartition(":")
    if file.endswith(".py"):
        own = getattr(load_file(file, [function_name]), function_name)
        function = guarded(file, own, SECONDS, instead)
    elif name and not (function and name.startswith((f"{task.NAME}_", "tokens_per_"))):
        problem = f"does not fit {task.NAME}" if function else "no such reward"
        raise SystemExit(
            f"--reward {name}: {problem}; known: path.py:function, score, {', '.join(REWARDS)}"
        )
    parts = {}  # that the first completion, the trial, is paid: the same on all ranks

    def checked(completion, paid):
        if not isinstance(paid, dict):
            paid = dict.fromkeys(parts, 0.0) | {next(iter(parts), "reward"): paid}
        parts.update({} if parts else paid)
        finite = all(isinstance(part, Real) and abs(part) < MOST for part in paid.values())
        if not paid or not finite or paid.keys() != parts.keys() or paid.keys() & METRICS:
            raise SystemExit(
                f"--reward {name or 'none: the score'} of {task.NAME}: completion "
                f"{completion[:60]!a} is paid {paid!r:.200}: not a finite number for each of "
                f"{[*parts]}, the parts of the first; none may be called {', '.join(METRICS)}"
            )
        return {part: float(paid[part]) for part in parts}

    def rewards(completions, examples):
        keys = [
            (text, id(example), *getattr(text, "__dict__", {}).values())
            for text, example in zip(completions, examples, strict=True)
        ]
        once = dict(zip(keys, examples, strict=True))
        texts = [text for text, *_ in once]
        if function:
            paid = in_threads(function, texts, once.values())
        else:
            copies = getattr(task, "is_copy", lambda *asked: False)
            judged = zip(score_all(task, texts, once.values()), texts, once.values(), strict=True)
            paid = [{"score": score * (not copies(*asked))} for score, *asked in judged]
        found = dict(zip(once, map(checked, texts, paid), strict=True))
        return [dict(found[key]) for key in keys]

    return rewards
