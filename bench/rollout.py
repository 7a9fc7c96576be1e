"""Compare samplers on one model: the fast engine, the plain one, and lmdeploy.

    python models/random_init.py --config DIR --tokenizer DIR --out DIR2
    python bench/rollout.py --model DIR2 --rows 1 16 128 --samplers ours plain lmdeploy
    python bench/rollout.py --model DIR2 --cache none dual --samplers ours plain
    python bench/rollout.py --model DIR2 --samplers ours adapters

Prints one JSON line per measurement. All samplers get the same weights and prompts: for block
models 217 tokens and responses of 512, for others 256 and 256. tokens_per_s counts completion
tokens up to and including the first EOS, over the seconds of whole rollouts with prefill; a first
rollout, which captures CUDA graphs, is reported as first_s. forwards: of one batch, commits
included; tokens_per_forward: of one sequence.
"""

import math
import sys
from itertools import product
from typing import Literal

sys.path.insert(0, __file__.rpartition("/bench/")[0])
import distributed.start  # noqa: F401

# isort: split
import torch

from bench.timing import report, timed
from distributed.groups import own_device
from models import add_lora, load_model, meta_model
from models.tensors import frozen_dtype
from rollout import make_engine
from rollout.block import BlockEngine
from rollout.masked import MaskedEngine


def build(sampler, name, most):
    """-> the engine of a model, for at most so many rows"""
    device = own_device()
    if sampler == "lmdeploy":
        return make_engine(name, sampler, device, max_batch_size=most)
    model = load_model(name, device, frozen_dtype(device))
    if sampler == "adapters":
        add_lora(model, 128, 64, dtype=frozen_dtype(device))
    if sampler != "plain":
        return make_engine(model, max_batch_size=most)
    return (BlockEngine if model.attention == "block-causal" else MaskedEngine)(model, most)


def measure(engine, rows, length, mask_token_id, settings):
    """-> rates of a rollout of so many rows, up to 8 to a prompt"""
    engine.release()  # the cache and graphs of other sizes
    samples = math.gcd(rows, 8)
    torch.manual_seed(0)
    prompts = torch.randint(mask_token_id, (rows // samples, length)).tolist()
    roll = lambda: engine.generate(prompts, num_samples=samples, **settings)
    first_s, _ = timed(roll)
    seconds, trace = timed(roll)
    tokens = int(trace.completion_mask.sum())
    facts = {"tokens_per_s": tokens / seconds, "seconds": seconds, "first_s": first_s}
    if trace.num_forwards is not None:  # lmdeploy does not tell
        forwards = int(trace.num_forwards.sum())
        facts |= {"forwards": forwards / rows, "tokens_per_forward": tokens / forwards}
    return facts


def main(
    model: str,
    rows: tuple[int, ...] = (1, 16, 128),
    samplers: tuple[Literal["ours", "adapters", "plain", "lmdeploy"], ...] = ("ours",),
    cache: tuple[Literal["none", "prefix", "dual"], ...] = ("none",),
    denoising_steps: int = 16,
):
    """Compare samplers on one model: see the head of bench/rollout.py.

    Args:
        model: directory in HF layout, or a key of models.MODELS
        rows: sequences decoded together
        samplers: ours: what make_engine picks on this device; adapters: the same with LoRA of rank
            128; plain: rollout/block.py or rollout/masked.py
        cache: for bidirectional models
        denoising_steps: per block; at most one per token
    """
    name, model = model, meta_model(model)
    is_block = model.attention == "block-causal"
    length, gen_length = (217, 512) if is_block else (256, 256)
    settings = {
        "gen_length": gen_length,
        "block_length": model.block_length,
        "denoising_steps": min(denoising_steps, model.block_length),
        "remasking": "low_confidence_static",
        "temperature": 1.0,
    }
    for sampler in samplers:
        engine = build(sampler, name, max(rows))
        for kind, n in product(cache, rows):
            how = settings | {"cache": kind}
            line = {"model": name, "sampler": sampler, "rows": n} | how
            report(line, measure, engine, n, length, model.mask_token_id, how)
        del engine  # before the next one is made


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
