"""Time an online script at real size with random weights: seconds per phase and peak memory.

    python models/random_init.py --config DIR --tokenizer DIR --out runs/sdar-random
    python bench/train.py bgpo --model runs/sdar-random --data cd3 --max-steps 3 --eval-limit 0

Runs the script's own `main`. Random weights solve no problem, and groups with equal rewards have no
gradient, so the reward is a coin flip per completion. The first step warms up; the table is the
mean of the others. time/estimate: old and reference values (no gradient); time/update: the rest of
the update; time/sync: handing the weights to the sampler.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.timing import timed
from data.planning import stable_hash
from evals.rewards import REWARDS


def coin(completion, example):
    return {"coin": float(stable_hash(completion) % 2)}


def time_estimates(script):
    """Time every call of the script's frozen_estimates. -> list with the seconds of each step"""
    seconds, stopwatch, frozen_estimates = [], script.Stopwatch, script.frozen_estimates

    def next_step(*args):
        seconds.append(0.0)
        return stopwatch(*args)

    def timed_estimates(*args):
        spent, values = timed(lambda: frozen_estimates(*args))
        seconds[-1] += spent
        return values

    script.Stopwatch, script.frozen_estimates = next_step, timed_estimates
    return seconds


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
    shown = ("time/", "speed/", "memory/", "completion/length")
    keys = [key for key in rows[1] if key.startswith(shown)]
    means = {key: sum(row[key] for row in rows[1:]) / len(rows[1:]) for key in keys}
    print(json.dumps({key: round(value, 3) for key, value in means.items()}))


if __name__ == "__main__":
    main()
