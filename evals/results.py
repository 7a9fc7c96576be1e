"""The output directory of an evaluation: its lock, its files, and how an interrupted run continues.

config.json has the flags; the process that works in the directory holds a lock on it. A task has
settings.json (everything that decides completions), samples.jsonl and result.json: in the directory
itself, or in a folder per task for evals/run.py, which also rewrites results.json and table.md
after every task.
"""

import json
import math
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import fmean as mean
from statistics import pstdev

import tyro

from distributed.disk import lock, new_directory, write_atomically
from run import report
from run.flags import check_sizes, restored

HEADER = (
    "task|n|score|by subject|answered|cut off|tok/forward|tok/s|shots|tokens, block, steps|"
    "temperature"
)
SHOWN = 20  # faults that are listed on stderr; result.json has their number


def command_line(kind, program, description):
    """Flags of evals/<program>.py as a `kind`; with --resume DIR those of that run are the
    defaults. SystemExit if DIR belongs to another program."""
    args = tyro.cli(kind, description=description)
    if not args.resume:
        return check_sizes(args)
    saved = read_json(Path(args.resume) / "config.json", {})
    saved.pop("command", "")
    if saved.pop("program", "") != program:
        raise SystemExit(
            f"--resume {args.resume} is no directory of evals/{program}.py: "
            "config.json with the flags of this program is not there"
        )
    default = restored(kind, saved, Path(args.resume) / "config.json")
    return check_sizes(tyro.cli(kind, default=default, description=description))


def take_directory(flags, program, default, held):
    """-> the directory --resume, --out, or a new `default`, locked until the ExitStack `held`
    closes or the process ends. config.json is written once: --resume always starts from the flags
    of the first run.

    SystemExit if another process works there, or if the directory or its config.json cannot be
    created.
    """
    out = flags.resume or flags.out
    try:
        out = Path(out) if out else new_directory(default)
        out.mkdir(parents=True, exist_ok=True)
        mode = "r+" if flags.resume else "x"
        config = held.enter_context(open(out / "config.json", mode, encoding="utf-8"))
    except OSError as error:
        raise SystemExit(
            f"--out {out}: the directory cannot be created ({error.strerror})"
        ) from error
    lock(config, out, "evaluation")
    if not flags.resume:
        command = {"program": program, "command": shlex.join(sys.orig_argv)}
        json.dump(asdict(flags) | command, config, indent=1)
        config.flush()
    return out


def refuse_overwriting(out):
    """SystemExit if flags, samples or results lie in the directory `out` or in its folders. "" is
    no directory."""
    if out and (found := sorted([*Path(out).glob("*.json*"), *Path(out).glob("*/*.json*")])):
        raise SystemExit(
            f"--out {out}: {found[0].relative_to(out)} would be overwritten; "
            "name another directory, continue with --resume, or remove the old results"
        )


def begin(name, folder, settings, resume):
    """Write settings.json of a task. SystemExit if a resumed run used other settings: samples of
    two settings, or of two models, do not make one number."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "settings.json"
    old = read_json(path, settings)
    differ = [
        f"{key} {old.get(key)!r}, now {value!r}"
        for key, value in settings.items()
        if old.get(key) != value and key != "batch_size"  # which changes only rounding
    ]
    if differ:
        raise SystemExit(
            f"--resume {resume}: {name} was begun with {', '.join(differ)}; "
            "take the old value, or a new --out"
        )
    write_json(path, settings)


def write_json(path, value):
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def read_json(path, default):
    """-> its value; `default` if there is no such file"""
    return report.read_json(path) if path.is_file() else default


def write_all(out, model, results, lost):
    """results.json and table.md of the tasks so far."""
    write_json(out / "results.json", {"model": model, "tasks": results, "not evaluated": lost})
    write_atomically(out / "table.md", table(results, lost))


def table(results, lost):
    """Results as a Markdown table with aligned columns, then the tasks that were not evaluated.
    Scores in percent; tok/s of one rank."""
    lines = [HEADER.split("|")]
    percent = lambda value: "" if value is None else f"{100 * value:.2f}"
    for name, result in results.items():
        how, forward = result["settings"], result.get("tokens_per_forward")
        line = [
            name,
            f"{result['n']} x {how['repeats']}" if how["repeats"] > 1 else f"{result['n']}",
            f"{percent(result['accuracy'])} ± {percent(result['stderr'])}",
            *map(percent, (result.get("macro_accuracy"), result["answered"], result["truncated"])),
        ]
        if "completions" in how:  # nothing is known of their making
            line += [""] * 5
        else:
            line += [
                "" if forward is None else f"{forward:.2f}",
                f"{result['tokens_per_s']:.0f}",
                f"{how['shots']}",
                f"{how['gen_length']}, {how['block_length']}, {how['denoising_steps']}",
                f"{how['temperature']:g}",
            ]
        lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    rows = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    rows += [f"\n{name}: not evaluated: {message}" for name, message in lost.items()]
    return "\n".join(rows) + "\n"


def summary(name, rows, examples, repeats, reward):
    """Everything in a result.json but its settings. reward: name of the shaped reward that rows may
    have.

    stderr: that of the problems' own means, because several answers to one problem are not
    independent; sqrt(p(1 - p) / n) for one answer each. tokens_per_s: of one rank, without scoring.
    """

    def means(key):
        groups = {}
        for row in rows:
            groups.setdefault(key(row), []).append(row["score"])
        return {group: mean(groups[group]) for group in sorted(groups)}

    problems = means(lambda row: row["index"]).values()
    result = {"task": name, "n": len(problems), "accuracy": mean(row["score"] for row in rows)}
    result["stderr"] = pstdev(problems) / math.sqrt(len(problems))
    if repeats > 1:
        accuracies = [*means(lambda row: row["repeat"]).values()]
        result |= {"repeats": repeats, "accuracies": accuracies}
    generated = "tokens" in rows[0]
    result["answered"] = mean(row["answer"] is not None for row in rows)
    result["truncated"] = mean(row["truncated"] for row in rows) if generated else None
    if "subject" in examples[0]:  # subjects count alike, however many questions they have
        subjects = means(lambda row: examples[row["index"]]["subject"])
        result["macro_accuracy"] = mean(subjects.values())
    if generated:
        tokens, seconds = (sum(row[key] for row in rows) for key in ("tokens", "seconds"))
        forwards = [row["forwards"] for row in rows]
        result |= {
            "tokens": tokens / len(rows),
            "tokens_per_forward": None if None in forwards else tokens / sum(forwards),
            "tokens_per_s": tokens / seconds,
        }
    if paid := [row["reward"] for row in rows if "reward" in row]:
        parts = {part: sum(row[part] for row in paid) / len(rows) for part in paid[0]}
        result["reward"] = {"name": reward, "mean": sum(parts.values()), "components": parts}
    failed = [f"index {row['index']}: {row['failed']}" for row in rows if "failed" in row]
    print_faults(name, failed, "without a verdict, scored 0")
    return result | {"failed": len(failed)}


def print_faults(source, faults, what):
    """One line on stderr with the number of faults and the first SHOWN of them; nothing if there
    are none."""
    if faults:
        more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        print(f"{source}: {len(faults)} {what}: {'; '.join(faults[:SHOWN])}{more}", file=sys.stderr)
