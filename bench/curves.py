"""Learning curves of the online methods, all runs of a family from one SFT checkpoint.

    python bench/curves.py --jobs 14 --minutes 8    # 6 million parameters, GPUs

docs/curves.md has commands for a CPU, a harder task (sums) and 0.1 billion parameters.

A call makes what is missing, stops after --minutes, and the next call goes on. Rows of finished
runs are in --rows: what has a row is not made again. A run that --minutes cuts off saves its state
below runs/curves, where a later call on the same machine finds it.

    starts  algos/sft.py trains each family's model on the tasks (SFT_ROWS, START), into
            runs/starts; copy this folder to a machine that goes on. On a CPU, half an hour for
            both: `CUDA_VISIBLE_DEVICES= python bench/curves.py --jobs 2 --methods` makes nothing
            else. On GPUs their weights differed from machine to machine.
    rates   every method with every family, seed 1000: three learning rates on the first task, a
            third or three times apart; on the next one the best and its neighbours. Where the best
            score on the validation split is at the edge, the next neighbour follows.
    runs    three seeds of all tasks at the best rate, to the plateau: until the last evaluations
            (WINDOW) are on average less than a point (RISE) above those before, or the last call
            is over. Then without the method's KL, and at last the other VARIANTS, BGPO's on the
            last task alone.

The test split is scored before and after; nothing is chosen by it. Runs on one GPU take turns
unless NVIDIA's MPS runs them together: `nvidia-cuda-mps-control -d` before, `echo quit |
nvidia-cuda-mps-control` after.

All methods get the same rollouts, optimizer (SHARED) and --passes forward-backward passes per
completion. Each spends them its own way (METHODS): updates per rollout, draws of a bound, or
denoising steps. Everything else is the method's default. docs/plot.py draws the rows.
"""

import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from itertools import cycle, islice
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.alignment import METHODS, REFUSED
from evals import load_task
from models import save_model
from models.checkpoint import set_special_tokens
from models.tiny import TINY_LLADA, TINY_SDAR, byte_tokenizer, random_model
from run.defaults import TINY
from run.log import DEAD_STATUS, describe_device, describe_git
from run.report import read_rows
from run.saves import crc32

WIDE = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 8}
WIDE |= {"torch_dtype": "bfloat16"}
MODELS = {  # the first two have 6 million parameters, the last one 0.1 billion
    "sdar": TINY_SDAR | {"hidden_size": 256, "intermediate_size": 768} | WIDE,
    "llada": TINY_LLADA
    | dict.fromkeys(("n_layers", "n_heads", "n_kv_heads"), 8)
    | {"d_model": 256, "mlp_hidden_size": 768, "torch_dtype": "bfloat16"},
    "sdar-large": TINY_SDAR
    | WIDE
    | {"hidden_size": 768, "intermediate_size": 2304, "head_dim": 96, "num_hidden_layers": 14},
}
# tokens of a completion, in blocks of 4, with room for an EOS
TASKS = {"countdown": 12, "sudoku": 20, "sums": 64}
FILES = {"sums": f"{ROOT}/bench/sums.py"}  # of tasks that are not in evals/
SFT_ROWS = {"countdown": 20_000, "sudoku": 5_000, "sums": 20_000}
RATE_SEED, STEPS_PER_BLOCK = 1000, 2
WINDOW, RISE = 5, 0.01  # evaluations; of the score
STARTUP = 40  # seconds of a run before its first rollout

KL = dict.fromkeys(("d1", "coupled_grpo", "cj_grpo", "mdpo", "espo", "dtreerpo"), "beta")
KL["tracerl"] = "kl_to_old"
# variants of a method: flags, and texts of its script that are replaced
VARIANTS = {method: {"no-kl": ({flag: 0.0}, {})} for method, flag in KL.items()}
ENDS = ".flatten()\n\n\ndef policy_loss"  # of compute_advantages
NO_NEGATIVES = {}, {ENDS: ENDS.replace("()", "().clamp(min=0)", 1)}
for method in ("spg", "wd1", "espo", "ebpo", "coupled_grpo", "cj_grpo"):
    VARIANTS.setdefault(method, {})["no-negatives"] = NO_NEGATIVES
