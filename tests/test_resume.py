"""Exact resume: states on disk, what a run keeps, its log, and real runs that are killed at random moments and go on.

The runs of the default suite are the scripts themselves, executed as __main__ in forks of a process that has imported torch
already, without figures; with --all they are the commands that a user types, python and torchrun.
"""

import atexit
import contextlib
import faulthandler
import itertools
import json
import os
import random
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_models import MASK, SMALL, exits_with_one_line, model_of
from tqdm import tqdm

import runlog
from algos import d1
from models import add_lora, export_adapter, export_weights, load_model, load_tokenizer
from models.tiny import byte_tokenizer
from models.training_state import Saves, load_state, newest_state, prune, save_state
from runlog import RunLog, command_line

ROOT = Path(__file__).parents[1]
ARGS = SimpleNamespace(activation_checkpointing=False, attention="auto", compile=False)
full = pytest.mark.full


def build(rank=0, config=SMALL, targets=(), seed=0):
    """-> sharded model, full or with adapters of this rank, and its optimizer"""
    model = model_of(config)
    if rank:
        add_lora(model, rank, 8, targets, seed)
    model = d1.parallelize(model, ARGS)
    return model, torch.optim.AdamW(
        [value for value in model.parameters() if value.requires_grad], lr=1e-3
    )


