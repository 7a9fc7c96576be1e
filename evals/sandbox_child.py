"""What runs inside evals/sandbox.py: three processes, so that a program never sits where its
verdict is made.

    supervisor   started per program with a clean environment; makes the namespaces, keeps the clock
                 and the memory bound, ends everything
    tests        raises the other walls around itself and leads a process group that nothing below
                 it can leave; reads program and tests, once the candidate is forked, so that the
                 tests are in no memory that the candidate has
    candidate    the program: no descriptor but /dev/null and one pipe pair to the tests

Every message is a line of JSON with plain values (`encode`), never a pickle. Standard library only,
and few modules, because every program pays for their import. Linux.
"""

import builtins
import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from contextlib import suppress
from types import ModuleType

LIBC = ctypes.CDLL(None, use_errno=True)
NAMESPACES, NEW_USER = 0x68020000, 0x10000000  # CLONE_NEW*: network, IPC, processes, mounts; users
# mount(2); INERT: neither devices nor programs with the rights of their owner
READ_ONLY, INERT, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2 | 4, 32, 4096, 16384, 1 << 18
# prctl(2)
DEATH_SIGNAL, DUMPABLE, SECCOMP, SUBREAPER, NO_NEW_PRIVILEGES = 1, 4, 22, 36, 38
ROOT = "/sys"  # any directory that no program needs: its own root is mounted there
# System calls that a program does without, by their numbers on x86_64 and aarch64: sockets, memory
# that is in no process's size, keys, other processes, leaving the process group, ways around these
# rules, marks on what programs share (locks, watches of files, the kernel's log), and, from
# truncate on, changes of files that are not open for writing. Where aarch64 has no such call, the
# number of another stands.
CALLS = """
    socket 41 198              shmget 29 194              shmat 30 196
    shmctl 31 195              semget 64 190              semop 65 193
    semctl 66 191              semtimedop 220 192         msgget 68 186
    msgsnd 69 189              msgrcv 70 188              msgctl 71 187
    mq_open 240 180            memfd_create 319 279       memfd_secret 447 447
    add_key 248 217            request_key 249 218        keyctl 250 219
    ptrace 101 117             process_vm_readv 310 270   process_vm_writev 311 271
    pidfd_getfd 438 438        pidfd_send_signal 424 424  kill 62 129
    tkill 200 130              tgkill 234 131             setpgid 109 154
    setsid 112 157             rt_sigqueueinfo 129 138    rt_tgsigqueueinfo 297 240
    sched_setaffinity 203 122  sched_setscheduler 144 119 sched_setattr 314 274
    sched_setparam 142 118     ioprio_set 251 30          unshare 272 97
    setns 308 268              bpf 321 280                userfaultfd 323 282
    perf_event_open 298 241    io_uring_setup 425 425     migrate_pages 256 238
    move_pages 279 239         openat2 437 437            setsockopt 54 208
    sendmsg 46 211             sendmmsg 307 269           sendfile 40 71
    vmsplice 278 75            splice 275 76              tee 276 77
    io_setup 206 0             process_madvise 440 440    landlock_create_ruleset 444 444
    landlock_add_rule 445 445  flock 73 32                inotify_init 253 26
    inotify_init1 294 26       inotify_add_watch 254 27   fanotify_init 300 262
    futex_wake 454 454         futex_requeue 456 456      syslog 103 116
    truncate 76 45             chmod 90 53                fchmodat 268 53
    fchmodat2 452 452          chown 92 54                lchown 94 54
    fchownat 260 54            utime 132 88               utimes 235 88
    futimesat 261 88           utimensat 280 88           setxattr 188 5
    lsetxattr 189 6            setxattrat 463 463         removexattr 197 14
    lremovexattr 198 15        removexattrat 466 466      fchmod 91 52
    fchown 93 55               fsetxattr 190 7            fremovexattr 199 16
    file_setattr 469 469
"""
# Those refused for some values: x86_64, aarch64, where the argument is, mask, smallest, largest.
#   mmap: shared and huge pages. fcntl: locks, leases and whom a descriptor signals, all but its own
#   flags and copies. ioctl: the same, and flags of files; most of terminals and plain descriptors
#   are below. prlimit, priorities: other processes. open: what empties a file that is not open for
#   writing. clone: namespaces. madvise: out of memory to the swap. futex: wakers and counts of
#   waiters in other processes, which may have mapped the same file
VALUES = """
    mmap          9  222  40     0x40001       1     0x40001
    fcntl        72   25  24  0xffffffff       5        1029
    fcntl        72   25  24  0xffffffff    1031  0xffffffff
    ioctl        16   29  24  0xffffffff  0x5500  0xffffffff
    prlimit     302  261  16  0xffffffff       1  0xffffffff
    setpriority 141  140  16  0xffffffff       1  0xffffffff
    setpriority 141  140  24  0xffffffff       1  0xffffffff
    getpriority 140  141  24  0xffffffff       1  0xffffffff
    openat      257   56  32       0x203   0x200       0x200
    open          2 9999  24       0x203   0x200       0x200
    clone        56  220  16  0x7e020000       1  0x7e020000
    madvise      28  233  32  0xffffffff      20          21
    futex       202   98  24        0xff       1           8
    futex       202   98  24        0xff      10        0x7f
"""
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH_*, column
# The filter in BPF: instruction, how many to skip if it is true and if not, value. It returns
# SECCOMP_RET_*, with EPERM or ENOSYS
BPF = {"load": 0x20, "mask": 0x54, "equal": 0x15, "least": 0x35, "above": 0x25, "return": 0x06}
# Another architecture ends the program; numbers from 1 << 30 on are those of x32, another way to
# the same calls; clone3 (435) has its flags out of sight, in memory, and libc has an older call for
# kernels without it
FILTER = """
    load   0 0 4
    equal  1 0 {}
    return 0 0 0x80000000
    load   0 0 0
    least  0 1 0x40000000
    return 0 0 0x00050001
    equal  0 1 435
    return 0 0 0x00050026
    {}
    return 0 0 0x7fff0000
"""
REFUSAL = """
    load   0 0 0
    equal  0 5 {}
    load   0 0 {}
    mask   0 0 {}
    least  0 2 {}
    above  1 0 {}
    return 0 0 0x00050001
"""
# Landlock: its system calls, and rights: to read below a directory, to use a device, all
NEW_RULES, ADD_RULE, RESTRICT = 444, 445, 446
TO_READ, TO_USE, RIGHTS = 1 | 4 | 8, 2 | 4, (1 << 13) - 1
MAX_MESSAGE = 16 << 20  # bytes of one message from the candidate: bounds the memory of the tests
WATCH = 0.1  # seconds between looks at the memory
TESTS_MEMORY = 4 << 30  # bytes of address space of the tests, which are trusted
COLLECTIONS = list, tuple, set, frozenset
# what an object of JSON stands for, by its one key
KINDS = {kind.__name__: kind for kind in (*COLLECTIONS, dict, complex)}
KINDS |= {"iterator": iter, "int": lambda digits: int(digits, 16)}
KEPT = {0: getattr, 1: setattr}  # with the candidate: objects that the tests know by their place
PIPES = []  # with the tests: to the candidate, and from it


