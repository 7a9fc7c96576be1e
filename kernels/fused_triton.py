"""The operations of kernels/fused.py and kernels/decode.py as Triton kernels, for bf16 and fp16 on CUDA.

Imported only where they run. Each rounds where the plain code of the model files does, and computes in fp32 in between.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# --- one kernel after the other ----------------------------------------------------------------------------------------------


@cache
def _starts_early(device):
    """Programmatic dependent launch, from Hopper on: programs of a kernel start while the last of the one before still run."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def early(x):
    """Arguments of a kernel on x's device that calls `_await_previous` before it reads or writes what others do."""
    pdl = x.is_cuda and _starts_early(x.device)
    return {"PDL": pdl, "launch_pdl": pdl} if x.is_cuda else {"PDL": False}


@triton.jit
def _await_previous(PDL: tl.constexpr):
    """Lets the next kernel start early, then waits until the previous one has ended and all that it wrote can be read.

    Every program of every kernel launched early calls it, so all kernels before the previous one have ended too.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@cache
def arrivals(device):
    """Counters of programs that share a result, all 0 between kernels: the last to arrive sets its own back."""
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


# --- norms, rotary embedding, gates ------------------------------------------------------------------------------------------


@triton.jit
def _normed(x, rstd, weight, dtype: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """fp32 x / rms, rounded before the product with weight or only after it -> dtype"""
    y = x * rstd
    if ROUND_FIRST:
        y = y.to(dtype).to(tl.float32)
    return (weight * y).to(dtype)


@triton.jit
def _add_rms_norm_kernel(
    x,
    delta,
    weight,
    total,
    out,
    D,
    eps,
    ADD: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    here, inside = row * D + d, d < D
    dtype: tl.constexpr = out.dtype.element_ty
    w = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    _await_previous(PDL)
    value = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value = (value + tl.load(delta + here, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(total + here, value, mask=inside)
        value = value.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(value * value, 0) / D + eps)
    tl.store(out + here, _normed(value, rstd, w, dtype, ROUND_FIRST), mask=inside)


def add_rms_norm(x, delta, weight, eps, round_first):
    """x, delta [..., D] contiguous, delta None: 0 -> x + delta, its norm"""
    D = x.shape[-1]
    x = x.contiguous()
    total, out = (x if delta is None else torch.empty_like(x)), torch.empty_like(x)
    size = triton.next_power_of_2(D)
    delta = x if delta is None else delta.contiguous()
    _add_rms_norm_kernel[(x.numel() // D,)](
        x, delta, weight, total, out, D, eps,
        ADD=total is not x, ROUND_FIRST=round_first, BLOCK=size, num_warps=min(max(size // 512, 1), 16), **early(x),
    )  # fmt: skip
    return total, out


@triton.jit
def _norm_rotate_kernel(
    q, k, q_weight, k_weight, cos, sin, out, T, eps, q_b, q_h, q_t, k_b, k_h, k_t, H, K,
    HEAD: tl.constexpr, ROTARY: tl.constexpr, ROUND_FIRST: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Heads of one token: those of q first, then those of k. Pairs (j, j + ROTARY / 2) turn, the rest of a head is kept."""
    token = tl.program_id(0).to(tl.int64)
    b, t = token // T, token % T
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dtype: tl.constexpr = out.dtype.element_ty
    is_q, inside = (head < H)[:, None], (head < H + K)[:, None]
    source = tl.where(
        is_q,
        q + (b * q_b + head * q_h + t * q_t)[:, None],
        k + (b * k_b + (head - H) * k_h + t * k_t)[:, None],
    )
    target = out + ((token * (H + K) + head) * HEAD)[:, None]
    weight = tl.where(is_q, q_weight, k_weight)
    half: tl.constexpr = ROTARY // 2
    j = tl.arange(0, HALF)[None]
    here = inside & (j < half)
    _await_previous(PDL)
    x = tl.load(source + j, mask=here, other=0.0).to(tl.float32)
    y = tl.load(source + half + j, mask=here, other=0.0).to(tl.float32)
    squares = tl.sum(x * x, 1) + tl.sum(y * y, 1)
    if ROTARY < HEAD:
        i = ROTARY + tl.arange(0, REST)[None]
        rest_here = inside & (i < HEAD)
        rest = tl.load(source + i, mask=rest_here, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, 1)
    rstd = tl.rsqrt(squares / HEAD + eps)[:, None]
    if ROTARY < HEAD:
        w = tl.load(weight + i, mask=rest_here, other=0.0).to(tl.float32)
        tl.store(target + i, _normed(rest, rstd, w, dtype, ROUND_FIRST), mask=rest_here)
    x = _normed(
        x, rstd, tl.load(weight + j, mask=here, other=0.0).to(tl.float32), dtype, ROUND_FIRST
    ).to(tl.float32)
    y = _normed(
        y, rstd, tl.load(weight + half + j, mask=here, other=0.0).to(tl.float32), dtype, ROUND_FIRST
    ).to(tl.float32)
    table = token * ROTARY + j  # its halves are equal
    c = tl.load(cos + table, mask=j < half, other=1.0).to(tl.float32)
    s = tl.load(sin + table, mask=j < half, other=0.0).to(tl.float32)
    turned_x = (x * c).to(dtype).to(tl.float32) + (-y * s).to(dtype).to(tl.float32)
    turned_y = (y * c).to(dtype).to(tl.float32) + (x * s).to(dtype).to(tl.float32)
    tl.store(target + j, turned_x.to(dtype), mask=here)
    tl.store(target + half + j, turned_y.to(dtype), mask=here)


