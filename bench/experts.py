"""Experts of one layer in a sampler, kernels.moe_triton: tiles tuned hot beside the time of reading the weights. One CUDA GPU.

    python bench/experts.py --experts 128 --width 768 --tokens 4 64 512 --hit 10 24 100      # SDAR-30B, as random weights route
    python bench/experts.py --experts 256 --width 512 --tokens 32 512 2048 --hit 45 135 175  # LLaDA2.0-mini

JSON lines for each number of tokens, once with so many experts hit and once with even routing: the tiles in use, then, while
the second product keeps its own, others for the gated one; then, beside the best of these, others for the second. Last the
errors of a router's scores. Microseconds a layer are of a CUDA graph over more layers than a cache holds, replayed until the
GPU is as hot as in a rollout (bench/products.py).
"""

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.products import hot_seconds

LAYERS, BYTES_PER_S = 8, 4.4e12  # what a kernel reaches that only reads, on an H200
# few, block_m, block_n, block_k, warps, stages
TILES = [
    (16, 16, 64, 128, 4, 3), (16, 64, 64, 64, 4, 4), (16, 64, 64, 64, 4, 6), (16, 64, 64, 128, 4, 3), (16, 64, 128, 64, 4, 3),
    (16, 64, 128, 64, 4, 4), (16, 64, 128, 64, 8, 4), (32, 64, 64, 64, 4, 4), (32, 64, 128, 64, 4, 3), (32, 128, 128, 64, 8, 3),
    (64, 64, 64, 64, 4, 4), (64, 64, 128, 64, 8, 4), (64, 128, 128, 64, 8, 3), (128, 128, 128, 64, 4, 3),
    (128, 128, 128, 64, 8, 4),
]  # fmt: skip


@dataclass
class Args:
    experts: int = 128
    """of a layer"""
    width: int = 768
    """of an expert"""
    hidden: int = 2048
    """of the model"""
    used: int = 8
    """experts a token"""
    tokens: tuple[int, ...] = (4, 64, 512)
    """of a forward"""
    hit: tuple[int, ...] = (10, 24, 100)
    """experts that so many tokens go to, about"""
    hot: float = 0.25
    """seconds that each variant runs; the last third counts"""
    tune: bool = True
    """try other tiles than those in use"""
    out: str = ""
    """file to append the JSON lines to"""


def routing(tokens, experts, used, hit=None, seed=0):
    """-> [tokens, used] int64, different experts of each token: about `hit` in all, or drawn evenly"""
    generator = torch.Generator().manual_seed(seed)
    common, own = (torch.randn(size, experts, generator=generator) for size in (1, tokens))
    if hit is None:
        return own.topk(used).indices
    drawn = [(common + share / 50 * own).topk(used).indices for share in range(150)]
    return min(drawn, key=lambda index: abs(len(index.unique()) - hit))


def main(args):
    from triton.runtime.errors import OutOfResources

    from kernels import moe_triton  # here: machines without a GPU have no Triton

    E, D, f, k = args.experts, args.hidden, args.width, args.used
    new = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.03
    layers = [(new(E, 2 * f, D), new(E, D, f)) for _ in range(LAYERS)]

    def report(line):
        print(json.dumps(line), flush=True)
        if args.out:
            with open(args.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def measure(M, index):
        x, weight = new(M, D), torch.rand(M, k, device="cuda").bfloat16()
        load = index.flatten().bincount()
        facts = {"tokens": M, "hit": int((load > 0).sum()), "most": int(load.max())}
        facts["us_of_reading"] = round(facts["hit"] * 3 * f * D * 2 / BYTES_PER_S * 1e6, 1)
        index = index.cuda()

        def run(pair):
            y = x
            for gate_up, down in layers:
                y = moe_triton.experts_fused(y, index, weight, gate_up, down, (x,), pair)
            return y

        def time(pair, **names):
            off = ((run(pair) - want).norm() / want.norm()).item()
            seconds, clock = hot_seconds(lambda: run(pair), args.hot)
            us = round(seconds / LAYERS * 1e6, 1)
            report(
                facts | names | {"us_a_layer": us} | clock | ({} if off < 0.05 else {"wrong": off})
            )
            return us

        want, found = run(None), {}
        time(None, tiles="in use")
        gated, second = moe_triton.tiles_of(M * k, E)
        for tile in TILES if args.tune else ():
            with suppress(OutOfResources):
                found[tile] = time((tile, second), gated=tile, second=second)
        gated = min(found, key=found.get, default=gated)
        for tile in TILES if args.tune else ():
            with suppress(OutOfResources):
                time((gated, tile), gated=gated, second=tile)

    for M, hit in zip(args.tokens, args.hit, strict=True):
        for number in (hit, None):
            measure(M, routing(M, E, k, number))
        x, weight = new(M, D), torch.randn(E, D, device="cuda") * D**-0.5
        want = x.double() @ weight.double().T
        error = lambda y, want=want: ((y.double() - want).norm() / want.norm()).item()
        scores = {
            "ours": moe_triton.scores(x, weight).sum(0),
            "cuBLAS, fp32": F.linear(x.float(), weight),
        }
        report({"tokens": M, "errors_of_scores": {name: error(y) for name, y in scores.items()}})


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
