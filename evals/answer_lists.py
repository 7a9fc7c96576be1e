r"""Several answers in one box: their parts, unions of intervals, tuples, \pm; which of them are the gold ones."""

import re
from itertools import accumulate

from evals.math_grader import math_verify, number


def bare(text: str) -> str:
    r"""Without $, \left, \right, a final full stop and spaces around it."""
    return re.sub(r"\\?\$|\\(?:left|right)(?![A-Za-z])", "", text).strip().rstrip(".").strip()


def split_outside(text: str, separator: str = ",") -> list[str]:
    """Parts between separators that stand outside of all brackets; "(0, 1]" has one bracket of each direction."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0 and text.startswith(separator, i):
            parts.append(text[start:i].strip())
            start = i + len(separator)
    return [part for part in [*parts, text[start:].strip()] if part]


def answers_in(text: str, multiple: bool) -> list[str]:
    """The answers of a box. A single answer may have commas between its thousands."""
    text = bare(text)
    if text.startswith(r"\{") and text.endswith(r"\}") and text.count(r"\{") == 1:
        text = text[2:-2]
    return [text] if not multiple and number(text) is not None else split_outside(text)


def both_signs(answers: list[tuple[str, float]]) -> list[tuple[str, float]]:
    r"""2\pm x as 2+x and 2-x, each with its tolerance."""
    pairs = []
    for text, error in answers:
        both = [
            text.replace(r"\pm", "+").replace(r"\mp", "-"),
            text.replace(r"\pm", "-").replace(r"\mp", "+"),
        ]
        pairs += [(one, error) for one in (both if both[0] != both[1] else both[:1])]
    return pairs


def matched(answers: list[str], golds: list[tuple[str, float]]) -> bool:
    """Whether answers and golds, of equal number, can be paired so that each pair is the same (augmenting paths)."""
    holder: dict[int, int] = {}  # answer -> its gold

    def place(gold: int, tried: set[int]) -> bool:
        for i, text in enumerate(answers):
            if i not in tried and same(text, *golds[gold]):
                tried.add(i)
                if i not in holder or place(holder[i], tried):
                    holder[i] = gold
                    return True
        return False

    return all(place(gold, set()) for gold in range(len(golds)))


def same(answer: str, gold: str, error: float) -> bool:
    """One answer against one gold: unions of intervals, tuples and intervals part by part, all else by Math-Verify."""
    if answer == gold:
        return True
    if r"\in " in gold or r"\in " in answer:  # x \in (0, 1)
        return same(
            answer.rpartition(r"\in ")[2].strip(), gold.rpartition(r"\in ")[2].strip(), error
        )
    # (x, y) = (1, 2) is (1, 2)
    answer, gold = (re.sub(r"^\([^()=]*\)\s*=\s*(?=\()", "", text) for text in (answer, gold))
    ours, theirs = split_outside(answer, r"\cup"), split_outside(gold, r"\cup")
    if len(ours) != len(theirs):
        return False
    if len(theirs) > 1:
        return matched(ours, [(part, error) for part in theirs])
    inner, wanted = members(answer), members(gold)
    if len(wanted) > 1 or len(inner) > 1:
        ends = answer[:1] + answer[-1:] == gold[:1] + gold[-1:]
        return (
            ends
            and len(inner) == len(wanted)
            and all(same(a, g, error) for a, g in zip(inner, wanted, strict=True))
        )
    return math_verify(answer, gold, error)


def members(text: str) -> list[str]:
    """a and b of (a, b), [a, b) and so on; else nothing."""
    if text[:1] not in ("(", "[") or text[-1] not in ")]":
        return []
    depth = list(accumulate((char in "([{") - (char in ")]}") for char in text))
    # one pair of brackets around all: not (1, 2) + (3, 4)
    return split_outside(text[1:-1]) if depth[-1] == 0 and 0 not in depth[:-1] else []
