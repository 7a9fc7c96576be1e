"""Model-written code, run and judged where it can do no harm: evals/humaneval.py, evals/mbpp.py and
their rewards.

    result = run(Job(code="def f(x): return x + 1", tests="assert f(1) == 2", entry_points=("f",)))
    results = run_batch(jobs)            keeps all cores busy; the calling thread only waits

A program runs in a process of its own (evals/sandbox_child.py says how its three processes are
arranged), with
  - namespaces of its own for network (no device), IPC, processes and files (Python and the system's
    libraries read-only, one empty directory), an unprivileged uid that no other program has, no
    capabilities and no way to new ones;
  - limits: wall time, CPU time, address space, resident memory of all its processes together,
    processes, files, file size;
  - a clean environment; stdin, stdout and stderr are /dev/null;
  - an end: everything that it started is killed before `run` returns, and its files are gone.
Mode "proxy": the tests run in another process, and the functions under test are called over a pipe
with plain values. So an object that equals everything, a patched builtin, a walk over the frames or
memory, and an early exit win nothing. Mode "nonce": code and tests share a process, as in every
published number; passed is a random number that is sent after the tests, so an early exit does not
pass, but code that looks for the number can. Rewards use "proxy".

Two protections need no namespace: a filter of system calls (seccomp) refuses sockets, shared
memory and signals to others, and where a program has no file system of its own, Landlock keeps it
out of the machine's. Containers often forbid namespaces. One line on stderr, printed once, names
the protections that are lost nevertheless; `Result.missing` names them each time. Against a bug of
the kernel itself only a virtual machine helps.
"""

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from evals.sandbox_child import Gone, send

CHILD = Path(__file__).with_name("sandbox_child.py")
MAX_CODE = 1_000_000  # characters of a program; longer ones are not run
# seconds that start and clean-up may take beyond the limit of a program, on a busy machine
GRACE = 20.0
LOSSES = {  # what is lost without a protection
    "uid": "it runs as this user, so file permissions do not hold it back",
    "network": "it can reach the network",
    "ipc": "it can reach shared memory and message queues of its uid",
    "system calls": "memory that it shares is not counted",
    "files": "it can read and change what its uid may read and change",
    "disk": "its files are on this disk until it ends, each of 4 MB at most",
    "processes": "it can see other processes, and signal those of its uid",
}
_said, _lock = set(), threading.Lock()


class SandboxError(SystemExit):
    """The sandbox itself did not work; says nothing about the program. A command ends in the one
    line that it has."""


class NoAnswer(SandboxError):
    """The supervisor of a program ended without an answer."""


@dataclass(frozen=True)
class Job:
    """A program and its tests.

    code: the program. tests: statements that raise where it is wrong. entry_points: names of the
    program's functions that the tests call (proxy). prelude: trusted definitions that the tests
    need beside them (proxy). timeout: seconds of wall time. memory: bytes of address space of a
    process, and of resident memory of all. processes: threads count too.
    """

    code: str
    tests: str
    entry_points: tuple[str, ...] = ()
    prelude: str = ""
    timeout: float = 5.0
    memory: int = 1 << 30
    processes: int = 32
    mode: Literal["proxy", "nonce"] = "proxy"


EMPTY = Job("", "", timeout=300.0)  # no program: ends at once, even on a very busy machine


@dataclass(frozen=True)
class Result:
    """What became of a program.

    reason: "passed", "wrong" (an assertion), "error" (any other exception), "exited" (without an
    answer), "timeout", "memory", "unsupported" (the tests pass values that cannot be sent, so they
    need mode "nonce"), "long" (not run), "lost" (its supervisor died).
    detail: exception and message. missing: protections that are lost, because the kernel did
    not give them, with its reason. uid: of the program, None for the caller's.
    """

    reason: str
    detail: str = ""
    missing: dict = field(default_factory=dict)
    uid: int | None = None

    @property
    def passed(self):
        return self.reason == "passed"


