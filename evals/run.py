"""Benchmarks on one loaded engine, and the command line that all benchmark files share.

    python evals/run.py --model tiny-sdar --tasks countdown,sudoku,gsm8k --data gsm8k=test.jsonl
    torchrun --standalone --nproc-per-node 8 evals/run.py --model sdar-8b --tasks gsm8k,math500,mmlu,humaneval,aime24
    python evals/run.py --resume runs/eval-...                               continue: finished samples are kept
    python evals/countdown.py --model tiny-sdar                              one task; --resume works here too
    python evals/countdown.py --completions samples.jsonl --data cd3         only score rows {"index": i, "completion": text}

The defaults of lengths, steps and temperatures come from evals/decoding.py: the settings of the published number for this
model and task. Ranks share the problems of every task; the number of ranks changes no completion. evals/results.py describes
the output directory.
For one task the last line on stdout is a JSON object: task, n, accuracy, stderr, answered, truncated, ..., settings, and
macro_accuracy, the plain mean of the subjects, if the examples have a "subject". With --repeats N every problem is answered
N times, with seeds --seed to --seed + N - 1: accuracy is the mean of the repeats, `accuracies` lists them, and stderr is that
of the problems' means.
A task is a module of evals/ with load(split, path, limit), prompt(example), extract(completion, example) and
score(completion, example) in [0, 1]; for slow scorers also score_batch(completions, examples).
"""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch
import torch.distributed as dist
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from evals import TRIAL, decoding, load_task, results, samples
from evals.rewards import load_reward
from models import load_tokenizer
from models.atomic import from_first_rank, is_first_rank, write_atomically
from rollout import make_engine


@dataclass
class Sampling:
    """Arguments of engine.generate. None: the setting of evals/decoding.py."""

    gen_length: int | None = None
    """tokens generated per prompt, a multiple of the block length"""
    block_length: int | None = None
    """tokens per block; fixed by their configuration for block-causal models"""
    denoising_steps: int | None = None
    """denoising steps per block"""
    remasking: str | None = None
    """rule that chooses the positions to reveal; an unknown name prints the engine's rules"""
    confidence_threshold: float | None = None
    """dynamic remasking reveals every position above this confidence; static remasking ignores it"""
    factor: float = 1.0
    """low_confidence_factor: Fast-dLLM's f; larger values reveal more per step"""
    eb_threshold: float = 0.35
    """entropy_bounded: nats revealed per step; SDAR's default"""
    editing_threshold: float | None = None
    """LLaDA2.1: replace a revealed token by one more probable than this (its authors: 0.5, or 0 for speed)"""
    max_post_steps: int = 16
    """LLaDA2.1: maximum number of steps that only edit a block"""
    cache: str | None = None
    """bidirectional models: none, or Fast-dLLM's approximate prefix or dual cache"""
    schedule: str | None = None
    """bidirectional models: tokens per step, uniform, timesteps (Dream) or ascending (ASS)"""
    alg_temp: float = 0.0
    """bidirectional models: Dream's temperature for a random order; 0: most confident first"""
    eos_policy: str | None = None
    """bidirectional models: none, suppress, demote or eoser, which keep answers from ending early"""
    stop_at_eos: bool = True
    """stop after the block with the end of text (--no-stop-at-eos: all blocks); same answers"""
    temperature: float | None = None
    """sampling temperature; 0 is greedy"""
    top_k: int = 0
    """sample only from this many most probable tokens; 0: from all"""
    top_p: float | None = None
    """sample from the fewest tokens whose probabilities add up to this"""
    seed: int = 0
    """sampling seed; sample i draws from (seed, i)"""


SAMPLING = tuple(field.name for field in fields(Sampling))


@dataclass
class Common(Sampling):
    """Flags that evals/run.py and evals/<task>.py share."""

    model: str = ""
    """key of models.MODELS, or a directory in HF layout"""
    limit: int | None = None
    """use only the first so many rows of a task"""
    rollout_backend: str = "auto"
    """engine of rollout.make_engine"""
    batch_size: int = 64
    """prompts decoded together; changes results only by rounding"""
    repeats: int | None = None
    """answers per problem, with seeds seed, seed + 1, ...; published AIME values have 8. evals/run.py repeats only AIME"""
    out: str = ""
    """output directory, which must hold no results; empty: a new one below runs/"""
    resume: str = ""
    """continue in this directory of an earlier run: its flags are the defaults, finished samples are kept"""


@dataclass
class Args(Common):
    """Flags of evals/<task>.py."""

    completions: str = ""
    """score this .jsonl of {"index": i, "completion": text} instead of generating (index: row of the task's split)"""
    data: str = ""
    """preset of the task, file (.jsonl, .csv, .parquet) or hub id; empty: the task's default"""
    split: Literal["train", "validation", "test"] = "test"
    """split of a preset or a hub data set; a file has no splits"""
    reward: str = "none"
    """also report the mean of this shaped reward of evals/rewards.py"""


