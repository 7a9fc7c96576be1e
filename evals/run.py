"""Benchmarks on one loaded engine, and the command line that all benchmark files share.

    python evals/run.py --model tiny-sdar --tasks countdown,sudoku,gsm8k --data gsm8k=test.jsonl
    torchrun --standalone --nproc-per-node 8 evals/run.py --model sdar-8b --tasks gsm8k,math500,mmlu
    python evals/run.py --resume runs/eval-...   continue: finished samples are kept
    python evals/countdown.py --model tiny-sdar   one task; --resume works here too
    python evals/countdown.py --completions samples.jsonl --data cd3   only score completions
    python evals/run.py --tasks gsm8k,mbpp --completions gsm8k=a.jsonl mbpp=b.jsonl

The defaults of lengths, steps and temperatures come from evals/decoding.py: the settings of the
published number for this model and task. Ranks share the problems of every task; the number of
ranks changes no completion. docs/evals.md describes the output directory. For one task the last
line on stdout is a JSON object: task, n, accuracy, stderr, answered, truncated, ..., settings, and
macro_accuracy, the plain mean of the subjects, if the examples have a "subject". With --samples N
every problem is answered N times, with seeds --seed to --seed + N - 1: accuracy is their mean,
`accuracies` lists them, stderr is that of the problems' means, and there are pass@k and majority
(evals/results.py). A task is a module of evals/ with load(split, path, limit), prompt(example),
extract(completion, example) and score(completion, example) in [0, 1]; for slow scorers also
score_batch(completions, examples), for --likelihood choices(example) (evals/likelihood.py).
"""

import json
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Literal

sys.path.insert(0, __file__.rpartition("/evals/")[0])
from distributed.start import start  # before torch

# isort: split
import torch
import torch.distributed as dist
import tyro

from data.rows import whole_path
from distributed.disk import (
    from_first_rank,
    hold,
    is_first_rank,
    new_directory,
    progress,
    read_json,
    write_atomically,
    write_json,
)
from distributed.groups import join_ranks, own_device
from evals import TRIAL, load_examples, load_task
from evals.decoding import SamplerFlags, sampling_for
from evals.likelihood import elbo, encode, likeliest, readable
from evals.report import write_report
from evals.results import summary, table
from evals.rewards import load_reward
from evals.samples import gather, generated, given, scored
from models import load_tokenizer, prompt_ids, whole_name
from rollout import make_engine


@dataclass
class Args(SamplerFlags):
    """Evaluate a model, or score completions. Sampling flags apply to every task; those left out
    take the values of evals/decoding.py, which depend on model and task."""

    model: str = ""
    """key of models.MODELS, or a directory in HF layout; an autoregressive model too"""
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
    likelihood: bool = False
    """multiple choice without sampling, whose flags have no effect: the choice that is most likely
    per character"""
    text: str = ""
    """instead of --tasks: the perplexity of this UTF-8 file"""
    length: int = 512
    """tokens of a chunk of --text"""
    mc_num: int = 128
    """draws for a likelihood; that of a single token takes one"""
    reward: str = ""
    """also report the mean of this reward: name in evals/rewards.py, or path.py:function"""
    limit: int | None = None
    """use only the first so many rows of a task"""
    rollout_backend: str = "auto"
    """engine of rollout.make_engine"""
    batch_size: int = 64
    """prompts decoded together; changes results only by rounding"""
    samples: int | None = None
    """answers per problem, with seeds seed, seed + 1, ...; published AIME values have 8"""
    seed: int = 0
    """sampling seed; sample i draws from (seed, i)"""
    out: str = ""
    """output directory, which must be new; empty: one below runs/"""
    resume: str = ""
    """continue in this directory of an earlier run, with its flags: finished samples are kept"""

    @classmethod
    def parse(cls, task):
        """The flags; tasks are those of evals/<task>.py if there is a `task`, and with --resume DIR
        the flags of that run are the defaults."""
        words = [*map(whole_path, sys.argv[1:])]
        args = tyro.cli(cls, args=words, default=cls(tasks=task))
        if args.resume:
            saved = read_json(Path(args.resume) / "config.json")
            if "tasks" not in saved:
                raise SystemExit(f"--resume {args.resume} is no evaluation")
            args = tyro.cli(cls, args=words, default=cls(**saved))
        args.model = whole_name(args.model)
        return args


def main(name=""):
    """Command line of evals/run.py, or of evals/<name>.py, whose --tasks is `name`. Unusable input
    ends in SystemExit with one line that says what to change. Of several tasks one that cannot be
    evaluated is skipped; the exit status is then non-zero.

    The files of a single task lie in the output directory itself.
    """
    start(evaluate, Args, name)


