"""600 steps of every method on a tiny model, 2,000 of four, with evaluations, saves and kills. On a
GPU, if there is one, 500 steps of BGPO with half a billion parameters.

    python soak/long_runs.py [WORD ...]    all methods, or those whose line has one of the words

With torch 2.11 that run fails: memory grows by 19 MB in 100 steps (docs/models.md, "Host memory").

What must hold: memory grows by less than 1 MB in 100 steps, a step takes as long at the end as
before, no more saves stay than were asked for, and every value is finite.
"""

import json
import math
import os
import shutil
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

from models import save_model
from models.checkpoint import set_special_tokens
from models.tiny import TINY_SDAR, byte_tokenizer, random_model
from run.report import MAX_BYTES, read_rows

STEPS = dict.fromkeys(METHODS, 600) | dict.fromkeys(("bgpo", "cj_grpo", "sft", "tracerl"), 2000)
KEEP = 2
# shares of the steps after which a process is killed. The last one runs from there to the end. Its
# caches and heap grow for some 250 steps, those of two models for 700; memory is measured in the
# last half
KILLS = 0.02, 0.04, 0.06
ALL = f"--save-every 10 --keep-saves {KEEP} --eval-every 25 --eval-limit 8"
ONLINE = " --prompts-per-step 2 --num-generations 4 --dead-steps 0"
OWN = {  # flags that make a step short
    "bgpo": "--mc-num 2",
    "spg": "--mc-num 2",
    "espo": "--mc-num 1 --num-iterations 2",
    "ebpo": "--mc-num 2",
    "d1": "--num-iterations 2",
    "coupled_grpo": "--num-iterations 1 --ref-sync-steps 20",
    "mdpo": "--model tiny-llada --train-steps 2 --num-iterations 1",
    "dtreerpo": "--num-iterations 1 --branches 2 2",
    "tracerl": "--value-model --num-iterations 1",
    "sft": "--batch-size 4 --max-length 64 --pack-length 64",
    "vrpo": "--batch-size 4 --mc-num 2",
}

HALF = TINY_SDAR | {"hidden_size": 896, "intermediate_size": 4864, "head_dim": 64}
HALF |= {"num_hidden_layers": 32, "num_attention_heads": 14, "num_key_value_heads": 2}
COIN = """from data.planning import stable_hash


def coin(completion, example):
    return float(stable_hash(completion) % 2)
"""


def look(process, folder):
    """-> newest step in its log; MB of memory that are its own; seconds that it has computed. None
    where there is no log yet, or it has ended.
    """
    try:
        (metrics,) = folder.glob("*/metrics.jsonl")
        with open(metrics, "rb") as file:
            file.seek(max(0, metrics.stat().st_size - 2**16))
            newest = file.read().split(b"\n")[-2]  # what follows is being written
        status = Path(f"/proc/{process.pid}/status").read_text()
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        (held,) = [line.split()[1] for line in status.splitlines() if "RssAnon" in line]
    except (OSError, ValueError, IndexError):
        return None
    return json.loads(newest)["step"], int(held) / 1024, sum(map(int, ticks)) / 100


def watch(process, folder, until):
    """-> [(step, MB, seconds)] of every new step until one is reached or the process ends"""
    seen = []
    while process.poll() is None and (not seen or seen[-1][0] < until):
        now = look(process, folder)
        if now and (not seen or now[0] != seen[-1][0]):
            seen.append(now)
        time.sleep(0.05)
    return seen


def run(folder, script, steps, flags="", kills=KILLS, **environment):
    flags = f"--max-steps {steps} {ALL} {flags}" + ONLINE * (script not in OFFLINE)
    command = [sys.executable, f"algos/{script}.py"]
    more = [*flags.split(), *OWN.get(script, "").split(), "--out", folder]
    environment = os.environ | environment
    for until in (*(steps * part for part in kills), math.inf):
        with open(folder / "output", "w") as output:
            process = subprocess.Popen(
                command + more, cwd=ROOT, stdout=output, stderr=output, env=environment
            )
        try:
            seen = watch(process, folder, until)
        finally:
            process.kill()
        status = process.wait()
        assert status in (0, -9), (folder / "output").read_text()[-3000:]
        (directory,) = {path.parent for path in folder.glob("*/config.json")}
        more = ["--resume", directory]
        if until < steps:
            yield
    check(directory, steps, [row for row in seen if row[0] > steps / 2])
    yield


def check(directory, steps, seen):
    """seen: [(step, MB, seconds)] of the last half"""
    rows = read_rows(directory)
    assert [row["step"] for row in rows if "loss/total" in row] == [*range(1, steps + 1)]
    bad = {key for row in rows for key, value in row.items() if value is None}
    assert not bad, f"not finite: {bad}"
    numbers, held, seconds = zip(*seen, strict=True)
    growth = 100 * statistics.linear_regression(numbers, held).slope
    # all that a step does, with saves, evaluations and curves; other work on the machine counts
    # little, as a process that waits does not compute
    half = len(seen) // 2
    first, last = [
        (seconds[end] - seconds[start]) / (numbers[end] - numbers[start])
        for start, end in ((0, half), (half, -1))
    ]
    files = [path for path in directory.rglob("*") if path.is_file()]
    saves = [len([*directory.glob(f"{name}/step-*")]) for name in ("checkpoints", "resume")]
    size = sum(path.stat().st_size for path in files) / 1e6
    print(
        f"  {max(held):.0f} MB, {growth:+.2f} MB in 100 steps; {last:.3f} s a step, before "
        f"{first:.3f}; {len(files)} files, {size:.1f} MB, saves {saves}"
    )
    assert growth < 1 and last < 1.5 * first, (growth, first, last)
    # the best checkpoint stays too, and weights saved for a best score since
    assert saves[0] <= KEEP + 2 and saves[1] == KEEP and not list(directory.glob("*/.step-*"))
    assert (directory / "curves.png").exists()
    assert 0 < (directory / "report.html").stat().st_size <= MAX_BYTES


def on_gpu(folder):
    """Completions of random weights all differ, so a coin is their reward."""
    save_model(set_special_tokens(random_model(HALF)), folder / "half", byte_tokenizer())
    (folder / "coin.py").write_text(COIN)
    (folder / "runs").mkdir()
    flags = f"--model {folder}/half --learning-rate 1e-5 --reward {folder}/coin.py:coin "
    flags += "--save-every 100"  # of 6 GB each
    yield from run(folder / "runs", "bgpo", 500, flags, (), CUDA_VISIBLE_DEVICES="0")


CHECKS = [(f"{steps} steps of {script}", run, script, steps) for script, steps in STEPS.items()]
if shutil.which("nvidia-smi"):
    CHECKS.append(("500 steps of bgpo on a GPU", on_gpu))

if __name__ == "__main__":
    sys.exit(table.run(CHECKS))