def run(job, without=()):
    """Run the program of a Job to its end. -> Result. SandboxError where the sandbox does not work;
    never for what a program does.

    without: protections (LOSSES, and "users", the user namespace of callers that are not root) to
    do without, for tests.
    """
    if len(job.code) > MAX_CODE:
        return Result("long", f"{len(job.code)} characters")
    folder = tempfile.mkdtemp(prefix="sandbox-")
    try:
        result = Result(**_supervised(job, folder, tuple(without)))
    except NoAnswer as error:
        if job == EMPTY:
            raise
        run(EMPTY, without)  # raises if the fault is the sandbox's own
        result = Result("lost", str(error))
    finally:
        _remove(folder)
    if result.reason == "setup":
        raise SandboxError(f"sandbox: {result.detail}")
    _say(result.missing)
    return result


def run_batch(jobs, workers=None):
    """`run` of every Job, in their order (`in_threads`). -> list of Result

    A job may be a function that makes it when its turn comes, so that large tests are not in memory
    all at once.
    """
    return in_threads(lambda job: run(job() if callable(job) else job), jobs, workers=workers)


def in_threads(function, *columns, workers=None):
    """function(...) of every row of the columns, in order, `workers` at a time (None: one per core,
    which the ranks of a machine share). On the first rank's terminal a bar appears after a while.
    """
    from tqdm.contrib.concurrent import thread_map  # here: the sandbox itself needs no packages

    rows = list(zip(*columns, strict=True))
    quiet = os.environ.get("RANK", "0") != "0" or None  # None: only on a terminal
    bar = {"desc": "scoring", "leave": False, "delay": 5, "disable": quiet}
    workers = workers or max(1, min(own_cores(), len(rows)))
    return thread_map(lambda row: function(*row), rows, max_workers=workers, **bar)


def own_cores():
    """-> cores of this rank, 0 if the machine has fewer than ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _supervised(job, folder, without):
    """Start the supervisor, send it the program and then the tests, read its one answer. -> fields
    of a Result"""
    site_packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    libraries = ["/usr", "/lib", "/lib64", "/bin", sys.base_prefix, sys.base_exec_prefix]
    program = asdict(job) | {"folder": folder, "without": without, "site_packages": site_packages}
    program["paths"] = [*libraries, *site_packages]
    # the tests go by themselves, once the candidate has been forked
    tests = {name: program.pop(name) for name in ("tests", "prelude")}
    tests["nonce"] = secrets.token_hex(16)
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "PYTHONHASHSEED": "0",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
    }
    environment |= {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    answered = None
    with subprocess.Popen(
        [getattr(sys, "_base_executable", sys.executable), "-I", "-S", "-B", str(CHILD)],
        stdin=subprocess.PIPE,  # stays open: its end would tell that we are gone
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        env=environment,
        start_new_session=True,
        bufsize=0,
    ) as process:
        try:
            with suppress(Gone):  # it has said why on stderr
                send(process.stdin.fileno(), program)
                send(process.stdin.fileno(), tests)
            poll = select.poll()
            poll.register(process.stdout, select.POLLIN)
            answered = poll.poll((job.timeout + GRACE) * 1000)
        finally:
            if not answered:
                # an interrupt, or a supervisor that hangs; the PID namespace dies with it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()  # it answers as it ends, in less than a pipe holds
        try:
            return json.loads(process.stdout.read())
        except ValueError:  # it is empty, or cut off
            lines = (process.stderr.read(1 << 16) or b"").decode(errors="replace").splitlines()
            said = lines[-1] if lines else f"exit {process.returncode}"
            raise NoAnswer(f"sandbox: no answer from its supervisor ({said})") from None


def _remove(folder):
    """Delete what a program left where it had no file system of its own: by commands, because its
    directories may be thousands deep."""
    try:
        os.rmdir(folder)
    except OSError:
        # permissions only where it needs them: it may be a hundred thousand directories
        for command in (["rm", "-rf"], ["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            if os.path.exists(folder):
                subprocess.run([*command, folder], stderr=subprocess.DEVNULL)


def _say(missing):
    """Name missing protections {name: reason} in one line, each once per process."""
    with _lock:
        new = sorted(missing.keys() - _said)
        _said.update(new)
    if new:
        lost = ", ".join(f"{name} ({missing[name]})" for name in new)
        losses = "; ".join(LOSSES[name] for name in new)
        said = f"sandbox: no protection of {lost}: model-written code is run, and {losses}"
        print(said, file=sys.stderr)
