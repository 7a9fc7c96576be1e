"""Rows for algos/sft.py from a model's own answers: right ones, and a share of the wrong ones.

    python evals/run.py --model DIR --tasks gsm8k --split train --repeats 8 --temperature 0.8
    python data/own_samples.py --samples runs/eval-gsm8k-... --out own.jsonl
    python algos/sft.py --model DIR2 --task gsm8k --data own.jsonl

Wrong answers are well-formed text too, which a model that was just converted has to learn first. To
distil only what is right take --wrong 0.
"""

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.rows import read_rows
from distributed.disk import write_atomically


def main(samples: list[str], out: str, wrong: float = 1.0, seed: int = 0):
    """Write {"prompt": messages, "response": text} of distinct answers that came to an end, in
    random order.

    Args:
        samples: samples.jsonl of evaluations, or their directories
        out: .jsonl to write
        wrong: wrong answers for each right one, as far as there are any
        seed: of the choice and the order
    """
    seen, right, others, dropped = set(), [], [], 0
    for path in samples:
        path = f"{path}/samples.jsonl" if Path(path).is_dir() else path
        for row in read_rows(path, "", ()):
            if not {"prompt", "truncated", "score"} <= row.keys():
                raise SystemExit(f"{path}: no samples.jsonl of an evaluation with --model")
            row, text = SimpleNamespace(**row), row["completion"].strip()
            key = json.dumps(row.prompt), text
            if key in seen or not text or row.truncated or hasattr(row, "failed"):
                dropped += 1
                continue
            seen.add(key)
            (right if row.score == 1 else others).append({"prompt": row.prompt, "response": text})
    if not right:
        raise SystemExit(f"{', '.join(samples)}: no right answers")
    draw = random.Random(seed)
    draw.shuffle(others)
    rows = right + others[: round(wrong * len(right))]
    draw.shuffle(rows)
    write_atomically(Path(out), "".join(json.dumps(row) + "\n" for row in rows))
    print(
        f"{len(rows):,} rows in {out}: all {len(right):,} right answers and "
        f"{len(rows) - len(right):,} of {len(others):,} wrong ones; {dropped:,} dropped (twice the "
        "same, empty, without an end or a verdict)"
    )


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
