"""Attention of cached decoding: of a row's newest blocks to the keys and values before them, or of a window to all."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import has_kernels

BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
HEADS = (16, 32, 64, 128, 256)  # sizes of heads that the Triton kernel takes


def decode_attend(cache, start, block_length):
    """-> attend(layer, q, k, v) of a forward over T new tokens a row: writes k and v into the cache, then attends to it.

    cache: per layer k, v [R, K, width, h], rotated. start [R] int64: position of each row's first new token, a whole number of
    blocks. A new token sees all positions before start, and new tokens of its own block and those before. Triton on CUDA in
    bf16 and fp16, which reads of each row what is before start; else SDPA, which reads all of the width. q [R, H, T, h];
    k, v [R, K, T, h], H a multiple of K -> [R, H, T, h]
    """
    if has_kernels(cache[0][0]) and cache[0][0].shape[-1] in HEADS:
        from kernels import fused_triton  # here: machines without a GPU have no Triton

        return lambda layer, q, k, v: fused_triton.decode_attention(
            q, k, v, *cache[layer], start, block_length
        )
    biases = {}  # made once, as a bool mask would be turned into it in every layer

    def attend(layer, q, k, v):
        if not biases:
            biases[None] = visible_bias(
                start, q.shape[2], cache[layer][0].shape[2], block_length, q.dtype
            )
        return decode_reference(q, k, v, *cache[layer], start, biases[None])

    return attend


def visible_bias(start, T, width, block_length, dtype):
    """-> [R, T or 1, width]: 0 where a new token sees a position, else -inf; one row of it if all see the same"""
    first = (
        torch.arange(0, T, block_length, device=start.device)
        if T <= block_length
        else torch.arange(T, device=start.device)
    )
    end = start[:, None] + (first // block_length + 1) * block_length  # [R, T or 1]
    visible = torch.arange(width, device=start.device) < end[..., None]
    return torch.zeros(visible.shape, dtype=dtype, device=start.device).masked_fill(
        ~visible, float("-inf")
    )


def decode_reference(q, k, v, keys, values, start, bias):
    """The portable path: every device and dtype. bias: of `visible_bias`; keys, values [R, K, width, h] are written."""
    rows = torch.arange(len(start), device=start.device)[:, None]
    at = start[:, None] + torch.arange(q.shape[2], device=start.device)
    keys[rows, :, at], values[rows, :, at] = k.transpose(1, 2), v.transpose(1, 2)
    # Heads that share keys become queries of one head; token by token, so that the bias of a token is repeated in place.
    grouped = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [R, K, H / K T, h]
    bias = (bias.repeat(1, q.shape[1] // k.shape[1], 1) if bias.shape[1] > 1 else bias)[:, None]
    with sdpa_kernel(BACKENDS, set_priority=True):
        y = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias)
    y = y.unflatten(2, (-1, q.shape[2])).permute(
        0, 3, 1, 2, 4
    )  # [R, T, K, H / K, h], the order of o_proj's inputs
    return y.flatten(2, 3).transpose(1, 2)


def window_attention(q, k, v, keys, values, columns, bias=None):
    """Attention of a window of T neighbouring columns to all of a canvas, whose keys and values are renewed there first.

    q [R, H, T, h]; k, v [R, K, T, h], rotated, H a multiple of K; keys, values [R, K, S, h] are written at columns [T] int64,
    the same of all rows; bias [R, 1, 1, S]: -inf at columns that nobody sees, 0 at the others, of which each row has some;
    None: all are seen. -> [R, H, T, h]. Triton on CUDA in bf16 and fp16 for windows of up to 64 columns, else SDPA
    """
    if has_kernels(keys) and q.shape[3] in HEADS and q.shape[2] <= 64:
        from kernels import fused_triton

        start = columns[:1].expand(len(q))
        return fused_triton.decode_attention(
            q, k, v, keys, values, start, q.shape[2], window=True, bias=bias
        )
    return window_reference(q, k, v, keys, values, columns, bias)


def window_reference(q, k, v, keys, values, columns, bias=None):
    """The portable path of `window_attention`: every device and dtype."""
    for kept, new in ((keys, k), (values, v)):
        kept.index_copy_(2, columns, new)
    return attention(q, keys, values, bias)


def attention(q, k, v, bias=None):
    """q [R, H, T, h]; k, v [R, K, S, h]; bias as above -> [R, H, T, h]"""
    with sdpa_kernel(BACKENDS, set_priority=True):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, enable_gqa=q.shape[1] != k.shape[1]
        )
