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
    "disk": 0x00020000,
    "processes": 0x20000000,
}  # CLONE_NEW*
NEW_USER = 0x10000000
# mount(2); INERT: neither devices nor programs with the rights of their owner
READ_ONLY, INERT, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2 | 4, 32, 4096, 16384, 1 << 18
# prctl(2)
DEATH_SIGNAL, DUMPABLE, GET_SECCOMP, SECCOMP, SUBREAPER, NO_NEW_PRIVILEGES = 1, 4, 21, 22, 36, 38
# system calls that a program does without, by their numbers on x86_64 and aarch64: sockets, memory
# that is in no process's size, keys, other processes, and ways around these rules
CALLS = """
    socket 41 198              shmget 29 194              shmat 30 196
    shmctl 31 195              semget 64 190              semop 65 193
    semctl 66 191              semtimedop 220 192         msgget 68 186
    msgsnd 69 189              msgrcv 70 188              msgctl 71 187
    mq_open 240 180            memfd_create 319 279       memfd_secret 447 447
    add_key 248 217            request_key 249 218        keyctl 250 219
    ptrace 101 117             process_vm_readv 310 270   process_vm_writev 311 271
    pidfd_getfd 438 438        pidfd_send_signal 424 424  tkill 200 130
    rt_sigqueueinfo 129 138    rt_tgsigqueueinfo 297 240  setpriority 141 140
    sched_setaffinity 203 122  sched_setscheduler 144 119 unshare 272 97
    setns 308 268              bpf 321 280                userfaultfd 323 282
    perf_event_open 298 241    io_uring_setup 425 425     sched_setattr 314 274
    sched_setparam 142 118     ioprio_set 251 30          migrate_pages 256 238
    move_pages 279 239
"""
# those that change a file that is not open for writing, where a program sees the machine's own
ON_FILES = """
    truncate 76 45             chmod 90 -                 fchmodat 268 53
    fchmodat2 452 452          chown 92 -                 lchown 94 -
    fchownat 260 54            utime 132 -                utimes 235 -
    futimesat 261 -            utimensat 280 88           setxattr 188 5
    lsetxattr 189 6            setxattrat 463 463         removexattr 197 14
    lremovexattr 198 15        removexattrat 466 466      fchmod 91 52
    fchown 93 55               fsetxattr 190 7            fremovexattr 199 16
    file_setattr 469 469
"""
MMAP, PRLIMIT, KILL, TGKILL = (9, 222), (302, 261), (62, 129), (234, 131)
FCNTL, IOCTL = (72, 25), (16, 29)
# fcntl(2) names the process that a descriptor signals: F_SETOWN, F_SETSIG, F_SETOWN_EX
SET_OWNER = 8, 10, 15
# ioctl(2) from here on is refused: among these are FIOSETOWN and those that change a file that is
# open for reading (FS_IOC_SETFLAGS). Most of terminals and plain descriptors are below
FILE_IOCTLS = 0x5500
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH_*, column
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of BPF
ALLOW, REFUSE, END = 0x7FFF0000, 0x00050001, 0x80000000  # SECCOMP_RET_*, with EPERM
SHARED_OR_HUGE = 0x40001  # flags of mmap(2)
# Landlock: its system calls, and rights: to use a directory, a device, everything there is
NEW_RULES, ADD_RULE, RESTRICT = 444, 445, 446
TO_READ, TO_USE, RIGHTS = 1 | 4 | 8, 2 | 4, (0, 13, 14, 15, 15, 16)
DEVICES = "/dev/null", "/dev/zero", "/dev/urandom"
MAX_MESSAGE = 16 << 20  # bytes of one message from the candidate: bounds the memory of the tests
MAX_ITEMS = 1_000_000  # taken from an iterator that a candidate returns
WATCH = 0.1  # seconds between looks at the memory
TESTS_MEMORY = 4 << 30  # bytes of address space of the tests, which are trusted
COLLECTIONS = {kind.__name__: kind for kind in (list, tuple, set, frozenset, deque)}
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
    """One message; blocks until it is read. Gone if nobody is left to read it."""
    text = json.dumps(message).encode()
    view = memoryview(struct.pack("<Q", len(text)) + text)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except BrokenPipeError:
        raise Gone from None


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
    if (value := getattr(LIBC, call)(*arguments)) == -1:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return value


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
        attempt("users", new_user, (user, user), (group, group))
        if "users" in missing:  # otherwise they find nothing else of this uid
            missing |= {"users": f"no user namespace: {missing['users']}", "uid": "not root"}
    elif "uid" in without:
        missing["uid"] = "not asked for"
    elif first_and_count_of_uids()[1] == 1:
        missing["uid"] = "its user namespace knows one user"
    for name, kind in NAMESPACES.items():
        attempt(name, system, "unshare", kind)
    if "disk" in missing:
        attempt("files", rights_of_files, needs="")
    attempt("system calls", rules_of_calls, {}, needs="")
    return missing


