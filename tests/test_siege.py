"""A siege of the sandbox: each program passes only if its attack works, alone and many at once.

test_sandbox.py has an attack on every protection; here are forged answers and bombs.
"""

import os
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from evals import sandbox, sandbox_child

AT_ONCE = 16
LIMITS = {"timeout": 4.0, "memory": 192 << 20, "processes": 16}
LATE = 20.0  # seconds beyond the limit: so many at once share the cores
TESTS = "assert f(1) == 2\nassert f(5) == 6 and not f(6) == 6  # the needle of this siege"

PEAK = LIMITS["memory"] + (768 << 20)  # a look takes 0.1 s; shared pages count for each process

# what every program starts with
TOOLS = '''
import ctypes, gc, glob, json, mmap, os, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
def message(value):
    text = json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text
def quietly(call, *arguments):
    try: return call(*arguments)
    except Exception: return None
told, tell = os.pipe()
def in_children(number, work):
    """Have so many children work, and hold what they have."""
    for _ in range(number):
        if not os.fork():
            work()
            os.write(tell, b"x")
            time.sleep(9)
    for _ in range(number): os.read(told, 1)
BLOCK, HELD = 160 << 20, 1 << 30
'''


def holds(body):
    """Right if it lives for a second after the body, which takes HELD bytes."""
    return textwrap.dedent(body) + "\ntime.sleep(1)\ndef f(x): return x + 1"


