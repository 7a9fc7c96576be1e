"""sample_categorical in two Triton kernels: the logits are read once, and one chunk of each row a second time; keyed_uniform.

Imported only when CUDA logits are sampled. Nothing here depends on the number of rows, so neither does a draw.
"""

import math

import torch
import triton
import triton.language as tl

# Measured on one H200 (torch 2.11, Triton 3.6; 512 x 151936 bf16): 0.068 ms, 2.3 TB/s; chunks of 4096, 4 warps 0.075, of 8192,
# 8 warps 0.088; sample_reference 1.92, softmax + multinomial 1.29.
CHUNK = 2048  # tokens a program: their weights stay in registers
GROUP = 32  # tokens summed in fp32; all sums above are fp64, so a peak hides at most 2^-24 of itself from its neighbours
WARPS = 2


@triton.jit
def _load(logits, start, V, banned_id, CHUNK: tl.constexpr):
    """-> chunk of a row in fp32, -inf behind its end and at the banned token"""
    v = start + tl.arange(0, CHUNK)
    z = tl.load(logits + v, mask=v < V, other=float("-inf")).to(tl.float32)
    return tl.where(v == banned_id, float("-inf"), z)


@triton.jit
def _weights(z, peak, scale):
    """-> d = z - peak (0 where the weight is 0: 0 * inf is NaN), exp2(scale * d); NaN and +inf give NaN"""
    d = z - tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(d * scale)
    return tl.where(weights == 0, 0.0, d), weights


