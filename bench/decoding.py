"""Decoding settings of one model on a task: accuracy, tokens per forward, tokens per second.

    python bench/decoding.py --model DIR --data test.jsonl --steps 4 2 1 --thresholds 0.8 0.9

One JSON line per setting, greedy. tokens_per_s: completion tokens up to and with the first EOS over
the seconds of whole rollouts, of all problems with --rows together, and of the first --alone
problems one by one.
"""

import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.timing import report, timed
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
    alone: int = 8
    """problems decoded one by one; 0: none"""


def measure(engine, task, tokenizer, examples, args, settings):
    prompts = [prompt_ids(tokenizer, task.prompt(example)) for example in examples]
    settings = settings | {"gen_length": args.gen_length, "temperature": 0.0}
    roll = lambda prompts: engine.generate(prompts, **settings)

    def rates(calls):
        timed(lambda: roll(calls[0]))  # captures graphs
        seconds, traces = timed(lambda: [roll(call) for call in calls])
        tokens = sum(int(trace.completion_mask.sum()) for trace in traces)
        forwards = [t.num_forwards.sum() for t in traces if t.num_forwards is not None]
        texts = [text for trace in traces for text in trace.texts(tokenizer)]
        return texts, tokens / seconds, tokens / int(sum(forwards)) if forwards else 1.0

    texts, speed, parallel = rates([prompts])
    scores = score_all(task, texts, examples)
    p, n = sum(scores) / len(scores), len(scores)
    found = {"n": n, "accuracy": p, "stderr": (p * (1 - p) / n) ** 0.5}
    found |= {"tokens_per_forward": parallel, "tokens_per_s": speed}
    if args.alone:
        engine.release()
        found["tokens_per_s_alone"] = rates([[ids] for ids in prompts[: args.alone]])[1]
    return found


def main(args):
    task, tokenizer = load_task(args.task), load_tokenizer(args.model)
    examples = load_examples(task, "test", args.data, args.limit)
    engine = make_engine(args.model, "auto", own_device(), max_batch_size=args.rows)
    n = args.block_length or engine.model.block_length
    static = [{"denoising_steps": k, "remasking": "low_confidence_static"} for k in args.steps]
    dynamic = {"denoising_steps": n, "remasking": "low_confidence_dynamic"}
    rules = static + [dynamic | {"confidence_threshold": bound} for bound in args.thresholds]
    if n == 1:  # autoregressive
        rules = [{"denoising_steps": 1}]
    for cache, rule in product(args.cache, rules):
        settings = {"block_length": n, "cache": cache} | rule
        facts = {"model": args.model, "rows": args.rows} | settings
        report(facts, measure, engine, task, tokenizer, examples, args, settings)
        engine.release()


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
