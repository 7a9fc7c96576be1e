"""evals/run.py and the command line of tasks: ranks, resuming, files of completions, results."""

import json
import math
import re
import statistics
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from test_evals import one_line, row_of, write
from test_math import ENDLESS, quick_timeout  # noqa: F401, a fixture

from distributed import disk as atomic
from evals import TRIAL, countdown, decoding, load_task, run, samples, sandbox
from models.config import architecture
from rollout import make_engine
from rollout.traces import Trace

AIME = [{"problem": f"Is it {i}?", "answer": str(i)} for i in range(4)]


@pytest.fixture
def cli(monkeypatch, capsys):
    """The command line of a task, in this process. -> the JSON object of its last line"""

    def command(*flags, task="countdown"):
        monkeypatch.setattr(sys, "argv", [f"evals/{task}.py", *map(str, flags)])
        run.main(task)
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return command


@pytest.fixture
def many(monkeypatch):
    """The command line of evals/run.py, in this process."""

    def command(*flags):
        monkeypatch.setattr(sys, "argv", ["evals/run.py", *map(str, flags)])
        run.main()

    return command


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line]


def timeless(path):
    """Rows without what rounding or the machine changes."""
    lost = ("seconds", "logps")
    return [{k: v for k, v in row.items() if k not in lost} for row in rows_of(path)]


def completions(path, texts):
    return write(path, [{"index": i, "completion": text} for i, text in enumerate(texts)])


class GoldEngine:
    """Answers the countdown problem in the prompt; every third one wrongly and without an end."""

    calls, refills, device, dtype = [], False, torch.device("cpu"), torch.float32
    config = {"model_type": "sdar"}
    model = SimpleNamespace(checkpoint_config=config, eos_token_ids=[0], sources=(None, []))

    def block_length(self, asked):
        return asked or 4

    def validate(self, **settings):
        return "answers the problem"

    def generate(self, prompt_ids, **settings):
        self.calls.append((len(prompt_ids), settings["sample_offset"], settings["seed"]))
        texts = []
        for row, ids in enumerate(prompt_ids):
            *numbers, target = map(int, "".join(map(chr, ids)).replace("=", " ").split())
            example = {"numbers": numbers, "target": target, "style": "compact"}
            wrong = (settings["sample_offset"] + row) % 3 == 0
            texts.append("9" * 12 if wrong else countdown.answer(example) + "\0")
        # text after the first EOS must not be decoded
        ids = torch.tensor([[*map(ord, text.ljust(12, "?"))] for text in texts])
        return Trace(
            prompt_ids,
            completion_ids=ids,
            completion_mask=torch.tensor([[i < len(text) for i in range(12)] for text in texts]),
            canvas_length=torch.full((len(texts),), 12),
            step_map=None,
            replay_map=None,
            logps=None,
            sample_index=torch.arange(len(texts)),
            num_forwards=torch.full((len(texts),), 6),
            settings={"eos_token_ids": [0]},
        )


@pytest.fixture
def fake(monkeypatch):
    """GoldEngine for every model; -> what make_engine was asked for"""
    made = {}
    decode = lambda ids, skip_special_tokens=False: "".join(chr(i) for i in ids if i)
    monkeypatch.setattr(run, "load_tokenizer", lambda name: SimpleNamespace(decode=decode))
    monkeypatch.setattr(
        samples, "prompt_ids", lambda _, messages: [*map(ord, messages[0]["content"])]
    )
    engine = lambda model, **settings: made.update(settings, model=model) or GoldEngine()
    monkeypatch.setattr(run, "make_engine", engine)
    monkeypatch.setattr(GoldEngine, "calls", [])
    return made


# --------------------------------------------------------------------------------------------------
# files of completions


