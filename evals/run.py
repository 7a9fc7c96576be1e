"""Benchmarks over one loaded engine, and the command line that all files of benchmarks share.

    python evals/run.py --model tiny-sdar --tasks countdown,sudoku,gsm8k --data gsm8k=test.jsonl
    torchrun --standalone --nproc-per-node 8 evals/run.py --model sdar-8b --tasks gsm8k,math500,mmlu,humaneval,aime24
    python evals/run.py --resume runs/eval-...                               go on: finished samples are kept
    python evals/countdown.py --model tiny-sdar                              one task; this too goes on with --resume
    python evals/countdown.py --completions samples.jsonl --data cd3         only score rows {"index": i, "completion": text}

Lengths, steps and temperatures that no flag gives are those of evals/decoding.py: the setting of the task's published number
for this model. Ranks share the problems of every task, and their number changes no completion. What is written and how a run
goes on stands in evals/results.py.
The last line on stdout of one task is one JSON object: task, n, accuracy, stderr, answered, truncated, ..., settings;
macro_accuracy too, the plain mean of the subjects, where the examples have a "subject". With --repeats N every problem is
answered N times, with seeds --seed to --seed + N - 1: accuracy is the mean of the repeats, `accuracies` has each, stderr is
that of the problems' means.
A task is a module of evals/ with load(split, path, limit), prompt(example), extract(completion, example) and
score(completion, example) in [0, 1]; where scoring is slow, score_batch(completions, examples) may score many at once.
"""

import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, fields
from datetime import timedelta
from hashlib import blake2b
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Literal

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from evals import TRIAL, decoding, load_task, results, samples


@dataclass
class Sampling:
    """What goes to engine.generate. None: the setting of evals/decoding.py."""

    gen_length: int | None = None
    """tokens generated per prompt: whole blocks"""
    block_length: int | None = None
    """tokens per block; of block-causal models what their configuration says"""
    denoising_steps: int | None = None
    """denoising steps per block"""
    remasking: str | None = None
    """how positions are chosen for revealing; an unknown name prints those that the engine has"""
    confidence_threshold: float | None = None
    """dynamic remasking reveals every position above this confidence; static remasking does not look at it"""
    factor: float = 1.0
    """low_confidence_factor: Fast-dLLM's f, larger reveals more at once"""
    eb_threshold: float = 0.35
    """entropy_bounded: nats revealed at once, SDAR's default"""
    editing_threshold: float | None = None
    """LLaDA2.1: replace revealed tokens by others of a higher probability than this (its authors: 0.5, or 0 for speed)"""
    max_post_steps: int = 16
    """LLaDA2.1: most steps that only edit a block"""
    cache: str | None = None
    """of bidirectional models: none, or Fast-dLLM's approximate prefix or dual"""
    schedule: str | None = None
    """of bidirectional models, how many tokens a step reveals: uniform, timesteps (Dream) or ascending (ASS)"""
    alg_temp: float = 0.0
    """of bidirectional models: Dream's temperature of a drawn order; 0: the most confident first"""
    eos_policy: str | None = None
    """of bidirectional models: none, suppress, demote or eoser, which keep answers from ending early"""
    stop_at_eos: bool = True
    """early exit behind the block that holds an end of text (--no-stop-at-eos: all blocks); the same answers"""
    temperature: float | None = None
    """sampling temperature; 0 is greedy"""
    top_k: int = 0
    """sample from so many most probable tokens alone; 0: from all"""
    top_p: float | None = None
    """sample from the fewest tokens whose probabilities reach this"""
    seed: int = 0
    """sampling seed; sample i draws from (seed, i)"""


SAMPLING = tuple(field.name for field in fields(Sampling))


