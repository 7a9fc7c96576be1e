"""BIG-Bench Hard: 27 tasks, 6,511 questions; options in 17 tasks, free answers (numbers, words, brackets) in 10.

    git clone https://github.com/suzgunmirac/BIG-Bench-Hard
    python evals/bbh.py --model llada-8b-base --data BIG-Bench-Hard --gen-length 256 --block-length 256 --denoising-steps 256
    python evals/bbh.py --model sdar-8b --gen-length 512 --denoising-steps 4                      lukaemon/bbh, no examples

The published setting is that of the clone: the authors' three worked examples in front of each question, as OpenCompass'
bbh_gen_ee62e9 puts them into one message (DARE and LLaDA, base models only, length 256). The hub's rows and files come
without examples, so they are asked for the same last sentence instead: another setting, without published numbers here.
macro_accuracy of result.json, the plain mean of the 27 tasks, is what is published: LLaDA-8B-Base 49.7 (length 1,024),
Dream-7B-Base 57.9, LLaDA2.0-mini 78.21.
OpenCompass takes the text behind the first "answer is" and minds upper case; here the last counts, and yes is Yes.
"""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.rows import describe_columns, read_rows
from evals.choices import letter, one_split
from evals.gsm8k import boxes

HUB = "lukaemon/bbh"
PRESETS = ()  # names that `load` takes besides files, folders and hub ids
VERSION = {"shown": "OpenCompass bbh_gen_ee62e9", "alone": "ours"}  # name of the prompt, by style
TASKS = (
    "boolean_expressions causal_judgement date_understanding disambiguation_qa dyck_languages formal_fallacies "
    "geometric_shapes hyperbaton logical_deduction_five_objects logical_deduction_seven_objects "
    "logical_deduction_three_objects movie_recommendation multistep_arithmetic_two navigate object_counting "
    "penguins_in_a_table reasoning_about_colored_objects ruin_names salient_translation_error_detection snarks "
    "sports_understanding temporal_sequences tracking_shuffled_objects_five_objects "
    "tracking_shuffled_objects_seven_objects tracking_shuffled_objects_three_objects web_of_lies word_sorting"
).split()
INSTRUCTION = 'Think step by step, and end with the sentence "So the answer is X.", where X is the answer alone.'
ANSWER_IS = re.compile(r"answer is\s{0,4}:?", re.IGNORECASE)
MAX_LENGTH = 512  # characters of a free answer; longer ones do not count


def load(split: str, path: str | None = None, limit: int | None = None) -> list[dict]:
    """Examples {"question", "gold": "(B)" or free text, "subject": task, "shots": worked examples, "" if none, "style": "shown"
    with them, else "alone"}; split "test".

    path: empty for the hub's rows; a clone of the authors' repository; a hub id with one config per task; or a .jsonl, .csv
    or .parquet file with columns input and target, and task if it holds several. At most `limit` rows, always the first.
    SystemExit with one line on all else.
    """
    one_split("bbh", split, {"test": "test"})
    path = path or HUB
    if Path(path).is_dir():
        rows = [row for task in TASKS for row in _clone_rows(Path(path), task)]
    elif Path(path).is_file() or "/" not in path:
        rows = read_rows(path, split, PRESETS, limit)
    else:
        rows = [
            {"task": task} | row
            for task in TASKS
            for row in read_rows(path, split, PRESETS, config=task)
        ]
    examples = []
    for number, row in enumerate(rows[:limit], 1):
        question, gold = row.get("input"), row.get("target")
        if not all(isinstance(text, str) and text.strip() for text in (question, gold)):
            raise SystemExit(
                f"{path} row {number}: cannot read a question from {describe_columns(row)}; needs input and target"
            )
        shots = row.get("shots", "")
        example = {
            "question": question,
            "gold": gold,
            "subject": row.get("task", "bbh"),
            "shots": shots,
        }
        examples.append(example | {"style": "shown" if shots else "alone"})
    return examples


def prompt(example: dict) -> list[dict]:
    """One user message: worked examples and the question, or the question and what the last sentence must be."""
    if example["shots"]:
        question = f"Q: {example['question']}\nA: Let's think step by step."
        content = (
            f"Follow the given examples and answer the question.\n{example['shots']}\n\n{question}"
        )
    else:
        content = f"{example['question']}\n\n{INSTRUCTION}"
    return [{"role": "user", "content": content}]


def shots(example: dict) -> int:
    """How many worked examples stand in the message."""
    return len(re.findall(r"^Q: ", example["shots"], re.MULTILINE))


def extract(completion: str, example: dict) -> str | None:
    r"""With options the letter as "(B)" (`choices.letter`). Else the first that there is: the line behind the last "answer is",
    the last \boxed{}, a completion of one line; of it the bold part, without a full stop. None where there is none.
    """
    if re.fullmatch(r"\([A-Z]\)", example["gold"]):
        found = letter(
            completion,
            "".join(re.findall(r"^\(([A-Z])\)", example["question"], re.MULTILINE))
            or "ABCDEFGHIJKLMNOPQR",
        )
        return found and f"({found})"
    mentions = list(ANSWER_IS.finditer(completion))
    text = completion[mentions[-1].end() :].strip() if mentions else ""
    if boxed := [box for box in boxes(text or completion) if box.strip()]:
        text = boxed[-1]
    elif not mentions and "\n" not in completion.strip():
        text = completion
    text = text[: MAX_LENGTH + 1].strip().split("\n")[0]
    bold = re.search(r"\*\*(.+?)\*\*", text)
    text = (bold[1] if bold else text).strip().removesuffix(".").strip()
    return text if 0 < len(text) <= MAX_LENGTH else None


def score(completion: str, example: dict) -> float:
    """1.0 if the answer is the gold one, upper case and blanks aside, else 0.0. Never raises."""
    plain = lambda text: " ".join((text or "").split()).casefold()
    return float(plain(extract(completion, example)) == plain(example["gold"]))


def answer(example: dict, draw: int = 0) -> str:
    """The last sentence alone."""
    return f"So the answer is {example['gold']}."


def _clone_rows(folder: Path, task: str) -> list[dict]:
    """Rows of one task with its examples, less the line that marks benchmark data. SystemExit where a file is missing."""
    try:
        rows = json.loads((folder / f"bbh/{task}.json").read_text(encoding="utf-8"))["examples"]
        shots = (
            (folder / f"cot-prompts/{task}.txt")
            .read_text(encoding="utf-8")
            .rpartition("\n-----\n")[2]
            .strip()
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        need = (
            f"bbh/{task}.json and cot-prompts/{task}.txt of github.com/suzgunmirac/BIG-Bench-Hard"
        )
        raise SystemExit(f"--data {folder}: needs {need} ({type(error).__name__})") from error
    return [{"task": task, "shots": shots} | row for row in rows]


if __name__ == "__main__":
    from evals.run import main

    main("bbh")
