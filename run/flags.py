"""Flags of a run: those that every script has, the command line, and --resume."""

import argparse
import inspect
import json
import math
import os
import re
import shlex
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from models import is_tiny, sampling_facts

# tasks whose own problems have prompts without words, for the tiny models -> the preset with words
WORDED = {"countdown": "cd3", "sudoku": "sudoku4-tags"}
CHANGEABLE = ("max_steps", "track", "resume", "dead_steps")  # flags that --resume may change
MAX = 1 << 31  # of integers: a seed times 2^32 has 63 bits
EPS = 1e-6  # an open end of a range


@dataclass
class RunFlags:
    """Values of a real model with LoRA. Sampling lengths are those of SDAR: where no flag is given,
    the model's own (models/names.py) come before them, and BY_SIZE of the script before those.
    """

    # task and data
    model: str = "tiny-sdar"
    """key of models.MODELS, or a directory in HF layout"""
    task: str = "gsm8k"
    """file of evals/ that gives prompts and scores, or path.py, a file of your own"""
    data: str = ""
    """problems: preset of the task, file, or hub id; empty: the task's own preset"""
    eval_data: str = ""
    """held-out problems; empty: other splits of --data, of a file two tenths of its problems"""
    # sampler
    gen_length: int = 256
    """tokens per completion, whole blocks; block models fill up the last one"""
    block_length: int = 0
    """tokens per denoising block; 0: the model's own"""
    denoising_steps: int = 4
    """denoising steps per block"""
    cache: Literal["none", "prefix", "dual"] = "none"
    """Fast-dLLM's caches of bidirectional models: approximate; methods that replay refuse them"""
    # length of the run and evaluation
    max_steps: int = 100
    """steps: rollouts, or optimizer steps of a script without rollouts"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """after the warm-up; linear and cosine end at 0 after --schedule-steps"""
    schedule_steps: int = 0
    """steps of the schedule; 0: --max-steps"""
    warmup_steps: int = 0
    """linear warm-up of the learning rate, in steps"""
    eval_every: int = 50
    """steps between evaluations on the validation split, 0: never"""
    eval_limit: int = 128
    """held-out problems per evaluation; 0: no evaluation at all, not even before and after"""
    seed: int = 42
    """every draw is keyed by (seed, step, sample, ...)"""
    # memory and speed
    micro_batch_size: int = 0
    """sequences per forward, rows x draws; 0: the most that fit; does not change the gradient"""
    attention: Literal["auto", "sdpa", "flex", "varlen", "flash-attn"] = "auto"
    """attention backend in training; auto: the fastest measured for the model's pattern"""
    activation_checkpointing: bool = False
    """recompute every block in the backward pass: less memory, a third more compute"""
    compile: bool = True
    """torch.compile every block on CUDA: faster steps, about a minute in the first"""
    sync_every_backward: bool = False
    """reduce gradients after every backward: slower, but no rank holds full-size gradients"""
    sequence_parallel: int = 1
    """so many ranks share each row in the update: for rows that do not fit one GPU"""
    # LoRA
    lora_rank: int = 128
    """rank of the LoRA adapters; 0: full fine-tuning"""
    lora_alpha: int = 64
    """adapters are scaled by lora_alpha / lora_rank"""
    lora_targets: tuple[str, ...] = ()
    """linear layers that get adapters, e.g. q_proj v_proj; empty: all of a block"""
    # log and saves
    save_every: int = 0
    """steps between saves of weights and of all that --resume needs, 0: only weights, at the end"""
    keep_saves: int = 0
    """newest saves to keep besides the best by validation score; 0: all"""
    resume: str = ""
    """run directory to continue, with its flags; --max-steps, --dead-steps, --track may change"""
    out: str = "runs"
    """parent of the run directory"""
    track: bool = False
    """mirror the log to wandb"""

    # lowest value of a field, or lowest and highest; a script adds those of its own. Others: 0.
    RANGES = {
        "max_steps": 1,
        "gen_length": 1,
        "denoising_steps": 1,
        "sequence_parallel": 1,
        "lora_alpha": 1,
        "max_grad_norm": (EPS, math.inf),
        "betas": (0, 1 - EPS),
        "mc_num": 1,
    }

    @classmethod
    def parse(cls, by_size):
        """-> the flags of the command line, see `command_line`"""
        return command_line(cls, by_size)

    @property
    def lora(self):
        """-> arguments of add_lora"""
        return self.lora_rank, self.lora_alpha, self.lora_targets, self.seed

    def evaluates(self, step):
        """Whether the run is scored on the validation split after that step."""
        return self.eval_limit and self.eval_every and step % self.eval_every == 0

    def lr_share(self, step):
        """Share of the peak learning rate in step 0, 1, ...: linear warm-up, then the schedule."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        steps = (self.schedule_steps or self.max_steps) - self.warmup_steps
        progress = min(1, (step - self.warmup_steps) / max(steps, 1))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return {"constant": 1, "linear": 1 - progress, "cosine": cosine}[self.lr_schedule]


@dataclass
class RolloutFlags(RunFlags):
    """Besides those of every run, of a script with rollouts."""

    # rollouts and rewards
    reward: str = ""
    """name in evals/rewards.py, or path.py:function; empty: the task's exact score"""
    max_prompt_length: int = 1024
    """tokens; problems with longer prompts are dropped and counted"""
    prompts_per_step: int = 8
    """prompts per rollout, over all ranks"""
    remasking: Literal["low_confidence_static", "low_confidence_dynamic", "random"] = (
        "low_confidence_static"
    )
    """which masked tokens a step reveals"""
    confidence_threshold: float = 0.9
    """low_confidence_dynamic reveals every token above it"""
    rollout_backend: Literal["auto", "masked", "block", "lmdeploy"] = "auto"
    """sampler; auto: by the model's attention; lmdeploy: that package's engine, docs/lmdeploy.md"""
    dead_steps: int = 50
    """end, with status 3, after so many steps in which no completion has an advantage; 0: never"""
    eval_temperature: float = 0.0
    """of evaluation completions; 0 is greedy"""
    lora_merged_rollout: bool = False
    """merge the adapters into the sampler's bf16 weights (loses small updates)"""

    RANGES = {
        "prompts_per_step": 1,
        "num_iterations": 1,
        "num_generations": 2,  # a group of one completion has nothing to compare it with
        "temperature": EPS,  # at 0 all completions of a group are the same
        "confidence_threshold": (0, 1),
        "epsilon": (0, math.inf),
        "p_mask_prompt": (0, 1),
        "p_mask_context": (0, 1),
        "ref_mixup": (0, 1),
        "train_steps": 1,
    }

    @classmethod
    def parse(cls, by_size):
        args = super().parse(by_size)
        if args.rollout_backend == "lmdeploy" and args.lora_rank and not args.lora_merged_rollout:
            needed = "needs merged weights: add --lora-merged-rollout"
            raise SystemExit(f"--rollout-backend lmdeploy {needed}")
        return args

    def num_draws(self, replays):
        """Noisy copies of a completion in a step. replays: denoising steps that can be replayed"""
        return 1


