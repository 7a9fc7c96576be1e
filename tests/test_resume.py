"""Exact resume: states on disk, what a run keeps, its log and arguments, and runs that are killed
at random moments.

The runs are the scripts themselves, executed as __main__ in forks of this process, without figures.
"""

import atexit
import itertools
import json
import multiprocessing
import os
import random
import re
import runpy
import shutil
import signal
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from golden_runs import free_port, load_few_problems, rows_of
from oracles import MASK, tiny_model

from algos import d1
from models import add_lora, load_tokenizer
from run import log as runlog
from run import saves as training_state
from run.flags import command_line
from run.log import RunLog
from run.saves import Saves, load_state, newest_state, save_state

ROOT = Path(__file__).parents[1]
ARGS = SimpleNamespace(activation_checkpointing=False, attention="auto", compile=False)


def build(rank=0, seed=0, **config):
    """-> sharded model, full or with adapters, and its optimizer"""
    model = tiny_model(**config).float()
    if rank:
        add_lora(model, rank, 8, seed=seed)
    model = d1.parallelize(model, ARGS)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def train(model, optimizer, steps):
    """One AdamW step for each number, on data keyed by it and the rank."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        ids = torch.randint(0, 5, (4, 12), generator=generator)
        score = torch.rand(4, 1, 12, generator=generator) < 0.5
        (-model.logps(ids, torch.where(score, MASK, ids[:, None]), score).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def snapshot(model, optimizer):
    """Every parameter of this rank and both moments of those that train."""
    local = lambda value: (value.to_local() if hasattr(value, "to_local") else value).clone()
    held = {name: local(value) for name, value in model.state_dict().items()}
    for name, p in model.named_parameters():
        held |= {f"{name}/{key}": local(value) for key, value in optimizer.state.get(p, {}).items()}
    return held


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def refused(*words):
    return pytest.raises(SystemExit, match=".*".join(map(re.escape, words)))


# --- states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank, world_size", [(0, 1), (4, 2), (0, 4)])
def test_steps_after_loading_are_those_of_the_uninterrupted_run(
    run_ranks, tmp_path, monkeypatch, rank, world_size
):
    """Bit for bit, at once and three steps later; without the moments the run is another one. Four
    ranks are two nodes.
    """
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def body(_, world_size):
        model, optimizer = build(rank)
        train(model, optimizer, range(3))
        save_state(tmp_path / "resume", model, optimizer, 3, keep=0)
        at_save, state = snapshot(model, optimizer), newest_state(tmp_path / "resume")
        train(model, optimizer, range(3, 6))
        fresh = build(rank, seed=9)
        assert load_state(state, *fresh) == 3 and equal(snapshot(*fresh), at_save)
        train(*fresh, range(3, 6))
        assert equal(snapshot(*fresh), snapshot(model, optimizer))
        lame, its_optimizer = build(rank)
        load_state(state, lame, its_optimizer)
        train(lame, torch.optim.AdamW(its_optimizer.param_groups[0]["params"]), range(3, 6))
        assert not all(map(torch.equal, *(m.state_dict().values() for m in (lame, model))))

    run_ranks(world_size, body)
    (state,) = (tmp_path / "resume").iterdir()
    assert json.loads((state / "facts.json").read_text()) == {"step": 3, "world_size": world_size}
    held = dcp.FileSystemReader(state / "state").read_metadata().state_dict_metadata
    assert all("lora_" in name or "param_groups" in name for name in held) == bool(rank)


def flip(path):
    """Change a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = [  # file, what happens to it
    ("state/.metadata", lambda path: path.write_bytes(b"")),
    ("state/__1_0.distcp", flip),
    ("facts.json", Path.unlink),
    ("checksums.json", lambda path: path.write_bytes(b"{")),
]


