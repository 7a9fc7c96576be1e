"""Compare samplers on one model: the fast and the plain engine, lmdeploy, and Fast-dLLM's own code.

    python models/random_init.py --config DIR --tokenizer DIR --out DIR2 --device cuda
    python bench/rollout.py --model DIR2 --rows 1 16 128 --samplers ours plain lmdeploy
    python bench/rollout.py --model DIR2 --cache none dual --samplers ours Fast-dLLM --peer llada/

Prints one JSON line per measurement. All samplers get the same weights and
prompts. tokens_per_s counts completion tokens up to and including the first EOS, over the seconds
of whole rollouts with prefill; a first rollout, which captures CUDA graphs, is reported as first_s.
forwards: of one batch, commits included; tokens_per_forward: of one sequence.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.fast_dllm import FastDLLM
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
    samplers: tuple[Literal["ours", "plain", "lmdeploy", "Fast-dLLM"], ...] = ("ours",)
    """ours: what make_engine picks on this device; plain: rollout/block.py or rollout/masked.py"""
    peer: str = ""
    """llada/ folder of a copy of github.com/NVlabs/Fast-dLLM (v1), for Fast-dLLM"""
    cache: tuple[Literal["none", "prefix", "dual"], ...] = ("none",)
    """for bidirectional models"""
    prompt_length: int | None = None
    """tokens; default 217 for block-causal models, 256 for bidirectional ones"""
    gen_length: int | None = None
    """tokens; default 512 and 256"""
    block_length: int | None = None
    """tokens; default: the model's own, 32 for bidirectional models"""
    denoising_steps: int | None = None
    """per block; default 16, or one per token if the block is shorter"""
    remasking: str = "low_confidence_static"
    """rule of all samplers but Fast-dLLM, which runs its own with as many steps"""
    temperature: float = 1.0
    top_k: int = 0


def build(sampler, args, device, engines):
    """Append the sampler to `engines`: an object with the `generate` of our engines."""
    if sampler in ("ours", "lmdeploy"):
        backend = "auto" if sampler == "ours" else "lmdeploy"
        engine = make_engine(args.model, backend, device, max_batch_size=max(args.rows))
    else:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = load_model(args.model, device, dtype)
        if sampler == "plain":
            is_block = model.attention == "block-causal"
            engine = (BlockEngine if is_block else MaskedEngine)(model, max(args.rows))
        else:
            engine = FastDLLM(args.peer, model)
    engines.append(engine)
    return {}


def settings_of(args, model):
    """-> arguments of `generate` for this model, prompt length"""
    is_block = model.attention == "block-causal"
    names = ("remasking", "temperature", "top_k")
    settings = {name: getattr(args, name) for name in names}
    settings["gen_length"] = args.gen_length or (512 if is_block else 256)
    settings["block_length"] = args.block_length or (model.block_length if is_block else 32)
    settings["denoising_steps"] = args.denoising_steps or min(16, settings["block_length"])
    return settings, args.prompt_length or (217 if is_block else 256)


def measure(engine, rows, length, mask_token_id, settings):
    """-> rates of a rollout of so many rows, up to 8 to a prompt"""
    if hasattr(engine, "release"):
        engine.release()  # the cache and graphs of other sizes
    samples = math.gcd(rows, 8)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, mask_token_id, (rows // samples, length), generator=generator)
    prompts = prompts.tolist()
    roll = lambda seed: engine.generate(prompts, num_samples=samples, seed=seed, **settings)
    first_s, _ = timed(lambda: roll(0))
    seconds, trace = timed(lambda: roll(1))
    tokens = int(trace.completion_mask.sum())
    facts = {"tokens_per_s": tokens / seconds, "tokens": tokens}
    facts |= {"seconds": seconds, "first_s": first_s}
    total = 0 if trace.num_forwards is None else int(trace.num_forwards.sum())
    if total > 0:  # lmdeploy does not tell
        facts |= {"forwards": total / rows, "tokens_per_forward": tokens / total}
        facts["ms_per_forward"] = 1e3 * seconds * rows / total
    return facts


def main(args):
    if "Fast-dLLM" in args.samplers and not Path(args.peer, "model").is_dir():
        raise SystemExit(f"--peer {args.peer!r} is not the llada/ folder of Fast-dLLM")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report = Report(model=Path(args.model).name)
    model = meta_model(args.model)
    settings, length = settings_of(args, model)
    is_block = model.attention == "block-causal"
    for sampler in args.samplers:
        engines = []
        facts = report.measure(build, sampler, args, device, engines, built=sampler)
        for kind in ("none",) if is_block else args.cache:
            for rows in () if "error" in facts else args.rows:
                options = settings | ({} if is_block else {"cache": kind})
                sizes = rows, length, model.mask_token_id, options
                line = {"sampler": sampler, "rows": rows, "prompt_length": length} | options
                report.measure(measure, engines[0], *sizes, **line)
    report.close()


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
