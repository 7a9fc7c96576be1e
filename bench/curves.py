"""Learning curves of the online methods, all runs of a family from one SFT checkpoint.

    python bench/curves.py --size tiny --jobs 2      # shipped models (0.5 million parameters), CPU
    python bench/curves.py --size small --jobs 8     # 6 million parameters, GPUs, sudoku too
    python bench/curves.py --size tiny --keep        # finished runs -> docs/curves/comparison

Stages, in this order; each skips what an earlier call with the same settings has finished:

    sft     algos/sft.py trains each family's model on countdown `small` and sudoku `sudoku4`,
            4 rows to 1, for as many steps (START) as it takes to greedily solve 15 % of the
            validation problems of both tasks. The shipped models are trained already.
    rates   every method on countdown at every learning rate, seed 1000. The best last validation
            score wins.
    runs    countdown with seeds 0, 1, 2 and sudoku with seed 0 at that rate. The scripts score the
            test split before and after; nothing is chosen by it.
    time    a few steps of every method, one run per machine or GPU: seconds per step without
            competition.

Runs on one GPU take turns unless NVIDIA's MPS runs them together: `nvidia-cuda-mps-control -d`
before, `echo quit | nvidia-cuda-mps-control` after (docs/curves.md has the gain).

All methods get the same rollouts, optimizer (SHARED) and --passes forward-backward passes per
completion. Each spends them its own way (METHODS): updates per rollout, draws of a bound, or
denoising steps. Everything else is the method's default. docs/plot.py draws the kept runs.
"""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data.planning import stable_hash
from evals import load_task
from models import save_model
from models.checkpoint import set_special_tokens
from models.tiny import TINY_LLADA, TINY_SDAR, byte_tokenizer, random_model
from report import read_rows
from runlog import describe_device

WIDE = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 8}
SMALL = {  # 6 million parameters
    "sdar": TINY_SDAR | {"hidden_size": 256, "intermediate_size": 768} | WIDE,
    "llada": TINY_LLADA
    | dict.fromkeys(("n_layers", "n_heads", "n_kv_heads"), 8)
    | {"d_model": 256, "mlp_hidden_size": 768},
}
TASKS = {"countdown": 12, "sudoku": 16}  # task: tokens of a completion, in blocks of 4
SFT_ROWS = {"countdown": 20_000, "sudoku": 5_000}
SEEDS = {"countdown": (0, 1, 2), "sudoku": (0,)}
RATE_SEED, TIMED_STEPS, STEPS_PER_BLOCK = 1000, 12, 2