def evaluate(args):
    tasks = {task.NAME: task for task in map(load_task, args.tasks.replace(",", " ").split())}
    if bool(tasks) == bool(args.text) or bool(args.model) == bool(args.completions):
        what = "either --model (generate and score) or --completions (only score)"
        raise SystemExit(f"give --tasks, such as --tasks gsm8k,math500, or --text, and {what}")
    for name in "batch_size", "limit", "samples", "length", "mc_num":
        if (value := getattr(args, name)) is not None and value < 1:
            raise SystemExit(f"--{name.replace('_', '-')} must be at least 1")
    data, files = by_task("data", args.data, tasks), by_task("completions", args.completions, tasks)
    # a rank may finish a long task much earlier than another
    join_ranks("gloo", timedelta(days=2))
    # weights are read once the problems of a task are found
    engine = cache(
        lambda: make_engine(
            args.model, args.rollout_backend, own_device(), max_batch_size=args.batch_size
        )
    )
    if args.text:
        found = perplexity(args, engine)
        return is_first_rank() and print(json.dumps(found), flush=True)
    ready, skipped, results = {}, {}, {}
    for name, task in tasks.items():
        try:
            ready[name] = Evaluation(args, task, data[name], files[name], engine)
        except SystemExit as error:
            skipped[name] = error
            if is_first_rank() and len(tasks) > 1:
                print(f"{name} is not evaluated: {error}", file=sys.stderr)
    if not ready:
        raise SystemExit("; ".join(map(str, skipped.values())))
    # only now: a wrong --model or file of completions leaves no directory behind
    out = from_first_rank(partial(directory, args, tasks))
    try:
        for name, evaluation in ready.items():
            results[name] = evaluation.run(out / name if len(tasks) > 1 else out)
            if is_first_rank():
                write_atomically(out / "table.md", table(results, skipped))
    except KeyboardInterrupt as error:
        raise SystemExit(f"interrupted; go on with --resume {out}") from error
    if is_first_rank():
        print(f"{table(results, skipped)}\ndirectory: {out}", flush=True)
        if skipped:
            raise SystemExit(f"not evaluated: {', '.join(skipped)}")
        if len(tasks) == 1:
            print(json.dumps(results[name]), flush=True)


def by_task(flag, values, tasks):
    """-> {task: SOURCE} of the values of --data or --completions; "" where none is given"""
    found = dict.fromkeys(tasks, "")
    for value in values:
        name, _, source = value.partition("=")
        if name not in tasks and len(tasks) == 1:
            [name], source = tasks, value
        if name not in tasks:
            known = f"give TASK=SOURCE, where TASK is one of {', '.join(tasks)}"
            raise SystemExit(f"--{flag} {value}: {known}")
        found[name] = source
    return found


def directory(args, tasks):
    """-> the directory --resume, or a new one: --out or a default; no other process works there.
    config.json is written once: --resume always starts from the flags of the first run."""
    out = Path(args.resume or args.out)
    if not args.resume:
        name = f"{'-'.join(tasks):.60}-{Path(args.model or args.completions[0]).name}"
        default = f"runs/eval-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        if args.out and out.exists():
            raise SystemExit(f"--out {out} exists: name another one, or continue with --resume")
        out = new_directory(args.out or default)
        write_json(out / "config.json", asdict(args))
    hold(out)
    return out


def perplexity(args, load):
    """-> of the file --text: exp of minus the bound per token, over whole chunks of --length
    tokens, each without the text before it. Its error is that of the chunks. load() -> the engine.
    Collective."""
    tokenizer = load_tokenizer(args.model)
    try:
        text = Path(args.text).read_text(encoding="utf-8")
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        chunks = torch.tensor(ids).unfold(0, args.length, args.length)[: args.limit].tolist()
    except (OSError, ValueError, RuntimeError) as error:  # no such file, no text, too short
        raise SystemExit(f"--text {args.text} --length {args.length}: {error}") from error
    model, nats = readable(load()), torch.zeros(len(chunks)).double()
    first, draws = encode(model, tokenizer, ""), (args.mc_num, args.batch_size, args.seed)
    for i in progress(range(dist.get_rank(), len(chunks), dist.get_world_size()), "chunks"):
        bound = elbo(model, len(first), first + chunks[i], *draws, "text", i)
        nats[i] = -bound / args.length
    dist.all_reduce(nats)
    value, error = nats.mean().exp().item(), (nats.std(correction=0) / len(nats) ** 0.5).item()
    return {"text": args.text, "n": len(nats), "perplexity": value, "stderr": value * error}