@dataclass
class Args(Sampling):
    """Flags of evals/<task>.py."""

    model: str = ""
    """key of models.MODELS, or a directory in HF layout"""
    completions: str = ""
    """score this .jsonl of {"index": i, "completion": text} instead of generating (index: row of the task's split)"""
    data: str = ""
    """preset of the task, file (.jsonl, .csv, .parquet) or hub id; empty: the task's default"""
    split: Literal["train", "validation", "test"] = "test"
    """split of a preset or a hub data set; a file has no splits"""
    limit: int | None = None
    """use only the first so many rows"""
    rollout_backend: str = "auto"
    """engine of rollout.make_engine"""
    batch_size: int = 64
    """prompts decoded together; results do not depend on it beyond rounding"""
    repeats: int | None = None
    """answers per problem, each of its own seed: seed, seed + 1, ...; published AIME values have 8"""
    reward: str = "none"
    """also report the mean of this shaped reward of evals/rewards.py"""
    out: str = ""
    """output directory, refused if results lie in it; empty: runs/eval-<task>-<model>-<time>"""
    resume: str = ""
    """go on in this directory of an earlier run, whose flags are the defaults: finished samples are kept"""


@dataclass
class ManyArgs(Sampling):
    """Flags of evals/run.py. Those of engine.generate go to every task."""

    model: str = ""
    """key of models.MODELS, or a directory in HF layout"""
    tasks: str = ""
    """names of files of evals/ between commas"""
    data: tuple[str, ...] = ()
    """TASK=SOURCE ...: a preset of the task, file or hub id; of other tasks their default"""
    limit: int | None = None
    """use only the first so many rows of every task"""
    rollout_backend: str = "auto"
    """engine of rollout.make_engine"""
    batch_size: int = 64
    """prompts decoded together; results do not depend on it beyond rounding"""
    repeats: int | None = None
    """answers per problem of aime24 and aime25; None: 8 where the published setting draws"""
    out: str = ""
    """output directory, refused if results lie in it; empty: runs/eval-<model>-<time>"""
    resume: str = ""
    """go on in this directory of an earlier run, whose flags are the defaults: finished samples are kept"""


PART = 256  # completions of a file that are scored together: the bar moves and rows are written
REPEATED = ("aime24", "aime25")  # tasks that --repeats of evals/run.py is for


def main(task_name: str) -> None:
    """Command line of evals/<task_name>.py. Unusable input ends in SystemExit with one line that says what to change."""
    from evals.rewards import (
        load_reward,
    )  # here, because the tasks that it imports import this file

    args = results.command_line(
        Args, task_name, f"Evaluate a model, or score given completions, on {task_name}."
    )
    task = import_module(f"evals.{task_name}")
    if bool(args.model) == bool(args.completions):
        raise SystemExit("give either --model (generate and score) or --completions (only score)")
    if args.resume and args.completions:
        raise SystemExit(
            f"--resume {args.resume} only scored {args.completions}: score again, with a new --out"
        )
    reward = load_reward(args.reward, task) if args.reward != "none" else None
    check_counts(args.batch_size, args.limit, args.repeats)
    if not args.resume:
        results.keep_results(args.out)
    examples = task.load(args.split, args.data, args.limit)
    if not examples:
        raise SystemExit(f"--data {args.data}: no rows")
    if reward:
        reward(
            [TRIAL], examples[:1]
        )  # SystemExit for examples that it does not fit, before anything is generated

    rank, ranks, device = place() if args.model else (0, 1, "cpu")
    name = Path(args.model).name if args.model else Path(args.completions).stem
    default = f"runs/eval-{task_name}-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    source = {
        "data": args.data,
        "split": args.split,
        "limit": args.limit,
        "torch": version("torch"),
    }
    with ExitStack() as held:  # by rank 0, the lock of the directory
        take = lambda: held.enter_context(results.directory(args, task_name, default))
        if args.model:
            out = broadcast(take) if args.resume else None
            engine, tokenizer = load_engine(
                args.model, args.rollout_backend, device, args.batch_size
            )
            prompts = [task.prompt(example) for example in examples]
            source |= task_settings(
                vars(args), engine, task_name, task, examples, prompts, args.repeats
            )
            source |= {"reward": args.reward} if reward else {}
            print_plan(engine, source, rank)
            out = out or broadcast(take)
            broadcast(lambda: results.begin(task_name, out, source, args.resume))
            rows = evaluate(
                task_name,
                task,
                examples,
                prompts,
                engine,
                tokenizer,
                source,
                args.batch_size,
                out,
                reward,
            )
            counts, repeats = {}, source["repeats"]
        else:
            repeats = args.repeats or 1
            rows, faults, missing = samples.given(args.completions, len(examples), repeats)
            samples.name_faults(args.completions, faults, "rows not used")
            samples.name_faults(
                args.completions, missing, "problems without a completion, not in the mean: index"
            )
            counts = {"unused": len(faults), "missing": len(missing)}
            source |= {
                "evals_hash": hash_of_evals(),
                "repeats": repeats,
                "completions": args.completions,
            }
            out = take()
            with tqdm(total=len(rows), desc=task_name, disable=None) as bar:
                parts = (rows[first : first + PART] for first in range(0, len(rows), PART))
                samples.write_scored(out / "samples.jsonl", parts, task, examples, reward, bar)
        if rank:
            return
        result = samples.summary(task_name, rows, examples, repeats) | counts | {"settings": source}
        if reward:
            result["reward"] = {"name": args.reward} | result["reward"]
        results.write(out / "result.json", result)
    print(json.dumps(result), flush=True)