@triton.jit
def _group_sums(x, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """[CHUNK] fp32 -> sums of GROUP neighbours [CHUNK / GROUP], fp64"""
    return tl.sum(tl.reshape(x, (CHUNK // GROUP, GROUP)), 1).to(tl.float64)


@triton.jit(do_not_specialize=["banned_id", "chunks"])
def _chunk_kernel(
    logits, row_stride, V, banned_id, scale, peaks, sums, moments, chunks, CHUNK: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Of chunk c of row n: peak = max z, sum of exp2(scale * (z - peak)), and that sum weighted by z - peak."""
    here = tl.program_id(0)
    n, c = (here // chunks).to(tl.int64), here % chunks
    z = _load(logits + n * row_stride, c * CHUNK, V, banned_id, CHUNK)
    peak = tl.max(z, 0)
    d, weights = _weights(z, peak, scale)
    tl.store(peaks + here, peak)
    tl.store(sums + here, tl.sum(_group_sums(weights, CHUNK, GROUP), 0))
    tl.store(moments + here, tl.sum(weights * d, 0))


@triton.jit(do_not_specialize=["banned_id", "chunks"])
def _draw_kernel(
    logits, row_stride, V, banned_id, scale, uniform, peaks, sums, moments, chunks, tokens, logps, max_probs, entropies,
    GREEDY: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Of row n: the chunk in which the distribution function passes uniform * total, and the token inside it."""
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

    # A scan rounds, so a prefix may pass the target at a chunk without mass, or nowhere: then it is the last one with mass.
    prefix = tl.cumsum(mass, 0)
    target = tl.load(uniform + n) * total
    hit = (chunk_peaks == peak) if GREEDY else (mass > 0) & (prefix > target)
    chosen = tl.min(tl.where(hit, c, CHUNKS), 0)
    chosen = tl.where(chosen == CHUNKS, tl.max(tl.where(mass > 0, c, 0), 0), chosen)
    is_chosen = c == chosen
    chunk_peak = tl.sum(tl.where(is_chosen, chunk_peaks, 0.0), 0)
    rest = tl.sum(tl.where(is_chosen, (target - (prefix - mass)) / factor, 0.0), 0)

    z = _load(logits + n * row_stride, chosen * CHUNK, V, banned_id, CHUNK)
    _, weights = _weights(z, chunk_peak, scale)
    groups = _group_sums(weights, CHUNK, GROUP)
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
    tl.store(max_probs + n, (1 / total).to(tl.float32))  # the peak's weight is 1
    tl.store(entropies + n, (LN2 * (log_total - scale * moment / total)).to(tl.float32))


def sample_fused(logits, uniform, temperature=1.0, banned_id=None):
    """rollout.sampling.sample_reference for CUDA logits in bf16, fp16 or fp32, without a copy of them.

    -> tokens [N] int64; logps, max_probs, entropies [N] fp32. Workspace: 16 bytes a row and chunk of CHUNK tokens.
    """
    N, V = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    chunks = triton.cdiv(V, CHUNK)
    new = lambda dtype, *shape: torch.empty(N, *shape, dtype=dtype, device=logits.device)
    partial = [new(dtype, chunks) for dtype in (torch.float32, torch.float64, torch.float32)]
    out = new(torch.int64), *(new(torch.float32) for _ in range(3))
    if N == 0:
        return out
    row = (
        logits,
        logits.stride(0),
        V,
        -1 if banned_id is None else banned_id,
        math.log2(math.e) / (temperature or 1),
    )
    size = {"CHUNK": CHUNK, "GROUP": GROUP, "num_warps": WARPS}
    _chunk_kernel[(N * chunks,)](*row, *partial, chunks, **size)
    _draw_kernel[(N,)](
        *row, uniform.contiguous(), *partial, chunks, *out,
        GREEDY=temperature == 0, CHUNKS=triton.next_power_of_2(chunks), **size,
    )  # fmt: skip
    return out


@triton.jit
def _splitmix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def with_part(state, part):
    """The state of keyed_uniform after one more part of the key, int64."""
    return _splitmix64((state ^ part.to(tl.uint64, bitcast=True)) + 0x9E3779B97F4A7C15)


@triton.jit
def unit_interval(state):
    """-> fp64 in [0, 1), 53 bits"""
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _key(state, part, constant, row_stride, column_stride, r, c, here, IS_TENSOR: tl.constexpr):
    """The state of keyed_uniform after one more part of the key."""
    if IS_TENSOR:
        value = tl.load(part + r * row_stride + c * column_stride, mask=here, other=0)
    else:
        value = constant + tl.zeros_like(r)
    return with_part(state, value)


@triton.jit(do_not_specialize=["c0", "c1", "c2", "c3", "c4", "c5"])
def _uniform_kernel(
    p0, p1, p2, p3, p4, p5, c0, c1, c2, c3, c4, c5, r0, r1, r2, r3, r4, r5, s0, s1, s2, s3, s4, s5, out, size, columns,
    COUNT: tl.constexpr, TENSORS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here, r, c = i < size, (i // columns).to(tl.int64), (i % columns).to(tl.int64)
    state = tl.zeros([BLOCK], tl.uint64)
    state = _key(state, p0, c0, r0, s0, r, c, here, TENSORS & 1)
    if COUNT > 1:
        state = _key(state, p1, c1, r1, s1, r, c, here, TENSORS & 2)
    if COUNT > 2:
        state = _key(state, p2, c2, r2, s2, r, c, here, TENSORS & 4)
    if COUNT > 3:
        state = _key(state, p3, c3, r3, s3, r, c, here, TENSORS & 8)
    if COUNT > 4:
        state = _key(state, p4, c4, r4, s4, r, c, here, TENSORS & 16)
    if COUNT > 5:
        state = _key(state, p5, c5, r5, s5, r, c, here, TENSORS & 32)
    tl.store(out + i, unit_interval(state), mask=here)


PARTS = 6


def uniform_fused(parts):
    """rollout.sampling.keyed_uniform for up to PARTS ints of 64 bits and int64 tensors of at most two dimensions."""
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    shape = torch.broadcast_shapes(*(part.shape for part in tensors))
    out = torch.empty(
        shape, dtype=torch.float64, device=max(tensors, key=lambda part: part.is_cuda).device
    )
    pointers, constants, rows, columns, mask = [], [], [], [], 0
    for n, part in enumerate([*parts, *[0] * (PARTS - len(parts))]):
        is_tensor = isinstance(part, torch.Tensor)
        strides = (0, 0, *part.expand(shape).stride())[-2:] if is_tensor else (0, 0)
        mask |= is_tensor << n
        for values, value in (
            (pointers, part if is_tensor else out),
            (constants, 0 if is_tensor else part),
        ):
            values.append(value)
        rows.append(strides[0]), columns.append(strides[1])
    size, width = out.numel(), shape[-1] if shape else 1
    if size:
        _uniform_kernel[(triton.cdiv(size, 128),)](
            *pointers,
            *constants,
            *rows,
            *columns,
            out,
            size,
            width,
            COUNT=len(parts),
            TENSORS=mask,
            BLOCK=128,
            num_warps=4,
        )
    return out
