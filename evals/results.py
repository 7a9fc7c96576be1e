"""The output directory of an evaluation: its files, what makes it one that goes on, its numbers.

config.json has the flags; the process that works in the directory holds a lock on it. A task has
samples.jsonl and result.json, which begins with the settings (everything that decides completions)
and gets the numbers at the end: in the directory itself, or of several tasks in a folder each,
beside table.md, which is rewritten after every task.
"""

import json
import math
import shlex
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from statistics import fmean as mean
from statistics import pstdev

from data.rows import read_json
from distributed.disk import new_directory, write_atomically, writing
from evals import samples

# of table.md: {key of a result or its settings: format}
TITLES = (
    "task n repeats score error by-subject answered cut-off tok/forward tok/s tokens block steps T"
)
COLUMNS = {
    "task": "",
    "n": "",
    "repeats": "",
    "accuracy": ".2%",
    "stderr": ".2%",
    "macro_accuracy": ".2%",
    "answered": ".2%",
    "truncated": ".2%",
    "tokens_per_forward": ".2f",
    "tokens_per_s": ".0f",
    "gen_length": "",
    "block_length": "",
    "denoising_steps": "",
    "temperature": "g",
}


def directory(flags, default):
    """-> the directory --resume, --out, or a new `default`. config.json is written once: --resume
    always starts from the flags of the first run."""
    if flags.resume:
        return Path(flags.resume)
    with writing(flags.out or default):
        out = Path(flags.out) if flags.out else new_directory(default)
        out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", asdict(flags) | {"command": shlex.join(sys.orig_argv)})
    return out


def begin(folder, settings):
    """Write the settings of a task. -> the places that are answered already

    SystemExit if a resumed run used other settings: samples of two settings, or of two models, do
    not make one number.
    """
    folder.mkdir(exist_ok=True)
    if not (path := folder / "result.json").is_file():
        write_json(path, {"settings": settings})
    old = read_json(path)["settings"]
    differ = [
        f"{key} {old.get(key)!r}, now {value!r}"
        for key, value in settings.items()
        # the number of ranks changes nothing, the batch size only rounding
        if old.get(key) != value and key not in ("batch_size", "ranks")
    ]
    if differ:
        take = "take the old value, or a new --out"
        raise SystemExit(f"--resume: {folder} was begun with {', '.join(differ)}; {take}")
    return {*map(samples.key, samples.gather(folder))}


def write_json(path, value):
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def table(made, lost):
    """Results as a Markdown table with aligned columns, then the tasks that were not evaluated.
    tok/s is that of one rank."""
    lines = [TITLES.split()]
    for result in made.values():
        known = result["settings"] | result
        cells = [(known.get(key), form) for key, form in COLUMNS.items()]
        lines.append(["" if value is None else format(value, form) for value, form in cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    rows = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    return (
        "\n".join(rows + [f"\n{name}: not evaluated: {why}" for name, why in lost.items()]) + "\n"
    )


def summary(work, rows, reward):
    """-> what result.json has of the rows of a task. reward: name of the shaped reward that they
    may have.

    stderr: that of the problems' own means, because several answers to one problem are not
    independent; sqrt(p(1 - p) / n) for one answer each. tokens_per_s: of one rank, without scoring.
    """

    def means(keys):
        """Mean score of the rows with each key."""
        groups = defaultdict(list)
        for key, row in zip(keys, rows, strict=True):
            groups[key].append(row["score"])
        return [mean(groups[key]) for key in sorted(groups)]

    column = lambda key: [row[key] for row in rows]
    task, examples, repeats = work.task, work.examples, work.settings["repeats"]
    problems, generated = means(column("index")), "tokens" in rows[0]
    result = {"task": task.NAME, "n": len(problems), "accuracy": mean(column("score"))}
    result["stderr"] = pstdev(problems) / math.sqrt(len(problems))
    if repeats > 1:
        result |= {"repeats": repeats, "accuracies": means(column("repeat"))}
    result["answered"] = mean(answer is not None for answer in column("answer"))
    result["truncated"] = mean(column("truncated")) if generated else None
    if "subject" in examples[0]:  # subjects count alike, however many questions they have
        subjects = means(examples[index]["subject"] for index in column("index"))
        result["macro_accuracy"] = mean(subjects)
    if generated:
        tokens, forwards = sum(column("tokens")), column("forwards")
        result |= {
            "tokens": tokens / len(rows),
            "tokens_per_forward": None if None in forwards else tokens / sum(forwards),
            "tokens_per_s": tokens / sum(column("seconds")),
        }
    if paid := [row["reward"] for row in rows if "reward" in row]:
        parts = {part: sum(row[part] for row in paid) / len(rows) for part in paid[0]}
        result["reward"] = {"name": reward, "mean": sum(parts.values()), "components": parts}
    failed = [f"index {row['index']}: {row['failed']}" for row in rows if "failed" in row]
    samples.print_faults(task.NAME, failed, "without a verdict, scored 0")
    return result | {"failed": len(failed)} | work.counts | {"settings": work.settings}
