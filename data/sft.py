"""Supervised rows: prompts and answers of a data set, or a task's prompts with its gold answers."""

from itertools import chain

from data.rows import is_own, open_rows, split_name
from data.tokens import Dropped, answered

DRAWS = 4  # a problem with several right answers gives up to this many rows
SPLITS = "train_sft", "train"  # the first that the data has; ultrachat_200k: train_sft
COLUMNS = "messages that end with an assistant turn, or prompt and response as text"


def training_rows(task, data):
    """Rows of the train split, {"prompt": messages, "response": text} or Dropped. A generator.

    data: a file (.jsonl, .jsonl.gz, .csv, .parquet), a folder of files named as their splits, or a
    hub id, with columns messages, or prompt and response; or what the task loads: a preset, its own
    data (empty, or its hub id), a file of its problems. Then rows are the task's prompts with its
    gold answers. SystemExit if the data set has other columns, or the task has no answers for it.
    """
    if not is_own(task, data):
        rows = open_rows(data, split_name(data, SPLITS), task.PRESETS)
        first = next(rows, {})
        if "messages" in first or {"prompt", "response"} <= first.keys():
            yield from map(conversation, chain([first], rows))
            return
    yield from gold_answers(task, data)


def conversation(row):
    """A row of a data set with `messages`, or with `response` and `prompt` (text or messages)."""
    found = answered(row, "messages" if row.get("messages") is not None else "response")
    if found is None:
        return Dropped(f"cannot be read, needed are {COLUMNS}", row)
    return dict(zip(("prompt", "response"), found, strict=True))


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