@dataclass
class ManyArgs(Common):
    """Flags of evals/run.py. Sampling flags apply to every task."""

    tasks: str = ""
    """names of files in evals/, separated by commas"""
    data: tuple[str, ...] = ()
    """TASK=SOURCE ...: a preset of the task, file or hub id; other tasks use their default"""


PART = (
    256  # completions of a file that are scored together: then rows are written and the bar moves
)
REPEATED = ("aime24", "aime25")  # tasks that --repeats of evals/run.py applies to


def main(task_name: str) -> None:
    """Command line of evals/<task_name>.py. Unusable input ends in SystemExit with one line that says what to change."""
    about = f"Evaluate a model, or score given completions, on {task_name}."
    args = results.command_line(Args, task_name, about)
    if bool(args.model) == bool(args.completions):
        raise SystemExit("give either --model (generate and score) or --completions (only score)")
    reward = load_reward(args.reward, load_task(task_name)) if args.reward != "none" else None
    check_counts(args)
    if args.model:
        made, _ = evaluate(args, task_name, {task_name: args.data}, args.split, reward)
        result = made.get(task_name)
    else:
        result = score_file(args, task_name, reward)
    if result:  # on rank 0
        print(json.dumps(result), flush=True)


def many() -> None:
    """Command line of evals/run.py. A task with missing data is skipped; the exit status is then non-zero."""
    args = results.command_line(ManyArgs, "run", "Evaluate a model on many benchmarks.")
    names = list(dict.fromkeys(filter(None, args.tasks.replace(",", " ").split())))
    if not (args.model and names):
        raise SystemExit("give --model and --tasks, such as --tasks gsm8k,math500")
    check_counts(args)
    for name in names:
        load_task(name)
    data = dict(item.partition("=")[::2] for item in args.data if "=" in item)
    if len(data) < len(args.data) or not data.keys() <= set(names):
        shown, known = " ".join(args.data), ", ".join(names)
        raise SystemExit(
            f"--data {shown}: give TASK=SOURCE once per task, where TASK is one of {known}"
        )
    made, lost = evaluate(args, "run", {name: data.get(name, "") for name in names})
    if lost:
        said = f"{len(lost)} of {len(names)} tasks not evaluated: {', '.join(lost)}"
        raise SystemExit(said if is_first_rank() else 1)


def check_counts(args: Common) -> None:
    """SystemExit for counts below 1."""
    for name in ("batch_size", "limit", "repeats"):
        count = getattr(args, name)
        if count is not None and count < 1:
            raise SystemExit(f"--{name.replace('_', '-')} {count} must be at least 1")


def load_examples(name: str, split: str, data: str, limit: int | None) -> list[dict]:
    examples = load_task(name).load(split, data, limit)
    if not examples:
        raise SystemExit(f"--data {data}: no rows")
    return examples


def score_file(args: Args, name: str, reward: Callable | None) -> dict:
    """Score --completions. -> result.json"""
    if args.resume:
        only = f"--resume {args.resume} only scored {args.completions}"
        raise SystemExit(f"{only}: score again, with a new --out")
    results.refuse_overwriting(args.out)
    task, examples = load_task(name), load_examples(name, args.split, args.data, args.limit)
    if reward:
        reward([TRIAL], examples[:1])  # SystemExit for examples that do not suit the reward
    repeats = args.repeats or 1
    rows, faults, missing = samples.given(args.completions, len(examples), repeats)
    results.print_faults(args.completions, faults, "rows not used")
    unanswered = "problems without a completion, not in the mean: index"
    results.print_faults(args.completions, missing, unanswered)
    settings = sources(args, args.data, args.split)
    settings |= {"evals_hash": hash_of_evals(), "repeats": repeats, "completions": args.completions}
    with results.directory(args, name, default_out(name, Path(args.completions).stem)) as out:
        with tqdm(total=len(rows), desc=name, disable=None) as bar:
            parts = (rows[first : first + PART] for first in range(0, len(rows), PART))
            samples.write_scored(out / "samples.jsonl", parts, task, examples, reward, bar)
        result = results.summary(name, rows, examples, repeats, args.reward)
        result |= {"unused": len(faults), "missing": len(missing), "settings": settings}
        write_atomically(out / "result.json", results.as_json(result))
    return result


