"""Supervised rows: prompt and answer ids built separately, files read as they come, mistakes named."""

import json
import os
from pathlib import Path

import pytest

from data.sft import conversation, encode, read_rows
from data.stream import ShuffledStream
from models import load_tokenizer
from models.random_init import byte_tokenizer

EOS = 256


def test_prompt_and_answer_are_tokenised_apart_and_closed_once():
    rows = [
        {"prompt": "1+1", "response": "2"},
        {"prompt": [{"role": "user", "content": "1+1"}], "response": "2"},
        {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]},
    ]
    encoded, dropped = encode(rows, byte_tokenizer(), EOS, 100)
    assert dropped == 0 and encoded == [([258, *b"1+1", 259], [*b"2", EOS])] * 3


def test_history_stays_in_the_prompt():
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    ((prompt, answer),), _ = encode([row], byte_tokenizer(), EOS, 100)
    assert prompt == [258, *b"a", 259, *b"b", 256, 258, *b"c", 259] and answer == [*b"d", EOS]


def test_long_rows_are_dropped_and_counted_and_all_long_is_refused():
    rows = [{"prompt": "p" * n, "response": "r"} for n in (1, 5, 50)]
    encoded, dropped = encode(rows, byte_tokenizer(), EOS, 9)
    assert len(encoded) == 2 and dropped == 1
    with pytest.raises(SystemExit, match="all 3 rows exceed --max-length 3: the shortest has 5 tokens"):
        encode(rows, byte_tokenizer(), EOS, 3)


def test_a_hub_id_is_loaded_by_datasets(monkeypatch):
    import datasets

    asked = []
    rows = [{"prompt": "a", "response": "b"}]
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: asked.append((name, split)) or rows)
    assert read_rows("owner/name", "train") == rows and asked == [("owner/name", "train")]


def test_the_stream_gives_every_item_once_per_epoch_in_a_keyed_order():
    items = list(range(7))
    stream = [ShuffledStream(items, seed=3)[i] for i in range(21)]  # a fresh object each time: position is the only state
    epochs = [stream[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(epoch) == items for epoch in epochs) and len({tuple(epoch) for epoch in epochs}) == 3
    again, other = ShuffledStream(items, seed=3), ShuffledStream(items, seed=4)
    assert [again[i] for i in (20, 3, 11)] == [stream[i] for i in (20, 3, 11)]
    assert [other[i] for i in range(21)] != stream


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_files_read_alike(tmp_path, suffix):
    import pandas

    rows = [{"prompt": "é", "response": "x"}, {"prompt": "b", "response": "y"}]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        pandas.DataFrame(rows).to_parquet(path)
    assert read_rows(str(path)) == rows


def test_parquet_messages_keep_their_turns(tmp_path):
    import pandas

    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    pandas.DataFrame({"messages": [turns]}).to_parquet(tmp_path / "m.parquet")
    prompt, answer = conversation(read_rows(str(tmp_path / "m.parquet"))[0])
    assert prompt == turns[:1] and answer == "b"


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("rows.jsonl", '{"question": "a"}\n', "row 0 has columns question; needed are messages, or prompt and response"),
        ("rows.jsonl", '{"prompt": "a", "response": "b"}\n{"prompt"\n', "line 2 is not JSON"),
        ("rows.txt", "a", "come as .jsonl or .parquet"),
        ("missing.jsonl", None, "is no file here, and no hub id"),
    ],
)
def test_mistakes_are_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit, match=message):
        read_rows(str(tmp_path / name))


def test_a_dialogue_that_ends_with_the_user_is_refused():
    with pytest.raises(SystemExit, match="must end with an assistant turn"):
        conversation({"messages": [{"role": "user", "content": "a"}]})


@pytest.mark.skipif("CLEANDLLM_HF" not in os.environ, reason="CLEANDLLM_HF is not set")
def test_sdar_template_puts_no_think_block_before_the_answer():
    """Rendering the finished dialogue would: that is why prompt and answer are built apart."""
    tokenizer = load_tokenizer(Path(os.environ["CLEANDLLM_HF"]) / "SDAR-8B-Chat")
    ((prompt, answer),), _ = encode([{"prompt": "Hi ", "response": "Hello"}], tokenizer, 151645, 100)
    assert tokenizer.decode(prompt) == "<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(answer) == "Hello<|im_end|>"
    turns = [{"role": "user", "content": "Hi "}, {"role": "assistant", "content": "Hello"}]
    assert "<think>" in tokenizer.apply_chat_template(turns, tokenize=False)
