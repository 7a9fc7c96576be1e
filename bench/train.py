"""Time an online script at real size with random weights: seconds per phase and peak memory; or
run all commands behind the training tables of docs/.

    python models/random_init.py --config DIR --tokenizer DIR --out runs/sdar-random
    python bench/train.py bgpo --model runs/sdar-random --data cd3 --max-steps 3 --eval-limit 0
    python bench/train.py --llada DIR --sdar runs/sdar-random --peer PEER_DIR --mixtures DIR2 DIR3

Runs the script's own `main`; a flag left out takes the model's value, as there. Random weights
solve no problem, and groups with equal rewards have no gradient, so rewards alternate between 0 and
1 (equal completions of a group are scored once). Prints a line for each step, and the mean of all
but the first, which warms up. time/estimate: old and reference values (no gradient); time/update:
the rest of the update; time/sync: handing the weights to the sampler.

Without a script it prints and runs COMMANDS one after the other, each in a process of its own. The
JSON lines of the output are the figures. A command that fails does not stop the others.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.timing import timed
from run.report import read_rows

SIZE = (
    "--task countdown --data cd3 --eval-limit 0 --lora-rank 128 --gen-length 256 "
    "--denoising-steps 4 --cache none --num-generations 8 --prompts-per-step"
)
ONE, EIGHT = f"{SIZE} 1 --micro-batch-size 8 --max-steps 3", f"{SIZE} 8 --max-steps 3"
# docs/models.md (steps), docs/algos/bgpo.md (EIGHT), docs/curves.md (ONE)
COMMANDS = """
bench/step.py --model {llada} --compile --peer {peer}
bench/step.py --model {sdar} --compile
bench/train.py bgpo --model {sdar} {eight} --mc-num 16 --micro-batch-size 16
bench/train.py bgpo --model {sdar} {eight} --mc-num 16 --micro-batch-size 32
bench/train.py d1 --model {llada} {one} --num-iterations 4
bench/train.py coupled_grpo --model {llada} {one} --num-iterations 2
bench/train.py spg --model {llada} {one} --num-iterations 2
bench/train.py bgpo --model {llada} {one} --mc-num 4
bench/train.py cj_grpo --model {llada} {one} --num-iterations 1 --schedule uniform --block-length 32
bench/train.py mdpo --model {llada} {one} --train-steps 4
bench/train.py tpg --model {llada} {one} --train-steps 4
bench/train.py d1 --model {sdar} {one} --num-iterations 4
bench/train.py coupled_grpo --model {sdar} {one} --num-iterations 2
bench/train.py spg --model {sdar} {one} --num-iterations 2
bench/train.py bgpo --model {sdar} {one} --mc-num 4
bench/train.py cj_grpo --model {sdar} {one} --num-iterations 1
bench/train.py tpg --model {sdar} {one} --train-steps 4
"""
MIXTURE = "bench/step.py --model {model} --compile --micro-batch-size 16"


@dataclass
class Args:
    llada: str
    """directory of a LLaDA"""
    sdar: str
    """directory of an SDAR"""
    peer: str
    """directory of the official LLaDA code"""
    mixtures: tuple[str, ...] = ()
    """directories of mixtures of experts, which need config.json alone"""


def run_all(args):
    commands = COMMANDS.format(**vars(args), one=ONE, eight=EIGHT).strip().splitlines()
    commands += [MIXTURE.format(model=model) for model in args.mixtures]
    for command in commands:
        print(command, flush=True)
        subprocess.run([sys.executable, *command.split()])


CALLS = count()


def alternating(completion, example):
    return {"alternating": float(next(CALLS) % 2)}


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
    estimates = time_estimates(script)
    sys.argv = [script.__file__, *sys.argv[2:], "--reward", f"{__file__}:alternating"]
    args = script.command_line(script.Args, script.BY_SIZE)
    script.main(args)
    if int(os.environ.get("RANK", 0)):
        return
    run_dir = max(Path(args.out).glob("*"), key=lambda path: path.stat().st_mtime)
    rows = [row for row in read_rows(run_dir) if "loss/total" in row]
    for row, seconds in zip(rows, estimates, strict=True):
        row |= {"time/estimate": seconds, "time/update": row["time/update"] - seconds}
    shown = ("time/", "speed/", "memory/", "completion/length")
    keys = [key for key in rows[1] if key.startswith(shown)]
    means = {key: sum(row[key] for row in rows[1:]) / len(rows[1:]) for key in keys}
    for values in (*rows, means):
        print(json.dumps({key: round(values[key], 3) for key in keys}))


if __name__ == "__main__":
    run_all(tyro.cli(Args)) if sys.argv[1].startswith("-") else main()
