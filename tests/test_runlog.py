"""run/log.py: the files of a run, the lines on the screen."""

import csv
import json
import math
import os
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from golden_runs import parsed, rows_of
from matplotlib.figure import Figure

from distributed.disk import write_atomically
from run import log as runlog
from run.flags import RunFlags
from run.log import RunLog, Stop, Stopwatch

ARGS = RunFlags(task=f"{__file__}:pay", max_steps=300, lora_targets=("q_proj",))
RL_ROW = {"reward/mean": 0.3, "loss/total": -0.012, "policy/ratio": 1.0, "completion/length": 6.1,
          "time/step": 0.73}  # fmt: skip
SCORE = {"eval/countdown": 0.41}


@pytest.fixture
def new_log(tmp_path, one_rank):
    """new_log(**options) -> a log, closed at the end of the test"""
    logs = []

    def make(**options):
        step = options.pop("step", 0)
        args = replace(ARGS, out=str(tmp_path), **options)
        logs.append(RunLog(__file__, args, "countdown", step))
        return logs[-1]

    yield make
    for log in logs:
        log.close()


def test_files_of_a_run(new_log, tmp_path, capsys):
    """config.json tells how to repeat it; non-finite is null; the table has all keys of all rows;
    a line has the score first, and an ELBO instead of a loss of 0. A second run of the same second
    has another directory.
    """
    log, other = new_log(), new_log()
    assert log.run_dir != other.run_dir
    config = json.loads((log.run_dir / "config.json").read_text())
    keys = "script args chosen command complete git code torch python device world_size started"
    assert list(config) == keys.split() and config["script"] == "test_runlog"
    want = vars(ARGS) | {"out": str(tmp_path), "lora_targets": ["q_proj"]}
    assert config["args"] == want and config["world_size"] == 1 and not config["chosen"]
    assert config["code"] == [zlib.crc32(Path(__file__).read_bytes())] * 2
    log.write(0, {"policy/elbo": -5.5, "loss/total": 1e-9, **SCORE})
    odd = {"loss/total": math.nan, "optim/lr": -math.inf, "reward/mean": torch.tensor(0.5)}
    odd |= {"eval/$\\frac{a$": 0.5}  # no formula
    log.write(12, RL_ROW | odd)
    assert capsys.readouterr().out.splitlines() == [
        "step   0/300  eval 0.410  elbo   -5.500",
        "step  12/300  eval 0.500  reward  0.500  loss      nan  len    6.1    0.73 s",
    ]
    row = {
        "step": 12,
        **RL_ROW,
        "loss/total": None,
        "reward/mean": 0.5,
        "optim/lr": None,
        "eval/$\\frac{a$": 0.5,
    }
    assert rows_of(log.run_dir)[1] == row
    log.close()
    with open(log.run_dir / "metrics.csv", newline="") as file:
        keys, first, second = csv.reader(file)
    assert keys[:4] == ["step", "policy/elbo", "loss/total", "eval/countdown"]
    assert first[:4] == ["0", "-5.5", "1e-09", "0.41"] and second[:3] == ["12", "", ""]
    log.close()  # a second one changes nothing


def test_the_first_line_tells_what_differs_from_the_values(tmp_path, capsys, one_rank):
    words = "--mc-num 4 --betas 0.9 0.99 --learning-rate 1e-3 --out"
    args = parsed("bgpo", *words.split(), tmp_path)
    first = f"settings: algos/bgpo.py --model tiny-sdar --out {tmp_path} --learning-rate 0.001\n"
    assert capsys.readouterr().err == first
    config = runlog.describe_run("algos/bgpo.py", args)
    assert config["chosen"].keys() == {"out", "learning_rate"}
    assert config["complete"].startswith("algos/bgpo.py --model tiny-sdar --task countdown ")


@pytest.mark.parametrize("file", ["samples.jsonl", "metrics.jsonl", "metrics.csv", ".x.tmp"])
def test_a_full_disk_ends_the_run_with_one_line(new_log, file):
    """Wherever it is met."""
    log = new_log()
    (log.run_dir / file).symlink_to("/dev/full")
    with pytest.raises(SystemExit, match=f"could not write {log.run_dir}.*No space left"):
        log.append("samples.jsonl", 1, [{"completion": ""}])
        log.write(1, SCORE)
        write_atomically(log.run_dir / "x", "text")
    if file == "metrics.csv":  # others cannot be read
        log.close(1)  # as at the exit of the process, behind that line
    (log.run_dir / file).unlink()


