"""Products of few tokens with large weights on Hopper, in Gluon, the lower level of Triton. Imported only where it runs.

Such a product takes the time of reading its weights. One warp of a program does nothing but ask for blocks with TMA, as far
ahead as shared memory reaches; four or eight others multiply them. The first weights are asked for while the kernel before may
still run ("programmatic dependent launch"), so neither that one nor one that is launched early may write weights. The long
side, the outputs, leads: 64 of them are the rows of a tensor core's product.

On an H200 (docs/rollout.md) a layer of SDAR-8B takes 123 microseconds at 64 tokens, 135 with cuBLAS's products, and 106 and 122
at 4. Run with Triton 3.6, compiled with 3.7 and 3.8; kernels/fused.py compares a product with cuBLAS's before it uses them.
"""

from functools import cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.fused_triton import SMS, arrivals, early

BLOCK_K = 128  # inputs a stage: 256 bytes of a row on end; with 64 DRAM gives 1 to 3 % less
SHARED = 192 << 10  # bytes of the stages of a program
THIRD = 32  # outputs: a tile of gated products has three of gate's and three of up's
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name before Triton 3.7
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


# --- x weight^T --------------------------------------------------------------------------------------------------------------


@gluon.jit
def _ask(
    x, weight, tokens, rows, full, empty, tile, first, STEPS: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BYTES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One warp: fills the stages in turn, each anew once it was used."""
    AHEAD: gl.constexpr = min(STEPS, STAGES)
    for s in gl.static_range(AHEAD):
        mbarrier.expect(full.index(s), BYTES)
        tma.async_copy_global_to_shared(
            weight, [tile * BLOCK_N, first + s * BLOCK_K], full.index(s), rows.index(s)
        )
    if PDL:
        gdc_wait()
    for s in gl.static_range(AHEAD):
        tma.async_copy_global_to_shared(x, [0, first + s * BLOCK_K], full.index(s), tokens.index(s))
    for step in range(AHEAD, STEPS):
        stage = step % STAGES
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (step // STAGES - 1) & 1)
        mbarrier.expect(bar, BYTES)
        tma.async_copy_global_to_shared(
            weight, [tile * BLOCK_N, first + step * BLOCK_K], bar, rows.index(stage)
        )
        tma.async_copy_global_to_shared(x, [0, first + step * BLOCK_K], bar, tokens.index(stage))


@gluon.jit
def _multiply(
    tokens, rows, full, empty, STEPS: gl.constexpr, STAGES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    SUMS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The other warps -> ([BLOCK_N, BLOCK_M] fp32,)"""
    if PDL:
        gdc_wait()
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS)
    for step in range(STEPS):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        acc = warpgroup_mma(
            rows.index(stage), tokens.index(stage).permute((1, 0)), acc, is_async=True
        )
        acc = warpgroup_mma_wait(0, deps=(acc,))
        barrier()  # all warps have read the stage
        mbarrier.arrive(empty.index(stage), count=1)
    return (acc,)


@gluon.jit
def _linear_kernel(
    x, weight, onto, out, parts, arrived, M, N, K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, ONTO: gl.constexpr, PDL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """out[m, n] = weight[n] . x[m]; ONTO: rounded, then added to onto[m, n]. x, weight: descriptors of their blocks.

    SPLITS: programs that share the inputs of the same outputs; the last to arrive adds up the parts, in their order.
    """
    tile, split = gl.program_id(0), gl.program_id(1)
    dtype: gl.constexpr = out.dtype.element_ty
    STEPS: gl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS)
    BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K * 2
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    if PDL:
        gdc_launch_dependents()
    first = split * STEPS * BLOCK_K
    tokens = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    rows = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    sums = gl.warp_specialize(
        [
            (_multiply, (tokens, rows, full, empty, STEPS, STAGES, BLOCK_M, BLOCK_N, SUMS, PDL)),
            (_ask, (x, weight, tokens, rows, full, empty, tile, first, STEPS, STAGES, BLOCK_N, BLOCK_K, BYTES, PDL)),
        ],
        [1], [40],
    )  # fmt: skip
    acc, is_last = sums[0], True
    if SPLITS > 1:
        r, c = (
            gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUMS)),
            gl.arange(0, BLOCK_M, gl.SliceLayout(0, SUMS)),
        )
        part = parts + (tile * SPLITS * BLOCK_N + r[:, None]) * BLOCK_M + c[None]
        gl.store(part + split * BLOCK_N * BLOCK_M, acc)
        barrier()  # all of the part, before the count says so
        is_last = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            acc = gl.load(part, cache_modifier=".cg")
            for other in gl.static_range(1, SPLITS):
                acc += gl.load(part + other * BLOCK_N * BLOCK_M, cache_modifier=".cg")
            gl.store(arrived + tile, 0)  # for the next product
    if is_last:
        LIE: gl.constexpr = gl.BlockedLayout(
            [BLOCK_N // 32, 1], [32, 1], [1, num_warps], [0, 1]
        )  # outputs lie on end
        n = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LIE))
        m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, LIE))
        here, inside = m[None] * N + n[:, None], (m < M)[None] & (n < N)[:, None]
        y = gl.convert_layout(acc.to(dtype), LIE)
        if ONTO:
            y = (gl.load(onto + here, mask=inside, other=0.0).to(gl.float32) + y.to(gl.float32)).to(
                dtype
            )
        gl.store(out + here, y, mask=inside)