def train(model, optimizer, steps):
    """One AdamW step for each number, on data keyed by it and the rank."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        ids = torch.randint(2, MASK, (4, 12), generator=generator)
        score = torch.rand(4, 12, generator=generator) < 0.5
        (-model.logps(ids, torch.where(score, MASK, ids), score).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def snapshot(model, optimizer):
    """Every parameter of this rank and both moments of those that train."""
    local = lambda value: (value.to_local() if hasattr(value, "to_local") else value).clone()
    held = {name: local(value) for name, value in model.state_dict().items()}
    for name, value in model.named_parameters():
        if value.requires_grad:
            held |= {
                f"{name}/{key}": local(moment) for key, moment in optimizer.state[value].items()
            }
    return held


def assert_equal(a, b):
    assert a.keys() == b.keys() and len(a) > 10
    assert all(torch.equal(a[name], b[name]) for name in a), [
        name for name in a if not torch.equal(a[name], b[name])
    ]


# --- states ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
def test_three_steps_after_loading_are_those_of_the_uninterrupted_run(
    run_ranks, tmp_path, rank, world_size
):
    """'What a killed run needs to go on, bit for bit': parameters and moments, at once and three steps later."""

    def body(_, world_size):
        model, optimizer = build(rank)
        train(model, optimizer, range(3))
        save_state(tmp_path / "resume", model, optimizer, 3, keep=0)
        at_save = snapshot(model, optimizer)
        train(model, optimizer, range(3, 6))
        fresh, fresh_optimizer = build(
            rank, seed=9
        )  # other adapters: all of it must come from the file
        assert load_state(newest_state(tmp_path / "resume"), fresh, fresh_optimizer) == 3
        assert_equal(snapshot(fresh, fresh_optimizer), at_save)
        train(fresh, fresh_optimizer, range(3, 6))
        assert_equal(snapshot(fresh, fresh_optimizer), snapshot(model, optimizer))
        lame, lame_optimizer = build(
            rank
        )  # negative control: without the moments the run is another one
        load_state(
            newest_state(tmp_path / "resume"),
            lame,
            torch.optim.AdamW(lame_optimizer.param_groups[0]["params"]),
        )
        train(lame, lame_optimizer, range(3, 6))
        changed = [
            name
            for name, value in lame.state_dict().items()
            if not torch.equal(value, model.state_dict()[name])
        ]
        assert changed

    run_ranks(world_size, body)
    (state,) = (tmp_path / "resume").iterdir()
    assert json.loads((state / "facts.json").read_text()) == {"step": 3, "world_size": world_size}
    held = dcp.FileSystemReader(state / "state").read_metadata().state_dict_metadata
    assert all("lora_" in name or "param_groups" in name for name in held) == bool(
        rank
    )  # the frozen base is not in it


def fake_states(directory, *steps):
    for step in steps:
        (directory / f"step-{step:06d}/state").mkdir(parents=True)
        (directory / f"step-{step:06d}/facts.json").write_text(
            json.dumps({"step": step, "world_size": 1})
        )


def test_the_newest_complete_state_is_found(tmp_path):
    """Hidden folders of a killed save, and folders whose facts.json is missing, are no states."""
    with exits_with_one_line("--resume", str(tmp_path), "no complete state", "--save-every"):
        newest_state(tmp_path)
    fake_states(tmp_path, 2, 10, 4)
    shutil.copytree(tmp_path / "step-000010", tmp_path / ".step-000012.tmp")
    (tmp_path / "step-000014/state").mkdir(parents=True)
    assert newest_state(tmp_path).name == "step-000010"


def test_prune_keeps_the_newest_and_what_is_spared(run_ranks, tmp_path):
    """'deletes all but the newest keep (0 keeps all), and those named in spare'"""

    def body(rank, world_size):
        fake_states(tmp_path, *range(1, 7))
        names = lambda: [int(path.name[5:]) for path in sorted(tmp_path.glob("step-*"))]
        prune(tmp_path, 0)
        assert names() == [1, 2, 3, 4, 5, 6]
        prune(tmp_path, 3, spare=["step-000002"])
        assert names() == [2, 4, 5, 6]
        prune(tmp_path, 1)
        assert names() == [6]

    run_ranks(1, body)


def test_a_state_of_another_world_size_is_refused(run_ranks, tmp_path):
    def save(rank, world_size):
        save_state(tmp_path, *build(), 1, keep=0)

    def load(rank, world_size):
        with exits_with_one_line("--resume", "was saved by 2 ranks, this run has 1"):
            load_state(newest_state(tmp_path), *build())

    run_ranks(2, save)
    run_ranks(1, load)


WIDE, DEEP, SHALLOW = ({"hidden_size": 24}, {"num_hidden_layers": 3}, {"num_hidden_layers": 1})
OTHER = {  # state, model: what differs
    "wider": ({}, {"config": SMALL | WIDE}),
    "deeper": ({}, {"config": SMALL | DEEP}),
    "shallower": ({}, {"config": SMALL | SHALLOW}),
    "full into LoRA": ({}, {"rank": 4}),
    "LoRA into full": ({"rank": 4}, {}),
    "LoRA rank": ({"rank": 4}, {"rank": 8}),
    "LoRA of a deeper model": ({"rank": 4}, {"rank": 4, "config": SMALL | DEEP}),
    "LoRA of a shallower model": ({"rank": 4}, {"rank": 4, "config": SMALL | SHALLOW}),
    "fewer LoRA targets": ({"rank": 4}, {"rank": 4, "targets": ["q_proj"]}),
    "more LoRA targets": ({"rank": 4, "targets": ["q_proj"]}, {"rank": 4}),
}


@pytest.mark.parametrize("was, now", OTHER.values(), ids=list(OTHER))
def test_a_state_of_another_model_is_refused(run_ranks, tmp_path, was, now):
    """Tensors that are missing, misshapen, or left over: one line on every rank, and nothing is trained on a half."""

    def body(rank, world_size):
        model, optimizer = build(**was)
        train(model, optimizer, [0])
        save_state(tmp_path, model, optimizer, 1, keep=0)
        with exits_with_one_line("--resume", "step-000001", "does not fit this model"):
            load_state(newest_state(tmp_path), *build(**now))

    run_ranks(1, body)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_saving_leaves_earlier_states_on_every_rank(
    run_ranks, tmp_path, monkeypatch, failing
):
    """dcp.save raises CheckpointException on every rank, whichever met the full disk; all exit, nothing hangs."""

    def body(rank, world_size):
        model, optimizer = build()
        train(model, optimizer, [0])
        save_state(tmp_path, model, optimizer, 1, keep=1)
        write = dcp.filesystem.FileSystemWriter.write_data

        def broken(*args, **kwargs):
            if rank == failing:
                raise OSError(28, "No space left on device")
            return write(*args, **kwargs)

        monkeypatch.setattr(dcp.filesystem.FileSystemWriter, "write_data", broken)
        with exits_with_one_line(
            "could not save",
            "step-000002",
            "No space left on device",
            f"rank {failing}",
            "earlier saves",
        ):
            save_state(tmp_path, model, optimizer, 2, keep=1)
        monkeypatch.setattr(dcp.filesystem.FileSystemWriter, "write_data", write)
        assert [path.name for path in tmp_path.glob("*step*")] == ["step-000001"]
        at_save = snapshot(model, optimizer)
        fresh, fresh_optimizer = build(seed=3)
        load_state(newest_state(tmp_path), fresh, fresh_optimizer)
        assert_equal(snapshot(fresh, fresh_optimizer), at_save)
        save_state(tmp_path, model, optimizer, 2, keep=1)  # there is room again
        assert newest_state(tmp_path).name == "step-000002"

    run_ranks(2, body)


@pytest.mark.parametrize("limit", [3000, 0], ids=["tensors", "everything"])
def test_a_full_disk_leaves_earlier_states(run_ranks, tmp_path, limit):
    """A limit on file size stands for the full disk, on both ranks of a forked run."""

    def body(rank, world_size):
        model, optimizer = build()
        save_state(tmp_path, model, optimizer, 1, keep=0)
        dist.barrier()
        files = lambda: {
            path: path.read_bytes() for path in tmp_path.rglob("*step-*/**/*") if path.is_file()
        }
        before = files()
        dist.barrier()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        reason = "No space left" if limit else "File too large"
        with exits_with_one_line("could not save", "step-000002", reason):
            save_state(tmp_path, model, optimizer, 2, keep=1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        dist.barrier()
        assert files() == before and len(before) > 2

    run_ranks(2, body)


@pytest.mark.parametrize("where", ["during", "before the name"])
def test_a_kill_amid_a_save_leaves_no_state(run_ranks, tmp_path, monkeypatch, where):
    """'what newest_state finds is complete'; the next save of that step takes the place of the remains."""

    def killed(rank, world_size):
        model, optimizer = build()
        save_state(tmp_path / "resume", model, optimizer, 1, keep=0)
        if where == "during":
            monkeypatch.setattr(
                dcp, "save", lambda held, checkpoint_id: [checkpoint_id.mkdir(), os._exit(9)]
            )
        else:
            monkeypatch.setattr(os, "rename", lambda *_: os._exit(9))
        save_state(tmp_path / "resume", model, optimizer, 2, keep=1)

    def again(rank, world_size):
        assert newest_state(tmp_path / "resume").name == "step-000001"
        assert (tmp_path / "resume/.step-000002.tmp").is_dir()
        save_state(tmp_path / "resume", *build(), 2, keep=0)
        assert sorted(os.listdir(tmp_path / "resume")) == ["step-000001", "step-000002"]

    with pytest.raises(Exception, match="exit code 9"):
        run_ranks(1, killed)
    monkeypatch.undo()
    run_ranks(1, again)


# --- what a run keeps --------------------------------------------------------------------------------------------------------


def saves_of(tmp_path, model, optimizer, keep=0, scores=()):
    return Saves(tmp_path, model, optimizer, byte_tokenizer(), "tiny-sdar", keep, scores)


def listing(tmp_path):
    """-> steps in checkpoints/, steps in resume/, step that best names; when every rank is done and none goes on"""
    dist.barrier()
    found = look(tmp_path)
    dist.barrier()
    return found


def look(tmp_path):
    steps = lambda folder: [
        int(path.name[5:]) for path in sorted((tmp_path / folder).glob("step-*"))
    ]
    best = tmp_path / "checkpoints/best"
    return (
        steps("checkpoints"),
        steps("resume"),
        int(os.readlink(best)[5:]) if best.is_symlink() else None,
    )


def best_exists(tmp_path):
    link = tmp_path / "checkpoints/best"
    return not link.is_symlink() or link.exists()


@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
def test_best_follows_the_score_and_survives_pruning(run_ranks, tmp_path, rank):
    """'link to the weights with the best validation score'; a tie keeps the earlier; --model takes the link."""

    def body(_, world_size):
        model, optimizer = build(rank)
        saves = saves_of(tmp_path, model, optimizer, keep=2)
        seen, held = [], {}
        for step, score in enumerate([0.2, 0.5, None, 0.5, 0.1, None, 0.6, 0.6], start=1):
            train(model, optimizer, [step])
            due = step % 2 == 0
            saves.after_step(step, score, weights=due, state=due)
            held[step] = [
                value.clone() for _, value in (export_adapter if rank else export_weights)(model)
            ]
            seen.append(listing(tmp_path))
            assert best_exists(tmp_path)
        assert seen == [
            ([1], [], 1),
            ([1, 2], [2], 2),
            ([1, 2], [2], 2),
            ([2, 4], [2, 4], 2),  # the tie at 4
            ([2, 4], [2, 4], 2),
            ([2, 4, 6], [4, 6], 2),  # 2 is spared
            (
                [2, 4, 6, 7],
                [4, 6],
                7,
            ),  # a kill now goes back to state 6, whose best is 2: pruned only with the next state
            ([7, 8], [6, 8], 7),
        ]
        if not rank:
            best = load_model(tmp_path / "checkpoints/best")
            assert all(torch.equal(a, b) for a, b in zip(best.parameters(), held[7], strict=True))

    run_ranks(1, body)


def test_load_drops_weights_of_steps_that_are_to_come(run_ranks, tmp_path):
    """'weights saved after it are deleted', and the link is right: best of the rows that stay."""

    def body(rank, world_size):
        model, optimizer = build()
        saves = saves_of(tmp_path, model, optimizer)
        for step, score in [(1, None), (2, 0.3), (3, 0.9)]:
            train(model, optimizer, [step])
            saves.after_step(step, score, weights=True, state=step == 2)
        assert listing(tmp_path) == ([1, 2, 3], [2], 3)
        fresh, fresh_optimizer = build()
        assert Saves.load(tmp_path, fresh, fresh_optimizer) == 2
        assert listing(tmp_path)[:2] == ([1, 2], [2])
        saves = saves_of(tmp_path, fresh, fresh_optimizer, scores=[(2, 0.3)])
        assert (
            listing(tmp_path) == ([1, 2], [2], 2)
            and best_exists(tmp_path)
            and saves.best == (2, 0.3)
        )
        train(fresh, fresh_optimizer, [3])
        saves.after_step(3, 0.9, weights=True)
        assert listing(tmp_path) == ([1, 2, 3], [2], 3)

    run_ranks(2, body)


def test_best_never_names_what_is_gone(run_ranks, tmp_path):
    """--keep-saves 1, a new best between two states, then a kill: after load the earlier best must still be there."""

    def body(rank, world_size):
        model, optimizer = build()
        saves = saves_of(tmp_path, model, optimizer, keep=1)
        saves.after_step(2, 0.3, weights=True, state=True)
        saves.after_step(
            3, 0.9
        )  # the best so far, step 2 would be pruned; killed before the state of step 4
        Saves.load(tmp_path, model, optimizer)
        saves_of(tmp_path, model, optimizer, keep=1, scores=[(2, 0.3)])
        assert best_exists(tmp_path), listing(tmp_path)

    run_ranks(1, body)


def test_without_any_score_there_is_no_link(run_ranks, tmp_path):
    """A link of a step that load took back goes too."""

    def body(rank, world_size):
        model, optimizer = build()
        saves = saves_of(tmp_path, model, optimizer)
        saves.after_step(1, None, weights=True, state=True)
        saves.after_step(2, 0.5)
        assert listing(tmp_path) == ([1, 2], [1], 2)
        Saves.load(tmp_path, model, optimizer)
        saves_of(tmp_path, model, optimizer)
        assert listing(tmp_path) == ([1], [1], None)

    run_ranks(1, body)


# --- the log -----------------------------------------------------------------------------------------------------------------


def run_directory(tmp_path, rows=6, **args):
    """A run's directory as RunLog leaves it."""
    with RunLog(tmp_path, "x", 0, {"seed": 1} | args, rows) as log:
        log.write(0, {"loss/total": 2.0})
        for step in range(1, rows + 1):
            log.write(step, {"loss/total": 1 / step})
            log.samples(step, [{"completion": f"größe {step}"}, {"completion": "漢字"}])
    return log.run_dir


