"""Time an online script's own `main` on random weights: seconds per phase, peak memory.

    python models/random_init.py --config DIR --tokenizer DIR --out runs/sdar-random
    python bench/train.py bgpo --model runs/sdar-random --data cd3 --gen-length 256 --max-steps 3 --eval-limit 0

Random weights solve nothing, and groups without spread have no gradient: rewards are therefore coin flips of the completion.
The first step warms up; the table is the mean of the others. time/estimate: the old and reference values, passes without a
gradient; time/update: the rest of the update.
"""

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.planning import stable_hash
from evals.rewards import REWARDS


def coin(completion, example):
    return {"coin": float(stable_hash(completion) % 2)}


def time_estimates(script):
    """Put a clock around the script's frozen_estimates. -> list that gets the seconds of every step"""
    seconds, stopwatch, frozen_estimates = [], script.Stopwatch, script.frozen_estimates

    def next_step():
        seconds.append(0.0)
        return stopwatch()

    def timed(*args):
        start = now()
        values = frozen_estimates(*args)
        seconds[-1] += now() - start
        return values

    script.Stopwatch, script.frozen_estimates = next_step, timed
    return seconds


def now():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main():
    script = import_module(f"algos.{sys.argv[1]}")
    REWARDS["coin"] = coin
    estimates = time_estimates(script)
    args = tyro.cli(script.Args, args=[*sys.argv[2:], "--reward", "coin"])
    script.main(args)
    if int(os.environ.get("RANK", 0)):
        return
    run_dir = max(Path(args.out).glob("*"), key=lambda path: path.stat().st_mtime)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss/total" in row]
    for row, seconds in zip(rows, estimates, strict=True):
        row |= {"time/estimate": seconds, "time/update": row["time/update"] - seconds}
    rows = rows[1:]
    keys = [
        key
        for key in rows[0]
        if key.startswith(("time/", "speed/", "memory/", "completion/length"))
    ]
    print(json.dumps({key: round(sum(row[key] for row in rows) / len(rows), 3) for key in keys}))


if __name__ == "__main__":
    main()
