"""Completions and their scores: made by an engine or read from a file, scored while the next are made, and summed up.

A row of samples.jsonl has index (of the example), repeat (where there are several), completion (text without special tokens,
cut behind the first EOS), score and answer (what the task's `extract` finds); of a model also prompt (messages), truncated (no
EOS within the budget), tokens (up to and with the EOS), forwards (None where the engine does not tell) and seconds (wall time
of its batch, shared equally); where the scorer gave no verdict, failed (why), with score 0.
"""

import gzip
import json
import math
import os
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import BinaryIO

from tqdm import tqdm

from evals import math_grader, score_all

NAMED = 20  # faults that are named one by one on stderr; result.json counts all
WAITING = 4  # batches that may wait for their scores while the engine goes on


def given(
    path: str, num_examples: int, repeats: int = 1
) -> tuple[list[dict], list[str], list[str]]:
    """Rows {"index", "completion"} of a .jsonl (or .jsonl.gz), in file order; other keys are dropped, so a samples.jsonl can be
    scored again. With repeats > 1 they also have "repeat", one of 0..repeats-1.

    -> rows, faults, missing. faults: one text for each line that is not used, with its number: no JSON, no such row, an index
    that is not in 0..num_examples-1, or one that an earlier line has. missing: the examples (with repeats also the repeat)
    that have no completion. SystemExit where no line can be used.
    """
    if not Path(path).is_file():
        raise SystemExit(f"{path}: no such file")
    rows, faults, lines = [], [], {}
    with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
        for line, raw in enumerate(_lines(file, faults), 1):
            if not raw.strip():
                continue
            row = _row(raw, num_examples, repeats)
            if isinstance(row, dict) and (row["index"], row.get("repeat", 0)) in lines:
                again = f" of repeat {row['repeat']}" if repeats > 1 else ""
                row = f"index {row['index']}{again} stands already in line {lines[row['index'], row.get('repeat', 0)]}"
            if isinstance(row, str):
                faults.append(f"line {line}: {row}")
                continue
            lines[row["index"], row.get("repeat", 0)] = line
            rows.append(row)
    if not rows:
        raise SystemExit(
            f"{path} {faults[0]}"
            if len(faults) == 1
            else "; ".join([f"{path}: no completions", *faults[:NAMED]])
        )
    asked = product(range(num_examples), range(repeats))
    missing = [
        f"{i} of repeat {repeat}" if repeats > 1 else str(i)
        for i, repeat in asked
        if (i, repeat) not in lines
    ]
    return rows, faults, missing


def _lines(file: BinaryIO, faults: list[str]) -> Iterator[bytes]:
    """Lines of a file; a .gz that is damaged or cut off ends there, and is one of the faults."""
    try:
        yield from file
    except (OSError, EOFError, zlib.error) as error:
        faults.append(f"the rest cannot be read ({error})")


def _row(raw: bytes, num_examples: int, repeats: int) -> dict | str:
    """The row of a line, or what is wrong with it."""
    try:
        row = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return "not UTF-8"
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number of 5,000 digits and 100,000 brackets are no JSONDecodeErrors
        return f"not JSON ({getattr(error, 'msg', type(error).__name__)})"
    if not isinstance(row, dict):
        return f"a JSON object is needed, not {type(row).__name__}"
    index, completion, repeat = row.get("index"), row.get("completion"), row.get("repeat", 0)
    if type(index) is not int or not isinstance(completion, str):
        return 'needs {"index": integer, "completion": text}'
    if not 0 <= index < num_examples:
        return f"index {index} is outside 0..{num_examples - 1}; check --data and --split"
    if type(repeat) is not int or not 0 <= repeat < repeats:
        return f"repeat {ascii(repeat)[:20]} is not one of 0..{repeats - 1}; check --repeats"
    return {"index": index, **({"repeat": repeat} if repeats > 1 else {}), "completion": completion}


def name_faults(source: str, faults: list[str], what: str) -> None:
    """One line on stderr that counts faults and names the first NAMED; nothing where there are none."""
    if faults:
        more = f"; and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
        print(f"{source}: {len(faults)} {what}: {'; '.join(faults[:NAMED])}{more}", file=sys.stderr)