def not_made_up_for(missing):
    """Drop from `missing` what the rules for system calls, or these and Landlock together, still
    prevent."""
    calls = "system calls" not in missing
    both = calls and "files" not in missing
    held = {"network": calls, "ipc": calls, "processes": both, "uid": both, "users": True}
    return {name: reason for name, reason in missing.items() if not held.get(name)}


def rules_of_calls(missing):
    """The program for seccomp(2) that refuses CALLS, shared and huge pages, and limits for other
    processes; where namespaces are missing also ON_FILES, FILE_IOCTLS, and signals to all processes
    but the program's first. OSError on machines whose numbers are not known, and where the kernel,
    or what emulates it, has no such rules."""
    if (machine := os.uname().machine) not in ARCHITECTURES:
        raise OSError(0, f"not known on {machine}")
    prctl(GET_SECCOMP, 0)
    architecture, column = ARCHITECTURES[machine]
    rules = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, END), (LOAD, 0, 0, 0)]
    # numbers above are those of x32, another way to the same calls
    rules += [(AT_LEAST, 0, 1, 1 << 30), (RETURN, 0, 0, REFUSE)]
    calls = CALLS + ON_FILES * ("disk" in missing)
    for number in calls.split()[1 + column :: 3]:
        if number != "-":  # the machine has no such call
            rules += [(EQUAL, 0, 1, int(number)), (RETURN, 0, 0, REFUSE)]
    for command in SET_OWNER if "processes" in missing else ():
        rules += [(EQUAL, 0, 4, FCNTL[column]), (LOAD, 0, 0, 24), (EQUAL, 0, 1, command)]
        rules += [(RETURN, 0, 0, REFUSE), (LOAD, 0, 0, 0)]
    to_self = [(call, 0, (EQUAL, 0, 1, os.getpid())) for call in (KILL, TGKILL)]
    more = [(IOCTL, 1, (AT_LEAST, 1, 0, FILE_IOCTLS))] * bool({"disk", "processes"} & set(missing))
    more += to_self * ("processes" in missing)
    flags = (MMAP, 3, (ANY_BIT, 1, 0, SHARED_OR_HUGE))
    for call, argument, rule in (flags, (PRLIMIT, 0, (EQUAL, 0, 1, 0)), *more):
        rules += [(EQUAL, 0, 4, call[column]), (LOAD, 0, 0, 16 + 8 * argument), rule]
        rules += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    rules.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *rule) for rule in rules)


