"""runlog.py: the files of a run, the lines on the screen, one directory for all ranks."""

import csv
import io
import json
import multiprocessing
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import runlog
from runlog import RunLog, Stopwatch, check_numbers, peak_memory_gb

ARGS = {"model": "tiny-sdar", "task": "countdown", "seed": 42, "betas": (0.9, 0.99)}
RL_ROW = {
    **{
        "reward/mean": 0.3,
        "reward/std": 0.4,
        "loss/total": -0.012,
        "policy/ratio": 1.0,
        "policy/clip_frac": 0.02,
    },
    **{
        "completion/length": 6.1,
        "completion/truncated_frac": 0.5,
        "time/rollout": 0.5,
        "time/update": 0.2,
        "time/step": 0.73,
    },
}


def open_log(out, **options):
    return RunLog(out, "bgpo-tiny-sdar-countdown-s42", 0, ARGS, 300, **options)


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


def test_config_says_how_to_repeat_the_run(tmp_path):
    with open_log(tmp_path) as log:
        config = json.loads((log.run_dir / "config.json").read_text())
    assert list(config) == [
        "script",
        "args",
        "command",
        "git",
        "torch",
        "python",
        "device",
        "world_size",
        "started",
    ]
    assert config["args"] == {**ARGS, "betas": [0.9, 0.99]}
    assert config["torch"] == torch.__version__ and config["world_size"] == 1 and config["device"]
    assert config["git"] is None or set(config["git"]) == {"commit", "dirty"}


def test_git_is_null_outside_a_repository_and_sees_new_files(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(runlog, "__file__", str(tmp_path / "runlog.py"))
    assert runlog.describe_git() is None
    git = f"git -C {tmp_path} -c user.name=a -c user.email=a@b"
    assert os.system(f"{git} init -q && {git} commit -q --allow-empty -m first") == 0
    assert runlog.describe_git()["dirty"] is False and len(runlog.describe_git()["commit"]) == 40
    (tmp_path / "mine.py").touch()
    assert runlog.describe_git()["dirty"] is True


def test_directories_of_the_same_second_are_numbered(tmp_path, monkeypatch):
    monkeypatch.setattr(
        runlog,
        "datetime",
        type("Noon", (runlog.datetime,), {"now": lambda: runlog.datetime(2026, 1, 2, 12)}),
    )
    assert [runlog.make_run_dir(tmp_path, "d1").name for _ in range(3)] == [
        f"d1-0102-120000{end}" for end in ("", "-2", "-3")
    ]


def test_rows_are_flushed_at_once_and_non_finite_is_null(tmp_path):
    with open_log(tmp_path) as log:
        log.write(
            1,
            {
                "reward/mean": torch.tensor(0.5),
                "loss/total": float("nan"),
                "optim/grad_norm": torch.tensor(torch.inf),
            },
        )
        rows = read_jsonl(log.run_dir / "metrics.jsonl")
    assert rows == [{"step": 1, "reward/mean": 0.5, "loss/total": None, "optim/grad_norm": None}]


def test_csv_has_the_union_of_keys(tmp_path):
    with open_log(tmp_path) as log:
        log.write(0, {"eval/countdown": 0.25})
        log.write(1, {"loss/total": 1.5, "reward/mean": float("nan")})
    with open(log.run_dir / "metrics.csv", newline="") as file:
        assert list(csv.reader(file)) == [
            ["step", "eval/countdown", "loss/total", "reward/mean"],
            ["0", "0.25", "", ""],
            ["1", "", "1.5", ""],
        ]


def test_samples_are_utf8_lines(tmp_path):
    with open_log(tmp_path) as log:
        log.samples(3, [{"completion": "3 × 4 = 12\n", "step_map": [0, 1]}, {"completion": "né"}])
        log.samples(4, [{"completion": "5"}])
    assert "3 × 4" in (log.run_dir / "samples.jsonl").read_text(encoding="utf-8")
    assert [
        (row["step"], row["completion"]) for row in read_jsonl(log.run_dir / "samples.jsonl")
    ] == [
        (3, "3 × 4 = 12\n"),
        (3, "né"),
        (4, "5"),
    ]


def test_plain_line_when_stderr_is_not_a_terminal(tmp_path, capsys):
    with open_log(tmp_path) as log:
        log.write(12, RL_ROW | {"eval/countdown": 0.41})
        log.say("saved")
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "step  12/300  reward  0.300  loss  -0.0120  len    6.1    0.73 s  eval 0.410",
        "saved",
    ]
    assert err == ""


def test_bar_on_a_terminal(tmp_path, monkeypatch, capsys):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with open_log(tmp_path) as log:
        log.write(0, {"eval/countdown": 0.41})
        log.write(12, RL_ROW)
        log.say("saved")
        assert log.bar.n == 12
    assert "12/300" in terminal.getvalue() and log.bar.disable
    assert log.bar.postfix == "eval 0.410  reward  0.300  loss  -0.0120  len    6.1    0.73 s"
    assert capsys.readouterr().out == "saved\n"


def test_a_score_redraws_the_plot(tmp_path):
    with open_log(tmp_path) as log:
        log.write(1, RL_ROW)
        assert not (log.run_dir / "curves.png").exists()
        log.write(2, {"eval/countdown": 0.1})
        assert is_png(log.run_dir / "curves.png")


