"""A siege of the sandbox: forged answers and bombs, alone and many at once, behind all walls and
behind those of containers. test_sandbox.py has an attack on every protection."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from resource import getpagesize

import pytest
from test_sandbox import ROOT, alone, keep, public_python, running  # noqa: F401

from evals import sandbox

TOOLS, *ATTACKS = (ROOT / "tests/golden/siege.txt").read_text().split("\n## ")
TESTS = "assert f(1) == 2\nassert f(5) == 6 and not f(6) == 6  # the needle of this siege"
AT_ONCE = 16
LATE = 20.0  # seconds beyond the limit: so many at once share the cores
LIMITS = {"timeout": 4.0, "memory": 192 << 20, "processes": 16}
PEAK = LIMITS["memory"] + (768 << 20)  # a look takes 0.1 s; shared pages count for each process


@pytest.mark.full
@pytest.mark.parametrize("walls", ("namespaces", "Landlock"))
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.partition("\n")[0])
def test_siege(attack, walls, monkeypatch):
    """None scores, is late, takes more memory than its limit, or leaves a process."""
    job = sandbox.Job(f"{TOOLS}\n# {attack}", TESTS, ("f",), **LIMITS)
    monkeypatch.setattr(sys, "_base_executable", public_python())
    keep(walls)
    peak = 0

    def timed(job):
        start = time.monotonic()
        return sandbox.run(job).passed, time.monotonic() - start

    with ThreadPoolExecutor(AT_ONCE) as pool:
        first = pool.submit(timed, job)
        while not first.done():
            peak = max(peak, sum(running().values()) * getpagesize())
            time.sleep(0.05)
        passed, seconds = zip(first.result(), *pool.map(timed, [job] * AT_ONCE), strict=True)
    assert not any(passed) and max(seconds) < LIMITS["timeout"] + LATE
    assert peak < PEAK and not running()
