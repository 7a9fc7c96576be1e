"""Check and time the attention backends on the shapes that training uses. One CUDA GPU.

    python bench/attention.py --out runs/attention      # prints a table, writes runs/attention/attention.json
    python bench/attention.py --out runs/attention --packed        # rows of several documents alone
    python bench/attention.py --out runs/attention --decoding      # the attention of rollout/block.py over its cache

First each backend's output and gradients are held against dense fp32 SDPA, on the first and the last row of the batch: the
relative error ||got - want|| / ||want|| must stay below TOLERANCE. Then it is timed alone, on tensors laid out as the models
have them. TFLOP/s count 4 h operations per head and pair in the forward and 10 h in the backward pass, over the pairs that see
each other and, in brackets, over all S x S. The exit status is 1 if anything failed or was too far off.

Decoding, one H200 (torch 2.11, Triton 3.6, flash-attn 2.8.3, bf16, heads of 128): microseconds of a layer's attention with the
writes of new keys and values, in a CUDA graph, rows from half of the positions on; floor: what is seen of it at 4.8 TB/s.
    rows, heads, new tokens   positions   triton   sdpa   flex   flash_attn_with_kvcache   floor
      1   32/8    4              473         8.0     26     19      14                       0.2
     16   32/8    4              473        15.4     42     35      35                       4.9
     64   32/8    4              473        34.0     84     54     118                      19.5
    128   32/8    4              473        55.1    139     87     224                      39.0
    128   32/8    4              729        78.8    184    115     299                      59.9
     16   16/4   32              480        21.7     42    687      23                       2.6
     64   16/4   32              480        36.8     77   1932      71                      10.3
So Triton's is used (kernels/decode.py), and SDPA stays as the portable path.
"""

import json
import re
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kernels.decode import decode_attend, decode_reference, visible_bias
from models.attention import bidirectional, block_causal, make_attend, positions, refusal, two_copy

DEVICE = "cuda"
TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-4}
COMPILED_TOLERANCE = 2e-2  # two bf16 layers against two others


@dataclass
class Args:
    out: str
    decoding: bool = False
    """attention over the cache of block decoding instead"""
    budget: float = 80
    """seconds after which nothing new is started: most of the time goes to compilation"""
    packed: bool = False
    """rows of several documents alone"""


