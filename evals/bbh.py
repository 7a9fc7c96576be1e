"""BIG-Bench Hard: 27 tasks, 6,511 questions; options in 17 tasks, free answers (numbers, words,
brackets) in 10.

    git clone https://github.com/suzgunmirac/BIG-Bench-Hard
    python evals/bbh.py --model llada-8b-base --data BIG-Bench-Hard
    python evals/bbh.py --model sdar-8b  lukaemon/bbh, no examples

The published setting needs the clone: the authors' three worked examples in front of each question,
in one message, as in OpenCompass' bbh_gen_ee62e9 (DARE and LLaDA, base models only, length 256).
The hub's rows and other files have no examples; their prompt only asks for the same last sentence,
a setting without published numbers. The published number is macro_accuracy in result.json, the
plain mean of the 27 tasks: LLaDA-8B-Base 49.7 (length 1,024), Dream-7B-Base 57.9, LLaDA2.0-mini
78.21. OpenCompass takes the text after the first "answer is" and is case-sensitive; here the last
one counts, and yes is Yes.
"""

if __name__ == "__main__":
    from command import main

    main("bbh")

import json
import re
from pathlib import Path

from data.rows import is_hub_id, read_rows
from evals import main, tagged_answer
from evals.choices import SPECIAL, letter, read_parts
from evals.examples import as_text, one_split, parse_rows, user
from evals.math_grader import MAX_LENGTH, MAX_TEXT, last_box

HUB = "lukaemon/bbh"
VERSION = {"shown": "OpenCompass bbh_gen_ee62e9", "alone": "ours"}  # name of the prompt, by style
TASKS = """
boolean_expressions causal_judgement date_understanding disambiguation_qa dyck_languages
formal_fallacies geometric_shapes hyperbaton logical_deduction_five_objects
logical_deduction_seven_objects logical_deduction_three_objects movie_recommendation
multistep_arithmetic_two navigate object_counting penguins_in_a_table
reasoning_about_colored_objects ruin_names salient_translation_error_detection snarks
sports_understanding temporal_sequences tracking_shuffled_objects_five_objects
tracking_shuffled_objects_seven_objects tracking_shuffled_objects_three_objects web_of_lies
word_sorting
""".split()
INSTRUCTION = (
    'Think step by step, and end with the sentence "So the answer is X.", where X is the '
    "answer alone."
)
ANSWER_IS = re.compile(r"answer is\s{0,4}:?(?=\s{0,4}[^\s.])", re.IGNORECASE)
WORD = re.compile(r"(?<![\\\w])[^\W\d_]\w*(?:['’-]\w+)*")


def load(split, path=None, limit=None):
    """The first `limit` examples {"question", "gold": "(B)" or free text, "subject": task, "shots":
    worked examples or "", "style": "shown" with worked examples, else "alone"}; only split "test".

    path: empty for the hub's rows; a clone of the authors' repository; a hub id with one config per
    task; or a .jsonl, .csv or .parquet file with columns input and target, and task if it holds
    several.
    """
    path, split = path or HUB, one_split("bbh", split, {"test": "test"})
    if Path(path).is_dir():
        rows = [row for task in TASKS for row in _clone_rows(Path(path), task)]
    elif is_hub_id(path):
        rows = read_parts(path, split, TASKS)
    else:
        rows = read_rows(path, split, ())
    return parse_rows(_problem, "input and target", path, rows[:limit])


def prompt(example):
    """One user message: worked examples and the question, or the question and an instruction for
    the last sentence."""
    question, shots = example["question"], example["shots"]
    if not shots:
        return user(f"{question}\n\n{INSTRUCTION}")
    question = f"Q: {question}\nA: Let's think step by step."
    return user(f"Follow the given examples and answer the question.\n{shots}\n\n{question}")


def extract(completion, example):
    r"""With options the letter as "(B)" (`choices.letter`). Otherwise the bold part, or all, of the
    first of: the line after the last "answer is", the last \boxed{}, a completion of one line;
    without the full stop. If the gold answer is several words or signs, it is the paragraph instead
    of the line, and all bold parts. None if there is none.
    """
    if re.fullmatch(r"\([A-Z]\)", example["gold"]):
        options = re.findall(r"^\(([A-Z])\)", example["question"], re.MULTILINE)
        found = letter(completion, options)
        return found and f"({found})"
    completion = SPECIAL.sub("\n", (tagged_answer(completion) or completion)[-MAX_TEXT:])
    line = "\n\n" if " " in example["gold"] else "\n"
    *before, text = ANSWER_IS.split(completion)
    text = text.strip() if before else ""
    alone = "" if before or line in completion.strip() else completion
    text = last_box(text or completion) or text or alone
    text = text[: MAX_LENGTH + 1].strip().split(line)[0]
    bold = re.findall(r"(?<!\w)(?<!not )\*\*(.+?)\*\*(?!\s+or\b)", text)
    text = " ".join(bold) or text
    text = text.strip().removesuffix(".").strip()
    return text if 0 < len(text) <= MAX_LENGTH else None


def score(completion, example):
    """1.0 if the answer is the gold one, else 0.0. Of an answer in words only these are compared,
    ignoring case; else all but white space, commas and backticks."""
    plain = lambda text: WORD.findall(text.casefold()) or re.sub(r"[\s,`]", "", text)
    return float(plain(extract(completion, example) or "") == plain(example["gold"]))


def answer(example, draw=0):
    """The last sentence alone."""
    return f"So the answer is {example['gold']}."


def _problem(row):
    shots = row.get("shots", "")
    example = {"question": row["input"], "gold": as_text(row["target"])}
    example["subject"] = row.get("subject", row.get("task", "bbh"))
    return example | {"shots": shots, "style": "shown" if shots else "alone"}


def _clone_rows(folder, task):
    """Rows of a task with its worked examples, less the line that marks benchmark data. SystemExit
    if a file is missing."""
    try:
        rows = json.loads((folder / f"bbh/{task}.json").read_text(encoding="utf-8"))["examples"]
        shots = (folder / f"cot-prompts/{task}.txt").read_text(encoding="utf-8")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(
            f"--data {folder}: needs bbh/{task}.json and cot-prompts/{task}.txt of "
            f"github.com/suzgunmirac/BIG-Bench-Hard ({type(error).__name__})"
        ) from error
    shots = shots.rpartition("\n-----\n")[2].strip()
    return [{"subject": task, "shots": shots} | row for row in rows]
