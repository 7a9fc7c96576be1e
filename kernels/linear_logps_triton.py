"""models.logps.logps_and_slope_ in one Triton kernel, which reads the logits twice and
writes once.
"""

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 8192, 16  # columns at a time


@triton.jit
def _kernel(logits, row_stride, V, targets, logps, SLOPE: tl.constexpr, BLOCK: tl.constexpr):
    n, v = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logits += n * row_stride
    target = tl.load(targets + n)
    z_target = tl.load(logits + target).to(tl.float32)
    # Peaks and sums per column of the block, so that the loop needs no reduction.
    peaks, sums = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        z = tl.load(logits + start + v, mask=start + v < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peaks, z)
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is NaN
        sums = sums * tl.exp(peaks - shift) + tl.exp(z - shift)
        peaks = higher
    peak = tl.max(peaks, 0)
    total = tl.sum(sums * tl.exp(peaks - peak), 0)
    tl.store(logps + n, z_target - peak - tl.log(total))
    if SLOPE:
        for start in range(0, V, BLOCK):
            inside = start + v < V
            z = tl.load(logits + start + v, mask=inside, other=float("-inf")).to(tl.float32)
            slope = tl.where(start + v == target, 1.0, 0.0) - tl.exp(z - peak) / total
            tl.store(logits + start + v, slope.to(logits.dtype.element_ty), mask=inside)


def logps_and_slope_(logits, targets, slope=True):
    """As in models/logps.py, for CUDA logits [n, V] up to fp32 with contiguous rows"""
    logps = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        sizes = logits.stride(0), logits.shape[1]
        _kernel[(len(logits),)](
            logits, *sizes, targets, logps, SLOPE=slope, BLOCK=BLOCK, num_warps=WARPS
        )
    return logps, logits if slope else None
