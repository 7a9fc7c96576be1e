"""Faults that a month of training meets, on runs of tiny models: kills, hangs, disks, clocks.

    python soak/faults.py [WORD ...]    all checks, or those whose name has one of the words

After a fault the run goes on with --resume, and must end with the record of a run that was left
alone, bit for bit. Small disks are mounted in a namespace of this process (unshare).
"""

import os
import sys

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
if __name__ == "__main__" and "IN_NAMESPACE" not in os.environ:
    os.environ["IN_NAMESPACE"] = "1"
    os.execvp("unshare", ["unshare", "-rm", sys.executable, *sys.argv])

import itertools
import math
import random
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from unittest.mock import Mock, patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import conftest
import models.ranks
import table
import torch
from test_resume import Run, assert_same_record, run_dir_in

from run import log as runlog
from run.report import read_rows

EVERY, STEPS, KILLS = 2, 8, 12  # steps between saves and of a run; kills of a case
RUN = f"--save-every {EVERY} --max-steps {STEPS} --eval-limit 2 --learning-rate 1e-3 "
ONLINE = RUN + "--eval-every 4 --prompts-per-step 2 --num-generations 4 "
OFFLINE = RUN + "--batch-size 4 "
LORA = "bgpo", ONLINE + "--mc-num 2 --lora-rank 4"
SFT = "sft", OFFLINE + "--max-length 64 --pack-length 64"
CASES = [  # script, flags, ranks
    (*LORA, 1),
    (*LORA, 2),
    ("bgpo", ONLINE + "--mc-num 2 --keep-saves 2", 1),
    ("coupled_grpo", ONLINE + "--ref-sync-steps 3", 2),
    ("tracerl", ONLINE + "--value-model --num-iterations 1", 1),
    (*SFT, 1),
    (*SFT, 2),
    ("vrpo", OFFLINE + "--mc-num 2", 1),
    ("vrpo", OFFLINE + "--mc-num 2 --lora-rank 4", 2),
]
TIMEOUT = 10  # seconds that a rank waits for another here
outputs = itertools.count()


def begin(folder, script, flags, ranks, out="run"):
    flags = f"algos/{script}.py", *flags.split(), "--out", folder / out
    return Run(folder / f"output-{next(outputs)}", ranks, *flags)


def resume(folder, script, ranks):
    flags = f"algos/{script}.py", "--resume", run_dir_in(folder / "run")
    return Run(folder / f"output-{next(outputs)}", ranks, *flags)


def whole(folder, *case):
    """A run that is left alone. -> its directory, its seconds"""
    began = time.perf_counter()
    begin(folder, *case, "whole").finish()
    return run_dir_in(folder / "whole"), time.perf_counter() - began


def saved(folder):
    """-> step of the newest state of the run in work, 0: there is none"""
    return max((int(path.name[5:]) for path in folder.glob("run/*/resume/step-*")), default=0)


def started(folder, *case):
    """-> a new run in folder/run that has saved"""
    shutil.rmtree(folder / "run", ignore_errors=True)
    run = begin(folder, *case)
    assert run.wait_until(lambda: saved(folder)), run.out.read_text()
    return run


def compare(folder, want):
    assert_same_record(run_dir_in(folder / "run"), want)
    assert not list(folder.glob("run/*/*/.step-*")), "remains of a save"


def goes_on(folder, script, ranks, want):
    """Resume to the end, which is that of the run that was left alone. -> its output"""
    text = resume(folder, script, ranks).finish()
    compare(folder, want)
    return text


def dies(run):
    run.signal(signal.SIGKILL)
    run.wait_until(lambda: False)


def says(run, *words):
    """It ends with a message instead of a traceback."""
    text = run.finish(1)
    assert "Traceback" not in text and all(word in text for word in words), text[-3000:]


# --- processes ------------------------------------------------------------------------------------


def kills(folder, script, flags, ranks, count=KILLS):
    """SIGKILL at any moment, of first runs and of resumed ones."""
    (want, seconds), left = whole(folder, script, flags, ranks), count
    while left or saved(folder):
        if saved(folder):
            run = resume(folder, script, ranks)
        else:
            shutil.rmtree(folder / "run", ignore_errors=True)
            run = begin(folder, script, flags, ranks)
        end = time.perf_counter() + random.uniform(0, seconds) if left else math.inf
        if not run.wait_until(lambda end=end: time.perf_counter() > end):
            run.finish()
            compare(folder, want)
            shutil.rmtree(folder / "run")
            continue
        dies(run)
        directory = run_dir_in(folder / "run")
        reached = max((row["step"] for row in read_rows(directory)), default=0) if directory else 0
        assert saved(folder) >= reached - EVERY, f"{reached} steps, saved {saved(folder)}"
        left -= 1
        yield