@pytest.mark.parametrize(
    "rows",
    [
        [(1, RL_ROW)],
        [
            (0, {"eval/countdown": 0.0, "time/eval": 3.0}),
            (1, RL_ROW),
            (1, {"test/countdown": 1.0, "time/eval": 3.0}),
        ],
        [(0, {"test/countdown": 0.9, "time/eval": 3.0})],
        [
            (step, {"loss/total": float("nan"), "optim/lr": 1e-5, "optim/grad_norm": 1.0})
            for step in range(1, 50)
        ],
        [(5, {"loss/total": 0.1, "speed/tokens_per_s": 17e3, "time/step": 0.5})],
    ],
    ids=["one step", "one step with scores", "before training", "not a number", "sft"],
)
def test_plots_of_few_rows(tmp_path, rows):
    with open_log(tmp_path) as log:
        for step, row in rows:
            log.write(step, row)
    assert is_png(log.run_dir / "curves.png")


def test_panels_follow_the_keys(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    titles = []
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda figure, *_, **__: titles.append([a.get_title("left") for a in figure.axes]),
    )
    optim = {"loss/total": 1.0, "optim/lr": 1e-5, "optim/grad_norm": 1.0, "speed/tokens_per_s": 1e4}
    for row in (RL_ROW | optim | {"eval/countdown": 0.5}, optim):
        with open_log(tmp_path) as log:
            log.write(1, row)
    rl, sft = ([title for title in drawn if title] for drawn in (titles[-2], titles[-1]))
    assert rl == [
        *("Score on problems not trained on", "Reward in training", "Loss"),
        *("Change of the policy", "Length of the answers", "Time per step"),
    ]
    assert sft == ["Loss", "Gradient", "Speed"]


def test_an_error_leaves_table_and_plot_and_passes(tmp_path):
    with pytest.raises(FloatingPointError, match="loss is nan"):
        with open_log(tmp_path) as log:
            log.write(1, RL_ROW)
            raise FloatingPointError("loss is nan")
    assert is_png(log.run_dir / "curves.png") and (log.run_dir / "metrics.csv").exists()
    log.close()  # a second close does nothing
    with pytest.raises(ValueError, match="closed"):
        log.write(2, RL_ROW)


def test_an_error_before_the_first_row_is_not_hidden(tmp_path):
    with pytest.raises(KeyError, match="no model"):
        with open_log(tmp_path) as log:
            raise KeyError("no model")
    assert (log.run_dir / "metrics.csv").read_text() == "step\n"


def log_on_rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    with RunLog(folder / "runs", f"rank{rank}", rank, ARGS, 2) as log:
        log.write(1, {"loss/total": float(rank)})
        log.samples(1, [{"rank": rank}])
        log.say("once")
    (folder / f"{rank}.txt").write_text(str(log.run_dir))
    dist.destroy_process_group()


def test_two_ranks_share_a_directory_and_one_writes(tmp_path):
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=log_on_rank, args=(rank, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("rank0-")
    assert {(tmp_path / f"{rank}.txt").read_text() for rank in range(2)} == {str(run_dir)}
    assert read_jsonl(run_dir / "metrics.jsonl") == [{"step": 1, "loss/total": 0.0}]
    assert read_jsonl(run_dir / "samples.jsonl") == [{"step": 1, "rank": 0}]
    assert json.loads((run_dir / "config.json").read_text())["world_size"] == 2


def test_wandb_mirrors_the_rows_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with open_log(tmp_path, track=True) as log:
        log.write(1, RL_ROW)
        assert log.wandb_run.project == "cleandllm" and log.wandb_run.name == log.run_dir.name
    wandb.teardown()  # its process may write the rows behind the end of the run
    (record,) = log.run_dir.glob("wandb/offline-run-*/*.wandb")
    assert b"reward/mean" in record.read_bytes()


def test_stopwatch_adds_up_the_seconds_of_a_phase(monkeypatch):
    ticks = iter([0.0, 2.0, 10.0, 13.0, 20.0, 21.0])
    monkeypatch.setattr(runlog.time, "perf_counter", lambda: next(ticks))
    clock = Stopwatch()
    for phase in ("rollout", "rollout", "update"):
        with clock(phase):
            pass
    assert {"loss/total": 1.0} | clock == {
        "loss/total": 1.0,
        "time/rollout": 5.0,
        "time/update": 1.0,
    }


def test_peak_memory_on_cpu_is_that_of_the_process():
    assert 0.05 < peak_memory_gb("cpu") < 100


@dataclass
class Numbers:
    max_steps: int = 1
    batch_size: int = 1
    steps: int = 0  # part of a name that must be there
    length: int = 0
    save_every: int = 0
    track: bool = False
    beta: float = 0.0
    temperature: float = 1.0
    max_grad_norm: float = float("inf")


def test_numbers_that_count_something_are_at_least_one():
    assert check_numbers(Numbers()) == Numbers()
    whole = (("max_steps", 0, 1), ("batch_size", 0, 1), ("steps", -1, 0), ("save_every", -1, 0))
    for name, value, least in (*whole, ("beta", -0.1, 0), ("beta", float("nan"), 0)):
        with pytest.raises(
            SystemExit, match=f"^--{name.replace('_', '-')} {value} must be at least {least}$"
        ):
            check_numbers(replace(Numbers(), **{name: value}))
    for name, value in (
        ("temperature", 0.0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("max_grad_norm", 0.0),
    ):
        with pytest.raises(
            SystemExit, match=f"^--{name.replace('_', '-')} {value} must be above 0: [^\n]+$"
        ):
            check_numbers(replace(Numbers(), **{name: value}))
