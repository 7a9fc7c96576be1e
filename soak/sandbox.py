"""A siege of evals/sandbox.py: programs that try to pass without being right, or to do harm.

    python soak/sandbox.py      as every user below; half an hour or more on two cores
    python soak/sandbox.py 2    as the third of them

Every program is tried alone and 64 times at once. It passes only if its attack works, so that none
may score. Besides, nothing of the host may change, and no run may take 5 s longer than its limit.
An attack that is held by a protection that the host does not give is counted as "weaker".
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "evals"))  # the standard library is enough
import sandbox
import sandbox_child

AT_ONCE, LATE = 64, 5.0
MUCH = 768 << 20  # bytes beyond the limit: shared pages count for each process, a look takes 0.1 s
LIMITS = {"timeout": 4.0, "memory": 192 << 20, "processes": 16}
HELD = 1 << 30  # bytes; twice what a program and its children may have, and more
TESTS = "assert f(1) == 2\nassert f(5) == 6 and not f(6) == 6  # the needle of this siege"
USER = 12345

# what every program starts with
TOOLS = '''
import ctypes, gc, glob, json, mmap, os, re, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
NEEDLE = "nee" + "dle of this siege"
def message(value):
    text = json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text
def right(text):
    """Whether a text has the tests."""
    return bool(text) and NEEDLE in text
def quietly(call, *arguments):
    try: return call(*arguments)
    except Exception: return None
def read(path): return open(path, "rb").read(1 << 20).decode(errors="replace")
def parents():
    found, pid = [1], os.getppid()
    while pid > 1 and pid not in found:
        found.append(pid)
        stat = quietly(read, f"/proc/{pid}/stat") or ") S 1"
        pid = int(stat.rpartition(")")[2].split()[1])
    return found
def stolen(pid):
    """Whether it reads an object of the process that it was forked from."""
    place, here = id(os), ctypes.create_string_buffer(16)
    pair = lambda address: struct.pack("QQ", address, 16)
    return libc.process_vm_readv(pid, pair(ctypes.addressof(here)), 1, pair(place), 1, 0) == 16
def search(pid):
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            if "rw" in line and "[v" not in line and last - first < 1 << 26:
                memory.seek(first)
                if NEEDLE.encode() in (quietly(memory.read, last - first) or b""): return True
'''


def tries(body):
    """Right if the body runs to its end."""
    return f"def f(x):\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n    return x + 1"


def claims(expression):
    """Right if the expression is true."""
    return f"def f(x): return x + 1 if ({expression}) else None"


def holds(body):
    """Right if it lives for a second after the body, which takes HELD bytes."""
    return textwrap.dedent(body) + "\ntime.sleep(1)\ndef f(x): return x + 1"


CHILDREN = """
told, tell = os.pipe()
for number in range(12):
    if not os.fork():
        {}
        os.write(tell, b"x")
        time.sleep(9)
