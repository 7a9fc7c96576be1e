"""A mixture of experts for few tokens: routing in one kernel, experts in four, for
models/experts.py.

On one H200 the routing kernels make LLaDA2-mini 12 to 14 % faster at 16 to 128 rows, measured
together with a kernel for the scores, which cuBLAS computes now. The experts of 64 tokens of
SDAR-30B take 71 microseconds a layer; torch's grouped products take 480.

An assignment (token, place among its k experts) is put into the bucket of its expert. It is a row
of the products and writes to a place of its own, so nothing is sorted or copied, and the weights of
the experts in use are read once.
"""

import torch
import triton
import triton.language as tl

from kernels.fused_triton import _load, _rounded, shared_memory

# Mean assignments an expert; with more, arithmetic bounds the products and torch's are faster.
MOST = 128

# --- router --------------------------------------------------------------------------------------


@triton.jit
def _route_kernel(
    scores, bias, index, weight, k, scale, E: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr, GROUPS: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    """The k best experts of a token, best first, and their shares; ties go to the lower number."""
    token, e, j = tl.program_id(0).to(tl.int64), tl.arange(0, E), tl.arange(0, K)
    score = tl.load(scores + token * E + e)
    if SIGMOID:  # a group counts as the sum of its two best; experts of the best groups are open
        share = 1 / (1 + tl.exp(-score))
        grouped = tl.reshape(share + tl.load(bias + e), (GROUPS, E // GROUPS))
        inner, g = tl.arange(0, E // GROUPS)[None], tl.arange(0, GROUPS)
        best = tl.max(grouped, 1)
        first = tl.min(tl.where(grouped == best[:, None], inner, E), 1)
        group = best + tl.max(tl.where(inner == first[:, None], float("-inf"), grouped), 1)
        is_open = g < 0
        for _ in tl.static_range(OPEN):
            left = tl.where(is_open, float("-inf"), group)
            is_open = is_open | (g == tl.min(tl.where(left == tl.max(left, 0), g, GROUPS), 0))
        choice = tl.reshape(tl.where(is_open[:, None], grouped, float("-inf")), (E,))
    else:
        share = tl.exp(score - tl.max(score, 0))
        share = share / tl.sum(share, 0)
        choice = share
    chosen, shares = tl.zeros([K], tl.int64), tl.zeros([K], tl.float32)
    for n in range(k):
        expert = tl.min(tl.where(choice == tl.max(choice, 0), e, E - 1), 0)
        chosen = tl.where(j == n, expert.to(tl.int64), chosen)
        shares = tl.where(j == n, tl.sum(tl.where(e == expert, share, 0.0), 0), shares)
        choice = tl.where(e == expert, float("-inf"), choice)
    if NORMALIZED:
        shares = shares / (tl.sum(shares, 0) + 1e-20) * scale
    tl.store(index + token * k + j, chosen, mask=j < k)
    tl.store(weight + token * k + j, shares.to(weight.dtype.element_ty), mask=j < k)


def route_fused(moe, x):
    """moe.route(x) of SoftmaxMoE or LLaDA2, with all after the scores in one kernel; the numbers of
    experts and of groups are powers of 2
    """
    scores, config = moe.gate(x), getattr(moe, "config", None)
    if config is None:  # softmax
        k, dtype, bias, groups, scale = moe.top_k, x.dtype, scores, (1, 1), 1.0
    else:
        k, dtype, bias = config.num_experts_per_tok, scores.dtype, moe.gate.expert_bias
        groups, scale = (config.n_group, config.topk_group), config.routed_scaling_factor
    *lead, E = scores.shape
    index = torch.empty(*lead, k, dtype=torch.int64, device=x.device)
    share = torch.empty(index.shape, dtype=dtype, device=x.device)
    _route_kernel[(index.numel() // k,)](
        scores, bias, index, share, k, scale, E=E, K=triton.next_power_of_2(k),
        SIGMOID=config is not None, NORMALIZED=moe.is_normalized,
        GROUPS=groups[0], OPEN=groups[1], num_warps=1,
    )  # fmt: skip
    return index, share


# --- experts -------------------------------------------------------------------------------------


@triton.jit
def _bucket_kernel(index, counts, buckets, size, M, BLOCK: tl.constexpr):
    """The assignments i with index[i] = the program's expert, in order, and their number.

    At most M, one a token: where scores are NaN a token has the same expert k times, and what does
    not fit is left out.
    """
    expert, count = tl.program_id(0), 0
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
    """Rows n of an expert's weights times its assignments from number `first` on"""
    d, m = tl.arange(0, BLOCK_K), first + tl.arange(0, BLOCK_M)
    dtype: tl.constexpr = out.dtype.element_ty
    here = (m < count)[None]
    i = tl.load(bucket + m, mask=m < count, other=0)
    from_x = x + (i // k).to(tl.int64)[None] * D + d[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        tokens = tl.load(from_x + start, mask=here & (start + d < D)[:, None], other=0.0)
        inside = (start + d < D)[None]
        acc = tl.dot(tl.load(rows + start, mask=inside, other=0.0), tokens, acc)
        if GATED:
            up = tl.dot(tl.load(rows + start + N * D, mask=inside, other=0.0), tokens, up)
    if GATED:
        gate = _rounded(acc, dtype)
        acc = _rounded(gate / (1 + tl.exp(-gate)), dtype) * _rounded(up, dtype)
    to_out = out + i.to(tl.int64)[None] * N + n[:, None]
    tl.store(to_out, acc.to(dtype), mask=here & (n < N)[:, None])


@triton.jit
def _product_kernel(
    x, weights, counts, buckets, out, M, N, k, D: tl.constexpr, GATED: tl.constexpr,
    FEW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """out[i, n] = weights[e, n] . x[i // k] for the assignments i of expert e

    GATED: silu of that, times row N + n of weights. Products are transposed, [n, i]: there are few
    assignments, so rows of weights are the long side. An expert with up to FEW assignments pads
    them to FEW; others pad them to a multiple of BLOCK_M.
    """
    n, expert = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1).to(tl.int64)
    lane, bucket = tl.program_id(2), buckets + expert * M
    row = expert * N * (2 if GATED else 1) + tl.minimum(n, N - 1)
    rows = weights + row[:, None] * D + tl.arange(0, BLOCK_K)[None]
    count = tl.load(counts + expert)
    if count <= FEW:
        if (count > 0) & (lane == 0):
            _multiply(
                x, rows, bucket, out, 0, count, n, N, k, D, GATED, FEW, BLOCK_N, BLOCK_K, STAGES
            )
    else:
        for first in tl.range(lane * BLOCK_M, count, tl.num_programs(2) * BLOCK_M):
            _multiply(
                x, rows, bucket, out, first, count, n, N, k, D, GATED, BLOCK_M, BLOCK_N, BLOCK_K,
                STAGES,
            )  # fmt: skip


@triton.jit
def _sum_kernel(y, weight, out, D, K: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of the k rows of a token times their weights, each product and the sum rounded as PyTorch
    does.
    """
    token, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        w = tl.load(weight + token * K + j)
        part = _load(y + (token * K + j) * D + d, d < D) * w.to(tl.float32)
        total += _rounded(part, w.dtype)
    tl.store(out + token * D + d, total.to(out.dtype.element_ty), mask=d < D)


def _product(x, weights, counts, buckets, out, k, gated, config):
    M, N = buckets.shape[1], out.shape[1]
    few, block_m, block_n, block_k, warps, stages = config
    tile = (block_m + block_n * (1 + gated)) * block_k * x.itemsize
    stages = min(stages, 1 + shared_memory(x.device) // tile)  # the first stage needs no tile
    lanes = min(triton.cdiv(M, block_m), 8)
    _product_kernel[(triton.cdiv(N, block_n), len(weights), lanes)](
        x, weights, counts, buckets, out, M, N, k, D=x.shape[-1], GATED=gated, FEW=few,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages, num_warps=warps,
    )  # fmt: skip


# Up to so many assignments an expert: (few, block_m, block_n, block_k, warps, stages) of the gated
# and of the second product. Measured on a hot GPU (one H200, torch 2.11, Triton 3.6,
# bf16, experts of 3 x 2048 x 768 or 512), with even routing and with one that hits as few experts
# as random weights do.
TUNED = {
    8: ((16, 64, 64, 64, 4, 4), (16, 64, 128, 64, 4, 4)),
    16: ((32, 128, 128, 64, 8, 3), (128, 128, 128, 64, 4, 3)),
    32: ((64, 128, 128, 64, 8, 3), (128, 128, 128, 64, 4, 3)),
    MOST: ((128, 128, 128, 64, 8, 4), (128, 128, 128, 64, 4, 3)),
}


def experts_fused(x, index, weight, gate_up, down):
    """models.experts.experts_loop without gradient"""
    k, (E, D, f) = index.shape[-1], down.shape
    tokens = x.reshape(-1, D).contiguous()
    M = len(tokens)
    counts = torch.empty(E, dtype=torch.int32, device=x.device)
    buckets = torch.empty(E, M, dtype=torch.int32, device=x.device)
    block = min(triton.next_power_of_2(M * k), 1024)
    _bucket_kernel[(E,)](index.contiguous(), counts, buckets, M * k, M, BLOCK=block, num_warps=4)
    some = (tiles for most, tiles in TUNED.items() if M * k <= most * E)
    gated, second = next(some, TUNED[MOST])
    hidden, y = x.new_empty(M * k, f), x.new_empty(M * k, D)
    _product(tokens, gate_up, counts, buckets, hidden, k, True, gated)
    _product(hidden, down, counts, buckets, y, 1, False, second)
    out, block = torch.empty_like(tokens), min(triton.next_power_of_2(D), 1024)
    _sum_kernel[(M, triton.cdiv(D, block))](
        y, weight.contiguous(), out, D, K=k, BLOCK=block, num_warps=4
    )
    return out.view(x.shape)