def shares(
    done: set[tuple[int, int]], num_examples: int, repeats: int, most: int, ranks: int
) -> list[tuple[int, int, int]]:
    """(repeat, first, end) of the calls of the engine that answer all but `done`, a set of (repeat, index): at most `most`
    examples a call, and for every rank a call where there are so many. Dealt out to the ranks in turn."""
    left = [key for key in product(range(repeats), range(num_examples)) if key not in done]
    most, calls = min(most, math.ceil(len(left) / ranks)), []
    for repeat, i in left:
        if calls and calls[-1][0] == repeat and calls[-1][2] == i < calls[-1][1] + most:
            calls[-1] = (repeat, calls[-1][1], i + 1)
        else:
            calls.append((repeat, i, i + 1))
    return calls


def generated(
    engine: object,
    tokenizer: object,
    prompts: list[list[dict]],
    calls: list,
    repeats: int,
    seed: int,
    **sampling: object,
) -> Iterator[list[dict]]:
    """Rows of each of `calls` (`shares`), without scores. Repeat r is drawn with seed + r, example i as sample i of that seed,
    so that neither calls nor ranks change a completion. `sampling` goes to engine.generate."""
    from models import prompt_ids  # here, so that scoring alone does not need them

    for repeat, first, end in calls:
        began = perf_counter()
        ids = [prompt_ids(tokenizer, messages) for messages in prompts[first:end]]
        trace = engine.generate(
            ids, num_samples=1, sample_offset=first, **sampling, seed=seed + repeat
        )
        kept = [
            row[mask].tolist()
            for row, mask in zip(trace.completion_ids, trace.completion_mask, strict=True)
        ]
        truncated = trace.truncated.tolist()
        forwards = [None] * len(ids) if trace.num_forwards is None else trace.num_forwards.tolist()
        seconds = (perf_counter() - began) / len(ids)
        yield [
            {
                "index": first + i,
                **({"repeat": repeat} if repeats > 1 else {}),
                "prompt": prompts[first + i],
                "completion": tokenizer.decode(kept[i], skip_special_tokens=True),
                "truncated": truncated[i],
                "tokens": len(kept[i]),
                "forwards": forwards[i],
                "seconds": seconds,
            }
            for i in range(len(ids))
        ]


def scored(
    task: ModuleType, rows: list[dict], examples: list[dict], reward: Callable | None = None
) -> list[dict]:
    """Rows with score, answer, where there is a `reward` its components, and `failed` where no verdict could be had.

    Where a completion makes the scorer of all raise, each is scored by itself and that one has score 0 and the exception.
    SystemExit (the sandbox does not work: SandboxError) says nothing about completions and is raised.
    """
    completions = [row["completion"] for row in rows]
    asked = [examples[row["index"]] for row in rows]
    try:
        scores = score_all(task, completions, asked)
    except Exception:
        scores = [
            _alone(task, completion, example)
            for completion, example in zip(completions, asked, strict=True)
        ]
    for row, example, score in zip(rows, asked, scores, strict=True):
        row |= (
            {"score": 0.0, "answer": None, "failed": score}
            if isinstance(score, str)
            else {"score": score}
        )
        try:
            row["answer"] = None if "failed" in row else task.extract(row["completion"], example)
            if reward:
                row["reward"] = reward([row["completion"]], [example])[0]
        except Exception as error:
            row |= {
                "score": 0.0,
                "answer": None,
                "failed": f"{type(error).__name__}: {str(error)[:200]}",
            }
        if (
            row["answer"]
            and not row["score"]
            and any(text in row["answer"] for text in math_grader.NO_VERDICT)
        ):
            if math_grader.lacks_verdict(lambda: task.score(row["completion"], example)):  # noqa: B023
                row["failed"] = "the math grader gave no verdict"
    return rows


