"""Preference pairs: every layout, what is dropped, held-out splits, gold pairs, paired samples."""

import datasets
import pytest
from test_evals import hub, write  # noqa: F401
from test_sft_data import COUNTDOWN, EOS, GOLDEN, ids, turns

from data import sft
from data.preferences import held_out_pairs, pairs_of, preference
from data.rows import split_name
from data.tokens import Dropped
from evals import score_all

SPLITS = ("validation", "test")


def training(data):
    return pairs_of(COUNTDOWN, data, "train", score_all)


def held_out(split, data, limit=9):
    return held_out_pairs(COUNTDOWN, split, data, limit, score_all)


def test_every_layout_gives_the_same_pair(tmp_path):
    path = write(tmp_path / "pairs.jsonl", GOLDEN["pairs"])
    want = {"prompt": turns("1+1"), "chosen": "2", "rejected": "3"}
    assert list(training(path)) == [want] * len(GOLDEN["pairs"])
    sides = {"chosen": turns("a", "b", "c", "d"), "rejected": turns("a", "b", "c", "e")}
    history = {"prompt": turns("a", "b", "c"), "chosen": "d", "rejected": "e"}
    assert preference({"prompt": "c"} | sides) == history


def test_pairs_are_dropped_as_a_whole(tmp_path):
    """The longer side decides; exactly --max-length stays."""
    texts = ("2", "3"), ("22", "3"), ("2", "333"), ("333", "2"), ("2", ""), ("2", "2")
    pairs = [{"prompt": "1+1", "chosen": good, "rejected": bad} for good, bad in texts]
    kept = ids(map(preference, pairs), 8)
    assert list(kept) == [
        ([258, *b"1+1", 259], [*good, EOS], [*b"3", EOS]) for good in (b"2", b"22")
    ]
    assert [line.split(";")[0] for line in kept.dropped] == [
        "2 exceed --max-length 8",
        "1 have an empty answer",
        "1 have two equal sides",
    ]


@pytest.mark.parametrize("row, reason", GOLDEN["mistakes"])
def test_mistakes_are_named(row, reason):
    assert isinstance(found := preference(row), Dropped) and found.reason.startswith(reason)


# --- splits --------------------------------------------------------------------------------------


def write_pairs(path, *names):
    path.parent.mkdir(exist_ok=True)
    return write(path, [{"prompt": "1+1", "chosen": n, "rejected": "x"} for n in names])


def chosen(pairs):
    return [pair["chosen"] for pair in pairs]


def test_a_folder_has_splits_and_a_file_has_none(tmp_path):
    """What is trained on is never scored as held out."""
    folder, held = tmp_path / "folder", lambda *given: [chosen(held_out(s, *given)) for s in SPLITS]
    data = str(folder)
    for split, names in {"train": "yz", "validation": "vw", "test": "01234"}.items():
        write_pairs(folder / f"{split}.jsonl", *names)
    assert chosen(training(data)) == ["y", "z"]
    assert held(data) == [[*"vw"], [*"01234"]] and held(f"{data}/train.jsonl") == [[], []]
    (folder / "validation.jsonl").unlink()
    assert held(data) == [["0", "2", "4"], ["1", "3"]] and held(data, 1) == [["0"], ["1"]]
    (folder / "train.jsonl").unlink()
    with pytest.raises(SystemExit, match="folder/train.jsonl: no such file"):
        list(training(data))


def test_splits_of_a_hub_data_set(monkeypatch, hub):  # noqa: F811
    """Named for preferences; its test split is divided, as a folder's."""
    names = ["train_prefs", "train_sft", "test_prefs", "test_sft", "train"]
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda path, revision: names)
    rows = lambda split: [{"prompt": "1+1", "chosen": f"{i}", "rejected": split} for i in range(5)]
    hub({("owner/name", None, split): rows(split) for split in names})
    found = [training("owner/name"), *(held_out(split, "owner/name") for split in SPLITS)]
    assert [{pair["rejected"] for pair in part} for part in found] == [
        {"train_prefs"},
        {"test_prefs"},
        {"test_prefs"},
    ]
    assert [*map(chosen, found[1:])] == [["0", "2", "4"], ["1", "3"]]
    assert split_name("owner/name", sft.SPLITS) == "train_sft"


# --- pairs of a task's gold answers, and of a model's own ----------------------------------------


def test_best_answers_meet_worst_and_none_is_used_twice(tmp_path):
    """In samples.jsonl of an evaluation, which are pairs of the split that its folder names."""
    scored = {
        1: {"r1": 1.0, "w1": 0.0, "r2": 1.0, "w2": 0.0, " ": 0.0, "w3": 0.0, "half": 0.5},
        0: {"half": 0.5, "none": 0.0, "whole": 1.0},
        2: {"r": 1.0, "R": 1.0},
        3: {"w": 0.0},
    }
    rows = [
        {"index": i, "prompt": turns(f"p{i}"), "completion": text, "score": score}
        for i, scores in scored.items()
        for text, score in scores.items()
    ]
    (tmp_path / "train").mkdir()
    write(tmp_path / "train/samples.jsonl", rows + rows[1:2])
    want = [("p0", "whole", "none"), ("p1", "r1", "w3"), ("p1", "r2", "w2")]
    found = [tuple(pair.values()) for pair in training(str(tmp_path))]
    assert found == [(turns(prompt), *sides) for prompt, *sides in want]
