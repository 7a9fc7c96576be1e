"""Supervised rows: prompt and answer token ids, built separately, from any data set or from a task's gold answers."""

from data.rows import describe_columns, read_rows
from models import prompt_ids

DRAWS = 4  # a problem with several right answers gives up to so many rows


def training_rows(task, data):
    """Rows [{"prompt": messages, "response": text}] of the train split.

    data: a file (.jsonl, .parquet) or hub id with columns messages, or prompt and response; or whatever the task loads: a
    preset, its own (empty), a file of its problems. Then the rows are the task's prompts with its gold answers.
    SystemExit names the file and the row that has another form.
    """
    rows = [] if not data or data in task.PRESETS else read_rows(data, "train", task.PRESETS)
    if rows and ("messages" in rows[0] or {"prompt", "response"} <= rows[0].keys()):
        return [conversation(row, f"{data} row {number}") for number, row in enumerate(rows, 1)]
    problems = task.load("train", data)
    answers = [sorted({task.answer(problem, draw) for draw in range(DRAWS)}) for problem in problems]
    return [{"prompt": task.prompt(p), "response": text} for p, texts in zip(problems, answers, strict=True) for text in texts]


def conversation(row, where):
    """The last turn of `messages`, or `response` to `prompt` (text or messages). -> {"prompt": messages, "response": text}"""
    needed = "needed are messages that end with an assistant turn, or prompt and response as text"
    messages = row.get("messages")
    if messages is None:
        prompt, answer = row.get("prompt"), row.get("response")
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    else:
        is_dialogue = isinstance(messages, list) and messages and all(isinstance(turn, dict) for turn in messages)
        *prompt, last = messages if is_dialogue else [{}]
        answer = last.get("content") if last.get("role") == "assistant" else None
    if not isinstance(answer, str) or not isinstance(prompt, list) or not prompt:
        raise SystemExit(f"{where} cannot be read ({describe_columns(row)}): {needed}")
    return {"prompt": prompt, "response": answer}


def encode(rows, tokenizer, turn_end_id, max_length):
    """rows of training_rows -> [(prompt ids, answer ids)], number of rows dropped because they exceed max_length tokens.

    The prompt is rendered by the chat template up to where the answer starts, and the answer's ids follow, closed by
    turn_end_id. Rendering the finished dialogue instead would be wrong: SDAR's template puts an empty think block before the
    answer of a last turn. Answers are text: what looks like a special token in them (<|MASK|>) stays ordinary characters.
    SystemExit if no row is left.
    """
    if not rows:
        raise SystemExit("--data holds no rows to train on")
    encoded = []
    for row in rows:
        answer = tokenizer(row["response"], add_special_tokens=False, split_special_tokens=True)["input_ids"]
        encoded.append((prompt_ids(tokenizer, row["prompt"]), answer + [turn_end_id]))
    kept = [(prompt, answer) for prompt, answer in encoded if len(prompt) + len(answer) <= max_length]
    if not kept:
        shortest = min(len(prompt) + len(answer) for prompt, answer in encoded)
        raise SystemExit(f"all {len(rows)} rows exceed --max-length {max_length}: the shortest has {shortest} tokens")
    return kept, len(rows) - len(kept)
