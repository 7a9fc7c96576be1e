"""Attacks on evals/sandbox.py: verdicts, survivors, leaks, one by one and at once, as root and as
an ordinary user, with all walls and without those that not every kernel gives.

Everything runs under limits far below those of the machine: 192 MB, 16 processes, and 5 s for what
is meant to reach them. What must come to its own end has a minute, so that no verdict depends on
how busy the machine is.
"""

import functools
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from resource import getpagesize

import numpy
import pytest
from sync_shared import ROOT

from evals import sandbox
from evals.sandbox import Job, Result, SandboxError, in_threads, run
from evals.sandbox_child import Unsupported, encode, revived

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

LIMITS = {"timeout": 60.0, "memory": 192 << 20, "processes": 16}
TESTS = "assert f(1) == 2\nassert f(5) == 6"
# how another process begins, whose first argument is the folder `alone`
CALLER = "import sys; sys.path.insert(0, sys.argv[1]); from evals import sandbox\n"
F = "\ndef f(x): return x + 1\n"
# a file of the caller that all may read and write
SECRET = Path(tempfile.gettempdir()) / f"sandbox-test-secret-{os.getpid()}"
# callers that are not the user of the tests: how their commands begin
ORDINARY = "setpriv --reuid=12345 --regid=12345 --clear-groups".split()
ROOT_OF_ONE = "unshare", "-r"  # as in bubblewrap and rootless containers: no other uid to give
# walls, and a pattern of those to take down
WITHOUT = {"namespaces": "landlock", "Landlock": "namespaces", "": "namespaces|landlock"}


def job(code, tests=TESTS, **changed):
    return Job(textwrap.dedent(code), tests, **{"entry_points": ("f",)} | LIMITS | changed)


# name: program, reasons
ATTACKS = {
    "null byte": (F + "\0", "error"),
    "lone surrogate": (F + "s = '\ud800'", "error"),
    "very long line": ("x = '" + "a" * 9_000_000 + "'" + F, "passed"),
    "deeply nested source": ("x = " + "(" * 100_000 + F, "error exited"),
}
HELD_BY = {}  # name: what it takes besides the walls of every kernel
for part in (ROOT / "tests/golden/attacks.txt").read_text().split("\n## ")[1:]:
    heading, _, program = part.partition("\n")
    heading, _, held = heading.partition(" @ ")
    name, reasons = heading.split(" | ")
    ATTACKS[name] = program, reasons
    HELD_BY[name] = held
SLOW = [name for name in ATTACKS if "timeout" in ATTACKS[name][1]] + ["memory of many processes"]
QUICK = [name for name in ATTACKS if name not in SLOW]


@pytest.fixture(scope="module")
def surroundings():
    """What attacks aim at: a file, a port, an environment variable."""
    SECRET.write_text("secret")
    SECRET.chmod(0o666)
    if os.getuid() == 0:
        os.chown(SECRET, 12345, 12345)
    os.environ["SANDBOX_SECRET"] = "hunter2"
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = {"secret": str(SECRET), "repository": str(ROOT)}
        yield found | {"port": server.getsockname()[1]}
    assert SECRET.read_text() == "secret" and stat.S_IMODE(SECRET.stat().st_mode) == 0o666
    SECRET.unlink()
    del os.environ["SANDBOX_SECRET"]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A folder that others may enter, with the sandbox and nothing that it does not need. Whatever
    runs from it bears its name."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.mkdir(f"{place}/evals")
        for name in ("sandbox.py", "sandbox_child.py"):
            shutil.copy(ROOT / "evals" / name, f"{place}/evals")
        Path(f"{place}/evals/__init__.py").touch()
        os.chmod(place, 0o755)
        monkeypatch.setattr(sandbox, "CHILD", Path(f"{place}/evals/sandbox_child.py"))
        yield place


def keep(walls):
    """Of those that not every kernel gives only these."""
    text = sandbox.CHILD.read_text()
    sandbox.CHILD.write_text(re.sub(rf"stands\(({WITHOUT[walls]}),.*\)", "False", text))


