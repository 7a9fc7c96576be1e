"""What callers use of a model: `hidden` (the forward), `grid`, `logits` and `logps`, written once
for all families or for each kind of attention.

A family's file derives from `Bidirectional` or `BlockCausal` and adds its layers.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from models.attention import (
    bidirectional,
    block_causal,
    make_attend,
    noisy_columns,
    positions,
    two_copy,
)
from models.experts import Router
from models.layers import rope_tables
from models.logps import linear_logps


class LanguageModel(nn.Module):
    """What all families have in common. A family sets `model`, `lm_head` (its layers, its head),
    `lora_targets`, `turn_end` and `objective`; `embedding` and `final_norm` name two modules.
    """

    embedding, final_norm = "model.embed_tokens", "model.norm"
    rope_dtype = None  # of rotary tables; None: that of the hidden states

    def __init__(self, config, block_length):
        super().__init__()
        self.config = config
        self.attention_backend = "auto"  # a key of models.attention.BACKENDS
        self.mask_token_id, self.block_length = config.mask_token_id, block_length
        self.eos_token_ids, self.pad_token_id = [], 0  # meta_model sets them from the checkpoint
        self.activation_checkpointing = False

    @property
    def layers(self):
        return self.model.layers

    @property
    def fp32_modules(self):
        """Modules that compute in fp32. Under FSDP2 each of them is a group of its own."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def head(self, hidden):
        """hidden [..., D] -> logits [..., V] in the dtype of the model"""
        return self.lm_head(hidden)

    def frequency(self, exponent):
        """exponents 2 j / r [r / 2] fp32 of rotary dimensions -> radians a position"""
        return 1 / self.config.rope_theta**exponent

    def rope(self, position_ids, dtype):
        """position_ids [B, T] -> cos, sin [B, 1, T, r]; r is config.rotary_dim, else head_dim"""
        size = getattr(self.config, "rotary_dim", self.config.head_dim)
        return rope_tables(position_ids, size, self.frequency, self.rope_dtype or dtype)

    def hidden(self, input_ids, position_ids, attend):
        """The one forward: input_ids, position_ids [B, T] -> final hidden states [B, T, D], normed

        attend(layer, q, k, v): q [B, H, T, h] and k, v [B, K, T, h] of layer number `layer`, q and
        k rotated -> [B, H, T, h]. Training passes masks in it, samplers their KV cache.
        """
        x = self.get_submodule(self.embedding)(input_ids)
        cos, sin = self.rope(position_ids, x.dtype)
        for layer in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, attend, use_reentrant=False)
            else:
                x = layer(x, cos, sin, attend)
        return self.get_submodule(self.final_norm)(x)

    def predictions(self, input_ids, valid, document_ids=None):
        """-> hidden states [B, T, D] whose row i predicts token i"""
        position_ids, block = self.grid(valid, document_ids)
        attend = make_attend(self.visibility(block, valid, document_ids), self.attention_backend)
        return self.hidden(input_ids, position_ids, attend)

    def logits(self, input_ids, attention_mask=None):
        """[B, T] -> [B, T, V] under the family's own attention; row i is about token i.

        attention_mask [B, T] bool: False on padding, which is never a key, so a padded row gives
        the logits of the row alone.
        """
        return self.head(self.predictions(input_ids, all_valid(attention_mask, input_ids)))

    def logps(
        self, input_ids, noisy_ids, score_mask, valid_mask=None, temperature=1.0, entropy=False,
        document_ids=None,
    ):  # fmt: skip
        """Log-probabilities of clean tokens, given the noisy tokens as the class below describes.

        input_ids, noisy_ids [B, T] int64: clean tokens, and the same with some replaced by the mask
        token. score_mask [B, T] bool: which tokens to score. valid_mask [B, T] bool: False on
        padding. document_ids [B, T] int64: the document of each token in a packed row; every
        document is computed as if alone. The mask token has probability 0.
        -> [B, T] fp32 log softmax(logits / temperature), 0 where not scored; with entropy=True a
        pair (logps, entropy in nats).
        """
        valid = all_valid(valid_mask, input_ids)
        columns, forward = self.noisy_pass(score_mask, valid, document_ids)
        # Before the forward, because nonzero waits for the GPU.
        row, place = score_mask.gather(1, columns).nonzero(as_tuple=True)
        at = row, columns[row, place]
        hidden = forward(input_ids, noisy_ids)
        scored = linear_logps(
            # [n, D]: the head sees scored rows alone
            hidden.flatten(0, 1).index_select(0, row * hidden.shape[1] + place),
            self.lm_head.weight,
            input_ids[at],
            temperature=temperature,
            banned_id=self.mask_token_id,
            entropy=entropy,
        )
        spread = lambda values: values.new_zeros(valid.shape).index_put(at, values)
        return tuple(map(spread, scored)) if entropy else spread(scored)


def all_valid(mask, input_ids):
    return torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()


class Bidirectional(LanguageModel):
    """Masked diffusion: all tokens see each other, and one pass over the noisy sequence
    scores it.
    """

    attention = "bidirectional"  # decides which sampler serves the model

    def grid(self, valid_mask, document_ids=None):
        """valid_mask [B, T] bool -> position_ids, block_ids [B, T] int64

        Positions count the valid tokens of a document. There are no blocks: all block_ids are 0.
        """
        position_ids = positions(valid_mask, document_ids)
        return position_ids, torch.zeros_like(position_ids)

    def visibility(self, block, valid, document_ids):
        return bidirectional(valid, document_ids)

    def noisy_pass(self, score_mask, valid, document_ids):
        """-> columns [B, n] of which the forward takes noisy tokens; forward: clean, noisy [B, T]
        -> hidden states [B, n or more, D], those of the noisy tokens first
        """
        columns = torch.arange(valid.shape[1], device=valid.device).expand_as(valid)
        return columns, lambda clean, noisy: self.predictions(noisy, valid, document_ids)


class BlockCausal(LanguageModel):
    """Block diffusion: a token sees its own block and the blocks before it, from position 0 on.

    `logps` scores every block given its noisy self and the clean blocks before it, all in one
    forward of [noisy copy | clean copy], as SDAR and BD3-LM train.
    """

    attention = "block-causal"  # decides which sampler serves the model

    def grid(self, valid_mask, document_ids=None):
        """valid_mask [B, T] bool -> position_ids, block_ids [B, T] int64

        Both count valid tokens, so padding shifts neither. Each document of a packed row starts
        again at position 0 and with a new block; block numbers go on through the row.
        """
        position_ids = positions(valid_mask, document_ids)
        opens_block = valid_mask & (position_ids % self.block_length == 0)
        return position_ids, (opens_block.cumsum(1) - 1).clamp(min=0)

    def visibility(self, block, valid, document_ids):
        return block_causal(block, valid, document_ids)

    def noisy_pass(self, score_mask, valid, document_ids):
        position_ids, block = self.grid(valid, document_ids)
        columns = noisy_columns(score_mask, block, valid, document_ids)
        attend = make_attend(two_copy(block, valid, columns, document_ids), self.attention_backend)
        twice = lambda noisy, clean: torch.cat([noisy.gather(1, columns), clean], 1)
        at = twice(position_ids, position_ids)
        return columns, lambda clean, noisy: self.hidden(twice(noisy, clean), at, attend)
