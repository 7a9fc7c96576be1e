"""models/experts.py for few tokens on CUDA: the weights of the experts in use are read once, nothing is sorted or copied.

Imported only where it runs, in samplers. An assignment (token, place among its k experts) is put into the bucket of its expert;
it is a row of the products and writes to a place of its own.
"""

import torch
import triton
import triton.language as tl

from kernels.fused_triton import _await_previous, early

MOST = 128  # assignments an expert, in the mean: beyond, products are bound by arithmetic, and torch's are quicker


@triton.jit
def _bucket_kernel(index, counts, buckets, size, M, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The assignments i with index[i] = the program's expert, in their order, and how many they are: M at most, one a token.
    Where scores are NaN a token has the same expert k times, and what does not fit is left out.
    """
    expert, count = tl.program_id(0), 0
    _await_previous(PDL)
    for first in range(0, size, BLOCK):
        i = first + tl.arange(0, BLOCK)
        mine = (tl.load(index + i, mask=i < size, other=-1) == expert).to(tl.int32)
        place = count + tl.cumsum(mine, 0) - 1
        tl.store(buckets + expert * M + place, i, mask=(mine == 1) & (place < M))
        count += tl.sum(mine, 0)
    tl.store(counts + expert, tl.minimum(count, M))


@triton.jit
def _multiply(
    x, rows, bucket, out, first, count, n, N, k, D: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows n of an expert's weights times its assignments from number `first` on."""
    d, m = tl.arange(0, BLOCK_K), first + tl.arange(0, BLOCK_M)
    dtype: tl.constexpr = out.dtype.element_ty
    i = tl.load(bucket + m, mask=m < count, other=0)
    from_x = x + (i // k).to(tl.int64)[None] * D + d[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        tokens = tl.load(
            from_x + start, mask=(m < count)[None] & (start + d < D)[:, None], other=0.0
        )
        inside = (start + d < D)[None]
        acc = tl.dot(tl.load(rows + start, mask=inside, other=0.0), tokens, acc)
        if GATED:
            up = tl.dot(tl.load(rows + start + N * D, mask=inside, other=0.0), tokens, up)
    if GATED:
        gate = acc.to(dtype).to(tl.float32)
        acc = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    to_out = out + i.to(tl.int64)[None] * N + n[:, None]
    tl.store(to_out, acc.to(dtype), mask=(m < count)[None] & (n < N)[:, None])


@triton.jit
def _product_kernel(
    x, weights, counts, buckets, out, M, N, k, D: tl.constexpr, GATED: tl.constexpr, LANES: tl.constexpr, FEW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[i, n] = weights[e, n] . x[i // k] for the assignments i of expert e; GATED: silu of that, times row N + n of weights.

    The products are transposed, [n, i]: the rows of weights are the long side, as there are few assignments. An expert with no
    more than FEW of them pads them to FEW, another to a multiple of BLOCK_M.
    """
    n, expert = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1).to(tl.int64)
    lane, bucket = tl.program_id(2), buckets + expert * M
    rows = (
        weights
        + (expert * N * (2 if GATED else 1) + tl.minimum(n, N - 1))[:, None] * D
        + tl.arange(0, BLOCK_K)[None]
    )
    _await_previous(PDL)
    count = tl.load(counts + expert)
    if count <= FEW:
        if (count > 0) & (lane == 0):
            _multiply(
                x, rows, bucket, out, 0, count, n, N, k, D, GATED, FEW, BLOCK_N, BLOCK_K, STAGES
            )
    else:
        for first in tl.range(lane * BLOCK_M, count, LANES * BLOCK_M):
            _multiply(
                x,
                rows,
                bucket,
                out,
                first,
                count,
                n,
                N,
                k,
                D,
                GATED,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                STAGES,
            )


@triton.jit
def _sum_kernel(
    y,
    weight,
    first,
    second,
    out,
    D,
    K: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum of the k rows of a token times their weights; a product is rounded to the dtype that PyTorch gives it. Then it is
    added to `first` and that to `second`, if ADD is 1 or 2, each rounded.
    """
    token, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = out.dtype.element_ty
    _await_previous(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        w = tl.load(weight + token * K + j)
        part = tl.load(y + (token * K + j) * D + d, mask=d < D, other=0.0).to(tl.float32) * w.to(
            tl.float32
        )
        total += part.to(w.dtype).to(tl.float32)
    total = total.to(dtype)
    if ADD > 0:
        total = (
            tl.load(first + token * D + d, mask=d < D, other=0.0).to(tl.float32)
            + total.to(tl.float32)
        ).to(dtype)
    if ADD > 1:
        total = (
            tl.load(second + token * D + d, mask=d < D, other=0.0).to(tl.float32)
            + total.to(tl.float32)
        ).to(dtype)
    tl.store(out + token * D + d, total, mask=d < D)


@triton.jit
def _score_kernel(
    x, weight, parts, M, D, E, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """parts[s, m, e] = share number s of weight[e] . x[m]. bf16 and fp16 are exact in TF32, an fp32 weight is the sum of two of
    its numbers but for its last two bits. Tensor cores cut off what they add: errors are 1e-6 of the scores, in fp32 2e-7.
    """
    e, m = (
        tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E),
        tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M),
    )
    split, d = tl.program_id(2), tl.arange(0, BLOCK_K)
    size = tl.cdiv(D, SPLITS * BLOCK_K) * BLOCK_K
    acc = tl.zeros([BLOCK_E, BLOCK_M], tl.float32)
    _await_previous(PDL)
    for start in range(split * size, tl.minimum(split * size + size, D), BLOCK_K):
        here = start + d
        row = tl.load(
            weight + e[:, None] * D + here[None],
            mask=(e < E)[:, None] & (here < D)[None],
            other=0.0,
        )
        token = tl.load(
            x + m.to(tl.int64)[None] * D + here[:, None],
            mask=(m < M)[None] & (here < D)[:, None],
            other=0.0,
        )
        high = (row.to(tl.int32, bitcast=True) & -8192).to(
            tl.float32, bitcast=True
        )  # TF32 has 13 bits less
        acc = tl.dot(high, token.to(tl.float32), acc, input_precision="tf32")
        acc = tl.dot(row - high, token.to(tl.float32), acc, input_precision="tf32")
    to_part = parts + (split * M + m).to(tl.int64)[None] * E + e[:, None]
    tl.store(to_part, acc, mask=(e < E)[:, None] & (m < M)[None])


@triton.jit
def _route_kernel(
    parts, bias, index, weight, M, k, scale, SPLITS: tl.constexpr, E: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr, OPEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The k best experts of a token, best first, and their shares; its scores are the sum of their parts. Ties go to the lower
    number.
    """
    token, e, j = tl.program_id(0).to(tl.int64), tl.arange(0, E), tl.arange(0, K)
    _await_previous(PDL)
    score = tl.load(parts + token * E + e)
    for split in tl.static_range(1, SPLITS):
        score += tl.load(parts + (split * M + token) * E + e)
    if SIGMOID:
        share = 1 / (1 + tl.exp(-score))
        choice = share + tl.load(bias + e)
        grouped = tl.reshape(choice, (GROUPS, E // GROUPS))
        inner = tl.arange(0, E // GROUPS)[None]
        best = tl.max(grouped, 1)
        first = tl.min(tl.where(grouped == best[:, None], inner, E), 1)
        group = best + tl.max(tl.where(inner == first[:, None], float("-inf"), grouped), 1)
        g = tl.arange(0, GROUPS)
        is_open = g < 0
        for _ in tl.static_range(OPEN):
            left = tl.where(is_open, float("-inf"), group)
            is_open = is_open | (g == tl.min(tl.where(left == tl.max(left, 0), g, GROUPS), 0))
        choice = tl.reshape(tl.where(is_open[:, None], grouped, float("-inf")), (E,))
    else:
        share = tl.exp(score - tl.max(score, 0))
        share = share / tl.sum(share, 0)
        choice = share
    chosen = tl.zeros([K], tl.int64)
    shares = tl.zeros([K], tl.float32)
    for n in range(k):
        expert = tl.min(tl.where(choice == tl.max(choice, 0), e, E - 1), 0)
        chosen = tl.where(j == n, expert.to(tl.int64), chosen)
        shares = tl.where(j == n, tl.sum(tl.where(e == expert, share, 0.0), 0), shares)
        choice = tl.where(e == expert, float("-inf"), choice)
    shares = shares / (tl.sum(shares, 0) + (1e-20 if SIGMOID else 0.0)) * scale
    tl.store(index + token * k + j, chosen, mask=j < k)
    tl.store(weight + token * k + j, shares.to(weight.dtype.element_ty), mask=j < k)


def scores(x, weight):
    """x [M, D] bf16 or fp16, weight [E, D] fp32 of a Router -> [S, M, E] fp32, whose sum over S is x weight^T"""
    (M, D), E = x.shape, len(weight)
    block_m, block_e = (16, 16) if M <= 16 else (64, 16) if M <= 64 else (64, 64)
    programs = triton.cdiv(E, block_e) * triton.cdiv(M, block_m)
    splits = min(triton.cdiv(64, programs), triton.cdiv(D, 128))
    parts = torch.empty(splits, M, E, dtype=torch.float32, device=x.device)
    _score_kernel[(triton.cdiv(E, block_e), triton.cdiv(M, block_m), splits)](
        x,
        weight,
        parts,
        M,
        D,
        E,
        SPLITS=splits,
        BLOCK_M=block_m,
        BLOCK_E=block_e,
        BLOCK_K=64,
        num_warps=4,
        **early(x),
    )
    return parts


def route(x, weight, k, dtype, bias=None, groups=1, open_groups=1, scale=1.0):
    """x [..., D] bf16 or fp16, weight [E, D] fp32 of a Router -> index [..., k] int64, weight [..., k] of dtype. E and groups:
    powers of 2.

    Without bias a softmax, with it a sigmoid and groups, as in the model files.
    """
    parts = scores(x.reshape(-1, x.shape[-1]).contiguous(), weight)
    S, M, E = parts.shape
    index = torch.empty(*x.shape[:-1], k, dtype=torch.int64, device=x.device)
    share = torch.empty(index.shape, dtype=dtype, device=x.device)
    _route_kernel[(M,)](
        parts, parts if bias is None else bias, index, share, M, k, float(scale), SPLITS=S, E=E, K=triton.next_power_of_2(k),
        SIGMOID=bias is not None, GROUPS=groups, OPEN=open_groups, num_warps=1, **early(x),
    )  # fmt: skip
    return index, share


def _product(x, weights, counts, buckets, out, k, gated, config):
    M, N = buckets.shape[1], out.shape[1]
    few, block_m, block_n, block_k, warps, stages = config
    lanes = min(triton.cdiv(M, block_m), 8)
    _product_kernel[(triton.cdiv(N, block_n), len(weights), lanes)](
        x, weights, counts, buckets, out, M, N, k, D=x.shape[-1], GATED=gated, LANES=lanes, FEW=few, BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages, num_warps=warps, **early(x),
    )  # fmt: skip


# Measured hot as in bench/experts.py (one H200, torch 2.11, Triton 3.6, bf16, experts of 3 x 2048 x 768 or 512, with even
# routing and with one that hits as few experts as random weights do): up to so many assignments an expert, (few, block_m,
# block_n, block_k, warps, stages) of the gated and of the second product.
TUNED = {
    8: ((16, 64, 64, 64, 4, 4), (16, 64, 128, 64, 4, 4)),
    16: ((32, 128, 128, 64, 8, 3), (128, 128, 128, 64, 4, 3)),
    32: ((64, 128, 128, 64, 8, 3), (128, 128, 128, 64, 4, 3)),
    MOST: ((128, 128, 128, 64, 8, 4), (128, 128, 128, 64, 4, 3)),
}


def tiles_of(assignments, experts):
    """-> the entry of TUNED for so many assignments to so many experts"""
    return next(
        tiles for most, tiles in TUNED.items() if assignments <= most * experts or most == MOST
    )


def experts_fused(x, index, weight, gate_up, down, onto=(), tuned=None):
    """As models.experts.experts_loop, without gradient. onto [..., D]: up to two tensors, as of models.experts.Experts."""
    if len(onto) > 2:
        raise ValueError(f"{len(onto)} tensors to add to: two at most")
    k, (E, D, f) = index.shape[-1], down.shape
    tokens, weight = x.reshape(-1, D).contiguous(), weight.contiguous()
    M = len(tokens)
    counts = torch.empty(E, dtype=torch.int32, device=x.device)
    buckets = torch.empty(E, M, dtype=torch.int32, device=x.device)
    block = min(triton.next_power_of_2(M * k), 1024)
    _bucket_kernel[(E,)](
        index.contiguous(), counts, buckets, M * k, M, BLOCK=block, num_warps=4, **early(x)
    )
    gated, second = tuned or tiles_of(M * k, E)
    hidden = torch.empty(M * k, f, dtype=x.dtype, device=x.device)
    _product(tokens, gate_up, counts, buckets, hidden, k, True, gated)
    y = torch.empty(M * k, D, dtype=x.dtype, device=x.device)
    _product(hidden, down, counts, buckets, y, 1, False, second)
    out, block = torch.empty_like(tokens), min(triton.next_power_of_2(D), 1024)
    addends = (*(other.contiguous() for other in onto), y, y)[:2]
    _sum_kernel[(M, triton.cdiv(D, block))](
        y, weight, *addends, out, D, K=k, ADD=len(onto), BLOCK=block, num_warps=4, **early(x)
    )
    return out.view(x.shape)
