"""Supervised rows: prompt and answer ids built separately, files read as they come, what is left out named and counted."""

import json
import math
import os
import re
import shutil
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import AddedToken

from algos import sft
from data.rows import read_rows
from data.sft import conversation, encode, gold_answers, training_rows
from data.stream import ShuffledStream
from data.tokens import TokenRows
from evals import load_task
from models import load_tokenizer, prompt_ids
from models.checkpoint import build_model, set_special_tokens
from models.tiny import byte_tokenizer

EOS, MASK, COUNTDOWN, GSM8K = 256, 257, load_task("countdown"), load_task("gsm8k")
TINY = SimpleNamespace(eos_token_ids=[EOS, 0], mask_token_id=MASK)  # the first one closes an answer
HF, FILES = (
    Path(os.environ[name]) if os.environ.get(name) else None
    for name in ("CLEANDLLM_HF", "CLEANDLLM_DATA")
)
needs_hf = pytest.mark.skipif(not HF, reason="CLEANDLLM_HF is not set")
needs_files = pytest.mark.skipif(not FILES, reason="CLEANDLLM_DATA is not set")
needs_both = pytest.mark.skipif(
    not (HF and FILES), reason="CLEANDLLM_HF or CLEANDLLM_DATA is not set"
)


def row(prompt, response):
    return conversation({"prompt": prompt, "response": response})


def ids(rows, max_length=100, tokenizer=None, model=TINY, batch_size=1):
    return list(
        encode(rows, tokenizer or byte_tokenizer(), model, max_length, batch_size, use_cache=False)
    )


def test_prompt_and_answer_are_tokenised_apart_and_closed_once():
    turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    rows = [row("1+1", "2"), row(turns[:1], "2"), conversation({"messages": turns})]
    assert ids(rows) == [([258, *b"1+1", 259], [*b"2", EOS])] * 3


def test_history_stays_in_the_prompt():
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    dialogue = {"messages": [{"role": role, "content": text} for role, text in turns]}
    ((prompt, answer),) = ids([conversation(dialogue)])
    assert prompt == [258, *b"a", 259, *b"b", 256, 258, *b"c", 259] and answer == [*b"d", EOS]


def test_text_that_looks_like_a_special_token_stays_text_in_an_answer():
    """A mask token in an answer would have probability 0, an end token in its middle would end it."""
    ((_, answer),) = ids([row("x", "a<|MASK|>b<|endoftext|>")])
    assert answer == [*b"a<|MASK|>b<|endoftext|>", EOS]
    rows = [
        row("x", "y"),
        row("x", "yz"),
    ]  # a tokenizer with the mask token among its plain ones: then it must not get in
    rows = encode(
        rows,
        byte_tokenizer(),
        SimpleNamespace(eos_token_ids=[EOS], mask_token_id=ord("z")),
        20,
        use_cache=False,
    )
    assert [answer for _, answer in rows] == [[*b"y", EOS]] and rows.dropped["hold a mask token"][
        "rows"
    ] == 1


LEFT_OUT = {  # row, why, what is shown of the first
    "columns": (
        {"prompt": "a"},
        "cannot be read, needed are messages that end",
        "with prompt: {'prompt': 'a'}",
    ),
    "numbers": ({"prompt": 3, "response": None}, "cannot be read", "with prompt, response"),
    "no turns": ({"messages": []}, "cannot be read", "with messages"),
    "text as messages": ({"messages": "hi"}, "cannot be read", "with messages"),
    "user at the end": (
        {"messages": [{"role": "user", "content": "a"}] * 2},
        "cannot be read",
        "with messages",
    ),
    "nothing asked": (
        {"messages": [{"role": "assistant", "content": "a"}]},
        "cannot be read",
        "with messages",
    ),
    "turn without text": (
        {"prompt": [{"role": "user", "content": None}], "response": "a"},
        "cannot be read",
        "with prompt",
    ),
    "turn of parts": (
        {"prompt": [{"role": "user", "content": [{"text": "a"}]}], "response": "a"},
        "cannot be read",
        "with",
    ),
    "empty": ({"prompt": "a", "response": ""}, "have an empty answer", "'a' -> ''"),
    "white space": ({"prompt": "a", "response": " \n\t\u3000"}, "have an empty answer", "'a' -> "),
    "mask": (
        {"prompt": "a <|MASK|> b", "response": "c"},
        "hold a mask token",
        "'a <|MASK|> b' -> 'c'",
    ),
    "long answer": (
        {"prompt": "a", "response": "b" * 30},
        "exceed --max-length 20",
        "34 tokens: 'a' -> 'bbb",
    ),
    "long prompt": (
        {"prompt": "a" * 30, "response": "b"},
        "exceed --max-length 20",
        "34 tokens: 'aaa",
    ),
    "surrogate": (
        {"prompt": "a", "response": "b\ud800"},
        "hold half of a character",
        "surrogates not allowed",
    ),
    "asked in tests": (
        {"prompt": " 5  7  1 =  11 ", "response": "c"},
        "ask what the run is scored on",
        "' 5  7  1 =  11 ' -> 'c'",
    ),
    "asked in tests, after other turns": (
        {
            "prompt": [
                {"role": role, "content": text}
                for role, text in [("user", "a"), ("assistant", "b"), ("user", "5 7 1 = 11")]
            ],
            "response": "c",
        },
        "ask what the run is scored on",
        "'5 7 1 = 11' -> 'c'",
    ),
}


