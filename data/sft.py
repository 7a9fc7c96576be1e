"""Supervised rows: prompts and answers of a data set, or a task's prompts with its gold answers."""

from itertools import chain

from data.rows import is_own, open_rows, split_name
from data.tokens import Dropped, answers_of

DRAWS = 4  # a problem with several right answers gives up to this many rows
SPLITS = "train_sft", "train"  # the first that the data has; ultrachat_200k: train_sft
# column of the answer: one that it needs
LAYOUTS = {"messages": "messages", "conversations": "conversations"}
LAYOUTS |= {"response": "prompt", "output": "instruction"}
COLUMNS = "messages or conversations (ShareGPT) that end with an assistant turn, or as text prompt "
COLUMNS += "and response, or instruction, input and output (Alpaca)"


def training_rows(task, data, turns="last"):
    """Rows of the train split, {"prompt": messages, "response": text} or Dropped. A generator.

    data: a file (.jsonl, .jsonl.gz, .csv, .parquet), a folder of files named as their splits, or a
    hub id, with the columns of one of LAYOUTS; or what the task loads: a preset, its own data
    (empty, or its hub id), a file of its problems. Then rows are the task's prompts with its gold
    answers. turns: "last" or "all", see `turns_of`. SystemExit if the data set has other columns,
    or the task has no answers for it.
    """
    if not is_own(task, data):
        rows = open_rows(data, split_name(data, SPLITS), task.PRESETS)
        first = next(rows, {})
        if any({*columns} <= first.keys() for columns in LAYOUTS.items()):
            for row in chain([first], rows):
                yield from turns_of(row, turns)
            return
    yield from gold_answers(task, data)


def turns_of(row, turns):
    """A row of a data set -> a row for its last turn, which must be the assistant's, or for all of
    the assistant's that have a prompt, in order; or Dropped.
    """
    column = next(filter(row.get, LAYOUTS), "response")
    if column == "output":
        texts = filter(None, (row.get("instruction"), row.get("input")))
        row = row | {"prompt": "\n".join(map(str, texts)) or None}
    found = answers_of(row, column, turns == "all")
    rows = [{"prompt": prompt, "response": text} for prompt, text in found]
    return rows or [Dropped(f"cannot be read, needed are {COLUMNS}", row)]


def answer_of(task, columns):
    """-> the function of a task that answers a problem; SystemExit if it has none"""
    if not hasattr(task, "answer"):
        raise SystemExit(f"{task.NAME} has no answers: --data must name rows of {columns}")
    return task.answer


def gold_answers(task, data):
    """Problems of the task's train split, each with up to DRAWS different right answers."""
    answer = answer_of(task, COLUMNS)
    try:
        problems = task.load("train", data)
    except SystemExit as error:
        raise SystemExit(f"{error}; or, to train on rows as they are, {COLUMNS}") from error
    for problem in problems:
        try:
            answers = sorted({answer(problem, draw) for draw in range(DRAWS)})
        except ValueError as error:
            yield Dropped("have no answer", error)
        else:
            yield from ({"prompt": task.prompt(problem), "response": text} for text in answers)