for number in range(12): os.read(told, 1)
"""
BLOCK = 160 << 20  # bytes that fit into one process
# touches them, and has them no longer in its size
SHARED = f"""block = mmap.mmap(-1, {BLOCK})
        for first in range(0, {BLOCK}, 4 << 20):
            block[first : first + (4 << 20)] = b"x" * (4 << 20)
            block.madvise(4)"""
ONE_PAGE = f"""
for number in range({HELD // BLOCK + 1}):
    place = libc.mmap(None, ctypes.c_size_t({BLOCK}), 3, {{}}, 0)
    assert place != ctypes.c_void_p(-1).value
    ctypes.memset(place, 1, {BLOCK})
    libc.munmap(ctypes.c_void_p(place + 4096), ctypes.c_size_t({BLOCK} - 4096))
"""

# each passes only if it works
ATTACKS = {
    "forged verdicts": {
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
        "an exit status of 0": "os._exit(0)",
        "SystemExit": "def f(x): sys.exit(0)",
        "the wrong exception": "def f(x): raise KeyboardInterrupt",
        "an exception that ends the tests": """
            def f(x):
                os.write(61, message({"raise": "SystemExit", "detail": "0"}))
                os._exit(0)""",
        "a stop of iteration": "def f(x): raise StopIteration",
        "a nonce": """
            def f(x):
                os.write(61, message({"nonce": "0" * 32}))
                return 0""",
        "an answer without a value": "def f(x): os.write(61, message({})); time.sleep(9)",
        "an array that is everything": """
            def f(x):
                os.write(61, message({"value": ["array", ["O", ["list", [True]]]]}))
                time.sleep(9)""",
        "an empty array": "import numpy\ndef f(x): return numpy.array([])",
        "an array of all numbers": "import numpy\ndef f(x): return numpy.arange(9)",
        "not a number": "def f(x): return float('nan')",
        "a lying __eq__": """
            class E:
                __eq__ = __ne__ = lambda *_: True
                __hash__ = lambda _: 0
            def f(x): return E()""",
        "a lying int": """
            class E(int):
                __eq__ = lambda *_: True
                __bool__ = lambda _: True
            def f(x): return E(0)""",
        "a lying str": """
            class E(str):
                __eq__ = lambda *_: True
                __hash__ = str.__hash__
            def f(x): return E("2")""",
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
        "a lying builtin": """
            import builtins
            builtins.AssertionError = KeyError
            builtins.bool = builtins.isinstance = lambda *_: True
            def f(x): return x""",
        "the garbage collector": """
            def f(x):
                for item in gc.get_objects():
                    for text in (item.values() if type(item) is dict else ()):
                        if type(text) is str and right(text) and text != NEEDLE: return x + 1""",
        "frames": """
            def f(x):
                frame = sys._getframe()
                while frame:
                    for value in frame.f_locals.values():
                        if type(value) is dict and right(str(value.get("tests"))): return x + 1
                    frame = frame.f_back""",
        "frames of other threads": """
            def f(x):
                for frame in sys._current_frames().values():
                    while frame:
                        if right(str(frame.f_locals.get("tests"))): return x + 1
                        frame = frame.f_back""",
        "a trace function": """
            def trace(frame, event, value):
                for name in ("reply", "result"): frame.f_locals[name] = {"value": True}
                return trace
            sys.settrace(trace); sys.setprofile(trace)
            def f(x): return x""",
        "an audit hook": "sys.addaudithook(lambda *event: os._exit(0))\ndef f(x): open('x', 'w')",
        "a patched json": """
            json.dumps = lambda value: '{"value": true}'
            json.loads = lambda text: {"call": ["tuple", ["f", ["list", [1]], ["dict", []]]]}
            def f(x): return x""",
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
    },
    "the tests and the host read": {
        "memory of the tests": claims("any(quietly(search, pid) for pid in parents())"),
        "process_vm_readv": claims("any(map(stolen, parents()))"),
        "ptrace": claims("any(libc.ptrace(16, pid, 0, 0) == 0 for pid in parents())"),
        "descriptors of the tests": claims(
            "any(quietly(os.listdir, f'/proc/{pid}/fd') for pid in parents())"
        ),
        "pidfd_getfd": claims(
            "any(libc.syscall(438, quietly(os.pidfd_open, p) or -1, 0, 0) >= 0 for p in parents())"
        ),
        "command lines": claims(
            "any('soak' in (quietly(read, p) or '') for p in glob.glob('/proc/[0-9]*/cmdline'))"
        ),
        "environments": claims(
            "any('SIEGE' in (quietly(read, p) or '') for p in glob.glob('/proc/*/environ'))"
        ),
        "its own environment": claims("'SIEGE' in os.environ"),
        "other programs' files": claims(
            "any(quietly(os.listdir, p) for p in {*glob.glob(FOLDER + '/*')} - {os.getcwd()})"
        ),
        "the caller's file": tries("open(SECRET).read()"),
        "a link to the caller's file": tries("os.symlink(SECRET, 'link')\nopen('link').read()"),
        "a hard link to the caller's file": tries("os.link(SECRET, 'link')\nopen('link').read()"),
        "passwords": tries("open('/etc/shadow').read()"),
        "the repository": tries("open(REPOSITORY + '/evals/sandbox.py').read()"),
        "keys of the kernel": claims("libc.syscall(250, 0, -4, 0) > 0"),
        "another namespace": claims("libc.unshare(0x10000000) == 0"),
    },
    "the host changed": {
        "the caller's file": tries("open(SECRET, 'a').write('x')"),
        "through a link": tries("os.symlink(SECRET, 'link')\nopen('link', 'a').write('x')"),
        "its permissions": tries("os.chmod(SECRET, 0)"),
        "flags of a file that its user owns": tries("""
            import fcntl
            file, flags = os.open(OWN, os.O_RDONLY), bytearray(8)
            fcntl.ioctl(file, 0x80086601, flags)
            fcntl.ioctl(file, 0x40086602, bytes([flags[0] | 0x40]) + flags[1:])"""),
        "flags of a file, by a call of Linux 6.17": claims(
            "libc.syscall(469, os.open(OWN, 0), b'', struct.pack('3Q', 0x80, 0, 0), 24, 4096) == 0"
        ),
        "removed": tries("os.remove(SECRET)"),
        "a file out of the folder": tries("open(FOLDER + '/left', 'w').write('x')"),
        "a folder link for the clean-up": """
            os.symlink(FOLDER, 'link')
            os.mkdir('folder')
            os.chmod('folder', 0)
            def f(x): return 0""",
        "Python's library": tries("open(os.__file__, 'a').write('x')"),
        "a socket to the caller": tries("socket.create_connection(('127.0.0.1', PORT), 1)"),
        "a datagram": tries("socket.socket(type=2).sendto(b'x', ('127.0.0.1', PORT))"),
        "a name": tries("socket.getaddrinfo('example.org', 80)"),
        "signals to all above it": tries("""
            for pid in parents() + [0, -1, -os.getppid()]:
                for number in (19, 15, 9): quietly(os.kill, pid, number)
            os.kill(PID, 0)"""),
        "signals to a process of the caller": tries("os.kill(VICTIM, 9)"),
        "limits of the processes above it": claims(
            "any(quietly(resource.prlimit, p, resource.RLIMIT_CPU, (1, 1)) for p in parents()[1:])"
        ),
        "the name of the process": """
            libc.prctl(15, b"\\xff\\xfe\\x80\\n)")
            time.sleep(0.5)
            def f(x): return x""",
        "a name with a bracket and a number": """
            libc.prctl(15, b") S 1 0 0")
            def f(x): time.sleep(0.5); return x""",
        "root": tries("os.setuid(0)"),
        "a mount": claims("libc.mount(b'x', b'.', b'tmpfs', 0, None) == 0"),
        "the clock": tries("time.clock_settime(0, 0)"),
        "programs with the rights of their owner": """
            import subprocess
            def f(x):
                for name in ("su", "mount", "sudo", "newgrp", "chsh"):
                    quietly(subprocess.run, [name, "-c", "id"])""",
        "an orphan that outlives it": """
            def f(x):
                for _ in range(5):
                    if not os.fork():
                        os.setsid(); signal.signal(15, signal.SIG_IGN)
                        if not os.fork(): time.sleep(600)
                        os._exit(0)""",
    },
    "bombs": {
        "a loop at import": "while True: pass",
        "a loop in C": "def f(x): return 9 ** 9 ** 9",
        "a sleep that signals do not end": """
            for number in range(1, 65): quietly(signal.signal, number, signal.SIG_IGN)
            def f(x): time.sleep(600)""",
        "a stopped process": "def f(x): os.kill(os.getpid(), 19)",
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
        "threads": """
            def f(x):
                while True: quietly(threading.Thread(target=time.sleep, args=(9,)).start)""",
        "private memory": holds(f"block = b'x' * {HELD}"),
        "private memory of children": holds(CHILDREN.format(f"block = b'x' * {BLOCK}")),
        "private memory of orphans": holds(f"""
            told, tell = os.pipe()
            for number in range(12):
                if not os.fork():
                    if os.fork(): os._exit(0)
                    block = b"x" * {BLOCK}
                    os.write(tell, b"x")
                    time.sleep(9)
                os.wait()
            for number in range(12): os.read(told, 1)"""),
        "shared memory that is not mapped in": holds(CHILDREN.format(SHARED)),
        "shared memory of which one page stays mapped": holds(ONE_PAGE.format("0x21, -1")),
        "shared memory of /dev/zero": holds(
            ONE_PAGE.format("1, os.open('/dev/zero', os.O_RDWR)")
        ),
        "shared memory mapped in a child": holds(f"""
            for number in range({HELD // BLOCK + 1}):
                block = mmap.mmap(-1, {BLOCK})
                place = ctypes.c_char.from_buffer(block)
                ctypes.memset(ctypes.addressof(place), 1, {BLOCK})
                if not os.fork():
                    time.sleep(9)
                del place
                block.close()"""),
        "memory files": holds(
            CHILDREN.format("for _ in range(40): os.write(os.memfd_create('x'), bytes(4 << 20))")
            + "assert os.memfd_create('x') > 0"
        ),
        "System V memory": tries(f"assert libc.shmget(0, {BLOCK}, 0o1600) >= 0"),
        "System V semaphores": tries(
            "for _ in range(500): assert libc.semget(0, 32000, 0o1600) >= 0"
        ),
        "System V messages": tries("""
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
        "a huge result": "def f(x): return 'x' * (100 << 20)",
        "a nested result": """
            def f(x):
                value = []
                for _ in range(10**6): value = [value]
                return value""",
        "a huge exception": "def f(x): raise ValueError('x' * (100 << 20))",
        "an exception whose text does not end": """
            class E(Exception):
                def __str__(self):
                    while True: pass
            def f(x): raise E""",
        "a chain of exceptions": """
            def f(x):
                error = None
                for n in range(10**6):
                    new = ValueError(); new.__context__ = error; error = new
                raise error""",
        "a group of exceptions": """
            def f(x):
                error = ValueError()
                for _ in range(10**5): error = ExceptionGroup("x", [error])
                raise error""",
        "output": "def f(x):\n    while True: os.write(1, b'x' * 65536)",
        "output to the tests": "while True: os.write(61, b'x' * 65536)",
        "one large file": tries("""
            signal.signal(25, signal.SIG_IGN)
            with open("x", "wb") as file:
                for _ in range(200): file.write(bytes(1 << 20))"""),
        "many files": tries("""
            for n in range(500):
                with open(f"x{n}", "wb") as file: file.write(bytes(1 << 20))"""),
        "files without content": tries("for n in range(10_000): open(f'x{n}', 'w').close()"),
        "a deep folder": """
            def f(x):
                for _ in range(3000): os.mkdir("x"); os.chdir("x")""",
        "pipes and sockets": """
            def f(x):
                for _ in range(12):
                    if not os.fork():
                        while True:
                            ends = quietly(socket.socketpair) or time.sleep(9)
                            for end in ends:
                                end.setblocking(False)
                                while quietly(end.send, bytes(65536)): pass
                time.sleep(2)""",
        "deep recursion in C": """
            sys.setrecursionlimit(10**9)
            def f(x): return re.compile("(" * 10**5)""",
        "a source of brackets": "x = " + "(" * 10**5,
        "a source of a long chain": "x = " + "f()" + "()" * 200_000,
    },
}  # fmt: skip
# held by these protections alone
HELD_BY = {"many files": {"disk"}, "files without content": {"disk"}}
HELD_BY |= {"the tests and the host read": {"files"}, "the host changed": {"files"}}


def program(code, host):
    code = TOOLS + textwrap.dedent(code)
    for name, value in host.items():
        code = code.replace(name, repr(value))
    return sandbox.Job(code, TESTS, ("f",), **LIMITS)


def timed(job):
    began = time.monotonic()
    return sandbox.run(job), time.monotonic() - began


def siege(users):
    """Every attack, alone and at once, as this process. -> number of attacks that did not fail"""
    top = tempfile.mkdtemp(prefix="siege-")
    tempfile.tempdir = str(Path(top, "scratch"))
    os.mkdir(tempfile.tempdir)
    secret = Path(top, "secret")
    secret.write_text("secret")
    secret.chmod(0o666)
    own = Path(top, "site-packages", "own.py")  # programs may read what lies there
    own.parent.mkdir()
    own.touch()
    sys.path.append(str(own.parent))
    os.environ["SIEGE"] = "x"
    victim = subprocess.Popen(["/bin/sleep", "7200"])
    server = socket.create_server(("127.0.0.1", 0))
    server.setblocking(False)
    host = {"SECRET": str(secret), "FOLDER": tempfile.tempdir, "REPOSITORY": str(ROOT)}
    host["OWN"] = str(own)
    host |= {"PORT": server.getsockname()[1], "VICTIM": victim.pid, "PID": os.getpid()}
    missing = sandbox.run(sandbox.Job("", "")).missing

    def harm():
        """What of the host has changed."""
        if secret.read_text() != "secret" or secret.stat().st_mode & 0o777 != 0o666:
            yield "the caller's file"
        if victim.poll() is not None:
            yield "the caller's process"
        with suppress(BlockingIOError):
            server.accept()
            yield "a connection"
        if left := os.listdir(tempfile.tempdir):
            yield f"{left[0]} was left"
        if left := sandbox_child.family(os.getpid()).keys() - {victim.pid, os.getpid()}:
            yield f"process {left.pop()} was left"
        if peak > LIMITS["memory"] + MUCH:
            yield f"{peak >> 20} MB at once"

    failures, peak, own = 0, 0, sum(sandbox_child.family(os.getpid()).values())
    for kind, programs in ATTACKS.items():
        tried, lost, weaker, slowest = 0, 0, [], 0.0
        for name, code in programs.items():
            if (HELD_BY.get(name) or HELD_BY.get(kind, {None})) <= missing.keys():
                weaker.append(name)
                continue
            jobs = [program(code, host)] * AT_ONCE
            with ThreadPoolExecutor(AT_ONCE) as pool:
                alone, peak = pool.submit(timed, jobs[0]), 0
                while not alone.done():
                    peak = max(peak, sum(sandbox_child.family(os.getpid()).values()) - own)
                    time.sleep(0.05)
                done = [alone.result(), *pool.map(timed, jobs)]
            found = [f"scored {count}" for count in [sum(r.passed for r, _ in done)] if count]
            late = max(seconds for _, seconds in done) - LIMITS["timeout"]
            found += [f"{late:.1f} s late"] * (late > LATE) + list(harm())
            for said in found:
                print(f"  {kind}: {name}: {said} ({done[0][0].reason} {done[0][0].detail[:80]})")
            tried, lost, slowest = tried + 1, lost + bool(found), max(slowest, late)
        row = f"{users}: {kind} | {tried} | {tried - lost} | {len(weaker)} | {slowest:+.1f} s"
        print(row, flush=True)
        if weaker:
            print(f"  weaker here: {', '.join(weaker)}")
        failures += lost
    victim.kill()
    shutil.rmtree(top)
    return failures


def container():
    """Root that may not make namespaces."""
    sandbox_child.system("prctl", 24, *map(sandbox_child.ctypes.c_ulong, (21, 0, 0, 0)))


def plain_user():
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    sandbox_child.prctl(sandbox_child.DUMPABLE, 1)


def plain_container():
    """A plain user that may not make user namespaces."""
    plain_user()
    sandbox_child.new_user((USER, USER), (USER, USER))
    sandbox_child.write("/proc/sys/user/max_user_namespaces", "0")


USERS = {
    "root": lambda: None,
    "root without namespaces": container,
    "plain user": plain_user,
    "plain user without namespaces": plain_container,
}

if __name__ == "__main__":
    if len(sys.argv) > 2:
        raise SystemExit(bool(siege(sys.argv[2])))
    print("check | tried | survived | weaker | longest beyond the limit", flush=True)
    if os.getuid():
        raise SystemExit(bool(siege("this user")))
    status = 0
    for number, (name, become) in enumerate(USERS.items()):
        if sys.argv[1:] in ([], [str(number)]):
            python = "/usr/bin/python3" if number else sys.executable  # that others may read
            command = [python, "-B", __file__, str(number), name]
            status |= subprocess.run(command, preexec_fn=become, cwd="/").returncode
    raise SystemExit(status)
