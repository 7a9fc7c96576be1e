"""Supervised rows: ids of prompts and answers, what is left out and why, streams, ranks."""

import json
import os
import re
from array import array
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
from oracles import changed
from test_evals import write
from tokenizers import AddedToken

from data.sft import training_rows, turns_of
from data.stream import ShuffledStream, check_items
from data.tokens import TokenRows, encode
from evals import load_task
from models import load_tokenizer, prompt_ids
from models.tiny import byte_tokenizer

EOS, MASK, COUNTDOWN = 256, 257, load_task("countdown")
TINY = SimpleNamespace(eos_token_ids=[EOS, 0], mask_token_id=MASK)  # the first closes an answer
HF = os.environ.get("CLEANDLLM_HF")


def row(prompt, response):
    return {"prompt": turns(prompt), "response": response}


def ids(rows, max_length=100, tokenizer=None, model=TINY, asked=(), joins=False):
    return encode(rows, tokenizer or byte_tokenizer(), model, max_length, asked, joins)


def turns(*texts):
    roles = ("user", "assistant") * 2
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


# layouts of rows and pairs; [row, why it is left out]
GOLDEN = json.loads((Path(__file__).parent / "golden/rows.json").read_text())


@pytest.mark.parametrize("columns", GOLDEN["rows"])
def test_every_layout_gives_prompt_and_answer_closed_once(tmp_path, columns):
    """A mask token in an answer would have probability 0: what looks like one stays text."""
    path = tmp_path / "rows.parquet"
    pandas.DataFrame([columns]).to_parquet(path)
    rows = ids(training_rows(COUNTDOWN, str(path), "all"))
    assert list(rows) == [([258, *b"1+1", 259], [*b"2<|MASK|>", EOS])]


@pytest.mark.parametrize("bad, reason", GOLDEN["left out"])
def test_rows_are_left_out_and_counted(tmp_path, bad, reason):
    """Two bad rows among good ones: the good ones stay, in order; too few end the run."""
    tokenizer = byte_tokenizer()
    refuse = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    tokenizer.chat_template = refuse + tokenizer.chat_template
    good = [{"prompt": "1+1", "response": "2"}, {"prompt": "a" * 16, "response": "b"}]  # 20 tokens
    path = write(tmp_path / "rows.jsonl", [good[0], bad, good[1], bad])
    rows = ids(training_rows(COUNTDOWN, path), 20, tokenizer, asked=[turns("a question")])
    assert list(rows) == list(ids([row(**each) for each in good], 20)) and len(rows) == 2
    assert [*rows.dropped] == rows.report("rows").split("\n  dropped: ")[1:]
    assert re.fullmatch(f"2 {reason}.*; the first: row 2, .*", *rows.dropped)
    with pytest.raises(SystemExit, match=f"2 rows .* --batch-size 3; dropped: 2 {reason}"):
        rows.at_least(3)


def test_a_task_gives_its_prompts_with_gold_answers(tmp_path):
    """Its own, and those of a file of problems."""
    problems, rows = COUNTDOWN.load("train"), list(training_rows(COUNTDOWN, "small"))
    assert len(rows) > len(problems) == 5052
    asked = map(COUNTDOWN.prompt, COUNTDOWN.load("validation") + COUNTDOWN.load("test"))
    assert ids(rows, asked=asked).dropped == []  # its splits share no problem
    answers = [r["response"] for r in rows if r["prompt"] == COUNTDOWN.prompt(problems[0])]
    assert {COUNTDOWN.score(text, problems[0]) for text in answers} == {1.0}
    path = write(tmp_path / "p.jsonl", [{"numbers": [1, 2], "target": n} for n in (9, 3)])
    rows = ids(training_rows(COUNTDOWN, path), 1000)
    assert len(rows) == 2 and rows.dropped[0].startswith("1 have no answer; the first: row 1, ")
    path = write(tmp_path / "r.jsonl", [{"question": "a"}])
    with pytest.raises(SystemExit, match="row 1: cannot read a problem from question; .*or, "):
        list(training_rows(COUNTDOWN, path))


# directory -> text of the turn end; how a rendered dialogue differs from prompt + answer
FAMILIES = {
    "SDAR-8B-Chat": ("<|im_end|>", r"<think>\n\n</think>\n\n|\n$"),
    "Dream-v0-Instruct-7B": ("<|im_end|>", r"\n$"),
    "LLaDA-8B-Instruct": ("<|eot_id|>", r"<.start_header_id.>assistant<.*>\s+$"),
    "LLaDA2.0-mini": ("<|role_end|>", "$"),
}