@pytest.mark.parametrize("name", ["countdown", "sudoku"])
def test_completions_are_scored_end_to_end(tmp_path, monkeypatch, name, cli, many):
    task = load_task(name)
    texts = [task.answer(e) if i < 6 else "" for i, e in enumerate(task.load("test", limit=8))]
    flags = "--completions", completions(tmp_path / "c.jsonl", texts), "--out", tmp_path / "out"
    result = cli(*flags, task=name)
    assert result == json.loads((tmp_path / "out/result.json").read_text())
    want = {"task": name, "n": 8, "accuracy": 0.75, "stderr": math.sqrt(0.75 * 0.25 / 8)}
    want |= {"answered": 0.75, "truncated": None, "failed": 0, "unused": 0}
    want["missing"] = len(task.load("test")) - 8
    assert list(result) == [*want, "settings"] and result.items() >= want.items()
    assert sum(row["score"] for row in rows_of(tmp_path / "out/samples.jsonl")) == 6
    rows = [{"index": i, "completion": text, "prompt": "Other?"} for i, text in enumerate(texts)]
    monkeypatch.chdir(tmp_path)
    said = one_line(cli, "--completions", write(tmp_path / "o.jsonl", rows))
    assert "no completions; line 1: about another problem" in said and not Path("runs").exists()
    flags = (
        "--tasks",
        f"{name},gsm8k",
        "--data",
        f"gsm8k={write(tmp_path / 'w.jsonl', [row_of('gsm8k')])}",
    )
    files = f"{name}={tmp_path / 'c.jsonl'}", f"gsm8k={completions(tmp_path / 'g.jsonl', ['x'])}"
    many(*flags, "--completions", *files, "--out", tmp_path / "many")
    found = [
        json.loads((tmp_path / f"many/{task}/result.json").read_text()) for task in (name, "gsm8k")
    ]
    assert [made["accuracy"] for made in found] == [0.75, 0.0]


GOOD = [json.dumps({"index": i, "completion": "12"}) for i in range(4)]
FAULTS = {
    '{"index": 0, "completion": "1"}': "index 0 is in a line before",
    '{"index": 6, "completion": "1"}': "index 6 is outside 0..5; check --data and --split",
    '{"index": -1, "completion": "1"}': "index -1 is outside 0..5",
    '{"index": 1e400, "completion": "1"}': 'needs {"index": integer, "completion": text}',
    '{"index": true, "completion": "1"}': "needs",
    '{"index": 5, "completion": "1"': "not JSON (Expecting ',' delimiter)",
    "[" * 100_000: "not JSON (maximum recursion depth exceeded",
    '{"index": ' + "9" * 5000 + "}": "not JSON (Exceeds the limit",
    "null": "a JSON object is needed, not NoneType",
}


def test_lines_that_cannot_be_used_are_counted_and_named(tmp_path, capsys):
    path, problems = tmp_path / "c.jsonl", countdown.load("test", limit=6)
    read = lambda: samples.given(countdown, problems, path)
    for line, problem in FAULTS.items():
        path.write_text("\n".join([GOOD[0], "", line, *GOOD[1:]]))
        rows, counts = read()
        assert (len(rows), counts) == (4, {"unused": 1, "missing": 2}), line[:40]
        said = capsys.readouterr().err
        assert f"{path}: 1 rows not used: line 3: " in said and problem in said
        assert said.endswith("not in the mean: index: 4; 5\n")
        path.write_text(line)
        assert "before" in problem or problem in one_line(read)
    path.write_bytes(f"\ufeff{GOOD[0]}\n".encode() + b"\xff\xfe\n" + b"{\n" * 200)
    rows, counts = read()
    assert len(rows) == 1 and counts["unused"] == 201
    shown = capsys.readouterr().err.splitlines()[0]
    assert shown.startswith(f"{path}: 201 rows not used: line 2: not UTF-8 (byte 1 of the line")
    assert shown.count("line ") == 20 and shown.endswith("; and 181 more")


