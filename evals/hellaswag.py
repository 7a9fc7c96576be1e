"""HellaSwag: which of four endings goes on from a text; 10,042 rows, the hub's validation split, as test has no labels.

    python evals/hellaswag.py --model llada-8b --gen-length 3 --block-length 3 --denoising-steps 3      Rowan/hellaswag
    python evals/hellaswag.py --completions FILE.jsonl --data rows.jsonl

--split test reads the hub's validation split; train and validation are its 39,905 train rows, 512 of them for validation.
No examples; the prompt is OpenCompass' hellaswag_gen_6faab5, without the activity in front of the text. DARE's lengths:
LLaDA 3, Dream 128, LLaDA2 256, SDAR 4,096. Its table: LLaDA-8B-Instruct 75.30, Dream-7B-Instruct 63.23, SDAR-8B-Chat 87.59,
LLaDA2.0-mini 82.35. lm-eval compares likelihoods of the endings, per byte in acc_norm: another quantity.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.planning import stable_hash
from data.rows import describe_columns, read_rows
from evals.choices import letter, lettered, one_split

HUB = "Rowan/hellaswag"
PRESETS = ()  # names that `load` takes besides files and hub ids
VERSION = "OpenCompass hellaswag_gen_6faab5"  # name of the prompt
SPLITS = {"test": "validation", "train": "train", "validation": "train"}
VALIDATION = 512  # rows of the hub's train split that are the validation split here


def load(split: str, path: str | None = None, limit: int | None = None) -> list[dict]:
    """Examples {"text", "options": 4, "gold": letter}.

    path: empty for the hub's rows; a .jsonl or .parquet file, or a hub id, with the columns of HUB, or with query,
    choices and gold (OpenCompass' file). Of HUB's train rows the 512 with the smallest `stable_hash` of their text are
    "validation" and the others "train"; a file gives the same rows for every split. At most `limit` rows, always the first.
    SystemExit with one line on all else.
    """
    path, name = path or HUB, one_split("hellaswag", split, SPLITS)
    if path != HUB or split == "test":
        return [_problem(row, path) for row in read_rows(path, name, PRESETS, limit)]
    examples = [_problem(row, path) for row in read_rows(path, name, PRESETS)]
    order = sorted(
        range(len(examples)), key=lambda i: stable_hash("hellaswag", examples[i]["text"], i)
    )
    return [
        examples[i]
        for i in sorted(order[:VALIDATION] if split == "validation" else order[VALIDATION:])
    ][:limit]


def prompt(example: dict) -> list[dict]:
    """One user message."""
    ask = f"{example['text']}\nQuestion: Which ending makes the most sense?\n{lettered(example['options'])}\n"
    return [{"role": "user", "content": f"{ask}You may choose from 'A', 'B', 'C', 'D'.\nAnswer:"}]


def extract(completion: str, example: dict) -> str | None:
    """The letter of the completion (`choices.letter`), or None."""
    return letter(completion)


def score(completion: str, example: dict) -> float:
    """1.0 if the letter is the gold one, else 0.0. Never raises."""
    return float(extract(completion, example) == example["gold"])


def answer(example: dict, draw: int = 0) -> str:
    """The gold letter."""
    return example["gold"]


def cleaned(text: str) -> str:
    """Text without WikiHow's marks, as lm-eval cleans it: "Wash. [title] Dry [step] it" -> "Wash. . Dry it"."""
    return re.sub(r"\[[^\]]*\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _problem(row: dict, path: str) -> dict:
    """A row of the hub, or of OpenCompass' file, whose text is clean already. SystemExit names what it lacks."""
    if "query" in row:
        text, options, gold = (
            str(row["query"]).split(": ", 1)[-1],
            row.get("choices"),
            row.get("gold"),
        )
    else:
        text, options, gold = (
            f"{row.get('ctx_a')} {str(row.get('ctx_b')).capitalize()}",
            row.get("endings"),
            row.get("label"),
        )
        text = cleaned(text) if "ctx_a" in row and "ctx_b" in row else ""
        options = [cleaned(option) for option in options] if _four_texts(options) else None
    if not text.strip() or not _four_texts(options) or str(gold) not in tuple("0123"):
        needs = "ctx_a, ctx_b, four endings and label (0 to 3), or query, four choices and gold"
        raise SystemExit(
            f"{path}: cannot read a question from {describe_columns(row)}; needs {needs}"
        )
    return {"text": text, "options": options, "gold": "ABCD"[int(gold)]}


def _four_texts(options: object) -> bool:
    return (
        isinstance(options, list)
        and len(options) == 4
        and all(isinstance(option, str) for option in options)
    )


if __name__ == "__main__":
    from evals.run import main

    main("hellaswag")
