"""Multiple choice: the letter that a completion answers, lettered options, and the zips that MMLU and C-Eval came in."""

import csv
import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from evals import TRAIN_TASKS

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NOT_IN_A_WORD = r"(?![A-Za-z0-9_]|['’][A-Za-z])"  # no \b: a Chinese character behind a letter ends the answer too
# a letter in brackets may be small; one of "B or C" is none
HEDGED = rf"[ \t]*(?:or\b|and\b|/|&|或|和)[ \t]*\(?[A-Za-z]{NOT_IN_A_WORD}"
BARE = rf"([A-Z]){NOT_IN_A_WORD}(?!{HEDGED})"
IN_BRACKETS = r"[\[({（]\s*(?:\\?text(?:bf)?\{\s*)?\(?([A-Za-z])\)?\s*[\])}）]"
LETTER = rf"(?:{BARE}|{IN_BRACKETS})"
SAID = (  # a phrase, then markup
    r"(?:\b(?:answer|choice|option)(?:\s{1,4}(?:is|would be|should be|must be)\s{0,4}:?|\s{0,4}[*_]{0,2}\s{0,4}[:：])"
    r"|答案(?:选项|应该|应当|应)?(?:是|为|选)?\s{0,4}[:：]?|(?:应|故|应该|因此|所以)[，,]?选(?:择|项)?\s{0,4}[:：]?"
    r"|(?:正确|错误|符合题意)的?(?:选项|一项|说法)?(?:是|为)\s{0,4}[:：]?)"
    r"[\s*_$\"'“‘]{0,8}(?:(?:option|choice|选项)\s{0,4})?[*_$\"'“‘]{0,4}"
)
EXPLICIT = re.compile(rf"(?i:{SAID})(?:\\boxed\s*)?{LETTER}|\\boxed\s*{IN_BRACKETS}")
LABEL = re.compile(
    rf"^[ \t*_$\"'(\[（]{{0,6}}([A-Z]){NOT_IN_A_WORD}[ \t*_$\"')\]）]{{0,6}}(?:[.:,、。，：)]|$)",
    re.MULTILINE,
)
LONE = re.compile(r"[\s.:,、。，：)*_$\"'\]）]*")


def letter(completion: str, letters: str = "ABCD") -> str | None:
    r"""The letter of `letters` that a completion answers; None where there is none. Never raises, linear in time.

    The first rule that finds something:
      1. the last explicit statement: "answer is (B)", "ANSWER: B", "**Answer:** B", "option is B", \boxed{B}, 答案是B, 故选B.
         One whose letter is none of `letters` is passed over, and so is "B or C";
      2. the last line that is a letter and nothing else;
      3. "B." or "(B) text" at the start of a line, if no other letter starts a line so: a list of options is no answer.
    OpenCompass takes the first match of some fifty patterns, at last any capital letter: an article "A" answers A there.
    """
    said = [next(filter(None, match.groups())).upper() for match in EXPLICIT.finditer(completion)]
    if said := [choice for choice in said if choice in letters]:
        return said[-1]
    lone, labels = None, set()
    for match in LABEL.finditer(completion):
        if match[1] in letters:
            end = completion.find("\n", match.end())
            rest = completion[
                match.end() : match.end() + 32 if end < 0 else min(end, match.end() + 32)
            ]
            lone = match[1] if LONE.fullmatch(rest) else lone
            labels.add(match[1])
    return lone or (labels.pop() if len(labels) == 1 else None)


def lettered(options: list[str], form: str = "{}. {}") -> str:
    """One line per option: "A. first", "B. second"; form "{}) {}" gives "A) first"."""
    return "\n".join(form.format(LETTERS[i], option) for i, option in enumerate(options))


def one_split(task: str, split: str, known: dict[str, str]) -> str:
    """The name that the data give to `split`; SystemExit names the splits that the task has."""
    if split not in known:
        other = f"; train on another task: {', '.join(TRAIN_TASKS)}" if split == "train" else ""
        raise SystemExit(
            f"--split {split}: {task} has no such labelled split; use {' or '.join(known)}{other}"
        )
    return known[split]


def read_zip(path: str, split: str, columns: list[str] | None = None) -> Iterator[dict]:
    """Rows of <split>/<subject>_<split>.csv in a zip, subjects by name, each with its "subject". Values are text.

    columns: names for files without a header. SystemExit where the file is no such zip.
    """
    if not Path(path).is_file() or not zipfile.is_zipfile(path):
        raise SystemExit(f"--data {path}: no such zip file")
    with zipfile.ZipFile(path) as archive:
        suffix = f"_{split}.csv"
        names = sorted(
            name
            for name in archive.namelist()
            if name.endswith(suffix) and f"/{split}/" in f"/{name}"
        )
        if not names:
            raise SystemExit(f"--data {path}: no {split}/<subject>{suffix} in it")
        for name in names:
            subject = Path(name).name.removesuffix(suffix)
            with io.TextIOWrapper(archive.open(name), encoding="utf-8-sig", newline="") as file:
                for row in csv.DictReader(file, columns):
                    yield {"subject": subject} | row