@pytest.mark.parametrize("bad, reason, shown", LEFT_OUT.values(), ids=list(LEFT_OUT))
def test_rows_are_left_out_counted_and_the_first_is_shown(tmp_path, bad, reason, shown):
    """Two bad rows among good ones: the good ones stay, in order; alone they end the run in one line."""
    good = [
        {"prompt": "1+1", "response": "2"},
        {"prompt": "a" * 16, "response": "b"},
    ]  # the second has 20 tokens
    path, held_out = (
        tmp_path / "rows.jsonl",
        [{"numbers": [5, 7, 1], "target": 11, "style": "compact"}],
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in (good[0], bad, good[1], bad)))
    rows = encode(
        training_rows(COUNTDOWN, str(path), held_out), byte_tokenizer(), TINY, 20, use_cache=False
    )
    assert list(rows) == ids([row(**each) for each in good], 20) and len(rows) == 2
    ((why, counted),) = rows.dropped.items()
    assert (
        why.startswith(reason)
        and counted["rows"] == 2
        and counted["first"].startswith("row 2, ")
        and shown in counted["first"]
    )
    head, line = rows.report("training rows").splitlines()
    assert (
        head == "2 training rows, 27 tokens, the longest has 20; 2 of 4 dropped:"
        and line.startswith(f"  2 {reason}")
    )
    assert line.endswith(f"; the first: {counted['first']}")
    bad_rows = list(training_rows(COUNTDOWN, str(path), held_out))[1::2]
    with pytest.raises(SystemExit) as error:
        encode(bad_rows, byte_tokenizer(), TINY, 20, use_cache=False)
    message = str(error.value)
    assert (
        message.startswith(f"--data holds no rows to train on; 2 were dropped: 2 {reason}")
        and shown in message
    )
    assert "\n" not in message


def test_several_reasons_are_counted_apart():
    rows = [row("a", text) for text in ("x", "", "y" * 50, " ", "z", "w" * 60, "")]
    rows = encode(rows, byte_tokenizer(), TINY, 20, use_cache=False)
    assert {why: counted["rows"] for why, counted in rows.dropped.items()} == {
        "have an empty answer": 3,
        "exceed --max-length 20": 2,
    }
    assert rows.num_dropped == 5 and [
        row[:6] for row in (c["first"] for c in rows.dropped.values())
    ] == ["row 2,", "row 3,"]
    assert "5 of 7 dropped" in rows.report("training rows")


def test_a_template_that_refuses_a_row_leaves_it_out():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
        + tokenizer.chat_template
    )
    system = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = encode([row(system, "x"), row("u", "y")], tokenizer, TINY, 20, use_cache=False)
    assert (
        len(rows) == 1 and "user first" in rows.dropped["are refused by the chat template"]["first"]
    )


