"""run/log.py: the files of a run, the lines on the screen."""

import csv
import gc
import io
import json
import math
import os
import re
import sys
import zlib
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
import torch
from golden_runs import rows_of
from matplotlib.figure import Figure

from algos import mdpo
from distributed.disk import new_directory, write_atomically
from run import flags as run_flags
from run import log as runlog
from run.flags import check_numbers, check_sizes
from run.log import RunLog, Stop, Stopwatch

NAN = float("nan")
ARGS = {"model": "tiny-sdar", "task": "countdown", "seed": 42, "betas": (0.9, 0.99)}
TIMES = {"time/rollout": 0.5, "time/update": 0.2, "time/step": 0.73}
RL_ROW = {"reward/mean": 0.3, "reward/std": 0.4, "loss/total": -0.012, "policy/ratio": 1.0,
          "completion/length": 6.1, "completion/truncated_frac": 0.5, **TIMES}  # fmt: skip


def open_log(out, **options):
    return RunLog(out, "bgpo-tiny-sdar-countdown-s42", ARGS, 300, **options)


def test_config_says_how_to_repeat_the_run(tmp_path):
    with closing(open_log(tmp_path)) as log:
        config = json.loads((log.run_dir / "config.json").read_text())
    keys = "script args command git code torch python device world_size started"
    assert list(config) == keys.split() and config["script"] == "bgpo"
    assert config["args"] == {**ARGS, "betas": [0.9, 0.99]} and config["world_size"] == 1
    checksum = zlib.crc32(Path(__file__).read_bytes())
    want = {"script": checksum, "reward": checksum}
    assert runlog.checksums(__file__, "countdown", f"{__file__}:pay") == want
    assert runlog.checksums("-m", None, "countdown_partial") == {}
    assert runlog.describe_run("my-bgpo-tiny-sdar-countdown-s42", ARGS)["script"] == "my-bgpo"


def test_directories_of_one_name_are_numbered(tmp_path):
    names = [new_directory(tmp_path / "d1").name for _ in range(3)]
    assert names == ["d1", "d1-2", "d1-3"]


def test_rows_are_flushed_non_finite_is_null_and_csv_has_the_union_of_keys(tmp_path):
    with closing(open_log(tmp_path)) as log:
        log.write(0, {"eval/countdown": 0.25})
        log.write(1, {"loss/total": NAN, "reward/mean": torch.tensor(0.5)})
        rows = rows_of(log.run_dir)
    assert rows[1] == {"step": 1, "loss/total": None, "reward/mean": 0.5}
    with open(log.run_dir / "metrics.csv", newline="") as file:
        keys = ["step", "eval/countdown", "loss/total", "reward/mean"]
        assert list(csv.reader(file)) == [keys, ["0", "0.25", "", ""], ["1", "", "", "0.5"]]


PROBE = {"probe/distinct_frac": 0.5, "probe/logp_gap_mean": 0.01, "probe/greedy_agreement": 0.95}
BAD = {"probe/distinct_frac": 0.125, "probe/logp_gap_mean": 0.3, "probe/greedy_agreement": 0.5}
WORDS = ["distinct samples 12%", "engine and learner differ by 3.0e-01 nats a token",
         "50% of its greedy tokens are the learner's"]  # fmt: skip
SUMMARIES = [
    (RL_ROW, ["reward  0.300", "loss  -0.0120", "len    6.1", "  0.73 s"]),
    ({"policy/elbo": -5.5, "loss/total": 0.5, "eval/x": 0.41}, ["eval 0.410", "loss   0.5000"]),
    ({"policy/elbo": -5.5, "loss/total": 1e-9, **PROBE}, ["elbo   -5.500"]),
    ({"loss/total": 0.0, **BAD}, ["loss   0.0000", *WORDS]),
    ({"probe/logp_gap_mean": NAN}, ["engine and learner differ by nan nats a token"]),
]  # fmt: skip


@pytest.mark.parametrize("row, words", SUMMARIES)
def test_a_line_says_what_matters(row, words):
    """The score first, an ELBO instead of a loss of 0, the check of the sampler if it is bad."""
    assert list(runlog.summary(row).values()) == words