@dataclass(frozen=True)
class Case:
    pattern: str
    B: int
    T: int
    H: int
    K: int
    N: int = 4  # block length
    padded: bool = False  # on the left: 20 to 50 % of a prompt that is half of T
    dtype: str = "bfloat16"
    D: int = 128
    document: int = 0  # tokens of each document of a packed row, 0: a row is one

    def visibility(self):
        pads = torch.linspace(0.2, 0.5, self.B, device=DEVICE) * self.T / 2 * self.padded
        valid = torch.arange(self.T, device=DEVICE) >= pads.long()[:, None]
        documents = None
        if self.document:
            documents = (
                (torch.arange(self.T, device=DEVICE) // self.document)
                .expand(self.B, -1)
                .contiguous()
            )
        opens = valid & (positions(valid, documents) % self.N == 0)
        block = (opens.cumsum(1) - 1).clamp(min=0)
        if self.pattern == "two-copy":
            return two_copy(block, valid, 0, documents)
        return (
            block_causal(block, valid, documents)
            if self.pattern == "block-causal"
            else bidirectional(valid, documents)
        )

    def tensors(self, visibility):
        """-> q [B, H, S, h], k and v [B, K, S, h], gradient of the output [B, S, H h], 0 on padding"""
        S = self.T if visibility.tokens is None else visibility.tokens.shape[1]
        random = lambda heads: torch.randn(
            self.B, S, heads, self.D, device=DEVICE, dtype=getattr(torch, self.dtype)
        )
        q, k, v = (
            random(heads).transpose(1, 2).requires_grad_() for heads in (self.H, self.K, self.K)
        )
        grad = random(self.H).flatten(2)
        return q, k, v, grad if visibility.valid is None else grad * visibility.valid[..., None]


SDAR, LLADA, DREAM = {"H": 32, "K": 8}, {"H": 32, "K": 32}, {"H": 28, "K": 4}
MASKED, PACKED = ("sdpa", "flex"), ("sdpa", "varlen", "flash-attn")
TIMED = [
    *[(Case("two-copy", B, 512, N=N, **SDAR), MASKED) for B, N in [(16, 4), (8, 4), (8, 32)]],
    *[(Case("two-copy", B, 1280, N=N, **SDAR), MASKED) for B, N in [(16, 4), (8, 4), (8, 32)]],
    *[(Case("two-copy", B, 512, padded=True, **SDAR), MASKED) for B in (16, 8)],
    *[(Case("block-causal", 16, T, **SDAR), MASKED) for T in (256, 384, 512, 1280)],
    *[(Case("block-causal", 8, T, N=32, **SDAR), MASKED) for T in (512, 1280)],
    *[(Case("full", B, 512, **heads), PACKED) for heads in (LLADA, DREAM) for B in (16, 8)],
    *[
        (Case("padded", B, 512, padded=True, **heads), PACKED)
        for heads in (LLADA, DREAM)
        for B in (16, 8)
    ],
    *[
        (Case("packed", B, T, document=180, **LLADA), (*PACKED, "flex"))
        for B, T in [(2, 4096), (8, 1024), (16, 512)]
    ],
    (Case("packed", 2, 4096, document=180, **DREAM), (*PACKED, "flex")),
    *[
        (Case("two-copy", B, T, document=192, **SDAR), MASKED)
        for B, T in [(2, 4096), (8, 1024), (16, 512)]
    ],
    (Case("two-copy", 2, 4096, N=32, document=192, **SDAR), ("flex",)),
    *[
        (Case(pattern, 2, 600, padded=True, dtype="float32", **SDAR), ("auto",))
        for pattern in ("padded", "two-copy")
    ],
]
NEW_LENGTHS = [
    ("two-copy", SDAR, "flex"),
    ("full", LLADA, "sdpa"),
    ("padded", LLADA, "sdpa"),
    ("padded", LLADA, "varlen"),
]
COMPILED = [("full", "sdpa"), ("two-copy", "flex"), ("padded", "varlen")]
TIMED_LAST = [
    (Case("padded", 16, 512, padded=True, **heads), ("flex",)) for heads in (LLADA, DREAM)
]  # one more kernel each


def clock(function, repeats=1):
    """-> ms per call"""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e3


def error_of(got, want):
    """-> the largest relative error of several tensors"""
    return max(
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(got, want, strict=True)
    )


def kernel_of(function):
    """-> which kernel scaled_dot_product_attention took: cudnn, flash, efficient or math"""
    with profile(activities=[ProfilerActivity.CPU]) as record:
        function()
    name = re.compile(
        r"aten::_scaled_dot_product_(?:(cudnn|flash|efficient)_attention|attention_(math))"
    )
    return "+".join(
        sorted({m[1] or m[2] for event in record.key_averages() if (m := name.match(event.key))})
    )


def oracle(visibility, q, k, v, grad):
    """Dense fp32 attention. -> output [B, S, H h], gradients of q, k, v"""
    mask = None if visibility.tokens is None else visibility.dense()[:, None]
    q, k, v = (x.detach().float().requires_grad_() for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        repeated = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        out = (
            F.scaled_dot_product_attention(q, *repeated, attn_mask=mask).transpose(1, 2).flatten(2)
        )
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad.float())


def timed(case, backend):
    torch.manual_seed(0)
    visibility = case.visibility()
    q, k, v, grad = case.tensors(visibility)
    attend = make_attend(visibility, backend)
    forward = lambda: attend(0, q, k, v).transpose(1, 2).flatten(2)
    both = lambda: (out := forward(), *torch.autograd.grad(out, (q, k, v), grad))

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first_ms = clock(both)
    peak = torch.cuda.max_memory_allocated() - before
    got = both()
    if not all(x.isfinite().all() for x in got):
        raise FloatingPointError("not finite")
    rows = [0, case.B - 1]
    seen = grad[rows].any(-1, keepdim=True)  # outputs at padding mean nothing
    part = replace(
        visibility,
        **{
            name: x[rows]
            for name, x in vars(visibility).items()
            if name != "noisy" and x is not None
        },
    )
    got, want = [x[rows].detach() for x in got], oracle(part, q[rows], k[rows], v[rows], grad[rows])
    error = error_of([got[0] * seen, *got[1:]], [want[0] * seen, *want[1:]])

    both()
    forward_ms, both_ms = clock(forward, 10), clock(both, 10)
    dense = case.B * q.shape[2] ** 2
    pairs = dense if visibility.tokens is None else int(visibility.dense().sum())
    rate = lambda pairs, per_pair, ms: pairs * per_pair * case.D * case.H / ms / 1e9
    return {
        "S": q.shape[2],
        "kernel": kernel_of(forward),
        "first_ms": first_ms,
        "prepare_ms": clock(lambda: make_attend(visibility, backend), 3),
        "forward_ms": forward_ms,
        "backward_ms": both_ms - forward_ms,
        "forward_tflops": rate(pairs, 4, forward_ms),
        "forward_tflops_dense": rate(dense, 4, forward_ms),
        "backward_tflops": rate(pairs, 10, both_ms - forward_ms),
        "backward_tflops_dense": rate(dense, 10, both_ms - forward_ms),
        "peak_gib": peak / 2**30,
        "error": error,
        "ok": error < TOLERANCE[case.dtype],
    }


def new_length(case, backend):
    """What a length costs that did not occur before: kernels are planned or compiled again, or not."""
    visibility = case.visibility()
    q, k, v, grad = case.tensors(visibility)
    attend = make_attend(visibility, backend)
    call = lambda: torch.autograd.grad(
        attend(0, q, k, v).transpose(1, 2).flatten(2), (q, k, v), grad
    )
    return {"first_ms": clock(call), "second_ms": clock(call), "ok": True}


class Layer(nn.Module):
    """A block's attention as the models have it: `attend` is an argument, the layer number an attribute."""

    def __init__(self, layer, case):
        super().__init__()
        self.layer, self.head_dim, width = layer, case.D, case.H * case.D
        self.q, self.o = (
            nn.Linear(width, width, bias=False) for _ in range(2)
        )  # a bias of the keys has no gradient
        self.k, self.v = (nn.Linear(width, case.K * case.D, bias=False) for _ in range(2))

    def forward(self, x, attend):
        heads = lambda y: y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return x + self.o(
            attend(self.layer, heads(self.q(x)), heads(self.k(x)), heads(self.v(x)))
            .transpose(1, 2)
            .flatten(2)
        )


def compiled(case, backend):
    """Two compiled and checkpointed blocks against plain ones with SDPA: output and gradients of the parameters."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.config.allow_unspec_int_on_nn_module = (
        True  # torch 2.11 else makes a graph per layer number
    )
    visibility = case.visibility()
    grad = case.tensors(visibility)[-1]
    x = torch.randn_like(grad)
    layers = nn.ModuleList(Layer(i, case) for i in range(2)).to(DEVICE, grad.dtype)
    seen = grad.any(-1, keepdim=True)

    def run(attend, call):
        y = x
        for layer in layers:
            y = call(layer, y, attend)
        return y.detach() * seen, *torch.autograd.grad(y, list(layers.parameters()), grad)

    want = run(make_attend(visibility, "sdpa"), lambda layer, *arguments: layer(*arguments))
    for layer in layers:
        layer.compile()
    lean = lambda: run(
        make_attend(visibility, backend),
        lambda *arguments: checkpoint(*arguments, use_reentrant=False),
    )
    first_ms, error = clock(lean), error_of(lean(), want)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return {
        "first_ms": first_ms,
        "graphs": graphs,
        "kernel": kernel_of(lean),
        "error": error,
        "ok": error < COMPILED_TOLERANCE,
    }


# --- decoding: new tokens of blocks over the keys and values before them ------------------------------------------------------

# rows, heads of queries and of keys, new tokens a row, positions before them
DECODED = [(R, 32, 8, 4, length) for R in (1, 16, 64, 128) for length in (473, 729)] + [
    (16, 16, 4, 32, 480),
    (64, 16, 4, 32, 480),
]
SLOT, SPREAD = 768, 0.5  # positions of a slot; rows have from half of the length on


def by_triton(q, k, v, keys, values, start):
    cached = decode_attend([(keys, values)], start, q.shape[2])
    return lambda: cached(0, q, k, v)


def by_sdpa(q, k, v, keys, values, start):
    width = -(-int(start.max() + q.shape[2]) // 128) * 128  # as the engine narrows the slots
    keys, values = keys[:, :, :width], values[:, :, :width]
    bias = visible_bias(start, q.shape[2], width, q.shape[2], q.dtype)
    return lambda: decode_reference(q, k, v, keys, values, start, bias)


def by_flex(q, k, v, keys, values, start):
    rows, at = (
        torch.arange(len(start), device=DEVICE)[:, None],
        start[:, None] + torch.arange(q.shape[2], device=DEVICE),
    )
    seen = lambda b, h, i, j: j < start[b] + q.shape[2]
    mask = create_block_mask(seen, len(start), None, q.shape[2], keys.shape[2], device=DEVICE)
    compiled = torch.compile(flex_attention, dynamic=False)

    def call():
        keys[rows, :, at], values[rows, :, at] = k.transpose(1, 2), v.transpose(1, 2)
        return compiled(q, keys, values, block_mask=mask, enable_gqa=True)

    return call


def by_flash_attn(q, k, v, keys, values, start):
    from flash_attn import flash_attn_with_kvcache

    keys, values = (x.transpose(1, 2).contiguous() for x in (keys, values))  # its layout
    length, new = start.int(), {name: x.transpose(1, 2) for name, x in {"k": k, "v": v}.items()}
    return lambda: flash_attn_with_kvcache(
        q.transpose(1, 2), keys, values, **new, cache_seqlens=length
    ).transpose(1, 2)


DECODERS = {"triton": by_triton, "sdpa": by_sdpa, "flex": by_flex, "flash-attn": by_flash_attn}


def decoded(R, H, K, T, length, backend, layers=8):
    """One layer's attention with the writes, as a part of a CUDA graph over layers with caches of their own. -> facts"""
    torch.manual_seed(0)
    random = lambda *shape: torch.randn(*shape, 128, device=DEVICE, dtype=torch.bfloat16)
    start = (torch.linspace(SPREAD, 1, R, device=DEVICE) * length).long() // T * T
    calls, first = [], None
    for _ in range(layers):
        q, k, v = (x.transpose(1, 2) for x in random(R, T, H + 2 * K).split([H, K, K], 2))
        cache = random(R, K, SLOT), random(R, K, SLOT)
        first = first or (q, k, v, *(x.clone() for x in cache))
        calls.append(DECODERS[backend](q, k, v, *cache, start))
    got, want = calls[0](), by_sdpa(*(x.float() for x in first), start)()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    ms = min(clock(graph.replay) for _ in range(10)) / layers
    nbytes, error = int((start + T).sum()) * K * 128 * 2 * 2, error_of([got], [want])
    return {
        "us": 1e3 * ms,
        "tb_per_s": nbytes / ms / 1e9,
        "floor_us": nbytes / 4.8e6,
        "error": error,
        "ok": error < 1e-2,
    }


def decoding(report):
    print(
        "rows, heads, new tokens, positions | backend | us | TB/s of the keys and values seen | us at 4.8 TB/s | error"
    )
    for backend in DECODERS:
        for R, H, K, T, length in DECODED:
            row = {
                "job": "decoded",
                "backend": backend,
                "R": R,
                "H": H,
                "K": K,
                "T": T,
                "length": length,
            }
            try:
                row |= decoded(R, H, K, T, length, backend)
                facts = f"{row['us']:.1f} | {row['tb_per_s']:.2f} | {row['floor_us']:.1f} | {row['error']:.5f}"
            except (
                Exception,
                SystemExit,
            ) as error:  # a backend that is not installed, or fails, is a result too
                row |= {
                    "ok": backend != "triton",
                    "failed": (facts := f"{type(error).__name__}: {error}"[:200]),
                }
            print(f"R{R} H{H}/{K} T{T} up to {length} | {backend} | {facts}", flush=True)
            report["rows"].append(row)


def show(row):
    number = lambda key, digits=2: f"{row[key]:.{digits}f}" if key in row else "-"
    rate = lambda key: f"{number(key, 0)} ({number(key + '_dense', 0)})"
    pattern = row["pattern"] + " padded" * (row["padded"] and row["pattern"] != "padded")
    pattern += f" of {row['document']}" * (row["document"] > 0)
    shape = f"{pattern} B{row['B']} T{row['T']} H{row['H']}/{row['K']} N{row['N']} {row['dtype']}"
    cells = [row["job"], f"{shape:50}", f"{row['backend']:10}", f"{row.get('kernel', ''):9}"]
    cells += [
        number(key) for key in ("first_ms", "second_ms", "prepare_ms", "forward_ms", "backward_ms")
    ]
    cells += [
        rate("forward_tflops"),
        rate("backward_tflops"),
        number("peak_gib"),
        number("error", 5),
        number("graphs", 0),
    ]
    print(" | ".join(cells), row.get("failed", "" if row["ok"] else "TOO FAR OFF"), flush=True)


def main(args):
    start, out = time.perf_counter(), Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    report = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }
    print(report)
    if args.decoding:
        report["rows"] = []
        decoding(report)
        (out / "decoding.json").write_text(json.dumps(report, indent=1))
        sys.exit(not all(row["ok"] for row in report["rows"]))
    print("job | shape | backend | kernel | ms: first, second, prepare, forward, backward | TFLOP/s: forward, backward "
          "(dense) | GiB | error | graphs")  # fmt: skip
    jobs = [
        (timed, case, backend)
        for case, backends in TIMED
        if case.document or not args.packed
        for backend in backends
    ]
    if not args.packed:
        for pattern, heads, backend in NEW_LENGTHS:
            jobs += [
                (new_length, Case(pattern, 16, T, padded=pattern == "padded", **heads), backend)
                for T in (501, 502, 637)
            ]
        for pattern, backend in COMPILED:
            jobs += [(compiled, Case(pattern, 4, 512, H=4, K=2, padded=pattern != "full"), backend)]
        jobs += [(timed, case, backend) for case, backends in TIMED_LAST for backend in backends]
    report["rows"] = []
    for job, case, backend in jobs:
        row = {
            "job": job.__name__,
            "backend": backend,
            **asdict(case),
            "at_s": time.perf_counter() - start,
        }
        if row["at_s"] > args.budget:
            row |= {"ok": True, "failed": f"left out: {args.budget:g} s are over"}
        elif backend != "auto" and (why := refusal(backend, case.pattern)):
            row |= {"ok": True, "failed": f"left out: {backend} {why}"}
        else:
            try:
                row |= job(case, backend)
            except (Exception, SystemExit) as error:  # one backend's failure is a result too
                row |= {"ok": False, "failed": f"{type(error).__name__}: {error}"[:500]}
        show(row)
        report["rows"].append(row)
        (out / "attention.json").write_text(json.dumps(report, indent=1))
    sys.exit(not all(row["ok"] for row in report["rows"]))


if __name__ == "__main__":
    main(tyro.cli(Args))
