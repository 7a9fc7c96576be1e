"""evals/run.py: one engine for many benchmarks, ranks, a run that goes on, scores beside generation; and files of completions
with every kind of fault."""

import gzip
import json
import multiprocessing
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_evals
import test_math
from test_evals import SMALL, GoldEngine, cli, one_line, write
from test_math import ENDLESS

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench import scoring
from evals import TRIAL, countdown, decoding, load_task, math500, results, run, samples
from evals.sandbox import SandboxError
from rollout import make_engine

fake_services, quick_timeout = test_evals.fake_services, test_math.quick_timeout  # fixtures
WORDS = [
    {"question": f"What is {i} + 1?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(10)
]


def many(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["evals/run.py", *map(str, flags)])
    run.many()


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def tokens_of(folder):
    """What a run's samples say that does not depend on the machine's speed."""
    return {
        path.parent.name: [
            {k: v for k, v in row.items() if k != "seconds"} for row in rows_of(path)
        ]
        for path in sorted(Path(folder).glob("*/samples.jsonl"))
    }


# ---------------------------------------------------------------------------------------------------------------------
# many benchmarks


def test_a_real_model_on_three_benchmarks(tmp_path):
    """As a user types it, from a directory of a model and with one task's data missing."""
    words = write(tmp_path / "words.jsonl", WORDS)
    flags = [
        "--model",
        "models/tiny-sdar",
        "--tasks",
        "countdown,sudoku,gsm8k,aime24",
        "--limit",
        "6",
    ]
    flags += [
        "--data",
        f"gsm8k={words}",
        f"aime24={tmp_path}/none.jsonl",
        "--gen-length",
        "16",
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(
        [sys.executable, "evals/run.py", *flags], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.endswith("1 of 4 tasks not evaluated: aime24\n"), (
        done.stderr
    )
    assert f"aime24 is not evaluated: --data {tmp_path}/none.jsonl: no such file" in done.stderr
    everything = json.loads((tmp_path / "out/results.json").read_text())
    assert everything["model"] == "models/tiny-sdar" and list(everything["tasks"]) == [
        "countdown",
        "sudoku",
        "gsm8k",
    ]
    assert list(everything["not evaluated"]) == ["aime24"]
    for name, result in everything["tasks"].items():
        assert result == json.loads((tmp_path / f"out/{name}/result.json").read_text())
        assert result["n"] == 6 and len(rows_of(tmp_path / f"out/{name}/samples.jsonl")) == 6
        assert (
            0 < result["tokens_per_forward"] <= 4
            and result["tokens_per_s"] > 0
            and 0 <= result["truncated"] <= 1
        )
        rows = rows_of(tmp_path / f"out/{name}/samples.jsonl")
        tokens, forwards = sum(row["tokens"] for row in rows), sum(row["forwards"] for row in rows)
        assert result["tokens_per_forward"] == tokens / forwards and result["tokens"] == tokens / 6
        settings = result["settings"]
        known = {
            "model": "models/tiny-sdar",
            "engine": "BlockEngine",
            "device": "cpu",
            "dtype": "float32",
            "ranks": 1,
        }
        known |= {
            "gen_length": 16,
            "block_length": 4,
            "denoising_steps": 2,
            "temperature": 0.0,
            "cache": "none",
            "seed": 0,
        }
        known |= {
            "eos_policy": "none",
            "stop_at_eos": True,
            "eos_token_ids": [256],
            "limit": 6,
            "repeats": 1,
            "shots": 0,
        }
        assert (
            settings.items() >= known.items()
            and settings["torch"]
            and settings["weights"]
            and settings["prompts_hash"]
        )
        assert result["accuracy"] == sum(row["score"] for row in rows) / 6
    table = (tmp_path / "out/table.md").read_text()
    assert (
        done.stdout.startswith(table) and len({len(line) for line in table.splitlines()[:5]}) == 1
    )
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:5]] == [
        "countdown",
        "sudoku",
        "gsm8k",
    ]
    assert "\naime24: not evaluated: " in table


def run_on_ranks(rank, world_size, out, words):
    sys.argv = [
        "evals/run.py",
        "--model",
        "tiny-sdar",
        "--tasks",
        "countdown,gsm8k",
        "--data",
        f"gsm8k={words}",
    ]
    sys.argv += [
        "--limit",
        "10",
        "--temperature",
        "1",
        "--gen-length",
        "12",
        "--batch-size",
        "2",
        "--out",
        f"{out}/{world_size}",
    ]
    run.many()


def test_two_ranks_give_what_one_gives(tmp_path, run_ranks):
    words = write(tmp_path / "words.jsonl", WORDS)
    for ranks in (1, 2):
        run_ranks(ranks, run_on_ranks, str(tmp_path), words)
    one, two = (tokens_of(tmp_path / name) for name in "12")
    assert one == two and {name: len(rows) for name, rows in one.items()} == {
        "countdown": 10,
        "gsm8k": 10,
    }
    assert not list(tmp_path.glob("2/*/samples-*")), "put into one file"
    settings = [
        json.loads((tmp_path / name / "results.json").read_text())["tasks"]["gsm8k"]["settings"]
        for name in "12"
    ]
    assert [how.pop("ranks") for how in settings] == [1, 2] and settings[0] == settings[1]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shares_are_every_example_once(ranks):
    done = {(0, 3), (0, 4), (1, 0), (1, 9)}
    calls = samples.shares(done, 10, 2, most=4, ranks=ranks)
    asked = [(repeat, i) for repeat, first, end in calls for i in range(first, end)]
    assert sorted(asked) == sorted({(r, i) for r in range(2) for i in range(10)} - done) and len(
        asked
    ) == len(set(asked))
    assert all(end - first <= 4 for _, first, end in calls) and all(
        calls[rank::ranks] for rank in range(ranks)
    )
    assert samples.shares(done, 0, 1, 4, ranks) == []
    assert len(samples.shares(set(), 30, 8, most=256, ranks=8)) == 8, "AIME: a repeat for each rank"


def test_samples_that_no_rank_sees_are_missed(tmp_path, monkeypatch, fake_services):
    monkeypatch.setattr(
        samples, "shares", lambda *_: [(0, 0, 3)]
    )  # another rank writes where this one cannot read
    flags = ["--model", "m", "--tasks", "countdown", "--limit", "10", "--out", tmp_path]
    assert "countdown has 3 of 10 samples of countdown: do all ranks" in one_line(
        lambda: many(monkeypatch, *flags)
    )


def load_on_one_rank(rank, world_size, out):
    def load(split, path, limit):
        if rank:
            raise SystemExit("the hub is busy")
        return [{}]

    gsm8k = load_task("gsm8k")
    sys.argv = [
        "evals/run.py",
        "--model",
        "tiny-sdar",
        "--tasks",
        "countdown,gsm8k",
        "--limit",
        "2",
        "--out",
        out,
    ]
    gsm8k.load, said = load, ""
    try:
        run.many()
    except SystemExit as error:
        said = str(error)
    Path(f"{out}-{rank}").write_text(said)


def test_ranks_that_loaded_other_tasks_do_not_go_on(tmp_path, run_ranks):
    run_ranks(2, load_on_one_rank, str(tmp_path / "out"))
    assert [(tmp_path / f"out-{rank}").read_text() for rank in (0, 1)] == [
        "only some ranks could load gsm8k; start again",
        "1",
    ]
    assert not (tmp_path / "out").exists()


class Interrupted(Exception):
    pass


@contextmanager
def interrupted(monkeypatch):
    """The engine is stopped before its third batch of three."""
    answer = GoldEngine.generate

    def fails(self, prompt_ids, **settings):
        if settings["sample_offset"] == 6:
            raise Interrupted
        return answer(self, prompt_ids, **settings)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(GoldEngine, "generate", fails)
        yield patch


def test_a_run_goes_on_where_it_was_interrupted(tmp_path, monkeypatch, capsys, fake_services):
    flags = [
        "--model",
        "m",
        "--tasks",
        "countdown",
        "--limit",
        "10",
        "--batch-size",
        "3",
        "--seed",
        "5",
    ]
    many(monkeypatch, *flags, "--out", tmp_path / "whole")
    whole = tokens_of(tmp_path / "whole")["countdown"]

    with interrupted(monkeypatch) as patch:
        many(patch, *flags, "--out", tmp_path / "cut")
    path = tmp_path / "cut/countdown/samples.jsonl"
    assert len(rows_of(path)) == 6 and not (tmp_path / "cut/results.json").exists()
    # samples of a run that was cut are not those of another one
    message = one_line(lambda: many(monkeypatch, *flags[:-1], "6", "--out", tmp_path / "cut"))
    assert (
        "samples.jsonl and config.json would be overwritten; name another directory, go on with --resume"
        in message
    )
    with open(path, "a") as file:
        file.write(
            json.dumps(rows_of(path)[0] | {"index": 6})[:-20]
        )  # a row that was being written
    (path.parent / "samples-1.jsonl").write_text(
        json.dumps(rows_of(tmp_path / "whole/countdown/samples.jsonl")[8]) + "\n"
    )  # of another rank
    GoldEngine.calls.clear()
    capsys.readouterr()
    many(monkeypatch, "--resume", tmp_path / "cut")
    assert [(n, s["sample_offset"], s["seed"]) for n, s in GoldEngine.calls] == [
        (2, 6, 5),
        (1, 9, 5),
    ]
    assert "countdown: 7 finished samples are kept" in capsys.readouterr().err
    assert tokens_of(tmp_path / "cut")["countdown"] == whole and not list(
        path.parent.glob("samples-*")
    )
    one, two = [
        json.loads((tmp_path / name / "results.json").read_text())["tasks"]["countdown"]
        for name in ("whole", "cut")
    ]
    assert one.pop("tokens_per_s") and two.pop("tokens_per_s") and one == two
    # results of other tasks of the run stay when it goes on with one of them
    file = tmp_path / "cut/results.json"
    everything = json.loads(file.read_text())
    file.write_text(
        json.dumps(everything | {"tasks": {"sudoku": everything["tasks"]["countdown"]}})
    )
    many(monkeypatch, "--resume", tmp_path / "cut")
    assert list(json.loads(file.read_text())["tasks"]) == ["sudoku", "countdown"]
    # a finished run asks nothing
    GoldEngine.calls.clear()
    many(monkeypatch, "--resume", tmp_path / "cut", "--batch-size", "64")
    assert GoldEngine.calls == [] and tokens_of(tmp_path / "cut")["countdown"] == whole
    # a line that is damaged is named; without it that sample is made again
    path.write_text(path.read_text().replace('{"index": 3', '{"index" 3'))
    assert f"{path} line 4 is damaged; remove" in one_line(
        lambda: many(monkeypatch, "--resume", tmp_path / "cut")
    )
    path.write_text(
        "".join(line + "\n" for line in path.read_text().splitlines() if '"index" 3' not in line)
    )
    many(monkeypatch, "--resume", tmp_path / "cut")
    assert [(n, s["sample_offset"]) for n, s in GoldEngine.calls] == [(1, 3)] and tokens_of(
        tmp_path / "cut"
    )["countdown"] == whole


def test_a_resumed_run_refuses_other_settings(tmp_path, monkeypatch, fake_services):
    many(monkeypatch, "--model", "m", "--tasks", "countdown", "--limit", "4", "--out", tmp_path)
    before = {path: path.read_text() for path in tmp_path.glob("countdown/*")}
    resume = lambda *flags: one_line(lambda: many(monkeypatch, "--resume", tmp_path, *flags))
    assert "countdown was begun with temperature 0.0, now 0.5; take the old value" in resume(
        "--temperature", "0.5"
    )
    assert "model 'm', now 'n'" in resume("--model", "n") and "model 'm', now 'n'" in resume(
        "--model", "n", "--temperature", "0"
    )
    assert "seed 0, now 1" in resume("--seed", "1") and "limit 4, now 5" in resume("--limit", "5")
    assert "data '', now 'cd3'" in resume("--data", "countdown=cd3") and "prompts_hash" in resume(
        "--data", "countdown=cd3"
    )
    many(monkeypatch, "--resume", tmp_path)  # nothing of what was refused is remembered
    with monkeypatch.context() as patch:
        patch.setattr(run, "hash_of_evals", lambda: "other")  # a grader was changed meanwhile
        assert "evals_hash" in resume()
    with (
        monkeypatch.context() as patch
    ):  # the file was mended meanwhile: other answers to the same questions
        load = countdown.load
        patch.setattr(
            countdown,
            "load",
            lambda *given: [example | {"gold": "other"} for example in load(*given)],
        )
        assert "examples_hash" in resume() and "prompts_hash" not in resume()
    monkeypatch.setattr(
        GoldEngine,
        "model",
        SimpleNamespace(**vars(GoldEngine.model) | {"sources": (str(tmp_path), [])}),
    )
    (tmp_path / "model.safetensors").write_text("new")
    assert "weights '', now " in resume("--temperature", "0")
    assert before == {path: path.read_text() for path in tmp_path.glob("countdown/*")}
    (tmp_path / "countdown/config.json").write_text(
        '{"script": "d1", "args": {}}'
    )  # of a training run
    for place in ("countdown", "sudoku"):
        assert "no directory of evals/run.py" in one_line(
            lambda place=place: many(monkeypatch, "--resume", tmp_path / place)
        )


def test_one_task_alone_goes_on_too(tmp_path, monkeypatch, capsys, fake_services):
    out, flags = (
        tmp_path / "cut",
        ["--model", "m", "--limit", "10", "--batch-size", "3", "--reward", "countdown_partial"],
    )
    whole = cli(monkeypatch, capsys, *flags, "--out", str(tmp_path / "whole"))
    with interrupted(monkeypatch) as patch:
        cli(patch, capsys, *flags, "--out", str(out))
    assert len(rows_of(out / "samples.jsonl")) == 6
    resume = lambda *flags: cli(monkeypatch, capsys, "--resume", str(out), *flags)
    assert "reward 'countdown_partial', now 'countdown_d1'" in one_line(
        lambda: resume("--reward", "countdown_d1")
    )
    assert "model 'm', now 'n'" in one_line(lambda: resume("--model", "n"))
    assert "is no directory of evals/run.py" in one_line(lambda: many(monkeypatch, "--resume", out))
    GoldEngine.calls.clear()
    again = resume()
    assert [(n, s["sample_offset"]) for n, s in GoldEngine.calls] == [(3, 6), (1, 9)]
    assert whole.pop("tokens_per_s") and again.pop("tokens_per_s") and again == whole
    scored = [
        "--completions",
        str(out / "samples.jsonl"),
        "--limit",
        "10",
        "--out",
        str(tmp_path / "scored"),
    ]
    assert cli(monkeypatch, capsys, *scored)["accuracy"] == whole["accuracy"]
    out = tmp_path / "scored"
    assert "score again, with a new --out" in one_line(resume)


def test_a_wrong_model_leaves_no_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for flags in ([], ["--out", "mine"]):
        with pytest.raises(SystemExit):
            many(monkeypatch, "--model", "tiny-none", "--tasks", "countdown", *flags)
        with pytest.raises(SystemExit):
            cli(monkeypatch, capsys, "--model", "tiny-none", *flags)
    assert not list(tmp_path.iterdir())


def test_two_evaluations_at_once_in_one_directory_are_refused(tmp_path, monkeypatch, fake_services):
    """A second --resume while the engine of the first answers; a run that was killed holds nothing."""
    said, answer = [], GoldEngine.generate

    def generate(self, prompt_ids, **settings):
        said.append(one_line(lambda: many(monkeypatch, "--resume", tmp_path)))
        return answer(self, prompt_ids, **settings)

    flags = ["--model", "m", "--tasks", "countdown", "--limit", "4", "--batch-size", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(GoldEngine, "generate", generate)
        many(patch, *flags, "--out", tmp_path)
    assert (
        said
        == [f"{tmp_path}: another evaluation works there; wait for its end, or take a new --out"]
        * 2
    )
    assert [row["index"] for row in rows_of(tmp_path / "countdown/samples.jsonl")] == [0, 1, 2, 3]

    def hold(ready):
        with results.directory(SimpleNamespace(resume=str(tmp_path)), "run", ""):
            ready.set()
            signal.pause()

    context = multiprocessing.get_context("fork")
    holder = context.Process(target=hold, args=(ready := context.Event(),))
    holder.start()
    try:
        assert ready.wait(60)
        assert "another evaluation works there" in one_line(
            lambda: many(monkeypatch, "--resume", tmp_path)
        )
    finally:
        holder.kill()
        holder.join()
    many(monkeypatch, "--resume", tmp_path)


def test_where_there_are_no_locks_that_is_said(tmp_path, monkeypatch, capsys, fake_services):
    def flock(file, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(results.fcntl, "flock", flock)
    many(monkeypatch, "--model", "m", "--tasks", "countdown", "--limit", "2", "--out", tmp_path)
    assert (
        f"{tmp_path}: no lock (No locks available): start no second evaluation there\n"
        in capsys.readouterr().err
    )


def test_the_hash_of_the_code_that_asks_and_scores(tmp_path, monkeypatch):
    (tmp_path / "gsm8k.py").write_text("a")
    (tmp_path / "samples.jsonl").write_text("a")
    monkeypatch.setattr(run, "__file__", str(tmp_path / "run.py"))
    before = run.hash_of_evals()
    (tmp_path / "samples.jsonl").write_text("b")
    assert run.hash_of_evals() == before
    (tmp_path / "gsm8k.py").write_text("b")
    assert run.hash_of_evals() != before


def test_flags_of_many(tmp_path, monkeypatch, capsys, fake_services):
    message = lambda *flags: one_line(lambda: many(monkeypatch, *flags))
    assert "give --model and --tasks" in message("--model", "m")
    assert "unknown task 'nothing': use one of aime24" in message(
        "--model", "m", "--tasks", "countdown,nothing"
    )
    assert "--data cd3: give TASK=SOURCE" in message(
        "--model", "m", "--tasks", "countdown", "--data", "cd3"
    )
    assert "--data sudoku=x: give" in message(
        "--model", "m", "--tasks", "countdown", "--data", "sudoku=x"
    )
    assert "--repeats 0 must be at least 1" in message(
        "--model", "m", "--tasks", "countdown", "--repeats", "0"
    )
    out = ["--out", tmp_path / "out"]
    assert message("--model", "m", "--tasks", "countdown", "--data", "countdown=no.csv", *out) == (
        "none of countdown can be evaluated"
    )
    assert (
        "countdown is not evaluated: --data no.csv: no such preset or file"
        in capsys.readouterr().err
    )
    many(monkeypatch, "--model", "m", "--tasks", "countdown", "--limit", "2", *out)
    monkeypatch.setattr(countdown, "load", None)  # nothing is loaded before --out is looked at
    assert "results.json would be overwritten" in message(
        "--model", "m", "--tasks", "countdown", "--limit", "2", *out
    )


def test_a_reward_for_another_prompt_is_refused_before_a_model_is_loaded(
    tmp_path, monkeypatch, capsys, fake_services
):
    words = write(tmp_path / "words.jsonl", WORDS)
    flags = ["--model", "m", "--data", words, "--reward", "gsm8k_d1", "--out", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", ["evals/gsm8k.py", *map(str, flags)])
    assert "gsm8k_d1 pays for a layout that only the prompt of --data d1" in one_line(
        lambda: run.main("gsm8k")
    )
    assert not fake_services and not (tmp_path / "out").exists()


def test_missing_hub_data_names_the_id_and_the_alternative(
    tmp_path, monkeypatch, capsys, fake_services
):
    import datasets

    def offline(*_, **__):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    flags = [
        "--model",
        "m",
        "--tasks",
        "gsm8k,countdown,mmlu_pro",
        "--limit",
        "3",
        "--out",
        tmp_path,
    ]
    assert (
        one_line(lambda: many(monkeypatch, *flags)) == "2 of 3 tasks not evaluated: gsm8k, mmlu_pro"
    )
    shown = capsys.readouterr()
    for name, hub in (("gsm8k", "openai/gsm8k"), ("mmlu_pro", "TIGER-Lab/MMLU-Pro")):
        line = f"--data {hub}: no file, and the hub says: Couldn't reach the Hub (--data {name}=FILE reads a copy)"
        assert (
            f"{name} is not evaluated: {line}\n" in shown.err
            and f"{name}: not evaluated: {line}" in shown.out
        )
    assert json.loads((tmp_path / "results.json").read_text())["tasks"]["countdown"]["n"] == 3


def test_an_engine_that_does_not_tell_its_forwards(tmp_path, monkeypatch, fake_services):
    """As lmdeploy's, whose version is named."""
    answer = GoldEngine.generate

    def generate(self, prompt_ids, **settings):
        trace = answer(self, prompt_ids, **settings)
        trace.num_forwards = None
        return trace

    monkeypatch.setattr(GoldEngine, "generate", generate)
    monkeypatch.setattr(GoldEngine, "version", "0.18.0", raising=False)
    many(monkeypatch, "--model", "m", "--tasks", "countdown", "--limit", "3", "--out", tmp_path)
    result = json.loads((tmp_path / "results.json").read_text())["tasks"]["countdown"]
    assert result["tokens_per_forward"] is None and result["tokens_per_s"] > 0
    assert result["settings"]["engine"] == "lmdeploy 0.18.0"
    assert [
        cell.strip() for cell in (tmp_path / "table.md").read_text().splitlines()[2].split("|")
    ][7] == ""


def test_a_setting_that_one_task_cannot_take_costs_that_task(tmp_path, monkeypatch, capsys):
    problems = write(tmp_path / "aime.jsonl", [{"problem": "Is it 1?", "answer": "1"}])
    flags = [
        "--model",
        "tiny-sdar",
        "--tasks",
        "aime24,countdown",
        "--data",
        f"aime24={problems}",
        "--limit",
        "1",
    ]
    flags += ["--repeats", "2", "--out", tmp_path / "out"]  # without a draw
    assert one_line(lambda: many(monkeypatch, *flags)) == "1 of 2 tasks not evaluated: aime24"
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert (
        list(results["tasks"]) == ["countdown"]
        and "without a draw" in results["not evaluated"]["aime24"]
    )
    flags = [
        "--model",
        "tiny-sdar",
        "--tasks",
        "countdown",
        "--limit",
        "1",
        "--gen-length",
        "10",
        "--out",
        tmp_path / "none",
    ]
    assert one_line(lambda: many(monkeypatch, *flags)) == "1 of 1 tasks not evaluated: countdown"
    assert "no multiple of the block length 4" in (tmp_path / "none/table.md").read_text()


def test_repeats_of_many_are_for_aime(tmp_path, monkeypatch):
    problems = write(
        tmp_path / "aime.jsonl", [{"problem": f"Is it {i}?", "answer": str(i)} for i in range(3)]
    )
    flags = [
        "--model",
        "tiny-sdar",
        "--tasks",
        "countdown,aime24",
        "--data",
        f"aime24={problems}",
        "--limit",
        "3",
    ]
    many(
        monkeypatch,
        *flags,
        "--temperature",
        "1",
        "--repeats",
        "2",
        "--gen-length",
        "8",
        "--out",
        tmp_path / "out",
    )
    results = json.loads((tmp_path / "out/results.json").read_text())["tasks"]
    assert [results[name]["settings"]["repeats"] for name in ("countdown", "aime24")] == [1, 2]
    assert results["aime24"]["n"] == 3 and len(results["aime24"]["accuracies"]) == 2
    assert (
        len(rows_of(tmp_path / "out/aime24/samples.jsonl")) == 6
        and "| 3 x 2 |" in (tmp_path / "out/table.md").read_text()
    )


# ---------------------------------------------------------------------------------------------------------------------
# scores beside generation


def test_the_next_batch_is_made_while_one_is_scored(tmp_path, monkeypatch, capsys, fake_services):
    """The second batch waits for the scorer of the first to begin, and that scorer for the second batch to be made."""
    began, made, waited, answer = threading.Event(), threading.Event(), [], GoldEngine.generate

    def wait(event, what):
        if not event.wait(20):
            waited.append(what)
            event.set()

    def generate(self, prompt_ids, **settings):
        if settings["sample_offset"]:
            wait(began, "the first batch is not scored while the second is made")
            made.set()
        return answer(self, prompt_ids, **settings)

    def score_batch(completions, examples):
        if completions != [TRIAL]:  # which is asked before anything is made
            began.set()
            wait(made, "the engine waits for scores")
        return list(map(countdown.score, completions, examples))

    monkeypatch.setattr(GoldEngine, "generate", generate)
    monkeypatch.setattr(countdown, "score_batch", score_batch, raising=False)
    result = cli(
        monkeypatch,
        capsys,
        "--model",
        "m",
        "--limit",
        "4",
        "--batch-size",
        "2",
        "--out",
        str(tmp_path),
    )
    assert (result["n"], result["failed"], waited) == (4, 0, [])


def test_what_was_made_is_scored_and_kept_when_the_engine_fails(
    tmp_path, monkeypatch, fake_services
):
    def batches():
        yield [{"index": i, "completion": countdown.answer(SMALL)} for i in (0, 1)]
        raise Interrupted

    bar = SimpleNamespace(update=lambda n: None)
    with pytest.raises(Interrupted):
        samples.write_scored(
            tmp_path / "samples.jsonl", batches(), countdown, [SMALL] * 2, None, bar
        )
    assert [row["score"] for row in rows_of(tmp_path / "samples.jsonl")] == [1.0, 1.0]


# ---------------------------------------------------------------------------------------------------------------------
# files of completions

GOOD = [
    json.dumps({"index": i, "completion": countdown.answer(row)})
    for i, row in enumerate(countdown.load("test", limit=6))
]
FAULTS = {  # a line of the file -> what is said of it
    '{"index": 0, "completion": "1"}': "index 0 stands already in line 1",
    '{"index": 6, "completion": "1"}': "index 6 is outside 0..5; check --data and --split",
    '{"index": -1, "completion": "1"}': "index -1 is outside 0..5",
    '{"index": 1e400, "completion": "1"}': 'needs {"index": integer, "completion": text}',
    '{"index": 5, "completion": "1"': "not JSON (Expecting ',' delimiter)",
    '{"index": 5, "completion": "a\0b"}': "not JSON (Invalid control character at)",
    "\0": "not JSON (Expecting value)",
    "[" * 100_000: "not JSON (RecursionError)",
    '{"index": ' + "9" * 5000 + ', "completion": "1"}': "not JSON (ValueError)",
    '{"index": 5, "completion": ' + '{"a":' * 100_000: "not JSON (RecursionError)",
    "null": "a JSON object is needed, not NoneType",
}


@pytest.mark.parametrize("line", FAULTS, ids=lambda line: ascii(line[:40]))
def test_a_line_that_cannot_be_used_is_counted_and_named(tmp_path, monkeypatch, capsys, line):
    path, problem = tmp_path / "c.jsonl", FAULTS[line]
    path.write_bytes("\n".join([GOOD[0], "", line, *GOOD[1:4]]).encode())
    monkeypatch.setattr(
        sys, "argv", f"x --completions {path} --limit 6 --out {tmp_path / 'out'}".split()
    )
    run.main("countdown")
    shown = capsys.readouterr()
    result = json.loads(shown.out.splitlines()[-1])
    assert (result["n"], result["accuracy"], result["unused"], result["missing"]) == (4, 1.0, 1, 2)
    assert f"{path}: 1 rows not used: line 3: {problem}" in shown.err
    assert f"{path}: 2 problems without a completion, not in the mean: index: 4; 5\n" in shown.err
    if "stands already" not in problem:  # with no other line there is nothing to score
        path.write_text(line)
        assert problem in one_line(
            lambda: cli(monkeypatch, capsys, "--completions", str(path), "--limit", "6")
        )


def test_many_faults_are_counted_and_the_first_are_named(tmp_path, capsys):
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(
        gzip.compress(b"\xef\xbb\xbf" + GOOD[0].encode() + b"\n\xff\xfe\n" + b"{\n" * 200)
    )
    rows, faults, missing = samples.given(str(path), 6)
    assert (
        len(rows) == 1
        and len(faults) == 201
        and missing == ["1", "2", "3", "4", "5"]
        and faults[0] == "line 2: not UTF-8"
    )
    samples.name_faults("c", faults, "rows not used")
    shown = capsys.readouterr().err
    assert (
        shown.startswith("c: 201 rows not used: line 2: not UTF-8; line 3: not JSON")
        and shown.count("line ") == 20
    )
    assert shown.endswith("; and 181 more\n")
    path.write_bytes(gzip.compress("\n".join(GOOD * 9000).encode())[:-5000])  # cut off
    rows, faults, _ = samples.given(str(path), 6)
    assert (
        len(rows) == 6
        and "stands already" in faults[0]
        and faults[-1].startswith("the rest cannot be read (Compressed file")
    )
    path.write_bytes(b"no gzip")
    assert "the rest cannot be read (Not a gzipped file" in one_line(
        lambda: samples.given(str(path), 6)
    )
    path.write_bytes(gzip.compress(b"{\n" * 50))
    assert one_line(lambda: samples.given(str(path), 6)).count("line ") == 20


MEGABYTE = [
    "x" * 10**6,
    "{" * 10**6,
    "\0" * 10**6,
    r"\boxed{" * 50_000,
    "(" * 10**6,
    "[" * 10**5 + "]" * 10**5,
]


@pytest.mark.parametrize("name", ["countdown", "gsm8k", "math500", "humaneval"])
def test_long_nested_and_null_answers_are_wrong_and_all_are_scored(
    tmp_path, monkeypatch, capsys, name
):
    from test_properties import CASES

    example, right, _ = CASES[name]
    monkeypatch.setattr(load_task(name), "load", lambda *_: [example] * 8)
    path = write(
        tmp_path / "c.jsonl",
        [{"index": i, "completion": text} for i, text in enumerate([right, *MEGABYTE, right])],
    )
    result = cli(
        monkeypatch, capsys, "--completions", path, "--out", str(tmp_path / "out"), task=name
    )
    assert (
        result["n"],
        result["accuracy"],
        result["missing"],
        result["unused"],
        result["failed"],
    ) == (8, 0.25, 0, 0, 0)
    assert [row["score"] for row in rows_of(tmp_path / "out/samples.jsonl")] == [
        1.0,
        *[0.0] * 6,
        1.0,
    ]


def test_a_completion_that_kills_the_grader_is_counted_and_named(
    tmp_path, monkeypatch, capsys, quick_timeout
):
    data = write(tmp_path / "rows.jsonl", [{"problem": "?", "answer": "5"}] * 4)
    texts = [
        r"\boxed{\sqrt{25}}",
        rf"\boxed{{{ENDLESS}}}",
        r"\boxed{5}",
        rf"so \boxed{{{ENDLESS}}}",
    ]
    path = write(
        tmp_path / "c.jsonl", [{"index": i, "completion": text} for i, text in enumerate(texts)]
    )
    monkeypatch.setattr(
        sys, "argv", f"x --completions {path} --data {data} --out {tmp_path / 'out'}".split()
    )
    run.main("math500")
    shown = capsys.readouterr()
    result = json.loads(shown.out.splitlines()[-1])
    assert (result["n"], result["accuracy"], result["failed"]) == (4, 0.5, 2)
    why = "the math grader gave no verdict"
    assert f"math500: 2 without a verdict, scored 0: index 1: {why}; index 3: {why}\n" in shown.err
    assert [row.get("failed") for row in rows_of(tmp_path / "out/samples.jsonl")] == [
        None,
        why,
        None,
        why,
    ]


def test_a_scorer_that_raises_costs_that_completion_alone(
    tmp_path, monkeypatch, capsys, fake_services
):
    def score_batch(completions, examples):
        if "kill" in completions:
            raise RecursionError("too deep")
        return list(map(countdown.score, completions, examples))

    monkeypatch.setattr(countdown, "score_batch", score_batch, raising=False)
    path = write(
        tmp_path / "c.jsonl", [*map(json.loads, GOOD[:3]), {"index": 3, "completion": "kill"}]
    )
    flags = ["--completions", path, "--limit", "4", "--out", str(tmp_path / "out")]
    result = cli(monkeypatch, capsys, *flags, "--reward", "countdown_partial")
    assert (result["n"], result["accuracy"], result["failed"]) == (4, 0.75, 1)
    assert rows_of(tmp_path / "out/samples.jsonl")[3]["failed"] == "RecursionError: too deep"

    def broken(completions, examples):
        raise SandboxError("sandbox: no answer from its supervisor")

    monkeypatch.setattr(countdown, "score_batch", broken)
    message = one_line(lambda: cli(monkeypatch, capsys, *flags[:-1], str(tmp_path / "out2")))
    assert message == "sandbox: no answer from its supervisor", "it says nothing about a completion"
    assert (
        not rows_of(tmp_path / "out2/samples.jsonl")
        and not (tmp_path / "out2/result.json").exists()
    )
    GoldEngine.calls.clear()
    flags = ["--model", "m", "--limit", "4", "--out", str(tmp_path / "out3")]
    assert one_line(lambda: cli(monkeypatch, capsys, *flags)) == message and not GoldEngine.calls, (
        "before the engine works"
    )


def test_a_grader_that_dies_is_no_crash(monkeypatch, quick_timeout):
    """Killed in the middle of a question, as the kernel does where memory ends."""
    from evals import math_grader

    ask = math_grader.Worker.ask

    def dies(self, answer, *rest):
        if answer == "x+x":
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        return ask(self, answer, *rest)

    monkeypatch.setattr(math_grader, "NO_VERDICT", set())
    monkeypatch.setattr(math_grader.Worker, "ask", dies)
    texts = [r"\boxed{x+x}", r"\boxed{x+x+3}", r"\boxed{x+x}"]  # the second is wrong, and judged
    rows = [{"index": i, "completion": text} for i, text in enumerate(texts)]
    rows = samples.scored(
        math500, rows, [{"question": "?", "gold": gold} for gold in ("2x", "2x", "2x+0")]
    )
    why = "the math grader gave no verdict"
    assert [row["score"] for row in rows] == [0.0] * 3 and [row.get("failed") for row in rows] == [
        why,
        None,
        why,
    ]


# ---------------------------------------------------------------------------------------------------------------------
# the settings of published numbers


def test_settings_of_published_numbers():
    """evals.md's list of DARE's settings, in tokens, block and steps of a block."""
    shape = lambda *key: [
        decoding.settings(*key)[name] for name in ("gen_length", "block_length", "denoising_steps")
    ]
    assert shape("llada-8b", "llada", "mmlu") == [3, 3, 3] and shape("dir", "llada", "gsm8k") == [
        256,
        8,
        8,
    ]
    assert shape("llada-8b", "llada", "math500") == [512, 64, 64] and shape(
        "llada-1.5", "llada", "math500"
    ) == [1024, 128, 128]
    assert shape("x/llada-8b-base", "llada", "humaneval") == [256, 256, 256] and shape(
        "m", "llada", "mbpp"
    ) == [512, 32, 32]
    caches = {
        task: decoding.settings("llada-8b", "llada", task)["cache"]
        for task in decoding.LLADA
        if task != "*"
    }
    assert {task for task, cache in caches.items() if cache == "dual"} == {
        "mmlu",
        "mmlu_pro",
        "aime24",
    }
    assert {task for task, cache in caches.items() if cache == "none"} == {
        "ceval",
        "countdown",
        "sudoku",
    }
    demoted = [
        task
        for task in decoding.LLADA_15
        if decoding.settings("llada-1.5", "llada", task)["eos_policy"] == "demote"
    ]
    assert sorted(demoted) == ["gsm8k", "humaneval", "math500", "mbpp"]
    aime = decoding.settings("llada-8b", "llada", "aime24")
    assert (aime["gen_length"], aime["temperature"], aime["repeats"]) == (2048, 1.0, 8)
    dream = decoding.settings("dream-7b", "Dream", "mbpp")
    assert (
        shape("dream-7b", "Dream", "mbpp") == [512, 512, 512] and dream["schedule"] == "timesteps"
    )
    assert (dream["remasking"], dream["temperature"], dream["top_p"]) == ("entropy", 0.2, 0.95)
    assert shape("sdar-8b", "sdar", "gsm8k") == shape("m", "sdar_moe", "ceval") == [4096, None, 4]
    mini = decoding.settings("llada2-mini", "llada2_moe", "gpqa")
    assert (mini["gen_length"], mini["denoising_steps"], mini["confidence_threshold"]) == (
        128,
        32,
        0.95,
    )
    for model in ("sdar-8b", "llada-8b"):
        assert decoding.settings(model, "sdar", "countdown", "compact")["gen_length"] == 12
        assert decoding.settings(model, "sdar", "countdown", "tags")["gen_length"] > 12
    assert "no settings of a 'new' model" in one_line(
        lambda: decoding.settings("m", "new", "gsm8k")
    )


@pytest.mark.parametrize("model", ["tiny-sdar", "tiny-llada", "tiny-dream", "tiny-llada2"])
def test_every_setting_is_one_that_its_engine_takes(model):
    engine, taken = make_engine(model), 0
    model_type = engine.model.checkpoint_config["model_type"]
    names = [model_type] + (["llada-1.5", "llada-8b-base"] if model_type == "llada" else [])
    own_blocks = engine.model.attention == "block-causal"
    for name in names:
        for task in decoding.SETTINGS[name]:
            sampling = decoding.settings(name, model_type, task)
            sampling.pop("repeats")
            assert own_blocks == (sampling["block_length"] is None)
            engine.plan(**sampling)
            if (
                taken < 4 or sampling["gen_length"] <= 3
            ):  # all that generate checks, on a short answer
                n = engine.block_length(None) if own_blocks else 8
                short = {"gen_length": n, "denoising_steps": n} | (
                    {} if own_blocks else {"block_length": n}
                )
                trace = engine.generate([[1, 2, 3]], **sampling | short)
                assert trace.settings["remasking"] == sampling["remasking"]
                taken += 1


def test_bench_of_scoring(tmp_path, capsys):
    """Gold answers through the command line and in its own process."""
    scoring.main(scoring.Args(data=write(tmp_path / "words.jsonl", WORDS)))
    line = json.loads(capsys.readouterr().out)
    assert (
        (line["completions"], line["right"]) == (10, 10)
        and line["seconds"] > 0
        and len(line["load"]) == 2
    )
