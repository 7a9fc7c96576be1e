"""bench/curves.py: which runs are made, in which order, and how calls that are cut off go on."""

import json
import math
import re
import runpy
import shutil
import zlib
from collections import Counter
from importlib import import_module
from itertools import combinations
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import pytest
import torch
import tyro

from bench import curves as bench
from bench import sums
from bench.curves import POINTS, RATE_SEED, TASKS, Args, Curves, Run, rate, saved_step

BEST = {
    "bgpo": 1,
    "d1": -3,
}  # number of the best rate on countdown; on sudoku it is the next higher
FLAT = 45  # rollouts until the plateau


class Scripts(Curves):
    """Curves whose scripts take no time. Every fourth is cut off halfway, which ends the call."""

    new, made, is_over = {}, Counter(), False  # flags of new runs, rollouts made of each

    def call(self, script, flags, log, gpu):
        log.parent.mkdir(parents=True, exist_ok=True)
        if script in ("evals/countdown.py", "evals/sudoku.py"):
            tyro.cli(import_module("evals.run").Args, args=bench.command_of(script, flags)[2:])
            log.write_text('{"accuracy": 0.2}\n')
            return 0
        run = log.parent / "run"
        assert flags.get("resume", run) == run
        before = saved_step(log.parent) if "resume" in flags else 0
        assert before <= flags["max_steps"]
        given = self.new.setdefault(log.parent.name, flags)
        assert (given.get("beta") == 0) == log.parent.name.endswith("no-kl")
        self.is_over = sum(self.made.values()) % 4 == 3
        until = max(before, flags["max_steps"] // 2) if self.is_over else flags["max_steps"]
        self.made[log.parent.name] += 1
        off = BEST[Path(script).stem] + (given["task"] == "sudoku")
        top = 0.5 - abs(math.log(given["learning_rate"] / rate(off))) / 100
        rows = []
        for step in range(1, until + 1):
            row = dict.fromkeys(POINTS.values(), 0.1) | {"step": step, "completion/length": 5}
            row |= {"time/step": 3, "time/eval": 1, "reward/mean": step}
            row["mismatch/entropy"] = None  # no completion had an advantage
            if step % 2 == 0:
                row[f"eval/{given['task']}"] = top * min(step / FLAT, 1)
            rows.append(json.dumps(row) + "\n")
        (run / f"resume/step-{until:06d}").mkdir(parents=True, exist_ok=True)
        (run / "metrics.jsonl").write_text("".join(rows))
        return None if self.is_over else 0

    def fits(self, run):
        return not self.is_over


def test_calls_that_are_cut_off_make_every_run_once(tmp_path):
    (tmp_path / "start-sdar").mkdir()
    (tmp_path / "start-sdar/model.safetensors").write_text("")
    args = Args(
        starts=f"{tmp_path}/start-",
        rows=f"{tmp_path}/rows.jsonl",
        methods=tuple(BEST),
        families=("sdar",),
        eval_every=2,
        rate_rollouts=15,
        rollouts=40,
        max_rollouts=100,
    )
    calls, is_over = 0, True
    while is_over:
        curves = Scripts(args)
        curves.root = tmp_path
        curves.make_start("sdar", "")
        curves.work("")
        calls, is_over = calls + 1, curves.is_over
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    runs = [line for line in lines if line["method"] != "start"]
    name = lambda run: [run[key] for key in ("method", "task", "seed", "rate", "variant")]
    assert calls > 10 and len(runs) == len(set(map(str, map(name, runs)))) == len(curves.wanted())
    assert [name(run)[:4] for run in runs[:3]] == [
        ["bgpo", "countdown", RATE_SEED, 1.5e-4],
        ["d1", "countdown", RATE_SEED, 1.5e-4],
        ["bgpo", "countdown", RATE_SEED, 5e-5],
    ]
    for method, best in BEST.items():
        for task, number in (("countdown", best), ("sudoku", best + 1)):
            mine = [run for run in runs if (run["method"], run["task"]) == (method, task)]
            tried = {run["rate"] for run in mine if run["seed"] == RATE_SEED}
            assert min(tried) < rate(number) < max(tried)
            final = [run for run in mine if run["seed"] != RATE_SEED]
            assert {run["rate"] for run in final} == {rate(number)}
            variants = {} if (method, task) == ("bgpo", "countdown") else bench.VARIANTS[method]
            assert len(final) == 3 * (1 + len(variants))
            assert {run["rollouts"] for run in final} == {60}  # at 50 they still rise
            assert {run["seconds"] for run in final} == {2}
            assert all(run["points"]["rollout"] == [*range(2, 61, 2)] for run in final)
            tokens = 5 * 64 * 8 * 2
            assert all(run["points"]["tokens"][:2] == [tokens, 2 * tokens] for run in final)
            assert all(run["points"]["reward"][:2] == [1.5, 3.5] for run in final)
            assert not any(any(run["points"]["entropy"]) for run in final)
    args.passes = 4
    with pytest.raises(SystemExit, match="other settings"):
        Curves(args)


def test_with_a_rate_given_none_is_tried(tmp_path):
    with pytest.raises(SystemExit, match="--rate needs other --rows"):
        Curves(Args(rate=3e-4))
    args = Args(rows=f"{tmp_path}/rows", methods=("bgpo",), families=("sdar",), rate=3e-4, seeds=2)
    runs = Curves(args).wanted()
    assert {run.rate for run in runs} == {3e-4} and {run.seed for run in runs} == {0, 1}
    tasks = [run.task for run in runs if not run.variant]
    assert tasks == ["countdown", "sudoku"] * 2
    assert {run.variant for run in runs} == {"", *bench.VARIANTS["bgpo"]}
    args.methods = "espo", "bgpo"
    stages = [{"": 0, "no-kl": 1}.get(run.variant, 2) for run in Curves(args).wanted()]
    assert stages == sorted(stages) and {*stages} == {0, 1, 2}


def test_a_run_starts_if_it_can_end_on_this_machine(tmp_path):
    curves, run = Curves(Args(rows=f"{tmp_path}/rows", minutes=8)), Run("sdar", "bgpo", "countdown")
    for left, pace, later, starts in (
        (100, 0.3, 0, 1), (100, 1, 0, 0), (100, 1, 2, 1), (100, 5, math.inf, 1), (-1, 0.3, 9, 0),
    ):  # fmt: skip
        curves.end, curves.rows[run] = perf_counter() + left, {"pace": pace}
        curves.args.minutes_later = later
        assert curves.fits(run) == starts


def test_the_last_call_keeps_what_is_long_enough(tmp_path, monkeypatch):
    """One that was cut off before its plateau, but after --rollouts, has its row up to there."""
    args = Args(
        rows=f"{tmp_path}/rows", methods=("bgpo",), families=("sdar",), tasks="countdown", seeds=1,
        rate=1e-4, variants=False, eval_every=2, rollouts=20,
    )  # fmt: skip
    curves, codes = Curves(args), iter([0, None])
    curves.root, (run,) = tmp_path, curves.wanted()

    def call(script, flags, log, gpu):
        folder = log.parent / "run"
        (folder / "resume/step-000020").mkdir(parents=True, exist_ok=True)
        row = dict.fromkeys(POINTS.values(), 0.1) | {"completion/length": 5, "time/step": 3}
        lines = [row | {"step": i, "eval/countdown": i / 100} for i in range(2, 21, 2)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        return next(codes)

    monkeypatch.setattr(curves, "call", call)
    monkeypatch.setattr(bench, "crc32", lambda path: 0)
    assert curves.next_target(run) == 20
    curves.train(run, "")
    assert not curves.rows and curves.next_target(run) == 30
    monkeypatch.setattr(curves, "make_start", lambda family, gpu: None)
    monkeypatch.setattr(bench, "Curves", lambda args: curves)
    curves.end = 0.0  # no time is left
    for args.minutes_later in 1, 0:
        assert not curves.rows
        bench.main(args)
    assert curves.rows[run]["rollouts"] == 20 and not curves.rows[run]["diverged"]


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    args = Args(rows=f"{tmp_path}/rows", methods=("bgpo", "d1"), families=("sdar",), jobs=1)
    tried, curves = [], Curves(args)

    def train(run, gpu):
        tried.append(run.method)
        raise SystemExit("no memory")

    monkeypatch.setattr(curves, "train", train)
    monkeypatch.setattr(curves, "make_start", lambda family, gpu: None)
    monkeypatch.setattr(bench, "Curves", lambda args: curves)
    with pytest.raises(SystemExit, match="6 runs failed"):
        bench.main(args)
    assert Counter(tried) == {"bgpo": 3, "d1": 3}


def test_a_dead_run_has_ended_and_an_error_has_not(tmp_path):
    curves, script = Curves(Args(rows=f"{tmp_path}/rows")), tmp_path / "ends.py"
    for status, code in (3, 0), (0, 0), (5, None):
        script.write_text(f"raise SystemExit({status})")
        call = lambda: curves.call(str(script), {}, tmp_path / "log", "")
        if code is None:
            with pytest.raises(SystemExit, match="exit 5"):
                call()
        else:
            assert call() == code


def test_every_start_is_scored_once(tmp_path):
    """Another machine's start has other weights. The file may hold runs of both."""
    args = Args(starts=f"{tmp_path}/", rows=f"{tmp_path}/rows", tasks="countdown")
    (tmp_path / "sdar").mkdir()
    for weights in "a", "b", "a":
        (tmp_path / "sdar/model.safetensors").write_text(weights)
        curves = Scripts(args)
        curves.root = tmp_path
        curves.make_start("sdar", "")
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["start"] for row in rows] == [zlib.crc32(b"a"), zlib.crc32(b"b")]


def test_a_start_is_trained_with_its_flags(tmp_path, monkeypatch):
    monkeypatch.setitem(bench.MODELS, "sdar", bench.TINY_SDAR)
    curves = Curves(Args(starts=f"{tmp_path}/", rows=f"{tmp_path}/rows", tasks="sums"))
    curves.root, given = tmp_path, {}

    def call(script, flags, log, gpu):
        if script == "algos/sft.py":
            given.update(flags)
            shutil.copytree(flags["model"], flags["out"] / "run/checkpoints/step-1")
        else:
            log.write_text('{"accuracy": 0.2}\n')
        return 0

    monkeypatch.setattr(curves, "call", call)
    curves.make_start("sdar", "")
    assert (given["max_steps"], given["schedule_steps"], given["eos_tail"]) == (1150, 3000, 8)
    assert (tmp_path / "sdar/model.safetensors").exists()
    assert [row["greedy"] for row in curves.rows.values()] == [0.2]
    with pytest.raises(SystemExit, match="START has no flags for"):
        curves.make_start("llada", "")


def test_sums_are_a_file(tmp_path, monkeypatch):
    given, curves = {}, Curves(Args(rows=f"{tmp_path}/rows", starts=f"{tmp_path}/"))
    curves.root = tmp_path
    monkeypatch.setattr(curves, "call", lambda script, flags, *more: given.update(flags))
    curves.train(Run("sdar-large", "cj_grpo", "sums"), "")
    assert given["task"] == sums.__file__ and given["gen_length"] == 64
    assert given["micro_batch_size"] == 6 * 64  # rows three times as long as countdown's
    assert given["num_iterations"] == 3  # of two passes each


def test_equal_rates_end_the_search(tmp_path):
    curves = Curves(Args(rows=f"{tmp_path}/rows"))
    for number in 0, -1, 1:
        row = {"points": {"greedy": [0.2]}, "diverged": False}
        curves.rows[Run("sdar", "bgpo", "countdown", rate=rate(number))] = row
    assert curves.tried("sdar", "bgpo", "countdown", 0)[1] == 0


@pytest.mark.parametrize("method", bench.METHODS)
def test_scripts_know_the_flags_of_their_runs(method):
    for forwards in (2, 6, 10):
        flags = bench.SHARED | bench.spending(method, 6, forwards)
        for changed, _ in [({}, {}), *bench.VARIANTS.get(method, {}).values()]:
            words = bench.command_of("", flags | changed)[2:]
            args = tyro.cli(import_module(f"algos.{method}").Args, args=words)
            assert args.num_iterations >= 1 and args.warmup_steps == 5
    assert method in bench.KL or not args.beta or method == "bgpo"  # whose KL is a variant


@pytest.mark.parametrize("method", [m for m, v in bench.VARIANTS.items() if "no-negatives" in v])
def test_negative_advantages_are_dropped(method, tmp_path):
    own, (flags, replaced) = import_module(f"algos.{method}"), bench.NO_NEGATIVES
    script = bench.patched(own.__file__, replaced, tmp_path)
    rewards, args = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1]), own.Args(num_generations=4)
    advantages = own.compute_advantages(rewards, args)
    changed = runpy.run_path(str(script))["compute_advantages"](rewards, args)
    assert not flags and advantages.min() < 0
    torch.testing.assert_close(changed, advantages.clamp(min=0))


