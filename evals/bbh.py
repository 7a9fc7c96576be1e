"""BIG-Bench Hard: 27 tasks, 6,511 questions; options in 17 tasks, free answers (numbers, words,
brackets) in 10.

    git clone https://github.com/suzgunmirac/BIG-Bench-Hard
    python evals/bbh.py --model llada-8b-base --data BIG-Bench-Hard
    python evals/bbh.py --completions FILE.jsonl --data BIG-Bench-Hard

The authors' three worked examples stand in front of each question, in one message, as in
OpenCompass' bbh_gen_ee62e9 (DARE and LLaDA, base models only, length 256). They are in the clone
only. The published number is macro_accuracy in result.json, the plain mean of the 27 tasks:
LLaDA-8B-Base 49.7 (length 1,024), Dream-7B-Base 57.9, LLaDA2.0-mini 78.21. OpenCompass takes the
text after the first "answer is" and is case-sensitive; here the last one counts, and yes is Yes.
"""

if __name__ == "__main__":
    import command  # noqa: F401

import json
import re
from pathlib import Path

from evals import tagged_answer
from evals.choices import SPECIAL, letter
from evals.examples import one_split, own_part, user
from evals.math_grader import MAX_LENGTH, last_box

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
ANSWER_IS = re.compile(r"answer is\s{0,4}:?(?=\s{0,4}[^\s.])", re.IGNORECASE)
WORD = re.compile(r"(?<![\\\w])[^\W\d_]\w*(?:['’-]\w+)*")


def load(split, path=None, limit=None):
    """The first `limit` examples {"question", "gold": "(B)" or free text, "subject": task, "shots":
    worked examples, less the line that marks benchmark data}; only split "test".

    path: a clone of the authors' repository. SystemExit if a file is missing.
    """
    one_split("bbh", split, {"test": "test"})
    examples, folder = [], Path(path or "BIG-Bench-Hard")
    for task in TASKS:
        try:
            rows = json.loads((folder / f"bbh/{task}.json").read_text("utf-8"))["examples"]
            shots = (folder / f"cot-prompts/{task}.txt").read_text("utf-8")
        except (OSError, ValueError, LookupError) as error:
            raise SystemExit(
                f"{folder}: no such clone of github.com/suzgunmirac/BIG-Bench-Hard, with "
                f"bbh/{task}.json and cot-prompts/{task}.txt ({type(error).__name__})"
            ) from error
        own = {"subject": task, "shots": shots.rpartition("\n-----\n")[2].strip()}
        examples += [{"question": row["input"], "gold": row["target"]} | own for row in rows]
    return examples[:limit]


def prompt(example):
    """One user message: worked examples and the question."""
    question = f"Q: {example['question']}\nA: Let's think step by step."
    return user(
        f"Follow the given examples and answer the question.\n{example['shots']}\n\n{question}"
    )


def extract(completion, example):
    r"""With options the letter as "(B)" (`choices.letter`). Otherwise the bold part, or all, of the
    first of: the line after the last "answer is", the last \boxed{}, the first line;
    without the full stop. If the gold answer is several words or signs, it is the paragraph instead
    of the line, and all bold parts. None if there is none.
    """
    if re.fullmatch(r"\([A-Z]\)", example["gold"]):
        options = re.findall(r"^\(([A-Z])\)", example["question"], re.MULTILINE)
        found = letter(completion, options)
        return found and f"({found})"
    completion = own_part(completion)
    completion = SPECIAL.sub("\n", tagged_answer(completion) or completion)
    line = "\n\n" if " " in example["gold"] else "\n"
    text = ANSWER_IS.split(completion.strip())[-1]
    text = (last_box(text) or text).strip()[: MAX_LENGTH + 1].split(line)[0]
    bold = re.findall(r"(?<!\w)(?<!not )\*\*(.+?)\*\*(?!\s+or\b)", text)
    text = " ".join(bold) or text
    text = text.strip().removesuffix(".").strip()
    return text if 0 < len(text) <= MAX_LENGTH else None


def score(completion, example):
    """Whether the answer is the gold one. Of an answer in words only these are compared,
    ignoring case; else all but white space, commas and backticks."""
    plain = lambda text: WORD.findall(text.casefold()) or re.sub(r"[\s,`]", "", text)
    return plain(extract(completion, example) or "") == plain(example["gold"])


def answer(example, draw=0):
    """The last sentence alone."""
    return f"So the answer is {example['gold']}."