def attack(name, surroundings, seconds=5.0):
    code = textwrap.dedent(ATTACKS[name][0])
    for field, value in surroundings.items():
        code = code.replace(f"{{{field}!r}}", repr(value)).replace(f"{{{field}}}", str(value))
    return job(code, timeout=seconds if "timeout" in ATTACKS[name][1] else 60.0)


def is_held(name, result):
    """Whether the verdict is as it must be behind these walls."""
    held = {"": True, "files": result.walls, "namespaces": result.walls == "namespaces"}
    return result.reason in ATTACKS[name][1].split() or not held[HELD_BY.get(name, "")]


def running():
    """{process id: pages in memory} of all that runs from the folder `alone`."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(sandbox.CHILD).encode() in (process / "cmdline").read_bytes():
                found[process.name] = int((process / "statm").read_text().split()[1])
    return found


def wait_for(reached):
    for _ in range(200):
        if reached():
            return
        time.sleep(0.05)
    raise AssertionError("not reached within ten seconds")


def holdings():
    """What a program could leave behind: processes, open files, mounts."""
    return running(), sorted(os.listdir("/proc/self/fd")), Path("/proc/self/mounts").read_text()


@functools.cache
def public_python():
    """A Python that every user may start."""
    is_old = "import sys; sys.exit(sys.version_info < (3, 11))"
    user = 12345 if os.getuid() == 0 else None
    for python in (sys._base_executable, "/usr/bin/python3"):
        with suppress(OSError):
            if not subprocess.run([python, "-c", is_old], user=user).returncode:
                return python
    pytest.skip("no Python that an ordinary user may start")


@pytest.mark.parametrize("name", QUICK)
def test_attack(name, surroundings):
    before = holdings()
    result = run(attack(name, surroundings))
    assert is_held(name, result), result
    assert holdings() == before


RUN_ALL = """
import json
from concurrent.futures import ThreadPoolExecutor
jobs = json.load(sys.stdin)
with ThreadPoolExecutor(16) as pool:
    results = pool.map(lambda job: sandbox.run(sandbox.Job(**job)), jobs)
    print(json.dumps([[*vars(result).values()] for result in results]))