def test_a_run_never_starts_on_no_rows_nor_on_fewer_than_a_batch(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(SystemExit, match="--data holds no rows to train on; 0 were dropped$"):
        ids(training_rows(COUNTDOWN, str(tmp_path / "empty.jsonl")))
    rows = [row("a", "b"), row("a", "c"), row("a", "")]
    assert len(ids(rows, batch_size=2)) == 2
    with pytest.raises(
        SystemExit,
        match="2 rows to train on, fewer than --batch-size 3; 1 were dropped: 1 have an empty",
    ):
        ids(rows, batch_size=3)


def test_the_script_says_what_it_dropped(tmp_path, capsys):
    rows = [{"prompt": f"{i}+1", "response": str(i + 1)} for i in range(6)] + [
        {"prompt": "x", "response": " "}
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = dict(
        data=str(tmp_path / "rows.jsonl"),
        max_steps=1,
        eval_limit=0,
        batch_size=6,
        out=str(tmp_path / "runs"),
    )
    sft.main(sft.Args(**flags))
    said = capsys.readouterr()
    assert "6 training rows, 42 tokens, the longest has 7; 1 of 7 dropped:\n" in said.out
    assert "\n  1 have an empty answer; the first: row 7, 'x' -> ' '\n" in said.out
    assert "tokenising" not in said.err  # a bar is for terminals


def test_the_script_does_not_train_on_what_it_is_scored_on(tmp_path, capsys):
    """One row asks a problem of the validation split, one of the test split; the others are new."""
    asked = [
        COUNTDOWN.prompt(COUNTDOWN.load(split)[1])[-1]["content"]
        for split in ("validation", "test")
    ]
    rows = [{"prompt": text, "response": "1"} for text in (*asked, "0+1", "1+0")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = dict(
        data=str(tmp_path / "rows.jsonl"),
        max_steps=1,
        eval_limit=2,
        batch_size=2,
        out=str(tmp_path / "runs"),
    )
    sft.main(sft.Args(**flags))
    said = capsys.readouterr().out
    assert (
        "2 training rows, " in said
        and "2 of 4 dropped:\n  2 ask what the run is scored on; the first: row 1, " in said
    )


def test_a_hub_id_is_loaded_by_datasets(monkeypatch):
    import datasets

    asked = []
    rows = datasets.Dataset.from_list([{"prompt": "a", "response": "b"}])
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, split: asked.append((name, split)) or rows
    )
    for names, split in ((["train", "test"], "train"), (["train_gen", "train_sft"], "train_sft")):
        monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, names=names: names)
        assert list(training_rows(COUNTDOWN, "owner/name")) == [row("a", "b")] and asked.pop() == (
            "owner/name",
            split,
        )


@pytest.mark.parametrize("data", ["", "small"])
def test_a_task_gives_its_prompts_with_gold_answers(data):
    held_out = [
        problem for split in ("validation", "test") for problem in COUNTDOWN.load(split, data)
    ]
    rows = list(
        training_rows(COUNTDOWN, data, held_out)
    )  # a preset's splits share no problem: none is left out
    assert len(rows) > 5052 and all(
        isinstance(r["response"], str) for r in rows
    )  # several answers are several rows
    first = COUNTDOWN.load("train")[0]
    assert {
        COUNTDOWN.score(r["response"], first)
        for r in rows
        if r["prompt"] == COUNTDOWN.prompt(first)
    } == {1.0}


def test_the_hub_id_of_a_task_is_its_own_problems(monkeypatch):
    task, asked = load_task("gsm8k"), []
    monkeypatch.setattr(
        task,
        "_hub_rows",
        lambda split: asked.append(split) or [{"question": "1 + 1?", "answer": "Two.\n#### 2"}],
    )
    rows = list(training_rows(task, "openai/gsm8k"))
    assert (
        rows == list(training_rows(task, ""))
        and rows[0]["response"].startswith("Two.")
        and asked == ["train", "train"]
    )


def test_a_file_of_problems_gives_the_gold_answers_of_the_task(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"numbers": [1, 2, 3], "target": 6}\n')
    rows = list(training_rows(COUNTDOWN, str(tmp_path / "p.jsonl")))
    assert rows and all("<answer>" in r["response"] for r in rows)


def test_the_stream_gives_every_item_once_per_epoch_in_a_keyed_order():
    items = list(range(7))
    stream = [
        ShuffledStream(items, seed=3)[i] for i in range(21)
    ]  # a fresh object each time: position is the only state
    epochs = [stream[i : i + 7] for i in (0, 7, 14)]
    assert (
        all(sorted(epoch) == items for epoch in epochs)
        and len({tuple(epoch) for epoch in epochs}) == 3
    )
    again, other = ShuffledStream(items, seed=3), ShuffledStream(items, seed=4)
    assert [again[i] for i in (20, 3, 11)] == [stream[i] for i in (20, 3, 11)]
    assert [other[i] for i in range(21)] != stream


def test_a_large_file_is_read_row_by_row_as_often_as_one_likes(tmp_path):
    """What is wrong in its last line says so when that line is read."""
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"prompt": "a", "response": "x"}\n{"prompt": "b", "response": "y"}\n{"prompt"\n'
    )
    rows = training_rows(COUNTDOWN, str(path))
    for _ in range(2):
        assert list(islice(rows, 2)) == [row("a", "x"), row("b", "y")]
    with pytest.raises(SystemExit, match="line 3: not JSON"):
        list(rows)


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
    assert list(training_rows(COUNTDOWN, str(path))) == [row("é", "x"), row("b", "y")]


