"""Benchmarks, one file each: load, prompt, score."""

from importlib import import_module
from pathlib import Path


def load_task(name):
    """--task NAME -> the module evals/NAME.py. SystemExit lists the tasks for an unknown name."""
    tasks = sorted(
        path.stem for path in Path(__file__).parent.glob("*.py") if "\ndef score(" in path.read_text(encoding="utf-8")
    )
    if name not in tasks:
        raise SystemExit(f"unknown task {name!r}: use one of {', '.join(tasks)}")
    return import_module(f"evals.{name}")
