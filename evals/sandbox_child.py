"""What runs inside evals/sandbox.py: three processes, so that a program never sits where its
verdict is made.

    supervisor   started per program with a clean environment; makes the namespaces, keeps the clock
                 and the memory bound, ends everything
    tests        process 1 of the new PID namespace: when it ends, the kernel ends all others. Holds
                 the tests and expected values, which reach it only after the candidate was forked,
                 so they are in no memory that the candidate has
    candidate    the program: another uid, limits, no descriptor but /dev/null and one pipe pair to
                 the tests

Between tests and candidate go JSON messages of plain values (`encode`), never pickles. Standard
library only, and few modules, because every program pays for their import. Linux.
"""

import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from collections import deque
from importlib import import_module
from itertools import islice
from types import ModuleType

LIBC = ctypes.CDLL(None, use_errno=True)
NAMESPACES = {
    "network": 0x40000000,
    "ipc": 0x08000000,
    "files": 0x00020000,
    "processes": 0x20000000,
}  # CLONE_NEW*
NEW_USER = 0x10000000
# mount(2); INERT: neither devices nor programs with the rights of their owner
READ_ONLY, INERT, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2 | 4, 32, 4096, 16384, 1 << 18
DEATH_SIGNAL, DUMPABLE, SUBREAPER, NO_NEW_PRIVILEGES = 1, 4, 36, 38  # prctl(2)
MAX_MESSAGE = 16 << 20  # bytes of one message from the candidate: bounds the memory of the tests
MAX_ITEMS = 1_000_000  # taken from an iterator that a candidate returns
WATCH = 0.1  # seconds between looks at the memory
TESTS_MEMORY = 4 << 30  # bytes of address space of the tests, which are trusted
COLLECTIONS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
BYTES = {"bytes": bytes, "bytearray": bytearray}
# types that go as text, and their modules
TEXTS = {"complex": "builtins", "Decimal": "decimal", "Fraction": "fractions"}
TEXTS |= dict.fromkeys(("date", "datetime", "time"), "datetime")


class Unsupported(Exception):
    """A value that has no plain form."""


class CandidateError(Exception):
    """The candidate raised something that is no built-in exception, or broke the protocol."""


class Gone(Exception):
    """The process at the other end of a pipe has ended."""


# --------------------------------------------------------------------------------------------------
# messages: length and JSON


def read_exactly(fd, size):
    """`size` bytes; Gone at the end of the pipe."""
    found = bytearray()
    while len(found) < size:
        part = os.read(fd, min(size - len(found), 1 << 20))
        if not part:
            raise Gone
        found += part
    return found


def receive(fd, limit=None):
    """The next message."""
    (size,) = struct.unpack("<Q", read_exactly(fd, 8))
    if limit is not None and size > limit:
        raise CandidateError(f"a message of {size} bytes")
    return json.loads(read_exactly(fd, size))


def send(fd, message):
    """One message; blocks until it is read."""
    text = json.dumps(message).encode()
    view = memoryview(struct.pack("<Q", len(text)) + text)
    while view:
        view = view[os.write(fd, view) :]