class Unsupported(BaseException):
    """A value that has no plain form; no test catches it."""


class Gone(Exception):
    """The process at the other end of a pipe has ended."""


# --------------------------------------------------------------------------------------------------
# messages


def receive(file, limit=-1):
    """The next message. ValueError if it is longer than the limit, or no JSON."""
    if line := file.readline(limit):
        return json.loads(line, object_hook=revived)
    raise Gone


def send(file, message):
    """One message; blocks until it is read. BrokenPipeError if nobody is left to read it."""
    file.write(json.dumps(message).encode() + b"\n")
    file.flush()


def encode(value):
    """A plain value as JSON: what is no text, number or constant becomes {kind: content}.

    Subclasses lose their type (a Counter is a dict, an `__eq__` that lies is gone). Functions,
    objects of the candidate's classes and all else stay with it, as a number: Unsupported for those
    of the tests.
    """
    if value is None or isinstance(value, (bool, float, str)):  # JSON ignores what is overridden
        return value
    if isinstance(value, int):
        value = int.__int__(value)
        # the time of hex is linear in the length, that of decimals is not
        return value if abs(value) < 1 << 63 else {"int": hex(value)}
    for kind in COLLECTIONS:
        if isinstance(value, kind):
            return {kind.__name__: [encode(item) for item in kind.__iter__(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in dict.items(value)]}
    if isinstance(value, complex):
        return {"complex": complex.__repr__(value)}
    module, name = type(value).__module__, type(value).__name__
    if module == "numpy":  # one number; ValueError for arrays of more
        return encode(value.item())
    if hasattr(value, "__next__") or name in ("dict_keys", "dict_values", "dict_items"):
        return {"iterator": [encode(item) for item in value]}
    if isinstance(value, Remote):
        return {"object": vars(value)[""]}
    if KINDS["object"] is Remote:
        if value in vars(builtins).values():
            return {"builtin": value.__name__}
        raise Unsupported(f"a value of type {name}")
    KEPT[len(KEPT)] = value
    return {"object": len(KEPT) - 1}


def revived(tagged):
    """The value of an object of JSON: only of KINDS, whatever it says."""
    [(kind, content)] = tagged.items()
    return KINDS[kind](content)


class Remote:
    """With the tests: what stays with the candidate, by its place in KEPT or its name. It equals
    only itself, and no operator or protocol reaches it, so that it cannot pass for a value."""

    def __init__(self, place):
        vars(self)[""] = place  # a name that no attribute has

    def __call__(self, *arguments, **named):
        return ask(self, arguments, named)

    def __getattr__(self, name):
        if name.startswith("__"):  # libraries would read memory where such an attribute points
            raise AttributeError(name)
        return Remote(0)(self, name)

    def __setattr__(self, name, value):
        Remote(1)(self, name, value)


KINDS["object"] = Remote


def ask(*request):
    """What the candidate answers to a source, or to a Remote with its arguments and named ones: a
    plain value, a Remote, or its exception."""
    calls, answers = PIPES
    send(calls, encode([*request]))
    kind, value, detail = receive(answers, MAX_MESSAGE)
    if kind == "value":
        return value
    error = getattr(builtins, value, None)
    if isinstance(error, type) and issubclass(error, Exception):
        raise error(detail)
    raise Exception(f"{value}: {detail}")  # one of its own


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


def namespaces(paths):
    """Leave the machine's network, IPC, mounts and, for children, processes. ROOT becomes a
    read-only directory in memory with these paths and /dev/null. OSError if any of it fails."""
    user, group = os.getuid(), os.getgid()
    system("unshare", NAMESPACES | NEW_USER * bool(user))
    if user:  # only a user namespace gives the right to make the others; it knows this user alone
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{user} {user} 1")
        write("/proc/self/gid_map", f"{group} {group} 1")
    mount("", "/", RECURSIVE | PRIVATE)
    mount("tmpfs", ROOT, INERT, "size=1m,mode=755")
    for path in sorted({*filter(os.path.isdir, paths)}):  # those above come first
        os.makedirs(ROOT + path, exist_ok=True)
        mount(path, ROOT + path, BIND | RECURSIVE)
        mount("", ROOT + path, BIND | REMOUNT | READ_ONLY | INERT)
    os.mkdir(f"{ROOT}/dev")
    write(f"{ROOT}/dev/null", "")
    mount("/dev/null", f"{ROOT}/dev/null", BIND)
    mount("", ROOT, REMOUNT | READ_ONLY | INERT)


def become_nobody():
    """Take a uid that no account and no other program has, where we may. -> whether we did"""
    number = int.from_bytes(os.urandom(3), "big")
    # containers may know few uids
    for uid in (2_000_000_000 + number, 20_000 + number % 40_000) if os.getuid() == 0 else ():
        with suppress(OSError):
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            return True
    return False


def limit(**limits):
    """Hard resource limits, as far as they are below those that hold."""
    for name, value in limits.items():
        with suppress(ValueError):  # of a limit that may not be raised
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def landlock(paths):
    """From now on, in children too, no files but those below paths, to read, and /dev/null. OSError
    where the kernel has no Landlock."""
    rules = system("syscall", NEW_RULES, struct.pack("=Q", RIGHTS), ctypes.c_size_t(8), 0)
    for path, rights in (dict.fromkeys(paths, TO_READ) | {"/dev/null": TO_USE}).items():
        with suppress(OSError):  # not there, or not for this uid
            rule = struct.pack("=Qi", rights, os.open(path, os.O_PATH))
            system("syscall", ADD_RULE, rules, 1, rule, 0)
    system("syscall", RESTRICT, rules, 0)


def refuse_calls():
    """From now on, in children too, without CALLS, and without the VALUES of others. OSError where
    the kernel, or what emulates it, has no such rules."""
    if (machine := os.uname().machine) not in ARCHITECTURES:
        raise OSError(f"no rules for system calls on {machine}")
    architecture, column = ARCHITECTURES[machine]
    rows = [[call, *"0000"] for call in CALLS.split()[1 + column :: 3]]
    rows += [[row[1 + column], *row[3:]] for row in map(str.split, VALUES.strip().splitlines())]
    text = FILTER.format(architecture, "".join(REFUSAL.format(*row) for row in rows))
    code = b""
    for name, *numbers in map(str.split, filter(str.strip, text.splitlines())):
        code += struct.pack("=HBBI", BPF[name], *(int(number, 0) for number in numbers))
    program = struct.pack("@HP", len(code) // 8, ctypes.cast(code, ctypes.c_void_p).value)
    system("prctl", SECCOMP, ctypes.c_ulong(2), program)


def stands(wall, paths):
    """Whether a wall stands that not every kernel gives."""
    with suppress(OSError):
        wall(paths)
        return True
    return False


def raise_walls(job):
    """Around this process and all that it starts, for good. -> whether Landlock is among them"""
    # the limit counts all of this user's, with those that other programs start meanwhile; what a
    # program starts beyond its number is bounded by their memory
    threads = 0 if become_nobody() else job["threads"] + 1000
    limit(NPROC=1 + job["processes"] + threads, CPU=int(job["timeout"]) + 2, STACK=64 << 20)
    limit(FSIZE=0, NOFILE=64, CORE=0, MEMLOCK=0)
    system("capset", struct.pack("<Ii", 0x20080522, 0), bytes(24))  # no rights, of no namespace
    prctl(NO_NEW_PRIVILEGES, 1)
    prctl(DUMPABLE, 0)  # nobody of the same uid may read this memory
    prctl(DEATH_SIGNAL, signal.SIGKILL)
    confined = stands(landlock, job["paths"])
    refuse_calls()
    library = os.path.dirname(os.__file__)
    if not os.access(library, os.R_OK | os.X_OK):
        raise OSError(f"uid {os.getuid()} cannot read {library}: chmod o+x what lies above it")
    return confined


# --------------------------------------------------------------------------------------------------
# candidate and tests


def candidate(requests, replies):
    """Run sources and answer calls of their functions until the pipe ends."""
    # dataclasses and pickles look there
    module = sys.modules["candidate"] = ModuleType("candidate")
    space = vars(module)
    KINDS["object"] = lambda place: KEPT.get(place, space.get(place))
    KINDS["builtin"] = vars(builtins).get
    while True:
        function, arguments, named = receive(requests)
        try:
            if isinstance(function, str):
                function = exec(compile(function, "<candidate>", "exec"), space)
            else:
                function = function(*arguments, **named)
            reply = "value", encode(function), ""
        except BaseException as error:
            try:
                detail = str(error)[:500]
            except BaseException:  # its methods may be anything
                detail = ""
            reply = "raise", type(error).__name__[:100], detail
        send(replies, reply)


def verdict_of(job, given):
    """Reason and detail, which sandbox.py's Result names, of a candidate that listens on PIPES."""

    code, tests, prelude = given
    try:
        ask(code, (), {})
        space = {"__name__": "__main__"}
        exec(compile(prelude, "<prelude>", "exec"), space)
        space |= {name: Remote(name) for name in job["entry_points"]}
        exec(compile(tests, "<tests>", "exec"), space)
        return "passed", ""
    except (Gone, BrokenPipeError):
        return "exited", ""
    except BaseException as error:
        reason = "wrong" if isinstance(error, AssertionError) else "error"
        return reason, f"{type(error).__name__}: {error}"[:600]


def judge(job, verdict, own_root):
    """Raise the walls, fork the candidate, then read program and tests from stdin. Sends what keeps
    the candidate off the machine's files, then the verdict."""
    os.setpgid(0, 0)
    if own_root:
        os.chroot(ROOT)
        os.chdir("/")
    confined = raise_walls(job)
    requests, calls = os.pipe()
    answers, replies = os.pipe()
    nothing = os.open("/dev/null", os.O_RDWR)
    top = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 4  # the largest descriptors but two
    if not os.fork():
        for fd, target in ((nothing, 0), (nothing, 1), (requests, top), (replies, top + 1)):
            os.dup2(fd, target)
        os.closerange(3, top)
        os.closerange(top + 2, 4096)
        prctl(DEATH_SIGNAL, signal.SIGKILL)
        limit(AS=job["memory"])
        os.nice(10)  # what ends a program must not wait for it
        if not os.fork():  # a program that may start processes can
            os._exit(0)
        os.wait()
        # ready; what failed so far is the sandbox's fault, and stderr says why
        os.write(top + 1, b"\n")
        os.dup2(0, 2)
        try:
            candidate(open(top, "rb"), open(top + 1, "wb"))
        finally:
            os._exit(1)
    for fd in (requests, replies):
        os.close(fd)
    PIPES[:] = open(calls, "wb"), open(answers, "rb")
    if not PIPES[1].readline():
        os._exit(1)
    for fd in (1, 2):
        os.dup2(nothing, fd)
    send(verdict, "namespaces" if own_root else "Landlock" if confined else "")
    limit(AS=TESTS_MEMORY)
    given = receive(sys.stdin.buffer)
    send(verdict, verdict_of(job, given))
    os._exit(0)


# --------------------------------------------------------------------------------------------------
# the supervisor


def resident(group):
    """Bytes in memory of all processes of a group."""
    pages = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:  # it may have ended
            fields = file.read().rpartition(b")")[2].split()  # a program's name may be any bytes
            pages += int(fields[21]) * (int(fields[2]) == group)
    return pages * resource.getpagesize()


def watch(job, group, verdict):
    """(reason, detail) of a group of processes, whose tests send a verdict; None if the caller is
    gone."""
    poll = select.poll()
    poll.register(verdict)
    poll.register(1, 0)  # nobody reads it: an error
    deadline, pause = time.monotonic() + job["timeout"], WATCH
    while (left := deadline - time.monotonic()) > 0:
        ready = dict(poll.poll(1000 * min(pause, left)))
        if 1 in ready:
            return None
        if ready:
            try:
                return receive(verdict)
            except Gone:
                return "exited", "the tests ended without a verdict"
        looked = time.monotonic()
        if resident(group) > job["memory"] + (256 << 20):
            return "memory", "of all its processes together"
        pause = max(WATCH, time.monotonic() - looked)  # half of its time at most
    return "timeout", f"{job['timeout']:g} s"


def supervise():
    """One job: settings in the last argument, program and tests on stdin, result on stdout. Ends
    everything when nobody reads that, because then the caller is gone."""
    job = json.loads(sys.argv.pop())
    write("/proc/self/oom_score_adj", "1000")  # short of memory, the kernel takes these first
    with open("/proc/loadavg") as file:
        job["threads"] = int(file.read().split()[3].partition("/")[2])  # of the whole machine
    sys.path += job["site_packages"]
    sys.set_int_max_str_digits(0)
    prctl(SUBREAPER, 1)
    own_root = stands(namespaces, job["paths"])
    reading, writing = os.pipe()
    group = os.fork()
    if not group:
        judge(job, open(writing, "wb"), own_root)
    os.close(writing)
    verdict, result = open(reading, "rb", buffering=0), None
    try:
        walls = receive(verdict)
        result = watch(job, group, verdict)
    except Gone:  # no program was started; stderr says why
        sys.exit(1)
    finally:  # nobody can have left the group, and orphans come to us
        os.killpg(group, signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                os.wait()
    if result:
        print(json.dumps([*result, walls]))


if __name__ == "__main__":
    supervise()
