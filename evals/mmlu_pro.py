"""MMLU-Pro: 14 categories, up to ten options, 12,032 questions (validation 70).

    python evals/mmlu_pro.py --model llada-8b --gen-length 256 --block-length 256 --denoising-steps 256 --cache dual
    python evals/mmlu_pro.py --completions FILE.jsonl --data rows.jsonl

No examples, reasoning before the answer: OpenCompass' mmlu_pro_0shot_cot_gen_08c1de, in which DARE asks LLaDA (256 tokens),
Dream (128) and LLaDA2 (256). So few tokens cut off many answers: look at `answered` and `truncated` of result.json.
macro_accuracy there, the plain mean of the categories, is what DARE's table prints: LLaDA-8B-Instruct 36.82,
Dream-7B-Instruct 31.89, LLaDA2.0-mini 57.10; for SDAR-8B-Chat's 56.49 its lmdeploy runs show five examples and ask for the
answer alone, which is not offered here. lm-eval shows five worked examples and gives 2,048 tokens.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.rows import describe_columns, read_rows
from evals.choices import LETTERS, letter, one_split

HUB = "TIGER-Lab/MMLU-Pro"
PRESETS = ()  # names that `load` takes besides files and hub ids
VERSION = "OpenCompass mmlu_pro_0shot_cot_gen_08c1de"  # name of the prompt
SPLITS = {"test": "test", "validation": "validation"}
INSTRUCTION = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'ANSWER: $LETTER' (without quotes) where LETTER is one of Options(e.g. one of ABCDEFGHIJKLMNOP). "
    "Think step by step before answering."
)


def load(split: str, path: str | None = None, limit: int | None = None) -> list[dict]:
    """Examples {"question", "options": letter -> text, "gold": letter, "subject": category}.

    path: empty for the hub's rows, or a .jsonl or .parquet file or hub id with the columns of HUB. At most `limit`
    rows, always the first. Options "N/A" are left out, and the others keep their letters. SystemExit with one line on an
    unknown path or a row of another form.
    """
    rows = read_rows(path or HUB, one_split("mmlu_pro", split, SPLITS), PRESETS, limit)
    return [_problem(row, path or HUB) for row in rows]


def prompt(example: dict) -> list[dict]:
    """One user message."""
    options = "\n".join(f"{label}. {text}" for label, text in example["options"].items())
    content = f"{INSTRUCTION}\n\nQuestion:\n\n{example['question']}\n\nOptions:\n\n{options}"
    return [{"role": "user", "content": content}]


def extract(completion: str, example: dict) -> str | None:
    """The letter of the completion (`choices.letter`), or None."""
    return letter(completion, "".join(example["options"]))


def score(completion: str, example: dict) -> float:
    """1.0 if the letter is the gold one, else 0.0. Never raises."""
    return float(extract(completion, example) == example["gold"])


def answer(example: dict, draw: int = 0) -> str:
    """The last line that the prompt asks for."""
    return f"ANSWER: {example['gold']}"


def _problem(row: dict, path: str) -> dict:
    """A row of the hub. SystemExit names what it lacks."""
    options, texts = row.get("options"), [row.get("question"), row.get("category")]
    if (
        isinstance(options, list)
        and len(options) <= 16
        and all(isinstance(text, str) for text in [*options, *texts])
    ):
        options = {LETTERS[i]: option for i, option in enumerate(options) if option != "N/A"}
        if row.get("answer") in options:
            return {
                "question": texts[0],
                "options": options,
                "gold": row["answer"],
                "subject": texts[1],
            }
    needs = "question, options (up to 16), answer (letter of one of them) and category"
    raise SystemExit(f"{path}: cannot read a question from {describe_columns(row)}; needs {needs}")


if __name__ == "__main__":
    from evals.run import main

    main("mmlu_pro")
