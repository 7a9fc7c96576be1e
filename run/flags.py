"""The flags of a script: parsed, checked, filled in by model and size, restored by --resume."""

import inspect
import math
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from run.defaults import training
from run.report import read_json

NOTE = "Defaults below are the method's. A flag left out takes the model's value, if it has one."
CHANGEABLE = ("max_steps", "track", "resume", "dead_steps")  # flags that --resume may change


def command_line(arguments, by_size):
    """Parse the flags of a script into its dataclass. --resume DIR: that run's flags are defaults.

    A flag that is left out takes the model's value (run/defaults.py), or the method's own for
    the model's size (by_size). SystemExit if a flag has another value than the run had, but for
    CHANGEABLE.
    """
    if {"-h", "--help"} & {*sys.argv}:
        print_help(arguments)
    given = parsed(arguments)
    known = inspect.signature(arguments).parameters
    if unknown := set().union(*by_size.values()) - known.keys():
        raise SystemExit(f"BY_SIZE sets {', '.join(sorted(unknown))}, which Args does not have")
    if not given.resume:
        for _ in range(2):  # the first sets lora_rank, on which others depend
            chosen = training(given.model, given.task, given.lora_rank, by_size)
            chosen = {name: chosen[name] for name in known if name in chosen}
            given = parsed(arguments, default=arguments(**chosen))
        if os.environ.get("RANK", "0") == "0":
            print(f"settings: {sys.argv[0]} {flags_of(given)}", file=sys.stderr)
        return check_numbers(given)
    path, script = Path(given.resume) / "config.json", Path(sys.argv[0]).stem
    if not path.is_file():
        raise SystemExit(f"--resume {given.resume} is no run directory: it has no config.json")
    config = read_json(path)
    if config.get("script", script) != script:
        other = f"a run of {config['script']}.py, not of {script}.py"
        raise SystemExit(f"--resume {given.resume} is {other}")
    before = restored(arguments, config.get("args"), path)
    now = parsed(arguments, default=before)
    for name in known:
        then, here = getattr(before, name), getattr(now, name)
        if then != here and name not in CHANGEABLE:
            flag = name.replace("_", "-")
            raise SystemExit(f"--resume: the run had --{flag} {then}, now it is {here}")
    return check_numbers(now)


def restored(arguments, saved, path):
    """-> the flags that config.json, the file `path`, keeps of a run, as their dataclass

    SystemExit names those that this version of the script does not have, or not with such a value.
    """
    if not isinstance(saved, dict):
        raise SystemExit(f"{path} has no flags of a training run")
    kinds = get_type_hints(arguments)
    if wrong := {k: v for k, v in saved.items() if k not in kinds or not fits(v, kinds[k])}:
        shown = ", ".join(f"{name} = {value!r:.40}" for name, value in wrong.items())
        now = "go on with the version of the run, or take them out of that file"
        raise SystemExit(f"{path} has {shown}, which this version does not take: {now}")
    is_tuple = lambda k, v: isinstance(v, list) and get_origin(kinds[k]) is not list
    lists = {k: tuple(v) for k, v in saved.items() if is_tuple(k, v)}
    return arguments(**saved | lists)


