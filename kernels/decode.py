"""Attention of the fast samplers: a row's newest blocks, or a window of the canvas, over the KV
cache.

The Triton kernel reads of each row's cache what the row has filled; SDPA reads the full width, and
is used elsewhere.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import has_kernels

BACKENDS = [
    getattr(SDPBackend, name)
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
]
HEADS = (16, 32, 64, 128, 256)  # head sizes of the Triton kernel


def decode_attend(cache, start, block_length):
    """-> attend(layer, q, k, v) of a forward of T new tokens per row: writes k and v into the
    cache, then attends to it.

    cache: per layer k, v [R, K, width, h], rotated. start [R] int64: position of each row's first
    new token, a multiple of block_length. A new token sees all positions before start, and the new
    tokens up to the end of its own block. q [R, H, T, h]; k, v [R, K, T, h], H a multiple of K ->
    [R, H, T, h]
    """
    if has_kernels(cache[0][0]) and cache[0][0].shape[-1] in HEADS:
        from kernels import fused_triton

        return lambda layer, q, k, v: fused_triton.decode_attention(
            q, k, v, *cache[layer], start, block_length
        )
    biases = []  # of the first layer, for all: SDPA would convert a bool mask in every layer

    def attend(layer, q, k, v):
        if not biases:
            biases.append(
                visible_bias(start, q.shape[2], cache[layer][0].shape[2], block_length, q.dtype)
            )
        return decode_reference(q, k, v, *cache[layer], start, biases[0])

    return attend


def visible_bias(start, T, width, block_length, dtype):
    """-> [R, T, width]: 0 where a new token sees a position, else -inf"""
    block = torch.arange(T, device=start.device) // block_length
    end = start[:, None] + (block + 1) * block_length
    return (torch.arange(width, device=start.device) < end[..., None]).to(dtype).log()


def decode_reference(q, k, v, keys, values, start, bias):
    """The portable path. bias: of `visible_bias`; keys, values [R, K, width, h] are written."""
    rows = torch.arange(len(start), device=start.device)[:, None]
    at = start[:, None] + torch.arange(q.shape[2], device=start.device)
    keys[rows, :, at], values[rows, :, at] = k.transpose(1, 2), v.transpose(1, 2)
    return attention(q, keys, values, bias[:, None])


def window_attention(q, k, v, keys, values, columns, bias=None):
    """Attention of a window of T neighbouring columns to a whole canvas, after writing the window's
    keys and values there.

    q [R, H, T, h]; k, v [R, K, T, h], rotated, H a multiple of K; keys, values [R, K, S, h] are
    written at columns [T] int64, the same in all rows; bias [R, 1, 1, S]: -inf at padding, else 0;
    None: no padding. -> [R, H, T, h]
    """
    if has_kernels(keys) and q.shape[3] in HEADS and q.shape[2] <= 64:
        from kernels import fused_triton

        start = columns[:1].expand(len(q))
        return fused_triton.decode_attention(
            q, k, v, keys, values, start, q.shape[2], window=True, bias=bias
        )
    for kept, new in ((keys, k), (values, v)):
        kept.index_copy_(2, columns, new)
    return attention(q, keys, values, bias)


def attention(q, k, v, bias=None):
    """q [R, H, T, h]; k, v [R, K, S, h]; bias as above -> [R, H, T, h]"""
    with sdpa_kernel(BACKENDS, set_priority=True):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, enable_gqa=q.shape[1] != k.shape[1]
        )