def one_killed(folder):
    """The other rank ends by itself."""
    want, _ = whole(folder, *LORA, 2)
    for rank in (0, 1):
        run = started(folder, *LORA, 2)
        run.ranks[rank].kill()
        run.wait_until(lambda: False, limit=TIMEOUT)
        goes_on(folder, "bgpo", 2, want)
        yield


def one_hangs(folder):
    """The other waits for no more than the timeout."""
    want, _ = whole(folder, *LORA, 2)
    for rank in (0, 1):
        with patch.object(models.ranks, "TIMEOUT", timedelta(seconds=TIMEOUT)):
            run = started(folder, *LORA, 2)
        os.kill(run.ranks[rank].pid, signal.SIGSTOP)
        run.ranks[1 - rank].join(TIMEOUT + 10)
        assert run.ranks[1 - rank].exitcode == 1
        dies(run)
        goes_on(folder, "bgpo", 2, want)
        yield


def one_is_slow(folder):
    """A rank that gets a tenth of the time: the same record."""
    want, _ = whole(folder, *LORA, 2)
    for rank in (0, 1):
        shutil.rmtree(folder / "run", ignore_errors=True)
        run = begin(folder, *LORA, 2)
        for pause, number in itertools.cycle([(0.02, signal.SIGSTOP), (0.18, signal.SIGCONT)]):
            time.sleep(pause)
            if not run.ranks[rank].is_alive():
                break
            os.kill(run.ranks[rank].pid, number)
        run.finish()
        compare(folder, want)
        yield


def under_torchrun(folder):
    """torchrun ends its other ranks, with a status that is not 0."""
    launch = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2".split()]
    script = ["algos/sft.py", *SFT[1].split(), "--max-steps", "4000", "--out", folder / "run"]
    with open(folder / "output", "w") as output:
        agent = subprocess.Popen(launch + script, cwd=ROOT, stdout=output, stderr=output)
    while not saved(folder):
        assert agent.poll() is None, (folder / "output").read_text()
        time.sleep(0.1)
    ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    os.kill(int(ranks[1]), signal.SIGKILL)
    assert agent.wait(60) and not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    yield


def sigterm_twice(folder, script, flags, ranks):
    """At any moment, the second while the first is served: it saves, and nothing is lost."""
    (want, seconds), tries = whole(folder, script, flags, ranks), 4
    for _ in range(tries):
        run = started(folder, script, flags, ranks)
        time.sleep(random.uniform(0, seconds / 2))
        run.signal(signal.SIGTERM)
        time.sleep(random.uniform(0, 0.3))
        run.signal(signal.SIGTERM)
        run.finish()
        if saved(folder) % EVERY:  # weights that the run would not have saved
            shutil.rmtree(run_dir_in(folder / "run") / f"checkpoints/step-{saved(folder):06d}")
        goes_on(folder, script, ranks, want)
        yield


def second_process(folder):
    """A run at work is not resumed; of two that resume it at once one goes on."""
    want, _ = whole(folder, *SFT, 1)
    run = started(folder, *SFT, 1)
    run.signal(signal.SIGSTOP)
    says(resume(folder, "sft", 1), "another process works there")
    run.signal(signal.SIGCONT)
    run.finish()
    compare(folder, want)
    yield
    dies(started(folder, *SFT, 1))
    both = [resume(folder, "sft", 1) for _ in range(2)]
    for run in both:
        run.wait_until(lambda run=run: not run.ranks[0].is_alive())
    assert sorted(run.ranks[0].exitcode for run in both) == [0, 1]
    compare(folder, want)
    yield


# --- disks and clocks -----------------------------------------------------------------------------


