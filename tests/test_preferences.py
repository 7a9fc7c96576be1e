"""Preference pairs: read in every layout, built as supervised rows are, dropped as a whole and counted."""

import gzip
import json
import random
from types import SimpleNamespace

import pytest

from data import preferences
from data.preferences import (
    COLUMNS,
    encode_pairs,
    gold_pairs,
    held_out_pairs,
    pairs_of_samples,
    preference,
    training_pairs,
)
from data.sft import conversation, encode
from evals import load_task
from models.tiny import byte_tokenizer

EOS, COUNTDOWN = 256, load_task("countdown")
MODEL = SimpleNamespace(eos_token_ids=[EOS, 0], mask_token_id=257)  # the first one closes an answer
USER = {"role": "user", "content": "1+1"}


def turns(*texts):
    return [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant") * 2, texts, strict=False)
    ]


def pair(chosen="2", rejected="3", prompt="1+1"):
    return preference({"prompt": prompt, "chosen": chosen, "rejected": rejected})


@pytest.mark.parametrize(
    "row",
    [
        {
            "prompt": "1+1",
            "prompt_id": "x",
            "chosen": turns("1+1", "2"),
            "rejected": turns("1+1", "3"),
            "score_chosen": 9.0,
        },
        {"chosen": turns("1+1", "2"), "rejected": turns("1+1", "3")},
        {"prompt": "1+1", "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": turns("1+1", "2")[1:], "rejected": turns("1+1", "3")[1:]},
    ],
    ids=["ultrafeedback", "messages alone", "text", "prompt as messages", "answers as one turn"],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_every_layout_gives_the_same_pair(tmp_path, row, suffix):
    import pandas

    path = tmp_path / f"pairs.{suffix}"
    if suffix == "jsonl":
        path.write_text(json.dumps(row) + "\n")
    else:
        pandas.DataFrame([row]).to_parquet(path)
    assert list(training_pairs(COUNTDOWN, str(path))) == [
        {"prompt": [USER], "chosen": "2", "rejected": "3"}
    ]


def test_history_stays_in_the_prompt():
    row = {
        "prompt": "c",
        "chosen": turns("a", "b", "c", "d"),
        "rejected": turns("a", "b", "c", "e"),
    }
    assert preference(row) == {"prompt": turns("a", "b", "c"), "chosen": "d", "rejected": "e"}


def encoded(pairs, max_length=100):
    return encode_pairs(pairs, byte_tokenizer(), MODEL, max_length, use_cache=False)


def test_ids_of_both_sides_are_those_of_supervised_rows():
    """The answer is closed by the end of turn, and what looks like a special token in it stays text."""
    pairs = encoded([pair("2<|MASK|>", "3")])
    rows = [conversation({"prompt": "1+1", "response": text}) for text in ("2<|MASK|>", "3")]
    (prompt, chosen), (same_prompt, rejected) = encode(
        rows, byte_tokenizer(), MODEL, 100, use_cache=False
    )
    assert (
        list(pairs) == [(prompt, chosen, rejected)]
        and prompt == same_prompt
        and chosen == [*b"2<|MASK|>", EOS]
    )
    assert not pairs.dropped


def test_pairs_are_dropped_as_a_whole_and_counted():
    """Longer side decides; 3 + 2 template tokens, the answer and its end: exactly --max-length stays."""
    pairs = [
        pair(),
        pair("22", "3"),
        pair("2", "333"),
        pair("333", "2"),
        pair(" \n"),
        pair("2", ""),
        pair("2", "2"),
    ]
    pairs += [
        pair(prompt="1<|MASK|>"),
        pair("\ud800", "3"),
        preference({"prompt": "1+1", "chosen": "2"}),
    ]
    kept = encoded(pairs, 8)
    assert [(bytes(c[:-1]), bytes(r[:-1])) for _, c, r in kept] == [(b"2", b"3"), (b"22", b"3")]
    counts = {reason: counted["rows"] for reason, counted in kept.dropped.items()}
    assert counts == {
        "exceed --max-length 8": 2,
        "have an empty answer": 2,
        "have two equal sides": 1,
        "hold a mask token": 1,
        "hold half of a character (a surrogate)": 1,
        f"cannot be read, needed are {COLUMNS}": 1,
    }
    first = kept.dropped["exceed --max-length 8"]["first"]
    assert first == "row 3, 9 tokens: '1+1' -> '2' rather than '333'"
    assert len(encoded(pairs, 7)) == 1
    plain = SimpleNamespace(
        eos_token_ids=[EOS], mask_token_id=ord("z")
    )  # the mask token among a tokenizer's plain ones
    kept = encode_pairs(
        [pair(), pair("z", "2"), pair("2", "z")], byte_tokenizer(), plain, 100, use_cache=False
    )
    assert len(kept) == 1 and kept.dropped["hold a mask token"]["rows"] == 2


def test_a_run_never_starts_on_no_pairs():
    message = r"no rows to train on; 2 were dropped: 1 exceed --max-length 6 \(the first: row 1, 7 tokens: '1\+1' -> '2'.*equal sides"
    with pytest.raises(SystemExit, match=message):
        encoded([pair(), pair("2", "2")], 6).at_least(1)
    with pytest.raises(SystemExit, match="no rows to train on; 0 were dropped"):
        encoded([]).at_least(1)


def test_tokenised_pairs_are_kept_and_found_again(tmp_path, monkeypatch):
    """The second run tokenises nothing; a pair more, and it does."""
    monkeypatch.setenv("CLEANDLLM_CACHE", str(tmp_path))
    make = lambda pairs: encode_pairs(pairs, byte_tokenizer(), MODEL, 100)
    pairs = [pair(), pair("22", "3"), pair("2", "2")]
    first = make(pairs)
    monkeypatch.setattr(preferences, "encode_rows", counted := Counted(preferences.encode_rows))
    again = make(pairs)
    assert list(again) == list(first) and again.dropped == first.dropped and not counted.calls
    assert len(make([*pairs, pair("4", "5")])) == 3 and counted.calls == 1


class Counted:
    def __init__(self, function):
        self.function, self.calls = function, 0
        self.__module__ = function.__module__

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.function(*args, **kwargs)


def test_pairs_that_ask_a_held_out_question_are_not_trained_on(tmp_path):
    write_pairs(tmp_path / "pairs.jsonl", "a", "b")
    with open(tmp_path / "pairs.jsonl", "a") as file:
        file.write(json.dumps({"prompt": "What  is\nIT?", "chosen": "c", "rejected": "x"}) + "\n")
    pairs = training_pairs(COUNTDOWN, str(tmp_path / "pairs.jsonl"), [turns("what is it?")])
    kept = encoded(pairs)
    assert len(kept) == 2 and kept.dropped["ask what the run is scored on"]["first"].startswith(
        "row 3, 'What  is"
    )
    assert len(encoded(training_pairs(COUNTDOWN, str(tmp_path / "pairs.jsonl")))) == 3


@pytest.mark.parametrize("data", ["", "small"])
def test_a_task_gives_right_against_wrong_answers(data):
    pairs, problems = list(training_pairs(COUNTDOWN, data)), COUNTDOWN.load("train", data)
    assert len(pairs) > 0.99 * len(problems)
    by_prompt = {json.dumps(COUNTDOWN.prompt(problem)): problem for problem in problems}
    for row in pairs[::50]:
        problem = by_prompt[json.dumps(row["prompt"])]
        assert (
            COUNTDOWN.score(row["chosen"], problem) == 1
            and COUNTDOWN.score(row["rejected"], problem) == 0
        )


@pytest.mark.parametrize(
    "names, split", [(["train_sft", "train_prefs"], "train_prefs"), (["train"], "train")]
)
def test_a_hub_id_is_read_from_its_split_of_preferences(monkeypatch, names, split):
    import datasets

    rows = datasets.Dataset.from_list(
        [{"prompt": "1+1", "chosen": turns("1+1", "2"), "rejected": turns("1+1", "3")}]
    )
    asked = []
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: names)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, split: asked.append((name, split)) or rows
    )
    assert list(training_pairs(COUNTDOWN, "owner/name")) == [pair()] and asked == [
        ("owner/name", split)
    ]