def test_parquet_messages_keep_their_turns(tmp_path):
    import pandas

    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    pandas.DataFrame({"messages": [turns]}).to_parquet(tmp_path / "m.parquet")
    assert list(training_rows(COUNTDOWN, str(tmp_path / "m.parquet"))) == [
        {"prompt": turns[:1], "response": "b"}
    ]


def test_a_problem_without_an_answer_is_left_out(tmp_path):
    (tmp_path / "p.jsonl").write_text(
        '{"numbers": [1, 2], "target": 9}\n{"numbers": [1, 2], "target": 3}\n'
    )
    rows = encode(
        training_rows(COUNTDOWN, str(tmp_path / "p.jsonl")),
        byte_tokenizer(),
        TINY,
        1000,
        use_cache=False,
    )
    assert len(rows) == 2 and rows.dropped == {
        "have no answer": {"rows": 1, "first": "row 1, no expression over [1, 2] equals 9"}
    }


@pytest.mark.parametrize(
    "task, name, content, message",
    [
        (
            "countdown",
            "r.jsonl",
            '{"question": "a"}\n',
            "row 1: cannot read a problem from question; .*or, .* messages",
        ),
        (
            "countdown",
            "r.jsonl",
            '{"prompt": "a", "response": "b"}\n{"prompt"\n',
            "line 2: not JSON",
        ),
        ("countdown", "r.jsonl", "[1, 2]\n", "line 1: a JSON object is needed"),
        ("countdown", "r.parquet", "", "is no parquet file"),
        ("countdown", "r.txt", "a", "must end in"),
        ("countdown", "missing.jsonl", None, "no such preset or file"),
        (
            "aime24",
            "r.jsonl",
            '{"problem": "a", "answer": "1"}\n',
            "^aime24 has no answers to train on: --data must",
        ),
    ],
)
def test_mistakes_are_named(tmp_path, task, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit, match=message):
        list(training_rows(load_task(task), str(tmp_path / name)))


@needs_hf
def test_sdar_template_puts_no_think_block_before_the_answer():
    """Rendering the finished dialogue would: that is why prompt and answer are built apart."""
    tokenizer, model = (
        load_tokenizer(HF / "SDAR-8B-Chat"),
        SimpleNamespace(eos_token_ids=[151645], mask_token_id=151669),
    )
    ((prompt, answer),) = ids([row("Hi ", "Hello <|MASK|>")], tokenizer=tokenizer, model=model)
    assert tokenizer.decode(prompt) == "<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(answer) == "Hello <|MASK|><|im_end|>" and 151669 not in answer
    turns = [{"role": "user", "content": "Hi "}, {"role": "assistant", "content": "Hello"}]
    assert "<think>" in tokenizer.apply_chat_template(turns, tokenize=False)


SDAR = ("SDAR-8B-Chat", "SDAR-30B-A3B-Chat", "SDAR-4B-Chat", "SDAR-1dot7B-Chat")
# directory -> id and text of the turn end; how the rendering of a finished dialogue differs from prompt and answer
FAMILIES = {
    **dict.fromkeys(
        SDAR,
        (
            151645,
            "<|im_end|>",
            lambda text: text.replace("<think>\n\n</think>\n\n", "").removesuffix("\n"),
        ),
    ),
    "Dream-v0-Instruct-7B": (151645, "<|im_end|>", lambda text: text.removesuffix("\n")),
    "LLaDA-8B-Instruct": (
        126348,
        "<|eot_id|>",
        lambda text: text.removesuffix("<|start_header_id|>assistant<|end_header_id|>\n\n"),
    ),
    "LLaDA2.0-mini": (156894, "<|role_end|>", lambda text: text),
    "LLaDA2.1-mini": (156894, "<|role_end|>", lambda text: text),
}


