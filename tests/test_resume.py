"""What a killed run keeps, and what --resume accepts: the states on disk, the log, the flags, and
runs that stop at random moments.
"""

import atexit
import json
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from golden_runs import assert_same, free_port, load_few_problems, parsed, rows_of
from oracles import tiny_model
from sync_shared import ROOT
from test_models import exits_with_one_line

from algos import d1
from distributed import disk
from models import MODELS, load_tokenizer
from run import log as runlog
from run.flags import RolloutFlags, RunFlags
from run.log import RunLog
from run.saves import Saves, facts_of, newest_step


def saves_of(directory, keep=0, scores=()):
    """Of a sharded model: every second step, and at step 9, the last."""
    model = d1.parallelize(tiny_model().float(), d1.Args())
    flags = RunFlags(save_every=2, keep_saves=keep, max_steps=9)
    pair = model, torch.optim.AdamW(model.parameters())
    return Saves(directory, *pair, load_tokenizer("tiny-sdar"), flags, scores, 0)


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    monkeypatch.setattr(runlog, "draw_curves", lambda *_: None)


# --- states ---------------------------------------------------------------------------------------


def test_a_damaged_state_is_named_and_the_one_before_is_taken(
    run_ranks, tmp_path, monkeypatch, capfd
):
    """As a copy onto a full disk is. Copies that someone made are no states. A second process waits
    for the end of the first.
    """

    def body(*_):
        saves = saves_of(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "__version__", "of the save")
            for step in range(1, 5):
                saves.save_state(step)
        states = [tmp_path / f"resume/step-{step:06d}" for step in range(1, 5)]
        (states[1] / "facts.json").unlink()
        os.truncate(states[2] / "state/__0_0.distcp", 99)
        (states[3] / "state/.metadata").unlink()
        states[0].rename(copy := tmp_path / "resume/step-000001-old")
        with exits_with_one_line("no undamaged save", str(tmp_path), "--save-every"):
            newest_step(tmp_path, RunFlags())
        with exits_with_one_line(str(tmp_path), "another process works there"):
            newest_step(tmp_path, RunFlags())
        copy.rename(states[0])
        (tmp_path / ".lock").unlink()
        assert (
            newest_step(tmp_path, RunFlags(seed=7, save_every=2)) == 1
            and [*states[0].parent.iterdir()] == states[:1]
        )

    run_ranks(1, body)
    said = capfd.readouterr().err
    assert all(f"step-00000{n} is damaged; trying the save before it" in said for n in (2, 3, 4))
    # config.json was edited, another torch is installed
    assert "--resume: seed was 42, now 7\n--resume: torch was 'of the save', now" in said


def test_an_error_in_saving_leaves_earlier_states(run_ranks, tmp_path, monkeypatch):
    """Whichever rank meets the full disk: all exit with one line, nothing hangs; then there is room
    again.
    """

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    def body(rank, world_size):
        saves = saves_of(tmp_path, keep=1)
        saves.save_state(1)
        for failing in range(2):
            words = "could not save", "step-000002", "GB free", "No space left", f"rank {failing}"
            with monkeypatch.context() as patch, exits_with_one_line(*words):
                if rank == failing:
                    patch.setattr(dcp.filesystem.FileSystemWriter, "write_data", full)
                saves.save_state(2)
            dist.barrier()
            assert [path.name for path in tmp_path.glob("resume/*step*")] == ["step-000001"]
            dist.barrier()
        saves.save_state(2)
        assert facts_of(tmp_path / "resume/step-000002")

    run_ranks(2, body)