def test_a_damaged_state_is_named_and_the_one_before_is_loaded(run_ranks, tmp_path, capfd):
    """Any file, on any rank. The damaged one goes: the run will save that step again. Hidden
    folders of a killed save are no states.
    """

    def body(rank, world_size):
        pair = build()
        for number in range(len(DAMAGES) + 1):
            save_state(tmp_path / "resume", *pair, 2 * number, keep=0)
        for number, (file, change) in enumerate(DAMAGES, start=1):
            dist.barrier()
            if rank == 0:
                change(tmp_path / f"resume/step-{2 * number:06d}" / file)
        dist.barrier()
        assert newest_state(tmp_path / "resume").name == "step-000000"
        assert Saves.load(tmp_path, *pair) == 0
        with pytest.MonkeyPatch.context() as patch:  # it may be whole
            patch.setattr(training_state, "crc32", lambda path: None)
            with refused("cannot read", "step-000000"):
                newest_state(tmp_path / "resume")
        if rank == 0:
            flip(tmp_path / "resume/step-000000/facts.json")
        dist.barrier()
        with refused("--resume", str(tmp_path), "no undamaged save", "--save-every"):
            newest_state(tmp_path / "resume")

    (tmp_path / "resume/.step-000012.tmp").mkdir(parents=True)
    (tmp_path / "evals/step-000012").mkdir(parents=True)  # an evaluation, no save
    (tmp_path / "resume/step-000099-old").mkdir()  # a copy that someone made
    run_ranks(2, body)
    said = capfd.readouterr().err
    for number, (file, _) in enumerate(DAMAGES, start=1):
        line = f"step-{2 * number:06d} is damaged ({file}); trying the save before it"
        assert said.count(line) == 2, said
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/step*")}
    assert left == {"resume/step-000000", "resume/step-000099-old", "evals/step-000012"}


def test_a_run_directory_takes_one_process(tmp_path):
    """Whether the first began the run or resumed it."""
    directory = run_directory(tmp_path, rows=1)
    with refused(str(directory), "another process works there"):
        Saves.load(directory, None, None)
    (tmp_path / "resume").mkdir()
    with refused("no undamaged save"):
        Saves.load(tmp_path, None, None)
    with refused(str(tmp_path), "another process works there"):
        Saves.load(tmp_path, None, None)


OTHER = {  # state, model
    "wider": ({}, {"hidden_size": 64}),
    "deeper": ({}, {"num_hidden_layers": 3}),
    "full into LoRA": ({}, {"rank": 4}),
    "LoRA into full": ({"rank": 4}, {}),
}


@pytest.mark.parametrize("was, now", OTHER.values(), ids=list(OTHER))
def test_a_state_of_another_model_or_world_is_refused(run_ranks, tmp_path, was, now):
    """Tensors that are missing or misshapen: one line, and nothing is trained on a half."""

    def body(rank, world_size):
        model, optimizer = build(**was)
        train(model, optimizer, [0])
        save_state(tmp_path, model, optimizer, 1, keep=0)
        state = newest_state(tmp_path)
        with refused("--resume", "step-000001", "damaged or of another model"):
            load_state(state, *build(**now))
        for file in (state / "state").glob("*.distcp"):
            file.write_bytes(b"")
        with refused("--resume", "step-000001", "damaged or of another model"):
            load_state(state, model, optimizer)
        metadata = state / "state/.metadata"
        metadata.write_bytes(metadata.read_bytes()[:-9])
        with refused("--resume", "step-000001", "damaged"):
            load_state(state, model, optimizer)
        (state / "facts.json").write_text(json.dumps({"step": 1, "world_size": 2}))
        with refused("--resume", "was saved by 2 ranks, this run has 1"):
            load_state(state, model, optimizer)

    run_ranks(1, body)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_saving_leaves_earlier_states(run_ranks, tmp_path, monkeypatch, failing):
    """Whichever rank meets the full disk: all exit with one line, nothing hangs; then there is room
    again.
    """
    writer = dcp.filesystem.FileSystemWriter

    def body(rank, world_size):
        model, optimizer = build()
        train(model, optimizer, [0])
        save_state(tmp_path, model, optimizer, 1, keep=1)
        write = writer.write_data

        def broken(*args, **kwargs):
            if rank == failing:
                raise OSError(28, "No space left on device")
            return write(*args, **kwargs)

        monkeypatch.setattr(writer, "write_data", broken)
        with refused(
            "could not save", "step-000002", "GB free", "No space left on device", f"rank {failing}"
        ):
            save_state(tmp_path, model, optimizer, 2, keep=1)
        monkeypatch.setattr(writer, "write_data", write)
        assert [path.name for path in tmp_path.glob("*step*")] == ["step-000001"]
        fresh = build(seed=3)
        load_state(newest_state(tmp_path), *fresh)
        assert equal(snapshot(*fresh), snapshot(model, optimizer))
        save_state(tmp_path, model, optimizer, 2, keep=1)
        assert newest_state(tmp_path).name == "step-000002"

    run_ranks(2, body)


