"""Supervised rows: prompt and answer token ids, built separately, from any data set or from a task's gold answers."""

from jinja2 import TemplateError

from data.rows import Rows, describe_columns, hub_split, one_line, open_rows
from data.tokens import Dropped, is_first_rank, progress, token_rows
from models.checkpoint import prompt_text

DRAWS = 4  # a problem with several right answers gives up to so many rows
SPLITS = (
    "train_sft",
    "train",
)  # of a hub data set, the first that it has; ultrachat_200k calls it train_sft
COLUMNS = "messages that end with an assistant turn, or prompt and response as text"


def training_rows(task, data, held_out=()):
    """Rows of the train split: {"prompt": messages, "response": text}; {"dropped": (reason, detail)} for one to leave out.
    They can be gone through again and again, and those of a data set are read anew each time.

    data: a file (.jsonl, .parquet) or hub id with columns messages, or prompt and response; or whatever the task loads: a
    preset, its own (empty, or their hub id), a file of its problems. Then the rows are the task's prompts with its gold
    answers.
    held_out: problems that the run is scored on: rows that ask one of them, but for case and white space, are left out.
    SystemExit where the data set has other columns, or the task has no answers for it.
    """
    presets = getattr(task, "PRESETS", ())
    is_own = not data or data in (*presets, getattr(task, "HUB", ""))
    rows = [] if is_own else open_rows(data, hub_split(data, SPLITS), presets)
    if any("messages" in row or {"prompt", "response"} <= row.keys() for row in rows):
        found = Rows(lambda: map(conversation, rows))
    else:
        found = gold_answers(task, data)
    asked = {question(task.prompt(problem)) for problem in held_out}
    leaks = lambda row: "prompt" in row and question(row["prompt"]) in asked
    checked = lambda row: (
        {"dropped": ("ask what the run is scored on", shown(row))} if leaks(row) else row
    )
    return Rows(lambda: map(checked, found))


def conversation(row):
    """A row of a data set: the last turn of `messages`, or `response` to `prompt` (text or messages). -> as training_rows"""
    messages = row.get("messages")
    if messages is None:
        messages = (
            [{"role": "user", "content": row.get("prompt")}]
            if isinstance(row.get("prompt"), str)
            else row.get("prompt")
        )
        if isinstance(messages, list):
            messages = [*messages, {"role": "assistant", "content": row.get("response")}]
    if not is_dialogue(messages) or len(messages) < 2 or messages[-1]["role"] != "assistant":
        return {
            "dropped": (
                f"cannot be read, needed are {COLUMNS}",
                f"with {describe_columns(row)}: {str(row)[:120]}",
            )
        }
    return {"prompt": messages[:-1], "response": messages[-1]["content"]}


def is_dialogue(messages):
    """Whether a value is a list of turns, at least one, each with its role and its text."""
    is_turn = lambda turn: (
        isinstance(turn, dict)
        and all(isinstance(turn.get(key), str) for key in ("role", "content"))
    )
    return isinstance(messages, list) and bool(messages) and all(map(is_turn, messages))


def gold_answers(task, data):
    """The problems of the task's train split, each with up to DRAWS different right answers. -> as training_rows"""
    if not hasattr(task, "answer"):
        raise SystemExit(
            f"{task.__name__.split('.')[-1]} has no answers to train on: --data must name rows of {COLUMNS}"
        )
    try:
        problems = task.load("train", data)
    except SystemExit as error:
        raise SystemExit(f"{error}; or, to train on rows as they are, {COLUMNS}") from error
    rows = []
    with progress(
        len(problems), "answers", is_first_rank()
    ) as bar:  # those of countdown are searched for
        for problem in problems:
            try:
                answers = sorted({task.answer(problem, draw) for draw in range(DRAWS)})
            except ValueError as error:
                rows.append({"dropped": ("have no answer", one_line(error))})
            else:
                rows += [{"prompt": task.prompt(problem), "response": text} for text in answers]
            bar.update()
    return rows


def question(messages):
    """What two prompts share if they ask the same: the last turn, whatever its case and the width of its white space."""
    return " ".join(messages[-1]["content"].split()).casefold()


def shown(row):
    return f"{row['prompt'][-1]['content'][:60]!r} -> {row['response'][:60]!r}"


def encode(rows, tokenizer, model, max_length, batch_size=1, use_cache=True):
    """rows of training_rows -> TokenRows of (prompt ids, answer ids), from the cache where they were tokenised before.

    model: with eos_token_ids, the first of which closes an answer, and mask_token_id. Rows are never cut: one of more than
    max_length tokens is dropped. SystemExit if fewer than batch_size rows are left.
    """
    settings = {
        "turn_end_id": model.eos_token_ids[0],
        "mask_token_id": model.mask_token_id,
        "max_length": max_length,
    }
    return token_rows(rows, tokenizer, encode_rows, 2, settings, use_cache).at_least(batch_size)


def encode_rows(rows, tokenizer, turn_end_id, mask_token_id, max_length):
    """-> for each row (prompt ids, answer ids) or Dropped, with why.

    The prompt is rendered by the chat template up to where the answer starts, and the answer's ids follow, closed by
    turn_end_id. Rendering the finished dialogue instead would be wrong: SDAR's template puts an empty think block before the
    answer of a last turn. Answers are text: what looks like a special token in them (<|MASK|>) stays ordinary characters.
    In a prompt it becomes that token, as in a rollout; a row with a mask token would be one whose mask is never revealed.
    """
    encoded = [render(row, tokenizer) for row in rows]
    whole = [i for i, row in enumerate(encoded) if not isinstance(row, Dropped)]
    if not whole:
        return encoded
    prompts = tokenizer([encoded[i] for i in whole], add_special_tokens=False)["input_ids"]
    answers = [rows[i]["response"] for i in whole]
    answers = tokenizer(answers, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    for i, prompt, answer in zip(whole, prompts, answers, strict=True):
        length = len(prompt) + len(answer) + 1
        if mask_token_id in prompt or mask_token_id in answer:
            encoded[i] = Dropped("hold a mask token", shown(rows[i]))
        elif length > max_length:
            encoded[i] = Dropped(
                f"exceed --max-length {max_length}", f"{length} tokens: {shown(rows[i])}"
            )
        else:
            encoded[i] = prompt, answer + [turn_end_id]
    return encoded


def render(row, tokenizer):
    """The prompt of a row as text, or Dropped."""
    if "dropped" in row:
        return Dropped(*row["dropped"])
    if not row["response"].strip():
        return Dropped("have an empty answer", shown(row))
    try:
        text = prompt_text(tokenizer, row["prompt"])
        (text + row["response"]).encode()
    except UnicodeEncodeError as error:
        return Dropped("hold half of a character (a surrogate)", f"{shown(row)}, {one_line(error)}")
    except (TemplateError, TypeError) as error:
        return Dropped("are refused by the chat template", f"{shown(row)}, {one_line(error)}")
    return text
