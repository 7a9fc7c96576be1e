r"""OlympiadBench: open-ended olympiad problems in English without pictures, 674 of mathematics
(OE_TO_maths_en_COMP).

    python evals/olympiad.py --model llada-8b
    python evals/olympiad.py --completions FILE.jsonl --data rows.jsonl

The prompt is that of OpenCompass (OlympiadBench_0shot_gen_be8b13), which DARE uses. The metric
follows the benchmark's own judge: answers between commas are matched one to one in any order,
members of a tuple or an interval in theirs, and a number may be off by the `error` of its row.
Unlike there, only the final answer counts, in practice the last box, two answers are the same if
Math-Verify says so, and a hundredth or a hundred times a number is not that number. DARE's row
(LLaDA-8B-Instruct 9.70, Dream-7B-Instruct 12.22, SDAR-8B-Chat 24.93, LLaDA2.0-mini 38.82) is not
comparable: it covers five sets, three of them Chinese and two of physics, and its judge never sees
`error`. There is no train split.
"""

if __name__ == "__main__":
    import command  # noqa: F401

import re

from evals.examples import read_examples, user
from evals.gsm8k import INSTRUCTION
from evals.math500 import extract, is_copy  # noqa: F401
from evals.math_grader import math_verify, number, rewritten, rules

HUB, CONFIG = "Hothan/OlympiadBench", "OE_TO_maths_en_COMP"
COLUMNS = (
    "question, final_answer (list of texts), answer_type, is_multiple_answer, unit, error, "
    "subject; English, no proofs"
)
TYPES = {
    "Numerical": "a numerical value",
    "Expression": "an expression",
    "Equation": "an equation",
    "Interval": "an interval",
}
BARE = rules(r"""
\\?\$|\\(?:left|right)(?![A-Za-z]) =>
\.+$ =>
""")
SET = r"^\\\{((?:(?!\\\{).)*)\\\}$", r"\1"
NAMED = re.compile(r"^.*\\in |^\([^()=]*\)\s*=\s*(?=\()", re.DOTALL)
BRACKETS = re.compile(r"([(\[])[^()\[\]]*,[^()\[\]]*([)\]])")
FREE = ("Need_human_evaluate", "Tuple")  # answer types that the prompt does not name


def load(split, path=None, limit=None):
    """The first `limit` examples {"question", "gold": LaTeX, "error": list of tolerances,
    "multiple": bool, "type", "unit": bool, "field"}.

    path: empty for the hub's rows, which are "test" only; a .jsonl or .parquet file with the hub's
    columns, which gives the same rows for every split; or a hub id.
    """
    return read_examples(_problem, COLUMNS, path, split, limit, HUB, "train", config=CONFIG)


def prompt(example):
    """One user message, no examples: the task, what the answer is, its form, the problem."""
    content = "multiple answers connected with commas" if example["multiple"] else "answer"
    note = r", note that the unit of the answer should not be included in \boxed{}"
    unit, note = ("(unit)", note) if example["unit"] else ("", "")
    return user(
        f"The following is an open-ended problem from an International {example['field']} "
        f"competition. {type_sentence(example)}Please calculate the answer according to the given "
        "requirements and the information provided. Please use LaTeX format to represent the "
        "variables and formulas used in the solution process and results. Please end your solution "
        f'with "So the final answer is \\boxed{{{content}}}{unit}." and give the result '
        f"explicitly{note}.\n{example['question']}\n\n{INSTRUCTION}"
    )


def score(completion, example):
    """Whether the answers in the final answer are the gold ones. Never raises."""
    found = extract(completion, example) or ""
    answers, golds = (answers_in(text, example["multiple"]) for text in (found, example["gold"]))
    # one tolerance for all answers, or one each
    errors = example["error"]
    errors = errors if len(errors) == len(golds) else errors[:1] * len(golds)
    return matched(answers, [*zip(golds, errors, strict=True)])


def depth(text):
    """Number of open brackets at its end; "(0, 1]" has one bracket of each direction."""
    return sum(map(text.count, "([{")) - sum(map(text.count, ")]}"))


def split_outside(text):
    """Parts between commas outside all brackets."""
    parts = [""]
    for piece in text.split(","):
        if depth(parts[-1]):
            parts[-1] += f",{piece}"
        else:
            parts.append(piece)
    return [*filter(str.strip, parts)]


def answers_in(text, multiple):
    r"""The answers of a box, 2\pm x as 2+x and 2-x. A single answer may have commas between its
    thousands."""
    text = rewritten(text, [*BARE, SET])
    parts = split_outside(text) if multiple or number(text) is None else [text]
    signs = lambda part: (
        part.replace(r"\pm", plus).replace(r"\mp", minus) for plus, minus in ("+-", "-+")
    )
    return [answer for part in parts for answer in dict.fromkeys(signs(part))]


def matched(answers, golds):
    """Whether answers and golds can be paired so that each pair is the same."""
    return len(answers) == len(golds) and (
        not golds
        or any(
            same(answer, *golds[0]) and matched(answers[:i] + answers[i + 1 :], golds[1:])
            for i, answer in enumerate(answers)
        )
    )


def same(answer, gold, error):
    """One answer against one gold by Math-Verify; the brackets of a tuple or an interval count."""
    # x \in (0, 1) is (0, 1), and (x, y) = (1, 2) is (1, 2)
    answer, gold = (NAMED.sub("", text).strip() for text in (answer, gold))
    around = BRACKETS.fullmatch(gold)
    is_like = not around or answer[:1] + answer[-1:] == around[1] + around[2]
    return is_like and math_verify(answer, gold, error)


def type_sentence(example):
    """What the prompt says about the answer's type, ending in a space; "" if it says nothing.
    KeyError for an unknown type."""
    if any(name in example["type"] for name in FREE):
        return ""
    kinds = [TYPES[name] for name in example["type"].split(",")]
    if not example["multiple"]:
        return f"The answer of The problem should be {kinds[0]}. "
    if len({*kinds}) == 1:
        return f"The problem has multiple answers, each of them should be {kinds[0]}. "
    return f"The problem has multiple answers, with the answers in order being {', '.join(kinds)}. "


def _problem(row):
    final = row["final_answer"]
    if not isinstance(final, list) or not final or not all(final):
        raise ValueError("no list of answers")
    example = {
        "question": row["question"],
        "gold": ", ".join(rewritten(text, BARE) for text in final),
        "error": [float(part or 0) for part in str(row.get("error") or 0).split(",")],
        "multiple": row["is_multiple_answer"],
        "type": row["answer_type"],
        "unit": bool(row.get("unit")),
        "field": row.get("subject", "Math"),
    }
    type_sentence(example)
    return example
