"""Preference pairs: one prompt with a chosen and a rejected answer, kept as one object from the file to the loss.

Pairs can be made of a model's own answers, scored by the task: sample several to a prompt, then pair them, split by split.

    python evals/countdown.py --model tiny-sdar --split train --repeats 8 --temperature 1 --out runs/samples/train
    python data/preferences.py --samples runs/samples/train/samples.jsonl --out runs/pairs/train.jsonl
"""

import json
import math
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from jinja2 import TemplateError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.rows import (
    READERS,
    Rows,
    describe_columns,
    hub_split,
    hub_splits,
    one_line,
    open_rows,
    read_jsonl,
)
from data.sft import is_dialogue, question
from data.tokens import Dropped, token_rows
from evals import score_all
from models.checkpoint import prompt_text

# names of a split in a hub data set, the first that it has; ultrafeedback_binarized calls them train_prefs and test_prefs
SPLITS = {
    "train": ("train_prefs", "train"),
    "validation": ("validation_prefs", "validation"),
    "test": ("test_prefs", "test"),
}
COLUMNS = (
    "chosen and rejected, as messages that end with an assistant turn or as text, and a prompt"
)


def training_pairs(task, data, asked=()):
    """Pairs to train on: {"prompt": messages, "chosen": text, "rejected": text}; left out: {"dropped": (why, detail)}.
    They can be gone through again and again, and those of a data set are read anew each time.

    data: a file (.jsonl, .parquet), a folder of such files (train.jsonl, validation.jsonl, test.jsonl) or a hub id, with
    columns chosen and rejected, each text or messages, and prompt, which may be missing where they are messages (the layout
    of ultrafeedback_binarized). Empty or a preset of the task: its gold answers, each against the gold answer of a later
    problem that scores less on this one.
    asked: prompts that the run is scored on: pairs of such a prompt, but for case and white space, are left out.
    """
    presets = getattr(task, "PRESETS", ())
    pairs = (
        gold_pairs(task, "train", data)
        if not data or data in presets
        else split_pairs(data, "train", presets)
    )
    asked = set(map(question, asked))
    leaks = lambda pair: "prompt" in pair and question(pair["prompt"]) in asked
    checked = lambda pair: (
        {"dropped": ("ask what the run is scored on", shown(pair))} if leaks(pair) else pair
    )
    return Rows(lambda: map(checked, pairs))


def held_out_pairs(task, split, data, eval_pairs, limit):
    """At most `limit` pairs that are not trained on; [] where there are none. split: validation or test.

    eval_pairs: file (the same pairs for both splits), folder or hub id. Empty: the splits of `data`, the training data; a
    file has none. Where there is only a test split, its rows in even places are validation and the others test.
    """
    source, presets = eval_pairs or data, getattr(task, "PRESETS", ())
    if not source or source in presets:
        return gold_pairs(task, split, source)[:limit]
    if is_file(source):
        return list(islice(split_pairs(source, split, presets), limit)) if eval_pairs else []
    has = {
        name: any(alias in split_names(source) for alias in SPLITS[name])
        for name in ("validation", "test")
    }
    if has["test"] and not has["validation"]:
        first = list(has).index(split)
        return list(islice(split_pairs(source, "test", presets), first, first + 2 * limit, 2))
    return list(islice(split_pairs(source, split, presets), limit)) if has[split] else []


def gold_pairs(task, split, preset):
    """The task's gold answers, each against the first of the next eight that scores less on its problem."""
    if not hasattr(task, "answer"):
        raise SystemExit(
            f"{task.__name__.split('.')[-1]} has no answers to make pairs of: --data must name rows of {COLUMNS}"
        )
    answered = []
    for problem in task.load(split, preset):
        try:
            answered.append((problem, task.answer(problem)))
        except ValueError:  # a problem without a solution makes no pair
            continue
    if not answered:
        return []
    problems, answers = map(list, zip(*answered, strict=True))
    right, wrong, left = score_all(task, answers, problems), {}, list(range(len(answers)))
    for k in range(1, min(len(answers), 9)):
        others = [answers[(i + k) % len(answers)] for i in left]
        scores = score_all(task, others, [problems[i] for i in left])
        wrong |= {
            i: text for i, text, score in zip(left, others, scores, strict=True) if score < right[i]
        }
        left = [i for i in left if i not in wrong]
    return [
        {"prompt": task.prompt(problems[i]), "chosen": answers[i], "rejected": wrong[i]}
        for i in sorted(wrong)
    ]


