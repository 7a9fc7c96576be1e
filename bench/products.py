"""Tune kernels.fused_triton: products of a few tokens and attention over the cache, inside the chain of kernels of a layer.

    python bench/products.py --rows 1 16 --tokens 4 8 --context 473     # layers of SDAR-8B: microseconds, TB/s of weights

A kernel that starts while the one before it still runs is not as fast alone as among others. So layers are measured whole:
norm, qkv, rotation, attention over a cache, o, norm, gate and up, down, as one CUDA graph over more layers than fit any cache.
JSON lines: the layers with cuBLAS's products, then the best tiles of each product and of the attention, found while the others
stay as they are, and the next best five.
"""

import itertools
import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.rollout import timed

D, HEADS, KV_HEADS, HEAD, LAYERS = 4096, 32, 8, 128, 12
PRODUCTS = {"qkv": (6144, D), "o": (D, D), "gate-up": (24576, D), "down": (D, 12288)}  # outputs, inputs
ATTENTION = list(  # parts of a row's cache, (positions a turn, warps, stages)
    itertools.product((1, 2, 4, 8, 16), ((32, 1, 2), (32, 2, 3), (64, 2, 2), (64, 4, 2), (64, 4, 3), (128, 4, 2), (128, 8, 2)))
)


@dataclass
class Args:
    rows: tuple[int, ...] = (1, 16)
    """sequences of a forward"""
    tokens: tuple[int, ...] = (4, 8)
    """of a sequence: a block, or a block and the one that is committed with it"""
    context: int = 473
    """positions in the cache"""
    most: int = 128
    """tokens of a forward, up to which products are tuned; the attention always is"""
    budget: float = 1e9
    """seconds a pair of rows and tokens gets"""
    jobs: int = os.cpu_count()
    """processes that compile"""
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

    (N, K), name, tokens, part, parts = case
    x, weight = (torch.zeros(n, K, device="cuda", dtype=torch.bfloat16) for n in (tokens, N))
    onto = torch.zeros(tokens, N, device="cuda", dtype=torch.bfloat16) if name == "down" else None
    for tile in itertools.islice(tiles(tokens, name == "gate-up"), part, None, parts):
        with suppress(Exception):  # said where it is timed
            fused_triton.linear(x, weight, name == "gate-up", onto, tuned=tile)


def main(args):
    from kernels import fused_triton

    pairs = list(itertools.product(args.rows, args.tokens))
    sizes = {rows * tokens for rows, tokens in pairs if rows * tokens <= args.most}
    parts = max(args.jobs // max(len(PRODUCTS) * len(sizes), 1), 1)
    cases = [(shape, name, size, part, parts) for name, shape in PRODUCTS.items() for size in sizes for part in range(parts)]
    with torch.multiprocessing.get_context("spawn").Pool(max(min(len(cases), args.jobs), 1)) as pool:
        pool.map(compiled, cases, chunksize=1)
    for rows, tokens in pairs:
        tune(args, rows, tokens, fused_triton)


def tune(args, R, T, fused_triton):
    new = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02
    layers = [{name: new(N, K) for name, (N, K) in PRODUCTS.items()} for _ in range(LAYERS)]
    norm, head_norm = (torch.ones(size, device="cuda", dtype=torch.bfloat16) for size in (D, HEAD))
    x, began = new(R * T, D), time.perf_counter()
    caches = [[new(R, KV_HEADS, args.context + 128, HEAD) for _ in range(2)] for _ in range(LAYERS)]
    start = torch.full((R,), args.context, device="cuda")
    cos = new(R, 1, T, HEAD)
    best = dict.fromkeys([*PRODUCTS, "attention"])

    def product(name, y, layer, onto=None):
        if best[name] is not None:
            return fused_triton.linear(y, layer[name], name == "gate-up", onto, tuned=best[name])
        y = F.linear(y, layer[name])
        if name == "gate-up":
            return fused_triton.silu_mul(*y.chunk(2, -1))
        return y if onto is None else onto + y

    def run():
        total = x
        for layer, (keys, values) in zip(layers, caches, strict=True):
            y = fused_triton.add_rms_norm(total, None, norm, 1e-6, False)[1]
            q, k, v = product("qkv", y, layer).view(R, T, -1, HEAD).transpose(1, 2).split([HEADS, KV_HEADS, KV_HEADS], 1)
            q, k = fused_triton.norm_rotate(q, k, head_norm, head_norm, 1e-6, cos, cos, False)
            y = fused_triton.decode_attention(q, k, v, keys, values, start, 4, *(best["attention"] or ()))
            delta = product("o", y.transpose(1, 2).reshape(R * T, D), layer)
            total, y = fused_triton.add_rms_norm(total, delta, norm, 1e-6, False)
            total = product("down", product("gate-up", y, layer), layer, onto=total)
        return total

    weights = sum(N * K * 2 for N, K in PRODUCTS.values())

    def report(seconds, **facts):
        facts |= {"us_a_layer": round(seconds / LAYERS * 1e6, 1), "tb_per_s": round(weights * LAYERS / seconds / 1e12, 2)}
        line = json.dumps({"rows": R, "tokens": T} | facts)
        print(line, flush=True)
        if args.out:
            with open(args.out, "a") as file:
                file.write(line + "\n")

    early, want = fused_triton._starts_early, run()
    for fused_triton._starts_early in (lambda device: False, early):
        report(graph_seconds(run), products="cuBLAS", early=fused_triton._starts_early is early)
    for name in ("gate-up", "down", "qkv", "o", "attention", "o") if R * T <= args.most else ("attention",):
        found = {best[name]: graph_seconds(run)}
        before = found[best[name]]

        for tile in ATTENTION if name == "attention" else tiles(R * T, name == "gate-up"):
            if time.perf_counter() - began > args.budget:
                break
            best[name] = tile
            try:
                if not (off := ((run() - want).norm() / want.norm()).item()) < 0.05:
                    print(json.dumps({"wrong": tile, "kernel": name, "off": off}), flush=True)
                    continue
                found[tile] = graph_seconds(run)
            except Exception as error:
                if "OutOfResources" not in type(error).__name__:
                    print(json.dumps({"kernel": name, "tile": tile, "error": str(error)[:200]}), flush=True)
        best[name] = min(found, key=found.get)
        report(found[best[name]], kernel=name, tile=best[name], before=round(before / LAYERS * 1e6, 1))
        for tile in sorted(found, key=found.get)[1:6]:
            report(found[tile], next_best=tile)
    fused_triton._starts_early = lambda device: False
    report(graph_seconds(run), products="ours", early=False)
    fused_triton._starts_early = early


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