@pytest.mark.parametrize("before_the_name", [False, True])
def test_a_kill_amid_a_save_leaves_no_state(run_ranks, tmp_path, monkeypatch, before_the_name):
    """And the next save of that step takes the place of the remains."""

    def killed(rank, world_size):
        model, optimizer = build()
        save_state(tmp_path, model, optimizer, 1, keep=0)
        if before_the_name:
            monkeypatch.setattr(os, "rename", lambda *_: os._exit(9))
        else:
            die = lambda held, checkpoint_id: [checkpoint_id.mkdir(), os._exit(9)]
            monkeypatch.setattr(dcp, "save", die)
        save_state(tmp_path, model, optimizer, 2, keep=1)

    def again(rank, world_size):
        assert newest_state(tmp_path).name == "step-000001"
        assert (tmp_path / ".step-000002.tmp").is_dir()
        save_state(tmp_path, *build(), 2, keep=0)
        names = sorted(path.name for path in tmp_path.glob("*step*"))
        assert names == ["step-000001", "step-000002"]

    with pytest.raises(Exception, match="exit code 9"):
        run_ranks(1, killed)
    monkeypatch.undo()
    run_ranks(1, again)


def saves_of(tmp_path, model, optimizer, keep=0, scores=()):
    """Saves every second step, and at step 9, the last."""
    tokenizer = load_tokenizer("tiny-sdar")
    return Saves(tmp_path, model, optimizer, tokenizer, "tiny-sdar", keep, 2, 9, scores)


def listing(tmp_path):
    """-> steps in checkpoints/, steps in resume/, step that best names"""
    dist.barrier()
    steps = lambda folder: [
        int(path.name[5:]) for path in sorted((tmp_path / folder).glob("step-*"))
    ]
    best = tmp_path / "checkpoints/best"
    assert not best.is_symlink() or best.exists()
    name = int(os.readlink(best)[5:]) if best.is_symlink() else None
    found = steps("checkpoints"), steps("resume"), name
    dist.barrier()
    return found


def test_best_follows_the_score_and_survives_pruning_and_kills(run_ranks, tmp_path):
    """A tie keeps the earlier; after a kill weights of steps to come go, and the link names the
    best of what stays.
    """

    def body(rank, world_size):
        model, optimizer = build()
        saves, seen = saves_of(tmp_path, model, optimizer, keep=2), []
        for step, score in enumerate([0.2, 0.5, None, 0.5, 0.1, None, 0.6, 0.6], start=1):
            saves.after_step(step, {"eval/t": score})
            seen.append(listing(tmp_path))
        assert seen == [
            ([1], [], 1),
            ([1, 2], [2], 2),
            ([1, 2], [2], 2),
            ([2, 4], [2, 4], 2),  # the tie at 4
            ([2, 4], [2, 4], 2),
            ([2, 4, 6], [4, 6], 2),  # 2 is spared
            ([2, 4, 6, 7], [4, 6], 7),  # a kill now goes back to state 6, whose best is 2
            ([7, 8], [6, 8], 7),
        ]
        saves.after_step(9, {})
        assert listing(tmp_path) == ([7, 8, 9], [6, 8], 7)
        assert Saves.load(tmp_path, *build()) == 8
        saves_of(tmp_path, model, optimizer, scores=[(7, 0.6)])
        assert listing(tmp_path) == ([7, 8], [6, 8], 7)
        saves_of(tmp_path, model, optimizer)
        assert listing(tmp_path)[2] is None  # without any score there is no link

    run_ranks(2, body)


# --- the log and the command line -----------------------------------------------------------------


def run_directory(tmp_path, rows=6, **args):
    """A run's directory as RunLog leaves it."""
    with closing(RunLog(tmp_path, "x", {"seed": 1} | args, rows)) as log:
        log.write(0, {"loss/total": 2.0})
        for step in range(1, rows + 1):
            log.write(step, {"loss/total": 1 / step})
            texts = f"größe {step}", "a\u2028b\x85c\r\n漢字"
            log.samples(step, [{"completion": text} for text in texts])
    return log.run_dir


