"""Benchmarks on one loaded engine, and the command line that all benchmark files share.

    python evals/run.py --model tiny-sdar --tasks countdown,sudoku,gsm8k --data gsm8k=test.jsonl
    torchrun --standalone --nproc-per-node 8 evals/run.py --model sdar-8b --tasks gsm8k,math500,mmlu
    python evals/run.py --resume runs/eval-...   continue: finished samples are kept
    python evals/countdown.py --model tiny-sdar   one task; --resume works here too
    python evals/countdown.py --completions samples.jsonl --data cd3   only score completions
    python evals/run.py --tasks gsm8k,mbpp --completions gsm8k=a.jsonl mbpp=b.jsonl

The defaults of lengths, steps and temperatures come from evals/decoding.py: the settings of the
published number for this model and task. Ranks share the problems of every task; the number of
ranks changes no completion. evals/results.py describes the output directory. For one task the last
line on stdout is a JSON object: task, n, accuracy, stderr, answered, truncated, ..., settings, and
macro_accuracy, the plain mean of the subjects, if the examples have a "subject". With --repeats N
every problem is answered N times, with seeds --seed to --seed + N - 1: accuracy is the mean of the
repeats, `accuracies` lists them, and stderr is that of the problems' means. A task is a module of
evals/ with load(split, path, limit), prompt(example), extract(completion, example) and
score(completion, example) in [0, 1]; for slow scorers also score_batch(completions, examples).
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial
from hashlib import blake2b
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads give up their core
import torch
import torch.distributed as dist
import tyro

sys.path.insert(0, __file__.rpartition("/evals/")[0])
from data.rows import read_json
from distributed.disk import from_first_rank, is_first_rank, lock, write_atomically
from distributed.groups import own_device
from evals import TRIAL, decoding, load_examples, load_task, results, samples
from evals.report import write_report
from evals.rewards import load_reward
from models import load_tokenizer
from rollout import make_engine


@dataclass
class Args(decoding.SamplerFlags):
    """Flags of evals/run.py and of evals/<task>.py. Sampling flags apply to every task."""

    model: str = ""
    """key of models.MODELS, or a directory in HF layout"""
    tasks: str = ""
    """names of files in evals/, or paths of your own that end in .py, separated by commas"""
    data: list[str] = field(default_factory=list)
    """TASK=SOURCE ...: a preset of the task, file (.jsonl, .csv, .parquet) or hub id; other tasks
    use their default. Of a single task SOURCE alone"""
    split: Literal["train", "validation", "test"] = "test"
    """split of a preset or a hub data set; a file has no splits"""
    completions: list[str] = field(default_factory=list)
    """TASK=FILE ..., of a single task FILE alone: score this .jsonl of {"index": i, "completion":
    text} instead of generating (index: row of the task's split)"""
    reward: str = ""
    """also report the mean of this shaped reward of evals/rewards.py"""
    limit: int | None = None
    """use only the first so many rows of a task"""
    rollout_backend: str = "auto"
    """engine of rollout.make_engine"""
    batch_size: int = 64
    """prompts decoded together; changes results only by rounding"""
    repeats: int | None = None
    """answers per problem, with seeds seed, seed + 1, ...; published AIME values have 8. Of several
    tasks only AIME is repeated"""
    out: str = ""
    """output directory, which must be new or empty; empty: a new one below runs/"""
    resume: str = ""
    """continue in this directory of an earlier run: its flags are the defaults, finished samples
    are kept"""


@dataclass
class Work:
    """A task, ready to be evaluated. A place is a (repeat, index)."""

    task: ModuleType
    examples: list
    reward: Callable | None
    settings: dict  # all that decides completions and verdicts, for result.json
    places: list  # that can be answered
    rows: Callable  # calls -> the rows of each, see samples.py
    most: int  # examples of a call
    counts: dict = field(default_factory=dict)  # of the lines of a file of completions


# completions of a file that are scored together: then rows are written and the bar moves
PART = 256
REPEATED = ("aime24", "aime25")  # tasks that --repeats applies to if there are several


def main(name=""):
    """Command line of evals/run.py, or of evals/<name>.py, whose --tasks is `name`. Unusable input
    ends in SystemExit with one line that says what to change. Of several tasks one with missing
    data is skipped; the exit status is then non-zero."""
    args = command_line(name)
    names = args.tasks.replace(",", " ").split()
    if not names or bool(args.model) == bool(args.completions):
        what = "either --model (generate and score) or --completions (only score)"
        raise SystemExit(f"give --tasks, such as --tasks gsm8k,math500, and {what}")
    if args.out and not args.resume and any(Path(args.out).glob("*")):
        another = "name another one, continue with --resume, or remove the old results"
        raise SystemExit(f"--out {args.out} is not empty: {another}")
    tasks = {task.NAME: task for task in map(load_task, names)}
    made, lost = evaluate(args, tasks)
    if lost:
        said = f"{len(lost)} of {len(tasks)} tasks not evaluated: {', '.join(lost)}"
        raise SystemExit(said)
    if made and len(tasks) == 1:  # on rank 0
        print(json.dumps(*made.values()), flush=True)


def command_line(task):
    """The flags; tasks are those of evals/<task>.py if there is a `task`, and with --resume DIR the
    flags of that run are the defaults."""
    about = f"Evaluate a model, or score completions, on {task or 'benchmarks'}."
    args = tyro.cli(Args, default=Args(tasks=task), description=about)
    if not args.resume:
        return args
    path = Path(args.resume) / "config.json"
    saved = read_json(path)
    saved.pop("command", "")
    try:
        return tyro.cli(Args, default=Args(**saved), description=about)
    except TypeError as error:
        raise SystemExit(f"{path} has no flags of an evaluation: {error}") from error


def by_task(flag, values, tasks):
    """-> {task: SOURCE} of the values of --data or --completions"""
    found = {}
    for value in values:
        name, _, source = value.partition("=")
        if name not in tasks:
            if len(tasks) > 1:
                known = f"give TASK=SOURCE, where TASK is one of {', '.join(tasks)}"
                raise SystemExit(f"--{flag} {value}: {known}")
            [name], source = tasks, value
        found[name] = source
    return found


def evaluate(args, tasks):
    """Evaluate the `tasks` {name: module} on all ranks, or score files of completions. -> {task:
    result} on rank 0, {task: why it was skipped}

    The files of a single task lie in the output directory itself, and its errors are raised.
    """
    data, files = by_task("data", args.data, tasks), by_task("completions", args.completions, tasks)
    rank, ranks = (0, 1) if files else own_rank()
    tokenizer = load_tokenizer(args.model) if args.model else None
    how = {"backend": args.rollout_backend, "max_batch_size": args.batch_size}
    # weights are read once the problems of a task are found
    engine = cache(lambda: make_engine(args.model, device=own_device(), **how))
    ready, made, lost = {}, {}, {}
    for name, task in tasks.items():
        try:
            reward = load_reward(args.reward, task) if args.reward else None
            source = data.get(name, "")
            load = partial(load_examples, task, args.split, source, args.limit)
            examples = from_first_rank(load)
            if reward:  # SystemExit if the examples do not suit it
                reward([TRIAL], examples[:1])
            settings = {key: getattr(args, key) for key in ("split", "limit", "reward")}
            settings |= {"data": source, "ranks": ranks, "torch": version("torch")}
            settings["evals_hash"] = hash_of_evals(task)
            work = task, examples, reward, settings
            if files:
                ready[name] = scoring(files.get(name, ""), args.repeats or 1, *work)
            else:
                flags = args if len(tasks) == 1 or name in REPEATED else replace(args, repeats=None)
                ready[name] = asking(flags, engine(), tokenizer, *work)
        except SystemExit as error:
            lost[name] = error
            if not rank and len(tasks) > 1:
                print(f"{name} is not evaluated: {error}", file=sys.stderr)
    if not ready:
        raise SystemExit("; ".join(map(str, lost.values())))

    # only now: a wrong --model or file of completions leaves no directory behind
    source = Path(args.model or args.completions[0]).name.removesuffix(".jsonl")
    default = f"runs/eval-{'-'.join(tasks):.60}-{source}-{time.strftime('%Y%m%d-%H%M%S')}"
    out = from_first_rank(partial(results.directory, args, default))
    with open(out / "config.json", "r+") as config:
        from_first_rank(partial(lock, config, out, "evaluation"))
        for name, work in ready.items():
            folder = out / name if len(tasks) > 1 else out
            rows = answer(work, folder, rank, ranks)
            if not rank:
                made[name] = results.summary(work, rows, args.reward)
                results.write_json(folder / "result.json", made[name])
                write_report(folder)
                write_atomically(out / "table.md", results.table(made, lost))
        if not rank:
            print(f"{results.table(made, lost)}\ndirectory: {out}", flush=True)
    return made, lost


def answer(work, folder, rank, ranks):
    """Answer and score this rank's share of the places that have no row in `folder` yet.

    -> on rank 0 the rows of all ranks, which are then in samples.jsonl; elsewhere None
    """
    done = from_first_rank(partial(results.begin, folder, work.settings))
    left = [place for place in work.places if place not in done]
    calls = samples.shares(left, work.most, ranks)[rank::ranks]
    if calls:  # a sandbox that does not work stops the run before anything is generated
        samples.scored(work.task, [{"index": 0, "completion": TRIAL}], work.examples)
    path = folder / (f"samples-{rank}.jsonl" if rank else "samples.jsonl")
    total = sum(end - first for _, first, end in calls)
    samples.write_scored(path, work.rows(calls), work.task, work.examples, work.reward, total)
    if ranks > 1:
        dist.barrier()
    if rank:
        return None
    rows = samples.gather(folder)
    if len(rows) != len(work.places):
        lacking = f"{folder} has {len(rows)} of {len(work.places)} samples"
        raise SystemExit(f"{lacking}: do all ranks see the same directory?")
    return rows


def own_rank():
    """-> rank, number of ranks. Ranks exchange samples through files that all must see."""
    if "RANK" in os.environ and not dist.is_initialized():
        # a rank may finish a long task much earlier than another
        dist.init_process_group("gloo", timeout=timedelta(days=2))
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def scoring(path, repeats, task, examples, reward, settings):
    """-> Work on a file of completions"""
    rows, counts = samples.given(task, examples, path, repeats)
    settings |= {"completions": path, "repeats": repeats}
    taken = lambda calls: ([rows[r, i] for i in range(first, end)] for r, first, end in calls)
    return Work(task, examples, reward, settings, sorted(rows), taken, PART, counts)


def asking(flags, engine, tokenizer, task, examples, reward, settings):
    """-> Work for an engine. Its settings are the flags, or else those of evals/decoding.py.

    SystemExit for settings that the engine cannot use, and for repeats that would all be the same.
    """
    model, style, name = engine.model, examples[0].get("style", ""), task.NAME
    sampling, repeats = decoding.chosen(flags, model, name, style)
    random = sampling["temperature"] or sampling["alg_temp"] or sampling["remasking"] == "random"
    if repeats > 1 and not random:
        same = f"--repeats {repeats}: all repeats are the same without randomness"
        raise SystemExit(f"{same}; set --temperature above 0")
    if sampling["block_length"] or sampling["schedule"] != "ascending":  # which has its own
        sampling["block_length"] = engine.block_length(sampling["block_length"])
    checked = engine.validate(**sampling)  # SystemExit for what the engine cannot do
    if is_first_rank():
        print(f"{name}: {checked}", file=sys.stderr)
    prompts = [*map(task.prompt, examples)]
    wording = getattr(task, "VERSION", name)  # one name, or one for each style of examples
    folders = filter(None, (model.sources[0], *model.sources[1]))
    files = [path for place in folders for path in sorted(Path(place).glob("*.safetensors"))]
    weights = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    settings |= {
        "model": flags.model,
        "weights": digest(weights) if weights else "",  # "": random weights
        "rollout_backend": flags.rollout_backend,
        "engine": f"{type(engine).__name__} {getattr(engine, 'version', '')}".strip(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "dtype": str(engine.dtype).removeprefix("torch."),
        "prompt": wording[style] if isinstance(wording, dict) else wording,
        "prompts_hash": digest(prompts),
        "examples_hash": digest(examples),
        "repeats": repeats,
        **sampling,
        "eos_token_ids": list(model.eos_token_ids),
        "batch_size": flags.batch_size,
    }
    places = [*product(range(repeats), range(len(examples)))]
    rows = partial(samples.generated, engine, tokenizer, prompts, **sampling)
    # continuous batching: a call gets more prompts than fit into a batch
    most = flags.batch_size * (4 if engine.refills else 1)
    return Work(task, examples, reward, settings, places, rows, most)


def hash_of_evals(task):
    """Of the code that asks and scores: verdicts of two versions do not belong in one result."""
    files = {*Path(__file__).parent.glob("*.py"), Path(getattr(task, "__file__", __file__))}
    return digest(path.read_text("utf-8") for path in sorted(files))


def digest(values):
    """Hash of JSON values, one at a time: the tests of a contest problem are megabytes."""
    key = blake2b(digest_size=6)
    for value in values:
        key.update(f"{json.dumps(value, sort_keys=True, default=str)}\n".encode())  # dates: str
    return key.hexdigest()


if __name__ == "__main__":
    main()