def many() -> None:
    """Command line of evals/run.py. A task whose data is missing costs one line and the exit status, not the other tasks."""
    args = results.command_line(ManyArgs, "run", "Evaluate a model on many benchmarks.")
    names = list(dict.fromkeys(filter(None, args.tasks.replace(",", " ").split())))
    if not (args.model and names):
        raise SystemExit("give --model and --tasks, such as --tasks gsm8k,math500")
    check_counts(args.batch_size, args.limit, args.repeats)
    tasks = {name: load_task(name) for name in names}
    data = dict(item.partition("=")[::2] for item in args.data)
    if unknown := [
        item for item in args.data if "=" not in item or item.partition("=")[0] not in tasks
    ]:
        raise SystemExit(
            f"--data {' '.join(unknown)}: give TASK=SOURCE, where TASK is one of {', '.join(names)}"
        )
    if not args.resume:
        results.keep_results(args.out, names)

    rank, ranks, device = place()
    examples, lost = {}, {}
    for name, task in tasks.items():
        try:
            examples[name] = task.load("test", data.get(name, ""), args.limit)
            if not examples[name]:
                raise SystemExit(f"--data {data.get(name)}: no rows")
        except SystemExit as error:
            lose(lost, name, str(error).replace("--data FILE", f"--data {name}=FILE"), rank)
    same_everywhere(list(examples))
    if not examples:
        raise SystemExit(f"none of {', '.join(names)} can be evaluated")

    default = f"runs/eval-{Path(args.model).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    with ExitStack() as held:  # by rank 0, the lock of the directory
        take = lambda: held.enter_context(results.directory(args, "run", default))
        out = broadcast(take) if args.resume else None
        engine, tokenizer = load_engine(args.model, args.rollout_backend, device, args.batch_size)
        out = out or broadcast(take)  # not before: a wrong --model leaves none behind
        made = {name: result for name, result in results.finished(out).items() if name not in tasks}
        for name, loaded in examples.items():
            task, folder = tasks[name], out / name
            prompts = [task.prompt(example) for example in loaded]
            source = {
                "data": data.get(name, ""),
                "split": "test",
                "limit": args.limit,
                "torch": version("torch"),
            }
            repeats = args.repeats if name in REPEATED else None
            try:
                source |= task_settings(vars(args), engine, name, task, loaded, prompts, repeats)
                print_plan(engine, source, rank)
            except SystemExit as error:
                lose(lost, name, str(error), rank)
                continue
            broadcast(
                lambda name=name, folder=folder, source=source: results.begin(
                    name, folder, source, args.resume
                )
            )
            rows = evaluate(
                name, task, loaded, prompts, engine, tokenizer, source, args.batch_size, folder
            )
            if rank == 0:
                made[name] = samples.summary(name, rows, loaded, source["repeats"]) | {
                    "settings": source | {"ranks": ranks}
                }
                results.write(folder / "result.json", made[name])
                results.write_all(out, args.model, made, lost)
        if rank == 0:
            results.write_all(out, args.model, made, lost)
            print(results.table(made, lost) + f"\n{out}/results.json", flush=True)
    if lost:
        raise SystemExit(
            f"{len(lost)} of {len(names)} tasks not evaluated: {', '.join(lost)}"
            if rank == 0
            else 1
        )