# between the bounds of the same draws: half the squared difference
ADD_KL = {
    "USES_REF = False": "USES_REF = True",
    "policy = -g.sum() * c\n": "policy = (args.beta * (estimates - ref) ** 2 / 2 - g).sum() * c\n",
}
VARIANTS["bgpo"] = {
    "saturating": (  # tokens of a negative advantage are pushed with p (1 - p), not with 1 - p
        {},
        {
            "(rows.weights * logps)": "(rows.weights * logps * torch.where("
            "rows.advantages[:, None, None] < 0, logps.detach().exp(), 1.0))"
        },
    ),
    "no-negatives": NO_NEGATIVES,
    "no-std": ({}, {"centred / (std + 1e-6)": "centred"}),
    "kl-0.01": ({"beta": 0.01}, ADD_KL),
    "kl-0.04": ({"beta": 0.04}, ADD_KL),
    "temperature-0.3": ({"temperature": 0.3}, {}),
    "temperature-0.6": ({"temperature": 0.6}, {}),
    "group-16": ({"num_generations": 16}, {}),  # of half as many prompts
    "steps-1": ({"denoising_steps": 1}, {}),
    "steps-4": ({"denoising_steps": 4}, {}),
}
SHARED = TINY | {"denoising_steps": STEPS_PER_BLOCK, "save_every": 100, "keep_saves": 1}
# flags of SFT by family and --tasks
START = {
    ("sdar", "countdown,sudoku"): {"max_steps": 350},
    ("llada", "countdown,sudoku"): {"max_steps": 700},
    ("sdar-large", "countdown,sudoku"): {"max_steps": 300, "learning_rate": 7e-4},
    ("sdar", "sums"): {"max_steps": 1150, "schedule_steps": 3000},
}
SFT = {"eval_limit": 0, "lr_schedule": "linear", "schedule_steps": 800, "warmup_steps": 100}
SFT |= {"betas": (0.9, 0.98), "weight_decay": 0.01, "batch_size": 128, "micro_batch_size": 128}
# Compiled, SDAR's start differed between two machines with the same kind of GPU.
SFT |= {"learning_rate": 2e-3, "eos_tail": 8, "no_compile": ()}
# of a row's points: means over the rollouts since the last evaluation
POINTS = {"reward": "reward/mean", "distinct": "completion/distinct_frac"}
POINTS |= {name: f"mismatch/{name}" for name in ("surprisal", "entropy", "improbable")}


@dataclass
class Args:
    starts: str = f"{ROOT}/runs/starts/"
    """checkpoints, up to the name of the family; trained if there are none"""
    tasks: str = "countdown,sudoku"
    """rates of the first are the middle ones of the second"""
    rows: str = str(ROOT / "docs/curves/comparison/runs.jsonl")
    """a row per finished run; all have the same settings"""
    minutes: float = 0
    """end this call after so many; 0: when all is made"""
    minutes_later: float = math.inf
    """that later calls on this machine will have: a run starts only if it can end within them; 0:
    the last call, which also keeps what is long enough"""
    jobs: int = 2
    """runs at a time; they share cores and GPUs evenly"""
    methods: tuple[str, ...] = METHODS
    families: tuple[str, ...] = ("sdar", "llada")
    seeds: int = 3
    rate: float = 0
    """learning rate of all methods; 0: the best of those tried"""
    variants: bool = True
    """also the runs of VARIANTS"""
    compile: bool = True
    """torch.compile in the runs, on GPUs"""
    commit: str = field(default_factory=describe_git)
    """of the code, for the rows"""
    prompts_per_step: int = 64
    passes: int = 6
    """forward-backward passes per completion"""
    eval_every: int = 20
    rate_rollouts: int = 150
    """rollouts of a run that tries a learning rate"""
    rollouts: int = 400
    """rollouts of the other runs, at least"""
    max_rollouts: int = 1000


SETTINGS = "prompts_per_step passes eval_every rate_rollouts rollouts max_rollouts"


