"""The draws of rollout/sampling.py on CUDA: 512 rows of 151,936 logits in 0.068 ms, 28 times as
fast as plain PyTorch.

sample_categorical is two Triton kernels, which read the logits once and one chunk of each row a
second time. Nothing here depends on the number of rows, so neither does a draw.
"""

import math

import torch
import triton
import triton.language as tl

# Measured on one H200 (torch 2.11, Triton 3.6; 512 x 151936 bf16): 0.068 ms, 2.3 TB/s; chunks of
# 4096, 4 warps 0.075, of 8192, 8 warps 0.088; plain PyTorch 1.92, softmax + multinomial 1.29.
CHUNK = tl.constexpr(2048)  # tokens a program: their weights stay in registers
# tokens summed in fp32; all sums above are fp64, so a peak hides at most 2^-24 of itself from its
# neighbours
GROUP = tl.constexpr(32)


@triton.jit
def _load(logits, start, V):
    """-> chunk of a row in fp32, -inf behind its end"""
    v = start + tl.arange(0, CHUNK)
    return tl.load(logits + v, mask=v < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _weights(z, peak, scale):
    """-> d = z - peak (0 where the weight is 0: 0 * inf is NaN), exp2(scale * d); NaN and +inf give
    NaN
    """
    d = z - tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(d * scale)
    return tl.where(weights == 0, 0.0, d), weights


@triton.jit
def _group_sums(x):
    """[CHUNK] fp32 -> sums of GROUP neighbours [CHUNK / GROUP], fp64"""
    return tl.sum(tl.reshape(x, (CHUNK // GROUP, GROUP)), 1).to(tl.float64)


@triton.jit(do_not_specialize=["chunks"])
def _chunk_kernel(logits, V, scale, peaks, sums, moments, chunks):
    """Of chunk c of row n: peak = max z, sum of exp2(scale * (z - peak)), and that sum weighted by
    z - peak.
    """
    here = tl.program_id(0)
    n, c = (here // chunks).to(tl.int64), here % chunks
    z = _load(logits + n * V, c * CHUNK, V)
    peak = tl.max(z, 0)
    d, weights = _weights(z, peak, scale)
    tl.store(peaks + here, peak)
    tl.store(sums + here, tl.sum(_group_sums(weights), 0))
    tl.store(moments + here, tl.sum(weights * d, 0))


@triton.jit(do_not_specialize=["chunks"])
def _draw_kernel(
    logits, V, scale, uniform, peaks, sums, moments, chunks, tokens, logps, entropies,
    GREEDY: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Of row n: the chunk in which the distribution function passes uniform * total, and the token
    inside it.
    """
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    here = n * chunks + c
    chunk_peaks = tl.load(peaks + here, mask=c < chunks, other=float("-inf"))
    peak = tl.max(chunk_peaks, 0)
    empty = chunk_peaks == float("-inf")
    d = tl.where(empty, 0.0, chunk_peaks - peak).to(tl.float64)
    factor = tl.where(empty, 0.0, tl.exp2(d * scale))  # fp64
    chunk_sums = tl.load(sums + here, mask=c < chunks, other=0.0)
    mass = factor * chunk_sums
    total = tl.sum(mass, 0)
    moment = tl.sum(factor * tl.load(moments + here, mask=c < chunks, other=0.0) + mass * d, 0)

    # A scan rounds, so a prefix may pass the target at a chunk without mass, or nowhere: then it is
    # the last one with mass.
    prefix = tl.cumsum(mass, 0)
    target = tl.load(uniform + n) * total
    hit = (chunk_peaks == peak) if GREEDY else (mass > 0) & (prefix > target)
    chosen = tl.min(tl.where(hit, c, CHUNKS), 0)
    chosen = tl.where(chosen == CHUNKS, tl.max(tl.where(mass > 0, c, 0), 0), chosen)
    is_chosen = c == chosen
    chunk_peak = tl.sum(tl.where(is_chosen, chunk_peaks, 0.0), 0)
    rest = tl.sum(tl.where(is_chosen, (target - (prefix - mass)) / factor, 0.0), 0)

    z = _load(logits + n * V, chosen * CHUNK, V)
    _, weights = _weights(z, chunk_peak, scale)
    groups = _group_sums(weights)
    before = tl.cumsum(groups, 0) - groups
    cdf = before[:, None] + tl.cumsum(
        tl.reshape(weights, (CHUNK // GROUP, GROUP)).to(tl.float64), 1
    )
    v = tl.arange(0, CHUNK)
    hit = (z == peak) if GREEDY else (weights > 0) & (tl.reshape(cdf, (CHUNK,)) > rest)
    token = tl.min(tl.where(hit, v, CHUNK), 0)
    token = tl.where(token == CHUNK, tl.max(tl.where(weights > 0, v, 0), 0), token)
    drawn = tl.sum(tl.where(v == token, z, 0.0), 0)

    LN2: tl.constexpr = 0.6931471805599453
    log_total = tl.log2(total)
    tl.store(
        tokens + n, tl.minimum(chosen * CHUNK + token, V - 1).to(tl.int64)
    )  # a row of NaN has no such token
    tl.store(logps + n, (LN2 * ((drawn - peak).to(tl.float64) * scale - log_total)).to(tl.float32))
    tl.store(entropies + n, (LN2 * (log_total - scale * moment / total)).to(tl.float32))


def sample_fused(logits, uniform, temperature=1.0):
    """rollout.sampling.sample_categorical for CUDA logits in bf16, fp16 or fp32, without a copy of
    them.

    The token is the plain one unless uniform is within 1e-6 + 2^-23 max |logits / temperature| of
    an edge of its bin, because the plain code rounds logits / temperature to fp32. Workspace: 16
    bytes per row and chunk of CHUNK tokens.
    """
    N, V = logits.shape
    chunks = triton.cdiv(V, CHUNK.value)
    new = lambda dtype, *shape: torch.empty(N, *shape, dtype=dtype, device=logits.device)
    partial = [new(dtype, chunks) for dtype in (torch.float32, torch.float64, torch.float32)]
    out = new(torch.int64), new(torch.float32), new(torch.float32)
    rows = logits.contiguous(), V, math.log2(math.e) / (temperature or 1)
    _chunk_kernel[(N * chunks,)](*rows, *partial, chunks, num_warps=2)
    _draw_kernel[(N,)](
        *rows, uniform.contiguous(), *partial, chunks, *out, GREEDY=temperature == 0,
        CHUNKS=triton.next_power_of_2(chunks), num_warps=2,
    )  # fmt: skip
    return out
