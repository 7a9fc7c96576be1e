"""Flags of a run: those that every script has, the command line, and --resume."""

import inspect
import json
import math
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_type_hints

from data.rows import whole_path
from distributed.disk import read_json
from models import is_tiny, sampling_facts, whole_name

# tasks whose own problems have prompts without words, for the tiny models -> the preset with words
WORDED = {"countdown": "cd3", "sudoku": "sudoku4-tags"}
# flags that --resume may change; it does not look at --out
CHANGEABLE = ("max_steps", "track", "resume", "dead_steps", "plan", "reward_errors", "out")
CHANGEABLE += ("micro_batch_size", "sequence_parallel", "activation_checkpointing")  # other GPUs
MAX = (1 << 31) - 1  # of numbers: a seed times 2^32 has 63 bits
EPS = 1e-6  # an open end of a range
# flags that do nothing where the others, as far as there are any, are 0, off or IDLE
NEEDS = {
    "confidence_threshold": ["remasking"],
    "schedule_steps": ["lr_schedule", "lambda_max"],
    "lora_alpha": ["lora_rank"],
    "lora_targets": ["lora_rank"],
    "lora_merged_rollout": ["lora_rank"],
    "epsilon": ["num_iterations"],  # in one update the ratio is 1
    "clip_ratio": ["num_iterations"],
    "kl_to_old": ["num_iterations"],
    "ref_sync_steps": ["beta"],
    "ref_mixup": ["beta"],
    "value_learning_rate": ["value_model"],
    "lam": ["value_model"],
    "gamma": ["value_model", "lambda_max"],
    "mask_ratio": ["masks"],
}
IDLE = {
    "remasking": ["low_confidence_static", "random", "sequential", "entropy", "rcr"],
    "lr_schedule": ["constant"],
    "num_iterations": [1],
    "masks": ["random"],
}
HELP = "-h", "--help"
# lowest value of a field, or lowest and highest; a script's own come before them. Others: 0, MAX
RANGES = {
    "max_steps": 1,
    "gen_length": 1,
    "denoising_steps": 1,
    "sequence_parallel": 1,
    "lora_alpha": 1,
    "max_grad_norm": (EPS, math.inf),
    "betas": (0, 1 - EPS),
    "mc_num": 1,
    "batch_size": 1,
    "max_length": 1,
    "prompts_per_step": 1,
    "num_iterations": 1,
    "num_generations": 2,  # a group of one completion has nothing to compare it with
    "temperature": EPS,  # at 0 all completions of a group are the same
    "confidence_threshold": (0, 1),
    "epsilon": (0, math.inf),
    "ref_mixup": (0, 1),
    "reward_errors": (-MAX, MAX),
}
# of a field in the source: a title above it; its name and what it is
FIELD = re.compile(r'^    (?:# (\w.+?)\n|(\w+): .*?"""(.*?)""")', re.M | re.S)


@dataclass
class RunFlags:
    """Values of a real model with LoRA. Sampling lengths are those of SDAR: where no flag is given,
    the model's own (models/names.py) come before them, and BY_SIZE of the script before those.
    """

    # task and data
    model: str = "tiny-sdar"
    """key of models.MODELS, hub id, or directory in HF layout"""
    task: str = "gsm8k"
    """file of evals/ that gives prompts and scores, or path.py, a file of your own"""
    data: str = ""
    """problems: preset of the task, file, or hub id; empty: the task's own preset"""
    eval_data: str = ""
    """held-out problems; empty: other splits of --data, of a file two tenths of its problems;
    in sft.py and vrpo.py the problems of --task"""
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
    plan: str = ""
    """print memory and seconds for GPUs that need not be here, and end: 4xH100, or 2x24 (GB)"""
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
    """run directory to continue, with its flags; CHANGEABLE in run/flags.py may change"""
    out: str = "runs"
    """parent of the run directory"""
    track: bool = False
    """mirror the log to wandb"""

    chosen = {}  # by the command line: flags with other values than the model gets
    RANGES = {}  # of a script's own fields

    @classmethod
    def parse(cls, by_size):
        """The flags of a script as its dataclass; by_size: see `values_for`.

        What a model sets, or with --resume DIR that run had, stands in front of the flags given.
        SystemExit if a resumed run would get another value than it had, but for CHANGEABLE; if a
        number is outside of its range. Files and folders get their whole path.
        """
        import tyro

        given = [*map(whole_path, sys.argv[1:])]
        words = [word for word in given if word not in HELP]
        # the values of others depend on these
        asked, unknown = tyro.cli(cls, args=words, return_unknown_args=True)
        if unknown:
            raise SystemExit(f"{unknown[0]}: no such flag; try {meant(unknown[0], cls)}")
        found = values_for(asked, by_size)
        if asked.resume:
            first = saved_flags(Path(asked.resume))
        else:
            first = {name: value for name, (value, _) in found.items()}
        args = tyro.cli(cls, args=[*flags_of(first), *words])
        if words != given:
            print_help(args, found)
            raise SystemExit(0)
        check_numbers(args)
        args.model = whole_name(args.model)
        before, now = json.loads(json.dumps([vars(cls()) | first, vars(args)]))
        cls.chosen = {name: now[name] for name in now if now[name] != before[name]}
        if asked.resume and (changed := cls.chosen.keys() - CHANGEABLE):
            name = min(changed)
            flag, had = name.replace("_", "-"), before[name]
            raise SystemExit(f"--resume: the run had --{flag} {had}, now it is {now[name]}")
        for name, others in NEEDS.items():
            if name in cls.chosen and all(
                now.get(other, 0) in (0, *IDLE.get(other, ())) for other in others
            ):
                other = next(other for other in others if other in now)
                raise SystemExit(
                    f"--{name.replace('_', '-')} does nothing with "
                    f"{shlex.join(flags_of({other: now[other]}))}"
                )
        if args.plan:
            from run.plan import pretend

            pretend(args.plan)
        elif os.environ.get("RANK", "0") == "0":
            chosen = flags_of({"model": args.model} | cls.chosen)
            print(f"settings: {shlex.join([sys.argv[0], *chosen])}", file=sys.stderr)
        return args

    def num_draws(self, replays):
        """Noisy copies of a sequence in a step: --mc-num, or else one. Where denoising steps are
        replayed, of which there are `replays`: --train-steps of them, 0: all
        """
        if hasattr(self, "train_steps"):
            return min(self.train_steps or replays, replays)
        return getattr(self, "mc_num", 1)

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
    """name in evals/rewards.py, or path.py:function; empty: the task's exact score; a+b:
    several, each normalised in its group by itself, as score+tokens_per_forward"""
    reward_errors: float | None = None
    """reward of a completion for which a file of yours fails; None: the run saves and ends"""
    positive_only: bool = False
    """negative advantages become 0 (ours: docs/curves.md)"""
    max_prompt_length: int = 1024
    """tokens; problems with longer prompts are dropped and counted"""
    prompts_per_step: int = 8
    """prompts per rollout, over all ranks"""
    refill: int = 0
    """at most so many more rollouts in a step, whose groups take the places of those without
    different rewards (DAPO, DiPO)"""
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
    one_reward = False  # True: a script that does more with rewards than compare those of a group