def evaluate(
    args: Common, program: str, data: dict[str, str], split: str = "test", reward: Callable | None = None
) -> tuple[dict[str, dict], dict[str, str]]:  # fmt: skip
    """Answer and score the problems of all tasks in `data` ({task: --data}), on all ranks.

    -> {task: result} on rank 0 (elsewhere {}), {task: why it was not evaluated}. program: "run", or the task that is
    evaluated alone, whose files lie in the directory itself and whose errors are raised.
    """
    alone = program != "run"
    if not args.resume:
        results.refuse_overwriting(args.out, () if alone else data)
    rank, ranks, device = place()
    lost, prepared = {}, {}

    def attempt(name, step, *arguments):
        """step(*arguments); a task that fails is skipped, and None returned, unless it is alone"""
        try:
            return step(*arguments)
        except SystemExit as error:
            if alone:
                raise
            lost[name] = str(error).replace("--data FILE", f"--data {name}=FILE")
            if is_first_rank():
                print(f"{name} is not evaluated: {lost[name]}", file=sys.stderr)

    examples = {}
    for name, source in data.items():
        if loaded := attempt(name, load_examples, name, split, source, args.limit):
            examples[name] = loaded
    same_everywhere(list(examples))
    nothing = SystemExit(f"none of {', '.join(data)} can be evaluated")
    if not examples:
        raise nothing
    if reward:
        reward(
            [TRIAL], examples[program][:1]
        )  # SystemExit for examples that do not suit the reward

    with ExitStack() as held:  # on rank 0 the lock of the directory
        default = default_out(program if alone else "", Path(args.model).name)
        take = lambda: held.enter_context(results.directory(args, program, default))
        out = from_first_rank(take) if args.resume else None
        backend, tokenizer = args.rollout_backend, load_tokenizer(args.model)
        engine = make_engine(
            args.model, backend=backend, device=device, max_batch_size=args.batch_size
        )
        for name, loaded in examples.items():
            prompts = [load_task(name).prompt(example) for example in loaded]
            more = sources(args, data[name], split), alone or name in REPEATED
            settings = attempt(name, task_settings, args, engine, name, loaded, prompts, *more)
            if settings:
                prepared[name] = prompts, settings | ({"reward": args.reward} if reward else {})
        if not prepared:
            raise nothing
        out = out or from_first_rank(
            take
        )  # not earlier: a wrong --model leaves no directory behind
        made = {} if alone else results.finished(out)
        made = {name: result for name, result in made.items() if name not in data}
        for name, (prompts, settings) in prepared.items():
            folder = out if alone else out / name
            from_first_rank(partial(results.begin, name, folder, settings, args.resume))
            rows = answer(
                name, examples[name], prompts, engine, tokenizer, settings, folder, reward
            )
            if rank == 0:
                kind = settings.get("reward", "")
                made[name] = results.summary(name, rows, examples[name], settings["repeats"], kind)
                made[name]["settings"] = settings | ({} if alone else {"ranks": ranks})
                write_atomically(folder / "result.json", results.as_json(made[name]))
                if not alone:
                    results.write_all(out, args.model, made, lost)
        if rank == 0 and not alone:
            print(results.table(made, lost) + f"\n{out}/results.json", flush=True)
    return (made, lost) if rank == 0 else ({}, lost)


def answer(
    name: str, examples: list[dict], prompts: list[list[dict]], engine: object, tokenizer: object,
    settings: dict, folder: Path, reward: Callable | None
) -> list[dict] | None:  # fmt: skip
    """Answer and score this rank's share of the problems that have no row in `folder` yet.

    -> on rank 0 the rows of all ranks, which are then in samples.jsonl; elsewhere None
    """
    task, repeats, size = load_task(name), settings["repeats"], settings["batch_size"]
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    kept = from_first_rank(lambda: samples.gather(folder))
    done = {(row.get("repeat", 0), row["index"]) for row in kept}
    # continuous batching: a call gets more prompts than fit into a batch
    together = size * (4 if engine.refills else 1)
    calls = samples.shares(done, len(examples), repeats, together, ranks)[rank::ranks]
    if calls:  # a sandbox that does not work stops the run before anything is generated
        samples.scored(task, [{"index": 0, "completion": TRIAL}], examples)
    batches = samples.generated(engine, tokenizer, prompts, calls, repeats, **generation(settings))
    if rank == 0 and kept:
        print(f"{name}: {len(kept)} finished samples are kept", file=sys.stderr)
    title = name if ranks == 1 else f"{name} (rank 0 of {ranks})"
    total = sum(end - first for _, first, end in calls)
    with tqdm(total=total, desc=title, disable=None if rank == 0 else True) as bar:
        path = folder / (f"samples-{rank}.jsonl" if rank else "samples.jsonl")
        samples.write_scored(path, batches, task, examples, reward, bar)
    if dist.is_initialized():
        dist.barrier()
    if rank:
        return None
    rows, asked = samples.gather(folder), len(examples) * repeats
    if len(rows) != asked:
        found = f"{folder} has {len(rows)} of {asked} samples of {name}"
        raise SystemExit(f"{found}: do all ranks see the same directory?")
    return rows