def test_samples_are_scored_again_with_a_reward(tmp_path, cli):
    texts = [countdown.answer(countdown.load("test", limit=1)[0]), "", "", ""]
    score = lambda path, out, *flags: cli("--completions", path, "--out", tmp_path / out, *flags)
    first = score(completions(tmp_path / "c.jsonl", texts), "a")
    again = score(tmp_path / "a/samples.jsonl", "b", "--reward", "countdown_d1")
    assert again["accuracy"] == first["accuracy"] == 0.25
    parts = {"solved": 0.25, "answered": 0.0}
    assert again["reward"] == {"name": "countdown_d1", "mean": 0.25, "components": parts}


def test_repeats(tmp_path, cli):
    """The error is that of the problems' means: answers to one problem are not independent."""
    table = [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 1]]
    rows = [
        {"index": i, "repeat": repeat, "completion": rf"\boxed{{{i if right else 999}}}"}
        for repeat, rights in enumerate(table)
        for i, right in enumerate(rights)
    ]
    data, given = write(tmp_path / "rows.jsonl", AIME), tmp_path / "given.jsonl"
    score = lambda rows, n, out: cli(
        "--completions", write(given, rows), "--data", data, "--repeats", n,
        "--out", tmp_path / out, task="aime24",
    )  # fmt: skip
    result = score(rows[::-1], 3, "a")
    assert (result["n"], result["repeats"], result["accuracies"]) == (4, 3, [0.5, 0.25, 0.75])
    means = [statistics.mean(column) for column in zip(*table, strict=True)]
    assert result["stderr"] == pytest.approx(statistics.pstdev(means) / 2)
    assert result["accuracy"] == 0.5 and "repeats" not in score(rows[:4], 1, "b")
    bad = [rows[0] | {"repeat": True}, rows[1], rows[2] | {"repeat": 3}]
    result = score([*rows[1:], *bad], 3, "c")
    assert (result["unused"], result["missing"]) == (3, 1)
    flags = ["--model", "tiny-sdar", "--repeats", "2", "--data", data]
    said = one_line(lambda: cli(*flags, task="aime25"))
    assert "--repeats 2: all repeats are the same without randomness" in said


def test_scorers_that_give_no_verdict(tmp_path, monkeypatch, quick_timeout, cli):  # noqa: F811
    """Such a completion scores 0 and is named; a sandbox that does not work stops everything."""
    data = write(tmp_path / "rows.jsonl", [{"problem": "?", "answer": "5"}] * 4)
    endless = rf"\boxed{{{ENDLESS}}}"
    texts = [r"\boxed{\sqrt{25}}", endless, r"\boxed{5}", f"so {endless}"]
    flags = ["--completions", completions(tmp_path / "c.jsonl", texts), "--data", data]
    result = cli(*flags, "--out", tmp_path / "a", task="math500")
    assert (result["n"], result["accuracy"], result["failed"]) == (4, 0.5, 2)
    why = "the math grader gave no verdict"
    assert [row.get("failed") for row in rows_of(tmp_path / "a/samples.jsonl")] == [None, why] * 2

    def score_batch(completions, examples):
        if "kill" in completions:
            raise RecursionError("too deep")
        return [1.0] * len(completions)

    monkeypatch.setattr(countdown, "score_batch", score_batch, raising=False)
    flags = ["--limit", "3", "--completions", completions(tmp_path / "c.jsonl", ["1", "kill", "2"])]
    result = cli(*flags, "--out", tmp_path / "b")
    assert (result["accuracy"], result["failed"]) == (2 / 3, 1)
    assert rows_of(tmp_path / "b/samples.jsonl")[1]["failed"] == "RecursionError: too deep"

    def broken(completions, examples):
        raise sandbox.SandboxError("sandbox: no answer")

    monkeypatch.setattr(countdown, "score_batch", broken)
    flags += ["--out", tmp_path / "c"]
    assert one_line(cli, *flags) == "sandbox: no answer"
    assert "n" not in json.loads((tmp_path / "c/result.json").read_text())