# --- silu(x gate^T) x up^T ---------------------------------------------------------------------------------------------------


@gluon.jit
def _ask_rows(big, small, rows, bar, tile, k, N, stage, THIRD: gl.constexpr):
    """Of one tile two thirds of gate, two of up, and the last of both, each in panels of 64 inputs."""
    n = tile * 3 * THIRD
    for p in gl.static_range(2):
        tma.async_copy_global_to_shared(big, [n, k + 64 * p], bar, rows.index((2 * stage + p) * 3))
    for p in gl.static_range(2):
        tma.async_copy_global_to_shared(
            big, [N + n, k + 64 * p], bar, rows.index((2 * stage + p) * 3 + 1)
        )
    for p in gl.static_range(2):
        both = rows.index((2 * stage + p) * 3 + 2)
        tma.async_copy_global_to_shared(
            small, [n + 2 * THIRD, k + 64 * p], bar, both.slice(0, THIRD)
        )
        tma.async_copy_global_to_shared(
            small, [N + n + 2 * THIRD, k + 64 * p], bar, both.slice(THIRD, THIRD)
        )


@gluon.jit
def _ask_tokens(x, tokens, bar, k, stage):
    for p in gl.static_range(2):
        tma.async_copy_global_to_shared(x, [0, k + 64 * p], bar, tokens.index(2 * stage + p))


