"""Benchmarks, one file each: load, prompt, score. Here: their names, their prompts as token ids, and a mean score."""

import math
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

from models import prompt_ids

# the tasks whose hub rows or generators have a train and a validation split; others train on a file, where they take one
TRAIN_TASKS = ("arc_c", "countdown", "gsm8k", "hellaswag", "math500", "mbpp", "sudoku")
# what a command has scored first, so that what cannot work ends it before its work begins: a program, for the sandbox
TRIAL = "```python\npass\n```"


def load_task(name):
    """--task NAME -> the module evals/NAME.py. SystemExit lists the tasks for an unknown name."""
    tasks = sorted(
        path.stem
        for path in Path(__file__).parent.glob("*.py")
        if "\ndef score(" in path.read_text(encoding="utf-8")
    )
    if name not in tasks:
        raise SystemExit(f"unknown task {name!r}: use one of {', '.join(tasks)}")
    return import_module(f"evals.{name}")


def load_problems(task, split, data, tokenizer, max_prompt_length, limit=None):
    """-> [(example, prompt ids)], number of problems dropped because their prompt is too long. SystemExit if none is left,
    or if one holds the mask token: samplers refuse it, at the step that would ask it."""
    problems = [
        (example, prompt_ids(tokenizer, task.prompt(example)))
        for example in task.load(split, data, limit)
    ]
    if not problems:
        raise SystemExit(f"--data {data}: no problems in it")
    kept = [problem for problem in problems if len(problem[1]) <= max_prompt_length]
    if not kept:
        shortest = min(len(ids) for _, ids in problems)
        limit = f"--max-prompt-length (or --max-length) {max_prompt_length}"
        raise SystemExit(f"{limit}: the shortest {split} prompt has {shortest} tokens")
    mask = {
        i: token for token, i in tokenizer.get_added_vocab().items() if "mask" in token.lower()
    }  # so named in all families
    for number, (_, ids) in enumerate(problems):
        if inside := [mask[i] for i in ids if i in mask]:
            raise SystemExit(
                f"--data {data}: {split} prompt {number} holds the mask token {inside[0]}: remove it"
            )
    return kept, len(problems) - len(kept)


def score_all(task, completions, examples):
    """-> [score], by the task's score_batch where it has one: slow scorers keep all cores busy"""
    if hasattr(task, "score_batch"):
        return task.score_batch(completions, examples)
    return [
        task.score(completion, example)
        for completion, example in zip(completions, examples, strict=True)
    ]


def mean_score(engine, task, tokenizer, problems, **settings):
    """Mean exact score of one completion per problem, the problems dealt out over the ranks of a run. -> float

    problems: of load_problems; settings: of engine.generate.
    """
    share = math.ceil(len(problems) / dist.get_world_size())
    first = dist.get_rank() * share
    score = torch.zeros((), dtype=torch.float64, device=engine.device)
    if mine := problems[first : first + share]:
        trace = engine.generate([ids for _, ids in mine], sample_offset=first, **settings)
        score += sum(
            score_all(
                task,
                [trace.text(i, tokenizer) for i in range(len(mine))],
                [example for example, _ in mine],
            )
        )
    dist.all_reduce(score)
    return score.item() / len(problems)