SUMMARY = "  ".join(SUMMARIES[0][1])


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_plain_line_or_a_bar_on_a_terminal(tmp_path, monkeypatch, capsys, is_terminal):
    screen = io.StringIO()
    screen.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stderr", screen)
    with closing(open_log(tmp_path)) as log:
        log.write(0, {"eval/countdown": 0.41})
        for _ in range(2):  # compiling is told once
            log.write(12, RL_ROW | {"speed/compile_s": 41.6})
    lines = capsys.readouterr().out.splitlines()
    compiled = "compiling took 42 s so far; later steps do not take this time"
    if is_terminal:
        assert lines == [compiled] and "12/300" in screen.getvalue() and log.bar.disable
        assert log.bar.n == 12 and log.bar.postfix == f"eval 0.410  {SUMMARY}"
    else:
        step = f"step  12/300  {SUMMARY}"
        assert lines == ["step   0/300  eval 0.410", compiled, step, step]
        assert screen.getvalue() == ""


def test_a_drawn_figure_leaves_the_memory(tmp_path):
    """Without waiting for the collector: each holds several MB."""
    gc.collect()
    gc.disable()
    try:
        with closing(open_log(tmp_path)) as log:
            log.write(1, {"eval/countdown": 0.5, "optim/grad_norm": 1.0, "optim/lr": 1e-5})
        assert not [thing for thing in gc.get_objects() if type(thing) is Figure]
    finally:
        gc.enable()


def test_a_full_disk_ends_the_run_with_one_line(tmp_path):
    """Wherever it is met, at the end too."""
    log = open_log(tmp_path)
    (log.run_dir / "samples.jsonl").symlink_to("/dev/full")
    (log.run_dir / "metrics.csv").symlink_to("/dev/full")
    broken = pytest.raises(SystemExit, match=f"could not write {log.run_dir}.*No space left")
    with broken:
        log.samples(1, [{"completion": ""}])
    with broken:
        log.write(1, {"eval/countdown": 0.5})
    log.metrics_file = open("/dev/full", "w", buffering=1)
    for write in (lambda: log.write(2, {"loss/total": 0.5}), log.close):
        with broken:
            write()
    (log.run_dir / ".x.tmp").symlink_to("/dev/full")
    with broken:
        write_atomically(log.run_dir / "x", "text")


SCORE = {"eval/countdown": 0.5, "time/eval": 3.0}
OPTIM = {"loss/total": 1.0, "optim/lr": 1e-5, "optim/grad_norm": 1.0, "speed/tokens_per_s": 1e4}
RL = ["Reward in training", "Loss", "Change of the policy", "Length of the answers"]
PLOTS = [
    ([(0, SCORE), (1, RL_ROW | OPTIM)],
     ["Score on problems not trained on", *RL, "Seconds per step"]),
    ([(0, {"test/countdown": 0.9})], ["Score on problems not trained on"]),
    ([(1, OPTIM | {"loss/total": NAN})], ["Loss", "Gradient", "Speed"]),
]  # fmt: skip


@pytest.mark.parametrize("rows, titles", PLOTS)
def test_panels_follow_the_keys_and_a_score_redraws_them(tmp_path, monkeypatch, rows, titles):
    drawn = []
    save = lambda figure, *_, **__: drawn.append([axes.get_title("left") for axes in figure.axes])
    monkeypatch.setattr(Figure, "savefig", save)
    with closing(open_log(tmp_path)) as log:
        for step, row in rows:
            log.write(step, row)
    assert len(drawn) == 1 + any(map(runlog.is_score, rows[0][1]))
    assert list(filter(None, drawn[-1])) == titles


def test_the_figure_is_not_redrawn_at_once_but_at_the_end(tmp_path, monkeypatch):
    drawn, now = [], [100.0]
    monkeypatch.setattr(runlog.time, "perf_counter", lambda: now[0])
    with closing(open_log(tmp_path)) as log:

        def plot():
            now[0] += 2  # seconds
            drawn.append(len(runlog.read_rows(log.run_dir)))

        monkeypatch.setattr(log, "plot", plot)
        for step, passed in enumerate((0, 37, 2), start=1):
            now[0] += passed
            log.write(step, {"eval/x": 0.5})
        assert drawn == [1, 3]  # 39 s later
        log.write(4, {"eval/x": 0.5})
    assert drawn == [1, 3, 4]


