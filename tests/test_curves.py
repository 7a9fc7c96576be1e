"""The comparison of methods: what bench/curves.py runs and chooses, and what docs/plot.py makes of it."""

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Lock
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from bench import train as bench_train
from evals import load_task

ROOT = Path(__file__).parents[1]


def module(path):
    spec = importlib.util.spec_from_file_location(f"of_{Path(path).stem}", ROOT / path)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


curves, plot = module("bench/curves.py"), module("docs/plot.py")


@pytest.fixture
def comparison(tmp_path):
    args = curves.Args(out=str(tmp_path), methods=("d1", "mdpo"), rates=(1e-4, 3e-4, 1e-3))
    return curves.Curves(args, torch.device("cpu"))


def finished(comparison, run, validation, test=(0.2, 0.3)):
    """Files of a run that has come to its end with these scores."""
    folder = comparison.folder(run) / "some-run"
    folder.mkdir(parents=True)
    rows = [{"step": 0, f"test/{run.task}": test[0]}]
    rows += [
        {"step": 10 + i, f"eval/{run.task}": score, "reward/mean": 0.5}
        for i, score in enumerate(validation)
    ]
    rows += [{"step": 80, f"test/{run.task}": test[1]}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def tries(comparison, family, method, scores, test=0.3):
    for rate, score in scores.items():
        run = curves.Run(family, method, "countdown", curves.RATE_SEED, rate, "rates")
        finished(comparison, run, [0.9, score], (0.2, test))


def test_the_rate_with_the_best_last_validation_score_is_taken(comparison):
    tries(comparison, "llada", "d1", {1e-4: 0.3, 3e-4: 0.4, 1e-3: 0.1})
    tries(comparison, "llada", "mdpo", {1e-4: 0.3, 3e-4: 0.2})  # one rate is still to be tried
    assert {(run.method, run.seed, run.rate) for run in comparison.planned()} == {
        ("d1", seed, 3e-4) for seed in (0, 1, 2)
    }


def test_the_test_score_chooses_nothing(comparison):
    tries(comparison, "llada", "d1", {1e-4: 0.3, 3e-4: 0.4})
    tries(comparison, "llada", "d1", {1e-3: 0.1}, test=1.0)
    assert {run.rate for run in comparison.planned()} == {3e-4}


def test_a_rate_that_failed_is_a_bad_rate(comparison, monkeypatch):
    tries(comparison, "llada", "d1", {1e-4: 0.0, 3e-4: 0.01})
    run = curves.Run("llada", "d1", "countdown", curves.RATE_SEED, 1e-3, "rates")
    monkeypatch.setattr(
        comparison, "call", lambda *a: comparison.folder(run).mkdir(parents=True) or "not finite"
    )
    comparison.train(run)
    assert comparison.tried("llada", "d1")[1e-3] == -1 and {
        run.rate for run in comparison.planned()
    } == {3e-4}
    seed = comparison.planned()[0]
    monkeypatch.setattr(comparison, "call", lambda *a: "not finite")
    with pytest.raises(SystemExit, match="not finite"):
        comparison.train(seed)


def test_finished_runs_are_left_out_and_broken_ones_are_not(comparison, monkeypatch):
    called = []
    monkeypatch.setattr(comparison, "call", lambda method, *a: called.append(method) or "")
    done, broken = (curves.Run("llada", "d1", "countdown", seed, 1e-4) for seed in (0, 1))
    finished(comparison, done, [0.3])
    finished(comparison, broken, [0.3])
    file = next(comparison.folder(broken).glob("*/metrics.jsonl"))
    file.write_text(
        "".join(file.read_text().splitlines(keepends=True)[:-1])
    )  # killed before the last score
    comparison.train(done)
    assert not called
    comparison.train(broken)
    assert called == ["d1"]


def test_other_settings_are_refused_in_the_same_directory(comparison, tmp_path):
    other = curves.Args(out=str(tmp_path), rates=(1e-4,))
    with pytest.raises(SystemExit, match="take another --out"):
        curves.Curves(other, torch.device("cpu"))


@pytest.mark.parametrize("method", curves.METHODS)
def test_every_flag_is_one_of_the_script(method, tmp_path, monkeypatch):
    tree = ast.parse((ROOT / f"algos/{method}.py").read_text())
    args = next(
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"
    )
    known = {node.target.id for node in args.body if isinstance(node, ast.AnnAssign)}
    comparison = curves.Curves(
        curves.Args(out=str(tmp_path), size="small", passes=6), torch.device("cpu")
    )
    given = {}
    monkeypatch.setattr(
        comparison, "call", lambda script, folder, flags, threads: given.update(flags) or ""
    )
    for family, stage in (("llada", "runs"), ("sdar", "time")):
        comparison.train(curves.Run(family, method, "sudoku", 0, 1e-4, stage))
    assert given.keys() <= known and given["gen_length"] == 16 and given["eval_limit"] == 0


def test_tries_of_a_rate_may_be_shorter(tmp_path, monkeypatch):
    comparison = curves.Curves(
        curves.Args(out=str(tmp_path), max_steps=40, rate_steps=20), torch.device("cpu")
    )
    steps = []
    monkeypatch.setattr(
        comparison,
        "call",
        lambda script, folder, flags, threads: steps.append(flags["max_steps"]) or "",
    )
    for stage in ("rates", "runs", "time"):
        comparison.train(curves.Run("llada", "d1", "countdown", 0, 1e-4, stage))
    assert steps == [20, 40, curves.TIMED_STEPS]


def test_runs_are_dealt_out_over_the_gpus(comparison, monkeypatch):
    """Never more on one than its share, also when some end before others; only one each while times are taken."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    lock, here, most = Lock(), {"5": 0, "7": 0}, {}

    def fake(command, env, **_):
        gpu = env["CUDA_VISIBLE_DEVICES"]
        with lock:
            here[gpu] += 1
            most[gpu] = max(most.get(gpu, 0), here[gpu])
        time.sleep(0.002 * (command[-1] == "0"))  # some last longer
        with lock:
            here[gpu] -= 1
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", fake)
    for jobs, share in ((6, 3), (2, 1)):
        most.clear()
        work = lambda i: comparison.call("d1", comparison.root / f"run{i}", {"seed": i % 3}, 1)
        comparison.at_once(work, range(60), jobs)
        assert most.keys() == {"5", "7"} and max(most.values()) <= share
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert curves.visible_gpus() == [""]


@pytest.mark.parametrize("first_good", [0, 3, 7, 8])
def test_the_first_save_that_is_good_enough_on_both_tasks_is_the_start(
    first_good, tmp_path, monkeypatch
):
    comparison = curves.Curves(
        curves.Args(out=str(tmp_path), size="small", start=0.15), torch.device("cpu")
    )
    folder, looked_at = tmp_path / "small/sft-sdar", []
    for i in range(8):
        (folder / f"run/sft/checkpoints/step-{50 * i:06}").mkdir(parents=True)
        (folder / f"run/sft/checkpoints/step-{50 * i:06}/number").write_text(str(i))

    def validate(save):
        looked_at.append(i := int((save / "number").read_text()))
        return {"countdown": 0.15 if i >= first_good else 0.14, "sudoku": 0.9}

    monkeypatch.setattr(comparison, "validate", validate)
    if first_good == 8:
        with pytest.raises(SystemExit, match="sdar: no save solves 15% of both tasks"):
            comparison.choose_start("sdar")
        assert not comparison.checkpoint("sdar").exists()
    else:
        comparison.choose_start("sdar")
        assert (comparison.checkpoint("sdar") / "number").read_text() == str(first_good)
    assert len(looked_at) == len(set(looked_at)) <= 4


@pytest.mark.parametrize("task", curves.TASKS)
def test_rows_of_the_start_are_right_answers_of_the_train_split(task):
    task = load_task(task)
    rows = curves.sft_rows(task, 6000)
    assert len(rows) == 6000
    examples = {json.dumps(task.prompt(example)): example for example in task.load("train")}
    for row in rows[::97]:
        *prompt, last = row["messages"]
        assert (
            last["role"] == "assistant"
            and task.score(last["content"], examples[json.dumps(prompt)]) == 1.0
        )


def test_one_comparison_from_end_to_end(tmp_path, monkeypatch):
    """One method on the shipped model, two steps: from the script to the figure and the table."""
    monkeypatch.setattr(curves, "SEEDS", {"countdown": (0,)})
    sizes = {
        "rates": (1e-4,),
        "max_steps": 2,
        "prompts_per_step": 2,
        "eval_every": 1,
        "eval_limit": 32,
        "passes": 2,
        "jobs": 2,
    }
    args = curves.Args(out=str(tmp_path), methods=("bgpo",), families=("sdar",), **sizes)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        comparison = curves.Curves(args, torch.device("cpu"))
        comparison.rates()
        (run,) = comparison.planned()
        shutil.copytree(
            comparison.root / "rates" / run.name.replace("-s0-", f"-s{curves.RATE_SEED}-"),
            comparison.folder(run),
        )
        (config,) = comparison.folder(run).glob("*/config.json")
        config.write_text(
            json.dumps(json.loads(config.read_text()) | {"device": "a machine far away"})
        )
        timed = comparison.folder(replace(run, stage="time")) / "some-run"
        timed.mkdir(parents=True)
        rows = [
            {"step": step + 1, "time/step": 9.0 if step < 4 else 0.5}
            for step in range(curves.TIMED_STEPS)
        ]
        (timed / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        monkeypatch.setattr(curves, "ROOT", tmp_path)
        (tmp_path / "models").symlink_to(ROOT / "models")
        comparison.keep()
    finally:
        dist.destroy_process_group()
    (row,) = map(
        json.loads, (tmp_path / "docs/curves/comparison/tiny.jsonl").read_text().splitlines()
    )
    assert [step for step, _ in row["validation"]] == [0, 1, 2] and len(row["test"]) == len(
        row["reward"]
    ) == 2
    assert row["machine"] == "a machine far away"
    assert (
        row["seconds_per_step"] == 0.5
        and row["rollouts_per_step"] == 16
        and row["rates_tried"].keys() == {"0.0001"}
    )
    monkeypatch.setattr(plot, "FOLDER", tmp_path / "docs/curves")
    plot.draw_comparison("tiny")
    assert (tmp_path / "docs/curves/comparison-tiny.png").stat().st_size > 10_000
    assert f"{row['test'][0]:.1%} | {row['test'][1]:.1%} | 0.50 |" in plot.comparison_table("tiny")


def test_the_clock_of_the_estimates_adds_up_within_a_step(monkeypatch):
    """bench/train.py: two calls in the first step, none in the second, one in the third."""
    clock = iter([1.0, 1.5, 2.0, 2.25, 7.0, 9.0])
    monkeypatch.setattr(bench_train, "now", lambda: next(clock))
    script = SimpleNamespace(Stopwatch=dict, frozen_estimates=lambda model, rows: model + rows)
    seconds = bench_train.time_estimates(script)
    for calls in (2, 0, 1):
        assert script.Stopwatch() == {}
        assert [script.frozen_estimates(40, 2) for _ in range(calls)] == [42] * calls
    assert seconds == [0.75, 0.0, 2.0]


def test_the_tables_of_the_page_are_those_of_the_kept_runs():
    page = (ROOT / "docs/curves.md").read_text()
    assert plot.with_tables(page) == page
    for file in (ROOT / "docs/curves/comparison").glob("*.jsonl"):
        assert (
            f"<!-- comparison {file.stem}: " in page
            and f"curves/comparison-{file.stem}.png" in page
        )