def place() -> tuple[int, int, str]:
    """-> rank, number of ranks, device. Ranks exchange samples through files, which all of them must see."""
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)
    if "RANK" in os.environ and not dist.is_initialized():
        # a rank may finish a long task much earlier than another
        dist.init_process_group("gloo", timeout=timedelta(days=2))
    if not dist.is_initialized():
        return 0, 1, device
    return dist.get_rank(), dist.get_world_size(), device


def same_everywhere(names: list[str]) -> None:
    """SystemExit if ranks loaded different tasks: they would mix up the samples of two."""
    if dist.is_initialized():
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, names)
        if uneven := sorted(set().union(*everywhere) - set.intersection(*map(set, everywhere))):
            said = f"only some ranks could load {', '.join(uneven)}; start again"
            raise SystemExit(said if is_first_rank() else 1)


def default_out(*parts: str) -> str:
    return "-".join(["runs/eval", *filter(None, parts), time.strftime("%Y%m%d-%H%M%S")])


def sources(args: Common, data: str, split: str) -> dict:
    return {"data": data, "split": split, "limit": args.limit, "torch": version("torch")}


def task_settings(
    args: Common, engine: object, name: str, examples: list, prompts: list, source: dict, repeated: bool
) -> dict:  # fmt: skip
    """Everything that decides the completions of a task, for result.json: flags, else evals/decoding.py.

    SystemExit for settings that the engine cannot use, and for repeats that would all be the same.
    """
    flags, task, style = vars(args), load_task(name), examples[0].get("style", "")
    model_type = engine.model.checkpoint_config["model_type"]
    known = decoding.settings(args.model, model_type, name, style)
    sampling = {key: known.get(key) if flags[key] is None else flags[key] for key in SAMPLING}
    repeats = (args.repeats if repeated else None) or known["repeats"]
    random = sampling["temperature"] or sampling["alg_temp"] or sampling["remasking"] == "random"
    if repeats > 1 and not random:
        problem = "all repeats are the same without randomness; set --temperature above 0"
        raise SystemExit(f"--repeats {repeats}: {problem}")
    own_blocks = sampling["schedule"] == "ascending" and not sampling["block_length"]
    prompt = getattr(task, "VERSION", name)  # one name, or one for each style of examples
    shots = sum(message["role"] == "assistant" for message in prompts[0])
    device = torch.device(engine.device)
    settings = {
        **source,
        "model": args.model,
        "weights": stamp(engine.model.sources),
        "rollout_backend": args.rollout_backend,
        "engine": f"lmdeploy {engine.version}"
        if hasattr(engine, "version")
        else type(engine).__name__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(engine.dtype).removeprefix("torch."),
        "prompt": prompt if isinstance(prompt, str) else prompt[style],
        "prompts_hash": hash_of(prompts),
        "examples_hash": hash_of(examples),
        "evals_hash": hash_of_evals(),
        "shots": task.shots(examples[0]) if hasattr(task, "shots") else shots,
        "repeats": repeats,
        **sampling,
        "block_length": None if own_blocks else engine.block_length(sampling["block_length"]),
        "eos_token_ids": list(engine.model.eos_token_ids),
        "batch_size": args.batch_size,
    }
    plan = engine.plan(**generation(settings))  # SystemExit for what the engine cannot do
    if is_first_rank():
        print(f"{name}: {plan}", file=sys.stderr)
    return settings


def generation(settings: dict) -> dict:
    """The settings that engine.generate and engine.plan take."""
    return {key: settings[key] for key in SAMPLING}


def hash_of_evals() -> str:
    """Of the code that asks and scores: verdicts of two versions do not belong in one result."""
    texts = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return blake2b(b"".join(texts), digest_size=6).hexdigest()


def hash_of(rows: list) -> str:
    """Of values that JSON can hold; for examples this includes what only the scorer reads."""
    key = blake2b(digest_size=6)
    for row in rows:  # one by one: tests of contests are megabytes each
        key.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    return key.hexdigest()


def stamp(sources: tuple) -> str:
    """Hash of names, sizes and times of the weight files in (model directory, adapter directories), so that a resumed run
    notices changed weights; "" for random ones."""
    folders = [Path(folder) for folder in (sources[0], *sources[1]) if folder]
    paths = [path for folder in folders for path in sorted(folder.glob("*.safetensors"))]
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return blake2b(json.dumps(files).encode(), digest_size=6).hexdigest() if files else ""


if __name__ == "__main__":
    many()
