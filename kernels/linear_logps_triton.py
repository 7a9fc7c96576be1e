"""logps_and_slope_ of models/logps.py in one Triton kernel, which reads the logits twice and writes them once."""

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 8192, 16  # columns at a time


@triton.jit
def _kernel(logits, row_stride, V, targets, logps, SLOPE: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    logits += n * row_stride
    target = tl.load(targets + n)
    z_target = tl.load(logits + target).to(tl.float32)
    # Per column of the block, so that the loop has no reduction in it.
    peaks, sums = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        z = tl.load(logits + v, mask=v < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peaks, z)
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is NaN
        sums = sums * tl.exp(peaks - shift) + tl.exp(z - shift)
        peaks = higher
    peak = tl.max(peaks, 0)
    total = tl.sum(sums * tl.exp(peaks - peak), 0)
    tl.store(logps + n, z_target - peak - tl.log(total))
    if SLOPE:
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            z = tl.load(logits + v, mask=v < V, other=float("-inf")).to(tl.float32)
            slope = tl.where(v == target, 1.0, 0.0) - tl.exp(z - peak) / total
            tl.store(logits + v, slope.to(logits.dtype.element_ty), mask=v < V)


def logps_and_slope_(logits, targets, slope=True):
    """As in models/logps.py, for CUDA logits [n, V] with contiguous rows, in bf16, fp16 or fp32."""
    logps = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _kernel[(len(logits),)](
            logits,
            logits.stride(0),
            logits.shape[1],
            targets,
            logps,
            SLOPE=slope,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return logps, logits if slope else None
