"""300 steps of every method on a tiny model, with evaluations, saves, pruning, and three kills.

    python soak/long_runs.py [WORD ...]    all methods, or those whose name has one of the words

What must hold: memory grows by less than 1 MB in 100 steps, a step takes as long at the end as
before, no more saves stay than were asked for, and every value is finite.
"""

import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import table
from sync_shared import METHODS, OFFLINE

from report import read_rows

STEPS, KEEP = 300, 2
KILLS = (30, 60, 90)  # steps at which a process is killed; the last one runs from there to the end
ALL = f"--max-steps {STEPS} --save-every 10 --keep-saves {KEEP} --eval-every 25 --eval-limit 8"
ONLINE = " --prompts-per-step 2 --num-generations 4 --dead-steps 0"
OWN = {  # flags that make a step short
    "bgpo": "--mc-num 2",
    "spg": "--mc-num 2",
    "espo": "--mc-num 1 --num-iterations 2",
    "ebpo": "--mc-num 2",
    "d1": "--num-iterations 2",
    "coupled_grpo": "--num-iterations 1 --ref-sync-steps 20",
    "mdpo": "--model tiny-llada --train-steps 2 --num-iterations 1",
    "dtreerpo": "--num-iterations 1 --branches 2",
    "tracerl": "--value-model --num-iterations 1",
    "sft": "--batch-size 4 --max-length 64 --pack-length 64",
    "vrpo": "--batch-size 4 --mc-num 2",
}


def memory(process):
    """-> MB that are the process' own, None after its end"""
    try:
        text = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in text.splitlines() if "RssAnon" in line), 0)


def watch(process, folder, until, seen):
    """Note {step: MB} of every new step until one is reached or the process ends."""
    while process.poll() is None and max(seen, default=0) < until:
        held, files = memory(process), list(folder.glob("*/metrics.jsonl"))
        if files and held and (rows := read_rows(files[0].parent)):
            seen.setdefault(rows[-1]["step"], held)
        time.sleep(0.05)


def run(folder, script):
    flags = ALL + ONLINE * (script not in OFFLINE)
    command = [sys.executable, f"algos/{script}.py"]
    more, seen = [*flags.split(), *OWN.get(script, "").split(), "--out", folder], {}
    for until in (*KILLS, math.inf):
        with open(folder / "output", "w") as output:
            process = subprocess.Popen(command + more, cwd=ROOT, stdout=output, stderr=output)
        seen.clear()
        watch(process, folder, until, seen)
        if until < STEPS:
            process.kill()
        status = process.wait()
        assert status in (0, -9), (folder / "output").read_text()[-3000:]
        (directory,) = {path.parent for path in folder.glob("*/config.json")}
        more = ["--resume", directory]
        if until < STEPS:
            yield
    check(directory, {step: held for step, held in seen.items() if step > STEPS / 2})
    yield


def check(directory, seen):
    """seen: {step: MB} of the last half"""
    rows = read_rows(directory)
    assert [row["step"] for row in rows if "loss/total" in row] == [*range(1, STEPS + 1)]
    bad = {key for row in rows for key, value in row.items() if value is None}
    assert not bad, f"not finite: {bad}"
    growth = 100 * statistics.linear_regression(*zip(*sorted(seen.items()), strict=True)).slope
    files = [path for path in directory.rglob("*") if path.is_file()]
    saves = [len([*directory.glob(f"{name}/step-*")]) for name in ("checkpoints", "resume")]
    times = [(row["step"], row["time/update"]) for row in rows if "time/update" in row]
    seconds = [seconds for step, seconds in times if step > STEPS / 2]
    first, last = seconds[: len(seconds) // 2], seconds[len(seconds) // 2 :]
    # the fastest tenth: other work on the machine slows the rest
    slower = statistics.quantiles(last, n=10)[0] / statistics.quantiles(first, n=10)[0]
    size = sum(path.stat().st_size for path in files) / 1e6
    print(
        f"  {max(seen.values()):.0f} MB, {growth:+.2f} MB in 100 steps; updates take {slower:.2f} "
        f"times as long as before; {len(files)} files, {size:.1f} MB, saves {saves}"
    )
    assert growth < 1 and slower < 1.5, (growth, slower)
    # the best checkpoint stays too, and weights saved for a best score since
    assert saves[0] <= KEEP + 2 and saves[1] == KEEP and not list(directory.glob("*/.step-*"))
    assert (directory / "curves.png").exists() and (directory / "report.html").exists()


CHECKS = [(f"{STEPS} steps of {script}", run, script) for script in METHODS]

if __name__ == "__main__":
    sys.exit(table.run(CHECKS))