@contextmanager
def disk(place, size):
    """A disk of `size` KiB at a new folder."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "soak", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)
        place.rmdir()


def full_disk(folder, script, flags, ranks):
    """A disk that is full at any moment; then it has room again."""
    want, _ = whole(folder, script, flags, ranks)
    used = sum(path.stat().st_size for path in want.rglob("*")) // 1024
    for share in range(1, 10):
        with disk(folder / "run", int(used * (share + random.random()) / 11)):
            run = begin(folder, script, flags, ranks)
            run.wait_until(lambda: False)
            text = run.out.read_text()
            assert run.ranks[0].exitcode == 1 and "could not" in text, text[-3000:]
            assert "Traceback" not in text or ranks > 1, text[-3000:]
            subprocess.run(["mount", "-o", "remount,size=1g", folder / "run"], check=True)
            if saved(folder):
                goes_on(folder, script, ranks, want)
        yield


def read_only(folder):
    """A run directory or --out that cannot be written: a message, and nothing has changed."""
    want, _ = whole(folder, *SFT, 1)
    with disk(folder / "run", 2**20):
        dies(started(folder, *SFT, 1))
        subprocess.run(["mount", "-o", "remount,ro", folder / "run"], check=True)
        for run in (resume(folder, "sft", 1), begin(folder, *SFT, 1)):
            says(run, "Read-only file system")
            yield
        subprocess.run(["mount", "-o", "remount,rw", folder / "run"], check=True)
        goes_on(folder, "sft", 1, want)
        yield


def flip(data):
    place = random.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << random.randrange(8)]) + data[place + 1 :]


DAMAGES = {
    "cut to nothing": lambda data: b"",
    "cut in half": lambda data: data[: len(data) // 2],
    "one bit": flip,
    "another bit": flip,
}


def damaged(folder, script, flags, ranks):
    """Any file of the newest state: the run says so and goes on from the one before."""
    want, _ = whole(folder, script, flags, ranks)
    newest = f"resume/step-{STEPS:06d}"
    files = [path for path in (want / newest).rglob("*") if path.is_file()]
    for file, change in itertools.product(files, DAMAGES.values()):
        shutil.rmtree(folder / "run", ignore_errors=True)
        shutil.copytree(want.parent, folder / "run", symlinks=True)
        path = run_dir_in(folder / "run") / file.relative_to(want)
        path.write_bytes(change(path.read_bytes()))
        text = goes_on(folder, script, ranks, want)
        assert f"{newest} is damaged" in text, text
        yield


def clock_set_back(folder):
    """Time runs backwards, and a resumed run is earlier than the first."""
    want, _ = whole(folder, *LORA, 1)
    now, clock = time.time(), time.time
    with patch("time.time", lambda: 2 * now - clock()):
        dies(started(folder, *LORA, 1))
    earlier = Mock(wraps=datetime, now=lambda: datetime(2001, 1, 1))
    with patch("time.time", lambda: clock() - 1e8), patch.object(runlog, "datetime", earlier):
        goes_on(folder, "bgpo", 1, want)
    yield


def slow_rename(folder):
    """Names that change late, and kills meanwhile."""
    real = {name: getattr(os, name) for name in ("rename", "replace")}

    def late(name):
        def rename(*args):
            time.sleep(0.1)
            real[name](*args)
            time.sleep(0.1)

        return rename

    with patch.object(os, "rename", late("rename")), patch.object(os, "replace", late("replace")):
        yield from kills(folder, *SFT, 2)


def name_of(script, flags, ranks):
    return f"kill -9: {script}, {'LoRA' if 'lora' in flags else 'full'}, ranks: {ranks}"


CHECKS = [
    *((name_of(*case), kills, *case) for case in CASES),
    ("kill of one rank of two", one_killed),
    ("kill of one rank under torchrun", under_torchrun),
    ("one rank of two hangs", one_hangs),
    ("one rank of two is ten times slower", one_is_slow),
    ("SIGTERM twice, 1 rank", sigterm_twice, *LORA, 1),
    ("SIGTERM twice, 2 ranks", sigterm_twice, *SFT, 2),
    ("two processes on one run directory", second_process),
    ("full disk: sft", full_disk, *SFT, 1),
    ("full disk: bgpo, 2 ranks, LoRA", full_disk, *LORA, 2),
    ("read-only directory", read_only),
    ("damaged save: sft", damaged, *SFT, 1),
    ("damaged save: bgpo, 2 ranks, LoRA", damaged, *LORA, 2),
    ("clock set back", clock_set_back),
    ("slow rename and kills", slow_rename),
]

if __name__ == "__main__":
    torch.set_num_threads(1)
    conftest.warm_up()
    sys.exit(table.run(CHECKS))