def test_a_kill_amid_a_save_leaves_no_state(run_ranks, tmp_path, monkeypatch):
    """And the next save of that step takes the place of the remains."""

    def save(*_):
        saves_of(tmp_path, keep=2).save_state(2)

    def killed(*_):
        saves_of(tmp_path).save_state(1)
        monkeypatch.setattr(disk, "sync_to_disk", lambda _: os._exit(9))
        saves_of(tmp_path, keep=1).save_state(2)

    with pytest.raises(Exception, match="exit code 9"):
        run_ranks(1, killed)
    names = lambda: sorted(path.name for path in (tmp_path / "resume").iterdir())
    assert names() == [".step-000002.tmp", "step-000001"]
    run_ranks(1, save)
    assert names() == ["step-000001", "step-000002"]


def listing(directory):
    """-> steps in checkpoints/, steps in resume/, step that best names, as text"""
    places = "checkpoints/step-*", "resume/step-*", "checkpoints/best"
    found = [[path.resolve().name[-1] for path in directory.glob(place)] for place in places]
    return " | ".join(" ".join(sorted(steps)) for steps in found)


def test_best_follows_the_score_and_survives_pruning_and_kills(run_ranks, tmp_path):
    """A tie keeps the earlier; after a kill weights of steps to come go, and the link names the
    best of what stays.
    """

    def body(*_):
        saves, seen = saves_of(tmp_path, keep=2), []
        for step, score in enumerate([0.2, 0.5, None, 0.5, 0.1, None, 0.6, 0.6], start=1):
            saves.after_step(step, {} if score is None else {"eval/t": score})
            seen.append(listing(tmp_path))
        assert seen == [
            "1 |  | 1",
            "1 2 | 2 | 2",
            "1 2 | 2 | 2",
            "2 4 | 2 4 | 2",  # the tie at 4
            "2 4 | 2 4 | 2",
            "2 4 6 | 4 6 | 2",  # 2 is spared
            "2 4 6 7 | 4 6 | 7",  # a kill now goes back to state 6, whose best is 2
            "7 8 | 6 8 | 7",
        ]
        saves.after_step(9, {})
        with exits_with_one_line("the run is finished, its weights", "step-000009"):
            newest_step(tmp_path, RunFlags(max_steps=9))
        assert listing(tmp_path) == "7 8 9 | 6 8 | 7"
        (tmp_path / ".lock").unlink()
        # a state was due, but a kill came first
        assert newest_step(tmp_path, RunFlags(max_steps=9, save_every=3)) == 8
        saves_of(tmp_path, scores=[(7, 0.6)])
        assert listing(tmp_path) == "7 8 | 6 8 | 7"
        saves_of(tmp_path)
        assert listing(tmp_path) == "7 8 | 6 8 | "  # without any score there is no link
        shutil.copytree(tmp_path / "checkpoints/step-000008", tmp_path / "checkpoints/best")
        saves_of(tmp_path, scores=[(7, 0.6)])  # as of a copy without links
        assert listing(tmp_path) == "7 8 | 6 8 | 7" and (tmp_path / "checkpoints/best").is_symlink()
        shutil.rmtree(tmp_path / "resume")
        (tmp_path / ".lock").unlink()
        with exits_with_one_line("the run is finished, its weights", "step-000008"):
            newest_step(tmp_path, RunFlags(max_steps=8))
        shutil.rmtree(tmp_path / "checkpoints")
        saves_of(tmp_path, scores=[(7, 0.6)])

    run_ranks(1, body)


# --- the log and the flags ------------------------------------------------------------------------


def log_of(step=0, **flags):
    return RunLog("algos/x.py", RolloutFlags(**flags), "t", step)