def split_pairs(data, split, presets):
    """Pairs of one split of a folder or hub data set, or of a file. SystemExit where a folder lacks it."""
    if Path(data).is_dir():
        files = folder_files(data, split)
        if not files:
            raise SystemExit(
                f"--data {data}: the folder has no {split}.jsonl and no {split}.parquet"
            )
        data = str(files[0])
    else:
        split = hub_split(data, SPLITS[split])
    rows = open_rows(data, split, presets)
    return Rows(lambda: map(preference, rows))


def is_file(data):
    return not Path(data).is_dir() and (Path(data).exists() or Path(data).suffix in READERS)


def folder_files(folder, split):
    suffixes = [".jsonl.gz" if suffix == ".gz" else suffix for suffix in READERS]
    return [path for suffix in suffixes if (path := Path(folder) / f"{split}{suffix}").is_file()]


def split_names(data):
    """Splits of a folder or a hub data set; none where the hub does not tell."""
    return (
        [split for split in SPLITS if folder_files(data, split)]
        if Path(data).is_dir()
        else hub_splits(data)
    )


def preference(row):
    """A row of a file -> {"prompt": messages, "chosen": text, "rejected": text}, or {"dropped": (reason, detail)}.

    Where a side is messages, its last turn is the answer; turns before it are the prompt, the same on both sides.
    """
    drop = lambda reason: {"dropped": (reason, f"with {describe_columns(row)}: {str(row)[:120]}")}
    prompt, answers, contexts = row.get("prompt"), [], []
    for side in (row.get("chosen"), row.get("rejected")):
        if isinstance(side, list) and side and all(isinstance(turn, dict) for turn in side):
            *context, last = side
            contexts.append(context)
            side = last.get("content") if last.get("role") == "assistant" else None
        answers.append(side)
    if any(context != contexts[0] for context in contexts):
        return drop("have sides that answer different prompts")
    if (
        contexts and contexts[0]
    ):  # with a system turn, or the history: more than the prompt column tells
        prompt = contexts[0]
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not is_dialogue(prompt) or not all(isinstance(answer, str) for answer in answers):
        return drop(f"cannot be read, needed are {COLUMNS}")
    return {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}


def encode_pairs(pairs, tokenizer, model, max_length, use_cache=True):
    """Pairs -> TokenRows of (prompt ids, chosen ids, rejected ids), from the cache where they were tokenised before.

    model: with eos_token_ids, the first of which closes an answer, and mask_token_id. A pair is never cut and goes as a whole:
    for an empty answer, two equal answers, a mask token, a side of more than max_length tokens with the prompt.
    """
    settings = {
        "turn_end_id": model.eos_token_ids[0],
        "mask_token_id": model.mask_token_id,
        "max_length": max_length,
    }
    return token_rows(pairs, tokenizer, encode_rows, 3, settings, use_cache)