def encode(value):
    """A plain value as JSON: what is neither None, bool, str, float, a short int nor a list becomes
    [kind, content].

    Subclasses lose their type (a Counter is a dict, an `__eq__` that lies is gone). Lists are
    ["list", ...]. Unsupported for functions, objects of the candidate's classes and all else.
    """
    if value is None or isinstance(value, (bool, str, float)):  # JSON ignores what is overridden
        return value
    if isinstance(value, int):
        value = int.__int__(value)
        # hex: linear in the length, decimals are not
        return value if abs(value) < 1 << 63 else ["int", hex(value)]
    for kind, base in COLLECTIONS.items():
        if isinstance(value, base):
            return [kind, [encode(item) for item in base.__iter__(value)]]
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(item)] for key, item in dict.items(value)]]
    for kind, base in BYTES.items():
        if isinstance(value, base):
            return [kind, value.hex()]
    if isinstance(value, range):
        return ["range", [encode(value.start), encode(value.stop), encode(value.step)]]
    module, name = type(value).__module__, type(value).__name__
    if module == "numpy":
        if name == "ndarray":
            return ["array", [str(value.dtype), encode(value.tolist())]]
        return encode(value.item())
    if module == TEXTS.get(name):
        return [name, str(value)]
    if module == "re" and name == "Match":  # tests ask whether there is one
        return ["tuple", [encode(value.span()), encode(value.group())]]
    if hasattr(value, "__next__") or name in ("dict_keys", "dict_values", "dict_items"):
        items = [encode(item) for item in islice(value, MAX_ITEMS + 1)]
        if len(items) > MAX_ITEMS:
            raise Unsupported(f"an iterator of more than {MAX_ITEMS} items")
        return ["set" if name == "dict_keys" else "iterator", items]
    raise Unsupported(f"a value of type {name}")


def decode(message):
    """The value of `encode`: only of types that are listed here, whatever the message says."""
    if not isinstance(message, list):
        return message
    kind, content = message
    if kind in COLLECTIONS:
        return COLLECTIONS[kind](map(decode, content))
    if kind == "iterator":
        return iter([*map(decode, content)])
    if kind == "dict":
        return {decode(key): decode(item) for key, item in content}
    if kind == "int":
        return int(content, 16)
    if kind in BYTES:
        return BYTES[kind].fromhex(content)
    if kind == "range":
        return range(*map(decode, content))
    if kind == "array":
        import numpy

        dtype, values = content
        dtype = numpy.dtype(dtype)
        return numpy.array(decode(values), dtype=dtype if dtype.kind in "biufcSU" else None)
    if kind in TEXTS:
        made = getattr(import_module(TEXTS[kind]), kind)
        return getattr(made, "fromisoformat", made)(content)
    raise CandidateError(f"a message of kind {kind!r:.40}")


# --------------------------------------------------------------------------------------------------
# walls


def system(call, *arguments):
    """A call of libc that returns -1 on failure: OSError."""
    if getattr(LIBC, call)(*arguments) == -1:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def prctl(option, value):
    system("prctl", option, *map(ctypes.c_ulong, (value, 0, 0, 0)))


def mount(source, target, flags, options=""):
    """mount(2). Only that of a "tmpfs" has a kind, which its source is named after."""
    source, target, options = (text.encode() or None for text in (source, target, options))
    system("mount", source, target, source, ctypes.c_ulong(flags), options)


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


def new_user(user, group):
    """Enter a user namespace that knows one user and one group: (name inside, name outside) of
    each."""
    system("unshare", NEW_USER)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", "{} {} 1".format(*user))
    write("/proc/self/gid_map", "{} {} 1".format(*group))


def enter_namespaces(without):
    """Leave the machine's network, IPC, mounts and processes. -> {what it could not leave: why}"""
    missing, user, group = {}, os.getuid(), os.getgid()

    def attempt(name, action, *arguments, needs="users"):
        try:
            if reason := missing.get(needs) or "not asked for" * (name in without):
                raise OSError(0, reason)
            action(*arguments)
        except OSError as error:
            missing[name] = error.strerror

    if user:  # only a user namespace gives the right to make the others
        attempt("users", new_user, (0, user), (0, group))
        if "users" in missing:  # otherwise they find nothing else of this uid
            missing |= {"users": f"no user namespace: {missing['users']}", "uid": "not root"}
    elif "uid" in without:
        missing["uid"] = "not asked for"
    attempt("ipc", system, "unshare", NAMESPACES["ipc"])
    # System V memory is in no process's size; only root of the namespace may say how much there is
    for name in ("shmall", "shmmax"):
        attempt("shared memory", write, f"/proc/sys/kernel/{name}", "0", needs="ipc")
    if user and "users" not in missing:
        # the caller's uid again, and no rights over what was made so far
        new_user((user, 0), (group, 0))
    for name in ("network", "files", "processes"):
        attempt(name, system, "unshare", NAMESPACES[name])
    missing.pop("users", None)
    return missing