def test_a_resumed_log_goes_on_after_the_step(tmp_path, capsys, one_rank):
    """Rows of later steps and a line that the kill cut are dropped, config.json gets the flags that
    changed, the table follows; no run is resumed to a step behind it. Missing rows are missed.
    """
    with closing(log_of(out=str(tmp_path), max_steps=6)) as log:
        log.write(0, {"loss/total": 2.0, "test/t": 0.5})
        for step in range(1, 7):
            log.write(step, {"loss/total": 1 / step})
            log.append("samples.jsonl", step, [{"completion": "a\u2028b\x85c\r\n漢字"}] * 2)
        log.write(4, {"test/t": 0.5})  # of a run that was to end there, made again
    directory, config = log.run_dir, (log.run_dir / "config.json").read_bytes()
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(directory / name, "ab") as file:
            file.write('{"step": 4, "x": "漢'.encode()[:-1])
    with closing(log_of(4, out="elsewhere", seed=2, resume=str(directory))) as log:
        assert log.run_dir == directory and log.history("loss/total")[-1] == (4, 0.25)
        assert [row["step"] for row in rows_of(directory)] == [0, 1, 2, 3, 4]
        lines = (directory / "samples.jsonl").read_bytes().decode().split("\n")[:-1]
        assert [json.loads(line)["step"] for line in lines] == [1, 1, 2, 2, 3, 3, 4, 4]
        log.write(5, {"loss/total": 0.5})
    assert (directory / "metrics.csv").read_text().splitlines()[-1] == "5,0.5,"
    had, has = map(json.loads, (config, (directory / "config.json").read_bytes()))
    assert has.pop("resumed").keys() == {"4"} and has.pop("args")["seed"] == 2
    assert had == has | {"args": had["args"]} and not Path("elsewhere").exists()
    with exits_with_one_line("the run is at step 5, beyond --max-steps"):
        log_of(5, max_steps=4, resume=str(directory))
    assert not capsys.readouterr().err
    kept = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text("".join(kept[:3]))
    log_of(5, resume=str(directory)).close()
    assert f"--resume: {directory}/metrics.jsonl lacks 3 of 5 steps" in capsys.readouterr().err


CHANGED = {
    "--seed 8": "--seed 7, now it is 8",
    "--seed 42": "--seed 7, now it is 42",  # the default of the script is a change too
    "--learning-rate 1": "--learning-rate 0.0005, now it is 1.0",
    "--betas 0.9 0.95": "--betas [0.8, 0.95], now it is [0.9, 0.95]",
    "--task ../mine.py": "--task ",  # another file
}


def test_resume_takes_the_flags_of_the_run(tmp_path, monkeypatch, capsys):
    """Few may change; a change is refused with the flag, the old value and the new one. So are
    flags that this version does not have, or not with such a value. Files of a user have their
    whole path.
    """
    monkeypatch.chdir(tmp_path)
    had = {"learning_rate": 5e-4, "lora_targets": ("q_proj",), "seed": 7, "betas": (0.8, 0.95)}
    had |= {"task": f"{tmp_path}/mine.py", "out": "", "compile": False, "micro_batch_size": 8}
    Path("mymodel").symlink_to(MODELS["tiny-sdar"])
    had |= {
        "model": f"{tmp_path}/mymodel",
        "data": f"{tmp_path}/rows.jsonl@d1",
        "reward": f"{tmp_path}/mine.py:pay",
    }
    for name in "mine.py", "rows.jsonl":
        Path(name).touch()

    def parse(flags, **args):
        config = {"script": "d1", "args": had | args}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return parsed("d1", "--resume", tmp_path, *flags.split())

    same = "--seed 7 --betas 0.8 0.95 --task mine.py --data rows.jsonl@d1 --reward mine.py:pay "
    same += "--model mymodel --max-steps 50 --track --dead-steps 3 --reward-errors -1 "
    same = parse(same + "--micro-batch-size 4")
    more = {
        "max_steps": 50,
        "dead_steps": 3,
        "track": True,
        "reward_errors": -1.0,
        "micro_batch_size": 4,
    }
    assert same == d1.Args(**had | more, resume=str(tmp_path))
    for flags, words in CHANGED.items():
        with exits_with_one_line("--resume: the run had", re.escape(words)):
            parse(flags)
    for name, value in {"betas": 0.9, "cache": "new", "no_field_of_it": 1}.items():
        with pytest.raises(SystemExit) as error:
            parse("", **{name: value})
        assert f"--{name.replace('_', '-')}" in f"{error.value} {capsys.readouterr().err}"


