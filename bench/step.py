"""Time loading, a forward pass and a training step at real size.

    python bench/step.py --model DIR               # DIR needs config.json alone: random weights
    torchrun --nproc-per-node 2 bench/step.py --model DIR --rows 2 --length 16384 \
        --micro-batch-size 1 --sequence-parallel 2

The model, its flags and the optimizer step are those of algos/sft.py. One JSON line per
measurement; seconds are medians of synchronised steps, rates count input tokens (rows x length) of
all ranks.

FLOPs are those of the matrix products of the mathematics, without recomputation. Over the weight
matrices M of the blocks and the head, and the layers,
    forward  = sum over M of 2 |M| n          + 4 H h rows length^2 a layer
    backward = sum over M of 2 |M| n (1 + t)  + 8 H h rows length^2 a layer
n: tokens multiplied by M (scored ones for the head; tokens x k / E for stacked experts; two per
input token for a block model, which reads [clean | noisy]); t: 1 if M is trained, else 0. H heads
of h: length^2 pairs of tokens see each other in a row, in a block model half of them clean ones.
share_of_matmul is FLOP/s of a rank over those of an 8192^3 bf16 product in the same run.
"""

import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, __file__.rpartition("/bench/")[0])
import distributed.start  # noqa: F401

# isort: split
import torch
import torch.distributed as dist

from algos import sft
from bench.timing import report, timed
from distributed.groups import setup_distributed
from distributed.sequence import data_rank
from models import load_weights
from models.names import resolve
from run.plan import share_taken


@dataclass
class Args(sft.Args):
    rows: int = 16
    """sequences per optimizer step and rank, or ranks that share them"""
    length: int = 512
    """tokens per sequence"""
    micro_batch_size: int = 8
    """sequences per forward"""
    eos_tail: int = 0
    """rows have the same length"""


def median(function):
    """-> median seconds of five calls after two"""
    seconds = [timed(function)[0] for _ in range(7)]
    return statistics.median(seconds[2:])


def matmul_rate(device):
    n = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = median(lambda: [a @ b for _ in range(20)])
    return {"tflops": 2 * n**3 * 20 / seconds / 1e12}


def flops(model, args, scored, backward):
    """The formula above for `scored` tokens through the head. -> FLOPs of a step on one rank"""
    tokens = args.rows * args.length * (1 + (model.attention == "block-causal"))
    weights = [p for p in model.layers.parameters() if p.dim() > 1]
    counted = [(p, tokens * share_taken(p, model.config)) for p in weights] + [
        (model.lm_head.weight, scored)
    ]
    products = sum(2 * p.numel() * n * (1 + backward * (1 + p.requires_grad)) for p, n in counted)
    width = len(model.layers) * model.config.num_attention_heads * model.config.head_dim
    pairs = 4 * (1 + 2 * backward) * width * args.rows * args.length**2
    return (products + pairs) / args.sequence_parallel


def rates(step, args, work, matmul):
    """work: FLOPs of a step on a rank; matmul: TFLOP/s"""
    seconds, tokens = median(step), args.rows * args.length * data_rank()[1]
    facts = {"seconds": seconds, "tokens_per_s": tokens / seconds}
    return facts | {"share_of_matmul": work / seconds / 1e12 / matmul}


def make_batch(args, model, device):
    """Random tokens, masked as in sft.py. -> its Batch of this rank"""
    group, groups = data_rank()
    torch.manual_seed(0)
    rows = torch.randint(model.mask_token_id, (args.rows * groups, args.length)).tolist()
    batch = sft.make_batch([([], ids) for ids in rows], args, model, 0, group, groups, device)
    batch.noise = sft.sample_masks(batch, args, model.objective)
    return batch


def load(model, args, device):
    """Read or draw the weights of a sharded model."""
    if not list(Path(args.model).glob("*.safetensors")):
        model.sources = None, []  # load_weights draws them
    dist.barrier()
    return {"seconds": timed(lambda: load_weights(model, device))[0]}


def forward(model, batch, args):
    """The loss of a step, without its gradient."""
    with torch.no_grad():
        for micro, *_ in batch.micro_batches(args.micro_batch_size):
            sft.micro_loss(model, micro, args)


def main(args):
    device = setup_distributed(args.sequence_parallel)
    args.model = str(resolve(args.model))
    facts = {"what": "matmul", "ranks": dist.get_world_size()} | vars(args)
    matmul = report(facts, matmul_rate, device)["tflops"]
    model = sft.parallelize(sft.build_policy(device, args), args)
    report({"what": "load"}, load, model, args, device)
    batch = make_batch(args, model, device)
    optimizer = sft.make_optimizer(model, args)
    for what, step in {
        "forward": partial(forward, model, batch, args),
        "step": partial(sft.update, model, optimizer, batch, 0, args),
    }.items():
        work = flops(model, args, (batch.noise[0] != batch.input_ids).sum().item(), what == "step")
        report({"what": what}, rates, step, args, work, matmul)
    dist.destroy_process_group()


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