def test_a_resumed_log_goes_on_after_the_step(tmp_path):
    """Rows of later steps are dropped, config.json stays, the table follows; no run is resumed to a
    step behind it.
    """
    directory = run_directory(tmp_path)
    config = (directory / "config.json").read_bytes()
    log = RunLog("elsewhere", "y", {"seed": 2}, 6, resume=str(directory), step=4)
    with closing(log):
        assert log.run_dir == directory and log.history("loss/total")[-1] == (4, 0.25)
        assert [row["step"] for row in rows_of(directory)] == [0, 1, 2, 3, 4]
        lines = (directory / "samples.jsonl").read_bytes().decode().split("\n")[:-1]
        assert [json.loads(line)["step"] for line in lines] == [1, 1, 2, 2, 3, 3, 4, 4]
        log.write(5, {"loss/total": 0.5})
    assert (directory / "metrics.csv").read_text().splitlines()[-1] == "5,0.5"
    assert (directory / "config.json").read_bytes() == config and not Path("elsewhere").exists()
    with refused("the run is at step 5 already, beyond --max-steps 4"):
        RunLog("", "x", {}, 4, resume=str(directory), step=5)
    for line in ('{"step": 1, "x": "y"}', '{"x": 1}', "[1]", '{"step": 1', "[" * 10**5):
        (directory / "metrics.jsonl").write_text(f"{line}\n")
        with refused("metrics.jsonl", "damaged"):
            RunLog("", "x", {}, 4, resume=str(directory), step=4)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_line_cut_by_the_kill_is_dropped(tmp_path, monkeypatch, name):
    """At every eighth byte of the last row, and in the middle of a character of several bytes."""
    monkeypatch.setattr(runlog, "draw_curves", lambda *_: None)
    directory = run_directory(tmp_path, rows=2)
    whole = (directory / name).read_bytes()
    last = whole[:-1].rfind(b"\n") + 1
    inside = [cut for cut in range(last, len(whole)) if 0x80 <= whole[cut] < 0xC0]
    for cut in [*range(last, len(whole), 8), *inside, len(whole) - 1]:
        (directory / name).write_bytes(whole[:cut])
        RunLog("", "", {}, 9, resume=str(directory), step=9).close()
        assert (directory / name).read_bytes() == whole[:last]


@dataclass
class Arguments:
    model: str = "tiny-sdar"
    task: str = ""
    lora_rank: int = 0
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    lora_targets: tuple[str, ...] = ()
    clip: tuple[float, float] | None = None
    compile: bool = False
    max_steps: int = 10
    seed: int = 42
    track: bool = False
    resume: str = ""


CHANGED = {
    "--seed 8": ["--seed", "7", "8"],
    "--seed 42": ["--seed", "7", "42"],  # the default of the script is a change too
    "--no-compile": ["--compile", "True", "False"],
    "--betas 0.9 0.95": ["--betas", "0.8", "0.9"],
    "--lora-targets q_proj v_proj": ["--lora-targets", "q_proj", "v_proj"],
}


def test_resume_takes_the_arguments_of_the_run(monkeypatch, tmp_path):
    """Only --max-steps and --track may change; a change is refused with the flag, the old value and
    the new one.
    """
    had = {"learning_rate": 3e-4, "lora_targets": ("q_proj",), "compile": True, "seed": 7}
    had |= {"betas": (0.8, 0.95), "clip": (0.2, 0.3), "max_steps": 20}
    directory = str(run_directory(tmp_path, rows=1, **had))

    def parse(flags):
        monkeypatch.setattr(sys, "argv", ["algos/x.py", *flags.split()])
        tiny = {"seed": 5, "betas": (0.9, 0.999)}
        return command_line(Arguments, {"tiny": tiny})

    assert parse(f"--resume {directory}") == Arguments(**had, resume=directory)
    assert parse("") == Arguments(seed=5) and parse("--seed 7") == Arguments(seed=7)
    same = parse(f"--resume {directory} --seed 7 --betas 0.8 0.95 --max-steps 50 --track")
    assert same == Arguments(**had | {"max_steps": 50}, track=True, resume=directory)
    for flags, words in CHANGED.items():
        with refused("--resume", *words):
            parse(f"--resume {directory} {flags}")
    for name, value in {"betas": 0.9, "seed": "7", "compile": 1, "no_field_of_it": 1}.items():
        path = run_directory(tmp_path, rows=1, **had | {name: value}) / "config.json"
        with refused(str(path), f"{name} = {value!r}", "this version does not take"):
            parse(f"--resume {path.parent}")
    path.write_text("[]")
    with refused("config.json is damaged"):
        parse(f"--resume {path.parent}")
    with refused("--resume", "nowhere", "no run directory"):
        parse(f"--resume {tmp_path}/nowhere")


# --- real runs ------------------------------------------------------------------------------------

RUN = "--prompts-per-step 2 --num-generations 4 --num-iterations 2 --eval-every 4 --eval-limit 2 "
RUN += "--max-steps 5"
EXEMPT = ("time/", "speed/", "memory/")