def test_the_page_shows_the_lines_that_were_changed(tmp_path):
    page = (bench.ROOT / "docs/curves.md").read_text()
    lines = re.findall(r"^ {4,}((?:return|torch\.where).+)$", page, re.M)
    for line, method, name in zip(
        lines, ("espo", "bgpo"), ("no-negatives", "saturating"), strict=True
    ):
        replaced = bench.VARIANTS[method][name][1]
        script = bench.ROOT / f"algos/{method}.py"
        changed = bench.patched(script, replaced, tmp_path)
        assert line in changed.read_text() and line not in script.read_text()


def test_ablations_of_bgpo_change_what_they_say(tmp_path):
    """Gradients and advantages of the patched scripts against the method's own."""
    found = {}
    for name in ("", "saturating", "no-std", "kl-0.01"):
        flags, replaced = bench.VARIANTS["bgpo"][name] if name else ({}, {})
        script = bench.patched(bench.ROOT / "algos/bgpo.py", replaced, tmp_path / name)
        mine = SimpleNamespace(**runpy.run_path(str(script)))
        args = mine.Args(num_generations=4, mc_num=1, **flags)
        rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1])
        advantages = mine.compute_advantages(rewards, args)
        logps = (
            torch.randn(8, 1, 3, generator=torch.Generator().manual_seed(0)).sub(2).clamp(max=-0.1)
        )
        rows = SimpleNamespace(
            weights=torch.ones(8, 1, 3),
            advantages=advantages,
            batch=SimpleNamespace(num_sequences=8),
        )
        logps.requires_grad_()
        estimates = mine.estimate_logps(logps, rows, args)
        ref = estimates.detach() - 3
        loss, _ = mine.policy_loss(estimates, estimates.detach(), ref, rows, args)
        found[name] = advantages, torch.autograd.grad(loss, logps)[0], logps.detach()
        assert mine.USES_REF == ("kl" in name)
    (_, gradient, logps), falls = found[""], found[""][0][:, None, None] < 0
    torch.testing.assert_close(
        found["saturating"][1], torch.where(falls, gradient * logps.exp(), gradient)
    )
    torch.testing.assert_close(
        found["no-std"][0], rewards - rewards.view(2, 4).mean(1).repeat_interleave(4)
    )
    torch.testing.assert_close(found["kl-0.01"][1], gradient + 0.01 * 3 / 8)