@pytest.mark.skipif(not HF, reason="CLEANDLLM_HF is not set")
@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_and_answer_are_the_rendering_of_the_dialogue_in_every_family(name):
    """But for SDAR's empty think block, the newline after a turn, LLaDA's header of a next turn. A
    dialogue's turns can share a row. A family whose vocabulary is not at hand: one token per byte
    with its template."""
    (turn_end, surplus), tokenizer = FAMILIES[name], byte_tokenizer()
    config = json.loads((Path(HF) / name / "tokenizer_config.json").read_text())
    if (Path(HF) / name / "vocab.json").exists():
        tokenizer = load_tokenizer(Path(HF) / name)
    else:
        tokenizer.add_tokens([AddedToken(turn_end, special=True, normalized=False)])
        tokenizer.bos_token, tokenizer.chat_template = config["bos_token"], config["chat_template"]
    mask = tokenizer.convert_tokens_to_ids("<|MASK|>")  # Dream: <|mask|>, then none
    end = tokenizer.convert_tokens_to_ids(turn_end)
    model = SimpleNamespace(eos_token_ids=[end], mask_token_id=mask, block_length=4)
    dialogues = [turns("1 + 1?\n", "<b>2</b> so\n\nit is 2."), turns("Hi", "é", "So?", "No: 3 < 4")]
    rows = [each for one in dialogues for each in turns_of({"messages": one}, "all")]
    assert len(ids(rows, 5000, tokenizer, model, joins=True)) == 2
    dialogues.insert(1, dialogues[1][:2])
    rows = ids(rows, 5000, tokenizer, model)
    for dialogue, (prompt, answer) in zip(dialogues, rows, strict=True):
        whole = re.sub(surplus, "", tokenizer.apply_chat_template(dialogue, tokenize=False))
        assert prompt + answer == tokenizer(whole, add_special_tokens=False)["input_ids"]
        assert prompt == prompt_ids(tokenizer, dialogue[:-1])
        assert answer.index(end) == len(answer) - 1
    ((_, answer),) = ids([row("Hi", "a <|MASK|>")], 5000, tokenizer, model)
    assert mask is None or mask not in answer


@pytest.mark.parametrize("block, rows", GOLDEN["turns"])
def test_turns_of_a_dialogue(block, rows):
    """Not a first message, an empty answer, what nobody answers. One row in blocks (~id is not
    scored), unless answers meet in a block.
    """
    got = turns_of(GOLDEN["dialogue"], "all")
    got = ids(got, model=changed(TINY, block_length=block), joins=block)
    assert [*map(list, got)] == rows


# --- streams, ranks ------------------------------------------------------------------------------


def test_the_stream_gives_every_item_once_per_epoch_in_a_keyed_order():
    """Any position at any time."""
    streams = [ShuffledStream(list(range(7)), seed) for seed in (3, 3, 4)]
    orders = range(21), range(20, -1, -1), range(21)
    first, again, other = ([s[i] for i in at] for s, at in zip(streams, orders, strict=True))
    epochs = [tuple(first[i : i + 7]) for i in (0, 7, 14)]
    assert all(sorted(epoch) == [*range(7)] for epoch in epochs) and len(set(epochs)) == 3
    assert again[::-1] == first != other


def token_rows(rows):
    return TokenRows([[array("i", row)] for row in rows], [])


HASHES = {list: "8c3a016bb7edb6fb", token_rows: "107373ad87760ac7"}  # old runs can be resumed


@pytest.mark.parametrize("make", HASHES)
def test_a_resumed_run_finds_the_rows_that_it_began_with(tmp_path, make):
    """Another row, another order, a row cut elsewhere, one row more: each is another stream."""
    rows, config = [[1, 2, 3], [4], [5, 6]], tmp_path / "config.json"
    check_items(make(rows), config)  # no run that could be resumed: nothing to note
    config.write_text('{"args": 1}')
    for _ in range(2):
        check_items(make(rows), config)
        kept = {"args": 1, "rows": {"count": 3, "hash": HASHES[make]}}
        assert json.loads(config.read_text()) == kept
    cut, order = [[1, 2], [3, 4], [5, 6]], [rows[1], rows[0], rows[2]]
    for other in (cut, order, [*rows[:2], [5, 7]], [*rows, [7]]):
        with pytest.raises(SystemExit, match="^--resume: the rows to train on are others"):
            check_items(make(other), config)


def rank_reads(rank, world_size):
    def make(last):
        assert rank == 0, "rank 1 reads nothing"
        # three calls of the tokenizer
        yield from (row(str(i % 10), "x" * (i % 25)) for i in range(3000))
        if last:
            raise SystemExit("rows.jsonl line 3001: not JSON")

    rows = ids(make(False), 20)
    answers = [i % 25 for i in range(3000) if 0 < i % 25 < 17]
    assert [len(answer) - 1 for _, answer in rows] == answers
    assert rows.dropped[0].startswith("120 have an empty answer; the first: row 1, ")
    with pytest.raises(SystemExit, match="line 3001: not JSON"):
        ids(make(True), 20)


def test_one_rank_tokenises_for_all_and_its_errors_end_all(run_ranks):
    run_ranks(2, rank_reads)
