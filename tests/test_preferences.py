"""Preference pairs: every layout, what is dropped, held-out splits, gold pairs, paired samples."""

from types import SimpleNamespace

import datasets
import pytest
from test_sft_data import COUNTDOWN, EOS, GOLDEN, TINY, turns, write_jsonl

from data import preferences
from data.preferences import (
    encode_pairs,
    gold_pairs,
    held_out_pairs,
    pairs_of_samples,
    preference,
    training_pairs,
)
from evals import score_all
from models.tiny import byte_tokenizer

USER = turns("1+1")
SPLITS = ("validation", "test")


def training(data, asked=()):
    return training_pairs(COUNTDOWN, data, score_all, asked)


def held_out(split, data, eval_pairs="", limit=9):
    return held_out_pairs(COUNTDOWN, split, data, eval_pairs, limit, score_all)


def encoded(pairs, max_length=100):
    return encode_pairs(pairs, byte_tokenizer(), TINY, max_length)


def test_every_layout_gives_the_same_pair(tmp_path):
    path = write_jsonl(tmp_path / "pairs.jsonl", GOLDEN["pairs"])
    want = {"prompt": USER, "chosen": "2", "rejected": "3"}
    assert list(training(path)) == [want] * len(GOLDEN["pairs"])
    sides = {"chosen": turns("a", "b", "c", "d"), "rejected": turns("a", "b", "c", "e")}
    history = {"prompt": turns("a", "b", "c"), "chosen": "d", "rejected": "e"}
    assert preference({"prompt": "c"} | sides) == history


def test_pairs_are_dropped_as_a_whole_and_counted(tmp_path):
    """The longer side decides; exactly --max-length stays."""
    texts = ("2", "3"), ("22", "3"), ("2", "333"), ("333", "2"), (" \n", "3"), ("2", ""), ("2", "2")
    pairs = [{"prompt": "1+1", "chosen": good, "rejected": bad} for good, bad in texts]
    pairs += [pairs[0] | {"prompt": text} for text in ("1<|MASK|>", "What  is\nIT?")]
    path = write_jsonl(tmp_path / "pairs.jsonl", pairs)
    kept = encoded(training(path, [turns("what is it?")]), 8)
    prompt = [258, *b"1+1", 259]
    assert list(kept) == [
        (prompt, [*b"2", EOS], [*b"3", EOS]),
        (prompt, [*b"22", EOS], [*b"3", EOS]),
    ]
    assert {reason: counted["rows"] for reason, counted in kept.dropped.items()} == {
        "exceed --max-length 8": 2,
        "have an empty answer": 2,
        "have two equal sides": 1,
        "hold a mask token": 1,
        "ask what the run is scored on": 1,
    }
    first = kept.dropped["exceed --max-length 8"]["first"]
    assert first == "row 3, 9 tokens: '1+1' -> '2' rather than '333'"


@pytest.mark.parametrize("row, message", GOLDEN["mistakes"])
def test_mistakes_are_named(row, message):
    with pytest.raises(SystemExit, match=f"^.*{message}.*$"):
        encoded([preference(row)]).at_least(1)


# --- splits --------------------------------------------------------------------------------------


def write_pairs(path, *names):
    path.parent.mkdir(exist_ok=True)
    return write_jsonl(path, [{"prompt": "1+1", "chosen": n, "rejected": "x"} for n in names])


def chosen(pairs):
    return [pair["chosen"] for pair in pairs]


def test_a_folder_has_splits_and_a_file_has_none(tmp_path):
    """What is trained on is never scored as held out; a file given for it serves both splits."""
    folder, held = tmp_path / "folder", lambda *given: [chosen(held_out(s, *given)) for s in SPLITS]
    data, more = str(folder), write_pairs(tmp_path / "more.jsonl", *"abc")
    for split, names in {"train": "xy", "validation": "vw", "test": "01234"}.items():
        write_pairs(folder / f"{split}.jsonl", *names)
    assert chosen(training(data)) == ["x", "y"]
    assert held(data) == [[*"vw"], [*"01234"]] and held(data, more, 2) == [["a", "b"]] * 2
    assert held(more) == [[], []] and held(more, data) == held(data)
    (folder / "validation.jsonl").unlink()
    assert held(data) == [["0", "2", "4"], ["1", "3"]] and held(data, "", 1) == [["0"], ["1"]]
    (folder / "train.jsonl").unlink()
    with pytest.raises(SystemExit, match="the folder has no train.jsonl and no train.parquet"):
        list(training(data))