@gluon.jit
def _ask_gated(
    x, big, small, tokens, rows, full, empty, tile, N, STEPS: gl.constexpr, STAGES: gl.constexpr, THIRD: gl.constexpr,
    BYTES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    AHEAD: gl.constexpr = min(STEPS, STAGES)
    for s in gl.static_range(AHEAD):
        mbarrier.expect(full.index(s), BYTES)
        _ask_rows(big, small, rows, full.index(s), tile, 128 * s, N, s, THIRD)
    if PDL:
        gdc_wait()
    for s in gl.static_range(AHEAD):
        _ask_tokens(x, tokens, full.index(s), 128 * s, s)
    for step in range(AHEAD, STEPS):
        stage = step % STAGES
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (step // STAGES - 1) & 1)
        mbarrier.expect(bar, BYTES)
        _ask_rows(big, small, rows, bar, tile, 128 * step, N, stage, THIRD)
        _ask_tokens(x, tokens, bar, 128 * step, stage)


@gluon.jit
def _multiply_gated(
    tokens, rows, full, empty, STEPS: gl.constexpr, STAGES: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr,
    SUMS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """-> gate's first outputs, up's, and the last of both [ROWS, BLOCK_M] fp32"""
    if PDL:
        gdc_wait()
    gate = gl.zeros([ROWS, BLOCK_M], gl.float32, SUMS)
    up = gl.zeros([ROWS, BLOCK_M], gl.float32, SUMS)
    both = gl.zeros([ROWS, BLOCK_M], gl.float32, SUMS)
    for step in range(STEPS):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        for p in gl.static_range(2):
            token = tokens.index(2 * stage + p).permute((1, 0))
            gate = warpgroup_mma(rows.index((2 * stage + p) * 3), token, gate, is_async=True)
            up = warpgroup_mma(rows.index((2 * stage + p) * 3 + 1), token, up, is_async=True)
            both = warpgroup_mma(rows.index((2 * stage + p) * 3 + 2), token, both, is_async=True)
        gate, up, both = warpgroup_mma_wait(0, deps=(gate, up, both))
        barrier()  # all warps have read the stage
        mbarrier.arrive(empty.index(stage), count=1)
    return gate, up, both


@gluon.jit
def _put_gated(gate, up, out, n, M, N, num_warps: gl.constexpr):
    """gate, up [rows, BLOCK_M], rounded -> their outputs from number n on"""
    gate = gate.to(gl.float32)
    y = ((gate / (1 + gl.exp(-gate))).to(up.dtype).to(gl.float32) * up.to(gl.float32)).to(up.dtype)
    LIE: gl.constexpr = gl.BlockedLayout([y.shape[0] // 32, 1], [32, 1], [1, num_warps], [0, 1])
    y = gl.convert_layout(y, LIE)
    n += gl.arange(0, y.shape[0], gl.SliceLayout(1, LIE))
    m = gl.arange(0, y.shape[1], gl.SliceLayout(0, LIE))
    gl.store(out + m[None] * N + n[:, None], y, mask=(m < M)[None] & (n < N)[:, None])


@gluon.jit
def _gated_kernel(
    x, big, small, out, M, N, K: gl.constexpr, BLOCK_M: gl.constexpr, THIRD: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out[m, n] = silu(weight[n] . x[m]) times weight[N + n] . x[m], each rounded before. big, small: descriptors of blocks of
    two thirds of a tile and of one. A tile of three thirds cuts the 12,288 outputs of an MLP into 128 programs, for 132 SMs.
    """
    tile = gl.program_id(0)
    dtype: gl.constexpr = out.dtype.element_ty
    ROWS: gl.constexpr = 2 * THIRD
    STEPS: gl.constexpr = (K + 127) // 128
    BYTES: gl.constexpr = (BLOCK_M + 3 * ROWS) * 128 * 2
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, num_warps // 4], [16, BLOCK_M // (num_warps // 4), 16]
    )
    if PDL:
        gdc_launch_dependents()
    tokens = gl.allocate_shared_memory(dtype, [2 * STAGES, BLOCK_M, 64], x.layout)
    rows = gl.allocate_shared_memory(dtype, [6 * STAGES, ROWS, 64], big.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    gate, up, both = gl.warp_specialize(
        [
            (_multiply_gated, (tokens, rows, full, empty, STEPS, STAGES, BLOCK_M, ROWS, SUMS, PDL)),
            (_ask_gated, (x, big, small, tokens, rows, full, empty, tile, N, STEPS, STAGES, THIRD, BYTES, PDL)),
        ],
        [1], [40],
    )  # fmt: skip
    n = tile * 3 * THIRD
    _put_gated(gate.to(dtype), up.to(dtype), out, n, M, N, num_warps)
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, num_warps, 1], [2, 0, 1])
    gate, up = gl.convert_layout(
        both.to(dtype).reshape([2, THIRD, BLOCK_M]).permute([1, 2, 0]), PAIRS
    ).split()
    _put_gated(gate, up, out, n + 2 * THIRD, M, N, num_warps)


# --- from PyTorch ------------------------------------------------------------------------------------------------------------


@cache
def _layout(rows, columns, dtype):
    return gl.NVMMASharedLayout.get_default_for([rows, columns], DTYPES[dtype])


def _blocks(x, rows, columns):
    return TensorDescriptor.from_tensor(x, [rows, columns], _layout(rows, columns, x.dtype))


def _splits(tiles, inputs):
    """Long inputs are shared by as many programs as there are multiprocessors, short ones until half of them have work: the
    sum of the parts takes a microsecond.
    """
    return max(min(SMS // tiles, inputs // 4096), min(triton.cdiv(64, tiles), inputs // 512), 1)


def _tile_of(tokens):
    """-> tokens of a tile"""
    if not 1 <= tokens <= 128:
        raise ValueError(f"{tokens} tokens: these products are for 1 to 128")
    return max(triton.next_power_of_2(tokens), 16)


def linear(x, weight, onto=None, splits=None):
    """x [..., K] of up to 128 tokens, weight [N, K], K a multiple of 8 -> x weight^T [..., N]

    onto [..., N]: the rounded product is added to it. splits: in place of the measured number. ValueError for other tokens.
    """
    (N, K), M = weight.shape, x.numel() // x.shape[-1]
    block_m, block_n = _tile_of(M), 64
    tiles = triton.cdiv(N, block_n)
    splits = splits or _splits(tiles, K)
    out = torch.empty(*x.shape[:-1], N, dtype=x.dtype, device=x.device)
    parts = torch.empty(
        tiles * splits * block_n * block_m if splits > 1 else 0,
        dtype=torch.float32,
        device=x.device,
    )
    _linear_kernel[(tiles, splits)](
        _blocks(x.reshape(M, K).contiguous(), block_m, BLOCK_K), _blocks(weight, block_n, BLOCK_K),
        out if onto is None else onto.contiguous(), out, parts, arrivals(x.device), M, N,
        K=K, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=BLOCK_K, SPLITS=splits, ONTO=onto is not None,
        STAGES=SHARED // ((block_m + block_n) * BLOCK_K * 2), num_warps=4, maxnreg=96 if block_m <= 64 else 128, **early(x),
    )  # fmt: skip
    return out


def gated(x, weight):
    """x [..., K] of up to 128 tokens, weight [2 N, K], gate's before up's, K a multiple of 8 -> silu(gate) times up [..., N]

    ValueError for other tokens.
    """
    (rows, K), M = weight.shape, x.numel() // x.shape[-1]
    N, block_m = rows // 2, _tile_of(M)
    out = torch.empty(*x.shape[:-1], N, dtype=x.dtype, device=x.device)
    _gated_kernel[(triton.cdiv(N, 3 * THIRD),)](
        _blocks(x.reshape(M, K).contiguous(), block_m, 64), _blocks(weight, 2 * THIRD, 64), _blocks(weight, THIRD, 64),
        out, M, N,
        K=K, BLOCK_M=block_m, THIRD=THIRD, STAGES=SHARED // ((block_m + 6 * THIRD) * 128 * 2),
        num_warps=4 if block_m <= 64 else 8, maxnreg=96 if block_m <= 32 else 128, **early(x),
    )  # fmt: skip
    return out