class Evaluation:
    """A task, its examples, and their completions: of a file, or else of an engine.

    settings: all that decides completions and verdicts. answer(sample, indices) -> rows without
    scores; size: examples that are answered together; counts: of a file. SystemExit for settings
    that the engine cannot use.
    """

    def __init__(self, args, task, data, file, engine):
        """engine: function -> the engine that all tasks share"""
        load = partial(load_examples, task, args.split, data, args.limit)
        self.task, self.examples = task, from_first_rank(load)
        self.reward, self.size, self.counts = None, 256, {}
        if args.reward:
            self.reward = load_reward(args.reward, task)
            self.reward([TRIAL], self.examples[:1])  # SystemExit if the examples do not suit it
        self.settings = {
            "data": data,
            "split": args.split,
            "limit": args.limit,
            "reward": args.reward,
            "torch": torch.__version__,
        }
        if args.completions:
            self.read(file, args.samples or 1)
        elif args.likelihood and not hasattr(task, "choices"):
            raise SystemExit(f"--likelihood: {task.NAME} has no choices to compare")
        else:
            self.ask(args, engine(), load_tokenizer(args.model))

    def read(self, path, samples):
        rows, self.counts = given(path, samples, len(self.examples))
        self.settings |= {"completions": path, "samples": samples}
        self.answer = lambda sample, indices: [
            rows[sample, i] for i in indices if (sample, i) in rows
        ]

    def ask(self, args, engine, tokenizer):
        model, style = engine.model, self.examples[0].get("style", "")
        folders = filter(None, (model.sources[0], *model.sources[1]))
        files = [file for folder in folders for file in sorted(folder.glob("*.safetensors"))]
        self.settings |= {
            "model": args.model,
            "seed": args.seed,
            "style": style,
            "weights": [file.stat().st_mtime for file in files],
            "engine": type(engine).__name__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "dtype": str(engine.dtype).removeprefix("torch."),
        }
        if args.likelihood:
            self.settings |= {"mc_num": args.mc_num, "samples": 1}
            draws = args.mc_num, args.batch_size, args.seed
            score = partial(likeliest, readable(engine), tokenizer, self.task, *draws)
            self.answer = lambda _, indices: [score(i, self.examples[i]) for i in indices]
            return
        sampling = sampling_for(args, model, self.task.NAME, style)
        samples = sampling.pop("samples")
        is_drawn = sampling["temperature"] or sampling["alg_temp"]
        if samples > 1 and not is_drawn and sampling["remasking"] != "random":
            raise SystemExit(f"--samples {samples} would be equal: add --temperature 0.8")
        checked = engine.validate(**sampling)
        if is_first_rank():
            print(f"{self.task.NAME}: {checked}", file=sys.stderr)
        self.settings |= engine.full_settings(None, sampling) | {"samples": samples}
        prompts = [*map(self.task.prompt, self.examples)]
        prompt_ids(tokenizer, prompts[0])  # refused before a directory is made
        self.answer = partial(generated, engine, tokenizer, prompts, sampling, args.seed)
        # continuous batching: a call gets more prompts than fit into a batch
        self.size = args.batch_size * (4 if engine.refills else 1)

    def begin(self, folder):
        """Write the settings. -> rows that are finished, {(sample, index): row}

        SystemExit if a resumed run used other settings: samples of two settings, or of two models,
        do not make one number.
        """
        folder.mkdir(exist_ok=True)
        if not (path := folder / "result.json").is_file():
            write_json(path, {"settings": self.settings})
        old = read_json(path)["settings"]
        for key, value in self.settings.items():
            if old.get(key) != value:
                differs = f"was begun with {key} {old.get(key)!r}, now {value!r}"
                raise SystemExit(f"--resume: {folder} {differs}; take the old value or a new --out")
        return gather(folder)

    def run(self, folder):
        """Answer and score this rank's share of the examples that have no row in `folder` yet. A
        thread scores a batch while the engine generates the next one. -> on rank 0 the result

        Ranks exchange samples through files that all must see.
        """
        done = from_first_rank(partial(self.begin, folder))
        rank, ranks = dist.get_rank(), dist.get_world_size()
        indices, samples = range(len(self.examples)), range(self.settings["samples"])
        size = min(self.size, math.ceil(len(indices) / ranks))
        calls = product(samples, [indices[i : i + size] for i in indices[::size]])
        calls = [call for call in calls if not done.keys() >= {*product(call[:1], call[1])}]

        def write(rows):
            rows = scored(self.task, rows, self.examples, self.reward)
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()

        # the thread ends what it began also if the engine fails
        with open(folder / f"samples-{rank}.jsonl", "a") as file, ThreadPoolExecutor(1) as scorer:
            last = scorer.submit(int)
            for call in progress(calls[rank::ranks], self.task.NAME):
                rows = self.answer(*call)
                last.result()
                last = scorer.submit(write, rows)
            last.result()
        dist.barrier()
        if not rank:
            result = summary(self, [*gather(folder).values()])
            write_json(folder / "result.json", result)
            write_report(folder)
            return result


if __name__ == "__main__":
    main()