@pytest.mark.parametrize(
    "content, message",
    [
        (
            '{"prompt": "a", "response": "b"}\n',
            "1 cannot be read, needed are .*row 1, with prompt, response",
        ),
        ('{"prompt": "a", "chosen": "b"}\n', "cannot be read"),
        ('{"chosen": "b", "rejected": "c"}\n', "cannot be read"),
        ('{"prompt": "a", "chosen": [], "rejected": "c"}\n', "cannot be read"),
        ('{"chosen": [{"role": "user", "content": "a"}], "rejected": "c"}\n', "cannot be read"),
        ('{"prompt": 3, "chosen": "b", "rejected": "c"}\n', "cannot be read"),
        ('{"prompt": [{"role": "user"}], "chosen": "b", "rejected": "c"}\n', "cannot be read"),
        (
            json.dumps({"chosen": turns("a", "b"), "rejected": turns("A", "c")}) + "\n",
            "1 have sides that answer different",
        ),
        ('{"prompt": "a", "chos', "line 1: not JSON"),
        (b'{"prompt": "\xff", "chosen": "b", "rejected": "c"}\n', "line 1: not UTF-8"),
        ("", "no rows to train on"),
    ],
)
def test_mistakes_are_named(tmp_path, content, message):
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit, match=message) as refused:
        encoded(training_pairs(COUNTDOWN, str(path))).at_least(1)
    assert "\n" not in str(refused.value)


