"""Learning curves of the online methods, every run of a family from one SFT checkpoint: the data of docs/curves/comparison.

    python bench/curves.py --size tiny --jobs 2           # the shipped models of 0.5 million parameters, CPU, countdown alone
    python bench/curves.py --size small --jobs 8          # 6 million, on GPUs, countdown and sudoku
    python bench/curves.py --size tiny --keep             # what is finished -> docs/curves/comparison; then docs/plot.py

Stages, in this order; each leaves out what an earlier call has finished:

    sft     algos/sft.py trains each family's model on countdown `small` and sudoku `sudoku4`, four rows to one, because boards
            are learned sooner. The first save that solves --start of the validation problems of both tasks, greedily, is
            where all runs of the family begin. The shipped models have had theirs, on countdown.
    rates   every method on countdown at every learning rate, with seed 1000; the best last validation score wins.
    runs    countdown with seeds 0, 1, 2 and sudoku with seed 0, at that rate. The test split is scored before and after,
            as the scripts always do; nothing is chosen by it.
    time    every method for a few steps with the machine, or a GPU and its share of the cores, to itself: seconds a step.
            Runs that share one wait for each other, so their own clocks would compare nothing.

Runs that share a GPU take turns, one program at a time, unless NVIDIA's MPS runs them together: `nvidia-cuda-mps-control -d`
before, `echo quit | nvidia-cuda-mps-control` after (docs/curves.md has what it brought).

All methods get the same rollouts and the same optimizer (SHARED), and --passes forward-backward passes a completion, which each
spends its own way (METHODS): updates per rollout, draws of a bound, or denoising steps. The rest is the method's own default.
"""

import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from algos.sft import setup_distributed
from evals import load_problems, load_task, mean_score
from models import load_tokenizer
from models.tiny import TINY_LLADA, TINY_SDAR
from rollout import make_engine
from runlog import write_atomically

FAMILIES = {"sdar": TINY_SDAR, "llada": TINY_LLADA}
SMALL = {  # 6 million parameters
    "sdar": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "llada": {"d_model": 256, "mlp_hidden_size": 768, "n_layers": 8, "n_heads": 8, "n_kv_heads": 8},
}
TASKS = {"countdown": 12, "sudoku": 16}  # task: tokens of a completion, whole blocks of 4
SFT_ROWS = {"countdown": 20_000, "sudoku": 5_000}
STEPS_PER_BLOCK = 2
SEEDS = {"countdown": (0, 1, 2), "sudoku": (0,)}
RATE_SEED = 1000
FIXED = (
    "rates",
    "rate_steps",
    "max_steps",
    "prompts_per_step",
    "eval_every",
    "eval_limit",
    "passes",
    "start",
    "sft_steps",
    "sft_learning_rate",
)
TIMED_STEPS = 12

