"""Time algos/sft.py's update with one example a row, with rows sorted by length, and with examples packed into rows.

    python bench/packing.py                                                                    # tiny model, CPU
    python models/random_init.py --config DIR --out /dev/shm/sdar --device cuda
    python bench/packing.py --model /dev/shm/sdar --lora-rank 128 --micro-batch-tokens 8192 --pack-length 4096

The examples have random ids and the lengths of GSM8K's 7,473 training rows under SDAR's tokenizer and chat template (prompt
and worked solution: 74 to 471 tokens, mean 179). A layout gets as many rows a forward as --micro-batch-tokens hold of its
longest ones, so that memory is alike. One JSON line a layout: real tokens (prompt, answer, end tokens) per second, the median
of synchronised steps; what share of the computed tokens they are; forwards a step; FLOP/s of a rank, as a share of those of a
bf16 product; the loss of the first step, which is the same for all; the peak of GPU memory. FLOPs are bench/step.py's, of what
the loss needs: real tokens, and of a block model's noisy copy the blocks with a masked one. On CPU the seconds are those that
the process computed, so that a busy machine does not count; there attention is dense, and the longer packed rows cost more of
it than they save elsewhere.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algos import sft
from bench.step import flops, gib, matmul_rate, reset_memory
from models import add_lora, load_weights, meta_model
from rollout.sampling import keyed_uniform

QUANTILES = {
    0: 74,
    0.05: 107,
    0.1: 117,
    0.25: 138,
    0.5: 168,
    0.75: 210,
    0.9: 256,
    0.95: 286,
    0.99: 343,
    1: 471,
}
PROMPT_SHARE = 0.46  # of an example's tokens


@dataclass
class Args:
    model: str = "tiny-sdar"
    """key of models.MODELS, or a directory in HF layout"""
    lora_rank: int = 0
    """0: full fine-tuning"""
    batch_size: int = 64
    """examples per optimizer step, over all ranks"""
    micro_batch_tokens: int = 4096
    """tokens per forward, padding included"""
    pack_length: int = 1024
    """tokens of a packed row; a bound of 471 and the end tokens on an example is the other layouts'"""
    eos_tail: int = 8
    """LLaDA, Dream: 0 to so many end tokens behind an answer"""
    attention: Literal["auto", "sdpa", "flex", "varlen", "flash-attn"] = "auto"
    """backend of models/attention.py"""
    compile: bool = False
    """torch.compile every block"""
    layouts: tuple[Literal["rows", "sorted", "packed"], ...] = ("rows", "sorted", "packed")
    """one example a row as they come, or sorted by length; or several to a row"""
    steps: int = 3
    """timed steps, after one to warm up (two with --compile); all layouts get the same examples"""


def examples_of(step, args, vocabulary):
    """[(prompt ids, answer ids)] of a step, keyed by it."""
    points, lengths = list(QUANTILES), list(QUANTILES.values())
    examples = []
    for u in keyed_uniform("length", step, torch.arange(args.batch_size)).tolist():
        i = max(i for i, point in enumerate(points[:-1]) if point <= u)
        n = round(
            lengths[i]
            + (u - points[i]) / (points[i + 1] - points[i]) * (lengths[i + 1] - lengths[i])
        )
        draws = keyed_uniform("ids", step, len(examples), torch.arange(n))
        ids = (draws * vocabulary).long().tolist()
        examples.append((ids[: round(PROMPT_SHARE * n)], ids[round(PROMPT_SHARE * n) :]))
    return examples


def work(model, batch, masked):
    """-> FLOPs of the batch: of what the loss needs, however it is laid out"""
    real, n = batch.document_ids >= 0, model.block_length
    if model.attention == "bidirectional":
        sees = batch.document_ids[real].unique(return_counts=True)[1].double() ** 2
        return flops(model, int(real.sum()), float(sees.sum()), int(masked.sum()), True)
    sees = (
        batch.position_ids // n + 1
    ) * n  # of a clean token, and of a noisy one: clean blocks before its own noisy one
    block = batch.document_ids * batch.position_ids.shape[1] + batch.position_ids // n
    noisy = real & torch.isin(block, block[masked])
    tokens, pairs = (real.sum() + noisy.sum()), sees[real].sum() + sees[noisy].sum()
    return flops(model, int(tokens), int(pairs), int(masked.sum()), True)


