"""What a month of training meets: kills at any moment, full disks, ranks whose work differs."""

import importlib
import math
import random
import shutil
import subprocess
import sys
import time

import pytest
import torch
from oracles import CONFIGS, small_args, tiny_model
from sync_shared import METHODS, ONLINE
from test_resume import OFFLINE as OFFLINE_RUN
from test_resume import ROOT, RUN, Run, assert_same_record, no_figures  # noqa: F401

from rollout import make_engine
from rollout.rows import Batch
from run.problems import sampling_of

pytestmark = pytest.mark.full
SFT = "sft", OFFLINE_RUN + " --save-every 1 --max-length 64 --pack-length 64", 2
CASES = {  # script, flags, ranks
    "bgpo": ("bgpo", RUN + " --save-every 1 --mc-num 2 --lora-rank 4", 2),
    "tracerl": ("tracerl", RUN + " --save-every 1 --value-model", 1),
    "sft": SFT,
}
KILLS = 8


@pytest.mark.parametrize("script, flags, ranks", CASES.values(), ids=list(CASES))
def test_kills_at_random_moments(warm, tmp_path, script, flags, ranks):
    """Of one rank or all, in first runs and in resumed ones: the others end by themselves, and the
    record is that of a run that was left alone.
    """
    script, runs = f"algos/{script}.py", iter(range(99))

    def begin(out):
        if states := [*tmp_path.glob(f"{out}/*/resume/step-*")]:
            return Run(tmp_path / f"{next(runs)}", ranks, script, "--resume", states[0].parents[1])
        shutil.rmtree(tmp_path / out, ignore_errors=True)
        flags_of_run = *flags.split(), "--out", tmp_path / out
        return Run(tmp_path / f"{next(runs)}", ranks, script, *flags_of_run)

    start = time.perf_counter()
    begin("whole").finish()
    seconds = time.perf_counter() - start
    for _ in range(KILLS):
        run = begin("run")
        time.sleep(random.uniform(0, seconds))
        for process in random.sample(run.ranks, random.randint(1, ranks)):
            process.kill()
        for process in run.ranks:
            process.join(60)
        assert not any(process.is_alive() for process in run.ranks)
    begin("run").finish()
    (directory,), (whole,) = (tmp_path / "run").iterdir(), (tmp_path / "whole").iterdir()
    assert_same_record(directory, whole)
    assert not list(directory.glob("*/.step-*")), "remains of a killed save"


DISK = """
mount -t tmpfs -o size={size}k disk {place} && mkdir {place}/run
{python} algos/sft.py {flags} --out {place}/run > {kept}/first 2>&1 && exit 1
mount -o remount,size=1g {place} && ls {place}/run/*/resume/step-* || exit 0
{python} algos/sft.py --resume {place}/run/* > {kept}/second 2>&1 && cp -a {place}/run {kept}
"""


@pytest.mark.skipif("not shutil.which('unshare')")
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_disk_that_fills_up(tmp_path, share):
    """The run ends in one line; when there is room again it goes on from its last save."""
    place, kept, flags = tmp_path / "disk", tmp_path / "kept", f"--model tiny-llada {SFT[1]}"
    place.mkdir(), kept.mkdir()
    whole = f"{sys.executable} algos/sft.py {flags} --out {tmp_path}/whole"
    subprocess.run(whole.split(), cwd=ROOT, check=True, capture_output=True)
    (whole,) = (tmp_path / "whole").iterdir()
    used = sum(path.stat().st_size for path in whole.rglob("*")) / 1024
    names = {"place": place, "kept": kept, "flags": flags, "python": sys.executable}
    commands = DISK.format(size=int(used * share), **names)
    subprocess.run(["unshare", "-rm", "sh", "-c", commands], cwd=ROOT, check=True)
    text = (kept / "first").read_text()
    assert "could not" in text and "Traceback" not in text, text[-3000:]
    if (kept / "second").exists():
        (directory,) = (kept / "run").iterdir()
        assert_same_record(directory, whole)


def drawn(script, ranks, seed):
    """What all ranks know of an update. -> family, flags, bounds of each rank's groups, prompts,
    rewards
    """
    draw = random.Random(f"{script}{seed}")
    G, groups = draw.randint(2, 4), draw.randint(4, 9)
    flags = {
        "num_generations": G,
        "num_iterations": draw.randint(1, 2),
        "micro_batch_size": draw.randint(8, 24),
        "sync_every_backward": draw.random() < 0.5,
        "learning_rate": 0.1,
        "max_grad_norm": math.inf,
        "gen_length": draw.choice([4, 8, 12]),
        "denoising_steps": draw.choice([1, 2, 4]),
        "mc_num": 2,
        "seed": seed,
    }
    if script == "dtreerpo":  # two segments in every block
        flags |= {"branches": (G, 2), "block_length": 4, "denoising_steps": draw.choice([2, 4])}
        flags["num_generations"] = G = 2 * G
    prompts = [[draw.randrange(5) for _ in range(draw.randint(1, 15))] for _ in range(groups)]
    dead = draw.random()
    rewards = [[draw.random() * (draw.random() > dead) for _ in range(G)] for _ in range(groups)]
    cuts = sorted(draw.sample(range(1, groups), 3))[: ranks - 1]
    families = [family for family in METHODS[script].families if family in CONFIGS]
    return draw.choice(families), flags, [0, *cuts, groups], prompts, rewards


def updated(rank, ranks, script, seed):
    """-> metrics of the update, weights after it"""
    family, flags, bounds, prompts, rewards = drawn(script, ranks, seed)
    module, mine = importlib.import_module(f"algos.{script}"), slice(*bounds[rank : rank + 2])
    args = small_args(module, **flags)
    model, reference = tiny_model(family), tiny_model(family, seed=1)
    trees = script == "dtreerpo"
    engine = make_engine(model)
    where = {
        "num_samples": args.num_generations,
        "sample_offset": mine.start * args.num_generations,
    }
    how = {"records": module.RECORDS, "seed": seed} | where | sampling_of(args)
    roll = (
        (lambda *a, **k: module.sample_trees(engine, args, *a, **k)) if trees else engine.generate
    )
    trace = roll(prompts[mine], **how)
    batch, scores = (
        Batch(trace, model),
        torch.tensor(rewards[mine], dtype=torch.float64).flatten(),
    )
    if module.RECORDS == "states":  # a reward for every step
        scores = scores[:, None] * torch.arange(1, trace.num_replays + 1)
    batch.advantages, batch.progress = module.compute_advantages(scores, args), 0.5
    for each in (model, reference):
        module.parallelize(each, args)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for rows in module.prepare_rows(model, reference, batch, args):
        metrics = module.update(model, optimizer, rows, 0, args)
    return metrics, [p.full_tensor().detach() for p in model.parameters()]


def ragged(rank, ranks, script, folder):
    for seed in range(6):
        metrics, weights = updated(rank, ranks, script, seed)
        if ranks == 1:
            torch.save((metrics, weights), folder / f"{seed}")
            continue
        want, whole = torch.load(folder / f"{seed}")
        torch.testing.assert_close(metrics, want, atol=1e-6, rtol=1e-4, msg=f"{script} {seed}")
        torch.testing.assert_close(weights, whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("script", ONLINE)
def test_ranks_with_different_work(run_ranks, tmp_path, script):
    """Numbers of groups, lengths and live rows at random: the metrics and weights of one rank."""
    for ranks in (1, 2, 4):
        run_ranks(ranks, ragged, script, tmp_path)