def test_macro_accuracy(tmp_path, cli):
    """Subjects count alike: 1 of 1 and 1 of 3 is 2/3; of all rows it is 2 of 4."""
    rows = [{"input": "x", "target": "yes", "task": task} for task in ("a", "b", "b", "b")]
    given = completions(tmp_path / "c.jsonl", ["So the answer is yes.", "no", "Yes", "so?\nso."])
    flags = ["--data", write(tmp_path / "rows.jsonl", rows), "--out", tmp_path / "out"]
    result = cli("--completions", given, *flags, task="bbh")
    assert (result["accuracy"], result["answered"]) == (0.5, 0.75)
    assert result["macro_accuracy"] == pytest.approx(2 / 3)


# --------------------------------------------------------------------------------------------------
# models


def test_a_model_is_evaluated(tmp_path, monkeypatch, fake, cli):
    flags = ["--model", "some/dir", "--limit", "10", "--seed", "5", "--temperature", "0.5"]
    flags += ["--rollout-backend", "block"]
    by_size = []
    for size in (4, 64):
        out = tmp_path / str(size)
        by_size.append(cli(*flags, "--batch-size", size, "--out", out))
        assert by_size[-1].pop("tokens_per_s") and by_size[-1]["settings"].pop("batch_size") == size
    assert by_size[0] == by_size[1] and timeless(out / "samples.jsonl")
    result, settings = by_size[0], by_size[0]["settings"]
    assert GoldEngine.calls == [(4, 0, 5), (4, 4, 5), (2, 8, 5), (10, 0, 5)]
    assert fake == {"model": "some/dir", "backend": "block", "device": "cpu", "max_batch_size": 64}
    want = {"n": 10, "accuracy": 0.6, "answered": 1.0, "truncated": 0.4}
    assert result.items() >= want.items()
    want = {"model": "some/dir", "seed": 5, "limit": 10, "denoising_steps": 2, "block_length": 4}
    assert settings.items() >= want.items() and settings["gen_length"] == 12
    for row, example in zip(
        rows_of(out / "samples.jsonl"), countdown.load("test", limit=10), strict=True
    ):
        assert row["prompt"] == countdown.prompt(example) and row["tokens"] <= 12
        assert row["truncated"] == (row["index"] % 3 == 0)
        assert row["completion"] == ("9" * 12 if row["truncated"] else countdown.answer(example))
    monkeypatch.setattr(GoldEngine, "refills", True)
    flags[3:8:2] = "19", "5", "1"  # limit, seed, temperature
    cli(*flags, "--batch-size", "4", "--repeats", "2", "--out", tmp_path / "refills")
    assert GoldEngine.calls[4:] == [(16, 0, 5), (3, 16, 5), (16, 0, 6), (3, 16, 6)]


def run_on_ranks(rank, world_size, flags, out):
    sys.argv = ["evals/run.py", *flags, "--batch-size", "2", "--out", str(out)]
    with pytest.raises(SystemExit):
        run.main()


