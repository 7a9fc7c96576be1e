"""Preference pairs: one prompt with a chosen and a rejected answer, one object from file to loss.

Pairs can be made of a model's own answers, scored by the task: sample several answers to each
prompt of a split, then pair them.

    python evals/countdown.py --model tiny-sdar --split train --repeats 8 --temperature 1 \\
        --out runs/samples/train
    python data/preferences.py --samples runs/samples/train/samples.jsonl \\
        --out runs/pairs/train.jsonl
"""

import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.rows import describe_columns, hub_splits, is_own, open_rows, read_file
from data.tokens import as_messages, is_dialogue, token_rows, unreadable, without_questions
from distributed.disk import writing

SPLITS = "train", "validation", "test"
# what a split is called, the first that exists; ultrafeedback_binarized: train_prefs
HUB_ENDINGS, FILE_ENDINGS = ("_prefs", ""), (".jsonl", ".csv", ".parquet", ".jsonl.gz")
SIDES = "chosen", "rejected"
COLUMNS = (
    "chosen and rejected, as messages that end with an assistant turn or as text, and a prompt"
)


def training_pairs(task, data, score_all, asked=()):
    """Pairs to train on, {"prompt": messages, "chosen": text, "rejected": text} or Dropped.

    data: a file (.jsonl, .parquet), a folder of such files (train.jsonl, validation.jsonl,
    test.jsonl) or a hub id, with columns chosen and rejected, each text or messages, and prompt,
    which is optional with messages (the layout of ultrafeedback_binarized). Empty or a preset of
    the task: see gold_pairs.
    score_all: that of evals. asked: prompts that the run is scored on; pairs with one are left out.
    """
    yield from without_questions(pairs_of(task, data, "train", score_all), asked)


def held_out_pairs(task, split, data, eval_pairs, limit, score_all):
    """-> at most `limit` pairs that are not trained on. split: validation or test.

    eval_pairs: file (the same pairs for both splits), folder or hub id. Empty: the splits of
    `data`, the training data; a file has none. If there is a test split but no validation split,
    its even rows are for validation and its odd ones for testing.
    """
    source, first, step = eval_pairs or data, 0, 1
    if not is_own(task, source):
        names = splits_of(source) or (SPLITS if eval_pairs else ())
        if "test" in names and "validation" not in names:
            split, first, step = "test", int(split == "test"), 2
        if split not in names:
            return []
    pairs = pairs_of(task, source, split, score_all)
    return list(islice(pairs, first, first + step * limit, step))


def pairs_of(task, data, split, score_all):
    """Pairs of a task, of a file, or of one split of a folder or hub data set."""
    if is_own(task, data):
        return gold_pairs(task, split, data, score_all)
    name = splits_of(data).get(split, split)
    if Path(data).is_dir():
        if name == split:
            files = f"no {split}.jsonl and no {split}.parquet"
            raise SystemExit(f"--data {data}: the folder has {files}")
        data = f"{data}/{name}"
    return map(preference, open_rows(data, name, task.PRESETS))


def splits_of(data):
    """-> {split: its file in a folder, or its name in a hub data set}; {} for a file."""
    found, endings = hub_splits(data), HUB_ENDINGS
    if Path(data).is_dir():
        found, endings = os.listdir(data), FILE_ENDINGS
    names = [(split, split + ending) for split in SPLITS for ending in reversed(endings)]
    return {split: name for split, name in names if name in found}


def gold_pairs(task, split, preset, score_all):
    """-> the task's gold answers, each with the first of the next eight that scores less on its
    problem as the rejected side.
    """
    if not hasattr(task, "answer"):
        needed = f"--data must name rows of {COLUMNS}"
        raise SystemExit(f"{task.NAME} has no answers to make pairs of: {needed}")
    answers, problems = [], []
    for problem in task.load(split, preset):
        with suppress(ValueError):  # a problem without a solution makes no pair
            answers.append(task.answer(problem, 0))
            problems.append(problem)
    wrong, right = {}, score_all(task, answers, problems)
    for k in range(1, 9):
        left = [i for i in range(len(answers)) if i not in wrong]
        others = [answers[(i + k) % len(answers)] for i in left]
        scores = score_all(task, others, [problems[i] for i in left])
        found = zip(left, others, scores, strict=True)
        wrong |= {i: text for i, text, score in found if score < right[i]}
    return [
        {"prompt": task.prompt(problems[i]), "chosen": answers[i], "rejected": wrong[i]}
        for i in sorted(wrong)
    ]


