"""Rows for algos/sft.py from a model's own answers: right ones, and a share of the wrong ones.

    python evals/run.py --model DIR --tasks gsm8k --split train --samples 8 --temperature 0.8
    python data/own_samples.py --samples runs/eval-gsm8k-... --out own.jsonl
    python algos/sft.py --model DIR2 --task gsm8k --data own.jsonl

Wrong answers are well-formed text too, which a model that was just converted has to learn first. To
distil only what is right take --wrong 0.
"""

import random
import sys
from json import dumps

sys.path.insert(0, __file__.rpartition("/data/")[0])
import distributed.start  # noqa: F401

# isort: split
from data.rows import read_rows
from distributed.disk import writing


def main(samples: list[str], out: str, wrong: float = 1.0):
    """Write {"prompt": messages, "response": text} of distinct answers that came to an end.

    Args:
        samples: directories of evaluations with --model, or their samples.jsonl
        out: .jsonl to write
        wrong: wrong answers for each right one, drawn from all
    """
    is_right = {
        dumps({"prompt": row["prompt"], "response": row["completion"]}) + "\n": row["score"] == 1
        for path in samples
        for row in read_rows(path, "samples", ())
        if not row["truncated"]
    }
    right = [*filter(is_right.get, is_right)]
    others = sorted(is_right.keys() - right)
    random.Random(0).shuffle(others)
    others = others[: round(wrong * len(right))]
    with writing(out), open(out, "w") as file:
        file.writelines(right + others)
    print(f"{out}: {len(right):,} right answers and {len(others):,} wrong ones")


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