def values_for(arguments, by_size, model, task=None, lora_rank=None):
    """-> {field: (value, where from)} that a run takes instead of the defaults in `arguments`

    by_size: of the script, {"tiny" | "full" | "bidirectional": {field: value}}; "tiny": a shipped
    model or one of under 10 million parameters; "full": others without LoRA; "bidirectional": in
    addition, those of that attention. task, lora_rank: as given; None: not given.
    """
    known = {field.name: field.default for field in fields(arguments)}
    if unknown := set().union(*by_size.values()) - known.keys():
        raise SystemExit(f"BY_SIZE sets {', '.join(sorted(unknown))}, which Args does not have")
    facts, values, sizes = sampling_facts(model), {}, ["tiny"]
    if not is_tiny(model):
        sizes = ["full"] * ((known["lora_rank"] if lora_rank is None else lora_rank) == 0)
        sizes += ["bidirectional"] * (facts.get("cache", "none") != "none")
        if (task or known["task"]) in WORDED:
            values["data"] = WORDED[task], "the task's problems with words"
    kinds = get_type_hints(arguments)
    usable = {k: v for k, v in facts.items() if k in known and is_of(v, kinds[k])}
    values |= {name: (value, "models/names.py") for name, value in usable.items()}
    for size in sizes:
        of_size = by_size.get(size, {}).items()
        values |= {name: (value, f"BY_SIZE[{size!r}]") for name, value in of_size}
    return values


def command_line(arguments, by_size):
    """The flags of a script as its dataclass `arguments`; by_size: see `values_for`.

    --resume DIR: that run's flags are the defaults. SystemExit if a flag has another value than the
    run had, but for CHANGEABLE.
    """
    asked = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("model", "task", "resume"):
        asked.add_argument(
            f"--{name}", default=None if name == "task" else getattr(arguments, name)
        )
    asked.add_argument("--lora-rank", "--lora_rank", type=int)
    asked, _ = asked.parse_known_args()
    if asked.resume:
        return resumed(arguments, Path(asked.resume))
    found = values_for(arguments, by_size, asked.model, asked.task, asked.lora_rank)
    values = {name: value for name, (value, _) in found.items()} | {"model": asked.model}
    defaults = arguments(**values)
    if {"-h", "--help"} & {*sys.argv}:
        print_help(defaults, asked.model, found)
    given = parsed(arguments, defaults)
    if os.environ.get("RANK", "0") == "0":
        print(f"settings: {sys.argv[0]} {flags_of(given)}", file=sys.stderr)
    return given


def parsed(arguments, defaults):
    """The flags as the dataclass, checked; files of --task and --reward with their whole path."""
    import tyro

    args = tyro.cli(arguments, default=defaults)
    for name in ("task", "reward"):
        if ".py" in (path := getattr(args, name, "")):
            setattr(args, name, str(Path(path).resolve()))
    return check_numbers(args)