def norm_rotate(q, k, q_weight, k_weight, eps, cos, sin, round_first):
    """q [B, H, T, h], k [B, K, T, h] of any strides but 1 in the last; cos, sin [B, 1, T, r] -> the same, normed and rotated"""
    (B, H, T, h), K = q.shape, k.shape[1]
    out = torch.empty(B, T, H + K, h, dtype=q.dtype, device=q.device)
    heads, r, size = 8, cos.shape[-1], triton.next_power_of_2
    _norm_rotate_kernel[(B * T, triton.cdiv(H + K, heads))](
        q, k, q_weight, k_weight, cos.contiguous(), sin.contiguous(), out, T, eps, *q.stride()[:3], *k.stride()[:3], H, K,
        HEAD=h, ROTARY=r, ROUND_FIRST=round_first, HEADS=heads, HALF=size(r // 2), REST=size(max(h - r, 1)),
        num_warps=4, enable_fp_fusion=False, **early(q),  # fusion: a product and a sum would be one rounding
    )  # fmt: skip
    out = out.transpose(1, 2)
    return out[:, :H], out[:, H:]


@triton.jit
def _rope_kernel(positions, frequency, cos, sin, ROTARY: tl.constexpr, HALF: tl.constexpr):
    """Angles of one token: its position times each frequency, in both halves."""
    token, j = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    half: tl.constexpr = ROTARY // 2
    angle = tl.load(positions + token).to(tl.float32) * tl.load(
        frequency + j, mask=j < half, other=0.0
    )
    c, s = tl.cos(angle).to(cos.dtype.element_ty), tl.sin(angle).to(sin.dtype.element_ty)
    for first in tl.static_range(0, ROTARY, half):
        tl.store(cos + token * ROTARY + first + j, c, mask=j < half)
        tl.store(sin + token * ROTARY + first + j, s, mask=j < half)


def rope_tables(position_ids, frequency, dtype):
    """position_ids [B, T], frequency [r / 2] fp32 -> cos, sin [B, 1, T, r] in dtype"""
    (B, T), r = position_ids.shape, 2 * len(frequency)
    cos, sin = (torch.empty(B, 1, T, r, dtype=dtype, device=position_ids.device) for _ in range(2))
    _rope_kernel[(B * T,)](
        position_ids.contiguous(),
        frequency,
        cos,
        sin,
        ROTARY=r,
        HALF=triton.next_power_of_2(r // 2),
        num_warps=1,
    )
    return cos, sin


@triton.jit
def _rotate_kernel(
    q, k, cos, sin, out, T, q_b, q_h, q_t, k_b, k_h, k_t, H, K,
    HEAD: tl.constexpr, ROUND_PRODUCTS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Heads of one token: those of q first, then those of k. Pairs (j, j + HEAD / 2) turn."""
    token = tl.program_id(0).to(tl.int64)
    b, t = token // T, token % T
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dtype: tl.constexpr = out.dtype.element_ty
    is_q = (head < H)[:, None]
    source = tl.where(
        is_q,
        q + (b * q_b + head * q_h + t * q_t)[:, None],
        k + (b * k_b + (head - H) * k_h + t * k_t)[:, None],
    )
    target = out + ((token * (H + K) + head) * HEAD)[:, None]
    half: tl.constexpr = HEAD // 2
    j = tl.arange(0, HALF)[None]
    here = (head < H + K)[:, None] & (j < half)
    _await_previous(PDL)
    x = tl.load(source + j, mask=here, other=0.0).to(tl.float32)
    y = tl.load(source + half + j, mask=here, other=0.0).to(tl.float32)
    table = token * HEAD + j  # its halves are equal
    c = tl.load(cos + table, mask=j < half, other=1.0).to(tl.float32)
    s = tl.load(sin + table, mask=j < half, other=0.0).to(tl.float32)
    xc, ys, yc, xs = x * c, -y * s, y * c, x * s
    if ROUND_PRODUCTS:
        xc, ys = xc.to(dtype).to(tl.float32), ys.to(dtype).to(tl.float32)
        yc, xs = yc.to(dtype).to(tl.float32), xs.to(dtype).to(tl.float32)
    tl.store(target + j, (xc + ys).to(dtype), mask=here)
    tl.store(target + half + j, (yc + xs).to(dtype), mask=here)


def rotate(q, k, cos, sin):
    """q [B, H, T, h], k [B, K, T, h] of any strides but 1 in the last; cos, sin [B, 1, T, h] -> the same, rotated"""
    (B, H, T, h), K = q.shape, k.shape[1]
    out = torch.empty(B, T, H + K, h, dtype=q.dtype, device=q.device)
    heads = 8
    _rotate_kernel[(B * T, triton.cdiv(H + K, heads))](
        q, k, cos.contiguous(), sin.contiguous(), out, T, *q.stride()[:3], *k.stride()[:3], H, K,
        HEAD=h, ROUND_PRODUCTS=cos.dtype == q.dtype, HEADS=heads, HALF=triton.next_power_of_2(h // 2),
        num_warps=4, enable_fp_fusion=False, **early(q),  # fusion: a product and a sum would be one rounding
    )  # fmt: skip
    out = out.transpose(1, 2)
    return out[:, :H], out[:, H:]


@triton.jit
def _silu_mul_kernel(gate, up, out, f, gate_row, up_row, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row, j = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = out.dtype.element_ty
    _await_previous(PDL)
    x = tl.load(gate + row * gate_row + j, mask=j < f, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_row + j, mask=j < f, other=0.0).to(tl.float32)
    x = (x / (1 + tl.exp(-x))).to(dtype).to(tl.float32)
    tl.store(out + row * f + j, (x * y).to(dtype), mask=j < f)


def silu_mul(gate, up):
    """gate, up [..., f], rows of any stride -> silu(gate) * up, contiguous"""
    f = gate.shape[-1]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate, up = gate.flatten(0, -2), up.flatten(0, -2)
    size = min(triton.next_power_of_2(f), 1024)
    _silu_mul_kernel[(gate.shape[0], triton.cdiv(f, size))](
        gate, up, out, f, gate.stride(0), up.stride(0), BLOCK=size, num_warps=4, **early(gate)
    )
    return out


# --- attention over the cache ------------------------------------------------------------------------------------------------


@triton.jit
def _attend_to(query, key, value, seen, scale, peak, total, acc, MASKED: tl.constexpr):
    """Online softmax, in powers of 2: peak and sum of the scores so far, and the values weighed by them.

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
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, c_b, c_h, c_s, s_b, K, G: tl.constexpr, SPLITS: tl.constexpr,
    HEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, BIASED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Queries of one row and key head over one part of its cache; the last part first over the new tokens, which it stores.

    Seen is what is before the new tokens; WINDOW: what is behind them too, BIASED: if bias [R, width] is 0 there. The last
    part to arrive weighs all of them with their shares of the softmax, in their order. Neither the kernel before nor one that
    is launched early writes start.
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
        if WINDOW:
            seen_new = (j < T)[None]
            if BIASED:
                seen_new &= (tl.load(bias + row * width + length + j, mask=j < T, other=0.0) == 0)[
                    None
                ]
        else:
            seen_new = (j < T)[None] & ((j // n)[None] <= (t // n)[:, None])
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


# Measured with bench/products.py (one H200, bf16, heads of 128, 473 positions): a layer of 16 rows takes 6 microseconds less at
# 8 tokens a row and 2 at 4 than with four parts of (64, 4, 3) or (32, 1, 2), one row of 32 tokens 3; the best differ by 1.
SMS = 132  # of an H200
FEW_PROGRAMS, MANY_PROGRAMS = (
    (128, 4, 2),
    {16: (32, 1, 2), 32: (32, 1, 2), 64: (64, 4, 3)},
)  # positions a turn, warps, stages
MANY_WINDOWS = MANY_PROGRAMS | {
    32: (32, 2, 3)
}  # 32 of 512 columns of 16 rows of LLaDA-8B: 44 microseconds, (32, 1, 2) 59


def _parts(programs, width):
    """How many parts a row's cache of `width` positions is cut into, if so many programs read it whole."""
    return max(min(2 * SMS // programs, width // 128, 16), 1)


def decode_attention(
    q, k, v, keys, values, start, block_length, splits=None, tuned=None, window=False, bias=None
):
    """As kernels.decode.decode_reference, or as window_reference. -> [R, H, T, h], in the memory order [R, T, H, h]"""
    (R, H, T, h), K = q.shape, k.shape[1]
    G = H // K
    block_m = min(max(triton.next_power_of_2(G * T), 16), 64)
    tiles = triton.cdiv(G * T, block_m)
    programs, width = R * K * tiles, keys.shape[2]
    splits = splits or _parts(programs, width)
    many = (MANY_WINDOWS if window else MANY_PROGRAMS)[block_m]
    block_n, warps, stages = tuned or (FEW_PROGRAMS if programs <= 2 * SMS else many)
    block_n = min(block_n, max(16384 // h, 16))  # both fit shared memory
    out = torch.empty(R, T, H, h, dtype=q.dtype, device=q.device)
    new = lambda *shape: (
        torch.empty(*shape, dtype=torch.float32, device=q.device) if splits > 1 else out
    )
    partial, lse = new(R * K, splits, tiles * block_m, h), new(R * K, splits, tiles * block_m)
    if keys.stride() != values.stride() or not all(x.stride(-1) == 1 for x in (q, k, v, keys)):
        raise ValueError("keys and values must lie alike, and whole heads together")
    if bias is not None and (bias.shape != (R, 1, 1, width) or not bias.is_contiguous()):
        raise ValueError(f"bias must be contiguous and [{R}, 1, 1, {width}], not {[*bias.shape]}")
    _decode_kernel[(R * K, splits, tiles)](
        q, k, v, keys, values, start, out if bias is None else bias, out, partial, lse, arrivals(q.device),
        math.log2(math.e) / math.sqrt(h), T, block_length, width,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *keys.stride()[:3], start.stride(0), K, G=G, SPLITS=splits, HEAD=h,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_T=max(triton.next_power_of_2(T), 16), STAGES=stages,
        WINDOW=window, BIASED=bias is not None, num_warps=warps, **early(q),
    )  # fmt: skip
    return out.transpose(1, 2)