def make_root(folder, paths, owner):
    """A read-only root directory in memory, with Python and the system's libraries, and in it one
    empty directory /sandbox of 32 MB that belongs to `owner`. It goes with the namespace."""
    mount("", "/", RECURSIVE | PRIVATE)
    mount("tmpfs", folder, INERT, "size=1m,nr_inodes=4096,mode=755")
    os.mkdir(f"{folder}/dev")
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
        os.close(os.open(folder + device, os.O_CREAT))
        mount(device, folder + device, BIND)
    bound = []
    for path in sorted(set(paths), key=len):
        if os.path.isdir(path) and not any(path.startswith(f"{above}/") for above in bound):
            os.makedirs(folder + path, exist_ok=True)
            mount(path, folder + path, BIND | RECURSIVE)
            mount("", folder + path, BIND | REMOUNT | READ_ONLY | INERT)
            bound.append(path)
    home = f"{folder}/sandbox"
    os.mkdir(home)
    mount("tmpfs", home, INERT, "size=32m,nr_inodes=4096,mode=700")
    if owner is not None:
        os.chown(home, owner, owner)
    mount("", folder, REMOUNT | READ_ONLY | INERT)


def user_ids(seed):
    """uids of a candidate and its tests, that no other living supervisor has (seed: its process
    id), nor any account."""
    with open("/proc/self/uid_map") as file:
        first, _, count = map(int, file.readline().split())
    large = first + count > 2_050_000_000
    lowest, room = (2_000_000_000, 20_000_000) if large else (20_000, 20_000)
    uid = lowest + 2 * (seed % room)
    return uid, uid + 1


