"""Decoding settings of one model on a task: accuracy, tokens per forward, tokens per second.

    python bench/decoding.py --model DIR --data test.jsonl --steps 4 2 1 --thresholds 0.8 0.9

One JSON line per setting, greedy, with the rates of bench/rollout.py. --rows 1 --limit 8: those of
eight problems one by one. An autoregressive model takes --steps 1.
"""

import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, pstdev
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import distributed.start  # noqa: F401

# isort: split
from bench.rollout import speed
from bench.timing import report
from distributed.groups import own_device
from evals import load_examples, load_task, score_all
from models import load_tokenizer, prompt_ids
from rollout import make_engine


@dataclass
class Args:
    model: str
    """directory in HF layout, or a key of models.MODELS"""
    task: str = "gsm8k"
    """file of evals/"""
    data: str = ""
    """preset, file or hub id; empty: the task's own"""
    limit: int | None = None
    """use only the first so many problems"""
    gen_length: int = 512
    """tokens per completion"""
    block_length: int = 0
    """0: the model's own"""
    steps: tuple[int, ...] = ()
    """denoising steps per block, each revealing an equal share"""
    thresholds: tuple[float, ...] = ()
    """confidences above which a token is revealed, at least one a step"""
    cache: tuple[Literal["none", "prefix", "dual"], ...] = ("none",)
    """for bidirectional models"""
    rows: int = 128
    """problems decoded together"""


def measure(engine, task, tokenizer, examples, settings):
    prompts = [prompt_ids(tokenizer, task.prompt(example)) for example in examples]
    trace, rates = speed(lambda: engine.generate(prompts, **settings))
    scores = score_all(task, trace.texts(tokenizer), examples)
    found = {"n": len(scores), "accuracy": fmean(scores)}
    return found | {"stderr": pstdev(scores) / len(scores) ** 0.5} | rates


def main(args):
    task, tokenizer = load_task(args.task), load_tokenizer(args.model)
    examples = load_examples(task, "test", args.data, args.limit)
    engine = make_engine(args.model, "auto", own_device(), max_batch_size=args.rows)
    n = args.block_length or engine.model.block_length
    static = [{"denoising_steps": k, "remasking": "low_confidence_static"} for k in args.steps]
    dynamic = {"denoising_steps": n, "remasking": "low_confidence_dynamic"}
    rules = static + [dynamic | {"confidence_threshold": bound} for bound in args.thresholds]
    for cache, rule in product(args.cache, rules):
        settings = {"gen_length": args.gen_length, "block_length": n, "temperature": 0.0}
        settings |= {"cache": cache} | rule
        facts = {"model": args.model, "rows": args.rows} | settings
        report(facts, measure, engine, task, tokenizer, examples, settings)
        engine.release()


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
