"""Sums in words, with a line in figures before the answer: a task for small models with completions
of up to 57 bytes, so that length, EOS and truncation matter.

    python bench/sums.py --model DIR --gen-length 64
    python algos/bgpo.py --task bench/sums.py --model DIR --gen-length 64

    four hundred seven plus ninety-six  ->  407 + 96 = 503
                                            five hundred three

Numbers are below 1000. The first line is not scored.
"""

import random
import sys

sys.path.insert(0, __file__.rpartition("/bench/")[0])
from data.planning import split_of
from evals import main
from evals.examples import user

SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
ROWS = {"train": 20_000, "validation": 512, "test": 512}


def in_words(number):
    """0 to 9999"""
    for unit, name in (1000, "thousand"), (100, "hundred"):
        if number >= unit:
            count, rest = divmod(number, unit)
            return f"{SMALL[count]} {name} {in_words(rest) if rest else ''}".rstrip()
    if number < 20:
        return SMALL[number]
    tens, ones = divmod(number, 10)
    return TENS[tens - 2] + (f"-{SMALL[ones]}" if ones else "")


def load(split, path=None, limit=None):
    """The first `limit` examples {"numbers": [a, b]}; a + b and b + a are in the same split."""
    if path:
        raise SystemExit(f"--data {path}: the problems of this task are drawn")
    draw, rows = random.Random(split), []
    while len(rows) < min(limit or ROWS[split], ROWS[split]):
        numbers = [draw.randrange(1000) for _ in range(2)]
        if split_of(*sorted(numbers)) == split:
            rows.append({"numbers": numbers})
    return rows


def prompt(example):
    return user(" plus ".join(map(in_words, example["numbers"])))


def extract(completion, example):
    """The last line"""
    return completion.strip().rpartition("\n")[2].strip() or None


def score(completion, example):
    return float(extract(completion, example) == in_words(sum(example["numbers"])))


def answer(example, draw=0):
    a, b = example["numbers"]
    return f"{a} + {b} = {a + b}\n{in_words(a + b)}"


if __name__ == "__main__":
    main(__file__)
