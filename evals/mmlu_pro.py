"""MMLU-Pro: 14 categories, up to ten options, 12,032 questions (validation 70).

    python evals/mmlu_pro.py --model llada-8b --cache dual
    python evals/mmlu_pro.py --completions FILE.jsonl --data rows.jsonl

The default asks for reasoning and shows no examples: OpenCompass' mmlu_pro_0shot_cot_gen_08c1de,
which DARE uses for LLaDA (256 tokens), Dream (128) and LLaDA2 (256). So few tokens cut off many
answers: look at `answered` and `truncated` in result.json. Its macro_accuracy, the plain mean of
the categories, is what DARE's table prints: LLaDA-8B-Instruct 36.82, Dream-7B-Instruct 31.89,
LLaDA2.0-mini 57.10. `--data 5-shot` shows the first five validation rows of the category with their
reasoning as chat turns, as the authors do (OpenCompass' mmlu_pro_gen_cdbebf). Of a file with
@5-shot behind it the rows with cot_content are the examples.
"""

import sys
from functools import partial

sys.path.insert(0, __file__.rpartition("/evals/")[0])
from data.rows import read_rows
from evals import main
from evals.choices import LETTERS, extract, score, with_shots  # noqa: F401
from evals.examples import as_text, one_split, parse_rows, source_and_style, user

HUB = "TIGER-Lab/MMLU-Pro"
# names that `load` takes besides files and hub ids: HUB's rows with worked examples
PRESETS = {"5-shot": "reasons"}
VERSION = {  # name of the prompt, by style
    "": "OpenCompass mmlu_pro_0shot_cot_gen_08c1de",
    "reasons": "OpenCompass mmlu_pro_gen_cdbebf",
}
NEEDS = "question, options (up to 16), answer (letter of one of them) and category"
INSTRUCTION = (
    "Answer the following multiple choice question. The last line of your response should be of "
    "the following format: 'ANSWER: $LETTER' (without quotes) where LETTER is one of Options(e.g. "
    "one of ABCDEFGHIJKLMNOP). Think step by step before answering."
)
STEPS = "Let's think step by step."


def load(split, path=None, limit=None):
    """The first `limit` examples {"question", "options": letter -> text, "gold": letter, "subject":
    category}, with worked examples also "style" and "shots": examples with "reason".

    path: empty for the hub's rows, or a .jsonl or .parquet file or hub id with HUB's columns, and
    @5-shot behind it for worked examples. Options "N/A" are left out; the others
    keep their letters.
    """
    split = one_split("mmlu_pro", split, {"test": "test", "validation": "validation"})
    path, style = source_and_style(path, HUB, PRESETS)
    read = partial(read_rows, path, presets=PRESETS)
    parse = partial(parse_rows, _problem, NEEDS, path)
    if not style:
        return parse(read(split, limit=limit))
    rows = [row for row in read(split) if not row.get("cot_content")]
    dev = [row for row in read("validation") if row.get("cot_content")]
    return [example | style for example in with_shots(parse(rows[:limit]), parse(dev), path)]


def prompt(example):
    """One user message, in the style "reasons" after five chat turns."""
    if example.get("style") != "reasons":
        return user(f"{INSTRUCTION}\n\n{_asked(example, 2)}")
    shots = example["shots"]
    return user(
        _asked(example),
        [(_asked(shot), f"Answer: {STEPS} {shot['reason']}") for shot in shots],
    )


def _asked(row, lines=1):
    """Question and options, `lines` apart."""
    options = "\n".join(f"{label}. {text}" for label, text in row["options"].items()).strip()
    return ("\n" * lines).join(["Question:", row["question"], "Options:", options])


def answer(example, draw=0):
    """The last line that the prompt asks for."""
    return f"ANSWER: {example['gold']}"


def _problem(row):
    labelled = zip(LETTERS[:16], row["options"], strict=False)
    options = {label: as_text(text) for label, text in labelled if text != "N/A"}
    if row["answer"] not in options or len(row["options"]) > 16:
        raise ValueError("not an option")
    example = {"question": row["question"], "options": options, "gold": row["answer"]}
    example["subject"] = as_text(row["category"])
    reason = as_text(row.get("cot_content") or "").removeprefix(f"A: {STEPS}").strip()
    return example | ({"reason": reason} if reason else {})


if __name__ == "__main__":
    main("mmlu_pro")
