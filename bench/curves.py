"""Learning curves of the online methods, all runs of a family from one SFT checkpoint.

    python bench/curves.py --size tiny --jobs 2      # shipped models (0.5 million parameters), CPU
    python bench/curves.py --size small --jobs 8     # 6 million parameters, GPUs, sudoku too
    python bench/curves.py --size tiny --keep        # finished runs -> docs/curves/comparison

Stages, in this order; each skips what an earlier call has finished:

    sft     algos/sft.py trains each family's model on countdown `small` and sudoku `sudoku4`,
            4 rows to 1. The first save that greedily solves --start of the validation problems of
            both tasks starts all runs of the family. The shipped models are trained already.
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
from bisect import bisect_left
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
}
SHARED = {"num_generations": 8, "temperature": 1.0, "denoising_steps": STEPS_PER_BLOCK}
SHARED |= {"betas": (0.9, 0.99), "weight_decay": 0.0, "max_grad_norm": 1.0, "warmup_steps": 5}
SFT = {"save_every": 50, "eval_limit": 0, "lr_schedule": "linear", "warmup_steps": 100}
SFT |= {"betas": (0.9, 0.98), "weight_decay": 0.01, "batch_size": 128, "micro_batch_size": 128}


@dataclass
class Args:
    out: str = "runs/curves"
    """directory of all runs; a second call continues"""
    size: Literal["tiny", "small"] = "tiny"
    jobs: int = 2
    """runs at a time; they share cores and GPUs evenly"""
    stages: tuple[Literal["sft", "rates", "runs", "time"], ...] = ("sft", "rates", "runs", "time")
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
    eval_limit: int = 512
    """held-out problems of a score"""
    passes: int = 6
    """forward-backward passes per completion"""
    start: float = 0.15
    """share of the validation problems of both tasks that the SFT checkpoint solves"""
    sft_steps: int = 800
    """most optimizer steps of SFT, 128 rows each"""
    sft_learning_rate: float = 2e-3
    keep: bool = False
    """only copy the finished runs to docs/curves/comparison"""


# Flags that may differ between calls with the same --out.
FREE = {"out", "size", "jobs", "stages", "methods", "families", "keep"}


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
    """The directory of a comparison and its stages."""

    def __init__(self, args, device):
        self.args, self.device, self.root = args, device, Path(args.out, args.size).resolve()
        self.root.mkdir(parents=True, exist_ok=True)
        self.settings = {name: value for name, value in asdict(args).items() if name not in FREE}
        text, file = json.dumps(self.settings), self.root / "settings.json"
        if file.is_file() and (had := file.read_text()) != text:
            raise SystemExit(f"{self.root} holds runs with {had}, not {text}: use another --out")
        file.write_text(text)
        pairs = ((f, m) for f in args.families for m in args.methods)
        self.pairs = [
            pair for pair in pairs if pair != ("sdar", "mdpo")
        ]  # MDPO: bidirectional models
        self.tasks = list(TASKS) if args.size == "small" else ["countdown"]

    def call(self, script, folder, flags):
        """Run algos/<script>.py --out folder, with its output in folder/log. -> "" or the error"""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = command_of(f"algos/{script}.py", flags | {"out": folder})
        threads = max(1, len(os.sched_getaffinity(0)) // self.args.jobs)
        gpu = self.gpus.get()
        env = os.environ | {"OMP_NUM_THREADS": str(threads)}
        env |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        with open(folder / "log", "w") as log:
            code = subprocess.run(command, stdout=log, stderr=log, env=env).returncode
        self.gpus.put(gpu)
        text = (folder / "log").read_text()[-2000:]
        return f"{' '.join(command)}: exit {code}\n{text}" if code else ""

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
        tiny = self.args.size == "tiny"
        return ROOT / f"models/tiny-{family}" if tiny else self.root / f"sft-{family}/start"

    def sft(self):
        rows = [row for name in self.tasks for row in sft_rows(load_task(name), SFT_ROWS[name])]
        random.Random(0).shuffle(rows)
        (self.root / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        families = [f for f in self.args.families if not self.start(f).is_dir()]
        self.at_once(self.train_start, families, self.args.jobs)
        for family in families:
            self.choose_start(family)

    def train_start(self, family):
        folder, args = self.root / f"sft-{family}", self.args
        (folder / "config").mkdir(parents=True, exist_ok=True)
        (folder / "config/config.json").write_text(json.dumps(SMALL[family]))
        flags = {"config": folder / "config", "out": folder / "init"}
        flags["tokenizer"] = ROOT / f"models/tiny-{family}"
        subprocess.run(command_of("models/random_init.py", flags), check=True)
        flags = SFT | {"model": folder / "init", "data": self.root / "sft.jsonl"}
        flags |= {"max_steps": args.sft_steps, "learning_rate": args.sft_learning_rate}
        if error := self.call("sft", folder / "run", flags | {"eos_tail": 8}):
            raise SystemExit(error)

    def choose_start(self, family):
        """The first good save, found by bisection: scores rise with the steps."""
        folder, tried = self.root / f"sft-{family}", {}
        saves = sorted((folder / "run").glob("*/checkpoints/step-*"))

        def is_good(save):
            tried[save.name] = self.validate(save)
            return min(tried[save.name].values()) >= self.args.start

        first = bisect_left(saves, True, key=is_good)
        if first == len(saves):
            raise SystemExit(
                f"{family}: no save solves {self.args.start:.0%} of each task: {tried}"
            )
        shutil.copytree(saves[first], folder / "chosen", dirs_exist_ok=True)
        os.replace(folder / "chosen", self.start(family))
        print(f"{family} starts from {saves[first].name}; tried {tried}")

    def validate(self, checkpoint):
        """-> {task: share of validation problems solved greedily}, scored as the scripts do"""
        engine = make_engine(str(checkpoint), device=self.device)
        tokenizer, scores = load_tokenizer(str(checkpoint)), {}
        for name in self.tasks:
            task, limit = load_task(name), self.args.eval_limit
            problems, _ = load_problems(task, "validation", "", tokenizer, 1024, limit)
            settings = {"gen_length": TASKS[name], "denoising_steps": STEPS_PER_BLOCK}
            settings |= {"remasking": "low_confidence_static", "temperature": 0.0}
            scores[name] = mean_score(engine, task, tokenizer, problems, **settings)
        return scores

    def folder(self, run):
        return self.root / run.stage / run.name

    def rows(self, run):
        """Rows of the run's metrics.jsonl, [] if it has not finished"""
        files = list(self.folder(run).glob("*/metrics.jsonl"))
        rows = [json.loads(line) for line in files[0].read_text().splitlines()] if files else []
        if run.stage == "time":
            return rows if rows and rows[-1]["step"] == TIMED_STEPS else []
        return rows if len(values(rows, f"test/{run.task}")) == 2 else []

    def train(self, run):
        if self.rows(run) or (self.folder(run) / "failed").is_file():
            return
        args, blocks = self.args, TASKS[run.task] // 4
        # One pass of SDAR's two copies replays a denoising step of all blocks.
        forwards = STEPS_PER_BLOCK * (1 if run.family == "sdar" else blocks)
        flags = SHARED | METHODS[run.method](args.passes, forwards)
        flags |= {"model": self.start(run.family), "task": run.task, "seed": run.seed}
        flags |= {"gen_length": TASKS[run.task], "learning_rate": run.rate}
        for name in ("prompts_per_step", "max_steps", "eval_every", "eval_limit"):
            flags[name] = getattr(args, name)
        flags["micro_batch_size"] = 8 * args.prompts_per_step
        if run.stage == "rates":
            flags["max_steps"] = args.rate_steps or args.max_steps
        if run.stage == "time":
            flags |= {"max_steps": TIMED_STEPS, "eval_limit": 0}
        if error := self.call(run.method, self.folder(run), flags):
            if run.stage != "rates":
                raise SystemExit(error)
            (self.folder(run) / "failed").write_text(error)  # a diverging rate is a bad rate
        print(run)

    def tries(self, pair):
        return [Run(*pair, "countdown", RATE_SEED, rate, "rates") for rate in self.args.rates]

    def tried(self, pair):
        """{rate: last validation score} of the finished tries, -1 for a failed one"""
        scores = {}
        for run in self.tries(pair):
            if found := values(self.rows(run), "eval/countdown"):
                scores[run.rate] = found[-1]
            elif (self.folder(run) / "failed").is_file():
                scores[run.rate] = -1.0
        return scores

    def planned(self):
        """Runs at the chosen rates, countdown first, of methods whose rates have all been tried"""
        tried = {pair: self.tried(pair) for pair in self.pairs}
        done = {pair: rates for pair, rates in tried.items() if len(rates) == len(self.args.rates)}
        order = [(task, seed) for task in self.tasks for seed in SEEDS[task]]
        return [Run(*pair, *at, max(r, key=r.get)) for at in order for pair, r in done.items()]

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
        """Median seconds of a training step after the first four; None if not timed"""
        rows = self.rows(replace(run, seed=0, stage="time"))
        return statistics.median(r["time/step"] for r in rows if r["step"] > 4) if rows else None

    def keep(self):
        starts, kept = {f: self.validate(self.start(f)) for f in self.args.families}, []
        for run in self.planned():
            if not (rows := self.rows(run)):
                continue
            (config,) = self.folder(run).glob("*/config.json")  # perhaps of another machine
            facts = {"size": self.args.size, "machine": json.loads(config.read_text())["device"]}
            facts |= {"seconds_per_step": self.seconds(run)} | self.settings
            facts["rollouts_per_step"] = SHARED["num_generations"] * self.args.prompts_per_step
            facts["rates_tried"] = self.tried((run.family, run.method))
            facts["test"], name = values(rows, f"test/{run.task}"), f"eval/{run.task}"
            points = [(row["step"], row[name]) for row in rows if name in row]
            facts["validation"] = [(0, starts[run.family][run.task]), *points]
            rewards = [round(value, 5) for value in values(rows, "reward/mean")]
            kept.append(asdict(run) | facts | {"reward": rewards})
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
    device = setup_distributed()  # mean_score sums over ranks
    curves = Curves(args, device)
    for stage in ("keep",) if args.keep else args.stages:
        getattr(curves, stage)()
    dist.destroy_process_group()


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