# --- held-out pairs ----------------------------------------------------------------------------------------------------------


SPLITS = ("validation", "test")


def write_pairs(path, *names):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": "1+1", "chosen": f"{name}", "rejected": "x"} for name in names]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def chosen(pairs):
    return [pair["chosen"] for pair in pairs]


def test_a_folder_has_splits_and_a_file_has_none(tmp_path):
    """What is trained on is never scored as held out; a file that is named for it serves both splits."""
    folder, held = (
        tmp_path / "folder",
        lambda *given: [chosen(held_out_pairs(COUNTDOWN, split, *given)) for split in SPLITS],
    )
    for split in ("train", "validation", "test"):
        write_pairs(folder / f"{split}.jsonl", f"{split} 0", f"{split} 1")
    write_pairs(tmp_path / "more.jsonl", "a", "b", "c")
    assert chosen(training_pairs(COUNTDOWN, str(folder))) == ["train 0", "train 1"]
    assert held(str(folder), "", 9) == [["validation 0", "validation 1"], ["test 0", "test 1"]]
    assert held(str(folder), "", 1) == [["validation 0"], ["test 0"]]
    assert held(str(folder), str(tmp_path / "more.jsonl"), 2) == [["a", "b"], ["a", "b"]]
    assert held(str(tmp_path / "more.jsonl"), "", 9) == [[], []]
    assert held(str(tmp_path / "more.jsonl"), str(folder), 9) == held(str(folder), "", 9)
    packed = gzip.compress((folder / "train.jsonl").read_bytes())
    (folder / "train.jsonl").unlink()
    (folder / "train.jsonl.gz").write_bytes(packed)
    assert chosen(training_pairs(COUNTDOWN, str(folder))) == ["train 0", "train 1"]
    (folder / "validation.jsonl").unlink()
    write_pairs(folder / "test.jsonl", *range(5))
    assert held(str(folder), "", 9) == [["0", "2", "4"], ["1", "3"]]  # apart
    (folder / "test.jsonl").unlink()
    assert held(str(folder), "", 9) == [[], []]
    (folder / "train.jsonl.gz").unlink()
    with pytest.raises(SystemExit, match=r"the folder has no train.jsonl and no train.parquet"):
        training_pairs(COUNTDOWN, str(folder))