def official_tokenizer(name, directory):
    """A checkpoint's own tokenizer; where its vocabulary is not at hand that of its kin, or one token a byte under its own
    added tokens and template: ids of text mean nothing there, but borders and templates do.

    directory: gets a copy of the files, with the added tokens that LLaDA2 states nowhere else.
    """
    vocabulary = (
        [HF / "SDAR-8B-Chat" / file for file in ("vocab.json", "merges.txt")]
        if name in SDAR
        else []
    )  # they share it
    directory.mkdir()
    for file in [*(HF / name).iterdir(), *vocabulary]:
        shutil.copyfile(file, directory / file.name)
    if (directory / "vocab.json").exists():
        return load_tokenizer(directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    named = {
        token["content"]: int(i) for i, token in config.get("added_tokens_decoder", {}).items()
    }
    named = named or {
        "<|startoftext|>": 156891,
        "<|endoftext|>": 156892,
        "<|role_end|>": 156894,
        "<|mask|>": 156895,
    }
    added = [{"content": token, "id": i} for token, i in named.items()]
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in named])
    tokenizer.bos_token, tokenizer.chat_template = config["bos_token"], config["chat_template"]
    return tokenizer


@needs_both
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] if name in (*SDAR[2:], "LLaDA2.1-mini") else [])
        for name in FAMILIES
    ],
)
def test_prompt_and_answer_are_the_rendering_of_the_dialogue_in_every_family(name, tmp_path):
    """On real rows, and with history: ids of prompt + answer = ids of the template's rendering of the finished dialogue, but
    for what FAMILIES takes away: SDAR's empty think block, the newline behind a turn, LLaDA's header of a next turn."""
    turn_end, text, strip = FAMILIES[name]
    tokenizer = official_tokenizer(name, tmp_path / name)
    model = set_special_tokens(
        build_model(json.loads((HF / name / "config.json").read_text())), tmp_path / name
    )
    assert model.eos_token_ids[0] == turn_end
    own_id = tokenizer.convert_tokens_to_ids(text)
    if tokenizer.vocab_size > 1000:
        assert own_id == turn_end and tokenizer.convert_ids_to_tokens(model.mask_token_id) in (
            "<|MASK|>",
            "<|mask|>",
        )
    model = SimpleNamespace(eos_token_ids=[own_id], mask_token_id=model.mask_token_id)
    rows = list(training_rows(GSM8K, str(FILES / "gsm8k/train.jsonl")))[::200]
    turns = [
        *rows[0]["prompt"],
        {"role": "assistant", "content": rows[0]["response"]},
        *rows[1]["prompt"],
    ]
    rows += [{"prompt": turns, "response": rows[1]["response"]}]
    for given, (prompt, answer) in zip(rows, ids(rows, 5000, tokenizer, model), strict=True):
        dialogue = [*given["prompt"], {"role": "assistant", "content": given["response"]}]
        whole = strip(tokenizer.apply_chat_template(dialogue, tokenize=False))
        assert prompt + answer == tokenizer(whole, add_special_tokens=False)["input_ids"]
        assert (
            prompt == prompt_ids(tokenizer, given["prompt"])
            and answer[-1] == own_id
            and own_id not in answer[:-1]
        )


@needs_files
@pytest.mark.parametrize(
    "task, file, rows, refused",
    [
        ("gsm8k", "gsm8k/train.jsonl", 7473, ""),
        ("gsm8k", "dare/train_gsm8k_1.parquet", 0, "gsm8k: these rows have no worked solutions"),
        ("math500", "dare/train_math_1.parquet", 0, "math500: these rows have no worked solutions"),
        ("sudoku", "dare/train_sudoku-n20000_1.parquet", 20000, ""),
    ],
)
def test_real_files_of_problems(task, file, rows, refused, capsys):
    """DARE's rows have a result, not an answer to imitate: the task makes one where it can, and refuses where it cannot."""
    task, path = load_task(task), str(FILES / file)
    if refused:
        with pytest.raises(SystemExit, match=refused):
            training_rows(task, path)
    elif rows > 10_000:
        some = [problem for problem in task.load("train", path, 50)]
        assert all(task.score(task.answer(problem), problem) == 1 for problem in some)
    else:
        found = gold_answers(task, path)
        assert len(found) == rows
        solved = zip(found, task.load("train", path), strict=True)
        assert all(
            task.score(row["response"], problem) == 1 and "<<" not in row["response"]
            for row, problem in solved
        )