@dataclass(frozen=True)
class Run:
    family: str
    method: str
    """key of METHODS, or "start": no training"""
    task: str
    seed: int = RATE_SEED
    rate: float = 0.0
    variant: str = ""
    """key of VARIANTS[method]; empty: as the method is; for a start, the checksum of its weights"""


def spending(method, p, forwards):
    """How a method spends p forward-backward passes per completion, as flags.

    forwards: passes that replay one rollout
    """
    rounds = max(1, p // forwards)
    # Released: every completion in one of four updates. Where passes are left, in all updates.
    tracerl = {"num_iterations": rounds, "no_minibatches": ()} if rounds > 1 else {}
    return {
        "d1": {"num_iterations": p},
        # An update is two complementary masks; the fully masked pass comes on top.
        "coupled_grpo": {"num_iterations": p // 2},
        "spg": {"num_iterations": p // 2, "mc_num": 2},
        "bgpo": {"num_iterations": 1, "mc_num": p},
        "cj_grpo": {"num_iterations": rounds},
        "mdpo": {"num_iterations": 1, "train_steps": p},
        "wd1": {"num_iterations": p},
        "tpg": {"num_iterations": rounds, "train_steps": p},
        # An update is a pair of complementary masks.
        "espo": {"num_iterations": p // 2, "mc_num": 1},
        "ebpo": {"num_iterations": 1, "mc_num": p},
        # A token a step, of which a rollout has twice as many; one pass scores one of each block.
        "justgrpo": {
            "num_iterations": max(1, rounds // 2),
            "positions": p,
            "denoising_steps": 2 * STEPS_PER_BLOCK,
        },
        # A tree has 4 + 8 segments and 8 leaves.
        "dtreerpo": {"num_iterations": max(1, 2 * p // 3), "branches": (4, 2)},
        "tracerl": tracerl,
    }[method]


class Curves:
    def __init__(self, args):
        self.args, self.lock = args, threading.Lock()
        self.end = time.perf_counter() + (60 * args.minutes or float("inf"))
        self.file, self.rows = Path(args.rows), {}
        self.root = ROOT / "runs/curves" / self.file.stem
        self.settings = {name: getattr(args, name) for name in SETTINGS.split()}
        self.taken, self.running, self.failed = set(), set(), []  # runs of this call
        if args.rate and self.file.resolve() == Path(Args.rows):
            raise SystemExit("--rate needs other --rows: the default ones have best rates")
        if args.rollouts < (least := 2 * WINDOW * args.eval_every):
            raise SystemExit(f"--rollouts {args.rollouts}: a plateau takes at least {least}")
        pairs = [(family, method) for family in args.families for method in args.methods]
        self.pairs = [pair for pair in pairs if pair not in REFUSED]
        for line in self.file.read_text().splitlines() if self.file.is_file() else []:
            row = json.loads(line)
            if row["settings"] != self.settings:
                raise SystemExit(
                    f"--rows {self.file} has runs of other settings: {row['settings']}"
                )
            self.rows[Run(*(row[part.name] for part in fields(Run)))] = row

    def keep(self, run, row):
        row = asdict(run) | row | {"start": crc32(self.start(run.family) / "model.safetensors")}
        row |= {"settings": self.settings, "jobs": self.args.jobs, "commit": self.args.commit}
        row["machine"] = describe_device()
        with self.lock, open(self.file, "a") as file:
            file.write(json.dumps(row) + "\n")
            self.rows[run] = row

    def call(self, script, flags, log, gpu):
        """Run a script until it ends or this call must: then it saves its state and stops.

        -> exit status, 1 if the training diverged; None: cut off. SystemExit for any other error
        """
        threads = max(1, len(os.sched_getaffinity(0)) // self.args.jobs)
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": paths}
        env |= {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
        env |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        command = command_of(script, flags)
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=env)
            try:
                code = process.wait(max(0, self.end - time.perf_counter()))
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
                return None
        if code == DEAD_STATUS:
            return 0
        if code and "not finite at step" not in log.read_text():
            raise SystemExit(f"{' '.join(command)}: exit {code}, see {log}")
        return code

    def start(self, family):
        """-> directory of the checkpoint that the runs of a family start from"""
        return Path(self.args.starts + family)

    def make_start(self, family, gpu):
        """Train the start of a family and score it, unless its rows have these weights."""
        start, folder = self.start(family), self.root / f"sft-{family}"
        tasks = self.args.tasks.split(",")
        if not start.is_dir():
            if (key := (family, self.args.tasks)) not in START:
                raise SystemExit(f"there is no {start}, and START has no flags for {key}")
            shutil.rmtree(folder, ignore_errors=True)
            with self.lock:  # transformers cannot be imported by two threads at once
                model = set_special_tokens(random_model(MODELS[family]))
                save_model(model, folder / "init", byte_tokenizer())
            rows = [row for task in tasks for row in sft_rows(task)]
            random.Random(0).shuffle(rows)
            data = folder / "rows.jsonl"
            data.write_text("".join(json.dumps(row) + "\n" for row in rows))
            flags = SFT | {"model": folder / "init", "data": data, "out": folder} | START[key]
            if self.call("algos/sft.py", flags, folder / "log", gpu) is None:
                raise SystemExit("--minutes were over before the starts were made")
            start.parent.mkdir(parents=True, exist_ok=True)
            next(folder.glob("*/checkpoints/step-*")).rename(start)
        weights = str(crc32(start / "model.safetensors"))
        for task in tasks:
            run, log = Run(family, "start", task, variant=weights), folder / f"{task}.log"
            script = FILES.get(task, f"evals/{task}.py")
            flags = {"model": start, "split": "validation", "limit": 512, "temperature": 0.0}
            flags |= {"gen_length": TASKS[task], "denoising_steps": STEPS_PER_BLOCK}
            flags |= {"remasking": "low_confidence_static"}
            if run in self.rows or self.call(script, flags, log, gpu) is None:
                continue
            score = json.loads(log.read_text().splitlines()[-1])["accuracy"]
            if not 0.05 < score < 0.6:
                hint = f": change START and delete {start}" if folder.is_dir() else ""
                raise SystemExit(f"{start} solves {score:.0%} of {task}, not 5 to 60 %{hint}")
            self.keep(run, {"greedy": score})

    def tried(self, family, method, task, centre):
        """-> runs that try the rates around a centre; the number of the best rate, which is neither
        the lowest nor the highest, None: not known yet
        """
        numbers = [centre, centre - 1, centre + 1]
        while True:
            runs = [Run(family, method, task, RATE_SEED, rate(k)) for k in numbers]
            if not all(run in self.rows for run in runs):
                return runs, None
            scores = {k: last_score(self.rows[run]) for k, run in zip(numbers, runs, strict=True)}
            best = max(scores, key=scores.get)  # of equal ones that nearest to the centre
            if min(numbers) < best < max(numbers):
                return runs, best
            numbers.append(best - 1 if best == min(numbers) else best + 1)

    def wanted(self):
        """-> runs whose rates are known so far, in the order in which they are to be made: the
        rates, task by task; seed by seed the runs of all tasks; what has no KL; other variants
        """
        ordered = []
        for family, method in self.pairs:
            best = 0
            tasks = self.args.tasks.split(",")
            for place, task in enumerate(tasks):
                if not (chosen := self.args.rate):
                    runs, best = self.tried(family, method, task, best)
                    # the middle rate of all methods first
                    ordered += [((place, 0, number), run) for number, run in enumerate(runs)]
                    if best is None:
                        break
                    chosen = rate(best)
                with_variants = self.args.variants and (method != "bgpo" or task == tasks[-1])
                for variant in ("", *(VARIANTS.get(method, {}) if with_variants else ())):
                    for seed in range(self.args.seeds):
                        run = Run(family, method, task, seed, chosen, variant)
                        stage = {"": 0, "no-kl": 1}.get(variant, 2)
                        ordered.append(((math.inf, stage, seed, place), run))
        return [run for _, run in sorted(ordered, key=lambda item: item[0])]

    def folder(self, run):
        return self.root / "-".join(map(str, asdict(run).values()))

    def next_target(self, run):
        """-> rollouts after which a run may end: --rollouts, or a window after the last time"""
        if run.seed == RATE_SEED:
            return self.args.rate_rollouts
        if (kept := self.folder(run) / "row.json").exists():
            return json.loads(kept.read_text())["rollouts"] + WINDOW * self.args.eval_every
        return self.args.rollouts

    def keep_long_enough(self):
        """Rows of the runs that no call will go on with, up to where they could have ended."""
        for run in self.wanted():
            kept = self.folder(run) / "row.json"
            if run not in self.rows and kept.exists():
                self.keep(run, json.loads(kept.read_text()) | {"diverged": False})

    def fits(self, run):
        """Whether a run can end in the time that is left, at the slowest pace of the method's last
        four: a second per rollout where there are none.
        """
        paces = [row["pace"] for known, row in self.rows.items() if known.method == run.method]
        rollouts = self.next_target(run) - saved_step(self.folder(run))
        need, now = STARTUP + rollouts * max(paces[-4:], default=1), time.perf_counter()
        return now < self.end and now + need < self.end + 60 * self.args.minutes_later

    def work(self, gpu):
        """Make runs until none is left for this call."""
        while True:
            with self.lock:
                new = (r for r in self.wanted() if r not in self.rows and r not in self.taken)
                run = next(filter(self.fits, new), None)
                if run is None and not self.running:
                    return
                if run is not None:
                    self.taken.add(run)
                    self.running.add(run)
            if run is None:
                time.sleep(1)  # runs decide which others follow
                continue
            try:
                self.train(run, gpu)
            except SystemExit as error:  # the others go on
                print(error, flush=True)
                self.failed.append(run)
            finally:
                self.running.remove(run)

    def train(self, run, gpu):
        """Make a run, or go on with it; keep its row if it ends."""
        args, folder, target = self.args, self.folder(run), self.next_target(run)
        # One pass of SDAR's two copies replays a denoising step of all blocks.
        forwards = STEPS_PER_BLOCK * (1 if run.family.startswith("sdar") else TASKS[run.task] // 4)
        # per prompt and forward; by estimate 4 GB of GPU memory, 14 GB of sdar-large
        draws = 6 if run.task == "sums" else 8 if run.family == "sdar-large" else 24
        new = {
            "model": self.start(run.family),
            "task": FILES.get(run.task, run.task),
            "seed": run.seed,
            "learning_rate": run.rate,
            "gen_length": TASKS[run.task],
            "prompts_per_step": args.prompts_per_step,
            "micro_batch_size": draws * args.prompts_per_step,
            "eval_every": args.eval_every,
            "schedule_steps": args.rollouts,
            "out": folder,
        }
        new = SHARED | new | spending(run.method, args.passes, forwards)
        changed, replaced = VARIANTS[run.method][run.variant] if run.variant else ({}, {})
        new |= changed
        new["prompts_per_step"] = args.prompts_per_step * 8 // new["num_generations"]
        new |= {} if args.compile else {"no_compile": ()}
        while True:
            if not saved_step(folder):
                shutil.rmtree(folder, ignore_errors=True)
            before = next(folder.glob("*/resume"), None)
            flags = {"resume": before.parent} if before else new
            flags |= {"max_steps": target}
            script = patched(f"{ROOT}/algos/{run.method}.py", replaced, folder)
            code = self.call(script, flags, folder / "log", gpu)
            if code is None:
                return
            row = self.summary(run)
            if code or row["rollouts"] < target or run.seed == RATE_SEED:
                break  # diverged, dead, or long enough
            if target >= args.max_rollouts or is_level(row["points"]["greedy"]):
                break
            (folder / "row.json").write_text(json.dumps(row))
            target += WINDOW * args.eval_every
        self.keep(run, row | {"diverged": bool(code)})
        shutil.rmtree(folder)
        print(f"{last_score(self.rows[run]):.1%} {run}", flush=True)

    def summary(self, run):
        """-> what a row keeps of a run's metrics.jsonl: its points are its evaluations"""
        (file,) = self.folder(run).glob("*/metrics.jsonl")
        steps, since, tokens, points = [], [], 0, defaultdict(list)
        for row in read_rows(file.parent):
            if "reward/mean" not in row:
                continue
            steps.append(row)
            since.append(row)
            tokens += row["completion/length"] * 8 * self.args.prompts_per_step
            if (key := f"eval/{run.task}") in row:
                points["rollout"].append(row["step"])
                points["tokens"].append(round(tokens))
                points["greedy"].append(round(row[key], 4))
                for name, metric in POINTS.items():
                    points[name].append(mean(since, metric))
                since = []
        training = [row["time/step"] - row.get("time/eval", 0) for row in steps]
        return {
            "rollouts": steps[-1]["step"] if steps else 0,
            "test": values(read_rows(file.parent), f"test/{run.task}"),
            "seconds": round(statistics.median(training), 4) if steps else None,
            "pace": mean(steps, "time/step") or 0,
            "points": points,
        }


def rate(number):
    """Learning rates, about three times apart: 1.5e-4 is number 0, 5e-4 number 1, 5e-5 number -1"""
    return float(f"{(1.5e-4, 5e-4)[number % 2] * 10.0 ** (number // 2):.1e}")


def last_score(row):
    """Mean of the last evaluations; -1 of a run that diverged or made none"""
    greedy = row["points"].get("greedy", [])[-3:]
    return -1 if row["diverged"] or not greedy else statistics.mean(greedy)


def is_level(scores):
    """Whether the last WINDOW scores are on average less than RISE above those before"""
    before, last = scores[-2 * WINDOW : -WINDOW], scores[-WINDOW:]
    return statistics.mean(last) < statistics.mean(before) + RISE


def saved_step(folder):
    """-> step that a run can go on from, 0: none"""
    return max((int(path.name[5:]) for path in folder.glob("*/resume/step-*")), default=0)


def patched(script, replaced, folder):
    """-> path of the script, or of a copy in folder with each text replaced, which it has once"""
    if not replaced:
        return script
    script, source = Path(script), Path(script).read_text()
    for old, new in replaced.items():
        if source.count(old) != 1:
            raise SystemExit(f"{script} has {old!r} {source.count(old)} times")
        source = source.replace(old, new)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / script.name).write_text(source)
    return folder / script.name


def command_of(script, flags):
    command = [sys.executable, str(ROOT / script)]
    for name, value in flags.items():
        value = value if isinstance(value, tuple) else [value]
        command += [f"--{name.replace('_', '-')}", *map(str, value)]
    return command


def values(rows, key):
    return [row[key] for row in rows if row.get(key) is not None]


def mean(rows, key):
    """Of the rows that have a value; None: none has"""
    found = values(rows, key)
    return round(statistics.mean(found), 4) if found else None


def visible_gpus():
    """-> GPUs as CUDA_VISIBLE_DEVICES names them, [""] without one"""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    return named.split(",")[:count] or [""]


def sft_rows(name):
    """-> chat rows of the train split; where it has too few problems, again with other answers"""
    task, rows = load_task(FILES.get(name, name)), []
    problems = task.load("train")
    for i in range(SFT_ROWS[name]):
        problem = problems[i % len(problems)]
        answer = task.answer(problem, i // len(problems))
        turn = {"role": "assistant", "content": answer}
        rows.append({"messages": [*task.prompt(problem), turn]})
    return rows


def main(args):
    curves, gpus = Curves(args), visible_gpus()
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(curves.make_start, args.families, cycle(gpus)))
        list(pool.map(curves.work, islice(cycle(gpus), args.jobs)))
    if not args.minutes_later:
        curves.keep_long_enough()
    missing = len([run for run in curves.wanted() if run not in curves.rows])
    print(f"{len(curves.rows)} rows in {args.rows}; {missing} runs known to be missing")
    if curves.failed:
        raise SystemExit(f"{len(curves.failed)} runs failed")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