"""


@pytest.mark.parametrize(
    ("caller", "walls"),
    [
        ((), "Landlock"),
        (ORDINARY, "namespaces"),
        (ORDINARY, "Landlock"),
        (ORDINARY, ""),
        (ROOT_OF_ONE, "namespaces"),
    ],
)
def test_attacks_at_once(caller, walls, surroundings, alone):
    """No verdict changes, with those among them that end at a limit; nothing is left."""
    if subprocess.run([*caller, "true"]).returncode:
        pytest.skip(f"{caller} does not work here")
    tried = [name for name in SLOW + QUICK if name != "modules"]
    jobs = [asdict(attack(name, surroundings, 2.0)) for name in tried]
    keep(walls)
    done = subprocess.run(
        [*caller, public_python(), "-I", "-c", CALLER + RUN_ALL, alone],
        input=json.dumps(jobs),
        cwd="/",
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert not running()
    results = dict(zip(tried, (Result(*found) for found in json.loads(done.stdout)), strict=True))
    if (found := results["right"].walls) != walls:
        pytest.skip(f"this kernel gives {found or 'neither namespaces nor Landlock'}")
    assert done.stderr.count("neither namespaces nor Landlock") == (not walls)
    assert not [attack for attack in results.items() if not is_held(*attack)]
    if not walls:  # this attack is real
        assert results["files of the caller read"].passed


@pytest.mark.skipif(os.getuid() != 0, reason="a limit for all of a user's processes")
def test_processes_are_limited():
    forks = "import os, time\nfor _ in range(40): os.fork() or time.sleep(9)"
    assert run(job(forks + F, memory=4 << 30)).reason == "error"


@pytest.mark.skipif(
    os.getuid() != 0 or os.stat("/root").st_mode & 0o5 or sys.base_prefix[:6] != "/root/",
    reason="needs a Python that others cannot read",
)
def test_a_library_that_the_program_cannot_read(monkeypatch):
    monkeypatch.setattr(sandbox, "PAUSES", (0,))
    keep("Landlock")
    with pytest.raises(SandboxError, match="cannot read /root"):
        run(job(F))


TOOLS, *SIEGE = (ROOT / "tests/golden/siege.txt").read_text().split("\n## ")
PEAK = LIMITS["memory"] + (768 << 20)  # a look takes 0.1 s; shared pages count for each process


@pytest.mark.full
@pytest.mark.parametrize("walls", ("namespaces", "Landlock"))
@pytest.mark.parametrize("attack", SIEGE, ids=lambda attack: attack.partition("\n")[0])
def test_siege(attack, walls, monkeypatch):
    """Forged answers and bombs, alone and many at once: none scores, is late, takes more memory
    than its limit, or leaves a process."""
    tests = "assert f(1) == 2\nassert f(5) == 6 and not f(6) == 6  # the needle of this siege"
    attack, peak = job(f"{TOOLS}\n# {attack}", tests, timeout=4.0), 0
    monkeypatch.setattr(sys, "_base_executable", public_python())
    keep(walls)

    def timed(job):
        start = time.monotonic()
        return run(job).passed, time.monotonic() - start

    with ThreadPoolExecutor(16) as pool:
        first = pool.submit(timed, attack)
        while not first.done():
            peak = max(peak, sum(running().values()) * getpagesize())
            time.sleep(0.05)
        passed, seconds = zip(first.result(), *pool.map(timed, [attack] * 16), strict=True)
    assert not any(passed) and max(seconds) < 24.0  # 4 s, and 16 at once share the cores
    assert peak < PEAK and not running()


# --------------------------------------------------------------------------------------------------
# the caller


def test_a_supervisor_that_dies_ends_no_run(monkeypatch):
    """Its program fails; only a sandbox that runs no program at all raises."""
    supervised, broken = sandbox._supervised, [job(F)]
    dies = lambda program, *rest: (
        Result("lost") if program in broken else supervised(program, *rest)
    )
    monkeypatch.setattr(sandbox, "_supervised", dies)
    assert [result.reason for result in in_threads(run, [job(F), job(F + "#")])] == [
        "lost",
        "passed",
    ]
    broken.append(sandbox.EMPTY)
    with pytest.raises(SandboxError):
        run(job(F))


def test_a_machine_that_is_too_busy_ends_no_run(monkeypatch):
    """A supervisor that is not ready in time is killed; whether it can run has more time."""
    monkeypatch.setattr(sandbox, "GRACE", -5.0)
    assert run(job(F, timeout=5.0)).reason == "lost"


TWO_AT_ONCE = """
from concurrent.futures import ThreadPoolExecutor
sandbox.PAUSES = 1, 1, 0
job = sandbox.Job("def f(x): return x", "assert f(1) == 1", ("f",), timeout=60.0)
with ThreadPoolExecutor(2) as pool:
    print(*[result.passed for result in pool.map(sandbox.run, [job] * 2)])
"""


def test_a_sandbox_that_cannot_start_programs_says_why(alone):
    """Where files or processes lack, one line names it, and no verdict is wrong."""
    caller, seen = ORDINARY if os.getuid() == 0 else (), set()
    for limit in ("nofile=9", *(f"nproc={number}" for number in range(3, 10))):
        command = [*caller, "prlimit", f"--{limit}", public_python(), "-I", "-c"]
        command += [CALLER + TWO_AT_ONCE, alone]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True)
        said = done.stdout or done.stderr.splitlines()[-1].partition("(")[0]
        seen.add(said.strip())
    seen.discard("RuntimeError: can't start new thread")  # the limit counts the user's tests too
    assert seen == {"True True", "sandbox: no program can be started"}


@pytest.mark.parametrize("walls", ("namespaces", "Landlock"))
def test_programs_end_with_a_killed_caller(walls, alone):
    """SIGKILL to the caller, and then to nothing else: its program ends too."""
    code = "import os, time\nos.fork()\nos.fork()\ntime.sleep(600)"
    caller = CALLER + "sandbox.run(sandbox.Job(sys.argv[2], '', timeout=600))"
    keep(walls)
    process = subprocess.Popen([public_python(), "-c", caller, alone, code])
    wait_for(lambda: len(running()) == 6)  # supervisor, tests, and four of the program
    process.kill()
    process.wait()
    wait_for(lambda: not running())


def test_an_interrupt_ends_a_batch(tmp_path, alone):
    # SIGINT is ignored where a shell's background job runs this
    caller = f"""
