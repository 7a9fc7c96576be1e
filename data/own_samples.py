"""Rows for algos/sft.py from a model's own answers: right ones, and a share of the wrong ones; for
algos/distill.py right ones as ids, with the order in which the model revealed them.

    python evals/run.py --model DIR --tasks gsm8k --split train --samples 8 --temperature 0.8
    python data/own_samples.py --samples runs/eval-gsm8k-... --out own.jsonl
    python algos/sft.py --model DIR2 --task gsm8k --data own.jsonl

Wrong answers are well-formed text too, which a model that was just converted has to learn first. To
distil only what is right take --wrong 0.
"""

import os
import random
import sys
from array import array
from collections import defaultdict
from json import dumps
from pathlib import Path

sys.path.insert(0, __file__.rpartition("/data/")[0])
import distributed.start  # noqa: F401

# isort: split
from data.rows import read_rows
from data.tokens import TokenRows, question
from distributed.disk import write_atomically
from models import prompt_ids


def main(samples: list[str], out: str, wrong: float = 1.0, mixed: str = ""):
    """Write {"prompt": messages, "response": text} of distinct answers that came to an end.

    Args:
        samples: directories of evaluations with --model, or their samples.jsonl
        out: .jsonl to write
        wrong: wrong answers for each right one, drawn from all
        mixed: another .jsonl to write: problems of GSM8K or MATH with both right and wrong answers,
            for online scripts. From a group of equal rewards nothing is learned
    """
    is_right, verdicts = {}, defaultdict(set)
    for path in samples:
        for row in read_rows(path, "samples"):
            asked, right = {"prompt": row["prompt"]}, row["score"] == 1
            if not row["truncated"]:
                is_right[dumps(asked | {"response": row["completion"]}) + "\n"] = right
            truth = {"reward_model": {"ground_truth": row["gold"]}}
            verdicts[dumps(asked | truth) + "\n"].add(right)
    right = [*filter(is_right.get, is_right)]
    if not right:
        raise SystemExit(f"no answer of {', '.join(samples)} is right and whole")
    others = sorted(is_right.keys() - right)
    random.Random(0).shuffle(others)
    others = others[: round(wrong * len(right))]
    write_atomically(Path(out), "".join(right + others))
    print(f"{out}: {len(right):,} right answers and {len(others):,} wrong ones")
    if mixed:
        both = [row for row, found in verdicts.items() if len(found) == 2]
        write_atomically(Path(mixed), "".join(both))
        print(f"{mixed}: {len(both):,} of {len(verdicts):,} problems")


def right_answers(path, tokenizer, asked, drawn):
    """path: one of `samples` above; asked: the prompts that the run is scored on; drawn: flags of
    evals/run.py that draw samples -> TokenRows of prompt, canvas, and of each of its tokens the
    number of the forward that revealed it, -1 of masks"""
    if not os.path.exists(path):
        how = f"python evals/run.py {drawn} --split train --out runs/own"
        raise SystemExit(f"--data {path!r} has no samples; {how} draws some for --data runs/own")
    rows, asked = read_rows(path, "samples"), set(map(question, asked))
    kept = [
        [
            array("i", ids)
            for ids in (prompt_ids(tokenizer, row["prompt"]), row["canvas_ids"], row["reveals"])
        ]
        for row in rows
        if row["score"] == 1 and not row["truncated"] and question(row["prompt"]) not in asked
    ]
    why = "are wrong, have no end, or ask what the run is scored on"
    return TokenRows(kept, [f"{len(rows) - len(kept):,} {why}"])


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