def measure(model, optimizer, args, layout, matmul, rank, world_size, device):
    """matmul: TFLOP/s of a large product -> facts of one layout"""
    reset_memory()
    longest = max(QUANTILES.values()) + max(args.eos_tail, model.block_length)
    size = max(args.micro_batch_tokens // (layout.get("pack_length") or longest), 1)
    settings = {
        "batch_size": args.batch_size,
        "eos_tail": args.eos_tail,
        "max_length": longest,
        "micro_batch_size": size,
    }
    settings = sft.Args(**settings, **layout)
    synchronize, clock = lambda: None, time.process_time
    if device.type == "cuda":
        synchronize, clock = torch.cuda.synchronize, time.perf_counter
    params = [p for p in model.parameters() if p.requires_grad]
    seconds, shares, rates, losses, tflops = [], [], [], [], []
    warm_up = 2 if args.compile else 1
    for step in range(warm_up + args.steps):
        batch = sft.make_batch(
            examples_of(step, args, model.mask_token_id),
            settings,
            model,
            step,
            rank,
            world_size,
            device,
        )
        noise = sft.sample_masks(batch, settings, model.objective)
        synchronize()
        start, loss, computed = clock(), 0.0, 0
        for i in range(0, len(batch.input_ids), size):
            rows = slice(i, i + size)
            model.set_requires_gradient_sync(rows.stop >= len(batch.input_ids))
            share = sft.micro_loss(model, batch, *noise, rows, settings)
            (share * world_size).backward()
            loss += share.detach()
            computed += batch.valid_mask[rows].shape[0] * int(batch.valid_mask[rows].sum(1).max())
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        elapsed = clock() - start
        sums = {"real": (batch.document_ids >= 0).sum(), "computed": computed, "loss": loss}
        sums = sft.all_reduce(sums | {"flops": work(model, batch, noise[0]) / world_size})
        seconds.append(elapsed), rates.append(sums["real"] / elapsed), losses.append(sums["loss"])
        tflops.append(sums["flops"] / elapsed / 1e12)
        shares.append(sums["real"] / sums["computed"])
    return {
        "micro_batch_size": size,
        "forwards": -(-len(batch.input_ids) // size),
        "seconds": statistics.median(seconds[warm_up:]),
        "tokens_per_s": statistics.median(rates[warm_up:]),
        "real_share": statistics.mean(shares[warm_up:]),
        "tflops": statistics.median(tflops[warm_up:]),
        "share_of_matmul": statistics.median(tflops[warm_up:]) / matmul,
        "first_loss": losses[0],
    } | ({"peak_gib": gib(torch.cuda.max_memory_allocated())} if device.type == "cuda" else {})


def main(args):
    rank, world_size, device = sft.setup_distributed()
    if args.batch_size % world_size:
        raise SystemExit(f"--batch-size {args.batch_size} does not divide by {world_size} ranks")
    model = meta_model(
        args.model, torch.bfloat16 if args.lora_rank and device.type == "cuda" else torch.float32
    )
    if args.lora_rank:
        add_lora(model, args.lora_rank, 64)
    settings = sft.Args(attention=args.attention, compile=args.compile)
    model = load_weights(sft.parallelize(model, settings), device)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        params, lr=0.0, weight_decay=0.0, fused=device.type == "cuda"
    )  # the weights stay
    matmul = matmul_rate(device)["tflops"]
    layouts = {
        "rows": {"group_by_length": False},
        "sorted": {},
        "packed": {"pack_length": args.pack_length},
    }
    for name in args.layouts:
        facts = measure(model, optimizer, args, layouts[name], matmul, rank, world_size, device)
        if rank == 0:
            print(json.dumps({"layout": name, "model": Path(args.model).name} | facts), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