def limit(**limits):
    """Hard resource limits, as far as they are below those that hold."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def become(uid):
    """Give up every right, and end when the parent ends. uid None: stay who we are."""
    prctl(NO_NEW_PRIVILEGES, 1)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header, nothing = struct.pack("<Ii", 0x20080522, 0), bytes(24)
    system("capset", header, nothing)  # the rights of a user namespace do not go with the uid
    prctl(DUMPABLE, 0)  # nobody of the same uid may read this memory
    prctl(DEATH_SIGNAL, signal.SIGKILL)


# --------------------------------------------------------------------------------------------------
# the candidate


def described(error):
    """{"raise": type, "detail": text} of an exception that a candidate made, whose methods may be
    anything."""
    try:
        detail = str(error)[:500]
    except BaseException:
        detail = ""
    return {"raise": type(error).__name__[:100], "detail": detail}


def candidate(job, requests, replies, uid, missing):
    """Run the program, then answer calls of its functions until the pipe ends."""
    os.setsid()
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd, target in ((nothing, 0), (nothing, 1), (nothing, 2), (requests, 60), (replies, 61)):
        os.dup2(fd, target)
    os.closerange(3, 60)
    os.closerange(62, 4096)
    processes = job["processes"]
    if uid is None and "uid" in missing:  # the limit counts all of this user's
        processes += count_processes(os.getuid())
    limit(NPROC=processes, AS=job["memory"], CPU=int(job["timeout"]) + 1, STACK=64 << 20)
    limit(FSIZE=4 << 20, NOFILE=64, CORE=0, MSGQUEUE=0, MEMLOCK=0)
    become(uid)
    place = os.path.dirname(os.__file__)
    try:
        os.listdir(place)
    except OSError as error:
        advice = (
            "let others enter the directories above it (chmod o+x), or use a Python that lies "
            "elsewhere"
        )
        raise OSError(f"uid {uid} cannot read Python's library in {place}: {advice}") from error
    send(61, "walls stand")  # what comes after this message may be the program's own
    sys.set_int_max_str_digits(0)
    module = sys.modules["candidate"] = ModuleType(
        "candidate"
    )  # dataclasses and pickles look there
    space = vars(module)
    try:
        exec(compile(job["code"], "<candidate>", "exec"), space)
    except BaseException as error:
        return send(61, described(error))
    send(61, {"ready": True})
    while True:
        request = receive(60)
        try:
            if "tests" in request:  # nonce mode: the tests run here, among what the program defined
                exec(compile(request["tests"], "<tests>", "exec"), space)
                reply = {"nonce": request["nonce"]}
            else:
                name, arguments, named = decode(request["call"])
                reply = {"value": encode(space[name](*arguments, **named))}
            send(61, reply)
        except BaseException as error:
            send(61, described(error))


# --------------------------------------------------------------------------------------------------
# the tests


def verdict_of(job, tests, calls, answers):
    """Reason and detail of a candidate that listens on the two pipes. sandbox.py's Result names
    reasons."""
    unsupported = []

    def ask(request):
        try:
            send(calls, request)
        except BrokenPipeError:
            raise Gone from None
        reply = receive(answers, MAX_MESSAGE)
        if not isinstance(reply, dict):
            raise CandidateError("no answer of the protocol")
        if "raise" in reply:
            kind = getattr(__builtins__, str(reply["raise"]), None)
            detail = str(reply.get("detail"))[:500]
            if (
                isinstance(kind, type)
                and issubclass(kind, Exception)
                and not issubclass(kind, (OSError, UnicodeError))
            ):
                raise kind(detail)
            raise CandidateError(f"{reply['raise']}: {detail}")
        return reply

    def proxy(name):
        def call(*arguments, **named):
            try:
                request = encode((name, arguments, named))
            except Unsupported as error:  # a fact about the tests, not about the candidate
                unsupported.append(str(error))
                raise
            return decode(ask({"call": request})["value"])

        return call

    try:
        setup = receive(answers, MAX_MESSAGE)
        if setup != "walls stand":
            return "setup", setup
        ready = receive(answers, MAX_MESSAGE)
        if "ready" not in ready:
            return "error", f"{ready.get('raise')}: {ready.get('detail')}"[:600]
        if job["mode"] == "nonce":
            told = ask({"tests": tests["tests"], "nonce": tests["nonce"]}).get("nonce")
            return "passed" if told == tests["nonce"] else "exited", ""
        space = {"__name__": "__main__"}
        exec(compile(tests["prelude"], "<prelude>", "exec"), space)
        space |= {name: proxy(name) for name in job["entry_points"]}
        exec(compile(tests["tests"], "<tests>", "exec"), space)
        return "passed", ""
    except Gone:
        return "exited", ""
    except BaseException as error:
        if unsupported:
            return "unsupported", unsupported[0]
        reason = "wrong" if isinstance(error, AssertionError) else "error"
        return reason, f"{type(error).__name__}: {error}"[:600]


def tests_process(job, verdict, given, root, uids, missing):
    """Fork the candidate, then read the tests from the pipe `given`, run them and send the verdict
    up."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if root:
        os.chroot(root)
    home = "/sandbox" if root else job["folder"]
    os.environ |= {"HOME": home, "TMPDIR": home}
    os.chdir(home)
    calls_read, calls = os.pipe()
    answers, answers_write = os.pipe()
    if not os.fork():
        try:
            candidate(job, calls_read, answers_write, uids[0], missing)
        except OSError as error:  # before the program was run; what it raises does not come here
            send(61, f"{error}")
        finally:
            os._exit(1)
    for fd in (calls_read, answers_write):
        os.close(fd)
    limit(AS=TESTS_MEMORY, CPU=int(job["timeout"]) + 2, FSIZE=0, CORE=0)
    become(uids[1])
    sys.set_int_max_str_digits(0)
    tests = receive(given)
    send(verdict, [*verdict_of(job, tests, calls, answers), tests["nonce"]])
    os._exit(0)


# --------------------------------------------------------------------------------------------------
# the supervisor


