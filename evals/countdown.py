"""Countdown: reach a target with every given number exactly once.

    python evals/countdown.py --model tiny-sdar   preset "small", two tokens per step
    python evals/countdown.py --model sdar-8b --data cd3 --gen-length 256 --denoising-steps 4
    python evals/countdown.py --completions FILE.jsonl --data countdown_cd3_test.jsonl
    python evals/countdown.py --model llada-8b --data countdown_cd3_test.jsonl@d1-eval

The metric is exact: 1.0 for a legal expression over exactly the given numbers that equals the
target, else 0.0. A legal expression has integer literals, + - * /, unary minus and brackets, and is
evaluated in fractions. `//`, `**`, decimals, non-ASCII digits and leading zeros (07) are not legal.
d1's rule, eval() after a character filter, accepts 100//30 = 3, hangs on 93**100**30 and reads
30.100 as the two numbers 30 and 100.
"""

if __name__ == "__main__":
    import command  # noqa: F401

import re
from fractions import Fraction

from data.planning import COUNTDOWN, countdown, countdown_solutions, stable_hash
from evals import WORDS, final_answer
from evals.examples import planning_row, read_examples, source_and_style, user
from evals.math_grader import rewritten, rules

PRESETS = COUNTDOWN  # names that `load` takes besides files and hub ids; "small" is the default
LATEX = [(WORDS, r"\1")]
LATEX += rules(r"""
\\left|\\right|\\(?= )|✓ =>
\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\} => ((\1)/(\2))
\\times|\\cdot => *
\\div => /
→ => =
""")
NUMBER_SIDE = re.compile(r"\s*(-?[0-9]+(\.[0-9]+)?\s*)?")  # of an equation
MAX_DEPTH = 64  # operators and opening brackets of an answer: limits the depth of its tree
# other characters, // and **, a sign +, 07
ILLEGAL = re.compile(r"[^-+*/() 0-9]|//|\*\*|(?:^|[-+*/(]) *\+|(?<![0-9])0[0-9]")
DIGITS = re.compile("[0-9]+")

# name of the prompt, by style
# The training prompt of d1 and DARE to the byte, so that scores can be compared (tested against
# DARE's file).
PROMPT = """Respond in the following format:
<reasoning>
...
</reasoning>
<answer>
...
</answer>

Using only the numbers {numbers}, create an arithmetic expression that evaluates to exactly \
{target}. You must use all numbers from the list, and each number must be used exactly once. \
You may use the operations +, -, *, and / as needed. \
After reasoning, provide only your final expression inside <answer></answer> tags without \
including an equals sign or the target number. For example, if the numbers are [2, 3, 4] and the \
target is 5, a valid answer is: <answer>
2*4-3
</answer>"""
# d1's prompt for evaluation, to the byte; d1 also begins the answer, with <reasoning>
EVALUATION = """Using only the provided numbers, create an arithmetic expression that evaluates to \
exactly the provided target number. You may use the operations +, -, *, and / as needed, but each \
number must be used exactly once. Think step-by-step. After reasoning, provide only your final \
expression inside \\boxed{{}} tags without including an equals sign or the target number. For \
example: \\boxed{{a + b * c}}Respond in the following format:
<reasoning>
Your reasoning here
</reasoning>
<answer>
\\boxed{{...}}
</answer>

Numbers: {numbers}
Target: {target}"""

COLUMNS = (
    "numbers (or nums) and target, input and output (d1, Dream), "
    "or extra_info.numbers and reward_model.ground_truth (DARE)"
)


def load(split, path=None, limit=None):
    """The first `limit` examples {"numbers": list, "target": int, "style": "compact" | "tags" |
    "boxed-tags"}.

    path: empty for "small"; a preset of data/planning.py; a .jsonl, .csv or .parquet file; or a hub
    id; with @d1-eval behind it d1's prompt for evaluation. Rows may have our columns, d1's, Dream's
    or DARE's (COLUMNS). A file gives the same rows for every split. Only presets are "compact".
    """
    path, style = source_and_style(path, "small")
    if path in PRESETS:
        examples = countdown(path, split, limit)
    else:
        examples = read_examples(_problem, COLUMNS, path, split, limit, presets=PRESETS)
    return [example | style for example in examples]


def prompt(example):
    """Messages. "compact" is fixed width (`12  7  3 =   8`, 14 characters for three numbers)."""
    numbers, target = example["numbers"], example["target"]
    if example["style"] == "compact":
        return user(f"{' '.join(f'{n:2d}' for n in numbers)} = {target:3d}")
    text = EVALUATION if example["style"] == "boxed-tags" else PROMPT
    return user(text.format(numbers=numbers, target=target))


def asks(example):
    """What is asked, whatever the order of the numbers."""
    return sorted(example["numbers"]), example["target"]


def extract(completion, example):
    r"""The expression of a completion, not checked; None where there is none.

    "compact": the whole completion. Other styles: the final answer in plain text, without
    "= number" or "number =", whose value is not looked at.
    """
    if example["style"] == "compact":
        return completion.strip() or None
    text = rewritten((final_answer(completion) or "").rstrip(". \\"), LATEX)
    sides = [side for side in text.split("=") if not NUMBER_SIDE.fullmatch(side)]
    return (sides[0] if len(sides) == 1 else text).strip() or None


def score(completion, example):
    """Whether it is a legal expression over exactly the given numbers that equals the target.
    Never raises."""
    return evaluate(extract(completion, example) or "") == asks(example)


def answer(example, draw=0):
    """A gold completion in the form that the prompt asks for: one of all solutions, drawn by a hash
    of (example, draw).

    A compact example is answered with + and - only. ValueError where the example has no solution.
    """
    numbers, target, style = example["numbers"], example["target"], example["style"]
    solutions = countdown_solutions(numbers, target, "+-" if style == "compact" else "+-*/")
    if not solutions:
        raise ValueError(f"no expression over {numbers} equals {target}")
    expression = solutions[stable_hash("countdown", numbers, target, draw) % len(solutions)]
    boxed = f"\\boxed{{{expression}}}" if style == "boxed-tags" else expression
    return expression if style == "compact" else f"<answer>\n{boxed}\n</answer>"


def evaluate(text):
    """(sorted literals, value) of a legal expression; None for anything else, and for division by
    zero. Never raises."""
    if ILLEGAL.search(text) or len(re.findall(r"[-+*/(]", text)) > MAX_DEPTH:
        return None
    try:  # the filter leaves nothing else to Python's parser than numbers in fractions
        value = eval(DIGITS.sub(r"Fraction(\g<0>)", text), {"Fraction": Fraction})
    except (SyntaxError, TypeError, ArithmeticError):
        return None
    return sorted(map(int, DIGITS.findall(text))), value


def _problem(row):
    numbers, target = planning_row(row, "nums" if "nums" in row else "numbers", "target")
    numbers = [int(number) for number in str(numbers).strip("[] ").split(",")]
    # Dream: the input ends with the target, the output has solution steps
    target = numbers.pop() if "=" in str(target) else int(str(target))
    if min(numbers) < 0:
        raise ValueError("a negative number")
    return {"numbers": numbers, "target": target, "style": "tags"}