def check_counts(batch_size: int, limit: int | None, repeats: int | None) -> None:
    """SystemExit for counts below 1."""
    if batch_size < 1 or (limit is not None and limit < 1):
        raise SystemExit(f"--batch-size {batch_size} and --limit {limit} must be at least 1")
    if repeats is not None and repeats < 1:
        raise SystemExit(f"--repeats {repeats} must be at least 1")


def place() -> tuple[int, int, str]:
    """-> rank, number of ranks, device. Ranks wait for one another at the ends of tasks; samples go through files, which all
    ranks must see."""
    import torch
    import torch.distributed as dist

    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group(
            "gloo", timeout=timedelta(days=2)
        )  # a rank may be done with a long task much earlier
    return (
        (dist.get_rank(), dist.get_world_size(), device)
        if dist.is_initialized()
        else (0, 1, device)
    )


def broadcast(make: object) -> object:
    """make() of rank 0, on every rank; a SystemExit of it too."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return make()
    value = [None, None]
    if dist.get_rank() == 0:
        try:
            value[0] = make()
        except SystemExit as error:
            value[1] = str(error)
    dist.broadcast_object_list(value, src=0)
    if value[1] is not None:
        raise SystemExit(value[1] if dist.get_rank() == 0 else 1)
    return value[0]


def same_everywhere(names: list[str]) -> None:
    """SystemExit where ranks could not load the same tasks: they would mix up the samples of two."""
    import torch.distributed as dist

    if dist.is_initialized():
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, names)
        if uneven := sorted(set().union(*everywhere) - set.intersection(*map(set, everywhere))):
            raise SystemExit(
                f"only some ranks could load {', '.join(uneven)}; start again"
                if dist.get_rank() == 0
                else 1
            )


def load_engine(model: str, backend: str, device: str, batch_size: int) -> tuple[object, object]:
    """-> engine, tokenizer"""
    from models import load_tokenizer
    from rollout import make_engine

    tokenizer = load_tokenizer(model)
    return make_engine(model, backend=backend, device=device, max_batch_size=batch_size), tokenizer


def hash_of_evals() -> str:
    """Of the code that asks and scores: verdicts of two versions do not belong in one result."""
    texts = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return blake2b(b"".join(texts), digest_size=6).hexdigest()


def hash_of(rows: list) -> str:
    """Of values that JSON can hold. Of examples, with what only the scorer reads: other answers to the same questions tell."""
    key = blake2b(digest_size=6)
    for row in rows:  # one by one: tests of contests are megabytes each
        key.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    return key.hexdigest()


def task_settings(
    flags: dict,
    engine: object,
    name: str,
    task: ModuleType,
    examples: list,
    prompts: list,
    repeats: int | None,
) -> dict:
    """All that decides the completions of a task, for result.json: `flags` of the command line, else evals/decoding.py.
    SystemExit for repeats that would be the same."""
    model_type = engine.model.checkpoint_config["model_type"]
    known = decoding.settings(flags["model"], model_type, name, examples[0].get("style", ""))
    sampling = {key: known.get(key) if flags[key] is None else flags[key] for key in SAMPLING}
    repeats = repeats or known["repeats"]
    if repeats > 1 and not (
        sampling["temperature"] or sampling["alg_temp"] or sampling["remasking"] == "random"
    ):
        raise SystemExit(
            f"--repeats {repeats}: without a draw all repeats are the same; set --temperature above 0"
        )
    own_blocks = sampling["schedule"] == "ascending" and not sampling["block_length"]
    version_of = getattr(
        task, "VERSION", name
    )  # of the prompt: one name, or one for each style of examples
    shots = sum(message["role"] == "assistant" for message in prompts[0])
    return {
        "model": flags["model"],
        "weights": stamp(engine.model.sources),
        "rollout_backend": flags["rollout_backend"],
        "engine": f"lmdeploy {engine.version}"
        if hasattr(engine, "version")
        else type(engine).__name__,
        "device": device_name(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "prompt": version_of
        if isinstance(version_of, str)
        else version_of[examples[0].get("style", "")],
        "prompts_hash": hash_of(prompts),
        "examples_hash": hash_of(examples),
        "evals_hash": hash_of_evals(),
        "shots": task.shots(examples[0]) if hasattr(task, "shots") else shots,
        "repeats": repeats,
        **sampling,
        "block_length": None if own_blocks else engine.block_length(sampling["block_length"]),
        "eos_token_ids": list(engine.model.eos_token_ids),
        "batch_size": flags["batch_size"],
    }


def stamp(sources: tuple) -> str:
    """Names, sizes and times of the weights' files of (model directory, adapter directories), so that a resumed run knows
    weights that have changed; "" of random ones."""
    folders = [Path(folder) for folder in (sources[0], *sources[1]) if folder]
    files = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for f in folders
        for path in sorted(f.glob("*.safetensors"))
    ]
    return blake2b(json.dumps(files).encode(), digest_size=6).hexdigest() if files else ""


def device_name(device: object) -> str:
    """ "cpu", or the name of the GPU."""
    import torch

    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"


def generation(settings: dict) -> dict:
    """What of a task's settings engine.generate and engine.plan take."""
    return {key: settings[key] for key in SAMPLING}