@pytest.mark.parametrize(
    "names, want",
    [
        (
            ["train_prefs", "train_sft", "test_prefs", "test_sft"],
            [("test_prefs", [0, 2, 4]), ("test_prefs", [1, 3])],
        ),
        (
            ["train", "validation", "test"],
            [("validation", [0, 1, 2, 3, 4]), ("test", [0, 1, 2, 3, 4])],
        ),
        (["train", "validation"], [("validation", [0, 1, 2, 3, 4]), None]),
        (["train"], [None, None]),
    ],
    ids=["ultrafeedback", "three", "no test", "train alone"],
)
def test_splits_of_a_hub_data_set(monkeypatch, names, want):
    import datasets

    rows, asked = [{"prompt": "1+1", "chosen": str(i), "rejected": "x"} for i in range(5)], []
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: names)
    load = lambda name, split: asked.append(split) or datasets.Dataset.from_list(rows)
    monkeypatch.setattr(datasets, "load_dataset", load)
    found = [chosen(held_out_pairs(COUNTDOWN, split, "owner/name", "", 9)) for split in SPLITS]
    assert found == [[str(i) for i in case[1]] if case else [] for case in want]
    assert asked == [case[0] for case in want if case]


@pytest.mark.parametrize("data", ["", "small"])
def test_held_out_pairs_of_a_task_are_of_other_problems(data):
    train = {json.dumps(row["prompt"]) for row in training_pairs(COUNTDOWN, data)}
    for split in SPLITS:
        pairs = held_out_pairs(COUNTDOWN, split, data, "", 50)
        assert len(pairs) == 50 and not train & {json.dumps(row["prompt"]) for row in pairs}


# --- pairs of a model's own answers ------------------------------------------------------------------------------------------


def samples(*answers):
    """answers: (index, completion, score)"""
    return [
        {"index": i, "prompt": turns(f"p{i}"), "completion": text, "score": score}
        for i, text, score in answers
    ]


def test_best_answers_meet_worst_and_none_is_used_twice():
    rows = samples(
        (1, "r1", 1.0), (1, "w1", 0.0), (1, "w1", 0.0), (1, "r2", 1.0), (1, "w2", 0.0), (1, " ", 0.0), (1, "w3", 0.0),
        (0, "half", 0.5), (0, "none", 0.0), (0, "whole", 1.0), (2, "r", 1.0), (2, "R", 1.0), (3, "w", 0.0),
    )  # fmt: skip
    found = [
        (row["prompt"], row["chosen"][-1]["content"], row["rejected"][-1]["content"])
        for row in pairs_of_samples(rows, 9)
    ]
    assert found == [("p0", "whole", "none"), ("p1", "r1", "w3"), ("p1", "r2", "w2")]
    assert [row["prompt"] for row in pairs_of_samples(rows, 1)] == ["p0", "p1"]
    (first, *_) = pairs_of_samples(rows, 1)
    assert (first["score_chosen"], first["score_rejected"]) == (1.0, 0.0)
    assert preference(first) == {"prompt": turns("p0"), "chosen": "whole", "rejected": "none"}


def test_samples_of_an_evaluation_become_a_file_of_pairs(tmp_path, capsys):
    path, out = tmp_path / "samples.jsonl", tmp_path / "pairs/train.jsonl"
    path.write_text(
        "".join(
            json.dumps(row) + "\n" for row in samples((0, "a", 1.0), (0, "b", 0.0), (1, "c", 0.0))
        )
    )
    preferences.main(preferences.Args(str(path), str(out)))
    assert "1 pairs of 1 prompts, out of 3 answers to 2 prompts" in capsys.readouterr().out
    assert list(training_pairs(COUNTDOWN, str(tmp_path / "pairs"))) == [
        {"prompt": turns("p0"), "chosen": "a", "rejected": "b"}
    ]
    path.write_text(json.dumps(samples((0, "a", 1.0))[0]) + "\n")
    with pytest.raises(SystemExit, match="no prompt of 1 has two answers of different score"):
        preferences.main(preferences.Args(str(path), str(out)))
    path.write_text('{"index": 0, "completion": "a"}\n')
    with pytest.raises(
        SystemExit,
        match="samples.jsonl line 1: needs index, prompt, completion, score, has index, completion",
    ):
        preferences.main(preferences.Args(str(path), str(out)))
    with pytest.raises(SystemExit, match="no such file"):
        preferences.main(preferences.Args(str(tmp_path / "none.jsonl"), str(out)))


