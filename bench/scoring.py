"""Seconds from a file of completions to result.json, by the command line of a benchmark, with its own reference answers.

    python bench/scoring.py --task gsm8k --data test.jsonl                   1,319 answers; math500, mmlu ...: the same
    python bench/scoring.py --task humaneval --data HumanEval.jsonl.gz       164 programs; mbpp: 500

Prints one JSON line: completions, how many are right, seconds of the whole command (its start and the rows' reading too), of
them seconds of scoring alone, cores, and the machine's load before and after: other work on the cores is in the seconds.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from evals import load_task, score_all


@dataclass
class Args:
    task: str = "gsm8k"
    """file of evals/ whose reference answers are scored"""
    data: str = ""
    """file or hub id; empty: the task's default"""
    limit: int | None = None
    """use only the first so many rows"""
    wrong: bool = False
    """score the answer of the next problem in place of each, of programs a body without work: almost nothing is right"""


def gold(task: ModuleType, example: dict) -> str:
    """The reference answer; of mathematical rows without a worked solution the answer in a box."""
    return (
        task.answer(example) if example.get("solution", True) else rf"\boxed{{{example['gold']}}}"
    )


def main(args: Args) -> None:
    task = load_task(args.task)
    examples = task.load("test", args.data, args.limit)
    given = [gold(task, example) for example in examples]
    if args.wrong:
        given = given[1:] + given[:1] if "gold" in examples[0] else ["    pass"] * len(given)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder, "completions.jsonl"), Path(folder, "out")
        rows = ({"index": i, "completion": text} for i, text in enumerate(given))
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [
            sys.executable,
            f"evals/{args.task}.py",
            "--completions",
            str(file),
            "--data",
            args.data,
            "--out",
            str(out),
        ]
        command += ["--limit", str(args.limit)] if args.limit else []
        began = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        whole = time.perf_counter() - began
        if done.returncode:
            raise SystemExit(done.stderr.strip().splitlines()[-1])
        result = json.loads(done.stdout.splitlines()[-1])
    began = time.perf_counter()
    right = sum(score_all(task, given, examples))
    scoring = time.perf_counter() - began
    if abs(right - result["accuracy"] * len(given)) > 1e-6:
        raise SystemExit(
            f"the command line finds {result['accuracy'] * len(given):g} right, this process {right:g}"
        )
    line = {
        "task": args.task,
        "completions": len(given),
        "right": int(right),
        "seconds": round(whole, 2),
    }
    line |= {"scoring_seconds": round(scoring, 2), "per_second": round(len(given) / scoring, 1)}
    line |= {
        "cores": len(os.sched_getaffinity(0)),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.splitlines()[0]))