def print_plan(engine: object, settings: dict, rank: int) -> None:
    """One line on stderr. SystemExit for settings that the engine cannot take."""
    plan = engine.plan(**generation(settings))
    if rank == 0:
        print(plan, file=sys.stderr)


def evaluate(
    name: str,
    task: ModuleType,
    examples: list[dict],
    prompts: list[list[dict]],
    engine: object,
    tokenizer: object,
    settings: dict,
    batch_size: int,
    folder: Path,
    reward: object = None,
) -> list[dict] | None:
    """Answer and score what `folder` has no row of, this rank its share. -> on rank 0 the rows of all ranks, which then lie in
    samples.jsonl; elsewhere None"""
    import torch.distributed as dist

    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    kept = broadcast(lambda: samples.gather(folder))
    done = {(row.get("repeat", 0), row["index"]) for row in kept}
    together = batch_size * (
        4 if engine.refills else 1
    )  # prompts of a call: some wait for the places of those that end
    calls = samples.shares(done, len(examples), settings["repeats"], together, ranks)[rank::ranks]
    if calls:  # a sandbox that does not work ends the run before anything is generated
        samples.scored(task, [{"index": 0, "completion": TRIAL}], examples)
    batches = samples.generated(
        engine, tokenizer, prompts, calls, settings["repeats"], **generation(settings)
    )
    if rank == 0 and kept:
        print(f"{name}: {len(kept)} finished samples are kept", file=sys.stderr)
    total, title = (
        sum(end - first for _, first, end in calls),
        name if ranks == 1 else f"{name} (rank 0 of {ranks})",
    )
    with tqdm(total=total, desc=title, disable=None if rank == 0 else True) as bar:
        path = folder / (f"samples-{rank}.jsonl" if rank else "samples.jsonl")
        samples.write_scored(path, batches, task, examples, reward, bar)
    if dist.is_initialized():
        dist.barrier()
    if rank:
        return None
    rows, asked = samples.gather(folder), len(examples) * settings["repeats"]
    if len(rows) != asked:
        raise SystemExit(
            f"{folder} has {len(rows)} of {asked} samples of {name}: do all ranks see the same directory?"
        )
    return rows


def lose(lost: dict[str, str], name: str, message: str, rank: int) -> None:
    """Note a task that cannot be evaluated, and say it in one line."""
    lost[name] = message
    if rank == 0:
        print(f"{name} is not evaluated: {message}", file=sys.stderr)


def tagged_answer(completion: str) -> str | None:
    """Stripped content of the last complete <answer>...</answer>; None where there is none."""
    last_close = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, max(last_close, 0))
    if start < 0:
        return None
    # of several closing tags after the last opening one, the first counts
    return completion[start + len("<answer>") : completion.index("</answer>", start)].strip()


if __name__ == "__main__":
    many()