def jsonl(path):
    return [json.loads(line) for line in path.read_bytes().decode().split("\n")[:-1]]


def test_a_resumed_log_goes_on_after_the_step(tmp_path):
    """'rows of steps after step are dropped from its files, config.json stays'; the table and figure follow."""
    directory = run_directory(tmp_path)
    config = (directory / "config.json").read_bytes()
    kept = {
        name: [row for row in jsonl(directory / name) if row["step"] <= 4]
        for name in ("metrics.jsonl", "samples.jsonl")
    }
    with RunLog("elsewhere", "y", 0, {"seed": 2}, 6, resume=str(directory), step=4) as log:
        assert log.run_dir == directory and log.history("loss/total")[-1] == (4, 0.25)
        assert {name: jsonl(directory / name) for name in kept} == kept
        assert [len(kept[name]) for name in kept] == [5, 8]
        log.write(5, {"loss/total": 0.5})
    assert [row["step"] for row in jsonl(directory / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]
    assert (directory / "metrics.csv").read_text().splitlines()[-1] == "5,0.5"
    assert (directory / "config.json").read_bytes() == config and not Path("elsewhere").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_line_cut_by_the_kill_is_dropped(tmp_path, monkeypatch, name):
    """At every byte of the last row, in the middle of a character of several bytes too."""
    monkeypatch.setattr(runlog, "draw_curves", lambda run_dir: None)
    directory = run_directory(tmp_path, rows=3)
    whole = (directory / name).read_bytes()
    last = whole[:-1].rfind(b"\n") + 1
    for cut in range(last, len(whole)):
        (directory / name).write_bytes(whole[:cut])
        RunLog("", "", 0, {}, 9, resume=str(directory), step=9).close()
        assert (directory / name).read_bytes() == whole[:last], whole[last:cut]


@pytest.mark.parametrize(
    "text", ["a\u2028b", "a\x85b", "a\u2029b", "a\x0bb\x1cc", "a\r\nb", "\ud7ff\U0001f642"]
)
def test_samples_may_hold_any_character(tmp_path, text):
    """JSON in one line is one line: what str.splitlines takes for an end of line may stand in a completion."""
    directory = run_directory(tmp_path, rows=1)
    with RunLog("", "", 0, {}, 6, resume=str(directory), step=1) as log:
        log.samples(2, [{"completion": text}])
    before = (directory / "samples.jsonl").read_bytes()
    RunLog("", "", 0, {}, 6, resume=str(directory), step=2).close()
    assert (directory / "samples.jsonl").read_bytes() == before
    assert jsonl(directory / "samples.jsonl")[-1] == {"step": 2, "completion": text}


# --- the command line --------------------------------------------------------------------------------------------------------


@dataclass
class Arguments:
    learning_rate: float = 1e-3
    """x"""
    betas: tuple[float, float] = (0.9, 0.999)
    """x"""
    lora_targets: tuple[str, ...] = ()
    """x"""
    compile: bool = False
    """x"""
    max_steps: int = 10
    """x"""
    seed: int = 42
    """x"""
    track: bool = False
    """x"""
    resume: str = ""
    """x"""


@pytest.fixture
def run_dir(tmp_path):
    """A run whose every argument is not the default."""
    args = {
        "learning_rate": 3e-4,
        "betas": [0.8, 0.95],
        "lora_targets": ["q_proj"],
        "compile": True,
        "max_steps": 20,
        "seed": 7,
    }
    return run_directory(tmp_path, rows=1, **args, track=False, resume="")


def parse(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["algos/x.py", *map(str, flags)])
    return command_line(Arguments)


def test_resume_takes_the_arguments_of_the_run(monkeypatch, run_dir):
    """'With --resume DIR, that run's own arguments are the defaults'"""
    want = {
        "learning_rate": 3e-4,
        "betas": (0.8, 0.95),
        "lora_targets": ("q_proj",),
        "compile": True,
        "max_steps": 20,
        "seed": 7,
    }
    assert parse(monkeypatch, "--resume", run_dir) == Arguments(**want, resume=str(run_dir))
    assert parse(monkeypatch, "--seed", 5) == Arguments(seed=5)
    same = parse(
        monkeypatch,
        "--resume",
        run_dir,
        "--seed",
        7,
        "--learning-rate",
        "0.0003",
        "--betas",
        0.8,
        0.95,
    )
    assert same == Arguments(**want, resume=str(run_dir))


def test_more_steps_and_tracking_are_allowed(monkeypatch, run_dir):
    now = parse(monkeypatch, "--resume", run_dir, "--max-steps", 50, "--track")
    assert (now.max_steps, now.track, now.seed) == (50, True, 7)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--seed", 8], ["--seed", "7", "8"]),
        (["--seed", 42], ["--seed", "7", "42"]),  # the default of the script is a change too
        (["--learning-rate", 1e-3], ["--learning-rate", "0.0003", "0.001"]),
        (["--no-compile"], ["--compile", "True", "False"]),
        (["--betas", 0.9, 0.95], ["--betas", "0.8", "0.9"]),
        (["--lora-targets", "q_proj", "v_proj"], ["--lora-targets", "q_proj", "v_proj"]),
    ],
)
def test_a_changed_argument_is_refused(monkeypatch, run_dir, flags, words):
    """'which argument, which value': one line with the flag, the old value and the new one"""
    with exits_with_one_line("--resume", *words):
        parse(monkeypatch, "--resume", run_dir, *flags)