import signal
sys.path.append({str(ROOT)!r})
signal.signal(signal.SIGINT, signal.default_int_handler)
jobs = [sandbox.Job('import time; time.sleep(600)', '', timeout=1.5)] * 50
sandbox.os.sched_getaffinity = lambda _: range(2)
sandbox.in_threads(sandbox.run, jobs)
"""
    command = [sys.executable, "-c", CALLER + caller, alone]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=tmp_path)
    wait_for(lambda: len(running()) >= 6)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) != 0  # the two that ran end at their limit, the others never start
    assert not running()


# --------------------------------------------------------------------------------------------------
# the wire


def through(value):
    return json.loads(json.dumps(encode(value)), object_hook=revived)


VALUES = """None, True, -3, 1 << 70, -(1 << 10000), 0.1, float("inf"), -0.0, "a\\ud800\\0", 1 + 2j,
[], [[1], (2, [3]), ()], {1, "a", (2, 3)}, frozenset([1]), {(1, 2): [3], "a": {}, None: 1.5}"""
PLAIN = """Counter("aab"), {"a": 2, "b": 1}, defaultdict(int, a=1), {"a": 1}, numpy.int64(3), 3,
namedtuple("P", "x y")(1, 2), (1, 2), numpy.float64(0.5), 0.5, Liar([9]), [9]"""


def test_values_survive_the_wire():
    for value in eval(f"({VALUES})"):
        back = through(value)
        assert type(back) is type(value) and repr(back) == repr(value)


def test_types_of_the_library_become_plain():
    space = {"numpy": numpy, "Liar": type("Liar", (list,), {"__iter__": lambda self: iter([2])})}
    exec(f"from collections import *\nvalues = ({PLAIN})", space)
    for value, want in zip(space["values"][::2], space["values"][1::2], strict=True):
        assert type(through(value)) is type(want) and through(value) == want
    assert list(through(x * x for x in range(3))) == list(through({0: 1, 1: 1, 4: 1}.keys()))


def test_other_values_do_not():
    for value in (object(), {1: object()}, b"x", range(3), (x for x in [json])):
        with pytest.raises(Unsupported):
            encode(value)
    for message in {"dict": [1]}, {"set": [[]]}, {}, {"set": [], "dict": []}:
        with pytest.raises((KeyError, ValueError, TypeError)):
            revived(message)


def test_tests_with_values_that_cannot_be_sent_say_so():
    tests = "class Node: pass\ntry: f(Node())\nexcept Exception: pass"
    assert "Unsupported" in run(job("def f(x): return 2", tests)).detail


def test_exceptions_keep_their_type():
    code = """
    class Mine(Exception): pass
    def f(x): raise [ValueError('a'), Mine('b'), SystemExit(), KeyboardInterrupt()][x]
    """
    catching = """
for i in range(4):
    try: f(i)
    except ValueError: assert i == 0
    except Exception: assert i
"""
    assert run(job(code, catching)).passed
    assert run(job(code, "try: f(0)\nexcept KeyError: pass")).detail == "ValueError: a"
    assert "Mine: b" in run(job(code, "f(1)")).detail


def test_prelude_and_keywords():
    tests, prelude = "assert helper(f(1, y=2)) == 6", "def helper(x): return 2 * x"
    assert run(job("def f(x, *, y=0): return x + y", tests, prelude=prelude)).passed


def test_objects_stay_with_the_program():
    """Tests make and ask them, but no protocol of theirs counts."""
    code = """
    class N:
        __eq__ = lambda *_: True
        def __init__(self, v): self.v = v
        def add(self, y): return self.v + y
    def f(x): return x(3.5) if x is int else N(x)
    """
    tests = (
        "assert f(int) == 3\nn = f(1)\nn.next = N(v=5)\nassert n.v == 1 and n.next.add(n.v) == 6\n"
    )
    tests += "assert n != f(1) and not hasattr(n, '__add__') and not hasattr(n, 'x')"
    assert run(job(code, tests, entry_points=("f", "N"))).passed
