"""--repeats: seeds, means and errors of an evaluation that answers every problem several times."""

import json
import math
import statistics
import sys
from pathlib import Path

import pytest
import test_evals
from test_evals import GoldEngine, cli, one_line, write

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from evals import aime24, run, samples

fake_services = test_evals.fake_services  # a fixture
PROBLEMS = [{"problem": f"Is it {i}?", "answer": str(i)} for i in range(4)]


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def given(table):
    """Rows of completions: table[repeat][problem] says whether the answer is right."""
    return [
        {"index": i, "repeat": repeat, "completion": rf"\boxed{{{i if right else 999}}}"}
        for repeat, rights in enumerate(table)
        for i, right in enumerate(rights)
    ]


def score(tmp_path, monkeypatch, capsys, rows, *flags, out="out"):
    data = write(tmp_path / "rows.jsonl", PROBLEMS)
    given = [
        "--completions",
        write(tmp_path / "given.jsonl", rows),
        "--data",
        data,
        "--out",
        str(tmp_path / out),
    ]
    return cli(monkeypatch, capsys, *given, *flags, task="aime24")


def test_mean_of_repeats_and_error_over_problems(tmp_path, monkeypatch, capsys):
    table = [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 1]]
    result = score(tmp_path, monkeypatch, capsys, given(table), "--repeats", "3")
    assert (result["n"], result["repeats"], result["accuracies"]) == (4, 3, [0.5, 0.25, 0.75])
    assert (
        result["accuracy"] == statistics.mean(result["accuracies"]) == 0.5
        and result["settings"]["repeats"] == 3
    )
    means = [statistics.mean(column) for column in zip(*table, strict=True)]
    assert math.isclose(result["stderr"], statistics.pstdev(means) / math.sqrt(4))
    assert result["stderr"] > math.sqrt(0.5 * 0.5 / 12), "as if twelve problems had been asked"
    rows = rows_of(tmp_path / "out/samples.jsonl")
    assert [(row["repeat"], row["index"], row["score"]) for row in rows] == [
        (repeat, i, float(right))
        for repeat, rights in enumerate(table)
        for i, right in enumerate(rights)
    ]
    # the samples, in any order, give the same again
    again = score(tmp_path, monkeypatch, capsys, rows[::-1], "--repeats", "3", out="again")
    del result["settings"], again["settings"]
    assert again == result


def test_equal_repeats_have_the_error_of_one(tmp_path, monkeypatch, capsys):
    once = score(tmp_path, monkeypatch, capsys, given([[1, 0, 0, 0]]))
    assert "repeats" not in once and "accuracies" not in once and once["settings"]["repeats"] == 1
    assert not any("repeat" in row for row in rows_of(tmp_path / "out/samples.jsonl"))
    many = score(
        tmp_path, monkeypatch, capsys, given([[1, 0, 0, 0]] * 5), "--repeats", "5", out="many"
    )
    assert (
        many["stderr"] == pytest.approx(once["stderr"])
        and many["accuracy"] == once["accuracy"] == 0.25
    )


COUNTS = {
    "repeat True is not one of 0..1": (1, 1),
    "index: 3 of repeat 1": (0, 1),
}  # of others 1 unused, 0 missing
BAD = {
    "repeat 2 is not one of 0..1; check --repeats": lambda rows: [
        *rows,
        {"index": 0, "repeat": 2, "completion": ""},
    ],
    "repeat 'x' is not one of 0..1": lambda rows: [
        *rows,
        {"index": 0, "repeat": "x", "completion": ""},
    ],
    "repeat True is not one of 0..1": lambda rows: [*rows[1:], rows[0] | {"repeat": True}],
    "index 3 of repeat 1 stands already in line ": lambda rows: [*rows, rows[-1]],
    "index: 3 of repeat 1": lambda rows: rows[:-1],
}


@pytest.mark.parametrize("want", BAD)
def test_bad_rows_are_named_and_counted(tmp_path, monkeypatch, capsys, want):
    rows = BAD[want](given([[1] * 4, [0] * 4]))
    data, file = write(tmp_path / "rows.jsonl", PROBLEMS), write(tmp_path / "given.jsonl", rows)
    flags = [
        "--completions",
        file,
        "--data",
        data,
        "--repeats",
        "2",
        "--out",
        str(tmp_path / "out"),
    ]
    monkeypatch.setattr(sys, "argv", ["evals/aime24.py", *flags])
    run.main("aime24")
    shown = capsys.readouterr()
    result = json.loads(shown.out.splitlines()[-1])
    assert want in shown.err and (result["unused"], result["missing"]) == COUNTS.get(want, (1, 0))
    used = rows_of(tmp_path / "out/samples.jsonl")
    right = {"repeat True is not one of 0..1": 3 / 7, "index: 3 of repeat 1": 4 / 7}.get(
        want, 4 / 8
    )
    assert len(used) == 8 - result["missing"] and result["accuracy"] == right


def test_flags(tmp_path, monkeypatch, capsys):
    rows = given([[1] * 4, [0] * 4])
    repeated = [row for row in rows if row["repeat"]]
    assert "repeat 1 is not one of 0..0" in one_line(
        lambda: score(tmp_path, monkeypatch, capsys, repeated)
    )
    assert "--repeats 0 must be" in one_line(
        lambda: score(tmp_path, monkeypatch, capsys, rows, "--repeats", "0")
    )
    greedy = lambda *flags: one_line(
        lambda: cli(monkeypatch, capsys, "--model", "tiny-sdar", "--repeats", "2", *flags)
    )
    assert "--repeats 2: without a draw all repeats are the same" in greedy()


def test_every_repeat_has_its_seed_and_one_engine(tmp_path, monkeypatch, capsys, fake_services):
    flags = [
        "--limit",
        "6",
        "--batch-size",
        "4",
        "--seed",
        "5",
        "--temperature",
        "1.0",
        "--repeats",
        "3",
    ]
    result = cli(monkeypatch, capsys, "--model", "some/dir", *flags, "--out", str(tmp_path))
    calls = [(n, settings["sample_offset"], settings["seed"]) for n, settings in GoldEngine.calls]
    assert calls == [(4, 0, 5), (2, 4, 5), (4, 0, 6), (2, 4, 6), (4, 0, 7), (2, 4, 7)]
    assert (result["n"], result["repeats"], result["settings"]["seed"]) == (6, 3, 5)
    assert result["accuracies"] == pytest.approx([4 / 6] * 3) and result[
        "truncated"
    ] == pytest.approx(1 / 3)
    rows = rows_of(tmp_path / "samples.jsonl")
    assert [(row["repeat"], row["index"]) for row in rows] == [
        (repeat, i) for repeat in range(3) for i in range(6)
    ]


def test_repeats_are_runs_with_the_next_seeds(tmp_path, monkeypatch, capsys):
    """A model's repeat r is, token for token, the run with seed + r."""
    data = write(tmp_path / "rows.jsonl", PROBLEMS)
    flags = ["--model", "tiny-sdar", "--data", data, "--temperature", "1.0", "--gen-length", "8"]

    def completions(name, *more):
        cli(monkeypatch, capsys, *flags, *more, "--out", str(tmp_path / name), task="aime24")
        return [row["completion"] for row in rows_of(tmp_path / name / "samples.jsonl")]

    both = completions("both", "--seed", "3", "--repeats", "2")
    first, second = completions("first", "--seed", "3"), completions("second", "--seed", "4")
    assert both == first + second and first != second
    assert aime24.extract(both[0], {}) is None and samples.given(
        str(tmp_path / "both/samples.jsonl"), 4, 2
    )[1:] == ([], [])