def test_no_run_directory_is_named(monkeypatch, tmp_path):
    with exits_with_one_line("--resume", "nowhere", "no run directory"):
        parse(monkeypatch, "--resume", tmp_path / "nowhere")
    with exits_with_one_line("--resume", "no run directory"):
        parse(monkeypatch, "--resume", tmp_path)


# --- real runs ---------------------------------------------------------------------------------------------------------------


def test_a_child_killed_at_its_bar_does_not_stop_the_next():
    """Forks share what the parent shares with them: the lock of the progress bars must not be such a thing."""
    tqdm.get_lock()  # as any bar of an earlier test would have
    reader, writer = os.pipe()
    killed = os.fork()
    if killed == 0:
        tqdm.get_lock().acquire()
        os.write(writer, b"x")
        signal.pause()
    os.close(writer)
    assert os.read(reader, 1) == b"x"
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    following = os.fork()
    if following == 0:
        signal.alarm(20)
        with open(os.devnull, "w") as nowhere, tqdm(total=1, file=nowhere) as bar:
            bar.update()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(following, 0)[1]) == 0, (
        "it waits for a lock that nobody holds"
    )


@pytest.fixture(scope="module", autouse=True)
def warm():
    """What the scripts import late, so that forks share it."""
    import tyro  # noqa: F401
    from peft import LoraConfig  # noqa: F401

    load_tokenizer("tiny-sdar")