def resumed(arguments, directory):
    """The flags of the run in `directory`, with those given now."""
    path, script = directory / "config.json", Path(sys.argv[0]).stem
    if not path.is_file():
        raise SystemExit(f"--resume {directory} is no run directory: it has no config.json")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise SystemExit(f"{path} is damaged: {error}") from error
    if config.get("script", script) != script:
        other = f"a run of {config['script']}.py, not of {script}.py"
        raise SystemExit(f"--resume {directory} is {other}")
    before = restored(arguments, config.get("args"), path)
    now = parsed(arguments, before)
    for name, then in vars(before).items():
        if (here := getattr(now, name)) != then and name not in CHANGEABLE:
            flag = name.replace("_", "-")
            raise SystemExit(f"--resume: the run had --{flag} {then}, now it is {here}")
    return now


def restored(arguments, saved, path):
    """-> the flags that config.json, the file `path`, keeps of a run, as their dataclass

    SystemExit names those that this version of the script does not have, or not with such a value.
    """
    if not isinstance(saved, dict):
        raise SystemExit(f"{path} has no flags of a training run")
    kinds = get_type_hints(arguments)
    if wrong := {k: v for k, v in saved.items() if k not in kinds or not is_of(v, kinds[k])}:
        shown = ", ".join(f"{name} = {value!r:.40}" for name, value in wrong.items())
        now = "go on with the version of the run, or take them out of that file"
        raise SystemExit(f"{path} has {shown}, which this version does not take: {now}")
    is_tuple = lambda k, v: isinstance(v, list) and get_origin(kinds[k]) is not list
    return arguments(**{k: tuple(v) if is_tuple(k, v) else v for k, v in saved.items()})


def is_of(value, kind):
    """Whether a value of a JSON file is one of a field of this type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in inner
    if origin in (list, tuple):
        parts = value if isinstance(value, list) else [()]
        kinds = inner if origin is tuple and ... not in inner else inner[:1] * len(parts)
        return len(parts) == len(kinds) and all(map(is_of, parts, kinds))
    if inner:  # int | None
        return any(is_of(value, one) for one in inner)
    return type(value) is kind or kind is float and type(value) is int


def print_help(defaults, model, found):
    """--help: flags in groups, whose titles are comments in the source of their dataclass, with the
    values that `model` gets.
    """
    import tyro

    groups, left = {}, dict(defaults.__dataclass_fields__)
    for kind in [kind for kind in type(defaults).__mro__ if kind is not object]:
        title = "the method's own"
        for heading, name in re.findall(r"^    (?:# (.+)|(\w+): )", inspect.getsource(kind), re.M):
            title = heading or title
            if name in left:
                groups.setdefault(title, {})[name] = left.pop(name)
    shown = {}
    for title, own in groups.items():
        group = type(title, (type(defaults),), {"__dataclass_fields__": own})
        shown[title] = object.__new__(group)
        shown[title].__dict__ |= {name: getattr(defaults, name) for name in own}
    lines = [
        f"--{name.replace('_', '-')} {value}: {where}" for name, (value, where) in found.items()
    ]
    note = f"Values are those of --model {model}. These come before the defaults of the script:\n"
    description = note + "\n".join(lines)
    tyro.cli(tyro.conf.OmitArgPrefixes[dict], default=shown, description=description, args=["-h"])


def flags_of(args):
    """-> all fields that hold something or were emptied, as flags of a command line"""
    words = []
    for name, value in vars(args).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value not in ("", ()) or value != getattr(type(args), name, value):
            values = value if isinstance(value, tuple) else [value]
            words += [f"--{flag}", *map(str, values)]
    return shlex.join(words)


def check_numbers(args):
    """-> args; SystemExit names the first number outside of RANGES, or elsewhere one that is
    infinite, huge or, where the default is not, negative; and a name that no file can have.
    """
    ranges = {}
    for kind in reversed(type(args).__mro__):
        ranges |= vars(kind).get("RANGES", {})
    for name, value in vars(args).items():
        values = value if isinstance(value, tuple) else (value,)
        flag = " ".join([f"--{name.replace('_', '-')}", *map(str, values)])
        numbers = [one for one in values if type(one) in (int, float)]
        default = getattr(type(args), name, 0)
        is_signed = type(default) in (int, float) and default < 0
        bounds = ranges.get(name, -MAX if is_signed else 0)
        low, high = bounds if isinstance(bounds, tuple) else (bounds, MAX)
        if not all(low <= one <= high and (type(one) is float or one < MAX) for one in numbers):
            wanted = f"from {low:.12g} to {high:.12g}" if low < high else f"{low}"
            raise SystemExit(f"{flag} must be {wanted}")
        if name.endswith("_range") and numbers != sorted(numbers):
            raise SystemExit(f"{flag}: the lower end comes first")
        parts = re.split(r"[/,\s]", value) if isinstance(value, str) and name != "prompt" else ()
        if any(len(part.encode(errors="replace")) > 255 for part in parts):
            raise SystemExit(f"{flag[:60]}...: no name has more than 255 bytes")
    return args