def test_a_score_redraws_the_figure_at_most_once_a_minute(new_log, monkeypatch, capsys):
    """Its panels follow the keys. An error leaves it and the page too, and says where they are."""
    drawn, now = [], [100.0]
    save = lambda figure, *_, **how: drawn.append([axes.get_title() for axes in figure.axes])
    monkeypatch.setattr(Figure, "savefig", save)
    monkeypatch.setattr(runlog.time, "perf_counter", lambda: now[0])
    log = new_log()
    for step, passed in enumerate((0, 50, 20), start=1):
        now[0] += passed
        log.write(step, SCORE if step > 1 else SCORE | RL_ROW)
    log.write(4, {"loss/total": 1.0})
    assert len(drawn) == 2
    log.close(1)
    assert capsys.readouterr().err == f"run directory: {log.run_dir}\n"
    titles = ["Score on held-out problems", "Mean reward in training", "Tokens of a completion",
              "Loss", "Change of the policy", "Seconds of a step"]  # fmt: skip
    assert drawn == [titles] * 3 and (log.run_dir / "report.html").exists()


def test_wandb_has_rows_page_and_settings_and_a_resumed_run_goes_on(new_log, monkeypatch):
    wandb = MagicMock()
    monkeypatch.setattr(os, "environ", os.environ | {"WANDB_PROJECT": "mine"})
    wandb.init.return_value.id = "x1"
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log = new_log(track=True)
    log.write(1, RL_ROW)
    log.close()
    log.wandb_run.log.assert_called_once_with(RL_ROW | {"step": 1})
    log.wandb_run.define_metric.assert_called_once_with("*", step_metric="step")
    log.wandb_run.save.assert_called_once_with(log.run_dir / "report.html", log.run_dir, "now")
    new_log(track=True, resume=str(log.run_dir), step=1)
    first, second = (made.kwargs for made in wandb.init.call_args_list)
    assert os.environ["WANDB_PROJECT"] == "mine"
    assert os.environ["WANDB_NAME"] == log.run_dir.name
    assert first["config"]["task"] == ARGS.task and (first["id"], second["id"]) == (None, "x1")


def test_the_stopwatch_adds_up_phases(monkeypatch):
    ticks = iter([0.0, 2.0, 10.0, 13.0, 20.0, 21.0, 0.0])
    monkeypatch.setattr(runlog.time, "perf_counter", lambda: next(ticks))
    clock = Stopwatch()
    for phase in ("rollout", "rollout", "update"):
        with clock(phase):
            pass
    assert clock == {"time/rollout": 5.0, "time/update": 1.0, "time/step": 6.0}
    words = "^out of GPU memory in the update: try a smaller --micro-batch-size, or --activation"
    with pytest.raises(SystemExit, match=words), clock("update"):
        raise torch.OutOfMemoryError()


def test_a_dead_run_says_why_and_ends(monkeypatch, capsys):
    """Five steps without an advantage on any rank: one line. The limit: the end. So does a signal
    that another rank got.
    """
    others = {"received": False}
    reduced = lambda values: {name: value or others.get(name) for name, value in values.items()}
    monkeypatch.setattr(runlog, "all_reduce", reduced)
    metrics = dict.fromkeys(runlog.WHY_DEAD, 0.25)
    none, some = torch.zeros(4), torch.tensor([0.0, 1.0, -1.0, 0.0])
    stop, endless = Stop(7), Stop(0)
    ends = [stop.is_set(given, metrics) for given in [none] * 4 + [some] + [none] * 7]
    assert ends == [False] * 11 + [True] and stop.status == 3 and "for 7 steps" in stop.reason
    (warned,) = capsys.readouterr().err.splitlines()
    assert warned.startswith("warning: for 5 steps no completion had an advantage: ")
    assert "reward/mean 0.25, " in warned and warned.endswith("ends after 7 (--dead-steps)")
    assert not any(endless.is_set(none, metrics) for _ in range(99)) and endless.status == 0
    stop.receive()
    monkeypatch.setattr(runlog.os, "_exit", lambda status: stop.__setattr__("reason", status))
    stop.receive()  # torchrun passes on Ctrl-C
    assert "for 7 steps" in stop.reason
    monkeypatch.setattr(runlog, "SAME_SIGNAL", -1)
    stop.receive()
    assert stop.reason == 1
    others["received"] = True
    assert endless.is_set(none, metrics) and endless.status == 0 and "signal" in endless.reason