RUN = "--prompts-per-step 4 --num-generations 4 --mc-num 2 --save-every 2 --eval-every 4 --eval-limit 8 --learning-rate 1e-4"
EXEMPT = ("time/", "speed/", "memory/")


class Run:
    """A script at work, on one or two ranks: real commands, or forks of this process that run it as __main__."""

    def __init__(self, flags, out, ranks=1, real=False):
        """flags: script and its flags; out: text file for the output."""
        self.out, self.popen, self.codes = Path(out), None, {}
        if real:
            launch = (
                ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
                if ranks > 1
                else []
            )
            with open(out, "w") as file:
                self.popen = subprocess.Popen(
                    [sys.executable, *launch, *flags], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
                    stdout=file, stderr=file, start_new_session=True,
                )  # fmt: skip
            self.pids = [self.popen.pid]
        else:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = str(probe.getsockname()[1])
            self.pids = [self._fork(flags, rank, ranks, port) for rank in range(ranks)]

    def _fork(self, flags, rank, ranks, port):
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:  # the child is the script from here on
            os.setsid()
            descriptor = os.open(self.out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1), os.dup2(descriptor, 2)
            faulthandler.register(signal.SIGUSR1, file=2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
            os.chdir(ROOT)
            atexit._clear()
            torch.set_num_threads(1)
            if ranks > 1:
                where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                os.environ |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    **where,
                }
            sys.argv = sys.orig_argv = list(flags)
            runlog.draw_curves = lambda run_dir: None
            runpy.run_path(flags[0], run_name="__main__")
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
            print(error, file=sys.stderr)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)

    def ended(self):
        for pid in self.pids if self.popen is None else []:
            if pid not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
        if self.popen is not None and self.popen.poll() is not None:
            self.codes[self.popen.pid] = self.popen.returncode
        return len(self.codes) == len(self.pids)

    def wait_until(self, condition, limit=240):
        """-> whether the condition came true before the run ended"""
        for _ in range(int(limit / 0.005)):
            if condition():
                return True
            if self.ended():
                return False
            time.sleep(0.005)
        if self.popen is None:
            self.signal(signal.SIGUSR1)  # where it hangs
            time.sleep(1)
        self.kill()
        pytest.fail(f"the run hangs: {self.output()}")

    def signal(self, number):
        for pid in self.pids:
            if pid not in self.codes:
                os.kill(pid, number)

    def kill(self):
        """SIGKILL to every process of the run at once. The ranks of torchrun are sessions of their own."""
        family = list(self.pids)
        for pid in family:
            with contextlib.suppress(FileNotFoundError):
                family += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                if pid not in self.codes:
                    os.kill(pid, signal.SIGKILL)
        self.wait_until(lambda: False)
        while any(Path(f"/proc/{pid}").exists() and "Z" not in status_of(pid) for pid in family):
            time.sleep(0.005)

    def finish(self):
        """-> its output; a failure fails the test"""
        self.wait_until(lambda: False)
        assert set(self.codes.values()) == {0}, self.output()
        return self.output()

    def output(self):
        return self.out.read_text()[-4000:]