def values_for(asked, by_size):
    """-> {field: (value, where from)} that a run takes instead of the script's own values

    asked: flags with these. by_size: of the script, {"tiny" | "full" | "bidirectional": {field:
    value}}; "tiny": a shipped model or one of under 10 million parameters; "full": others without
    LoRA; "bidirectional": in addition, those of that attention.
    """
    facts, tiny = sampling_facts(asked.model), is_tiny(asked.model)
    values, kinds = {}, get_type_hints(type(asked))
    if not tiny and asked.task in WORDED:
        values["data"] = WORDED[asked.task], "the task's problems with words"
    for name, value in facts.items():
        if name in kinds and value in (get_args(kinds[name]) or [value]):
            values[name] = value, "models/names.py"
    applies = {
        "tiny": tiny,
        "full": not (tiny or asked.lora_rank),
        "bidirectional": "cache" in facts,  # of no tiny model
    }
    for size in filter(applies.get, applies):
        of_size = by_size.get(size, {}).items()
        values |= {name: (value, f"BY_SIZE[{size!r}]") for name, value in of_size}
    return values


def saved_flags(directory):
    """-> {field: value} of the run of this script in `directory`"""
    config, script = read_json(directory / "config.json"), Path(sys.argv[0]).stem
    if (other := config.get("script", "evals/run")) != script:
        raise SystemExit(f"--resume {directory} is a run of {other}.py, not of {script}.py")
    return config["args"] | {"resume": "", "model": whole_name(config["args"]["model"])}


def flags_of(values):
    """{field: value} -> words of a command line"""
    words = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, tuple | list) else [value])]
    return words


def described(arguments):
    """-> {field: (title of its group, what it is)}, from the source of the dataclass"""
    found, fields = {}, get_type_hints(arguments)
    for kind in arguments.__mro__[:-1]:
        title = "the method's own"
        for heading, name, about in FIELD.findall(inspect.getsource(kind)):
            title = heading or title
            if name in fields:
                found.setdefault(name, (title, " ".join(about.split())))
    return found


def meant(flag, arguments):
    """-> the flags, at most three, that a wrong one may stand for: those with the most of its words
    (of four letters) in initials and name, which count twice, and description
    """
    # 0.5: more than no word
    scores, asked = {0.5: ["--help"]}, re.findall(r"[-_]([^\W_]{1,4})", f"-{flag}")
    for name, (_, about) in described(arguments).items():
        parts = name.split("_")
        title = " ".join(["".join(part[0] for part in parts), *parts])
        found = re.findall(rf"\b(?:{'|'.join(asked)})", f"{title} {title} {about}", re.I)
        scores.setdefault(len(found), []).append(f"--{name}".replace("_", "-"))
    return " or ".join(scores[max(scores)][:3])


def print_help(args, found):
    """--help: flags in groups, whose titles are comments in the source of their dataclass, with the
    values of a run, and where those come from that the script does not set. found: `values_for`
    """
    print("Flags with their values in this run; in brackets: from where, if not the script")
    kinds, last = get_type_hints(type(args)), ""
    for name, (title, about) in described(type(args)).items():
        value, (known, source) = getattr(args, name), found.get(name, (None, ""))
        if title != last:
            print(f"\n{title}:")
        last, options = title, get_args(kinds[name])
        words = flags_of({name: value is False or value}) + ["(off)"] * (value is False)
        print(" ", *words, f"({source})" * bool(source and value == known))
        if isinstance(value, str) and options:
            print("      one of", *options)
        print("     ", about)


def check_numbers(args):
    """SystemExit names the first number outside of its range."""
    ranges = RANGES | args.RANGES
    for name, value in vars(args).items():
        bounds = ranges.get(name, (0, 1) if name.startswith("p_") else 0)  # p_: a probability
        low, high = bounds if isinstance(bounds, tuple) else (bounds, MAX)
        values = value if isinstance(value, tuple) else (value,)
        if not all(low <= one <= high for one in values if type(one) in (int, float)):
            flag = " ".join(flags_of({name: value}))
            raise SystemExit(f"{flag} must be from {low:.12g} to {high:.12g}")
