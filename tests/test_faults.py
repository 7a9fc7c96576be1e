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
from oracles import CONFIGS, PROMPTS, rollout_batch, small_args, tiny_model
from sync_shared import METHODS, ONLINE
from test_resume import OFFLINE as OFFLINE_RUN
from test_resume import ROOT, RUN, Run, assert_same_record, no_figures  # noqa: F401

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


def uneven(rank, ranks, script, folder):
    """Updates on three groups, of which the first, that of rank 0, is dead."""
    module = importlib.import_module(f"algos.{script}")
    args = small_args(module, learning_rate=0.1, max_grad_norm=math.inf)
    family = next(family for family in METHODS[script].families if family in CONFIGS)
    model, reference = tiny_model(family), tiny_model(family, seed=1)
    mine = slice(rank, 3 if rank or ranks == 1 else 1)
    rewards = [[1.0] * 4, [1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]][mine]
    where = PROMPTS[mine], rank * args.num_generations
    batch = rollout_batch(module, model, args, *where, rewards)
    for each in (model, reference):
        module.parallelize(each, args)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for rows in module.prepare_rows(model, reference, batch, args):
        metrics = module.update(model, optimizer, rows, 0, args)
    found = metrics, [p.full_tensor().detach() for p in model.parameters()]
    if ranks == 1:
        return torch.save(found, folder / "alone")
    torch.testing.assert_close(found, torch.load(folder / "alone"), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("script", ONLINE)
def test_ranks_with_different_work(run_ranks, tmp_path, script):
    """Numbers of groups, lengths and live rows: the metrics and weights of one rank."""
    for ranks in (1, 2):
        run_ranks(ranks, uneven, script, tmp_path)
