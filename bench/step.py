"""Time loading, a forward pass and a training step at real size.

    python bench/step.py --model DIR --compile     # DIR needs config.json alone: random weights
    torchrun --nproc-per-node 2 bench/step.py --model DIR --compile --rows 2 --length 16384 \
        --micro-batch-size 1 --sequence-parallel 2

Our step is the update of algos/sft.py: its `parallelize`, add_lora, load_weights, model.logps,
reduce_gradients, clipping and AdamW. One JSON line per measurement; seconds are medians of
synchronised steps, rates count input tokens (rows x length), peak_gib is torch's peak allocation.

FLOPs are those of the matrix products of the mathematics, without recomputation. Over the weight
matrices M of the blocks and the head, and the layers,
    forward  = sum over M of 2 |M| n          + 4 H h rows length^2 a layer
    backward = sum over M of 2 |M| n (1 + t)  + 8 H h rows length^2 a layer
n: tokens multiplied by M (scored ones for the head; tokens x k / E for stacked experts; two per
input token for a block model, which reads [clean | noisy]); t: 1 if M is trained, else 0. H heads
of h: length^2 pairs of tokens see each other in a row, in a block model half of them clean ones.
share_of_matmul is FLOP/s over those of an 8192^3 bf16 product in the same run.
"""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algos.sft import parallelize, setup_distributed
from bench.timing import Report, timed
from distributed.sequence import data_rank
from distributed.sharding import reduce_gradients
from models import add_lora, load_weights, meta_model
from models.checkpoint import resolve
from models.tensors import full_tensor

LORA_ALPHA = 64


@dataclass
class Args:
    model: str
    """key of models.MODELS, or a directory in HF layout; without weights in it they are random"""
    lora_rank: int = 128
    """0: full fine-tuning"""
    rows: int = 16
    """sequences per optimizer step and rank, or ranks that share them"""
    length: int = 512
    """tokens per sequence"""
    micro_batch_size: int = 8
    """sequences per forward"""
    attention: Literal["auto", "sdpa", "flex", "varlen", "flash-attn"] = "auto"
    compile: bool = False
    """torch.compile every block"""
    activation_checkpointing: bool = False
    sequence_parallel: int = 1
    """so many ranks share each row"""


def median(function):
    """-> median seconds of five calls after two"""
    runs = [timed(function) for _ in range(7)]
    return statistics.median(seconds for seconds, _ in runs[2:])


def matmul_rate(device):
    n = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = median(lambda: [a @ b for _ in range(20)] and None)
    return {"tflops": 2 * n**3 * 20 / seconds / 1e12}


def flops(model, args, scored, backward):
    """The formula above for `scored` tokens through the head. -> FLOPs of a step on one rank"""
    tokens = args.rows * args.length * (1 + (model.attention == "block-causal"))
    tokens, scored = tokens / args.sequence_parallel, scored / args.sequence_parallel
    used = lambda p: model.config.num_experts_per_tok / len(p) if p.dim() == 3 else 1
    weights = [p for layer in model.layers for p in layer.parameters() if p.dim() > 1]
    counted = [(p, tokens * used(p)) for p in weights] + [(model.lm_head.weight, scored)]
    products = sum(2 * p.numel() * n * (1 + backward * (1 + p.requires_grad)) for p, n in counted)
    config, pairs = model.config, args.rows * args.length**2 / args.sequence_parallel
    width = len(model.layers) * config.num_attention_heads * config.head_dim
    return products + 4 * (1 + 2 * backward) * width * pairs


def rates(seconds, args, work, matmul):
    """work: FLOPs of a step; matmul: TFLOP/s -> facts of a line; tokens/s count all ranks, TFLOP/s
    one
    """
    tokens, tflops = args.rows * args.length * data_rank()[1], work / seconds / 1e12
    facts = {"seconds": seconds, "tokens_per_s": tokens / seconds, "tflops": tflops}
    return facts | {"share_of_matmul": tflops / matmul}


def make_batch(args, mask_token_id, device):
    """Random tokens, about half of them masked. -> input_ids, noisy_ids, masked [B, T]"""
    generator, shape = torch.Generator().manual_seed(data_rank()[0]), (args.rows, args.length)
    ids = torch.randint(0, mask_token_id, shape, generator=generator).to(device)
    masked = (torch.rand(shape, generator=generator) < 0.5).to(device)
    return ids, torch.where(masked, mask_token_id, ids), masked


def load(args, device):
    """-> a model as the scripts make it: on meta, with adapters, sharded, then its weights; seconds
    to read or draw them
    """
    frozen_bf16 = args.lora_rank and device.type == "cuda"
    model = meta_model(args.model, torch.bfloat16 if frozen_bf16 else torch.float32)
    if args.lora_rank:
        add_lora(model, args.lora_rank, LORA_ALPHA)
    model = parallelize(model, args)
    if not list(Path(args.model).glob("*.safetensors")):
        model.sources = None, []  # load_weights draws them
    dist.barrier()
    seconds, _ = timed(lambda: load_weights(model, device))
    return model, seconds


def forward(model, batch, args, matmul):
    """Log-probabilities of every token, without gradient."""
    ids, noisy, masked = batch
    everything = torch.ones_like(masked)

    def run():
        with torch.no_grad():
            for rows in torch.arange(args.rows).split(args.micro_batch_size):
                model.logps(ids[rows], noisy[rows, None], everything[rows, None])

    work = flops(model, args, args.rows * args.length, False)
    return rates(median(run), args, work, matmul)


def training_step(model, batch, args, matmul):
    ids, noisy, masked = batch
    params, scored = [p for p in model.parameters() if p.requires_grad], masked.sum()
    optimizer = torch.optim.AdamW(params, lr=1e-5, weight_decay=0.0, fused=params[0].is_cuda)

    def step():
        for rows in torch.arange(args.rows).split(args.micro_batch_size):
            reduce_gradients(model, bool(rows[-1] + 1 == args.rows), False)
            logps = model.logps(ids[rows], noisy[rows, None], masked[rows, None])
            (-logps.sum() / scored).backward()
        norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        full_tensor(norm).item()  # as the scripts do

    return rates(median(step), args, flops(model, args, scored.item(), True), matmul)


def main(args):
    device = setup_distributed(args.sequence_parallel)
    args.model = str(resolve(args.model))
    report = Report(ranks=dist.get_world_size(), **vars(args))
    matmul = report.measure(matmul_rate, device, what="matmul")["tflops"]
    model, seconds = load(args, device)
    report.write({"what": "load", "seconds": seconds})
    batch = make_batch(args, model.mask_token_id, device)
    report.measure(forward, model, batch, args, matmul, what="forward")
    report.measure(training_step, model, batch, args, matmul, what="step")
    dist.destroy_process_group()
    report.close()


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
