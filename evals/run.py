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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

sys.path.insert(0, __file__.rpartition("/evals/")[0])
from distributed.disk import from_first_rank, is_first_rank, write_atomically
from evals import TRIAL, decoding, load_examples, load_task, results, samples
from evals.rewards import load_reward
from models import load_tokenizer
from models.config import architecture
from rollout import make_engine
from run.flags import MAX
from run.report import write_report


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

    RANGES = dict.fromkeys(("batch_size", "limit", "repeats"), (1, MAX))  # of numbers


# completions of a file that are scored together: then rows are written and the bar moves
PART = 256
REPEATED = ("aime24", "aime25")  # tasks that --repeats applies to if there are several


def main(name=""):
    """Command line of evals/run.py, or of evals/<name>.py, whose --tasks is `name`. Unusable input
    ends in SystemExit with one line that says what to change. Of several tasks one with missing
    data is skipped; the exit status is then non-zero."""
    args = results.command_line(Args, name)
    names = args.tasks.replace(",", " ").split()
    if not names:
        flags = "--model (or --completions) and --tasks, such as --tasks gsm8k,math500"
        raise SystemExit(f"give {flags}")
    tasks = {task.NAME: task for task in map(load_task, names)}
    data, files = (by_task(args, flag, tasks) for flag in ("data", "completions"))
    if files and tasks.keys() - files.keys():
        raise SystemExit(f"--completions: no file for {', '.join(tasks.keys() - files.keys())}")
    made, lost = evaluate(args, tasks, data, files)
    if lost:
        said = f"{len(lost)} of {len(tasks)} tasks not evaluated: {', '.join(lost)}"
        raise SystemExit(said if is_first_rank() else 1)
    if made and len(tasks) == 1:  # on rank 0
        print(json.dumps(*made.values()), flush=True)


def by_task(args, flag, tasks):
    """-> {task: SOURCE} of the values of --data or --completions"""
    found = {}
    for given in getattr(args, flag):
        name, _, source = given.partition("=")
        if name in tasks:
            found[name] = source
        elif len(tasks) == 1:
            found |= dict.fromkeys(tasks, given)
        else:
            known = f"give TASK=SOURCE, where TASK is one of {', '.join(tasks)}"
            raise SystemExit(f"--{flag} {given}: {known}")
    return found


def evaluate(args, tasks, data, files):
    """Score the `tasks` {name: module} on `data` {name: --data}, on all ranks, or their `files` of
    completions. -> {task: result} on rank 0, {task: why it was skipped}

    The files of a single task lie in the output directory itself, and its errors are raised.
    """
    alone = len(tasks) == 1
    if bool(args.model) == bool(files):
        raise SystemExit("give either --model (generate and score) or --completions (only score)")
    if args.resume and files:
        again = f"score {', '.join(files.values())} again, with a new --out"
        raise SystemExit(f"--resume {args.resume} continues a generation: {again}")
    results.refuse_overwriting(args)
    device, rank, ranks = ("cpu", 0, 1) if files else device_and_rank()
    examples, rewards, settings, read, made, lost = {}, {}, {}, {}, {}, {}

    @contextmanager
    def skipped_on_exit(name):
        """A task that ends in SystemExit is skipped, unless it is the only one."""
        try:
            yield
        except SystemExit as error:
            if alone:
                raise
            lost[name] = str(error).replace("--data FILE", f"--data {name}=FILE")
            if not rank:
                print(f"{name} is not evaluated: {lost[name]}", file=sys.stderr)

    for name, task in tasks.items():
        with skipped_on_exit(name):
            reward = load_reward(args.reward, task) if args.reward else None
            load = partial(load_examples, task, args.split, data.get(name, ""), args.limit)
            rows = from_first_rank(load)
            if reward:  # SystemExit if the examples do not suit it
                reward([TRIAL], rows[:1])
            examples[name], rewards[name] = rows, reward
    if args.model and examples:
        tokenizer = load_tokenizer(args.model)
        backend = {"backend": args.rollout_backend, "max_batch_size": args.batch_size}
        engine = make_engine(args.model, device=device, **backend)
    for name, rows in examples.items():
        how = {key: getattr(args, key) for key in ("split", "limit", "reward")}
        how |= {"data": data.get(name, ""), "ranks": ranks, "repeats": args.repeats or 1}
        how |= {"torch": version("torch"), "evals_hash": hash_of_evals(tasks[name])}
        with skipped_on_exit(name):
            if files:
                how["completions"] = files[name]
                read[name] = samples.given(tasks[name], rows, files[name], how["repeats"])
            else:
                how |= task_settings(args, engine, name, tasks[name], rows, alone)
            settings[name] = how
    if not settings:
        raise SystemExit(f"none of {', '.join(tasks)} can be evaluated")

    # only now: a wrong --model or file of completions leaves no directory behind
    with ExitStack() as held:  # on rank 0 the lock of the directory
        source = Path(args.model).name or "-".join(Path(file).stem for file in files.values())
        parts = ["runs/eval", *(tasks if alone else []), source, time.strftime("%Y%m%d-%H%M%S")]
        out = from_first_rank(partial(results.take_directory, args, "-".join(parts), held))
        for name, how in settings.items():
            folder = out if alone else out / name
            scoring, more = (tasks[name], examples[name], rewards[name]), {}
            from_first_rank(partial(results.begin, name, folder, how, args.resume))
            if files:
                rows, more = read[name]
                parts = (rows[first : first + PART] for first in range(0, len(rows), PART))
                samples.write_scored(folder / "samples.jsonl", parts, *scoring, len(rows), name)
            else:
                rows = answer(folder, name, *scoring, how, engine, tokenizer, rank, ranks)
            if not rank:
                result = results.summary(name, rows, examples[name], how["repeats"], args.reward)
                made[name] = result | more | {"settings": how}
                results.write_json(folder / "result.json", made[name])
                write_report(folder)
                if not alone:
                    write_atomically(out / "table.md", results.table(made, lost))
        if not rank:
            shown = "" if alone else results.table(made, lost) + "\n"
            print(f"{shown}directory: {out}", flush=True)
    return made, lost


