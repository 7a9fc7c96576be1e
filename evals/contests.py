"""Contest problems as LiveCodeBench stores them: their rows, their tests, and the code that judges a program by them."""

import base64
import json
import pickletools
import zlib
from pathlib import Path

from data.rows import read_rows

MAX_TESTS = 1 << 30  # bytes of one problem's tests, decoded

# What the runner puts in front of every program: starter code uses names such as List without importing them
STARS = "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
IMPORTS = "".join(f"from {name} import *\n" for name in [*STARS.split(), "builtins", "typing"])
IMPORTS += f"import {', '.join(STARS.split())}\nsys.setrecursionlimit(50000)\n"

# In the program's process. The names cannot be those of a program by accident.
FUNCTION = """
exec(compile({code!r}, "<solution>", "exec"), globals())
def _judged_call(*arguments):
    owner = Solution() if "class Solution" in {code!r} else None
    return getattr(owner, {name!r})(*arguments) if owner is not None else globals()[{name!r}](*arguments)
"""
PROGRAM = """
import os as _os, select as _select, sys as _sys
def _judged_call(stdin):
    "stdout of the program, in a process of its own that reads stdin"
    to_read, feed = _os.pipe()
    output, to_write = _os.pipe()
    pid = _os.fork()
    if not pid:
        status = 1
        try:
            _os.dup2(to_read, 0)
            _os.dup2(to_write, 1)
            _os.closerange(3, 64)
            _sys.stdin, _sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
            _sys.stdout.reconfigure(newline="\\n")
            space = {{"__name__": "__main__", "__builtins__": __builtins__}}
            try:
                exec({imports!r}, space)
                exec(compile({code!r}, "<solution>", "exec"), space)
            except SystemExit:
                pass
            import atexit, threading
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
            atexit._run_exitfuncs()
            _sys.stdout.flush()
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
            _sys.stderr.flush()
        finally:
            _os._exit(status)
    _os.close(to_read)
    _os.close(to_write)
    _os.set_blocking(feed, False)
    rest, parts, size = memoryview(stdin.encode()), [], 0
    poll = _select.poll()
    poll.register(feed, _select.POLLOUT)
    poll.register(output, _select.POLLIN)
    while output is not None:
        for fd, event in poll.poll():
            if fd == feed:
                try:
                    rest = rest[_os.write(feed, rest[: 1 << 16]) :]
                except BrokenPipeError:
                    rest = rest[:0]
                if not rest:
                    poll.unregister(feed)
                    _os.close(feed)
            elif part := _os.read(output, 1 << 16):
                parts.append(part)
                size += len(part)
                if size > 8 << 20:
                    _os.kill(pid, 9)
                    raise RuntimeError("more than 8 MiB on stdout")
            else:
                poll.unregister(output)
                _os.close(output)
                output = None
    status = _os.waitstatus_to_exitcode(_os.waitpid(pid, 0)[1])
    if status:
        raise RuntimeError(f"the program ended with {{status}}")
    return b"".join(parts).decode(errors="replace")
"""

# In the process of the tests
JUDGE = """
import json, signal
from decimal import Decimal, InvalidOperation

def late(*_):
    raise TimeoutError("no answer within {timeout} seconds")

def lines(text):
    return [line.strip() for line in text.strip().split("\\n")]

def same_line(got, want):
    if got == want:
        return True
    try:
        return [Decimal(word) for word in got.split()] == [Decimal(word) for word in want.split()]
    except InvalidOperation:
        return False

def same(got, want):
    if {functional}:
        return (list(got) if isinstance(got, tuple) else got) == json.loads(want)
    got, want = lines(got), lines(want)
    return len(got) == len(want) and all(map(same_line, got, want))

signal.signal(signal.SIGALRM, late)
for number, (given, want) in enumerate(json.loads({tests!r})):
    arguments = [json.loads(line) for line in given.split("\\n")] if {functional} else [given]
    signal.setitimer(signal.ITIMER_REAL, {timeout})
    got = _judged_call(*arguments)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert same(got, want), "test %d" % number
"""


def rows_of(path: str, split: str, hub: str, releases: dict, presets: tuple):
    """(file or hub id, row, (file, offset, bytes) of the row where it can be read again) of `path`, in order."""
    files = [path] if path.endswith(".jsonl") and Path(path).is_file() else []
    if path in releases or path == hub:
        import huggingface_hub  # here, because scoring a file does not need it

        names = [
            f"test{n if n > 1 else ''}.jsonl" for n in releases.get(path, releases["release_v6"])
        ]
        try:
            files = [
                huggingface_hub.hf_hub_download(hub, name, repo_type="dataset") for name in names
            ]
        except Exception as error:  # no network, no such file: httpx has errors of its own
            said = " ".join(str(error).split())[:200]
            own = "with --data FILE.jsonl a copy of its files is read"
            raise SystemExit(
                f"--data {path}: {hub} cannot be had from the hub; {own} ({said})"
            ) from error
    for name in files:
        with open(name, "rb") as file:
            while line := file.readline():
                if line.strip():
                    try:
                        row = json.loads(line)
                    except ValueError as error:
                        raise SystemExit(
                            f"{name}: the line at byte {file.tell() - len(line)} is not JSON ({error})"
                        ) from error
                    yield (
                        name,
                        row if isinstance(row, dict) else {},
                        (name, file.tell() - len(line), len(line)),
                    )
    if not files:
        for row in read_rows(path, split, presets):
            yield path, row, None


def tests_of(example: dict) -> list[list[str]]:
    """[input, output] of all tests, the public ones first. SystemExit names the row whose private tests cannot be read."""
    text = example["private"]
    if not isinstance(text, str):
        with open(text[0], "rb") as file:
            file.seek(text[1])
            text = json.loads(file.readline())["private_test_cases"]
    try:
        private = tests_in(text if text.lstrip()[:1] == "[" else unpacked(text))
    except (ValueError, zlib.error) as error:
        raise SystemExit(
            f"{example['source']}: private_test_cases cannot be read ({error})"
        ) from error
    return example["public"] + private


def tests_in(text: str) -> list[list[str]]:
    """[input, output] of a JSON list of tests. ValueError where it is none."""
    tests = json.loads(text)
    if not isinstance(tests, list) or not all(isinstance(test, dict) for test in tests):
        raise ValueError("no list of tests")
    pairs = [[test.get("input"), test.get("output")] for test in tests]
    if not all(isinstance(part, str) for pair in pairs for part in pair):
        raise ValueError("a test without input and output")
    return pairs


def unpacked(text: str) -> str:
    """The text in base64 of zlib of a pickle of it. The pickle is taken apart, not loaded: loading one can run anything.
    ValueError or zlib.error where it is anything else than one text."""
    stream = zlib.decompressobj()
    data = stream.decompress(base64.b64decode(text, validate=True), MAX_TESTS)
    if not stream.eof:
        raise ValueError(f"more than {MAX_TESTS} bytes, or cut off")
    harmless = ("PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP")
    parts = [
        (opcode.name, value)
        for opcode, value, _ in pickletools.genops(data)
        if opcode.name not in harmless
    ]
    if (
        len(parts) != 1
        or not parts[0][0].endswith("UNICODE")
        and not parts[0][0].endswith("UNICODE8")
    ):
        raise ValueError(f"a pickle of {', '.join(name for name, _ in parts[:4])}, not of a text")
    return parts[0][1]