def status_of(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def run_dir_in(out):
    found = list(Path(out).glob("*/config.json"))
    return found[0].parent if found else None


def complete_states(out):
    return list(Path(out).glob("*/resume/step-*/facts.json"))


def num_rows(directory):
    return (directory / "metrics.jsonl").read_bytes().count(b"\n")


def assert_same_record(directory, want):
    """Every row of the metrics but what a clock measures, every sample, the same saves with the same bytes in them."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        if (want / name).exists():
            rows, wanted = (
                [
                    {key: value for key, value in row.items() if not key.startswith(EXEMPT)}
                    for row in jsonl(place / name)
                ]
                for place in (directory, want)
            )
            assert [row["step"] for row in rows] == [row["step"] for row in wanted], name
            for row, expected in zip(rows, wanted, strict=True):
                assert row == expected, (name, row["step"])
    files = lambda place: sorted(
        str(path.relative_to(place)) for path in place.glob("checkpoints/*/*")
    )
    assert files(directory) == files(want)
    for path in want.glob("checkpoints/step-*/*.safetensors"):
        assert (directory / path.relative_to(want)).read_bytes() == path.read_bytes(), path
    best = lambda place: os.path.basename(os.path.realpath(place / "checkpoints/best"))
    assert best(directory) == best(want)


def killed_and_resumed(tmp_path, script, flags, ranks, kills, real, seed):
    """Run it once; run it again, killed at random moments; compare. -> what the kills met"""
    counter, rng = itertools.count(), random.Random(seed)
    start = lambda *more: Run(
        [f"algos/{script}.py", *flags, *more], tmp_path / f"output-{next(counter)}", ranks, real
    )
    start("--out", str(tmp_path / "whole")).finish()
    run, met = start("--out", str(tmp_path / "killed")), []
    assert run.wait_until(lambda: complete_states(tmp_path / "killed")), run.output()
    directory = run_dir_in(tmp_path / "killed")
    while True:
        # A moment up to three rows on and up to a step later, or anywhere in the start-up of a resumed run.
        rows, pause = num_rows(directory) + rng.randrange(4), rng.uniform(0, 0.3)
        if met and rng.random() < 0.2:
            rows, pause = 0, rng.uniform(0, 4.0 if real else 1.0)
        came = run.wait_until(lambda run=run, rows=rows: num_rows(directory) >= rows)
        time.sleep(pause)
        if not came or run.ended():  # it was faster
            break
        run.kill()
        unfinished = [path.name for path in directory.glob("*/.step-*")]
        met.append((num_rows(directory), len(complete_states(tmp_path / "killed")), unfinished))
        run = start("--resume", str(directory))
        if len(met) == kills:
            break
    run.finish()
    assert_same_record(directory, run_dir_in(tmp_path / "whole"))
    assert not list(directory.glob("*/.step-*")), "remains of a killed save"
    return met


GRID = [
    pytest.param(
        rank,
        ranks,
        kills,
        real,
        marks=() if default else full,
        id=f"{name}-{ranks}ranks-{kills}kills",
    )
    for name, rank in (("full", 0), ("lora", 4))
    for ranks in (1, 2)
    for kills, real in ((3, False), (10, True))
    for default in [kills == 3 and (name, ranks) in (("full", 1), ("lora", 2))]
    if kills == 10 or default
]


@pytest.mark.parametrize("rank, ranks, kills, real", GRID)
def test_killed_runs_are_the_uninterrupted_run(tmp_path, rank, ranks, kills, real):
    """issue 3: 'killed (SIGKILL) at random moments, resumed each time: metrics equal the uninterrupted run's bit for bit'"""
    flags = [*RUN.split(), "--max-steps", "10" if kills == 3 else "24", "--lora-rank", str(rank)]
    met = killed_and_resumed(tmp_path, "bgpo", flags, ranks, kills, real, seed=1000 * ranks + rank)
    print("rows, states and unfinished saves at each kill:", met)
    assert len(met) == kills, met


OFFLINE = [(1, 1, False), pytest.param(2, 6, True, marks=full)]


@pytest.mark.parametrize("ranks, kills, real", OFFLINE)
def test_a_killed_sft_run_is_the_uninterrupted_run(tmp_path, ranks, kills, real):
    """60 rows in batches of 8, packed: the order of the first and the second epoch is keyed, the layout follows from it."""
    rows = [{"prompt": f"{i} + {i} =", "response": str(2 * i)} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = (
        "--batch-size 8 --micro-batch-size 2 --learning-rate 1e-3 --save-every 2 --eval-every 4 --eval-limit 8 "
        f"--max-length 64 --pack-length 64 --lr-schedule cosine --schedule-steps 30 --max-steps {10 if kills == 1 else 24}"
    )
    flags = [*flags.split(), "--data", str(tmp_path / "rows.jsonl")]
    met = killed_and_resumed(tmp_path, "sft", flags, ranks, kills, real, seed=5)
    print("rows, states and unfinished saves at each kill:", met)
    assert len(met) == kills, met


@pytest.mark.parametrize("ranks, kills, real", [pytest.param(*OFFLINE[0], marks=full), OFFLINE[1]])
def test_a_killed_vrpo_run_is_the_uninterrupted_run(tmp_path, ranks, kills, real):
    """With a reference that is a second model, draws of every step and held-out pairs."""
    flags = (
        "--batch-size 4 --micro-batch-size 8 --mc-num 2 --learning-rate 1e-4 --save-every 2 --eval-every 4 --eval-limit 8 "
        f"--lr-schedule cosine --schedule-steps 30 --warmup-steps 3 --max-steps {10 if kills == 1 else 24}"
    )
    met = killed_and_resumed(tmp_path, "vrpo", flags.split(), ranks, kills, real, seed=6)
    print("rows, states and unfinished saves at each kill:", met)
    assert len(met) == kills, met


@pytest.mark.parametrize("ranks, real", [(1, False), pytest.param(2, True, marks=full)])
def test_sigterm_saves_and_a_resumed_run_is_the_uninterrupted_one(tmp_path, ranks, real):
    """'SIGTERM saves and exits cleanly' after the step it was in, says how to go on, and the record is the same in the end.

    torchrun itself ends with an error after SIGTERM, its ranks do not.
    """
    flags = [*RUN.split()[:6], "--eval-limit", "0", "--learning-rate", "1e-4", "--max-steps", "6"]
    start = lambda name, *more: Run(["algos/bgpo.py", *more], tmp_path / name, ranks, real)
    start("a", *flags, "--out", str(tmp_path / "whole")).finish()
    run = start("b", *flags, "--out", str(tmp_path / "stopped"))
    rows = lambda: (
        (directory := run_dir_in(tmp_path / "stopped"))
        and (directory / "metrics.jsonl").exists()
        and num_rows(directory)
    )
    assert run.wait_until(lambda: (rows() or 0) >= 3), run.output()
    run.signal(signal.SIGTERM)
    run.wait_until(lambda: False)
    directory, text = run_dir_in(tmp_path / "stopped"), run.output()
    assert real or set(run.codes.values()) == {0}, text
    (state,) = (directory / "resume").iterdir()
    step = json.loads((state / "facts.json").read_text())["step"]
    assert f"stopped by a signal after step {step}" in text and f"--resume {directory}" in text
    assert 2 <= step < 6 and jsonl(directory / "metrics.jsonl")[-1]["step"] == step
    assert (directory / f"checkpoints/step-{step:06d}/model.safetensors").is_file() and (
        directory / "metrics.csv"
    ).is_file()
    start("c", "--resume", str(directory)).finish()
    shutil.rmtree(directory / f"checkpoints/step-{step:06d}")
    assert_same_record(directory, run_dir_in(tmp_path / "whole"))


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    """'the final test score is reported once': a run killed after its last row, or resumed by mistake, writes no second one."""
    flags = [*RUN.split(), "--max-steps", "2"]
    Run(["algos/bgpo.py", *flags, "--out", str(tmp_path / "runs")], tmp_path / "a").finish()
    directory = run_dir_in(tmp_path / "runs")
    before = jsonl(directory / "metrics.jsonl")
    text = Run(["algos/bgpo.py", "--resume", str(directory)], tmp_path / "b").finish()
    assert [(row["step"], *row) for row in jsonl(directory / "metrics.jsonl")] == [
        (row["step"], *row) for row in before
    ]
    assert "weights: None" not in text


def test_a_run_is_not_resumed_to_a_step_behind_it(tmp_path):
    """Its final score would stand in the log at a step whose weights had another."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 3, "test/x": 0.5}\n')
    with pytest.raises(SystemExit, match="the run is at step 3 already, beyond --max-steps 2$"):
        RunLog("", "sft", 0, {}, 2, resume=str(tmp_path / "run"), step=3)
    assert (tmp_path / "run/metrics.jsonl").read_text() == '{"step": 3, "test/x": 0.5}\n'
    RunLog("", "sft", 0, {}, 3, resume=str(tmp_path / "run"), step=3)


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """A run of bgpo.py with one state."""
    out = tmp_path_factory.mktemp("stopped")
    flags = [*RUN.split()[:6], "--eval-limit", "0", "--max-steps", "1", "--save-every", "1"]
    Run(["algos/bgpo.py", *flags, "--out", str(out)], out / "output").finish()
    return run_dir_in(out)


@pytest.mark.parametrize(
    "script, flags, ranks, words",
    [
        ("bgpo", ["--model", "sdar-8b"], 1, ["--model", "tiny-sdar", "sdar-8b"]),
        ("bgpo", ["--lora-rank", "4"], 1, ["--lora-rank", "0", "4"]),
        ("bgpo", ["--mc-num", "3"], 1, ["--mc-num", "2", "3"]),
        ("bgpo", [], 2, ["was saved by 1 ranks, this run has 2"]),
        ("d1", [], 1, ["bgpo"]),  # another method's run
    ],
)
def test_a_run_resumed_as_another_one_is_refused(
    stopped_run, tmp_path, script, flags, ranks, words
):
    """'resume with changed arguments, another world size, or another model (which argument, which value)'"""
    before = {path: path.read_bytes() for path in stopped_run.rglob("*") if path.is_file()}
    run = Run(
        [f"algos/{script}.py", "--resume", str(stopped_run), "--max-steps", "2", *flags],
        tmp_path / "out",
        ranks,
    )
    run.wait_until(lambda: False)
    lines = [line for line in run.output().splitlines() if line.startswith("--resume")]
    assert (
        set(run.codes.values()) == {1} and len(lines) == ranks and "Traceback" not in run.output()
    ), run.output()
    assert all(word in lines[0] for word in words), lines
    assert {path: path.read_bytes() for path in stopped_run.rglob("*") if path.is_file()} == before
