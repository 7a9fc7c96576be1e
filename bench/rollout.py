"""Compare samplers on one model: the fast engine, the plain one, and lmdeploy.

    python models/random_init.py --config DIR --tokenizer DIR --out DIR2 --device cuda
    python bench/rollout.py --model DIR2 --rows 1 16 128 --samplers ours plain lmdeploy
    python bench/rollout.py --model DIR2 --cache none dual --samplers ours plain

Prints one JSON line per measurement. All samplers get the same weights and
prompts. tokens_per_s counts completion tokens up to and including the first EOS, over the seconds
of whole rollouts with prefill; a first rollout, which captures CUDA graphs, is reported as first_s.
forwards: of one batch, commits included; tokens_per_forward: of one sequence.
"""

import math
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.timing import Report, timed
from models import load_model, meta_model
from rollout import make_engine
from rollout.block import BlockEngine
from rollout.masked import MaskedEngine


@dataclass
class Args:
    model: str
    """directory in HF layout, or a key of models.MODELS"""
    rows: tuple[int, ...] = (1, 16, 128)
    """sequences decoded together"""
    samplers: tuple[Literal["ours", "plain", "lmdeploy"], ...] = ("ours",)
    """ours: what make_engine picks on this device; plain: rollout/block.py or rollout/masked.py"""
    cache: tuple[Literal["none", "prefix", "dual"], ...] = ("none",)
    """for bidirectional models"""
    gen_length: int | None = None
    """tokens; default 512 and 256"""
    denoising_steps: int | None = None
    """per block; default 16, or one per token if the block is shorter"""
    remasking: str = "low_confidence_static"


def build(sampler, args, device):
    """-> the engine"""
    if sampler != "plain":
        backend = "auto" if sampler == "ours" else sampler
        return make_engine(args.model, backend, device, max_batch_size=max(args.rows))
    model = load_model(args.model, device, torch.bfloat16 if device == "cuda" else torch.float32)
    kind = BlockEngine if model.attention == "block-causal" else MaskedEngine
    return kind(model, max(args.rows))


def measure(engine, rows, length, mask_token_id, settings):
    """-> rates of a rollout of so many rows, up to 8 to a prompt"""
    engine.release()  # the cache and graphs of other sizes
    samples = math.gcd(rows, 8)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, mask_token_id, (rows // samples, length), generator=generator)
    prompts = prompts.tolist()
    roll = lambda seed: engine.generate(prompts, num_samples=samples, seed=seed, **settings)
    first_s, _ = timed(lambda: roll(0))
    seconds, trace = timed(lambda: roll(1))
    tokens = int(trace.completion_mask.sum())
    facts = {"tokens_per_s": tokens / seconds, "seconds": seconds, "first_s": first_s}
    total = 0 if trace.num_forwards is None else int(trace.num_forwards.sum())
    if total > 0:  # lmdeploy does not tell
        facts |= {"forwards": total / rows, "tokens_per_forward": tokens / total}
    return facts


def main(args):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report, model = Report(model=Path(args.model).name), meta_model(args.model)
    is_block = model.attention == "block-causal"
    length = 217 if is_block else 256  # of the prompts
    settings = {
        "gen_length": args.gen_length or (512 if is_block else 256),
        "block_length": model.block_length,
        "denoising_steps": args.denoising_steps or min(16, model.block_length),
        "remasking": args.remasking,
        "temperature": 1.0,
    }
    kinds = [{}] if is_block else [{"cache": kind} for kind in args.cache]
    for sampler in args.samplers:
        engine = build(sampler, args, device)
        for kind, rows in product(kinds, args.rows):
            options = settings | kind
            line = {"sampler": sampler, "rows": rows, "prompt_length": length} | options
            report.measure(measure, engine, rows, length, model.mask_token_id, options, **line)
        del engine  # before the next one is made
    report.close()


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