HUB = [  # splits of a data set; split and rows of train, validation, test
    (["train_prefs", "train_sft", "test_prefs", "test_sft", "train"],
     ("train_prefs", "01234"), ("test_prefs", "024"), ("test_prefs", "13")),
    (["train", "validation"], ("train", "01234"), ("validation", "01234"), None),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(HUB)))
def test_splits_of_a_hub_data_set(monkeypatch, case):
    names, *want = HUB[case]
    rows, asked = [{"prompt": "1+1", "chosen": str(i), "rejected": "x"} for i in range(5)], []
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda path, revision: names)
    load = lambda split, **_: asked.append(split) or datasets.Dataset.from_list(rows)
    monkeypatch.setattr(datasets, "load_dataset", load)
    found = [chosen(training("owner/name")), *(chosen(held_out(s, "owner/name")) for s in SPLITS)]
    assert found == [list(part[1]) if part else [] for part in want]
    assert asked == [part[0] for part in want if part]


# --- pairs of a task's gold answers, and of a model's own ----------------------------------------


def test_gold_pairs_are_scored_in_batches():
    """Each with the first of the next eight that scores less; those left in one call; problems
    without an answer make no pair."""
    lower, calls = {0: 2, 1: 1, 2: 9, 3: 8}, []  # which of the next answers scores less

    def answer(i, draw):
        if i == 30:
            raise ValueError("no solution")
        return str(i)

    def score_batch(answers, problems):
        calls.append(len(answers))
        distance = [(int(text) - i) % 30 for i, text in zip(problems, answers, strict=True)]
        return [0.5 - 0.5 * (lower.get(i, 3) == k) for i, k in zip(problems, distance, strict=True)]

    load = lambda *_: [*range(9), 30, *range(9, 30)]
    task = SimpleNamespace(load=load, answer=answer, prompt=turns, score_batch=score_batch)
    pairs = gold_pairs(task, "train", "", score_all)
    found = {i: str((i + lower.get(i, 3)) % 30) for i in range(30) if i != 2}
    want = [(turns(i), str(i), text) for i, text in found.items()]
    assert [tuple(pair.values()) for pair in pairs] == want
    assert calls == [30, 30, 29, 28, 2, 2, 2, 2, 2]


def samples(*answers):
    """answers: (index, completion, score)"""
    keys = ("index", "completion", "score")
    rows = [dict(zip(keys, answer, strict=True)) for answer in answers]
    return [row | {"prompt": turns(f"p{row['index']}")} for row in rows]


def test_best_answers_meet_worst_and_none_is_used_twice():
    scores = {"r1": 1.0, "w1": 0.0, "r2": 1.0, "w2": 0.0, " ": 0.0, "w3": 0.0}
    rows = samples(*((1, *text) for text in scores.items()), (1, "w1", 0.0), (0, "half", 0.5))
    rows += samples(
        (0, "none", 0.0), (0, "whole", 1.0), (2, "r", 1.0), (2, "R", 1.0), (3, "w", 0.0)
    )
    found = map(preference, pairs_of_samples(rows, 9))
    texts = [(row["prompt"][0]["content"], row["chosen"], row["rejected"]) for row in found]
    assert texts == [("p0", "whole", "none"), ("p1", "r1", "w3"), ("p1", "r2", "w2")]
    assert [row["prompt"] for row in pairs_of_samples(rows, 1)] == ["p0", "p1"]


def test_samples_of_an_evaluation_become_a_file_of_pairs(tmp_path, capsys):
    rows = samples((0, "\ud800", 1.0), (0, "b\u00df", 0.0), (1, "c", 0.0))
    path = write_jsonl(tmp_path / "samples.jsonl", rows)
    preferences.main(preferences.Args(path, str(tmp_path / "pairs/train.jsonl")))
    assert "1 pairs, of 3 answers to 2 prompts" in capsys.readouterr().out
    want = {"prompt": turns("p0"), "chosen": "\ud800", "rejected": "b\u00df"}
    assert list(training(str(tmp_path / "pairs"))) == [want]


[GOOD] = samples((0, "a", 1.0))
REFUSED = [
    ([GOOD], "no prompt of 1 has two answers of different score"),
    ([GOOD | {"prompt": [{}]}], "samples.jsonl line 1: needs index .*, prompt .messages."),
    ([GOOD, GOOD | {"prompt": turns("p1")}], "line 2: index 0 had another prompt before"),
]


@pytest.mark.parametrize("rows, words", REFUSED)
def test_samples_that_make_no_pair_are_refused(tmp_path, rows, words):
    path = write_jsonl(tmp_path / "samples.jsonl", rows)
    with pytest.raises(SystemExit, match=words):
        preferences.main(preferences.Args(path, str(tmp_path / "pairs.jsonl")))
    assert not (tmp_path / "pairs.jsonl").exists()