def test_an_error_leaves_table_and_plot(tmp_path, capsys):
    for row in {}, RL_ROW:
        log = open_log(tmp_path)
        log.write(1, row)
        for _ in range(2):  # a second close does nothing
            log.close(failed=True)
        assert (log.run_dir / "metrics.csv").read_text().startswith("step")
        assert capsys.readouterr().err == f"run directory: {log.run_dir}\n"
    assert (log.run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_wandb_has_rows_samples_and_settings_and_a_resumed_run_goes_on(tmp_path, monkeypatch):
    wandb = MagicMock()
    run = wandb.init.return_value
    run.id = "x1"
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_DATA_DIR", "")  # restored afterwards
    monkeypatch.delenv("WANDB_DATA_DIR")
    with closing(open_log(tmp_path, track=True)) as log:
        log.write(1, RL_ROW)
        sample = {"prompt": "1 2", "completion": "1+2", "gold": "3", "reward": 1.0}
        log.samples(1, [sample, {"prompt": "3 4"}])
    table = {"samples": wandb.Table.return_value}
    assert run.log.mock_calls == [call(RL_ROW, step=1), call(table, step=1)]
    rows = [[1, "1 2", "1+2", "3", 1.0], [1, "3 4", None, None, None]]
    wandb.Table.assert_called_with(runlog.COLUMNS, rows)
    open_log("", track=True, resume=str(log.run_dir), step=1).close()
    first, second = (made.kwargs for made in wandb.init.call_args_list)
    assert first["config"] == ARGS and second["resume"] == "allow"
    assert (first["id"], second["id"]) == (None, "x1")
    assert os.environ["WANDB_DATA_DIR"] == str(log.run_dir / "wandb")  # not in the home


GROUPS = ["the method's own", "task and data", "rollout", "length of the run and evaluation",
          "memory and speed", "LoRA", "log and saves"]  # fmt: skip


def test_help_is_in_groups(monkeypatch, capsys):
    """Every flag once, with its default; a replaced field stays in its group, with its new help."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "argv", ["mdpo.py", "--lora-rank", "4", "--help"])
    with pytest.raises(SystemExit):
        run_flags.command_line(mdpo.Args, {})
    text = capsys.readouterr().out
    groups = re.split(r"(\w[\w' ]+) options\b", text)[1:]
    assert groups[::2] == GROUPS and "rcr (Running" in groups[5]
    assert (
        len(re.findall(r"^\W* --\w", text, re.M))
        == text.count("(default:")
        == len(fields(mdpo.Args))
    )


def test_the_stopwatch_adds_up_phases(monkeypatch):
    ticks = iter([0.0, 2.0, 10.0, 13.0, 20.0, 21.0, 0.0, 0.0])
    monkeypatch.setattr(runlog.time, "perf_counter", lambda: next(ticks))
    clock = Stopwatch(1)
    for phase in ("rollout", "rollout", "update"):
        with clock(phase):
            pass
    assert clock == {"time/rollout": 5.0, "time/update": 1.0}
    for size, less in (1, ""), (5, "--micro-batch-size 2 or "):
        words = f"^out of GPU memory in the update: try {less}--activation-checkpointing$"
        with pytest.raises(SystemExit, match=words), Stopwatch(size)("update"):
            raise torch.OutOfMemoryError()


@dataclass
class Numbers:
    max_steps: int = 1
    steps: int = 0  # part of a name that must be at least 1
    track: bool = False
    beta: float = 0.0
    betas: tuple = (0.9, 0.95)
    temperature: float = 1.0
    max_grad_norm: float = float("inf")
    margin: float = -1.0
    cap: float = float("inf")
    words: str = "as many as you like " * 20  # a text is no name of a file


ABOVE = "above 0: [^\n]+"
OUT_OF_RANGE = [
    ("max_steps", 0, "at least 1"),
    ("steps", -1, "at least 0 and finite"),
    ("steps", 1 << 31, "below 2,147,483,648"),
    ("beta", -0.1, "at least 0 and finite"),
    ("beta", NAN, "at least 0 and finite"),
    ("beta", float("inf"), "at least 0 and finite"),
    ("temperature", 0.0, ABOVE),
    ("temperature", NAN, "at least 0 and finite"),
    ("max_grad_norm", 0.0, ABOVE),
    ("betas", (0.9, 1.0), "at least 0 and below 1"),
    ("margin", NAN, "finite"),
    ("margin", float("-inf"), "finite"),
]


@pytest.mark.parametrize("name, value, words", OUT_OF_RANGE)
def test_numbers_out_of_range_are_named(name, value, words):
    fine = Numbers(margin=-2.0)
    assert check_numbers(check_sizes(fine)) == fine
    shown = " ".join(map(str, value)) if name == "betas" else value
    flag = name.replace("_", "-")
    with pytest.raises(SystemExit, match=f"^--{flag} {shown} must be {words}$"):
        check_numbers(check_sizes(replace(Numbers(), **{name: value})))


def test_the_line_of_settings_keeps_what_was_emptied():
    line = run_flags.flags_of(Numbers(betas=(), words=""))
    assert "--betas --temperature 1.0" in line and line.endswith(" --words ''")


def test_a_dead_run_says_why_and_ends(monkeypatch, capsys):
    """Five steps without an advantage on any rank: one line. The limit: another, and the end."""
    monkeypatch.setattr(runlog.dist, "all_reduce", lambda flags: None)
    names = "truncated empty distinct".split()
    metrics = {f"completion/{name}_frac": 0.25 * i for i, name in enumerate(names, 1)}
    metrics |= {"reward/mean": 0.1, "reward/std": 0.0}
    none, some = torch.zeros(4), torch.tensor([0.0, 1.0, -1.0, 0.0])
    stop, endless = Stop(7), Stop()
    ends = [stop.is_set(given, metrics) for given in [none] * 4 + [some] + [none] * 7]
    assert ends == [False] * 11 + [True] and stop.status == 3 and "for 7 steps" in stop.reason
    warned, ended = capsys.readouterr().err.splitlines()
    assert warned == (
        "warning: for 5 steps no completion had an advantage, because in every group all rewards "
        "were equal, or the group was left out: mean reward 0.1, std 0; of the completions 25% are "
        "cut off, 50% empty, 75% distinct within their group; "
        "the run ends after 7 such steps (--dead-steps)"
    )
    assert ended.startswith("warning: for 7 steps") and "--dead-steps" not in ended
    assert not any(endless.is_set(none, metrics) for _ in range(99)) and not Stop(1).is_set()
    assert len(capsys.readouterr().err.splitlines()) == 1 and endless.status == 0


def test_a_misspelt_default_is_named(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mine.py"])
    with pytest.raises(SystemExit, match="^BY_SIZE sets betta, which Args does not have$"):
        run_flags.command_line(Numbers, {"tiny": {"beta": 1.0}, "lora": {"betta": 1.0}})


def test_resume_keeps_files_of_a_user_with_their_whole_path(tmp_path, monkeypatch):
    @dataclass
    class Args:
        model: str = "tiny-sdar"
        task: str = "countdown"
        lora_rank: int = 0
        reward: str = ""
        dead_steps: int = 50
        resume: str = ""

    def given(*flags):
        monkeypatch.setattr(sys, "argv", ["bgpo.py", *flags])
        return run_flags.command_line(Args, {"tiny": {}})

    monkeypatch.chdir(tmp_path)
    args = given("--task", "mine.py", "--reward", "mine.py:pay")
    assert (args.task, args.reward) == (f"{tmp_path}/mine.py", f"{tmp_path}/mine.py:pay")
    (tmp_path / "config.json").write_text(json.dumps({"script": "bgpo", "args": vars(args)}))
    assert given("--task", "mine.py", "--resume", ".").reward == args.reward
    monkeypatch.chdir("/")
    assert given("--resume", str(tmp_path), "--dead-steps", "0").task == args.task
    with pytest.raises(SystemExit, match="the run had --task"):
        given("--task", "mine.py", "--resume", str(tmp_path))


def test_numbers_may_be_infinite_where_that_means_none():
    sizes = {"epsilon": math.inf, "max_grad_norm": math.inf, "tasks": ",".join(["x" * 200] * 3)}
    run_flags.check_sizes(SimpleNamespace(**sizes))
    for wrong in {"beta": math.inf}, {"epsilon": math.nan}, {"data": "x" * 256}:
        with pytest.raises(SystemExit):
            run_flags.check_sizes(SimpleNamespace(**wrong))
