"""Preference pairs: one prompt with a chosen and a rejected answer, one object from file to loss.

They may be a model's own answers, scored by the task. After this, for each split, the folder
runs/samples holds pairs:

    python evals/countdown.py --model tiny-sdar --split train --samples 8 --temperature 1 \\
        --out runs/samples/train
"""

from contextlib import suppress
from itertools import chain, islice

from data.rows import is_own, open_rows, split_name, splits_of
from data.sft import answer_of
from data.tokens import Dropped, answers_of

PAIRS = 2  # most pairs of a prompt from samples of an evaluation
COLUMNS = (
    "chosen and rejected, as messages that end with an assistant turn or as text, and a prompt"
)


def pairs_of(task, data, split, score_all):
    """Pairs of a split, {"prompt": messages, "chosen": text, "rejected": text} or Dropped. A
    generator.

    data: a file, a folder of files named as their splits (train.jsonl, validation.jsonl,
    test.jsonl) or a hub id, with columns chosen and rejected, each text or messages, and prompt,
    which is optional with messages (the layout of ultrafeedback_binarized, whose splits are called
    train_prefs and test_prefs); or samples.jsonl of an evaluation. Empty or a preset of the task:
    see gold_pairs. score_all: that of evals.
    """
    if is_own(task, data):
        yield from gold_pairs(task, split, data, score_all)
        return
    rows = open_rows(data, split_name(data, (f"{split}_prefs", split)), task.PRESETS)
    first = next(rows, {})
    rows = chain([first], rows)
    yield from pairs_of_samples(rows) if "completion" in first else map(preference, rows)


def held_out_pairs(task, split, data, limit, score_all):
    """-> at most `limit` pairs of a split, validation or test; a file of rows has none.

    If there is a test split but no validation split, its even rows are for validation and its odd
    ones for testing.
    """
    first, step = 0, 1
    if not is_own(task, data):
        names = {name.removesuffix("_prefs") for name in splits_of(data)}
        if "validation" not in names:
            split, first, step = "test", int(split == "test"), 2
        if split not in names:
            return []
    pairs = pairs_of(task, data, split, score_all)
    return list(islice(pairs, first, first + step * limit, step))


def gold_pairs(task, split, preset, score_all):
    """-> the task's gold answers, each with the first of the next eight that scores less on its
    problem as the rejected side.
    """
    answer, answers, problems = answer_of(task, COLUMNS), [], []
    for problem in task.load(split, preset):
        with suppress(ValueError):  # a problem without a solution makes no pair
            answers.append(answer(problem, 0))
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
    sides = [*answers_of(row, "chosen"), *answers_of(row, "rejected")]
    if len(sides) < 2:
        return Dropped(f"cannot be read, needed are {COLUMNS}", row)
    (prompt, chosen), (other, rejected) = sides
    if prompt != other:
        return Dropped("have sides that answer different prompts", row)
    if chosen == rejected:
        return Dropped("have two equal sides", row)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def pairs_of_samples(rows):
    """Scored answers, several to a prompt, in samples.jsonl of an evaluation -> pairs.

    Of the distinct answers to a prompt the best goes with the worst, the second with the second to
    last, for at most PAIRS and only if the scores differ: no answer is used twice.
    """
    answers, prompts = {}, {}
    for row in rows:
        if row["completion"].strip():
            answers.setdefault(row["index"], {}).setdefault(row["completion"], row["score"])
            prompts[row["index"]] = row["prompt"]
    for index, scores in sorted(answers.items()):
        # The sort is stable: equal scores stay in the order of sampling.
        best = sorted(scores, key=scores.get, reverse=True)
        for chosen, rejected in islice(zip(best, best[::-1], strict=True), PAIRS):
            if scores[chosen] > scores[rejected]:
                yield {"prompt": prompts[index], "chosen": chosen, "rejected": rejected}