def all_processes():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def count_processes(uid):
    """How many of a user live now."""
    count = 0
    for pid in all_processes():
        try:
            count += os.stat(f"/proc/{pid}").st_uid == uid
        except OSError:  # it ended meanwhile
            pass
    return count


def descendants(top):
    """{process id: resident bytes} of all that `top` started, and of theirs."""
    parents, sizes = {}, {}
    for pid in all_processes():
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:  # a program's name may be any bytes
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        parents[pid], sizes[pid] = int(fields[1]), int(fields[21]) * resource.getpagesize()
    found = {top}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: sizes[pid] for pid in found - {top}}


def kill_user(uid):
    """End every process of a uid at once, so that none can fork away."""
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def end_all(first, uid, missing):
    """End the tests and all that the candidate left behind; returns when nothing is left."""
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)  # the kernel has then emptied the PID namespace
    if "processes" not in missing:
        return
    patience = time.monotonic() + 5
    while time.monotonic() < patience:  # orphans come to us, the subreaper
        if uid is not None:
            kill_user(uid)
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.002)
        except ChildProcessError:
            return


def remove(folder, mounted):
    """What the caller would have removed. Below a mounted root lie the machine's own directories:
    nothing is walked there."""
    import shutil

    if mounted:
        system("umount2", folder.encode(), 2)  # MNT_DETACH
    shutil.rmtree(folder, ignore_errors=True)


def told(verdict, nonce):
    """(reason, detail) that the tests have written to a pipe."""
    try:
        *result, proof = receive(verdict)
    except Gone:
        return "exited", "the tests ended without a verdict"
    if proof != nonce:
        raise RuntimeError("a verdict with a wrong nonce")
    return result


def supervise():
    """One job from stdin, one result to stdout. Ends everything when stdin ends, because then the
    caller is gone."""
    job = receive(0)
    # short of memory, the kernel takes these processes first
    write("/proc/self/oom_score_adj", "1000")
    sys.path.extend(job["site_packages"])
    prctl(SUBREAPER, 1)
    missing = enter_namespaces(job["without"])
    uids, root = (None, None), None
    if os.getuid() == 0 and "uid" not in missing:
        uids = user_ids(os.getpid())
        os.chown(job["folder"], uids[0], uids[0])
    if "files" not in missing:
        root = job["folder"]
        make_root(root, job["paths"], uids[0])
    verdict, verdict_write = os.pipe()
    tests_read, tests = os.pipe()
    began = time.monotonic()
    first = os.fork()
    if not first:
        try:
            for fd in (verdict, tests):
                os.close(fd)
            os.dup2(os.open("/dev/null", os.O_RDWR), 0)
            os.dup2(0, 1)
            tests_process(job, verdict_write, tests_read, root, uids, missing)
        finally:
            os._exit(1)
    for fd in (verdict_write, tests_read):
        os.close(fd)
    result = None
    try:
        given = receive(0)
        send(tests, given)  # a pipe of the tests, read once the candidate has been forked
        deadline, next_look = began + job["timeout"], began + WATCH
        while result is None:
            now = time.monotonic()
            if now >= deadline:
                result = "timeout", f"{job['timeout']:g} s"
            elif now >= next_look:
                next_look = now + WATCH
                if sum(descendants(first).values()) > job["memory"] + (256 << 20):
                    result = "memory", "of all its processes together"
            else:
                ready, _, _ = select.select([0, verdict], [], [], min(deadline, next_look) - now)
                if 0 in ready:  # its end: nothing more is sent
                    raise Gone
                if ready:
                    result = told(verdict, given["nonce"])
    except Gone:
        pass
    finally:
        end_all(first, uids[0], missing)
    if result is None:
        return remove(job["folder"], mounted=bool(root))
    reason, detail = result
    print(json.dumps({"reason": reason, "detail": detail, "missing": missing, "uid": uids[0]}))


if __name__ == "__main__":
    supervise()