# --- real runs ------------------------------------------------------------------------------------

RUN = "--prompts-per-step 2 --num-generations 4 --num-iterations 2 --eval-every 4 --eval-limit 2 "
RUN += "--max-steps 5 --learning-rate 1e-3"
OFFLINE = "--batch-size 4 --eval-limit 2 --max-steps 5 --learning-rate 1e-3"
EXEMPT = ("time/", "speed/", "memory/")


def script_main(rank, ranks, port, out, flags):
    """A forked process is the script from here on."""
    sys.stdout = sys.stderr = open(out, "a", buffering=1)
    os.chdir(ROOT)
    atexit._clear()
    if ranks > 1:
        # four ranks are two nodes
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}
        os.environ |= where | {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    sys.argv = sys.orig_argv = flags
    load_few_problems()
    try:
        sys.path.insert(0, str((ROOT / flags[0]).parent))  # as `python FILE` does
        runpy.run_path(flags[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


class Run:
    """A script at work on some ranks: forks of this process that run it as __main__."""

    def __init__(self, out, ranks, *flags):
        """out: text file for the output; flags: script and its flags"""
        self.out, arguments = Path(out), (ranks, free_port(), out, [*map(str, flags)])
        fork = multiprocessing.get_context("fork").Process
        self.ranks = [fork(target=script_main, args=(rank, *arguments)) for rank in range(ranks)]
        for process in self.ranks:
            process.start()

    def finish(self, code=0):
        """-> its output; another exit code fails the test"""
        for process in self.ranks:
            process.join(120)
            process.kill()  # it hangs
        output = self.out.read_text()
        assert code in (None, *(process.exitcode for process in self.ranks)), output[-4000:]
        return output


def assert_same_record(directory, want):
    """All metrics but what a clock measures, every sample, the same saves with the same bytes in
    them.
    """
    shown = lambda row: {key: value for key, value in row.items() if not key.startswith(EXEMPT)}
    for name in ("metrics", "samples"):
        assert [*map(shown, rows_of(directory, name))] == [*map(shown, rows_of(want, name))]
    files = lambda place: {
        str(path.relative_to(place)): path.suffix == ".safetensors" and path.read_bytes()
        for path in place.glob("checkpoints/*/*")
    }
    assert files(directory) == files(want)


def at_row(patch, step, action):
    """Call action(run directory, is it the first rank's) on every rank that has written this row"""
    write = RunLog.write

    def acting(log, number, metrics):
        write(log, number, metrics)
        if number == step:
            action(log.run_dir, log.is_writer)

    patch.setattr(RunLog, "write", acting)


full = pytest.mark.full
MOVES = " --ref-sync-steps 4"  # after the updates of two steps, just after a save
KILLED = {
    # script, flags, ranks; ranks of another resumed run, if any
    "coupled_grpo": ("coupled_grpo", RUN + MOVES + " --refill 1", 1, 2),
    "espo": pytest.param("espo", RUN + MOVES, 1, 0, marks=full),
    "dtreerpo": pytest.param("dtreerpo", RUN + " --branches 2 2 --lambda-max 1", 1, 0, marks=full),
    "opsd": pytest.param("opsd", RUN, 1, 2, marks=full),
    "tracerl with a value model": ("tracerl", RUN + " --value-model --train-steps 1", 1, 0),
    "sft on two nodes": ("sft", OFFLINE + " --max-length 64 --pack-length 64", 4, 1),
    "vrpo": pytest.param("vrpo", OFFLINE + " --mc-num 2", 1, 0, marks=full),
    "distill": ("distill", OFFLINE + " --data tests/golden/own.jsonl", 1, 2),
}


@pytest.mark.parametrize("script, flags, ranks, others", KILLED.values(), ids=list(KILLED))
def test_a_run_goes_on_as_the_uninterrupted_one(
    warm, tmp_path, monkeypatch, script, flags, ranks, others
):
    """From the files that a kill would leave, with a row behind the last save: metrics, samples and
    weights bit for bit. On another number of ranks they differ by rounding.
    """
    left, script = tmp_path / "left", f"algos/{script}.py"
    with monkeypatch.context() as patch:
        leave = lambda run_dir, is_first: is_first and shutil.copytree(run_dir, left, symlinks=True)
        at_row(patch, 3, leave)
        whole = "--save-every", 2, *flags.split(), "--out", tmp_path / "whole"
        Run(tmp_path / "a", ranks, script, *whole).finish()
    (directory,) = (tmp_path / "whole").iterdir()
    if others:
        shutil.copytree(left, moved := tmp_path / "moved")
        Run(tmp_path / "c", others, script, "--resume", moved).finish()
        assert_same(moved, directory)
    Run(tmp_path / "b", ranks, script, "--resume", left).finish()
    assert_same_record(left, directory)


# a reward that raises once the file `bad` is there
OWN = """
from pathlib import Path

def pay(completion, example):
    return len(completion) / (not Path(__file__).with_name("bad").exists())
"""


def interrupt(run_dir, is_first):
    """Ctrl-C, which torchrun sends once more, on one rank, on the other SIGTERM."""
    for number in (signal.SIGINT, signal.SIGINT) if is_first else (signal.SIGTERM,):
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("stop, ranks", [("signals", 2), ("a reward", 1)])
def test_a_run_that_is_stopped_goes_on_as_the_uninterrupted_one(
    warm, tmp_path, monkeypatch, stop, ranks
):
    """Two ranks with LoRA. Signals: both stop after the step they are in; a reward that raises:
    before the update. They say how to go on, on one rank too. What --resume refuses changes
    nothing.
    """
    (tmp_path / "pay.py").write_text(OWN)
    flags = RUN + " --lora-rank 4 --lora-targets q_proj v_proj --save-every 2 --out"
    run = "algos/bgpo.py", "--reward", tmp_path / "pay.py:pay", *flags.split()
    Run(tmp_path / "a", 2, *run, tmp_path / "whole").finish()
    with monkeypatch.context() as patch:
        spoil = lambda *_: (tmp_path / "bad").touch()
        at_row(patch, 3, interrupt if stop == "signals" else spoil)
        text = Run(tmp_path / "b", 2, *run, tmp_path / "stopped").finish(stop != "signals")
    (directory,), (whole,) = (tmp_path / "stopped").iterdir(), (tmp_path / "whole").iterdir()
    if stop == "signals":
        assert f"step 3: stopped by a signal; go on with --resume {directory}" in text
    else:
        (tmp_path / "bad").unlink()
        (tmp_path / "pay.py").write_text(OWN + "# mended\n")
        assert "pay.py line 5; ZeroDivisionError" in text and "Traceback" not in text
        assert f"step 3 is saved, go on with --resume {directory}" in text
    held = dcp.FileSystemReader(directory / "resume/step-000003/state").read_metadata()
    assert all("lora_" in k or "param_groups" in k for k in held.state_dict_metadata)
    contents = lambda: {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()}
    resume, files = ("--resume", directory), contents()
    assert directory / "report.html" in files
    text = Run(tmp_path / "d1", 2, "algos/d1.py", *resume).finish(1)
    assert "is a run of bgpo.py, not of d1.py" in text and "Traceback" not in text
    assert contents() == files
    text = Run(tmp_path / "c", ranks, *run[:1], *resume).finish()
    assert ("reward has been edited" in text) == (stop != "signals")
    shutil.rmtree(directory / "checkpoints/step-000003", ignore_errors=True)
    (assert_same_record if ranks == 2 else assert_same)(directory, whole)
