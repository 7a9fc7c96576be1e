r"""MATH: competition problems with an answer in LaTeX. MATH-500 by default, the whole test set of
5,000 with --data full.

    python evals/math500.py --model sdar-8b  HuggingFaceH4/MATH-500, test
    python evals/math500.py --model llada-8b --data full --gen-length 512 --reward math500_hendrycks
    python evals/math500.py --completions FILE.jsonl --data test_math500_1.parquet
    python algos/d1.py --task math500 --model sdar-8b   trains on MATH's train split

The metric is Math-Verify on the final answer, in practice the last box: SDAR's published setting,
with MATH-500. DARE's rows for LLaDA, Dream and LLaDA2 use 5,000 problems and a string matcher:
--data full, and math500_hendrycks.
"""

if __name__ == "__main__":
    import command  # noqa: F401

import re
import sys

from data.rows import is_of, read_rows
from evals import final_answer
from evals.choices import read_parts
from evals.examples import (
    STYLES,
    as_text,
    chat_row,
    held_out,
    parse_rows,
    source_and_style,
    user,
    worked,
)
from evals.gsm8k import EVALUATION, INSTRUCTION, TAGS
from evals.math_grader import ask, last_box, math_verify

HUB, FULL = "HuggingFaceH4/MATH-500", "EleutherAI/hendrycks_math"
# names that `load` takes besides files and hub ids: all of FULL's test rows; HUB's rows with d1's
# prompts
PRESETS = ("full", *STYLES)
PARTS = (  # of FULL, each a config on the hub
    "algebra counting_and_probability geometry intermediate_algebra number_theory prealgebra "
    "precalculus"
).split()
D1 = (  # d1's prompt, to the byte
    f"{TAGS}You are a math expert. You will be given a question to solve. Solve it step by step. "
    "Wrap the final answer in a \\boxed{}. \n\n"
)
PROMPTS = {
    "": f"QUESTION\n{INSTRUCTION}",
    "tags": f"{D1}QUESTION",
    "boxed-tags": EVALUATION.format("") + '" \n\n\nQUESTION',
}
BOX = r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*)\}"
# two boxes with no more than a comma, "and" or "or" between them
SEVERAL = (
    BOX + r"(?=(?:[\s$*]|\\(?:[()\[\]]|q?quad\b))*(?:[,;&]|and|or|\\text))"
    r"(?:[\s$*,;&]|\\(?:[()\[\]]|q?quad\b)|and\b|or\b|\\text\{,? *(?:and|or) *\}"
    r"|[a-z]\s*=)*(-?)" + BOX
)
# between the formulas of a question: words, $, relations and the ends of sentences and cells
APART = (
    r"\\[()\[\]\\]|[$&?;:<>]|[,.](?!\d)|\\(?:[lg]eq?|text\w*|quad|begin|end)(?![a-z])"
    r"|(?<!\\)\b(?!mod\b)[A-Za-z]{2,}\*?\}?"
)
OPERATION = re.compile(r"[-+*/^!\\√]|\d\.\d|mod")
COLUMNS = (
    "problem and answer, or problem and solution with a box, or prompt and "
    "reward_model.ground_truth (DARE)"
)


def load(split, path=None, limit=None):
    r"""The first `limit` examples {"question", "gold": LaTeX, "solution": worked, "" if unknown},
    with d1's prompts also "style": "tags" | "boxed-tags".

    path: empty, "d1" or "d1-eval" for the hub's rows, where "test" is MATH-500, or all 5,000 test
    rows with "full", and FULL's train split gives "train" and "validation" (512 rows); or a .jsonl,
    .csv or .parquet file, or a hub id; all with @d1 or @d1-eval behind them for d1's prompts. A
    file gives the same rows for every split. Rows without an answer (DARE's train file has four)
    are left out and counted on stderr.
    """
    path, style = source_and_style(path, HUB)
    held = split != "test"
    path = "full" if held and path == HUB else path
    if whole := is_of(path, "full"):
        path = path.replace("full", FULL, 1)
        rows = read_parts(path, "train" if held else "test", PARTS)
    else:
        rows = read_rows(path, split, PRESETS, limit)
    examples = [example for example in parse_rows(problem, COLUMNS, rows) if example["gold"]]
    if lost := len(rows) - len(examples):
        print(f"{path}: {lost} of {len(rows)} rows left out: no answer", file=sys.stderr)
    if whole and held:
        examples = held_out(examples, split, "math")
    return [example | style for example in examples[:limit]]


def prompt(example):
    """One user message, no examples: that of SDAR and of DARE's math_0shot_gen_11c4b5, or d1's."""
    return user(PROMPTS[example.get("style", "")].replace("QUESTION", example["question"]))


def extract(completion, example):
    r"""The final answer, in a box or an answer tag; None without one. Never raises.

    \boxed{3} and \boxed{5} are the answers 3, 5."""
    while (text := re.sub(SEVERAL, r"\\boxed{\1, \2\3}", completion)) != completion:
        completion = text
    return final_answer(completion)


def score(completion, example):
    """Whether Math-Verify finds the final answer equal to the gold one. Never raises."""
    answer = extract(completion, example)
    return answer is not None and math_verify(answer, example["gold"])


def is_copy(completion, example):
    """Whether the final answer is a formula of the question in other dress, and not the gold one:
    nothing that training may pay. See _is_copy in evals/math_grader.py."""
    answer, question = extract(completion, example) or "", example["question"]
    parts = [*question.split("$"), *re.split(APART, question)]
    sides = [side for part in parts for side in (part, *part.split("="))]
    formulas = [*filter(OPERATION.search, sides)]
    return OPERATION.search(answer) and ask("copy", answer, example["gold"], formulas) is True


def answer(example, draw=0):
    """The worked solution, ending in the box. SystemExit if unknown."""
    solution, gold = worked(example), example["gold"]
    is_boxed = last_box(solution) == gold
    return solution if is_boxed else f"{solution}\nThe answer is $\\boxed{{{gold}}}$."


def problem(row):
    """{"question", "gold": "" if the row has none, "solution": "" if it has none} of a row. Raises
    for other columns."""
    solution = (row.get("solution") or "").strip()
    find = row.get if solution else row.__getitem__
    question, gold = chat_row(row) or (row["problem"], find("answer"))
    gold = last_box(solution) or "" if gold is None else gold
    gold = str(gold) if type(gold) in (int, float) else as_text(gold).strip()
    question = question.strip().removesuffix(INSTRUCTION).strip()
    return {"question": question, "gold": last_box(gold) or gold, "solution": solution}
