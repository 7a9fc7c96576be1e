"""Supervised rows: prompts and answers of a data set, or a task's prompts with its gold answers."""

from itertools import chain

from data.rows import hub_split, is_own, one_line, open_rows
from data.tokens import Dropped, as_messages, is_dialogue, token_rows, unreadable, without_questions

DRAWS = 4  # a problem with several right answers gives up to this many rows
SPLITS = "train_sft", "train"  # of a hub data set, the first that it has; ultrachat_200k: train_sft
COLUMNS = "messages that end with an assistant turn, or prompt and response as text"


def training_rows(task, data, held_out=()):
    """Rows of the train split, {"prompt": messages, "response": text} or Dropped. A generator.

    data: a file (.jsonl, .jsonl.gz, .csv, .parquet) or hub id with columns messages, or prompt and
    response; or what the task loads: a preset, its own data (empty, or its hub id), a file of its
    problems. Then rows are the task's prompts with its gold answers.
    held_out: problems that the run is scored on; rows that ask one of them are left out.
    SystemExit if the data set has other columns, or the task has no answers for it.
    """
    asked = [task.prompt(problem) for problem in held_out]
    yield from without_questions(source_rows(task, data), asked)


def source_rows(task, data):
    if not is_own(task, data):
        rows = iter(open_rows(data, hub_split(data, SPLITS), task.PRESETS))
        first = next(rows, {})
        if "messages" in first or {"prompt", "response"} <= first.keys():
            return map(conversation, chain([first], rows))
    return gold_answers(task, data)


def conversation(row):
    """A row of a data set with `messages`, or with `response` and `prompt` (text or messages)."""
    prompt, messages = as_messages(row.get("prompt")), row.get("messages")
    if messages is None and isinstance(prompt, list):
        messages = [*prompt, {"role": "assistant", "content": row.get("response")}]
    if not is_dialogue(messages) or len(messages) < 2 or messages[-1]["role"] != "assistant":
        return unreadable(row, f"cannot be read, needed are {COLUMNS}")
    return {"prompt": messages[:-1], "response": messages[-1]["content"]}


def gold_answers(task, data):
    """Problems of the task's train split, each with up to DRAWS different right answers."""
    if not hasattr(task, "answer"):
        raise SystemExit(
            f"{task.NAME} has no answers to train on: --data must name rows of {COLUMNS}"
        )
    try:
        problems = task.load("train", data)
    except SystemExit as error:
        raise SystemExit(f"{error}; or, to train on rows as they are, {COLUMNS}") from error
    for problem in problems:
        try:
            answers = sorted({task.answer(problem, draw) for draw in range(DRAWS)})
        except ValueError as error:
            yield Dropped("have no answer", one_line(error))
        else:
            yield from ({"prompt": task.prompt(problem), "response": text} for text in answers)


def encode(rows, tokenizer, model, max_length, batch_size=1):
    """-> TokenRows of (prompt ids, answer ids). SystemExit if fewer than batch_size are left."""
    return token_rows(rows, tokenizer, model, max_length, ("response",)).at_least(batch_size)
