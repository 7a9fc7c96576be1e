"""MMLU: 57 subjects, four options, 14,042 questions (validation 1,531).

    python evals/mmlu.py --model llada-8b  cais/mmlu, test
    python evals/mmlu.py --model sdar-8b --data cot --gen-length 4096 --denoising-steps 4
    python evals/mmlu.py --completions FILE.jsonl --data mmlu.zip  the zip of the original csv files

There are two prompts. "direct", the default, shows five examples of the subject (dev rows 0-4) as
chat turns and expects a letter: OpenCompass' mmlu_gen_a484b3, which DARE uses for LLaDA, Dream (128
tokens) and LLaDA2 (256). Its last question says Q and A, its examples Question and Answer. "cot"
(--data cot) is simple-evals' prompt without examples, used in DARE's lmdeploy runs of SDAR (4,096
tokens; its transformers runs use "direct" with Question and Answer throughout). result.json has the
mean over all questions, as lm-eval weights them, and macro_accuracy, the plain mean of the 57
subjects, which OpenCompass and DARE's table print. DARE's table: LLaDA-8B-Instruct 65.24,
Dream-7B-Instruct 66.83, SDAR-8B-Chat 77.23, LLaDA2.0-mini 72.54. Always answering A scores 22.95 %,
always D 26.89 %.
"""

import sys
from pathlib import Path

sys.path.insert(0, __file__.rpartition("/evals/")[0])
from data.rows import read_rows
from evals import main
from evals.choices import extract, lettered, read_zip, score, with_shots  # noqa: F401
from evals.examples import as_text, one_split, parse_rows, source_and_style, user

HUB = "cais/mmlu"
PRESETS = {"cot": "cot"}  # names that `load` takes besides zips and hub ids
# name of the prompt, by style
VERSION = {"direct": "OpenCompass mmlu_gen_a484b3", "cot": "simple-evals"}
NEEDS = "question, subject, four choices (or A-D) and answer (index or letter)"
HINT = "There is a single choice question about {}. Answer the question by replying A, B, C or D."
COT = (
    "Answer the following multiple choice question. The last line of your response should be of "
    "the following format: 'ANSWER: $LETTER' (without quotes) where LETTER is one of ABCD. Think "
    "step by step before answering."
)


def load(split, path=None, limit=None):
    """The first `limit` examples {"question", "options": 4, "gold": letter, "subject", "style":
    "direct" | "cot", "shots": dev examples}, subject after subject.

    path: empty for the hub's rows, a hub id with HUB's columns, or a zip of csv files; "cot", or
    @cot behind a path, for this style.
    """
    path, style = source_and_style(path, HUB, PRESETS)
    split = one_split("mmlu", split, {"test": "test", "validation": "validation"})
    if path.endswith(".zip") or Path(path).exists():
        columns, split = ["question", *"ABCD", "answer"], split.replace("validation", "val")
        read = lambda part: list(read_zip(path, part, columns))
    else:
        read = lambda part: read_rows(path, part, PRESETS, config="all")
    dev, examples = (parse_rows(_problem, NEEDS, path, read(part)) for part in ("dev", split))
    examples = [example | {"style": "direct"} | style for example in examples[:limit]]
    return with_shots(examples, dev, path)


def prompt(example):
    """direct: five pairs of question and letter, then the question. cot: one message."""
    if example["style"] == "cot":
        options = lettered(example["options"], "{}) {}")
        return user(f"{COT}\n\n{example['question']}\n\n{options}")
    hint = HINT.format(example["subject"].replace("_", " "))
    ask = lambda row, q, a: f"{hint}\n{q}: {row['question']}\n{lettered(row['options'])}\n{a}: "
    shots = [(ask(shot, "Question", "Answer"), f"{shot['gold']}\n") for shot in example["shots"]]
    return user(ask(example, "Q", "A"), shots)


def answer(example, draw=0):
    """The gold letter as the prompt asks for it."""
    return f"ANSWER: {example['gold']}" if example["style"] == "cot" else example["gold"]


def _problem(row):
    """A row of a csv file (A-D, letter) or of the hub (choices, index of the answer)."""
    options = row["choices"] if "choices" in row else [row[label] for label in "ABCD"]
    gold = dict(enumerate("ABCD")).get(row["answer"], row["answer"])
    subject, *options = map(as_text, (row["subject"], *options))
    if len(options) != 4 or gold not in list("ABCD"):
        raise ValueError("not four options and one of them")
    return {"question": row["question"], "options": options, "gold": gold, "subject": subject}


if __name__ == "__main__":
    main("mmlu")
