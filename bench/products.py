"""Tune kernels.fused_triton.linear: products of a few tokens inside the chain of kernels of a decoder layer, beside cuBLAS.

    python bench/products.py --rows 4 64 --context 473              # layers of SDAR-8B: microseconds, TB/s of weights

A product that starts while the kernel before it still runs is not as fast alone as among others. So layers are measured whole:
norm, qkv, rotation, attention over a cache, o, norm, gate and up, down, as one CUDA graph over more layers than fit any cache.
JSON lines for cuBLAS' products, and one a product whose best tiles were found with those of the others fixed.
"""

import itertools
import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.rollout import timed

D, HEADS, KV_HEADS, HEAD, LAYERS, BLOCK = 4096, 32, 8, 128, 12, 4
PRODUCTS = {"qkv": (6144, D), "o": (D, D), "gate-up": (24576, D), "down": (D, 12288)}  # outputs, inputs


@dataclass
class Args:
    rows: tuple[int, ...] = (4, 64)
    """tokens of a forward, blocks of 4"""
    context: int = 473
    """positions in the cache"""
    rounds: int = 1
    """times that every product is tuned"""
    out: str = ""
    """file to append the JSON lines to"""


def graph_seconds(run):
    """Seconds of run() as a CUDA graph: least of five replays."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return min(timed(graph.replay)[0] for _ in range(5))


def tiles(rows, gated):
    """(block_n, block_k, splits, warps, stages) that fit shared memory and registers"""
    block_m = max(16, 1 << (rows - 1).bit_length())
    shapes = itertools.product((32, 64, 128), (64, 128, 256), (1,) if gated else (1, 2, 4), (4, 8), (3, 4, 5, 6))
    for block_n, block_k, splits, warps, stages in shapes:
        stage = (block_n + block_m) * block_k * 2
        if 60_000 <= stage * stages <= 200_000 and (warps == 4 or block_n == 128 and block_m >= 64) and stages * block_k >= 256:
            yield block_n, block_k, splits, warps, stages


def compiled(case):
    """Puts the kernels of one product into Triton's cache, in a process of its own."""
    from kernels import fused_triton

    (N, K), rows, gated, part, parts = case
    x, weight = (torch.zeros(n, K, device="cuda", dtype=torch.bfloat16) for n in (rows, N))
    for tile in itertools.islice(tiles(rows, gated), part, None, parts):
        with suppress(Exception):  # said where it is timed
            fused_triton.linear(x, weight, gated, tuned=tile)


def main(args):
    from kernels import fused_triton

    parts = max(os.cpu_count() // (len(PRODUCTS) * len(args.rows)), 1)
    cases = [
        (shape, rows, name == "gate-up", part, parts)
        for name, shape in PRODUCTS.items()
        for rows in args.rows
        for part in range(parts)
    ]
    with torch.multiprocessing.get_context("spawn").Pool(min(len(cases), os.cpu_count())) as pool:
        pool.map(compiled, cases, chunksize=1)
    for rows in args.rows:
        tune(args, rows, fused_triton)


def tune(args, rows, fused_triton):
    new = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02
    layers = [{name: new(N, K) for name, (N, K) in PRODUCTS.items()} for _ in range(LAYERS)]
    norm, head_norm = (torch.ones(size, device="cuda", dtype=torch.bfloat16) for size in (D, HEAD))
    x, R = new(rows, D), rows // BLOCK
    caches = [[new(R, KV_HEADS, args.context + 128, HEAD) for _ in range(2)] for _ in range(LAYERS)]
    start = torch.full((R,), args.context, device="cuda")
    cos = new(R, 1, BLOCK, HEAD)

    def run(product):
        total, delta = x, None
        for layer, (keys, values) in zip(layers, caches, strict=True):
            total, y = fused_triton.add_rms_norm(total, delta, norm, 1e-6, False)
            q, k, v = product("qkv", y, layer).view(R, BLOCK, -1, HEAD).transpose(1, 2).split([HEADS, KV_HEADS, KV_HEADS], 1)
            q, k = fused_triton.norm_rotate(q, k, head_norm, head_norm, 1e-6, cos, cos, False)
            y = fused_triton.decode_attention(q, k, v, keys, values, start, BLOCK)
            delta = product("o", y.transpose(1, 2).reshape(rows, D), layer)
            total, y = fused_triton.add_rms_norm(total, delta, norm, 1e-6, False)
            delta = product("down", product("gate-up", y, layer), layer)
        return delta

    def blas(name, y, layer):
        y = F.linear(y, layer[name])
        return fused_triton.silu_mul(*y.chunk(2, -1)) if name == "gate-up" else y

    def ours(name, y, layer):
        if best[name] is None:
            return blas(name, y, layer)
        return fused_triton.linear(y, layer[name], name == "gate-up", tuned=best[name])

    weights = sum(N * K * 2 for N, K in PRODUCTS.values())

    def report(seconds, **facts):
        facts |= {"us_a_layer": round(seconds / LAYERS * 1e6, 1), "tb_per_s": round(weights * LAYERS / seconds / 1e12, 2)}
        line = json.dumps({"rows": rows} | facts)
        print(line, flush=True)
        if args.out:
            with open(args.out, "a") as file:
                file.write(line + "\n")

    best = dict.fromkeys(PRODUCTS)
    early, want = fused_triton._starts_early, run(ours)
    for fused_triton._starts_early in (lambda device: False, early):
        report(graph_seconds(lambda: run(ours)), products="cuBLAS", early=fused_triton._starts_early is early)
    for _, name in itertools.product(range(args.rounds), ("gate-up", "down", "qkv", "o")):
        found = {None: graph_seconds(lambda: run(ours))}
        for tile in tiles(rows, name == "gate-up"):
            best[name] = tile
            try:
                if not (off := ((run(ours) - want).norm() / want.norm()).item()) < 0.05:
                    print(json.dumps({"wrong": tile, "product": name, "off": off}), flush=True)
                    continue
                found[tile] = graph_seconds(lambda: run(ours))
            except Exception as error:
                if "OutOfResources" not in type(error).__name__:
                    print(json.dumps({"product": name, "tile": tile, "error": str(error)[:200]}), flush=True)
        best[name] = min(found, key=found.get)
        report(found[best[name]], product=name, tile=best[name], cublas=round(found[None] / LAYERS * 1e6, 1))
        for tile in sorted(found, key=found.get)[1:4]:
            report(found[tile], next_best=tile)
    fused_triton._starts_early = lambda device: False
    report(graph_seconds(lambda: run(ours)), products="ours", early=False)
    fused_triton._starts_early = early


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
