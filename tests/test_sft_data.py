"""Supervised rows: prompt and answer ids built separately, files read as they come, mistakes named."""

import json
import os
from pathlib import Path

import pytest

from data.rows import read_rows
from data.sft import conversation, encode, training_rows
from data.stream import ShuffledStream
from evals import load_task
from models import load_tokenizer
from models.random_init import byte_tokenizer

EOS, COUNTDOWN = 256, load_task("countdown")


def row(prompt, response):
    return conversation({"prompt": prompt, "response": response}, "row")


def test_prompt_and_answer_are_tokenised_apart_and_closed_once():
    turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    rows = [row("1+1", "2"), row(turns[:1], "2"), conversation({"messages": turns}, "row")]
    encoded, dropped = encode(rows, byte_tokenizer(), EOS, 100)
    assert dropped == 0 and encoded == [([258, *b"1+1", 259], [*b"2", EOS])] * 3


def test_history_stays_in_the_prompt():
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    dialogue = {"messages": [{"role": role, "content": text} for role, text in turns]}
    ((prompt, answer),), _ = encode([conversation(dialogue, "row")], byte_tokenizer(), EOS, 100)
    assert prompt == [258, *b"a", 259, *b"b", 256, 258, *b"c", 259] and answer == [*b"d", EOS]


def test_text_that_looks_like_a_special_token_stays_text():
    """A mask token in an answer would have probability 0, an end token in its middle would end it."""
    ((_, answer),), _ = encode([row("x", "a<|MASK|>b<|endoftext|>")], byte_tokenizer(), EOS, 100)
    assert answer == [*b"a<|MASK|>b<|endoftext|>", EOS]


def test_long_rows_are_dropped_and_counted_and_all_long_is_refused():
    rows = [row("p" * n, "r") for n in (1, 5, 50)]
    encoded, dropped = encode(rows, byte_tokenizer(), EOS, 9)
    assert len(encoded) == 2 and dropped == 1
    with pytest.raises(SystemExit, match="all 3 rows exceed --max-length 3: the shortest has 5 tokens"):
        encode(rows, byte_tokenizer(), EOS, 3)
    with pytest.raises(SystemExit, match="no rows"):
        encode([], byte_tokenizer(), EOS, 3)


def test_a_hub_id_is_loaded_by_datasets(monkeypatch):
    import datasets

    asked = []
    rows = datasets.Dataset.from_list([{"prompt": "a", "response": "b"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: asked.append((name, split)) or rows)
    assert training_rows(COUNTDOWN, "owner/name") == [row("a", "b")] and asked == [("owner/name", "train")]


@pytest.mark.parametrize("data", ["", "small"])
def test_a_task_gives_its_prompts_with_gold_answers(data):
    rows = training_rows(COUNTDOWN, data)
    assert len(rows) > 5052 and all(isinstance(r["response"], str) for r in rows)  # several answers are several rows
    first = COUNTDOWN.load("train")[0]
    assert {COUNTDOWN.score(r["response"], first) for r in rows if r["prompt"] == COUNTDOWN.prompt(first)} == {1.0}


def test_a_file_of_problems_gives_the_gold_answers_of_the_task(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"numbers": [1, 2, 3], "target": 6}\n')
    rows = training_rows(COUNTDOWN, str(tmp_path / "p.jsonl"))
    assert rows and all("<answer>" in r["response"] for r in rows)


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
    assert list(read_rows(str(path), "train", ())) == rows
    assert training_rows(COUNTDOWN, str(path)) == [row("é", "x"), row("b", "y")]


def test_parquet_messages_keep_their_turns(tmp_path):
    import pandas

    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    pandas.DataFrame({"messages": [turns]}).to_parquet(tmp_path / "m.parquet")
    assert training_rows(COUNTDOWN, str(tmp_path / "m.parquet")) == [{"prompt": turns[:1], "response": "b"}]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("rows.jsonl", '{"question": "a"}\n', "row 1: cannot read a problem from question"),
        ("rows.jsonl", '{"prompt": "a", "response": "b"}\n{"prompt"\n', "line 2: not JSON"),
        ("rows.jsonl", '{"prompt": "a", "response": "b"}\n{"prompt": "a"}\n', "row 2 cannot be read .prompt.: needed are"),
        ("rows.jsonl", '{"prompt": 3, "response": null}\n', "row 1 cannot be read"),
        ("rows.jsonl", '{"messages": []}\n', "row 1 cannot be read"),
        ("rows.jsonl", '{"messages": "hi"}\n', "row 1 cannot be read"),
        ("rows.jsonl", '{"messages": [{"role": "user", "content": "a"}]}\n', "row 1 cannot be read"),
        ("rows.jsonl", "[1, 2]\n", "line 1: a JSON object is needed"),
        ("rows.parquet", "", "is no parquet file"),
        ("rows.txt", "a", "must end in"),
        ("missing.jsonl", None, "no such preset or file"),
    ],
)
def test_mistakes_are_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit, match=message):
        training_rows(COUNTDOWN, str(tmp_path / name))


@pytest.mark.skipif("CLEANDLLM_HF" not in os.environ, reason="CLEANDLLM_HF is not set")
def test_sdar_template_puts_no_think_block_before_the_answer():
    """Rendering the finished dialogue would: that is why prompt and answer are built apart."""
    tokenizer = load_tokenizer(Path(os.environ["CLEANDLLM_HF"]) / "SDAR-8B-Chat")
    ((prompt, answer),), _ = encode([row("Hi ", "Hello <|MASK|>")], tokenizer, 151645, 100)
    assert tokenizer.decode(prompt) == "<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(answer) == "Hello <|MASK|><|im_end|>" and 151669 not in answer
    turns = [{"role": "user", "content": "Hi "}, {"role": "assistant", "content": "Hello"}]
    assert "<think>" in tokenizer.apply_chat_template(turns, tokenize=False)