BAD_SAMPLES = {
    "no turn": ({"prompt": []}, "line 2: prompt must be messages"),
    "a turn of text": ({"prompt": ["p0"]}, "line 2: prompt must be messages"),
    "a turn without text": ({"prompt": [{"role": "user"}]}, "line 2: prompt must be messages"),
    "no score": ({"score": float("nan")}, "line 2: the score is not a number"),
    "another prompt": ({"prompt": turns("p1")}, "line 2: index 0 stood for another prompt before"),
}


@pytest.mark.parametrize("change, words", BAD_SAMPLES.values(), ids=BAD_SAMPLES)
def test_samples_that_make_no_pair_are_refused_with_their_line(tmp_path, change, words):
    path, (right, wrong) = tmp_path / "samples.jsonl", samples((0, "a", 1.0), (0, "b", 0.0))
    path.write_text("".join(json.dumps(row) + "\n" for row in (right, wrong | change)))
    with pytest.raises(SystemExit, match=words):
        preferences.main(preferences.Args(str(path), str(tmp_path / "pairs.jsonl")))
    assert not (tmp_path / "pairs.jsonl").exists()


def test_pairs_are_written_or_it_is_said_why_not(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in samples((0, "\ud800", 1.0), (0, "b\u00df", 0.0)))
    )
    with pytest.raises(SystemExit, match="--out .* cannot be written: .*directory"):
        preferences.main(preferences.Args(str(path), str(tmp_path)))
    preferences.main(
        preferences.Args(str(path), str(tmp_path / "train.jsonl"))
    )  # training counts it as half of a character
    (pair,) = training_pairs(COUNTDOWN, str(tmp_path / "train.jsonl"))
    assert (pair["chosen"], pair["rejected"]) == ("\ud800", "b\u00df")


def test_gold_pairs_leave_out_what_has_no_answer(monkeypatch):
    """The same pairs of the others, each against the first of the next eight answers that scores less."""
    problems = COUNTDOWN.load("train")[:40]
    monkeypatch.setattr(COUNTDOWN, "load", lambda *args: problems)
    answer = COUNTDOWN.answer

    def some(problem, draw=0):
        if problem is problems[3]:
            raise ValueError("no solution")
        return answer(problem, draw)

    monkeypatch.setattr(COUNTDOWN, "answer", some)
    pairs = gold_pairs(COUNTDOWN, "train", "")
    answered = [problem for problem in problems if problem is not problems[3]]
    texts = list(map(answer, answered))
    for i, problem in enumerate(answered):
        others = [texts[(i + k) % len(texts)] for k in range(1, 9)]
        wrong = next((text for text in others if COUNTDOWN.score(text, problem) < 1), None)
        found = [pair for pair in pairs if pair["prompt"] == COUNTDOWN.prompt(problem)]
        assert [(pair["chosen"], pair["rejected"]) for pair in found] == [(texts[i], wrong)]


def test_gold_pairs_are_scored_in_batches():
    """Each against the first of the next eight that scores less, by brute force; all that are left in one call."""
    N, rng, calls = 30, random.Random(0), []
    table = [rng.choices([0.0, 0.5, 1.0], [1, 9, 1], k=N) for _ in range(N)]
    for i in range(N):
        table[i][i] = (
            0.5  # the gold answers are only half right: another one of these is no rejected answer
        )

    def score_batch(answers, problems):
        calls.append(len(answers))
        return [table[i][int(text)] for i, text in zip(problems, answers, strict=True)]

    task = SimpleNamespace(
        load=lambda *_: list(range(N)),
        answer=str,
        prompt=lambda i: turns(f"p{i}"),
        score_batch=score_batch,
    )
    found = {
        i: next((k for k in range(1, 9) if table[i][(i + k) % N] < 0.5), None) for i in range(N)
    }
    assert {1, 8, None} <= set(found.values()), "the table has every case"
    want = [(f"p{i}", str(i), str((i + k) % N)) for i, k in found.items() if k]
    pairs = gold_pairs(task, "train", "")
    assert [
        (pair["prompt"][0]["content"], pair["chosen"], pair["rejected"]) for pair in pairs
    ] == want
    left = [sum(k is None or k >= n for k in found.values()) for n in range(1, 9)]
    assert calls == [N, *left], "the gold answers, then those without a pair yet"
