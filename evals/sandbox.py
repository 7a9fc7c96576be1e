"""Model-written code, run and judged where it can do no harm: for the benchmarks of code and their
rewards.

    result = run(Job(code="def f(x): return x + 1", tests="assert f(1) == 2", entry_points=("f",)))
    results = in_threads(run, jobs)      keeps all cores busy; the calling thread only waits

A program runs in a process of its own (evals/sandbox_child.py says how its three processes are
arranged), behind walls that every kernel of Linux has:
  - a filter of system calls (seccomp): no sockets, no shared memory, no signals, no changes of
    files; no capabilities, no way to new ones, and, where the caller is root, a uid of its own
  - limits: wall time, CPU time, address space, resident memory of all its processes together,
    processes; it can write no file
  - a clean environment; stdin, stdout and stderr are /dev/null
  - an end: everything that it started is killed before `run` returns
and, where the kernel gives them, namespaces of its own for network, IPC, processes and files, with
a read-only root directory of Python and the system's libraries. Containers often forbid those;
there Landlock keeps it to the same files. Where a kernel has neither, a warning says so.
Against a bug of the kernel itself only a virtual machine helps.

The tests run in another process, and the functions under test are called over a pipe with plain
values. So an object that equals everything, a patched builtin, a walk over the frames or memory,
and an early exit win nothing.
"""

import json
import os
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CHILD = Path(__file__).with_name("sandbox_child.py")
# seconds that start and clean-up may take beyond the limit of a program, on a busy machine
GRACE = 20.0
PAUSES = 0.5, 2, 8, 0  # seconds until it starts a program again, if processes or memory lack


class SandboxError(SystemExit):
    """The sandbox itself did not work; says nothing about the program. A command ends in the one
    line that it has."""


@dataclass(frozen=True)
class Job:
    """A program and its tests.

    code: the program. tests: statements that raise where it is wrong. entry_points: names of the
    program's functions and classes that the tests call. prelude: trusted definitions that the tests
    need beside them. timeout: seconds of wall time. memory: bytes of address space of a process,
    and of resident memory of all. processes: threads count too.
    """

    code: str
    tests: str
    entry_points: tuple[str, ...] = ()
    prelude: str = ""
    timeout: float = 5.0
    memory: int = 1 << 30
    processes: int = 32


EMPTY = Job("", "", timeout=300.0)  # no program: ends at once, even on a very busy machine


@dataclass(frozen=True)
class Result:
    """What became of a program.

    reason: "passed", "wrong" (an assertion), "error" (any other exception), "exited" (without an
    answer), "timeout", "memory", "lost" (its supervisor died).
    detail: exception and message. walls: what kept the program off the machine's files:
    "namespaces", "Landlock", or "" for nothing but its uid.
    """

    reason: str
    detail: str = ""
    walls: str = ""

    @property
    def passed(self):
        return self.reason == "passed"


def run(job):
    """Run the program of a Job to its end. -> Result. SandboxError where the sandbox cannot start
    it; never for what a program does. Other programs may hold what it lacks, so it tries again.
    """
    for pause in PAUSES:
        try:
            result = _supervised(job)
            break
        except OSError as error:
            if not pause:
                raise SandboxError(f"sandbox: no program can be started ({error})") from error
            time.sleep(pause)
    if result.reason != "lost":
        if not result.walls:
            warnings.warn(
                "this machine gives neither namespaces nor Landlock: model-written code is run, "
                "and it can read what its user may read",
                stacklevel=1,
            )
    elif job == EMPTY:
        raise SandboxError(f"sandbox: its supervisor is killed ({result.detail})")
    else:
        run(EMPTY)  # raises if the fault is the sandbox's own
    return result


def in_threads(function, *columns):
    """function(...) of every row of the columns, in order, as many at a time as there are cores,
    which the ranks of a machine share. On the first rank's terminal a bar appears after a while.
    """
    # here: the sandbox itself needs no packages
    from distributed.disk import progress
    from distributed.groups import ranks_of_a_node

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = max(1, cores // ranks_of_a_node(1))
    try:
        with ThreadPoolExecutor(workers) as pool:
            return [*progress(pool.map(function, *columns), "scoring", total=len(columns[0]))]
    except (BlockingIOError, RuntimeError) as error:
        if str(error).endswith(("start new thread", "temporarily unavailable")):
            raise SandboxError(f"scoring: {error}") from error
        raise


def _supervised(job):
    """Start the supervisor, send it the program and its tests, read its one answer. -> Result.
    OSError if it does not come to start the program."""
    site_packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    paths = ["/usr", "/lib", "/lib64", "/bin", sys.base_prefix, *site_packages]
    settings = vars(job) | {"paths": paths, "site_packages": site_packages}
    # these go by another way, which is read once the candidate has been forked
    sources = [settings.pop(name) for name in ("code", "tests", "prelude")]
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": "/",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "OMP_NUM_THREADS": "1",  # OpenBLAS and MKL read it too
    }
    with subprocess.Popen(
        [sys._base_executable, "-I", "-S", "-B", CHILD, json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,  # its end tells that we are gone
        stderr=subprocess.PIPE,
        cwd="/",
        env=environment,
        start_new_session=True,
        umask=0o022,
    ) as process:
        said = errors = b""
        try:
            sent = json.dumps(sources).encode() + b"\n"
            said, errors = process.communicate(sent, job.timeout + GRACE)
        except subprocess.TimeoutExpired:  # a supervisor that hangs
            pass
        finally:  # an interrupt, too
            process.stdout.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            process.kill()
    try:
        return Result(*json.loads(said))
    except ValueError:  # it is empty, or cut off
        why = [f"exit {process.returncode}", *errors.decode(errors="replace").splitlines()][-1]
    if process.returncode > 0:  # by itself: of an error before the program began
        raise OSError(why)
    return Result("lost", why)
