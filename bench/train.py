"""Time an online script at real size with random weights: seconds per phase and peak memory.

    python models/random_init.py --config DIR --tokenizer DIR --out runs/sdar-random
    python bench/train.py bgpo --model runs/sdar-random --task countdown --max-steps 3 \\
        --eval-limit 0

Runs the script's own `main`; a flag left out takes the model's value, as there. Random weights
solve no problem, and groups with equal rewards have no gradient, so rewards alternate between 0 and
1 (equal completions of a group are scored once). Prints each step, and the mean of all but the
first, which warms up. time/sync: handing the weights to the sampler.
"""

import os
import sys
from importlib import import_module
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import distributed.start  # noqa: F401

# isort: split
import pandas as pd

from evals.report import read_rows

CALLS = count()


def alternating(completion, example):
    return {"alternating": float(next(CALLS) % 2)}


def main():
    script = import_module(f"algos.{sys.argv[1]}")
    sys.argv = [script.__file__, *sys.argv[2:], "--reward", f"{__file__}:alternating"]
    args = script.Args.parse(script.BY_SIZE)
    script.main(args)
    if int(os.environ.get("RANK", 0)):
        return
    run_dir = max(Path(args.out).glob("*"), key=lambda path: path.stat().st_mtime)
    table = pd.DataFrame(row for row in read_rows(run_dir) if "loss/total" in row)
    table = table.filter(regex="^(time|speed|memory)/|completion/length")
    print(table.T.to_string(), table[1:].mean().to_string(), sep="\n\n")


if __name__ == "__main__":
    main()