def answer(folder, name, task, examples, reward, settings, engine, tokenizer, rank, ranks):
    """Answer and score this rank's share of the problems that have no row in `folder` yet.

    -> on rank 0 the rows of all ranks, which are then in samples.jsonl; elsewhere None
    """
    repeats, prompts = settings["repeats"], [task.prompt(example) for example in examples]
    done = from_first_rank(lambda: {*map(samples.key, samples.gather(folder))})
    # continuous batching: a call gets more prompts than fit into a batch
    together = settings["batch_size"] * (4 if engine.refills else 1)
    calls = samples.shares(done, len(examples), repeats, together, ranks)[rank::ranks]
    if calls:  # a sandbox that does not work stops the run before anything is generated
        samples.scored(task, [{"index": 0, "completion": TRIAL}], examples)
    batches = samples.generated(engine, tokenizer, prompts, calls, **generation(settings))
    if rank == 0 and done:
        print(f"{name}: {len(done)} finished samples are kept", file=sys.stderr)
    path = folder / (f"samples-{rank}.jsonl" if rank else "samples.jsonl")
    total = sum(end - first for _, first, end in calls)
    samples.write_scored(path, batches, task, examples, reward, total, name)
    if ranks > 1:
        dist.barrier()
    if rank:
        return None
    rows, asked = samples.gather(folder), len(examples) * repeats
    if len(rows) != asked:
        lacking = f"{folder} has {len(rows)} of {asked} samples of {name}"
        raise SystemExit(f"{lacking}: do all ranks see the same directory?")
    return rows


def device_and_rank():
    """-> device, rank, number of ranks. Ranks exchange samples through files that all must see."""
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)
    if "RANK" in os.environ and not dist.is_initialized():
        # a rank may finish a long task much earlier than another
        dist.init_process_group("gloo", timeout=timedelta(days=2))
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return device, *ranks


def task_settings(args, engine, name, task, examples, alone):
    """Everything that decides the completions of a task: flags, or else evals/decoding.py. -> part
    of result.json

    SystemExit for settings that the engine cannot use, and for repeats that would all be the same.
    """
    model, style = engine.model, examples[0].get("style", "")
    prompts = [task.prompt(example) for example in examples]
    known = decoding.settings(args.model, architecture(model.checkpoint_config), name, style)
    sampling = decoding.chosen(args, known)
    repeats = (args.repeats if alone or name in REPEATED else None) or known["repeats"]
    random = sampling["temperature"] or sampling["alg_temp"] or sampling["remasking"] == "random"
    if repeats > 1 and not random:
        same = f"--repeats {repeats}: all repeats are the same without randomness"
        raise SystemExit(f"{same}; set --temperature above 0")
    own_blocks = sampling["schedule"] == "ascending" and not sampling["block_length"]
    block_length = None if own_blocks else engine.block_length(sampling["block_length"])
    prompt = getattr(task, "VERSION", name)  # one name, or one for each style of examples
    folders = [Path(folder) for folder in (model.sources[0], *model.sources[1]) if folder]
    files = [path for folder in folders for path in sorted(folder.glob("*.safetensors"))]
    weights = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    on_gpu = torch.device(engine.device).type == "cuda"
    settings = {
        "model": args.model,
        "weights": digest(weights) if weights else "",  # "": random weights
        "rollout_backend": args.rollout_backend,
        "engine": f"{type(engine).__name__} {getattr(engine, 'version', '')}".strip(),
        "device": torch.cuda.get_device_name(engine.device) if on_gpu else "cpu",
        "dtype": str(engine.dtype).removeprefix("torch."),
        "prompt": prompt[style] if isinstance(prompt, dict) else prompt,
        "prompts_hash": digest(prompts),
        "examples_hash": digest(examples),
        "repeats": repeats,
        **sampling,
        "block_length": block_length,
        "eos_token_ids": list(model.eos_token_ids),
        "batch_size": args.batch_size,
    }
    checked = engine.validate(**generation(settings))  # SystemExit for what the engine cannot do
    if is_first_rank():
        print(f"{name}: {checked}", file=sys.stderr)
    return settings


def generation(settings):
    """The settings that engine.generate takes."""
    return {key: settings[key] for key in decoding.SAMPLING}


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