def fits(value, kind):
    """Whether a value of a JSON file is one of a field of this type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in inner
    if origin in (list, tuple):
        parts = value if isinstance(value, list) else [()]
        kinds = inner if origin is tuple and ... not in inner else inner[:1] * len(parts)
        return len(parts) == len(kinds) and all(map(fits, parts, kinds))
    if inner:  # int | None
        return any(fits(value, one) for one in inner)
    return type(value) is kind or kind is float and type(value) is int


def print_help(arguments):
    """--help, with flags in groups, whose titles are comments in the source of the dataclass."""
    import tyro

    left, groups = dict(arguments.__dataclass_fields__), {}
    source = inspect.getsource(arguments)
    for title, name in re.findall(r"^(?:class|    #) (\w.+)|^    (\w+): ", source, re.M):
        if title:
            own = {}  # the only fields of this group
            groups[title] = type(title, (arguments,), {"__dataclass_fields__": own})()
        elif name in left:  # a field that replaces another keeps its place
            own[name] = left.pop(name)
    tyro.cli(tyro.conf.OmitArgPrefixes[dict], default=groups, description=NOTE, args=["-h"])


def parsed(arguments, **options):
    """The flags as the dataclass; files of --task and --reward with their whole path."""
    import tyro

    args = tyro.cli(arguments, **options)
    for name in ("task", "reward"):
        if ".py" in (path := getattr(args, name, "")):
            setattr(args, name, str(Path(path).resolve()))
    return check_sizes(args)


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


MAX = 1 << 31  # of integers: a seed times 2^32 has 63 bits
RANGES = (  # words, whether a number is in the range, flags; of every other number see check_sizes
    (
        "must be at least 1",
        lambda x: x >= 1,
        "max_steps batch_size prompts_per_step num_iterations mc_num gen_length denoising_steps "
        "max_length masks_per_timestep train_steps shrink lora_alpha sequence_parallel eubo_beta",
    ),
    # a group of one completion has nothing to compare it with
    ("must be at least 2", lambda x: x >= 2, "num_generations branches"),
    ("must be at least 0 and below 1", lambda x: x < 1, "betas p_mask_context"),
    ("must be at least 0 and at most 1", lambda x: x <= 1, "p_mask_prompt omega ref_mixup lam"),
    (
        "must be between 0 and 1: the estimate divides by t and 1 - t",
        lambda x: 0 < x < 1,
        "t_range",
    ),
    (
        "must be above 0: at 0 all completions of a group are the same, and none is better than "
        "another",
        lambda x: x > 0,
        "temperature",
    ),
    (
        "must be above 0: gradients are scaled down to this norm; inf leaves them as they are",
        lambda x: x > 0,
        "max_grad_norm",
    ),
    ("must be above 0: at 0 all weights of wd1 are 0", lambda x: x > 0, "psi"),
)
ASCENDING = "accuracy_range", "t_range"


def check_sizes(args):
    """-> args; SystemExit names the first number that is NaN, huge, infinite or negative where the
    default is not, or a name that no file can have.
    """
    defaults = [*numbers_of(type(args))]
    signed = {name for name, _, default in defaults if default < 0}
    endless = {name for name, _, default in defaults if math.isinf(default)}
    endless |= {"max_grad_norm", "epsilon"}
    for name, flag, number in numbers_of(args):
        least = "" if name in signed else "at least 0 and "
        is_endless = not math.isfinite(number) and name not in endless
        if is_endless or (least and not 0 <= number):
            raise SystemExit(f"{flag} must be {least}finite")
        if type(number) is int and abs(number) >= MAX:
            raise SystemExit(f"{flag} must be below {MAX:,}")
    for name, value in vars(args).items():
        parts = re.split(r"[/,\s]", value) if isinstance(value, str) and name != "prompt" else ()
        if any(len(part.encode(errors="replace")) > 255 for part in parts):
            flag = name.replace("_", "-")
            raise SystemExit(f"--{flag} {value[:40]}...: no name has more than 255 bytes")
    return args


def numbers_of(args):
    """Yield (field, flag with its values, number) of every number in the flags. args: an object, or
    its class for the defaults.
    """
    for name, value in vars(args).items():
        values = value if isinstance(value, tuple) else (value,)
        flag = " ".join([f"--{name.replace('_', '-')}", *map(str, values)])
        yield from ((name, flag, one) for one in values if type(one) in (int, float))


def check_numbers(args):
    """-> args; SystemExit names the first number out of its range, or a sampler that cannot take
    the adapters.
    """
    if getattr(args, "rollout_backend", "") == "lmdeploy" and args.lora_rank:
        if not args.lora_merged_rollout:
            needed = "needs merged weights: add --lora-merged-rollout"
            raise SystemExit(f"--rollout-backend lmdeploy {needed}")
    for name, flag, number in numbers_of(args):
        for words, is_valid, names in RANGES:
            if name in names.split() and not is_valid(number):
                raise SystemExit(f"{flag} {words}")
        if name in ASCENDING and [*getattr(args, name)] != sorted(getattr(args, name)):
            raise SystemExit(f"{flag}: the lower end comes first")
    return args