def script_main(rank, ranks, port, out, flags):
    """A forked process is the script from here on."""
    descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1), os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    os.chdir(ROOT)
    atexit._clear()
    torch.set_num_threads(1)
    if ranks > 1:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= where | {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    sys.argv = sys.orig_argv = flags
    runlog.draw_curves = lambda *_: None
    load_few_problems()
    try:
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

    def wait_until(self, condition, limit=120):
        """-> whether the condition came true before the run ended"""
        for _ in range(int(limit / 0.005)):
            if condition():
                return True
            if not any(process.is_alive() for process in self.ranks):
                return False
            time.sleep(0.005)
        self.signal(signal.SIGKILL)
        pytest.fail(f"the run hangs: {self.out.read_text()[-4000:]}")

    def signal(self, number):
        for process in self.ranks:
            if process.is_alive():
                os.kill(process.pid, number)

    def finish(self, code=0):
        """-> its output; another exit code fails the test"""
        self.wait_until(lambda: False)
        output = self.out.read_text()
        assert {process.exitcode for process in self.ranks} == {code}, output[-4000:]
        return output


def run_dir_in(out):
    return next((path.parent for path in Path(out).glob("*/config.json")), None)


def num_rows(directory):
    path = directory and directory / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path and path.exists() else 0


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


OFFLINE = "--batch-size 4 --eval-limit 2 --max-steps 5"
KILLED = {
    "bgpo LoRA on two ranks": (
        "bgpo",
        RUN + " --mc-num 2 --lora-rank 4 --lora-targets q_proj v_proj",
        2,
    ),
    "coupled_grpo": ("coupled_grpo", RUN + " --ref-sync-steps 2", 1),
    "dtreerpo": pytest.param(
        *("dtreerpo", RUN + " --branches 2 2 --lambda-max 1", 1),
        marks=pytest.mark.full,
    ),
    "tracerl with a value model": ("tracerl", RUN + " --value-model", 1),
    "sft": ("sft", OFFLINE + " --max-length 64 --pack-length 64", 1),
    "vrpo": ("vrpo", OFFLINE + " --mc-num 2", 1),
}


@pytest.mark.parametrize("script, flags, ranks", KILLED.values(), ids=list(KILLED))
def test_killed_runs_are_the_uninterrupted_run(warm, tmp_path, script, flags, ranks):
    """SIGKILL at a random moment, then resumed: metrics, samples and weights bit for bit."""
    counter, rng = itertools.count(), random.Random(ranks)
    flags = [f"algos/{script}.py", "--save-every", 2, "--learning-rate", 1e-3, *flags.split()]
    start = lambda *more: Run(tmp_path / f"output-{next(counter)}", ranks, *flags, *more)
    start("--out", tmp_path / "whole").finish()
    run = start("--out", tmp_path / "killed")
    assert run.wait_until(lambda: list(tmp_path.glob("killed/*/resume/step-*/facts.json")))
    directory = run_dir_in(tmp_path / "killed")
    rows = num_rows(directory) + rng.randrange(2)
    run.wait_until(lambda: num_rows(directory) >= rows)
    time.sleep(rng.uniform(0, 0.1))
    run.signal(signal.SIGKILL)
    run.wait_until(lambda: False)
    start("--resume", directory).finish()
    assert_same_record(directory, run_dir_in(tmp_path / "whole"))
    assert not list(directory.glob("*/.step-*")), "remains of a killed save"


def test_sigterm_saves_and_the_resumed_run_is_the_uninterrupted_one(warm, tmp_path):
    """After the step it was in; the run says how to go on. A finished run that is resumed writes
    nothing new.
    """
    flags = "--mc-num", 2, "--learning-rate", 1e-3, *RUN.split()
    start = lambda name, *more: Run(tmp_path / name, 1, "algos/bgpo.py", *more)
    start("a", *flags, "--out", tmp_path / "whole").finish()
    run = start("b", *flags, "--out", tmp_path / "stopped")
    assert run.wait_until(lambda: num_rows(run_dir_in(tmp_path / "stopped")) >= 4)
    run.signal(signal.SIGTERM)
    text, directory = run.finish(), run_dir_in(tmp_path / "stopped")
    step = rows_of(directory)[-1]["step"]
    assert f"step {step}: stopped by a signal; go on with --resume {directory}" in text
    assert step < 5 and (directory / f"resume/step-{step:06d}").is_dir()
    start("c", "--resume", directory).finish()
    shutil.rmtree(directory / f"checkpoints/step-{step:06d}")
    assert_same_record(directory, run_dir_in(tmp_path / "whole"))
    start("d", "--resume", directory).finish()
    assert_same_record(directory, run_dir_in(tmp_path / "whole"))
    # another world size or method is refused, and nothing in the directory changes
    files = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    more = "--resume", directory, "--max-steps", 9
    for script, ranks, words in [
        ("bgpo", 2, "was saved by 1 ranks, this run has 2"),
        ("d1", 1, "is a run of bgpo.py, not of d1.py"),
    ]:
        text = Run(tmp_path / script, ranks, f"algos/{script}.py", *more).finish(1)
        assert words in text and "Traceback" not in text
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == files
