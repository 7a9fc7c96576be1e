"""What callers use of a model besides its forward: `grid`, `logits` and `logps`, written once for each kind of attention.

A family's file derives from `Bidirectional` or `BlockCausal` and adds its layers, `hidden` (the forward) and `head`.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from models.attention import (
    bidirectional,
    block_causal,
    make_attend,
    positions,
    scored_columns,
    two_copy,
)
from models.logps import linear_logps, logps_and_slope_


class LanguageModel(nn.Module):
    def __init__(self, config, block_length):
        super().__init__()
        self.config = config
        self.attention_backend = "auto"  # a key of models.attention.BACKENDS
        self.logps_and_slope = logps_and_slope_  # kernels.speed_up_training replaces it on CUDA
        self.mask_token_id, self.block_length = config.mask_token_id, block_length
        self.eos_token_ids, self.pad_token_id = [], 0  # meta_model sets them from the checkpoint
        self.activation_checkpointing = False

    @property
    def layers(self):
        return self.model.layers

    @property
    def fp32_modules(self):
        """Modules that compute in fp32. Under FSDP2 each of them is a group of its own."""
        return []

    def head(self, hidden):
        """hidden [..., D] -> logits [..., V] in the dtype of the model"""
        return self.lm_head(hidden)

    def run_layers(self, x, cos, sin, attend):
        for layer in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, attend, use_reentrant=False)
            else:
                x = layer(x, cos, sin, attend)
        return x

    def score(self, hidden, index, targets, temperature, entropy):
        """The head on rows `index` alone: hidden [B, n, D], index [m], targets [B, n] -> a tuple of one or two tensors [m] fp32"""
        scored = linear_logps(
            hidden.flatten(0, 1).index_select(0, index),
            self.lm_head.weight,
            targets.flatten()[index],
            temperature=temperature,
            banned_id=self.mask_token_id,
            entropy=entropy,
            logps_and_slope=self.logps_and_slope,
        )
        return scored if entropy else (scored,)


def all_valid(mask, input_ids):
    return torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()


class Bidirectional(LanguageModel):
    """Masked diffusion: all tokens see each other, and one pass over the noisy sequence scores its masked tokens."""

    attention = "bidirectional"  # decides which sampler serves the model

    def grid(self, valid_mask, document_ids=None):
        """valid_mask [B, T] bool -> position_ids, block_ids [B, T] int64

        Positions count the valid tokens of a document. There are no blocks: all block_ids are 0.
        """
        position_ids = positions(valid_mask, document_ids)
        return position_ids, torch.zeros_like(position_ids)

    def predictions(self, input_ids, valid, document_ids=None):
        """-> hidden states [B, T, D] whose row i predicts token i"""
        attend = make_attend(bidirectional(valid, document_ids), self.attention_backend)
        return self.hidden(input_ids, self.grid(valid, document_ids)[0], attend)

    def logits(self, input_ids, attention_mask=None):
        """[B, T] -> [B, T, V] under full attention; row i is about token i. attention_mask [B, T] bool: False on padding.

        Padding is never a key, so a padded row gives the logits of the row alone.
        """
        return self.head(self.predictions(input_ids, all_valid(attention_mask, input_ids)))

    def logps(
        self, input_ids, noisy_ids, score_mask, valid_mask=None, temperature=1.0, entropy=False, document_ids=None
    ):  # fmt: skip
        """Log-probabilities of the clean tokens given the noisy sequence, in one pass over it.

        input_ids, noisy_ids [B, T] int64: clean tokens, and the same with some replaced by the mask token. score_mask [B, T]
        bool: which tokens to score. valid_mask [B, T] bool: False on padding. document_ids [B, T] int64: the document of each
        token in a packed row; every document is computed as if alone. The mask token has probability 0.
        -> [B, T] fp32 log softmax(logits / temperature), 0 where not scored; with entropy=True a pair (logps, entropy in nats).
        """
        index = score_mask.flatten().nonzero()[
            :, 0
        ]  # before the forward: nonzero waits for the GPU
        hidden = self.predictions(noisy_ids, all_valid(valid_mask, input_ids), document_ids)
        scored = self.score(hidden, index, input_ids, temperature, entropy)
        place = index // input_ids.shape[1], index % input_ids.shape[1]
        filled = [values.new_zeros(input_ids.shape).index_put(place, values) for values in scored]
        return tuple(filled) if entropy else filled[0]


class BlockCausal(LanguageModel):
    """Block diffusion: a token sees its own block and the blocks before it; the grid of blocks starts at position 0."""

    attention = "block-causal"  # decides which sampler serves the model

    def grid(self, valid_mask, document_ids=None):
        """valid_mask [B, T] bool -> position_ids, block_ids [B, T] int64, counted over valid tokens: padding shifts neither.

        Each document of a packed row starts again at position 0 and with a new block; block numbers go on through the row.
        """
        position_ids = positions(valid_mask, document_ids)
        opens_block = valid_mask & (position_ids % self.block_length == 0)
        return position_ids, (opens_block.cumsum(1) - 1).clamp(min=0)

    def logits(self, input_ids, attention_mask=None):
        """[B, T] -> [B, T, V] under block-causal attention; row i is about token i. attention_mask [B, T] bool."""
        valid = all_valid(attention_mask, input_ids)
        position_ids, block = self.grid(valid)
        attend = make_attend(block_causal(block, valid), self.attention_backend)
        return self.head(self.hidden(input_ids, position_ids, attend))

    def logps(
        self, input_ids, noisy_ids, score_mask, valid_mask=None, temperature=1.0, entropy=False, document_ids=None
    ):  # fmt: skip
        """Log-probabilities of the clean tokens of each block, given the noisy block and the clean blocks before it.

        All blocks are scored in one forward of [noisy copy | clean copy] (SDAR and BD3-LM train in this way). Arguments and
        result as in `Bidirectional.logps`.
        """
        valid = all_valid(valid_mask, input_ids)
        position_ids, block = self.grid(valid, document_ids)
        if document_ids is None:
            # The noisy copy starts at the first block in which any row scores a token: nothing before it is read.
            first_block = torch.where(score_mask, block, block.max()).amin(1, keepdim=True)
            start = int((valid & (block >= first_block)).any(0).int().argmax())
            noisy, place = lambda x: x[:, start:], lambda x: F.pad(x, (start, 0))
        else:  # prompts lie between the answers: take only the blocks of each row with a scored token
            start = scored_columns(score_mask, block, valid)
            noisy = lambda x: x.gather(1, start)
            place = lambda x: x.new_zeros(input_ids.shape).scatter(1, start, x)
        index = noisy(score_mask).flatten().nonzero()[:, 0]  # before the forward, as above
        visibility = two_copy(block, valid, start, document_ids)
        hidden = self.hidden(
            torch.cat([noisy(noisy_ids), input_ids], 1),
            torch.cat([noisy(position_ids), position_ids], 1),
            make_attend(visibility, self.attention_backend),
        )
        targets = noisy(input_ids)
        scored = self.score(hidden[:, : targets.shape[1]], index, targets, temperature, entropy)
        spread = lambda x: x.new_zeros(targets.numel()).index_copy(0, index, x).view(targets.shape)
        filled = [place(spread(values)) for values in scored]
        return tuple(filled) if entropy else filled[0]