def _alone(task: ModuleType, completion: str, example: dict) -> float | str:
    """The score of one completion, or the exception that it causes."""
    try:
        return score_all(task, [completion], [example])[0]
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def write_scored(
    path: Path,
    batches: Iterator,
    task: ModuleType,
    examples: list[dict],
    reward: Callable | None,
    bar: tqdm,
) -> None:
    """Append the rows of batches to a .jsonl. A thread scores a batch while the next is made: the engine does not wait.
    SystemExit where the sandbox does not work."""
    waiting = deque()
    with open(path, "a", encoding="utf-8") as file, ThreadPoolExecutor(1) as scorer:

        def write(most: int) -> None:
            while waiting and (len(waiting) > most or waiting[0].done()):
                rows = waiting.popleft().result()
                file.writelines(json.dumps(row) + "\n" for row in rows)
                file.flush()
                bar.update(len(rows))

        try:
            for rows in batches:
                waiting.append(scorer.submit(scored, task, rows, examples, reward))
                write(WAITING)
        finally:  # what was made is kept, also where the engine ends in an error
            write(0)


def read_samples(folder: Path) -> list[dict]:
    """All rows of samples.jsonl and of what other ranks wrote, by repeat and index. A last line without an end was being
    written when its rank was killed."""
    rows = {}
    for path in sorted(folder.glob("samples*.jsonl")):
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
            try:
                row = json.loads(line)
                rows[row.get("repeat", 0), row["index"]] = row
            except (ValueError, AttributeError, KeyError) as error:
                raise SystemExit(
                    f"{path} line {number} is damaged; remove that line, and its sample is made again"
                ) from error
    return [rows[key] for key in sorted(rows)]


def gather(folder: Path) -> list[dict]:
    """`read_samples`, put into one samples.jsonl; one rank alone calls it."""
    rows = read_samples(folder)
    (folder / ".samples.tmp").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    os.replace(folder / ".samples.tmp", folder / "samples.jsonl")
    for path in folder.glob("samples-*.jsonl"):
        path.unlink()
    return rows


def summary(name: str, rows: list[dict], examples: list[dict], repeats: int = 1) -> dict:
    """What a result.json says of scored rows: all but settings.

    stderr: of a mean of independent problems; with repeats that of the problems' own means, because answers to one problem
    are no independent ones. tokens_per_s: of one rank, its scoring left out.
    """
    n = len(rows)
    accuracy = sum(row["score"] for row in rows) / n
    stderr, spread = math.sqrt(accuracy * (1 - accuracy) / n), {}
    by_problem, by_repeat, by_subject = {}, {}, {}
    for row in rows:
        by_problem.setdefault(row["index"], []).append(row["score"])
        by_repeat.setdefault(row.get("repeat", 0), []).append(row["score"])
        by_subject.setdefault(examples[row["index"]].get("subject"), []).append(row["score"])
    mean = lambda scores: sum(scores) / len(scores)
    if repeats > 1:
        stderr = math.sqrt(
            sum((mean(scores) - accuracy) ** 2 for scores in by_problem.values())
        ) / len(by_problem)
        spread = {
            "repeats": repeats,
            "accuracies": [mean(by_repeat[repeat]) for repeat in sorted(by_repeat)],
        }
    made = "tokens" in rows[0]
    result = {"task": name, "n": len(by_problem), "accuracy": accuracy, "stderr": stderr, **spread}
    result["answered"] = sum(row["answer"] is not None for row in rows) / n
    result["truncated"] = sum(row["truncated"] for row in rows) / n if made else None
    if None not in by_subject:  # the subjects count alike, however many questions they have
        result["macro_accuracy"] = mean([mean(scores) for scores in by_subject.values()])
    if made:
        tokens, forwards = sum(row["tokens"] for row in rows), [row["forwards"] for row in rows]
        result["tokens"] = tokens / n
        result["tokens_per_forward"] = None if None in forwards else tokens / sum(forwards)
        result["tokens_per_s"] = tokens / sum(row["seconds"] for row in rows)
    if components := next((list(row["reward"]) for row in rows if "reward" in row), None):
        means = {
            part: sum(row.get("reward", {}).get(part, 0.0) for row in rows) / n
            for part in components
        }
        result["reward"] = {"mean": sum(means.values()), "components": means}
    failed = [row for row in rows if "failed" in row]
    result["failed"] = len(failed)
    name_faults(
        name,
        [f"index {row['index']}: {row['failed']}" for row in failed],
        "without a verdict, scored 0",
    )
    return result