@needs_files
def test_gsm8k_is_trained_without_the_problems_it_is_scored_on():
    """Train and test share none; of train's own 512 validation rows every one is left out where they are the score."""
    path, test = (
        str(FILES / "gsm8k/train.jsonl"),
        GSM8K.load("test", str(FILES / "gsm8k/test.jsonl")),
    )
    assert not any("dropped" in row for row in training_rows(GSM8K, path, test))
    problems = GSM8K.load("train", path)
    shouted = [
        problem | {"question": problem["question"].upper() + " \n"} for problem in problems[100:612]
    ]
    rows = training_rows(GSM8K, path, shouted)
    assert [i for i, row in enumerate(rows) if "dropped" in row] == list(range(100, 612))


@needs_files
def test_real_rows_are_trained_as_their_worked_solutions():
    """From the file to the ids: question and instruction in the prompt, the solution without <<48/2=24>>, the right answer."""
    path = str(FILES / "gsm8k/train.jsonl")
    rows = encode(training_rows(GSM8K, path), byte_tokenizer(), TINY, 10_000, use_cache=False)
    assert not rows.dropped
    triples = zip(read_rows(path, "train", ()), GSM8K.load("train", path), rows, strict=True)
    for raw, problem, (prompt, answer) in list(triples)[::4]:
        assert prompt[0] == 258 and prompt[-1] == 259 and answer[-1] == EOS
        asked, text = bytes(prompt[1:-1]).decode(), bytes(answer[:-1]).decode()
        assert asked.startswith(raw["question"].strip()) and asked.endswith(
            "put your final answer within \\boxed{}."
        )
        words = re.sub(r"<<.*?>>", "", raw["answer"]).replace("####", "").split()
        assert text.split()[: len(words) - 1] == words[:-1] and GSM8K.score(text, problem) == 1


@needs_files
def test_a_run_on_real_gsm8k_rows(tmp_path, monkeypatch, capsys):
    """The script's own words against a count of bytes, finite losses, and the rows in the cache."""
    train, test = (str(FILES / f"gsm8k/{name}.jsonl") for name in ("train", "test"))
    monkeypatch.setenv("CLEANDLLM_CACHE", str(tmp_path / "cache"))
    flags = dict(
        task="gsm8k",
        data=train,
        eval_data=test,
        max_length=300,
        max_steps=2,
        batch_size=4,
        learning_rate=1e-3,
    )
    sft.main(sft.Args(**flags, eval_limit=2, gen_length=8, out=str(tmp_path / "runs")))
    lengths = [
        len(GSM8K.prompt(problem)[0]["content"].encode()) + len(GSM8K.answer(problem).encode()) + 3
        for problem in GSM8K.load("train", train)
    ]
    fit = [length for length in lengths if length <= 300]
    head = f"{len(fit):,} training rows, {sum(fit):,} tokens, the longest has {max(fit)}; {7473 - len(fit):,} of 7,473 dropped:"
    assert 100 < len(fit) < 7473 and head in capsys.readouterr().out
    (log,) = tmp_path.glob("runs/*/metrics.jsonl")
    metrics = [json.loads(line) for line in log.read_text().splitlines()]
    assert [math.isfinite(row["loss/total"]) for row in metrics[:2]] == [
        True,
        True,
    ] and 0 <= metrics[-1]["test/gsm8k"] <= 1
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 1


def token_rows(rows):
    ends = torch.tensor([len(row) for row in rows]).cumsum(0)
    return TokenRows(torch.tensor(sum(rows, []), dtype=torch.int32), ends, 1, {})


@pytest.mark.parametrize("make", [list, token_rows])
def test_a_resumed_run_finds_the_rows_that_it_began_with(tmp_path, make):
    """Another row, another order, a row cut elsewhere, one row more: each would be another stream."""
    rows, config = [[1, 2, 3], [4], [5, 6]], tmp_path / "config.json"
    ShuffledStream(make(rows), 1, tmp_path)  # no run that could be resumed: nothing to note
    assert not config.exists()
    config.write_text(json.dumps({"args": {"seed": 1}}))
    for _ in range(2):
        assert ShuffledStream(make(rows), 1, tmp_path)[0] == ShuffledStream(make(rows), 1)[0]
        kept = json.loads(config.read_text())
        assert kept["args"] == {"seed": 1} and kept["rows"]["count"] == 3
    for other in (
        [[1, 2, 3], [4], [5, 7]],
        [[4], [1, 2, 3], [5, 6]],
        [[1, 2], [3, 4], [5, 6]],
        [*rows, [7]],
    ):
        with pytest.raises(
            SystemExit,
            match="^--resume: the run began with 3 rows of hash .* to train on, now there are [34] rows",
        ):
            ShuffledStream(make(other), 1, tmp_path)
        assert json.loads(config.read_text()) == kept