# p: forward-backward passes per completion; forwards: passes that replay one rollout
METHODS = {
    "d1": lambda p, forwards: {"num_iterations": p},
    # An update is two complementary masks; the fully masked pass comes on top.
    "coupled_grpo": lambda p, forwards: {"num_iterations": p // 2},
    "spg": lambda p, forwards: {"num_iterations": p // 2, "mc_num": 2},
    "bgpo": lambda p, forwards: {"num_iterations": 1, "mc_num": p},
    "cj_grpo": lambda p, forwards: {"num_iterations": max(1, p // forwards)},
    "mdpo": lambda p, forwards: {"num_iterations": 1, "train_steps": p},
    "wd1": lambda p, forwards: {"num_iterations": p},
    # A token a step, of which a rollout has twice as many: one pass scores one of each block.
    "justgrpo": lambda p, forwards: {
        "num_iterations": max(1, p // (2 * forwards)),
        "positions": p,
        "denoising_steps": 2 * STEPS_PER_BLOCK,
    },
    # A tree has 4 + 8 segments and 8 leaves.
    "dtreerpo": lambda p, forwards: {"num_iterations": max(1, 2 * p // 3), "branches": (4, 2)},
    "tpg": lambda p, forwards: {"num_iterations": max(1, p // forwards), "train_steps": p},
}
SHARED = {"num_generations": 8, "temperature": 1.0, "denoising_steps": STEPS_PER_BLOCK}
SHARED |= {"betas": (0.9, 0.99), "weight_decay": 0.0, "max_grad_norm": 1.0, "warmup_steps": 5}
START = {"sdar": 350, "llada": 700}  # optimizer steps of SFT
SFT = {"eval_limit": 0, "lr_schedule": "linear", "schedule_steps": 800, "warmup_steps": 100}
SFT |= {"betas": (0.9, 0.98), "weight_decay": 0.01, "batch_size": 128, "micro_batch_size": 128}
SFT |= {"learning_rate": 2e-3, "eos_tail": 8}


@dataclass
class Args:
    size: Literal["tiny", "small"] = "tiny"
    jobs: int = 2
    """runs at a time; they share cores and GPUs evenly"""
    methods: tuple[str, ...] = tuple(METHODS)
    families: tuple[str, ...] = tuple(SMALL)
    rates: tuple[float, ...] = (1e-4, 3e-4)
    """learning rates to choose from"""
    rate_steps: int = 0
    """rollouts of a run of stage rates; 0: --max-steps"""
    max_steps: int = 80
    """rollouts of a run"""
    prompts_per_step: int = 16
    eval_every: int = 10
    passes: int = 6
    """forward-backward passes per completion"""
    keep: bool = False
    """at the end, copy the runs to docs/curves/comparison"""


# Flags that do not change a run.
FREE = {"jobs", "methods", "families", "keep"}


@dataclass(frozen=True)
class Run:
    family: str
    method: str
    task: str
    seed: int
    rate: float
    stage: str = "runs"

    @property
    def name(self):
        return f"{self.family}-{self.method}-{self.task}-s{self.seed}-lr{self.rate:g}"


class Curves:
    """The directory of a comparison, one for each choice of settings, and its stages."""

    def __init__(self, args):
        self.args = args
        self.settings = {name: value for name, value in asdict(args).items() if name not in FREE}
        self.root = ROOT / f"runs/curves-{args.size}-{stable_hash(self.settings):x}"
        pairs = ((family, method) for family in args.families for method in args.methods)
        # MDPO: bidirectional models
        self.pairs = [pair for pair in pairs if pair != ("sdar", "mdpo")]
        self.tasks = list(TASKS) if args.size == "small" else ["countdown"]

    def call(self, script, folder, flags, may_fail=False):
        """Run algos/<script>.py --out folder: its output is in folder/log, its status in
        folder/exit. A folder with a status is finished; one without holds a run that was cut off.
        """
        if (folder / "exit").is_file():
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        threads = max(1, len(os.sched_getaffinity(0)) // self.args.jobs)
        gpu = self.gpus.get()
        env = os.environ | {"OMP_NUM_THREADS": str(threads)}
        env |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        command = command_of(f"algos/{script}.py", flags | {"out": folder})
        with open(folder / "log", "w") as log:
            code = subprocess.run(command, stdout=log, stderr=log, env=env).returncode
        self.gpus.put(gpu)
        if code and not may_fail:
            raise SystemExit(f"{' '.join(command)}: exit {code}, see {folder}/log")
        (folder / "exit").write_text(str(code))

    def at_once(self, work, items, jobs):
        """work(item) for all items, `jobs` at a time; the first error is raised at the end."""
        self.gpus, gpus = SimpleQueue(), visible_gpus()
        for job in range(jobs):
            self.gpus.put(gpus[job % len(gpus)])
        with ThreadPoolExecutor(jobs) as pool:
            for future in [pool.submit(work, item) for item in items]:
                future.result()

    def start(self, family):
        """-> directory of the checkpoint that the runs of a family start from"""
        if self.args.size == "tiny":
            return ROOT / f"models/tiny-{family}"
        return next((self.root / f"sft-{family}").glob("*/checkpoints/step-*"))

    def sft(self):
        if self.args.size == "tiny":
            return
        rows = [row for name in self.tasks for row in sft_rows(load_task(name), SFT_ROWS[name])]
        random.Random(0).shuffle(rows)
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.at_once(self.train_start, self.args.families, self.args.jobs)

    def train_start(self, family):
        init = self.root / f"init-{family}"
        shutil.rmtree(init, ignore_errors=True)
        save_model(set_special_tokens(random_model(SMALL[family])), init, byte_tokenizer())
        flags = {"model": init, "data": self.root / "sft.jsonl", "max_steps": START[family]}
        self.call("sft", self.root / f"sft-{family}", SFT | flags)

    def validate(self, family, task):
        """-> share of the validation problems that the start of a family solves greedily"""
        flags = {"model": self.start(family), "split": "validation", "limit": 512}
        flags |= {"gen_length": TASKS[task], "denoising_steps": STEPS_PER_BLOCK}
        flags |= {"remasking": "low_confidence_static", "temperature": 0.0}
        command = command_of(f"evals/{task}.py", flags)
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        return json.loads(said.splitlines()[-1])["accuracy"]

    def folder(self, run):
        return self.root / run.stage / run.name

    def rows(self, run):
        (file,) = self.folder(run).glob("*/metrics.jsonl")
        return read_rows(file.parent)

    def train(self, run):
        args, blocks = self.args, TASKS[run.task] // 4
        # One pass of SDAR's two copies replays a denoising step of all blocks.
        forwards = STEPS_PER_BLOCK * (1 if run.family == "sdar" else blocks)
        flags = SHARED | METHODS[run.method](args.passes, forwards)
        flags |= {"model": self.start(run.family), "task": run.task, "seed": run.seed}
        flags |= {"gen_length": TASKS[run.task], "learning_rate": run.rate}
        flags |= {"prompts_per_step": args.prompts_per_step, "eval_every": args.eval_every}
        flags |= {"micro_batch_size": 8 * args.prompts_per_step, "max_steps": args.max_steps}
        if run.stage == "rates" and args.rate_steps:
            flags["max_steps"] = args.rate_steps
        if run.stage == "time":
            flags |= {"max_steps": TIMED_STEPS, "eval_limit": 0}
        # a diverging rate is a bad rate
        self.call(run.method, self.folder(run), flags, may_fail=run.stage == "rates")
        print(run)

    def tries(self, pair):
        return [Run(*pair, "countdown", RATE_SEED, rate, "rates") for rate in self.args.rates]

    def tried(self, pair):
        """{rate: last validation score}, -1 where the run failed"""
        has_failed = lambda run: (self.folder(run) / "exit").read_text() != "0"
        last = lambda run: values(self.rows(run), "eval/countdown")[-1]
        return {run.rate: -1 if has_failed(run) else last(run) for run in self.tries(pair)}

    def planned(self):
        """Runs at the best rates, countdown first"""
        tried = {pair: self.tried(pair) for pair in self.pairs}
        order = [(task, seed) for task in self.tasks for seed in SEEDS[task]]
        return [Run(*pair, *at, max(r, key=r.get)) for at in order for pair, r in tried.items()]

    def rates(self):
        runs = [run for pair in self.pairs for run in self.tries(pair)]
        self.at_once(self.train, runs, self.args.jobs)

    def runs(self):
        self.at_once(self.train, self.planned(), self.args.jobs)

    def time(self):
        runs = [run for run in self.planned() if (run.task, run.seed) == ("countdown", 0)]
        timed = [replace(run, stage="time") for run in runs]
        self.at_once(self.train, timed, len(visible_gpus()))

    def seconds(self, run):
        """Median seconds of a training step after the first four"""
        rows = self.rows(replace(run, seed=0, stage="time"))
        return statistics.median(r["time/step"] for r in rows if r["step"] > 4)

    def keep(self):
        starts = {(f, t): self.validate(f, t) for f in self.args.families for t in self.tasks}
        facts, kept = self.settings | {"machine": describe_device()}, []
        facts["rollouts_per_step"] = SHARED["num_generations"] * self.args.prompts_per_step
        for run in self.planned():
            rows, name = self.rows(run), f"eval/{run.task}"
            facts["seconds_per_step"] = self.seconds(run) if run.task == "countdown" else None
            facts["rates_tried"] = self.tried((run.family, run.method))
            facts["test"] = values(rows, f"test/{run.task}")
            points = [(row["step"], row[name]) for row in rows if name in row]
            facts["validation"] = [(0, starts[run.family, run.task]), *points]
            kept.append(asdict(run) | facts)
        file = ROOT / f"docs/curves/comparison/{self.args.size}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in kept))
        print(f"{len(kept)} runs kept in {file}")


def command_of(script, flags):
    command = [sys.executable, str(ROOT / script)]
    for name, value in flags.items():
        value = value if isinstance(value, tuple) else [value]
        command += [f"--{name.replace('_', '-')}", *map(str, value)]
    return command


def values(rows, key):
    return [row[key] for row in rows if key in row]


def visible_gpus():
    """-> GPUs as CUDA_VISIBLE_DEVICES names them, [""] without one"""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    return named.split(",")[:count] or [""]


def sft_rows(task, count):
    """-> chat rows of the train split; where it has too few problems, again with other answers"""
    problems, rows = task.load("train"), []
    for i in range(count):
        problem = problems[i % len(problems)]
        answer = task.answer(problem, i // len(problems))
        turn = {"role": "assistant", "content": answer}
        rows.append({"messages": [*task.prompt(problem), turn]})
    return rows


def main(args):
    curves = Curves(args)
    for stage in (curves.sft, curves.rates, curves.runs, curves.time):
        stage()
    if args.keep:
        curves.keep()


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