def test_scripts_find_what_the_bench_finds(tmp_path, monkeypatch):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/elsewhere.py").touch()
    (tmp_path / "script.py").write_text("import elsewhere, runlog")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/packages")
    curves = Curves(Args(rows=f"{tmp_path}/rows"))
    assert curves.call(tmp_path / "script.py", {}, tmp_path / "log", "") == 0


def test_sums_in_words():
    known = {0: "zero", 13: "thirteen", 20: "twenty", 342: "three hundred forty-two"}
    known |= {100: "one hundred", 1000: "one thousand", 1098: "one thousand ninety-eight"}
    assert {number: sums.in_words(number) for number in known} == known
    assert len(set(map(sums.in_words, range(1999)))) == 1999
    splits = {name: sums.load(name) for name in ("train", "validation", "test")}
    keys = [{tuple(sorted(row["numbers"])) for row in rows} for rows in splits.values()]
    assert not any(a & b for a, b in combinations(keys, 2))
    for row in sum(splits.values(), []):
        gold = sums.answer(row)
        assert len(gold.encode()) < TASKS["sums"]  # an EOS fits behind it
        assert sums.score(gold, row) == 1
        assert sums.score(gold.partition("\n")[0], row) == sums.score(f"{gold}\n1", row) == 0
    assert sums.load("test", limit=5) == splits["test"][:5]


def test_the_bench_scores_sums(tmp_path):
    """As a start is scored: the result is the last line of the log."""
    answers = map(sums.answer, sums.load("validation", limit=4))
    rows = [json.dumps({"index": i, "completion": text}) for i, text in enumerate(answers)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    curves, log = Curves(Args(rows=f"{tmp_path}/none")), tmp_path / "log"
    flags = {"completions": tmp_path / "rows.jsonl", "split": "validation", "limit": 4}
    assert curves.call(bench.FILES["sums"], flags | {"out": tmp_path / "out"}, log, "") == 0
    result = json.loads(log.read_text().splitlines()[-1])
    assert (result["task"], result["accuracy"]) == ("sums", 1)
