"""Examples of a task, read from the rows of a file or a hub data set, and their splits."""

import re
from itertools import chain, cycle

from data.planning import stable_hash
from data.rows import is_of, read_rows
from evals.math_grader import MAX_TEXT

QUESTION = {"question", "text", "prompt"}  # keys of examples whose text must not be blank
# styles of examples, by their name behind --data FILE@: d1's prompts for training and evaluation
STYLES = {"d1": "tags", "d1-eval": "boxed-tags"}
# where a base model goes on with a question of its own: "Q:", "**Problem 2:**", "### Question"
NEXT = re.compile(
    r"(?:\n|<\|\w+\|>)[ \t#*_>]{0,9}(?:Q(?![*_\s]*\n)|(?:Next |New )?(?i:question|problem)"
    r"|Exercise|问题|题目)[ \t]?#?\d{0,3}[*_ \t]{0,4}(?:[:：\n]|(?<=\d)\.)"
)
VALIDATION = 512  # rows held out of a hub data set's train split if it has no validation split


def read_examples(
    read, needs, path, split, limit, hub="", hub_split="test", presets=(), config=None
):
    """`parse_rows` of a .jsonl, .jsonl.gz, .csv or .parquet file or of a hub data set: the first
    `limit` rows. hub: the task's own data set, read without a path; hub_split: its one split, which
    is for testing.

    SystemExit if there is no such file, data set or split; the message lists the task's `presets`.
    """
    path = path or hub
    if hub and is_of(path, hub):
        split = one_split(hub, split, {"test": hub_split})
    return parse_rows(read, needs, read_rows(path, split, presets, limit, config))


def source_and_style(data, default, styles=STYLES):
    """ "rows.jsonl@d1" -> "rows.jsonl", {"style": "tags"}; "d1" -> default, {"style": "tags"};
    other data -> itself, {}; none -> default, {}."""
    source, _, name = (data or "").rpartition("@")
    if name in styles:
        return source or default, {"style": styles[name]}
    return data or default, {}


def parse_rows(read, needs, rows):
    """read(row) of every Row. SystemExit names the first one for which `read` raises, its columns,
    and what it `needs`."""
    examples = []
    for row in rows:
        try:
            examples.append(read(dict(row)))
            for key in QUESTION & examples[-1].keys():
                if not examples[-1][key].strip():
                    raise ValueError("a blank question")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            where = f"{row.place}: cannot read a problem from {', '.join(row)}"
            raise SystemExit(f"{where}; needs {needs} ({type(error).__name__}: {error})") from error
    return examples


def as_text(value):
    """`value`, which must be text. ValueError otherwise."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is no text")
    return value


def worked(example):
    """The worked solution of an example. SystemExit if its rows have none."""
    if not example["solution"]:
        raise SystemExit("--data: rows without worked solutions; those of the hub have them")
    return example["solution"]


def own_part(completion):
    """The end of a completion without a next question that it asks itself, and its answer."""
    return NEXT.split(completion[-MAX_TEXT:].lstrip(), maxsplit=1)[0]


def user(content, shots=()):
    """A prompt of one user message, after `shots`: pairs of a question and its answer."""
    turns = zip(cycle(("user", "assistant")), chain(*shots, [content]), strict=False)
    return [{"role": role, "content": text} for role, text in turns]


def chat_row(row):
    """(last message, ground truth) of a row in DARE's layout; None for other layouts."""
    if isinstance(row.get("reward_model"), dict):
        return row["prompt"][-1]["content"], row["reward_model"]["ground_truth"]


def planning_row(row, question, answer):
    """The columns `question` and `answer` of a row, or what DARE or Dream have in their place."""
    if "extra_info" in row:  # DARE
        return row["extra_info"][question], row["reward_model"]["ground_truth"]
    if "output" in row:  # Dream
        return row["input"], row["output"]
    return row[question], row[answer]


def one_split(task, split, known):
    """The name of `split` in the data set of a task. SystemExit if the task has no such split."""
    if split not in known:
        raise SystemExit(f"--split {split}: {task} has only {' and '.join(known)}; give it --data")
    return known[split]


def held_out(rows, split, task):
    """Train rows in their order: "validation" is the VALIDATION rows whose questions have the
    smallest hashes, "train" the others."""
    order = sorted(range(len(rows)), key=lambda i: stable_hash(task, rows[i]["question"]))
    chosen = order[:VALIDATION] if split == "validation" else order[VALIDATION:]
    return [rows[i] for i in sorted(chosen)]