# passes: forward-backward passes a completion; forwards: of one rollout, as the learner replays them
METHODS: dict[str, Callable] = {
    "d1": lambda passes, forwards: {"num_iterations": passes},
    "coupled_grpo": lambda passes, forwards: {
        "num_iterations": passes // 2
    },  # two halves an update, all masked on top
    "spg": lambda passes, forwards: {"num_iterations": passes // 2, "mc_num": 2},
    "bgpo": lambda passes, forwards: {"num_iterations": 1, "mc_num": passes},
    "cj_grpo": lambda passes, forwards: {"num_iterations": max(1, passes // forwards)},
    "mdpo": lambda passes, forwards: {"num_iterations": 1, "train_steps": passes},
}
BIDIRECTIONAL_ONLY = {"mdpo"}
SHARED = {
    "num_generations": 8,
    "temperature": 1.0,
    "denoising_steps": STEPS_PER_BLOCK,
    "betas": (0.9, 0.99),
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "warmup_steps": 5,
}


@dataclass
class Args:
    out: str = "runs/curves"
    """directory of all runs; a second call goes on with what is in it"""
    size: Literal["tiny", "small"] = "tiny"
    """of the models: 0.5 or 6 million parameters"""
    jobs: int = 2
    """runs at a time; cores and GPUs are dealt out among them"""
    stages: tuple[Literal["sft", "rates", "runs", "time"], ...] = ("sft", "rates", "runs", "time")
    methods: tuple[str, ...] = tuple(METHODS)
    families: tuple[str, ...] = tuple(FAMILIES)
    rates: tuple[float, ...] = (1e-4, 3e-4)
    """learning rates to choose from"""
    rate_steps: int = 0
    """rollouts of a try of a rate; 0: as many as of a run"""
    max_steps: int = 80
    """rollouts of a run"""
    prompts_per_step: int = 16
    eval_every: int = 10
    eval_limit: int = 512
    """held-out problems of a score"""
    passes: int = 6
    """forward-backward passes a completion"""
    start: float = 0.15
    """share of the validation problems of both tasks that the SFT checkpoint solves"""
    sft_steps: int = 800
    """most optimizer steps of SFT, 128 rows each"""
    sft_learning_rate: float = 2e-3
    keep: bool = False
    """copy the finished runs to docs/curves/comparison, and run nothing"""


@dataclass(frozen=True)
class Run:
    """One run of an online script."""

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
    """The directory of a comparison, and what is done in it."""

    def __init__(self, args, device):
        self.args, self.device = args, device
        self.root = Path(args.out) / args.size
        self.root.mkdir(parents=True, exist_ok=True)
        self.settings = {name: getattr(args, name) for name in FIXED}
        file = self.root / "settings.json"
        if file.is_file() and (had := json.loads(file.read_text())) != json.loads(
            json.dumps(self.settings)
        ):
            raise SystemExit(
                f"{self.root} was begun with {had}, not {self.settings}: take another --out"
            )
        write_atomically(file, json.dumps(self.settings))
        self.tasks = TASKS if args.size == "small" else {"countdown": TASKS["countdown"]}

    # -------------------------------------------------------------------------------------------------- running scripts

    def call(self, script, folder, flags, threads):
        """Run algos/<script>.py with --out folder/; its output goes to folder/log. -> "", or what it said when it failed"""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        words = [
            word
            for name, value in flags.items()
            for word in (f"--{name.replace('_', '-')}", *map(str, listed(value)))
        ]
        with open(folder / "log", "w") as log:
            command = [
                sys.executable,
                str(ROOT / f"algos/{script}.py"),
                "--out",
                str(folder),
                *words,
            ]
            gpu = self.gpus.get()  # never waits: at_once has put in as many as it runs at a time
            env = (
                os.environ
                | {"OMP_NUM_THREADS": str(threads)}
                | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
            )
            try:
                code = subprocess.run(
                    command, stdout=log, stderr=subprocess.STDOUT, env=env
                ).returncode
            finally:
                self.gpus.put(gpu)
        return (
            f"{' '.join(command)}: exit {code}\n{(folder / 'log').read_text()[-2000:]}"
            if code
            else ""
        )

    def at_once(self, work, items, jobs=0):
        """work(item) for every item, `jobs` or --jobs at a time; a failure is raised when the others have ended."""
        jobs, gpus = jobs or self.args.jobs, visible_gpus()
        self.gpus = SimpleQueue()  # of those who run now, "" on CPU
        for job in range(jobs):
            self.gpus.put(gpus[job % len(gpus)])
        with ThreadPoolExecutor(jobs) as pool:
            for future in [pool.submit(work, item) for item in items]:
                future.result()

    def threads(self):
        return max(1, len(os.sched_getaffinity(0)) // self.args.jobs)

    # --------------------------------------------------------------------------------------------------------- the start

    def checkpoint(self, family):
        return (
            ROOT / f"models/tiny-{family}"
            if self.args.size == "tiny"
            else self.root / f"sft-{family}/start"
        )

    def sft(self):
        rows = [row for task in self.tasks for row in sft_rows(load_task(task), SFT_ROWS[task])]
        random.Random(0).shuffle(rows)
        write_atomically(self.root / "sft.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        families = [f for f in self.args.families if not self.checkpoint(f).is_dir()]
        self.at_once(self.train_start, families)
        for family in families:
            self.choose_start(family)

    def train_start(self, family):
        folder, args = self.root / f"sft-{family}", self.args
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "config").mkdir(parents=True)
        (folder / "config/config.json").write_text(json.dumps(FAMILIES[family] | SMALL[family]))
        tokenizer = ROOT / "models" / f"tiny-{family}"
        command = [
            "models/random_init.py",
            "--config",
            folder / "config",
            "--tokenizer",
            tokenizer,
            "--out",
            folder / "init",
        ]
        subprocess.run(
            [sys.executable, *map(str, command)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
        flags = {
            "model": folder.resolve() / "init",
            "data": self.root.resolve() / "sft.jsonl",
            "max_steps": args.sft_steps,
            "save_every": 50,
            "eval_limit": 0,
            "learning_rate": args.sft_learning_rate,
            "lr_schedule": "linear",
            "warmup_steps": 100,
            "betas": (0.9, 0.98),
            "weight_decay": 0.01,
            "batch_size": 128,
            "micro_batch_size": 128,
            "eos_tail": 8,
        }
        if error := self.call("sft", folder / "run", flags, self.threads()):
            raise SystemExit(error)

    def choose_start(self, family):
        """The first save good enough on both tasks becomes `start`: found by bisection, as scores rise with the steps."""
        folder, tried = self.root / f"sft-{family}", {}
        saves = sorted((folder / "run").glob("*/checkpoints/step-*"))

        def is_good(save):
            tried[save.name] = self.validate(save)
            return min(tried[save.name].values()) >= self.args.start

        first = bisect_left(saves, True, key=is_good)
        if first == len(saves):
            raise SystemExit(
                f"{family}: no save solves {self.args.start:.0%} of both tasks: {tried}"
            )
        save = saves[first]
        shutil.copytree(save, folder / "chosen", dirs_exist_ok=True)
        os.replace(folder / "chosen", self.checkpoint(family))
        print(
            f"{family}: starts from {save.name}, which solves {tried[save.name]}; looked at {tried}",
            flush=True,
        )

    def validate(self, checkpoint):
        """Greedy scores on the validation problems, as the scripts score them. -> {task: share solved}"""
        engine, tokenizer, scores = (
            make_engine(str(checkpoint), device=self.device),
            load_tokenizer(str(checkpoint)),
            {},
        )
        for name in self.tasks:
            task = load_task(name)
            problems, _ = load_problems(
                task, "validation", "", tokenizer, 1024, self.args.eval_limit
            )
            settings = {
                "gen_length": TASKS[name],
                "denoising_steps": STEPS_PER_BLOCK,
                "remasking": "low_confidence_static",
            }
            scores[name] = mean_score(
                engine, task, tokenizer, problems, temperature=0.0, **settings
            )
        return scores

    # ---------------------------------------------------------------------------------------------------------- the runs

    def pairs(self):
        return [
            (f, m)
            for f in self.args.families
            for m in self.args.methods
            if f != "sdar" or m not in BIDIRECTIONAL_ONLY
        ]

    def folder(self, run):
        return self.root / run.stage / run.name

    def rows(self, run):
        """Rows of the run's metrics.jsonl, [] where it has not come to its end."""
        files = list(self.folder(run).glob("*/metrics.jsonl"))
        rows = [json.loads(line) for line in files[0].read_text().splitlines()] if files else []
        scored = [row for row in rows if f"test/{run.task}" in row]
        return (
            rows
            if run.stage == "time" and rows and rows[-1]["step"] == TIMED_STEPS or len(scored) == 2
            else []
        )

    def train(self, run):
        if self.rows(run) or (self.folder(run) / "failed").is_file():
            return
        args = self.args
        blocks = TASKS[run.task] // 4
        forwards = STEPS_PER_BLOCK * (
            1 if run.family == "sdar" else blocks
        )  # the two-copy pass replays all blocks at once
        flags = SHARED | METHODS[run.method](args.passes, forwards)
        flags |= {
            "model": self.checkpoint(run.family).resolve(),
            "task": run.task,
            "gen_length": TASKS[run.task],
        }
        flags |= {
            "seed": run.seed,
            "learning_rate": run.rate,
            "prompts_per_step": args.prompts_per_step,
        }
        flags |= {
            "max_steps": args.max_steps,
            "eval_every": args.eval_every,
            "eval_limit": args.eval_limit,
        }
        flags |= {"micro_batch_size": 8 * args.prompts_per_step}
        if run.stage == "rates":
            flags |= {"max_steps": args.rate_steps or args.max_steps}
        if run.stage == "time":
            flags |= {"max_steps": TIMED_STEPS, "eval_limit": 0}
        if error := self.call(run.method, self.folder(run), flags, self.threads()):
            if run.stage != "rates":
                raise SystemExit(error)
            (self.folder(run) / "failed").write_text(
                error
            )  # a rate at which the loss leaves the finite numbers is a bad rate
        last = [row for row in self.rows(run) if f"test/{run.task}" in row]
        print(run.stage, run.name, *(f"{row[f'test/{run.task}']:.1%}" for row in last), flush=True)

    def rates(self):
        tries = [
            Run(f, m, "countdown", RATE_SEED, rate, "rates")
            for f, m in self.pairs()
            for rate in self.args.rates
        ]
        self.at_once(self.train, tries)

    def validation(self, run):
        """[(step, score)] on the validation split"""
        return [
            (row["step"], row[f"eval/{run.task}"])
            for row in self.rows(run)
            if f"eval/{run.task}" in row
        ]

    def tried(self, family, method):
        """{rate: last validation score} of the finished tries; one that failed has none and scores -1"""
        scores = {}
        for run in (
            Run(family, method, "countdown", RATE_SEED, rate, "rates") for rate in self.args.rates
        ):
            if points := self.validation(run):
                scores[run.rate] = points[-1][1]
            elif (self.folder(run) / "failed").is_file():
                scores[run.rate] = -1.0
        return scores

    def planned(self):
        """The runs at the chosen rates, of methods whose rates have all been tried; countdown first."""
        tried = {pair: self.tried(*pair) for pair in self.pairs()}
        chosen = {
            pair: max(rates, key=rates.get)
            for pair, rates in tried.items()
            if len(rates) == len(self.args.rates)
        }
        order = [(task, seed) for task in self.tasks for seed in SEEDS[task]]
        return [
            Run(*pair, task, seed, rate) for task, seed in order for pair, rate in chosen.items()
        ]

    def runs(self):
        self.at_once(self.train, self.planned())

    def time(self):
        timed = [
            replace(run, stage="time")
            for run in self.planned()
            if run.seed == 0 and run.task == "countdown"
        ]
        self.at_once(self.train, timed, jobs=len(visible_gpus()))

    # ------------------------------------------------------------------------------------------------------ what is kept

    def seconds(self, run):
        """Seconds of a training step, hand-over of the weights included: median after the first four. None if not timed."""
        rows = self.rows(replace(run, seed=0, stage="time"))
        return (
            statistics.median(row["time/step"] for row in rows if row["step"] > 4) if rows else None
        )

    def keep(self):
        folder = ROOT / "docs/curves/comparison"
        folder.mkdir(parents=True, exist_ok=True)
        starts = {family: self.validate(self.checkpoint(family)) for family in self.args.families}
        kept = []
        for run in self.planned():
            if rows := self.rows(run):
                test = [row[f"test/{run.task}"] for row in rows if f"test/{run.task}" in row]
                points = [(0, starts[run.family][run.task]), *self.validation(run)]
                (config,) = self.folder(run).glob(
                    "*/config.json"
                )  # runs may come from another machine than this
                machine = json.loads(config.read_text())["device"]
                facts = {
                    "size": self.args.size,
                    "machine": machine,
                    "seconds_per_step": self.seconds(run),
                } | self.settings
                facts |= {
                    "rollouts_per_step": SHARED["num_generations"] * self.args.prompts_per_step
                }
                facts |= {
                    "rates_tried": self.tried(run.family, run.method),
                    "test": test,
                    "validation": points,
                }
                rewards = [round(row["reward/mean"], 5) for row in rows if "reward/mean" in row]
                kept.append({**asdict(run), **facts, "reward": rewards})
        write_atomically(
            folder / f"{self.args.size}.jsonl", "".join(json.dumps(row) + "\n" for row in kept)
        )
        print(f"{len(kept)} runs kept in {folder / self.args.size}.jsonl")


def visible_gpus():
    """-> names of the GPUs that runs are dealt out to, as CUDA_VISIBLE_DEVICES takes them; [""] without one"""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    return named.split(",")[:count] or [""]


def listed(value):
    return value if isinstance(value, tuple) else (value,)


def sft_rows(task, count):
    """So many chat rows of the task's train split; where it has fewer problems, each more than once, with other answers."""
    problems = task.load("train")
    draws = math.ceil(count / len(problems))
    turn = lambda problem, draw: {"role": "assistant", "content": task.answer(problem, draw)}
    return [
        {"messages": [*task.prompt(p), turn(p, draw)]} for draw in range(draws) for p in problems
    ][:count]


def main(args):
    if unknown := set(args.methods) - set(METHODS) | set(args.families) - set(FAMILIES):
        raise SystemExit(
            f"unknown: {', '.join(unknown)}; methods: {', '.join(METHODS)}; families: {', '.join(FAMILIES)}"
        )
    _, _, device = setup_distributed()
    curves = Curves(args, device)
    if args.keep:
        curves.keep()
    else:
        for stage in args.stages:
            getattr(curves, stage)()
    dist.destroy_process_group()


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