def preference(row):
    """A row of a file -> {"prompt": messages, "chosen": text, "rejected": text}, or Dropped.

    If a side is messages, its last turn is the answer, and the turns before it are the prompt,
    which must be the same on both sides.
    """
    prompt, contexts, answers = as_messages(row.get("prompt")), [], []
    for side in map(row.get, SIDES):
        turns = side if is_dialogue(side) else [{"role": "assistant", "content": side}]
        # its own turns may hold a system turn or history, more than the prompt column
        contexts.append(turns[:-1] or prompt)
        answers.append(turns[-1]["content"] if turns[-1]["role"] == "assistant" else None)
    if contexts[0] != contexts[1]:
        return unreadable(row, "have sides that answer different prompts")
    if not is_dialogue(contexts[0]) or not all(isinstance(answer, str) for answer in answers):
        return unreadable(row, f"cannot be read, needed are {COLUMNS}")
    return {"prompt": contexts[0]} | dict(zip(SIDES, answers, strict=True))


def encode_pairs(pairs, tokenizer, model, max_length):
    """-> TokenRows of (prompt ids, chosen ids, rejected ids)."""
    return token_rows(pairs, tokenizer, model, max_length, SIDES)


def pairs_of_samples(rows, per_prompt):
    """Scored answers, several to a prompt -> rows in the layout of ultrafeedback_binarized.

    rows: {"index", "prompt": messages, "completion", "score"}, of samples.jsonl of an evaluation.
    Of the distinct answers to a prompt the best goes with the worst, the second with the second to
    last, at most per_prompt times and only if the scores differ: no answer is used twice.
    """
    answers, prompts, pairs = {}, {}, []
    for row in rows:
        if row["completion"].strip():
            answers.setdefault(row["index"], {}).setdefault(row["completion"], row["score"])
            prompts[row["index"]] = row["prompt"]
    for index, scored in sorted(answers.items()):
        # The sort is stable: equal scores stay in the order of sampling.
        best, prompt = sorted(scored, key=scored.get, reverse=True), prompts[index]
        for sides in [*zip(best, best[::-1], strict=True)][:per_prompt]:
            if scored[sides[0]] > scored[sides[1]]:
                turns = ([*prompt, {"role": "assistant", "content": text}] for text in sides)
                pair = dict(zip(SIDES, turns, strict=True))
                pairs.append({"prompt": prompt[-1]["content"]} | pair)
    return pairs


def read_samples(path):
    """-> rows of samples.jsonl. SystemExit names the first line that can make no pair."""
    rows, prompts = [], {}
    needed = "index (integer), prompt (messages), completion (text) and score (number)"
    for line, row in read_file(path):
        index, prompt, text, score = map(row.get, ("index", "prompt", "completion", "score"))
        is_scored = isinstance(text, str) and isinstance(score, int | float)
        problem = ""
        if not (is_scored and type(index) is int and is_dialogue(prompt)):
            problem = f"needs {needed}, has {describe_columns(row)}"
        elif prompts.setdefault(index, prompt) != prompt:
            problem = f"index {index} had another prompt before; are these two evaluations?"
        if problem:
            raise SystemExit(f"{path} line {line}: {problem}")
        rows.append(row)
    return rows


@dataclass
class Args:
    samples: str
    """samples.jsonl of an evaluation with --repeats above 1 and a temperature"""
    out: str
    """.jsonl of pairs to write; algos/vrpo.py --data takes a folder with train.jsonl,
    validation.jsonl and test.jsonl"""
    per_prompt: int = 1
    """most pairs of a prompt, no answer in two of them"""


def main(args):
    if args.per_prompt < 1:
        raise SystemExit(f"--per-prompt {args.per_prompt} must be at least 1")
    rows = read_samples(args.samples)
    pairs, asked = pairs_of_samples(rows, args.per_prompt), len({row["index"] for row in rows})
    if not pairs:
        problem = f"no prompt of {asked} has two answers of different score"
        raise SystemExit(f"--samples {args.samples}: {problem}")
    with writing(args.out):
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    print(f"{len(pairs)} pairs, of {len(rows)} answers to {asked} prompts: {args.out}")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
