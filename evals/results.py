"""The output directory of an evaluation: its lock, its files, and how an interrupted run continues.

config.json has the flags; the process that works in the directory holds a lock on it. A task has
samples.jsonl and result.json, which begins with the settings (everything that decides completions)
and gets the numbers at the end: in the directory itself, or of several tasks in a folder each,
beside table.md, which is rewritten after every task.
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
from run.flags import check_numbers, restored

HEADER = (
    "task|n|score|by subject|answered|cut off|tok/forward|tok/s|tokens, block, steps|temperature"
)
SHOWN = 20  # faults that are listed on stderr; result.json has their number


def command_line(kind, task):
    """Flags of evals/run.py as a `kind`, those of evals/<task>.py if there is one; with --resume
    DIR those of that run are the defaults. SystemExit if DIR has none, or of another task."""
    description = f"Evaluate a model, or score completions, on {task or 'benchmarks'}."
    args = tyro.cli(kind, default=kind(tasks=task), description=description)
    if args.resume:
        path = Path(args.resume) / "config.json"
        saved = read_json(path, {"tasks": ""})
        saved.pop("command", "")
        if not saved.get("tasks") or task not in ("", saved["tasks"]):
            raise SystemExit(f"--resume {args.resume} is no evaluation of {task or 'tasks'}")
        default = restored(kind, saved, path)
        args = tyro.cli(kind, default=default, description=description)
    return check_numbers(args)


def take_directory(flags, default, held):
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
        problem = f"the directory cannot be created ({error.strerror})"
        raise SystemExit(f"--out {out}: {problem}") from error
    lock(config, out, "evaluation")
    if not flags.resume:
        json.dump(asdict(flags) | {"command": shlex.join(sys.orig_argv)}, config, indent=1)
        config.flush()
    return out


def refuse_overwriting(flags):
    """SystemExit if there is something in the directory --out."""
    if flags.out and not flags.resume and any(Path(flags.out).glob("*")):
        another = "name another one, continue with --resume, or remove the old results"
        raise SystemExit(f"--out {flags.out} is not empty: {another}")


def begin(name, folder, settings, resume):
    """Write the settings of a task. SystemExit if a resumed run used other ones: samples of two
    settings, or of two models, do not make one number."""
    folder.mkdir(parents=True, exist_ok=True)
    result = read_json(folder / "result.json", {"settings": settings})
    old = result["settings"]
    differ = [
        f"{key} {old.get(key)!r}, now {value!r}"
        for key, value in settings.items()
        # the number of ranks changes nothing, the batch size only rounding
        if old.get(key) != value and key not in ("batch_size", "ranks")
    ]
    if differ:
        take = "take the old value, or a new --out"
        raise SystemExit(f"--resume {resume}: {name} was begun with {', '.join(differ)}; {take}")
    write_json(folder / "result.json", result)


def write_json(path, value):
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def read_json(path, default):
    """-> its value; `default` if there is no such file"""
    return report.read_json(path) if path.is_file() else default


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
            line += [""] * 4
        else:
            line += [
                "" if forward is None else f"{forward:.2f}",
                f"{result['tokens_per_s']:.0f}",
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