def encode_rows(pairs, tokenizer, turn_end_id, mask_token_id, max_length):
    """-> for each pair (prompt ids, chosen ids, rejected ids) or Dropped, with why. Ids are built as those of data.sft:
    the prompt rendered up to where the answer starts; what looks like a special token in an answer stays ordinary characters.
    """
    encoded = [render(pair, tokenizer) for pair in pairs]
    whole = [i for i, pair in enumerate(encoded) if not isinstance(pair, Dropped)]
    if not whole:
        return encoded
    prompts = tokenizer([encoded[i] for i in whole], add_special_tokens=False)["input_ids"]
    answers = [pairs[i][side] for i in whole for side in ("chosen", "rejected")]
    answers = tokenizer(answers, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    for i, prompt, chosen, rejected in zip(
        whole, prompts, answers[0::2], answers[1::2], strict=True
    ):
        length = len(prompt) + max(len(chosen), len(rejected)) + 1
        if chosen == rejected:
            encoded[i] = Dropped("have two equal sides", shown(pairs[i]))
        elif mask_token_id in prompt + chosen + rejected:
            encoded[i] = Dropped("hold a mask token", shown(pairs[i]))
        elif length > max_length:
            encoded[i] = Dropped(
                f"exceed --max-length {max_length}", f"{length} tokens: {shown(pairs[i])}"
            )
        else:
            encoded[i] = prompt, chosen + [turn_end_id], rejected + [turn_end_id]
    return encoded


def render(pair, tokenizer):
    """The prompt of a pair as text, or Dropped."""
    if "dropped" in pair:
        return Dropped(*pair["dropped"])
    if not pair["chosen"].strip() or not pair["rejected"].strip():
        return Dropped("have an empty answer", shown(pair))
    try:
        text = prompt_text(tokenizer, pair["prompt"])
        (text + pair["chosen"] + pair["rejected"]).encode()
    except UnicodeEncodeError as error:
        return Dropped(
            "hold half of a character (a surrogate)", f"{shown(pair)}, {one_line(error)}"
        )
    except (TemplateError, TypeError) as error:
        return Dropped("are refused by the chat template", f"{shown(pair)}, {one_line(error)}")
    return text


def shown(pair):
    texts = pair["prompt"][-1]["content"], pair["chosen"], pair["rejected"]
    return "{!r} -> {!r} rather than {!r}".format(*(text[:60] for text in texts))


def pairs_of_samples(rows, per_prompt):
    """Scored answers, several to a prompt -> rows in the layout of ultrafeedback_binarized, prompts in order of their index.

    rows: {"index", "prompt": messages, "completion", "score"}, of samples.jsonl of an evaluation. Of the distinct answers to a
    prompt the best goes with the worst, the second with the second to last, at most per_prompt times and only where the
    scores differ: no answer is used twice.
    """
    answers, prompts = {}, {}
    for row in rows:
        if row["completion"].strip():
            answers.setdefault(row["index"], {}).setdefault(row["completion"], row["score"])
            prompts[row["index"]] = row["prompt"]
    pairs = []
    for index in sorted(answers):
        ranked = sorted(
            answers[index].items(), key=lambda answer: -answer[1]
        )  # stable: equal scores in order of sampling
        for (chosen, high), (rejected, low) in list(zip(ranked, reversed(ranked), strict=True))[
            :per_prompt
        ]:
            if high > low:
                turns = lambda text: [*prompts[index], {"role": "assistant", "content": text}]  # noqa: B023
                sides = {"chosen": turns(chosen), "rejected": turns(rejected)}
                pairs.append(
                    {"prompt": prompts[index][-1]["content"]}
                    | sides
                    | {"score_chosen": high, "score_rejected": low}
                )
    return pairs


@dataclass
class Args:
    samples: str
    """samples.jsonl of an evaluation with --repeats above 1 and a temperature"""
    out: str
    """.jsonl of pairs to write; algos/vrpo.py --data takes a folder with train.jsonl, validation.jsonl and test.jsonl"""
    per_prompt: int = 1
    """most pairs of a prompt, no answer in two of them"""


def main(args):
    rows, asked, needed = (
        [],
        {},
        {"index": int, "prompt": list, "completion": str, "score": int | float},
    )
    for line, row in read_jsonl(args.samples):
        where = f"{args.samples} line {line}"
        if not all(isinstance(row.get(key), kind) for key, kind in needed.items()):
            raise SystemExit(f"{where}: needs {', '.join(needed)}, has {describe_columns(row)}")
        if not is_dialogue(row["prompt"]):
            raise SystemExit(
                f"{where}: prompt must be messages, each with role and content as text"
            )
        if math.isnan(row["score"]):
            raise SystemExit(f"{where}: the score is not a number")
        if asked.setdefault(row["index"], row["prompt"]) != row["prompt"]:
            raise SystemExit(
                f"{where}: index {row['index']} stood for another prompt before; are these two evaluations?"
            )
        rows.append(row)
    if args.per_prompt < 1:
        raise SystemExit(f"--per-prompt {args.per_prompt} must be at least 1")
    pairs = pairs_of_samples(rows, args.per_prompt)
    if not pairs:
        raise SystemExit(
            f"--samples {args.samples}: no prompt of {len(asked)} has two answers of different score"
        )
    try:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    except OSError as error:
        raise SystemExit(f"--out {args.out} cannot be written: {one_line(error)}") from error
    used = len({json.dumps(pair["prompt"]) for pair in pairs})
    print(
        f"{len(pairs)} pairs of {used} prompts, out of {len(rows)} answers to {len(asked)} prompts: {args.out}"
    )


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
