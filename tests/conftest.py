"""Paths, real data, the full grid, and forked ranks."""

import gc
import importlib
import os
import sys
import threading
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

# Ranks are forked: libraries must start no threads, which would not be there in a child.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp  # scripts import it late; here once, so that every fork shares it
import torch.multiprocessing as mp
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
# these first: no worker ends alone with one of them
LONG = "test_scripts", "test_resume"
sys.path.insert(0, str(ROOT))
# A forked child must not collect the parent's process groups: it would wait for their threads.
os.register_at_fork(after_in_child=gc.freeze)
# tqdm's default lock is shared by forks: a child killed while drawing would block later ones.
tqdm.set_lock(threading.RLock())


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="the full grid, not only what CI runs")


def pytest_configure(config):
    # Ranks are forked and compute on the CPU. This must be set before CUDA is initialised.
    if "cuda" not in config.getoption("markexpr"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["OMP_NUM_THREADS"] = "1"  # for commands too; tiny tensors gain nothing from more
        torch.set_num_threads(1)
    config.addinivalue_line("markers", "full: part of the full grid (make test-all)")
    config.addinivalue_line("markers", "cuda: needs a GPU; run by `make test-gpu` alone")
    config.addinivalue_line("markers", "lmdeploy: needs that package")
    config.addinivalue_line("markers", "fast: may import kernels/ and rollout/lmdeploy.py")


def pytest_collection_modifyitems(config, items):
    marks = [] if config.getoption("--all") else ["full"]
    marks += [] if torch.cuda.is_available() else ["cuda"]
    marks += [] if find_spec("lmdeploy") else ["lmdeploy"]
    left_out = [item for item in items if any(item.get_closest_marker(mark) for mark in marks)]
    config.hook.pytest_deselected(items=left_out)
    kept = (item for item in items if item not in left_out)
    items[:] = sorted(kept, key=lambda item: item.path.stem not in LONG)


def pytest_sessionfinish(session, exitstatus):
    """With CLEANDLLM_NO_SKIPS=1 a skipped test is a failure, those on real data included."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if os.environ.get("CLEANDLLM_NO_SKIPS") and skipped and exitstatus == 0:
        reporter.write_line(f"{len(skipped)} tests were skipped although CLEANDLLM_NO_SKIPS is set")
        session.exitstatus = 1


class Ground:
    """A finder of modules that does not find kernels/ and rollout/lmdeploy.py."""

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if is_fast(name) else self.finder.find_spec(name, path, target)


def is_fast(name):
    return name.split(".")[0] == "kernels" or name == "rollout.lmdeploy"


@pytest.fixture(autouse=True)
def ground(request, monkeypatch):
    """The law: every test that is not marked `fast` or `cuda` passes without kernels/ and
    rollout/lmdeploy.py. It runs while they cannot be imported, here and in forked ranks.
    """
    if not any(map(request.node.get_closest_marker, ("fast", "cuda"))):
        for name in filter(is_fast, list(sys.modules)):
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "meta_path", list(map(Ground, sys.meta_path)))


@pytest.fixture
def patient(monkeypatch):
    """Give programs at least a minute, so that a busy machine causes no timeout."""
    from evals import programs

    run = programs.run
    patiently = lambda job: run(replace(job, timeout=max(60.0, job.timeout)))
    monkeypatch.setattr(programs, "run", patiently)


@pytest.fixture(scope="session")
def warm():
    """Import what the scripts import, once, so that every fork shares it."""
    import peft  # noqa: F401
    import tyro  # noqa: F401
    from sync_shared import METHODS

    from data.planning import small_problems
    from models import load_tokenizer
    from run import saves  # noqa: F401

    load_tokenizer("tiny-sdar")
    small_problems("train")
    for script in METHODS:
        importlib.import_module(f"algos.{script}")


def _rank_main(rank, world_size, store, target, arguments):
    torch.set_num_threads(1)  # threads of the parent do not survive a fork
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        target(rank, world_size, *arguments)
    finally:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_group_stays():
    yield
    if dist.is_initialized():  # forked ranks of later tests would wait for its threads
        dist.destroy_process_group()
        pytest.fail("a process group is left")


@pytest.fixture
def one_rank(monkeypatch):
    """Collectives of a single rank, without a process group."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)


@pytest.fixture
def run_ranks(warm, tmp_path):
    """run_ranks(n, target, *arguments): target(rank, n, *arguments) in forked gloo processes."""
    runs = iter(range(1000))

    def run(world_size, target, *arguments):
        store = tmp_path / f"store-{next(runs)}"
        mp.start_processes(
            _rank_main,
            args=(world_size, store, target, arguments),
            nprocs=world_size,
            join=True,
            start_method="fork",
        )

    return run
