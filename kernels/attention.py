"""Attention of training and scoring: which token sees which, and the backends that compute it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Visibility:
    """Which of S tokens sees which, for every family. Padding is never seen.

    block [B, S] int64: number of each token's block, counted from the start of its row; None: all see every valid token.
    valid [B, S] bool: False on padding; None: there is none. noisy [S] bool: the noisy copy of a pass over [noisy | clean]. A
    noisy token sees noisy tokens of its own block and clean ones of earlier blocks, a clean one clean ones up to its own block.
    """

    block: torch.Tensor | None = None
    valid: torch.Tensor | None = None
    noisy: torch.Tensor | None = None

    def dense(self):
        """-> [B, S, S] bool (B = 1 without blocks and padding), True where the query sees the key; None: all see all."""
        if self.block is None:
            visible = True
        elif self.noisy is None:
            visible = self.block[:, None, :] <= self.block[:, :, None]
        else:
            q, k, from_noisy, to_noisy = self.block[:, :, None], self.block[:, None, :], self.noisy[:, None], self.noisy[None]
            visible = torch.where(from_noisy, torch.where(to_noisy, k == q, k < q), ~to_noisy & (k <= q))
        if self.valid is None:
            return None if visible is True else visible
        itself = torch.eye(self.valid.shape[1], dtype=torch.bool, device=self.valid.device)  # padding: itself, never nothing
        return self.valid[:, None] & visible | itself


def bidirectional(valid):
    """valid [B, S] bool -> Visibility in which every token sees every valid one."""
    return Visibility(valid=None if valid.all() else valid)


def block_causal(block, valid):
    """block, valid [B, S] -> Visibility of blocks that see themselves and the blocks before them."""
    return Visibility(block, None if valid.all() else valid)


def two_copy(block, valid, start):
    """Visibility of the pass over [noisy | clean]: every block is denoised given clean earlier blocks, all in one forward.

    block, valid [B, T]; the noisy copy holds columns start..T-1, so S = T - start + T.
    """
    T = block.shape[1]
    noisy = torch.arange(2 * T - start, device=block.device) < T - start
    twice = lambda values: torch.cat([values[:, start:], values], 1)
    return Visibility(twice(block), None if valid.all() else twice(valid), noisy)


def make_attend(visibility, backend="auto"):
    """-> attend(layer, q, k, v) of a forward: q [B, H, S, h], k and v [B, K, S, h], rotated -> [B, H, S, h]"""
    mask = visibility.dense()
    mask = mask if mask is None else mask[:, None]

    def attend(layer, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    return attend
