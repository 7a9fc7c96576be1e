"""Layers of SDAR-8B in a step of few tokens: kernels.products_gluon beside cuBLAS, and the attention over the cache tuned.

    python bench/products.py --rows 1 16 --tokens 4 8 --context 473     # microseconds a layer, TB/s of weights, MHz and W

A kernel that starts while the one before it still runs is not as fast alone as among others. So layers are measured whole:
norm, qkv, rotation, attention over a cache, o, norm, gate and up, down, as one CUDA graph over more layers than fit any cache.
And they are measured hot: an H200 that multiplies 64 tokens without a pause draws its 700 W within a second and slows its clock
from then on, by as much as a tenth, so that what is fastest for a millisecond need not be what is fastest in a rollout.
JSON lines: the layers with cuBLAS's products; with ours, all and each alone; with one product's inputs shared by another number
of programs; then each shape of the attention.
"""

import itertools
import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.rollout import timed
from kernels import fused

D, HEADS, KV_HEADS, HEAD, LAYERS = 4096, 32, 8, 128, 12
PRODUCTS = {
    "qkv": (6144, D),
    "o": (D, D),
    "gate-up": (24576, D),
    "down": (D, 12288),
}  # outputs, inputs
ATTENTION = list(  # parts of a row's cache, (positions a turn, warps, stages)
    itertools.product(
        (1, 2, 4, 8, 16),
        ((32, 1, 2), (32, 2, 3), (64, 2, 2), (64, 4, 2), (64, 4, 3), (128, 4, 2), (128, 8, 2)),
    )
)


@dataclass
class Args:
    rows: tuple[int, ...] = (1, 16)
    """sequences of a forward"""
    tokens: tuple[int, ...] = (4, 8)
    """of a sequence: a block, or a block and the one that is committed with it"""
    context: int = 473
    """positions in the cache"""
    hot: float = 1.0
    """seconds that each variant runs; the last third counts"""
    attention: bool = True
    """tune the attention too"""
    out: str = ""
    """file to append the JSON lines to"""


def hot_seconds(run, seconds):
    """-> seconds of run() as a CUDA graph, the mean over the last third of so many seconds of replays; clock and power then"""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    third = max(int(seconds / 3 / min(timed(graph.replay)[0] for _ in range(3))), 1)
    for _ in range(2 * third):
        graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(third):
        graph.replay()
    end.record()
    while not begin.query():
        time.sleep(0.001)
    clock = clock_and_power()  # while the last third runs
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / third / 1e3, clock


def clock_and_power():
    """-> {MHz, W} of this process's GPU as nvidia-smi says, or nothing"""
    gpu = f"GPU-{torch.cuda.get_device_properties().uuid}"  # CUDA_VISIBLE_DEVICES may have numbered them anew
    command = [
        "nvidia-smi",
        "-i",
        gpu,
        "--query-gpu=clocks.sm,power.draw",
        "--format=csv,noheader,nounits",
    ]
    with suppress(OSError, subprocess.CalledProcessError, ValueError):
        mhz, watts = map(
            float,
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(","),
        )
        return {"mhz": mhz, "w": watts}
    return {}


def main(args):
    for rows, tokens in itertools.product(args.rows, args.tokens):
        measure(args, rows, tokens)


def measure(args, R, T):
    from triton.runtime.errors import OutOfResources

    from kernels import fused_triton, products_gluon  # here: machines without a GPU have no Triton

    new = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02
    layers = [{name: new(N, K) for name, (N, K) in PRODUCTS.items()} for _ in range(LAYERS)]
    norm, head_norm = (torch.ones(size, device="cuda", dtype=torch.bfloat16) for size in (D, HEAD))
    x = new(R * T, D)
    caches = [[new(R, KV_HEADS, args.context + 128, HEAD) for _ in range(2)] for _ in range(LAYERS)]
    start = torch.full((R,), args.context, device="cuda")
    cos = new(R, 1, T, HEAD)
    weights = sum(N * K * 2 for N, K in PRODUCTS.values())

    def product(name, y, layer, ours, onto=None):
        if name in ours:
            if name == "gate-up":
                return products_gluon.gated(y, layer[name])
            return products_gluon.linear(y, layer[name], onto, ours[name])
        y = F.linear(y, layer[name])
        if name == "gate-up":
            return fused_triton.silu_mul(*y.chunk(2, -1))
        return y if onto is None else onto + y

    def run(ours, attention=()):
        total = x
        for layer, (keys, values) in zip(layers, caches, strict=True):
            y = fused_triton.add_rms_norm(total, None, norm, 1e-6, False)[1]
            q, k, v = (
                product("qkv", y, layer, ours)
                .view(R, T, -1, HEAD)
                .transpose(1, 2)
                .split([HEADS, KV_HEADS, KV_HEADS], 1)
            )
            q, k = fused_triton.norm_rotate(q, k, head_norm, head_norm, 1e-6, cos, cos, False)
            y = fused_triton.decode_attention(q, k, v, keys, values, start, min(T, 4), *attention)
            delta = product("o", y.transpose(1, 2).reshape(R * T, D), layer, ours)
            total, y = fused_triton.add_rms_norm(total, delta, norm, 1e-6, False)
            total = product("down", product("gate-up", y, layer, ours), layer, ours, onto=total)
        return total

    want = run({})

    def report(ours, attention=(), **facts):
        off = ((run(ours, attention) - want).norm() / want.norm()).item()
        seconds, clock = hot_seconds(lambda: run(ours, attention), args.hot)
        facts |= {
            "us_a_layer": round(seconds / LAYERS * 1e6, 1),
            "tb_per_s": round(weights * LAYERS / seconds / 1e12, 2),
        }
        line = json.dumps(
            {"rows": R, "tokens": T} | facts | clock | ({} if off < 0.05 else {"wrong": off})
        )
        print(line, flush=True)
        if args.out:
            with open(args.out, "a", encoding="utf-8") as file:
                file.write(line + "\n")

    best = ours = {}
    report({}, products="cuBLAS")
    if R * T <= 128:
        best = ours = dict.fromkeys(PRODUCTS)  # None: the number of programs of its own rule
        report(ours, products="ours")
        for name in PRODUCTS:
            report({name: None}, products=f"cuBLAS, ours of {name}")
        mlp = {"gate-up": None, "down": None}
        report(mlp, products="cuBLAS, ours of the MLP")
        for name, splits in itertools.product(("qkv", "o", "down"), (1, 2, 4)):
            report(
                ours | {name: splits}, products=f"ours, {splits} programs for the inputs of {name}"
            )
        best = ours if R * T <= fused.FEW else mlp if R * T in fused.FEW_OF_MLP else {}
    for parts, shape in ATTENTION if args.attention else ():
        with suppress(OutOfResources):
            report(best, (parts, shape), parts=parts, shape=shape)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