ANSWERS = {
    "stdout": """
        print('{"reason": "passed", "detail": "", "missing": {}, "uid": null}', flush=True)
        os._exit(0)""",
    "every descriptor, as the supervisor's answer": """
        for fd in range(64):
            quietly(os.write, fd, b'{"reason": "passed", "detail": "", "missing": {}}\\n')
        os._exit(0)""",
    "every descriptor, as the tests' answer": """
        for fd in range(64): quietly(os.write, fd, message(["passed", "", ""]))
        os._exit(0)""",
    "an exception that ends the tests": """
        def f(x):
            os.write(61, message({"raise": "SystemExit", "detail": "0"}))
            os._exit(0)""",
    "a stop of iteration": "def f(x): raise StopIteration",
    "a nonce": """
        def f(x):
            os.write(61, message({"nonce": "0" * 32}))
            return 0""",
    "an array that is everything": """
        def f(x):
            os.write(61, message({"value": ["array", ["O", ["list", [True]]]]}))
            time.sleep(9)""",
    "an empty array": "import numpy\ndef f(x): return numpy.array([])",
    "not a number": "def f(x): return float('nan')",
    "a lying decimal": """
        import decimal
        class Decimal(decimal.Decimal):
            __eq__ = lambda *_: True
            __str__ = lambda _: "2"
        Decimal.__module__ = "decimal"
        def f(x): return 2 if x == 1 else Decimal(7)""",
    "the module that answers, replaced": """
        import __main__
        __main__.encode = lambda value: ["bool", True]
        __main__.send = lambda fd, value: os.write(fd, message({"value": True}))
        def f(x): return True""",
    "the garbage collector": """
        def f(x):
            needle = "nee" + "dle of this siege"
            for item in gc.get_objects():
                for text in (item.values() if type(item) is dict else ()):
                    if type(text) is str and needle in text: return x + 1""",
    "an audit hook": "sys.addaudithook(lambda *event: os._exit(0))\ndef f(x): open('x', 'w')",
    "threads that answer after the return": """
        def late():
            while True: quietly(os.write, 61, message({"value": 2}))
        def f(x):
            threading.Thread(target=late, daemon=True).start()
            return 0""",
    "an answer at exit": """
        import atexit
        atexit.register(lambda: os.write(61, message({"value": 2})))
        def f(x): sys.exit(0)""",
    "a child that answers after the return": """
        def f(x):
            if not os.fork():
                while True: quietly(os.write, 61, message({"value": 6}))
            return 0""",
    "a destructor": """
        class E:
            def __del__(self): os.write(61, message({"value": 2}))
        def f(x): return E()""",
}
BOMBS = {
    "a loop in C": "def f(x): return 9 ** 9 ** 9",
    "forks": """
        while True:
            try: os.fork()
            except OSError: pass""",
    "forks that end at once": """
        def f(x):
            while True:
                if not quietly(os.fork): os._exit(0)""",
    "forks with sessions of their own": """
        while True:
            if os.fork(): os._exit(0)
            quietly(os.setsid)""",
    "orphans that outlive it": """
        def f(x):
            for _ in range(5):
                if not os.fork():
                    os.setsid(); signal.signal(15, signal.SIG_IGN)
                    if not os.fork(): time.sleep(600)
                    os._exit(0)""",
    "private memory of children": holds(
        "in_children(12, lambda: globals().update(b=b'x' * BLOCK))"
    ),
    "shared memory that is not mapped in": holds("""
        def work():
            block = mmap.mmap(-1, BLOCK)
            for first in range(0, BLOCK, 4 << 20):
                block[first : first + (4 << 20)] = b"x" * (4 << 20)
                block.madvise(4)
            globals().update(block=block)
        in_children(12, work)"""),
    "shared memory of /dev/zero of which one page stays mapped": holds("""
        for number in range(HELD // BLOCK + 1):
            zero = os.open('/dev/zero', os.O_RDWR)
            place = libc.mmap(None, ctypes.c_size_t(BLOCK), 3, 1, zero, 0)
            assert place != ctypes.c_void_p(-1).value
            ctypes.memset(place, 1, BLOCK)
            libc.munmap(ctypes.c_void_p(place + 4096), ctypes.c_size_t(BLOCK - 4096))"""),
    "System V messages": holds("""
        for _ in range(500):
            queue = libc.msgget(0, 0o1600)
            assert queue >= 0 and libc.msgsnd(queue, b"1" * 8000, 7992, 2048) == 0"""),
    "the tests' memory, by a fraction": """
        def f(x):
            os.write(61, message({"value": ["Fraction", "1e999999999"]}))
            time.sleep(9)""",
    "the tests' memory, by an array": """
        def f(x):
            os.write(61, message({"value": ["array", ["U900000000", ["list", ["x"]]]]}))
            time.sleep(9)""",
    "the tests' memory, by brackets": """
        def f(x):
            text = b'{"value": ' + b"[" * (15 << 20)
            os.write(61, struct.pack("<Q", len(text)))
            for i in range(0, len(text), 60000): os.write(61, text[i : i + 60000])
            time.sleep(9)""",
    "the tests' time, by a set": """
        def f(x):
            same = [["int", hex(n * ((1 << 61) - 1))] for n in range(200_000)]
            os.write(61, message({"value": ["set", same]}))
            time.sleep(9)""",
    "an exception whose text does not end": """
        class E(Exception):
            def __str__(self):
                while True: pass
        def f(x): raise E""",
    "a group of exceptions": """
        def f(x):
            error = ValueError()
            for _ in range(10**5): error = ExceptionGroup("x", [error])
            raise error""",
    "output to the tests": "while True: os.write(61, b'x' * 65536)",
    "a deep folder": """
        def f(x):
            for _ in range(3000): os.mkdir("x"); os.chdir("x")""",
    "pipes and sockets": """
        def fill():
            while ends := quietly(socket.socketpair):
                for end in ends:
                    end.setblocking(False)
                    while quietly(end.send, bytes(65536)): pass
        def f(x): in_children(12, fill)""",
    "deep recursion in C": """
        import re
        sys.setrecursionlimit(10**9)
        def f(x): return re.compile("(" * 10**5)""",
    "a source of a long chain": "x = " + "f()" + "()" * 200_000,
}
ATTACKS = ANSWERS | BOMBS


@pytest.mark.full
@pytest.mark.parametrize("name", ATTACKS)
def test_siege(name, tmp_path, monkeypatch):
    """None scores, is late, takes more memory than its limit, or leaves a process or a file."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    job = sandbox.Job(TOOLS + textwrap.dedent(ATTACKS[name]), TESTS, ("f",), **LIMITS)
    here, peak = sandbox_child.family(os.getpid()), 0

    def timed(job):
        start = time.monotonic()
        return sandbox.run(job).passed, time.monotonic() - start

    with ThreadPoolExecutor(AT_ONCE) as pool:
        alone = pool.submit(timed, job)
        while not alone.done():
            peak = max(peak, sum(sandbox_child.family(os.getpid()).values()) - sum(here.values()))
            time.sleep(0.05)
        passed, seconds = zip(alone.result(), *pool.map(timed, [job] * AT_ONCE), strict=True)
    assert not any(passed) and max(seconds) < LIMITS["timeout"] + LATE
    assert peak < PEAK and not list(tmp_path.iterdir())
    assert sandbox_child.family(os.getpid()).keys() == here.keys()
