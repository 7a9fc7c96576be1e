"""The directory of an evaluation: who may write there, what lies in it, and how a run that was cut goes on.

config.json has the flags, and whoever works there holds its lock. settings.json (all that decides completions), samples.jsonl
and result.json of a task lie in the directory itself, of the tasks of evals/run.py each in its own folder; beside these are
results.json and table.md, rewritten after every task.
"""

import fcntl
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path

import tyro


def command_line(kind: type, program: str, description: str) -> object:
    """Flags of evals/<program>.py as a `kind`; with --resume DIR those of that run are the defaults. SystemExit where DIR is of
    another program."""
    args = tyro.cli(kind, description=description)
    if not args.resume:
        return args
    try:
        saved = json.loads((Path(args.resume) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        saved = {}
    if saved.pop("program", "") != program or saved.keys() != {
        field.name for field in fields(kind)
    }:
        raise SystemExit(
            f"--resume {args.resume} is no directory of evals/{program}.py: config.json with its flags is not there"
        )
    saved = {
        name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()
    }
    return tyro.cli(kind, default=kind(**saved), description=description)


@contextmanager
def directory(flags: object, program: str, default: str) -> Iterator[Path]:
    """The directory --resume, a new --out, or a new `default`, and its lock, which the system takes back from a process that
    dies. config.json is written once: --resume alone always takes the flags that the run was begun with.

    SystemExit where another process works there, where it cannot be made, or where anything of another run would be lost.
    """
    out = Path(flags.resume) if flags.resume else make_out(flags.out, default)
    with open(out / "config.json", "r+" if flags.resume else "x", encoding="utf-8") as config:
        try:
            fcntl.flock(config, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SystemExit(
                f"{out}: another evaluation works there; wait for its end, or take a new --out"
            ) from error
        except OSError as error:
            print(
                f"{out}: no lock ({error.strerror}): start no second evaluation there",
                file=sys.stderr,
            )
        if not flags.resume:
            json.dump(asdict(flags) | {"program": program}, config, indent=1)
            config.flush()
        yield out


def make_out(out: str, default: str) -> Path:
    """Make the directory `out`; where `out` is empty, `default`, with -2, -3 ... where that exists."""
    path, number = Path(out or default), 1
    while True:
        try:  # mkdir itself is the test: of two evaluations in one second only one gets the name
            path.mkdir(parents=True, exist_ok=bool(out))
            break
        except OSError as error:
            if out or not path.exists():
                raise SystemExit(
                    f"--out {path}: the directory cannot be made ({error.strerror})"
                ) from error
            number += 1
            path = Path(f"{default}-{number}")
    keep_results(path)
    return path


def keep_results(out: str | Path, tasks: Iterable[str] = ()) -> None:
    """SystemExit where flags, rows or results lie in the directory `out`, or in those of `tasks` in it; nothing for an empty
    name."""
    if not out:
        return
    folders = [Path(out), *(Path(out) / task for task in tasks)]
    found = [
        file
        for folder in folders
        for file in (folder / "samples.jsonl", *sorted(folder.glob("samples-*.jsonl")))
    ]
    found += [Path(out) / name for name in ("config.json", "result.json", "results.json")]
    if files := [str(file.relative_to(out)) for file in found if file.exists()]:
        rest = "name another directory, go on with --resume, or remove them"
        raise SystemExit(f"--out {out}: {' and '.join(files)} would be overwritten; {rest}")


def begin(name: str, folder: Path, settings: dict, resume: str) -> None:
    """Write settings.json of a task. SystemExit where a resumed run began it with others: samples of two settings, or of two
    models, do not make one number."""
    folder.mkdir(parents=True, exist_ok=True)
    path, settings = folder / "settings.json", json.loads(json.dumps(settings))
    before = json.loads(path.read_text(encoding="utf-8")) if resume and path.is_file() else settings
    free = {"batch_size"}  # changes no completion beyond rounding
    differ = sorted(
        key
        for key in before.keys() | settings.keys()
        if before.get(key) != settings.get(key) and key not in free
    )
    if differ:
        changed = ", ".join(
            f"{key} {before.get(key)!r}, now {settings.get(key)!r}" for key in differ
        )
        raise SystemExit(
            f"--resume {resume}: {name} was begun with {changed}; take the old value, or a new --out"
        )
    write(path, settings)


def finished(out: Path) -> dict[str, dict]:
    """Results of the tasks that results.json has."""
    path = out / "results.json"
    return json.loads(path.read_text(encoding="utf-8"))["tasks"] if path.is_file() else {}


def write(path: Path, value: object) -> None:
    """JSON; a process killed at any moment leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def write_all(out: Path, model: str, results: dict[str, dict], lost: dict[str, str]) -> None:
    """results.json and table.md of the tasks so far."""
    write(out / "results.json", {"model": model, "tasks": results, "not evaluated": lost})
    (out / "table.md").write_text(table(results, lost), encoding="utf-8")


def table(results: dict[str, dict], lost: dict[str, str]) -> str:
    """Results as a Markdown table with aligned columns; percent, and tok/s of one rank. Behind it what was not evaluated."""
    head = [
        "task",
        "n",
        "score",
        "by subject",
        "answered",
        "cut off",
        "tok/forward",
        "tok/s",
        "shots",
        "tokens, block, steps",
    ]
    lines = [[*head, "temperature"]]
    percent = lambda value: "" if value is None else f"{100 * value:.2f}"
    for name, result in results.items():
        how, forward = result["settings"], result["tokens_per_forward"]
        times = f" x {how['repeats']}" if how["repeats"] > 1 else ""
        line = [
            name,
            f"{result['n']}{times}",
            f"{percent(result['accuracy'])} ± {percent(result['stderr'])}",
        ]
        line += [
            percent(result.get("macro_accuracy")),
            percent(result["answered"]),
            percent(result["truncated"]),
        ]
        line += [
            "" if forward is None else f"{forward:.2f}",
            f"{result['tokens_per_s']:.0f}",
            str(how["shots"]),
        ]
        line += [
            f"{how['gen_length']}, {how['block_length']}, {how['denoising_steps']}",
            f"{how['temperature']:g}",
        ]
        lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    rows = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    return (
        "\n".join(
            [*rows, *(f"\n{name}: not evaluated: {message}" for name, message in lost.items())]
        )
        + "\n"
    )
