"""Preference pairs: one prompt with a chosen and a rejected answer, one object from file to loss.

Pairs can be made of a model's own answers, scored by the task: sample several answers to each
prompt of a split, then pair them.

    python evals/countdown.py --model tiny-sdar --split train --repeats 8 --temperature 1 \\
        --out runs/samples/train
    python data/preferences.py --samples runs/samples/train/samples.jsonl \\
        --out runs/pairs/train.jsonl
"""

import json
import sys
from contextlib import suppress
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.rows import is_own, open_rows, split_name, splits_of
from data.tokens import Dropped, answered
from distributed.disk import write_atomically

SPLITS = "train", "validation", "test"
COLUMNS = (
    "chosen and rejected, as messages that end with an assistant turn or as text, and a prompt"
)


def pairs_of(task, data, split, score_all):
    """Pairs of a split, {"prompt": messages, "chosen": text, "rejected": text} or Dropped. A
    generator.

    data: a file, a folder of files named as their splits (train.jsonl, validation.jsonl,
    test.jsonl) or a hub id, with columns chosen and rejected, each text or messages, and prompt,
    which is optional with messages (the layout of ultrafeedback_binarized, whose splits are called
    train_prefs and test_prefs). Empty or a preset of the task: see gold_pairs.
    score_all: that of evals.
    """
    if is_own(task, data):
        yield from gold_pairs(task, split, data, score_all)
    else:
        name = split_name(data, (f"{split}_prefs", split))
        yield from map(preference, open_rows(data, name, task.PRESETS))


def held_out_pairs(task, split, data, eval_pairs, limit, score_all):
    """-> at most `limit` pairs that are not trained on. split: validation or test.

    eval_pairs: file (the same pairs for both splits), folder or hub id. Empty: the splits of
    `data`, the training data; a file has none. If there is a test split but no validation split,
    its even rows are for validation and its odd ones for testing.
    """
    source, first, step = eval_pairs or data, 0, 1
    if not is_own(task, source):
        names = {name.removesuffix("_prefs") for name in splits_of(source)}
        names = names or (SPLITS if eval_pairs else ())
        if "test" in names and "validation" not in names:
            split, first, step = "test", int(split == "test"), 2
        if split not in names:
            return []
    pairs = pairs_of(task, source, split, score_all)
    return list(islice(pairs, first, first + step * limit, step))


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
    rejected, right = {}, score_all(task, answers, problems)
    for k in range(1, 9):
        left = [i for i in range(len(answers)) if i not in rejected]
        others = [answers[(i + k) % len(answers)] for i in left]
        scores = score_all(task, others, [problems[i] for i in left])
        found = zip(left, others, scores, strict=True)
        rejected |= {i: text for i, text, score in found if score < right[i]}
    return [
        {"prompt": task.prompt(problems[i]), "chosen": answers[i], "rejected": rejected[i]}
        for i in sorted(rejected)
    ]


def preference(row):
    """A row of a file -> {"prompt": messages, "chosen": text, "rejected": text}, or Dropped."""
    sides = answered(row, "chosen"), answered(row, "rejected")
    if None in sides:
        return Dropped(f"cannot be read, needed are {COLUMNS}", row)
    (prompt, chosen), (other, rejected) = sides
    if prompt != other:
        return Dropped("have sides that answer different prompts", row)
    if chosen == rejected:
        return Dropped("have two equal sides", row)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def pairs_of_samples(rows, per_prompt):
    """Scored answers, several to a prompt -> pairs.

    rows: {"index", "prompt": messages, "completion", "score"}, of samples.jsonl of an evaluation.
    Of the distinct answers to a prompt the best goes with the worst, the second with the second to
    last, at most per_prompt times and only if the scores differ: no answer is used twice.
    """
    answers, prompts = {}, {}
    for row in rows:
        if row["completion"].strip():
            answers.setdefault(row["index"], {}).setdefault(row["completion"], row["score"])
            prompts[row["index"]] = row["prompt"]
    for index, scores in sorted(answers.items()):
        # The sort is stable: equal scores stay in the order of sampling.
        best = sorted(scores, key=scores.get, reverse=True)
        for chosen, rejected in islice(zip(best, best[::-1], strict=True), per_prompt):
            if scores[chosen] > scores[rejected]:
                yield {"prompt": prompts[index], "chosen": chosen, "rejected": rejected}


def main(samples: str, out: str, per_prompt: int = 1):
    """Pair the answers of an evaluation with --repeats above 1 and a temperature.

    Args:
        samples: its samples.jsonl
        out: .jsonl of pairs to write; algos/vrpo.py --data takes a folder with train.jsonl,
            validation.jsonl and test.jsonl
        per_prompt: most pairs of a prompt, no answer in two of them
    """
    pairs = list(pairs_of_samples(open_rows(samples, "", ()), per_prompt))
    if not pairs:
        raise SystemExit(f"--samples {samples}: no prompt has two answers of different score")
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(out), "".join(json.dumps(pair) + "\n" for pair in pairs))
    print(f"{len(pairs)} pairs: {out}")


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
