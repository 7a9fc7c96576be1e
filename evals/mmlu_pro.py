"""MMLU-Pro: 14 categories, up to ten options, 12,032 questions (validation 70).

    python evals/mmlu_pro.py --model llada-8b --cache dual
    python evals/mmlu_pro.py --completions FILE.jsonl --data rows.jsonl

Reasoning before the answer, no worked examples: OpenCompass' mmlu_pro_0shot_cot_gen_08c1de, which
DARE uses for LLaDA (256 tokens), Dream (128) and LLaDA2 (256). So few tokens cut off many answers:
look at `answered` and `truncated` in result.json. Its macro_accuracy, the plain mean of the
categories, is what DARE's table prints: LLaDA-8B-Instruct 36.82, Dream-7B-Instruct 31.89,
LLaDA2.0-mini 57.10. For SDAR-8B-Chat (56.49) DARE's lmdeploy runs show five examples and ask for
the letter alone, which is not offered here. lm-eval shows five worked examples and allows 2,048
tokens.
"""

import sys

sys.path.insert(0, __file__.rpartition("/evals/")[0])
from evals import choices, main
from evals.choices import LETTERS
from evals.examples import as_text, one_split, read_examples, user

HUB = "TIGER-Lab/MMLU-Pro"
VERSION = "OpenCompass mmlu_pro_0shot_cot_gen_08c1de"  # name of the prompt
NEEDS = "question, options (up to 16), answer (letter of one of them) and category"
INSTRUCTION = (
    "Answer the following multiple choice question. The last line of your response should be of "
    "the following format: 'ANSWER: $LETTER' (without quotes) where LETTER is one of Options(e.g. "
    "one of ABCDEFGHIJKLMNOP). Think step by step before answering."
)
extract, score = choices.extract, choices.score


def load(split, path=None, limit=None):
    """The first `limit` examples {"question", "options": letter -> text, "gold": letter, "subject":
    category}.

    path: empty for the hub's rows, or a .jsonl or .parquet file or hub id with HUB's columns.
    Options "N/A" are left out; the others keep their letters.
    """
    split = one_split("mmlu_pro", split, {"test": "test", "validation": "validation"})
    return read_examples(_problem, NEEDS, path or HUB, split, limit=limit)


def prompt(example):
    """One user message."""
    options = "\n".join(f"{label}. {text}" for label, text in example["options"].items())
    content = f"{INSTRUCTION}\n\nQuestion:\n\n{example['question']}\n\nOptions:\n\n{options}"
    return user(content)


def answer(example, draw=0):
    """The last line that the prompt asks for."""
    return f"ANSWER: {example['gold']}"


def _problem(row):
    labelled = zip(LETTERS[:16], row["options"], strict=False)
    options = {label: as_text(text) for label, text in labelled if text != "N/A"}
    if row["answer"] not in options or len(row["options"]) > 16:
        raise ValueError("not an option")
    example = {"question": row["question"], "options": options, "gold": row["answer"]}
    return example | {"subject": as_text(row["category"])}


if __name__ == "__main__":
    main("mmlu_pro")
