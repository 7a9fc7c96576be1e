"""Supervised rows: prompt and answer token ids, built separately, from a hub id, a jsonl or a parquet file."""

import json
from pathlib import Path

from models import prompt_ids


def read_rows(path, split="train"):
    """path: a .jsonl or .parquet file, or a hub id -> rows [{"messages": [...]}] or [{"prompt": ..., "response": str}].

    SystemExit names the file, the row and its columns when one has neither {messages} nor {prompt, response}.
    """
    if Path(path).is_file():
        if path.endswith(".jsonl"):
            rows = []
            for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise SystemExit(f"{path}, line {number} is not JSON ({error})") from error
        elif path.endswith(".parquet"):
            import pandas

            rows = pandas.read_parquet(path).to_dict("records")
        else:
            raise SystemExit(f"{path}: training rows come as .jsonl or .parquet")
    elif "/" in path and not Path(path).suffix:
        from datasets import load_dataset

        rows = list(load_dataset(path, split=split))
    else:
        raise SystemExit(
            f"--data {path} is no file here, and no hub id (owner/name): give the path of a .jsonl or .parquet file"
        )
    for number, row in enumerate(rows):
        if "messages" not in row and not {"prompt", "response"} <= row.keys():
            raise SystemExit(f"{path}, row {number} has columns {', '.join(row)}; needed are messages, or prompt and response")
    return rows


def conversation(row):
    """-> prompt messages, answer text: the last turn of `messages`, or `response` to `prompt` (text or messages)."""
    if "messages" in row:
        *prompt, last = row["messages"]
        if last["role"] != "assistant" or not prompt:
            raise SystemExit(f"a row of messages must end with an assistant turn that answers something, not with {last}")
        return list(prompt), last["content"]
    prompt = row["prompt"]
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt), row["response"]


def encode(rows, tokenizer, turn_end_id, max_length):
    """rows -> [(prompt ids, answer ids)], number of rows dropped because prompt + answer exceed max_length tokens.

    The prompt is rendered by the chat template up to where the answer starts, and the answer's ids follow, closed by
    turn_end_id. Rendering the finished dialogue instead would be wrong: SDAR's template puts an empty think block before the
    answer of a last turn. SystemExit if no row is left.
    """
    encoded = []
    for row in rows:
        messages, answer = conversation(row)
        encoded.append(
            (prompt_ids(tokenizer, messages), tokenizer(answer, add_special_tokens=False)["input_ids"] + [turn_end_id])
        )
    kept = [(prompt, answer) for prompt, answer in encoded if len(prompt) + len(answer) <= max_length]
    if not kept:
        shortest = min((len(prompt) + len(answer) for prompt, answer in encoded), default=0)
        raise SystemExit(f"all {len(rows)} rows exceed --max-length {max_length}: the shortest has {shortest} tokens")
    return kept, len(rows) - len(kept)