def test_a_real_model_on_many_benchmarks(tmp_path, run_ranks):
    """As a user types it, with the data of one task missing; AIME is repeated. Then on two ranks in
    other batches.
    """
    aime = write(tmp_path / "a.jsonl", AIME)
    words = write(tmp_path / "w.jsonl", [row_of("gsm8k")] * 6)
    tasks, one, two = "countdown,gsm8k,aime24,aime25", tmp_path / "one", tmp_path / "two"
    flags = ["--model", "models/tiny-sdar", "--tasks", tasks, "--limit", "3", "--data"]
    flags += [f"gsm8k={words}", f"aime24={tmp_path}/none.jsonl", f"aime25={aime}", "--repeats", "2"]
    flags += ["--gen-length", "16", "--temperature", "1"]
    command = [sys.executable, "evals/run.py", *flags, "--out", str(one)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.endswith("1 of 4 tasks not evaluated: aime24\n")
    assert f"aime24 is not evaluated: --data {tmp_path}/none.jsonl: no such file" in done.stderr
    names = ["countdown", "gsm8k", "aime25"]
    everything = {name: json.loads((one / name / "result.json").read_text()) for name in names}
    table = (one / "table.md").read_text()
    assert done.stdout == f"{table}\ndirectory: {one}\n"
    assert len({len(row) for row in table.splitlines()[:5]}) == 1
    assert "| 3 x 2 |" in table and "\naime24: not evaluated: " in table
    flags[1] = str(ROOT / flags[1])
    run_ranks(2, run_on_ranks, flags, two)
    assert not list(two.glob("*/samples-*"))
    for name, result in everything.items():
        rows = rows_of(one / name / "samples.jsonl")
        repeats = 2 if name == "aime25" else 1
        assert result["n"] == 3 and len(rows) == 3 * repeats == 3 * result["settings"]["repeats"]
        tokens, forwards = (sum(row[key] for row in rows) for key in ("tokens", "forwards"))
        assert result["tokens_per_forward"] == tokens / forwards and result["tokens_per_s"] > 0
        want = {"gen_length": 16, "block_length": 4, "ranks": 1}
        want |= {"device": "cpu", "dtype": "float32"}
        assert result["settings"].items() >= want.items() and result["settings"]["weights"]
        assert timeless(two / name / "samples.jsonl") == timeless(one / name / "samples.jsonl")
        other = json.loads((two / name / "result.json").read_text())
        assert other["accuracy"] == result["accuracy"] and other["settings"]["ranks"] == 2


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shares_cover_every_example_once(ranks):
    done = {(0, 3), (0, 4), (1, 0), (1, 9)}
    calls = samples.shares(done, 10, 2, 4, ranks)
    asked = [(repeat, i) for repeat, first, end in calls for i in range(first, end)]
    assert sorted(asked) == sorted({(r, i) for r in range(2) for i in range(10)} - done)
    assert all(end - first <= 4 for _, first, end in calls) and len(calls) >= ranks
    assert len(samples.shares(set(), 30, 8, 256, 8)) == 8, "AIME: a repeat for each rank"


class Interrupted(Exception):
    pass


@contextmanager
def interrupted(monkeypatch):
    """The engine stops before its third batch of three."""
    generate = GoldEngine.generate

    def fails(self, prompt_ids, **settings):
        if settings["sample_offset"] == 6:
            raise Interrupted
        return generate(self, prompt_ids, **settings)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(GoldEngine, "generate", fails)
        yield


def test_an_interrupted_run_continues(tmp_path, monkeypatch, capsys, fake, cli, many):
    monkeypatch.chdir(tmp_path)
    flags = "--model m --tasks gsm8k,countdown --limit 10 --batch-size 3 --seed 5".split()
    flags += ["--data", f"gsm8k={tmp_path}/none.jsonl"]
    many_of = lambda *flags: one_line(many, *flags)  # gsm8k has no rows
    assert "1 of 2 tasks not evaluated: gsm8k" in many_of(*flags, "--out", "whole")
    whole, path = timeless("whole/countdown/samples.jsonl"), Path("cut/countdown/samples.jsonl")
    with interrupted(monkeypatch):
        many(*flags, "--out", "cut")
    assert timeless(path) == whole[:6], "what was generated is scored and kept"
    assert "--out cut is not empty: " in many_of(*flags, "--out", "cut")
    with open(path, "a") as file:
        file.write(json.dumps(whole[6])[:-20])  # a row that was being written
    # of another rank
    other = rows_of("whole/countdown/samples.jsonl")[8]
    (path.parent / "samples-1.jsonl").write_text(json.dumps(other) + "\n")
    GoldEngine.calls.clear()
    many_of("--resume", "cut")
    assert GoldEngine.calls == [(2, 6, 5), (1, 9, 5)] and timeless(path)[:8] == whole[:8]
    assert "countdown: 7 finished samples are kept" in capsys.readouterr().err
    assert not list(path.parent.glob("samples-*"))
    shown = Path("cut/table.md").read_text()
    assert shown.startswith("| task") and "| countdown | 10 |" in " ".join(shown.split())

    flags = "--model m --limit 10 --batch-size 3 --reward countdown_d1".split()
    with interrupted(monkeypatch):
        cli(*flags, "--out", tmp_path / "one")
    resume = lambda *flags: cli("--resume", tmp_path / "one", *flags)
    said = one_line(lambda: resume("--reward", ""))
    assert "reward 'countdown_d1', now ''" in said
    assert resume()["accuracy"] == 0.6
    said = one_line(lambda: cli("--resume", tmp_path / "one", task="sudoku"))
    assert "is no evaluation of sudoku" in said


def test_rows_of_a_parquet_file_may_have_dates_and_bytes():
    assert run.digest([{"when": date(2024, 5, 1), "image": b"x"}])


def test_a_resumed_run_refuses_other_settings(tmp_path, monkeypatch, fake, many):
    many("--model", "m", "--tasks", "countdown", "--limit", "4", "--out", tmp_path)
    before = (tmp_path / "result.json").read_text()
    resume = lambda *flags: one_line(many, "--resume", tmp_path, *flags)
    for flags, words in {
        "--temperature 0.5": "was begun with temperature 0.0, now 0.5; take the old value",
        "--model n": "model 'm', now 'n'",
        "--seed 1": "seed 0, now 1",
        "--limit 5": "limit 4, now 5",
        "--data cd3": "prompts_hash",
    }.items():
        assert words in resume(*flags.split())
    with monkeypatch.context() as patch:
        patch.setattr(run, "hash_of_evals", lambda task: "other")
        assert "evals_hash" in resume()
    with monkeypatch.context() as patch:
        load = countdown.load
        patch.setattr(countdown, "load", lambda *a: [e | {"gold": "x"} for e in load(*a)])
        assert "examples_hash" in resume()
    many("--resume", tmp_path)
    assert before == (tmp_path / "result.json").read_text()
    (tmp_path / "model.safetensors").write_text("new")
    model = vars(GoldEngine.model) | {"sources": (str(tmp_path), [])}
    monkeypatch.setattr(GoldEngine, "model", SimpleNamespace(**model))
    assert "weights '', now " in resume()


def test_directories(tmp_path, monkeypatch, capsys, fake, cli, many):
    """One evaluation at a time; nothing is overwritten; a wrong --model leaves no directory."""
    monkeypatch.chdir(tmp_path)
    path = completions(tmp_path / "c.jsonl", ["12"])
    monkeypatch.setattr(run.time, "strftime", lambda form: "20260102-030405")
    for _ in range(2):
        cli("--completions", path, "--limit", "1")
    names = [f"eval-countdown-c-20260102-030405{number}" for number in ("", "-2")]
    assert sorted(file.name for file in Path("runs").iterdir()) == names
    out = tmp_path / "runs" / names[0]
    assert "is not empty: name another one" in one_line(cli, "--completions", path, "--out", out)
    for flags in (["--out", tmp_path / "c.jsonl"], ["--out", tmp_path / "c.jsonl/x"]):
        said = one_line(cli, "--completions", path, *flags)
        assert "the directory cannot be created" in said

    said, generate = [], GoldEngine.generate

    def second(self, prompt_ids, **settings):
        said.append(one_line(many, "--resume", "both"))
        return generate(self, prompt_ids, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(GoldEngine, "generate", second)
        many(*"--model m --tasks countdown --limit 2 --out both".split())
    assert said == ["both: another evaluation works there; wait for its end, or take a new --out"]
    many("--resume", "both")

    def no_lock(file, how):
        raise OSError(37, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(atomic.fcntl, "flock", no_lock)
        many("--resume", "both")
    assert "no lock (No locks available)" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    for flags in ([], ["--out", "new"]):
        with pytest.raises(SystemExit):
            many("--model", "tiny-none", "--tasks", "countdown", *flags)
    assert not Path("new").exists() and len(list(Path("runs").iterdir())) == 2


def test_the_next_batch_is_generated_while_one_is_scored(tmp_path, monkeypatch, fake, cli):
    began, made, generate = threading.Event(), threading.Event(), GoldEngine.generate

    def waiting(self, prompt_ids, **settings):
        if settings["sample_offset"]:
            assert began.wait(20), "the first batch is not scored while the second is generated"
            made.set()
        return generate(self, prompt_ids, **settings)

    def score_batch(completions, examples):
        if completions != [TRIAL]:
            began.set()
            assert made.wait(20), "the engine waits for scores"
        return [*map(countdown.score, completions, examples)]

    monkeypatch.setattr(GoldEngine, "generate", waiting)
    monkeypatch.setattr(countdown, "score_batch", score_batch, raising=False)
    result = cli(*"--model m --limit 4 --batch-size 2 --out".split(), tmp_path)
    assert (result["n"], result["failed"]) == (4, 0)


def test_a_sampler_without_forwards_and_a_lost_sample(tmp_path, monkeypatch, fake, many):
    generate = GoldEngine.generate
    without = lambda self, *a, **k: replace(generate(self, *a, **k), num_forwards=None)
    monkeypatch.setattr(GoldEngine, "generate", without)
    monkeypatch.setattr(GoldEngine, "version", "0.18.0", raising=False)
    flags = "--model m --tasks countdown --limit 3 --out".split()
    many(*flags, tmp_path / "a")
    result = json.loads((tmp_path / "a/result.json").read_text())
    assert result["tokens_per_forward"] is None
    assert result["settings"]["engine"] == "GoldEngine 0.18.0"
    monkeypatch.setattr(samples, "shares", lambda *_: [(0, 0, 2)])
    said = one_line(many, *flags, tmp_path / "b")
    assert "has 2 of 3 samples of countdown: do all ranks see the same directory?" in said


REFUSED = {  # flags of evals/run.py
    "--model m": "give --model (or --completions) and --tasks",
    "--model m --tasks countdown,nothing": "unknown task 'nothing': use one of aime24",
    "--model m --tasks countdown,sudoku --data cd3": "--data cd3: give TASK=SOURCE",
    "--model m --tasks countdown --repeats 0": "--repeats 0 must be from 1",
    "--model m --tasks countdown --batch-size 0": "--batch-size 0 must be from 1",
    "--model m --tasks qa,countdown --data qa=no.csv countdown=no.csv": "none of qa, countdown",
    "--model tiny-sdar --tasks countdown,sudoku --gen-length 10": "none of countdown, sudoku",
}
ONE_REFUSED = {  # flags of evals/countdown.py
    "": "give either --model (generate and score) or --completions (only score)",
    "--model m --completions c": "give either --model",
    "--model m --reward cells": "no such reward; known: path.py:function, countdown_d1",
    "--model m --reward gsm8k_d1": "does not fit countdown",
    "--model m --data cd9": "presets: small, cd3, cd4",
    "--model m --limit 0": "--limit 0 must be from 1",
    "--completions none.jsonl": "none.jsonl: no such file",
    "--model tiny-llada --gen-length 10": "--gen-length 10 is no multiple of the block length 4",
    "--model tiny-llada --factor 0 --remasking low_confidence_factor": "--factor 0.0 must be",
    "--model tiny-llada --confidence-threshold 1.5": "--confidence-threshold 1.5",
}


def test_refusals(tmp_path, monkeypatch, capsys, cli, many):
    monkeypatch.chdir(tmp_path)
    for flags, words in REFUSED.items():
        assert words in one_line(many, *flags.split())
    assert "countdown is not evaluated: --data no.csv: no such" in capsys.readouterr().err
    for flags, words in ONE_REFUSED.items():
        assert words in one_line(cli, *flags.split())
    write(tmp_path / "empty.jsonl", [])
    flags = ["--model", "m", "--data", "empty.jsonl"]
    assert "empty.jsonl: no problems" in one_line(cli, *flags)
    flags = ["--model", "m", "--reward", "gsm8k_d1"]
    flags += ["--data", write(Path("w.jsonl"), [row_of("gsm8k")])]
    assert "--data d1 asks for" in one_line(lambda: cli(*flags, task="gsm8k"))


# --------------------------------------------------------------------------------------------------
# settings of published numbers


KEYS = "gen_length block_length denoising_steps cache temperature repeats remasking eos_policy"
PUBLISHED = """
llada-8b llada mmlu                 3 3 3 dual 0.0 1 low_confidence_static none
dir llada gsm8k                     256 8 8 prefix 0.0 1 low_confidence_static none
llada-8b llada math500              512 64 64 prefix 0.0 1 low_confidence_static none
llada-8b llada ceval                3 3 3 none 0.0 1 low_confidence_static none
llada-8b llada olympiad             2048 64 64 prefix 0.0 1 low_confidence_static none
llada-8b llada aime24               2048 64 64 dual 1.0 8 low_confidence_static none
llada-8b llada other                512 32 32 none 0.0 1 low_confidence_static none
llada-8b llada sudoku               256 32 16 none 0.0 1 low_confidence_static none
llada-1.5 llada gsm8k               256 16 16 none 0.0 1 low_confidence_static demote
llada-1.5 llada math500             1024 128 128 none 0.0 1 low_confidence_static demote
llada-1.5 llada humaneval           512 32 32 none 0.0 1 low_confidence_static demote
llada-1.5 llada mbpp                512 32 32 none 0.0 1 low_confidence_static demote
llada-1.5 llada gpqa                256 16 16 none 0.0 1 low_confidence_static none
x/llada-8b-base llada humaneval     256 256 256 none 0.0 1 low_confidence_static none
dream-7b Dream mbpp                 512 512 512 none 0.2 1 entropy none
sdar-8b sdar gsm8k                  4096 None 4 none 0.0 1 low_confidence_static none
sdar-8b sdar countdown compact      12 None 2 none 0.0 1 low_confidence_static none
m lladamoe gsm8k                    256 64 16 none 0.0 1 low_confidence_static none
m lladamoe aime24                   2048 64 2 none 1.0 8 low_confidence_static none
m llada2_moe gpqa                   128 None 32 none 0.0 1 low_confidence_dynamic none
"""


def test_settings_of_published_numbers():
    """The lengths, blocks, steps and rules of docs/evals.md."""
    for line in PUBLISHED.strip().splitlines():
        names, values = re.split(" {2,}", line)
        found = decoding.settings(*names.split())
        assert [str(found[key]) for key in KEYS.split()] == values.split(), line
    dream = decoding.settings("dream-7b", "Dream", "mbpp")
    assert (dream["schedule"], dream["top_p"]) == ("timesteps", 0.95)
    assert decoding.settings("m", "llada2_moe", "gpqa")["confidence_threshold"] == 0.95
    assert "no settings of a 'new' model" in one_line(decoding.settings, "m", "new", "gsm8k")


TINY = ["tiny-sdar", "tiny-llada", "tiny-llada-moe", "tiny-dream", "tiny-llada2"]


@pytest.mark.parametrize("model", TINY)
def test_every_setting_is_one_that_its_engine_accepts(model):
    engine = make_engine(model)
    model_type = architecture(engine.model.checkpoint_config)
    own_blocks = engine.model.attention == "block-causal"
    for name in [model_type, *(["llada-1.5", "llada-8b-base"] if model_type == "llada" else [])]:
        for task in decoding.SETTINGS[name]:
            sampling = decoding.settings(name, model_type, task)
            assert sampling.pop("repeats") and own_blocks == (sampling["block_length"] is None)
            engine.validate(**sampling)


@pytest.mark.parametrize(
    "flags",
    [
        "--schedule ascending --eos-policy eoser",
        "--schedule timesteps --remasking entropy --alg-temp 0.5 --eos-policy demote",
        "--remasking origin --cache dual --eos-policy suppress",
    ],
)
def test_sampler_options_reach_the_sampler(tmp_path, flags, cli):
    asked = dict(re.findall(r"--(\S+) ([^-]\S*)", flags))
    made = ["--model", "tiny-llada", "--limit", "2", "--out", tmp_path / "out", *flags.split()]
    settings = cli(*made)["settings"]
    assert {key: str(settings[key.replace("-", "_")]) for key in asked} == asked
