"""Triton kernels of kernels/layers.py and kernels/decode.py, for bf16 and fp16 on CUDA.

Each rounds where the plain layers round, and computes in fp32 in between. Attention over the cache
of 16 rows of SDAR-8B takes 15 microseconds a layer; SDPA takes 42 (473 positions, one H200).
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# --- one kernel after the other ------------------------------------------------------------------


def early(x):
    """Arguments that launch a kernel on x's device early; it must call `_await_previous` first.

    "Programmatic dependent launch", from Hopper on: programs of a kernel start while the last ones
    of the kernel before still run. With 16 rows of SDAR-8B a rollout is 2 % faster by it.
    """
    pdl = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"PDL": pdl, "launch_pdl": pdl} if x.is_cuda else {"PDL": False}


@triton.jit
def _await_previous(PDL: tl.constexpr):
    """Lets the next kernel start early, then waits for the end of the previous one and its writes.

    Every program of every kernel launched early calls it, so all earlier kernels have ended too.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@cache
def arrivals(device):
    """Counters of programs that share a result, all 0 between kernels: the last to arrive sets its
    own back.
    """
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


@triton.jit
def _load(pointer, mask):
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


def shared_memory(device):
    """Bytes that a program may have: 227 KB on Hopper, 163 on an A100, 99 on an RTX 4090."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


# --- norms, rotary embedding, gates --------------------------------------------------------------


@triton.jit
def _normed(x, rstd, weight, dtype: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """fp32 x / rms, rounded before the product with weight or only after it -> dtype"""
    y = x * rstd
    if ROUND_FIRST:
        y = _rounded(y, dtype)
    return (weight * y).to(dtype)


@triton.jit
def _add_rms_norm_kernel(
    x, delta, weight, total, out, D, eps, ROUND_FIRST: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    here, inside = row * D + d, d < D
    dtype: tl.constexpr = out.dtype.element_ty
    w = _load(weight + d, inside)
    _await_previous(PDL)
    value = (_load(x + here, inside) + _load(delta + here, inside)).to(dtype)
    tl.store(total + here, value, mask=inside)
    value = value.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(value * value, 0) / D + eps)
    tl.store(out + here, _normed(value, rstd, w, dtype, ROUND_FIRST), mask=inside)


def add_rms_norm(x, delta, norm):
    """x, delta [..., D]; norm: models.layers.RMSNorm -> x + delta, norm(x + delta)"""
    D, x = x.shape[-1], x.contiguous()
    total, out, size = torch.empty_like(x), torch.empty_like(x), triton.next_power_of_2(D)
    _add_rms_norm_kernel[(x.numel() // D,)](
        x, delta.contiguous(), norm.weight, total, out, D, norm.eps, ROUND_FIRST=norm.round_first,
        BLOCK=size, num_warps=min(max(size // 512, 1), 16), **early(x),
    )  # fmt: skip
    return total, out


@triton.jit
def _norm_rotate_kernel(
    q, k, q_weight, k_weight, cos, sin, out, eps, q_row, k_row, H, K, HEAD: tl.constexpr,
    ROTARY: tl.constexpr, NORM: tl.constexpr, ROUND_FIRST: tl.constexpr,
    ROUND_PRODUCTS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Heads of one token: those of q first, then those of k. NORM: each is normed first.

    Pairs (d, d + ROTARY / 2) turn; the rest of a head turns by 0.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dtype: tl.constexpr = out.dtype.element_ty
    is_q, inside = (head < H)[:, None], (head < H + K)[:, None]
    from_q, from_k = token * q_row + head * HEAD, token * k_row + (head - H) * HEAD
    source = tl.where(is_q, q + from_q[:, None], k + from_k[:, None])
    target = out + ((token * (H + K) + head) * HEAD)[:, None]
    d = tl.arange(0, BLOCK)[None]
    is_first, turns = d < ROTARY // 2, d < ROTARY
    partner = tl.where(is_first, d + ROTARY // 2, d - ROTARY // 2)
    here = inside & (d < HEAD)
    _await_previous(PDL)
    x = _load(source + d, here)
    y = _load(source + partner, here & turns)
    if NORM:
        weight = tl.where(is_q, q_weight, k_weight)
        rstd = tl.rsqrt(tl.sum(x * x, 1) / HEAD + eps)[:, None]
        x_weight = _load(weight + d, here)
        y_weight = _load(weight + partner, here & turns)
        x = _normed(x, rstd, x_weight, dtype, ROUND_FIRST).to(tl.float32)
        y = _normed(y, rstd, y_weight, dtype, ROUND_FIRST).to(tl.float32)
    table = token * ROTARY + d
    x *= tl.load(cos + table, mask=turns, other=1.0).to(tl.float32)
    y *= _load(sin + table, turns)
    if ROUND_PRODUCTS:
        x, y = _rounded(x, dtype), _rounded(y, dtype)
    tl.store(target + d, (x + tl.where(is_first, -y, y)).to(dtype), mask=here)


def norm_rotate(q, k, norms, cos, sin, h):
    """q [B, T, H h], k [B, T, K h], rows of any stride -> q [B, H, T, h], k [B, K, T, h], rotated

    norms: () or the norms of the heads of q and k, which come first. cos, sin [B, 1, T, r], r <= h.
    Tables in fp32: only the result is rounded; in the dtype of q: each product too.
    """
    B, T = q.shape[:2]
    H, K, heads = q.shape[2] // h, k.shape[2] // h, 8
    q_norm, k_norm = norms or (None, None)
    out = torch.empty(B, T, H + K, h, dtype=q.dtype, device=q.device)
    _norm_rotate_kernel[(B * T, triton.cdiv(H + K, heads))](
        q, k, q_norm.weight if norms else q, k_norm.weight if norms else q, cos.contiguous(),
        sin.contiguous(), out, q_norm.eps if norms else 0.0, q.stride(1), k.stride(1), H, K, HEAD=h,
        ROTARY=cos.shape[-1], NORM=bool(norms), ROUND_FIRST=bool(norms) and q_norm.round_first,
        ROUND_PRODUCTS=cos.dtype == q.dtype, HEADS=heads, BLOCK=triton.next_power_of_2(h),
        num_warps=4, **early(q),
        enable_fp_fusion=False,  # fusion would skip the rounding of products
    )  # fmt: skip
    out = out.transpose(1, 2)
    return out[:, :H], out[:, H:]


@triton.jit
def _silu_mul_kernel(gate, up, out, f, gate_row, up_row, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row, j = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = out.dtype.element_ty
    _await_previous(PDL)
    x = _load(gate + row * gate_row + j, j < f)
    y = _load(up + row * up_row + j, j < f)
    x = _rounded(x / (1 + tl.exp(-x)), dtype)
    tl.store(out + row * f + j, (x * y).to(dtype), mask=j < f)


def silu_mul(gate, up):
    """gate, up [B, T, f], rows of any stride -> silu(gate) * up, contiguous"""
    B, T, f = gate.shape
    out = torch.empty(B, T, f, dtype=gate.dtype, device=gate.device)
    size = min(triton.next_power_of_2(f), 1024)
    _silu_mul_kernel[(B * T, triton.cdiv(f, size))](
        gate, up, out, f, gate.stride(1), up.stride(1), BLOCK=size, num_warps=4, **early(gate)
    )
    return out


# --- attention over the cache --------------------------------------------------------------------


@triton.jit
def _attend_to(query, key, value, seen, scale, peak, total, acc, MASKED: tl.constexpr):
    """Online softmax, in powers of 2: peak and sum of the scores so far, and the values weighed by
    them.

    MASKED: all that was seen so far may be nothing.
    """
    score = tl.where(seen, tl.dot(query, tl.trans(key)) * scale, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(score, 1))
    from_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    p = tl.exp2(score - from_peak[:, None])
    shrink = tl.exp2(peak - from_peak)
    return (
        new_peak,
        total * shrink + tl.sum(p, 1),
        tl.dot(p.to(value.dtype), value, acc * shrink[:, None]),
    )


@triton.jit
def _decode_kernel(
    q, k, v, keys, values, start, bias, out, partial, lse, arrived, scale, T, n, width,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, c_b, c_h, c_s, s_b, K, G: tl.constexpr,
    SPLITS: tl.constexpr, HEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, BIASED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Queries of one row and key head over one part of its cache; the last part first over the new
    tokens, which it stores.

    Seen is what is before the new tokens, and their own blocks of n; WINDOW: what is behind them
    too. BIASED: only where bias [R, width] is 0. The last part to arrive weighs all of them with
    their shares of the softmax, in their order. No kernel that runs at the same time writes start.
    """
    row, head = (tl.program_id(0) // K).to(tl.int64), tl.program_id(0) % K
    split, tile = tl.program_id(1), tl.program_id(2)
    m, d = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, HEAD)
    t, g = m // G, m % G
    length = tl.load(start + row * s_b).to(tl.int32)
    _await_previous(PDL)
    from_q = (row * q_b + (head * G + g) * q_h + t * q_t)[:, None] + d[None]
    query = tl.load(q + from_q, mask=(t < T)[:, None], other=0.0)
    cache = row * c_b + head * c_h
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD], tl.float32)

    if split == SPLITS - 1:
        j = tl.arange(0, BLOCK_T)
        is_new = (j < T)[:, None]
        new_key = tl.load(
            k + row * k_b + head * k_h + j[:, None] * k_t + d[None], mask=is_new, other=0.0
        )
        new_value = tl.load(
            v + row * v_b + head * v_h + j[:, None] * v_t + d[None], mask=is_new, other=0.0
        )
        if tile == 0:
            to_cache = cache + (length + j)[:, None] * c_s + d[None]
            tl.store(keys + to_cache, new_key, mask=is_new)
            tl.store(values + to_cache, new_value, mask=is_new)
        seen_new = (j < T)[None] & ((j // n)[None] <= (t // n)[:, None])
        if BIASED:
            is_shown = tl.load(bias + row * width + length + j, mask=j < T, other=0.0) == 0
            seen_new &= is_shown[None]
        peak, total, acc = _attend_to(
            query, new_key, new_value, seen_new, scale, peak, total, acc, WINDOW
        )

    end = width if WINDOW else length
    part = tl.cdiv(tl.cdiv(end, BLOCK_N), SPLITS) * BLOCK_N
    first = split * part
    for s in tl.range(first, tl.minimum(first + part, end), BLOCK_N, num_stages=STAGES):
        at = s + tl.arange(0, BLOCK_N)
        seen = at < end
        if WINDOW:
            seen &= (at < length) | (at >= length + T)
            if BIASED:
                seen &= tl.load(bias + row * width + at, mask=at < end, other=0.0) == 0
        from_cache = cache + at[:, None] * c_s + d[None]
        key = tl.load(keys + from_cache, mask=seen[:, None], other=0.0)
        value = tl.load(values + from_cache, mask=seen[:, None], other=0.0)
        peak, total, acc = _attend_to(
            query, key, value, seen[None], scale, peak, total, acc, WINDOW
        )

    if SPLITS > 1:
        M = tl.num_programs(2) * BLOCK_M
        first_part = tl.program_id(0).to(tl.int64) * SPLITS * M + m
        to_part = first_part + split * M
        tl.store(
            partial + to_part[:, None] * HEAD + d[None],
            acc / tl.where(total == 0, 1.0, total)[:, None],
        )
        tl.store(lse + to_part, peak + tl.log2(total))  # -inf where this part is empty
        tl.debug_barrier()  # all of the part, before the count says so
        count = arrived + tl.program_id(0) * tl.num_programs(2) + tile
        if tl.atomic_add(count, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(count, 0)  # for the next attention
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        for other in tl.static_range(SPLITS):
            peak = tl.maximum(peak, tl.load(lse + first_part + other * M, cache_modifier=".cg"))
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, HEAD], tl.float32)
        for other in tl.static_range(SPLITS):
            weight = tl.exp2(tl.load(lse + first_part + other * M, cache_modifier=".cg") - peak)
            total += weight
            of_part = partial + (first_part + other * M)[:, None] * HEAD + d[None]
            acc += weight[:, None] * tl.load(of_part, cache_modifier=".cg")
    to_out = (((row * T + t) * K + head) * G + g) * HEAD
    tl.store(
        out + to_out[:, None] + d[None],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=(t < T)[:, None],
    )


# (positions a turn, warps, stages) of few programs (0), and of many by queries a program. Measured
# on one H200 in bf16 with heads of 128 and 473 positions; the best shapes differ by a microsecond a
# layer.
SMS = 132  # of an H200
TUNED = {0: (128, 4, 2), 16: (32, 1, 2), 32: (32, 1, 2), 64: (64, 4, 3)}


def decode_attention(q, k, v, keys, values, start, block_length=None, bias=None, splits=None):
    """As kernels.decode.cached_attention; bias is contiguous. -> [R, H, T, h], in the memory order
    [R, T, H, h]
    """
    (R, H, T, h), K = q.shape, k.shape[1]
    G = H // K
    block_m = min(max(triton.next_power_of_2(G * T), 16), 64)
    tiles = triton.cdiv(G * T, block_m)
    programs, width = R * K * tiles, keys.shape[2]
    splits = splits or max(min(2 * SMS // programs, width // 128, 16), 1)  # parts of a row's cache
    block_n, warps, stages = TUNED[0 if programs <= 2 * SMS else block_m]
    out = torch.empty(R, T, H, h, dtype=q.dtype, device=q.device)
    partial = torch.empty(R * K, splits, tiles * block_m, h, dtype=torch.float32, device=q.device)
    lse = torch.empty_like(partial[..., 0])
    _decode_kernel[(R * K, splits, tiles)](
        q, k, v, keys, values, start, out if bias is None else bias, out, partial, lse,
        arrivals(q.device), math.log2(math.e) / math.sqrt(h), T, block_length or T, width,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *keys.stride()[:3], start.stride(0), K,
        G=G, SPLITS=splits, HEAD=h, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_T=max(triton.next_power_of_2(T), 16), STAGES=stages,
        WINDOW=block_length is None, BIASED=bias is not None, num_warps=warps, **early(q),
    )  # fmt: skip
    return out.transpose(1, 2)