def refuse_calls(rules):
    """From now on, in children too, without the calls that `rules_of_calls` refuses."""
    program = struct.pack("@HP", len(rules) // 8, ctypes.cast(rules, ctypes.c_void_p).value)
    system("prctl", SECCOMP, ctypes.c_ulong(2), program)


def rights_of_files():
    """All rights that this kernel's Landlock knows, as bits. OSError if it has none."""
    version = system("syscall", NEW_RULES, None, ctypes.c_size_t(0), 1)
    return (1 << RIGHTS[min(version, len(RIGHTS) - 1)]) - 1


def confine(paths, folder):
    """From now on, in children too, no files but those below paths, to read, and below folder, and
    DEVICES."""
    everything = rights_of_files()
    rules = system("syscall", NEW_RULES, struct.pack("=Q", everything), ctypes.c_size_t(8), 0)
    allowed = dict.fromkeys(paths, TO_READ) | dict.fromkeys(DEVICES, TO_USE) | {folder: everything}
    for path, rights in allowed.items():
        if os.path.exists(path):
            place = os.open(path, os.O_PATH)
            system("syscall", ADD_RULE, rules, 1, struct.pack("=Qi", rights, place), 0)
            os.close(place)
    system("syscall", RESTRICT, rules, 0)
    os.close(rules)


def make_root(folder, paths, owner):
    """A read-only root directory in memory, with Python and the system's libraries, and in it one
    empty directory /sandbox of 32 MB that belongs to `owner`. It goes with the namespace."""
    mount("", "/", RECURSIVE | PRIVATE)
    mount("tmpfs", folder, INERT, "size=1m,nr_inodes=4096,mode=755")
    os.mkdir(f"{folder}/dev")
    for device in DEVICES:
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


def first_and_count_of_uids():
    """The first range of uids that this namespace knows."""
    with open("/proc/self/uid_map") as file:
        first, _, count = map(int, file.readline().split())
    return first, count


def user_ids(seed):
    """uids of a candidate and its tests, that no other living supervisor has (seed: its process
    id), nor any account."""
    first, count = first_and_count_of_uids()
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
    os.nice(10)  # those that end a program must not wait for it, whatever it starts
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd, target in ((nothing, 0), (nothing, 1), (nothing, 2), (requests, 60), (replies, 61)):
        os.dup2(fd, target)
    os.closerange(3, 60)
    os.closerange(62, 4096)
    limit(NPROC=job["processes"], AS=job["memory"], CPU=int(job["timeout"]) + 1, STACK=64 << 20)
    limit(FSIZE=4 << 20, NOFILE=64, CORE=0, MSGQUEUE=0, MEMLOCK=0)
    become(uid)
    if "disk" in missing and "files" not in missing:
        confine(job["paths"], job["folder"])
    if "system calls" not in missing:
        refuse_calls(rules_of_calls(missing))
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
    # dataclasses and pickles look there
    module = sys.modules["candidate"] = ModuleType("candidate")
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
        send(calls, request)
        reply = receive(answers, MAX_MESSAGE)
        if not isinstance(reply, dict):
            raise CandidateError("no answer of the protocol")
        if "raise" in reply:
            kind = getattr(__builtins__, str(reply["raise"]), None)
            detail = str(reply.get("detail"))[:500]
            kinds = getattr(kind, "__mro__", ())
            if Exception in kinds and not {OSError, UnicodeError} & {*kinds}:
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
            replied = ask({"tests": tests["tests"], "nonce": tests["nonce"]}).get("nonce")
            return "passed" if replied == tests["nonce"] else "exited", ""
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
    tests = receive(given)
    send(verdict, [*verdict_of(job, tests, calls, answers), tests["nonce"]])
    os._exit(0)


# --------------------------------------------------------------------------------------------------
# the supervisor


def processes():
    """{process id: (parent, uid, resident bytes)} of all; bytes are 0 once one has ended."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:  # a program's name may be any bytes
                fields = file.read().rpartition(b")")[2].split()
            uid = os.stat(f"/proc/{pid}").st_uid
        except OSError:  # it ended meanwhile
            continue
        found[int(pid)] = int(fields[1]), uid, int(fields[21]) * resource.getpagesize()
    return found


def family(top):
    """{process id: resident bytes} of `top`, all that it started, and theirs."""
    everyone, found = processes(), {top}
    while more := {pid for pid, (parent, *_) in everyone.items() if parent in found} - found:
        found |= more
    return {pid: everyone[pid][2] for pid in found & everyone.keys()}


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
        for pid in family(os.getpid()).keys() - {os.getpid()} if uid is None else ():
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


def read_verdict(verdict, nonce):
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
    sys.set_int_max_str_digits(0)
    prctl(SUBREAPER, 1)
    missing = enter_namespaces(job["without"])
    uids, root = (None, None), None
    if os.getuid() == 0 and "uid" not in missing:
        uids = user_ids(os.getpid())
        os.chown(job["folder"], uids[0], uids[0])
    elif "uid" in missing:  # the limit counts all of this user's
        job["processes"] += sum(uid == os.getuid() for _, uid, _ in processes().values())
    if "disk" not in missing:
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
                if sum(family(os.getpid()).values()) > job["memory"] + (256 << 20):
                    result = "memory", "of all its processes together"
                looked = time.monotonic()
                next_look = looked + max(WATCH, looked - now)  # half of its time at most
            else:
                ready, _, _ = select.select([0, verdict], [], [], min(deadline, next_look) - now)
                if 0 in ready:  # its end: nothing more is sent
                    raise Gone
                if ready:
                    result = read_verdict(verdict, given["nonce"])
    except Gone:
        pass
    finally:
        end_all(first, uids[0], missing)
    if result is None:  # the caller would have removed it
        if root:  # below lie the machine's own directories: nothing is walked there
            system("umount2", root.encode(), 2)  # MNT_DETACH
        os.execv("/bin/rm", ["rm", "-rf", job["folder"]])
    reason, detail = result
    lost = not_made_up_for(missing)
    print(json.dumps({"reason": reason, "detail": detail, "missing": lost, "uid": uids[0]}))


if __name__ == "__main__":
    supervise()
