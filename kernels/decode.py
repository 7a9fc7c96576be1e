"""Attention of the fast samplers: a row's newest blocks, or a window of the canvas, over the KV
cache.

The Triton kernel reads of each row's cache what the row has filled; SDPA reads the full width, and
is used elsewhere.
"""

import torch

from kernels import has_kernels
from models.attention import fast_attention

HEADS = (16, 32, 64, 128)  # head sizes of the Triton kernel


def cached_attention(q, k, v, keys, values, start, block_length=None, bias=None):
    """Attention of T new tokens per row to the row's cache, after writing their keys and values
    there.

    q [R, H, T, h]; k, v [R, K, T, h], rotated, H a multiple of K; keys, values [R, K, S, h] are
    written from position start [R] int64 on. With block_length, of which start is a multiple, a new
    token sees all positions before start, and the new tokens up to the end of its own block.
    Without, it sees all positions but those where bias [R, 1, 1, S] is -inf and not 0; None: all.
    -> [R, H, T, h]
    """
    T, S, h = q.shape[2], *keys.shape[2:]
    if has_kernels(keys) and h in HEADS and T <= 64:
        from kernels.fused_triton import decode_attention

        return decode_attention(q, k, v, keys, values, start, block_length, bias)
    new = torch.arange(T, device=q.device)
    here = torch.arange(len(q), device=q.device)[:, None], slice(None), start[:, None] + new
    keys[here], values[here] = k.transpose(1, 2), v.transpose(1, 2)
    if block_length:
        end = start[:, None] + (new // block_length + 1) * block_length
        bias = (torch.arange(S, device=q.device) < end[..., None]).to(q.dtype).log()[:, None]
    return fast_attention(q, keys, values, bias)
