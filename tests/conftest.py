"""Paths, real data, the full grid, and forked ranks."""

import gc
import os
import shutil
import sys
import tempfile
import threading
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
LONG = (
    "test_scripts",
    "test_families",
    "test_loop",
    "test_resume",
    "test_vrpo",
)  # these first: no worker ends alone with one
sys.path.insert(0, str(ROOT))
# A child never collects what it was forked with: the end of a process group would wait for threads that only its parent has.
os.register_at_fork(after_in_child=gc.freeze)
# tqdm's own lock is shared by all forks: a child killed while it draws would stop every later one at its first bar.
tqdm.set_lock(threading.RLock())


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="the full grid, not only what CI runs")


def pytest_configure(config):
    # Ranks are forked and compute on the CPU: a GPU would change what they test. Said before CUDA is looked for.
    if "cuda" not in config.getoption("markexpr"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["OMP_NUM_THREADS"] = (
            "1"  # of commands too; for tensors this small a second thread costs more than it gives
        )
        torch.set_num_threads(1)
    config.addinivalue_line("markers", "full: part of the full grid (make test-all)")
    config.addinivalue_line(
        "markers", "cuda: for machines with a GPU, left out on others; run by `make test-gpu` alone"
    )
    config.addinivalue_line(
        "markers", "lmdeploy: for machines with that package, left out on others"
    )
    os.environ["CLEANDLLM_CACHE"] = config.token_cache = (
        tempfile.mkdtemp()
    )  # not the user's own; scripts inherit it


def pytest_unconfigure(config):
    shutil.rmtree(config.token_cache, ignore_errors=True)


def pytest_collection_modifyitems(config, items):
    marks = [] if config.getoption("--all") else ["full"]
    marks += [] if torch.cuda.is_available() else ["cuda"]
    marks += [] if find_spec("lmdeploy") else ["lmdeploy"]
    left_out = [item for item in items if any(item.get_closest_marker(mark) for mark in marks)]
    config.hook.pytest_deselected(items=left_out)
    rank = lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG)
    items[:] = sorted((item for item in items if item not in left_out), key=rank)


def pytest_sessionfinish(session, exitstatus):
    """CLEANDLLM_NO_SKIPS=1: everything must have run, the tests on real data too."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if os.environ.get("CLEANDLLM_NO_SKIPS") and skipped and exitstatus == 0:
        reporter.write_line(f"{len(skipped)} tests were skipped although CLEANDLLM_NO_SKIPS is set")
        session.exitstatus = 1


@pytest.fixture
def patient(monkeypatch):
    """Programs have a minute at least, so that what must come to its own end does so on a busy machine too."""
    from evals import programs

    run_batch = programs.run_batch
    patiently = lambda job: replace(job, timeout=max(60.0, job.timeout))
    monkeypatch.setattr(
        programs,
        "run_batch",
        lambda jobs: run_batch([patiently(j() if callable(j) else j) for j in jobs]),
    )


def _rank_main(rank, world_size, store, target, arguments):
    torch.set_num_threads(1)  # threads of the parent do not survive a fork
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        target(rank, world_size, *arguments)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def run_ranks(tmp_path):
    """run_ranks(world_size, target, *arguments): target(rank, world_size, *arguments) in forked gloo processes."""
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
