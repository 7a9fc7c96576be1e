"""What callers use of a model: `hidden` (the forward), `grid`, `logits` and `logps`, written once
for all families or for each kind of attention.

A family's file derives from `Bidirectional` or `BlockCausal` and adds its layers.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distributed.sequence import over_heads, own_tokens, sequence_rank, total
from models.attention import (
    Visibility,
    block_causal,
    make_attend,
    noisy_columns,
    positions,
)
from models.experts import Router
from models.layers import RMSNorm, embedding_table
from models.logps import at_least_fp32, linear_certainty, linear_logps


class LanguageModel(nn.Module):
    """What all families have in common. A family sets `turn_end` and `objective`, and has
    `block(layer)` -> the layer of that number; `embedding` and `final_norm` name two modules.
    """

    embedding, final_norm = "model.embed_tokens", "model.norm"
    eos_token_id = None  # where no official file states it
    rope_dtype = None  # of rotary tables; None: that of the hidden states
    shift = False  # token i is predicted where token i - 1 is, as in autoregressive models

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.attention_backend = "auto"  # a key of models.attention.BACKENDS
        self.mask_token_id = config.mask_token_id
        # blocks of the attention, else those of sampling alone
        self.block_length = getattr(config, "block_size", 0) or config.block_length
        self.eos_token_ids, self.pad_token_id = [], 0  # meta_model sets them from the checkpoint
        self.activation_checkpointing = False
        self.groups, self.gathers_once = [], False  # see distributed/sharding.py
        # of peft, with adapters; see models/lora.py, models/value.py
        self.lora_config = self.value_head = None
        self.sources = None, ()  # directory of the weights, directories of adapters on them
        self.build(config)

    def build(self, config):
        """Make `model` (embedding, layers, final norm) and `lm_head`, with Hugging Face's names."""
        self.model, table = nn.Module(), embedding_table(config.vocab_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = table.weight
        self.model.add_module(self.embedding.removeprefix("model."), table)
        self.model.layers = nn.ModuleList(map(self.block, range(config.num_hidden_layers)))
        self.model.norm = RMSNorm(config.hidden_size, config)

    @property
    def layers(self):
        return self.model.layers

    @property
    def fp32_modules(self):
        """Modules that compute in fp32. Under FSDP2 each of them is a group of its own."""
        return [one for one in self.modules() if isinstance(one, Router) or one is self.value_head]

    def frequency(self, exponent):
        """exponents 2 j / r [r / 2] fp32 of rotary dimensions -> radians a position"""
        return 1 / self.config.rope_theta**exponent

    def rope(self, position_ids, dtype):
        """position_ids [B, T] -> cos, sin [B, 1, T, r]; r is config.rotary_dim, else head_dim

        Angles are computed in fp32 from integers, so no cast rounds them.
        """
        r = getattr(self.config, "rotary_dim", self.config.head_dim)
        frequency = self.frequency(torch.arange(0, r, 2, device=position_ids.device).float() / r)
        angle = position_ids[:, None, :, None].float() * frequency  # [B, 1, T, r / 2]
        angle = torch.cat([angle, angle], -1)
        return (table.to(self.rope_dtype or dtype) for table in (angle.cos(), angle.sin()))

    def hidden(self, input_ids, position_ids, attend):
        """The one forward: input_ids, position_ids [B, T] -> final hidden states [B, T, D], normed

        attend(layer, q, k, v): q [B, H, T, h] and k, v [B, K, T, h] of layer number `layer`, q and
        k rotated -> [B, H, T, h]. Training passes masks in it, samplers their KV cache.
        """
        x = self.get_submodule(self.embedding)(input_ids)
        if torch.is_grad_enabled():
            x.requires_grad_()  # of a frozen embedding too: one graph then serves all blocks
        cos, sin = self.rope(position_ids, x.dtype)
        for layer in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, attend, use_reentrant=False)
            else:
                x = layer(x, cos, sin, attend)
        return self.get_submodule(self.final_norm)(x)

    def source(self, valid, document_ids=None):
        """valid [B, T] bool -> [B, T] column of the hidden state that predicts each token: its own
        or, with the shift, the last valid one before it. The first valid token of a row, or of a
        document in a packed row, has its own.
        """
        column = torch.arange(valid.shape[1], device=valid.device)
        if not self.shift:
            return column.expand_as(valid)
        latest = torch.where(valid, column, -1).cummax(1).values  # -1: no valid column so far
        before = nn.functional.pad(latest[:, :-1], (1, 0), value=-1)
        is_first = before < 0
        if document_ids is not None:
            is_first = is_first | (document_ids.gather(1, before.clamp(min=0)) != document_ids)
        return torch.where(is_first, column, before)

    def logits(self, input_ids, attention_mask=None):
        """[B, T] -> [B, T, V] under the family's own attention; row i is about token i.

        attention_mask [B, T] bool: False on padding, which is never a key, so a padded row gives
        the logits of the row alone.
        """
        valid = all_valid(attention_mask, input_ids)
        position_ids, block = self.grid(valid)
        attend = make_attend(self.visibility(block, valid), self.attention_backend)
        hidden = self.hidden(input_ids, position_ids, attend)
        return self.lm_head(hidden.gather(1, self.source(valid)[..., None].expand_as(hidden)))

    def logps(
        self, input_ids, noisy_ids, score_mask, valid_mask=None, temperature=1.0, entropy=False,
        document_ids=None, targets=None, certainty=False,
    ):  # fmt: skip
        """Log-probabilities of the clean tokens of R rows, given K noisy copies of each.

        input_ids [R, T] int64: clean tokens. noisy_ids [R, K, T] int64: the same with some replaced
        by the mask token. score_mask [R, K, L] bool: which of the last L tokens to score; copies
        without any are not computed. valid_mask [R, T] bool: False on padding. document_ids [R, T]
        int64: the document of each token in a packed row; every document is computed as if alone.
        targets [R, K, L] int64: tokens to score instead of the clean ones, or [R, K, L, k]; a
        number k: the k likeliest. The mask token has probability 0.
        -> [R, K, L] fp32 log softmax(logits / temperature), 0 where not scored, or [R, K, L, k];
        with entropy=True a pair (logps, entropy in nats), of the k likeliest one without gradient
        (logps, ids); with certainty=True what `linear_certainty` gives. What a token sees: the
        classes below. A value model gives its values instead, and 0 for entropies.
        """
        valid, (rank, N) = all_valid(valid_mask, input_ids), sequence_rank()
        T, L = noisy_ids.shape[2], score_mask.shape[2]
        scored = nn.functional.pad(score_mask, (T - L, 0))
        ids, position_ids, visibility, token, column = self.noisy_pass(
            input_ids, noisy_ids, scored, valid, document_ids
        )
        targets = input_ids[:, None, T - L :].expand_as(score_mask) if targets is None else targets
        # The head sees scored tokens alone, of --sequence-parallel N those of this rank. Before the
        # forward, because nonzero waits for the GPU.
        row, i = (scored.flatten()[token] & (column % N == rank)).nonzero(as_tuple=True)
        index = token[row, i]
        place = torch.unravel_index(index // T * L + index % T - (T - L), score_mask.shape)
        attend = over_heads(make_attend(visibility, self.attention_backend), ids.shape[1])
        hidden = self.hidden(own_tokens(ids), own_tokens(position_ids), attend)
        at = row * hidden.shape[1] + column[row, i] // N
        hidden = hidden.flatten(0, 1).index_select(0, at)
        if torch.is_tensor(targets):
            targets = targets[place]
        if self.value_head is None:
            score = linear_certainty if certainty else linear_logps
            how = temperature, self.mask_token_id, entropy
            values = score(hidden, self.lm_head.weight, targets, *how)
        else:
            values = self.value_head(hidden.to(at_least_fp32(hidden)))[:, 0]
            values = (values, torch.zeros_like(values)) if entropy else values
        # no view: FSDP2 would warn
        fill = lambda x: total(x.new_zeros(*score_mask.shape, *x.shape[1:]).index_put(place, x))
        return tuple(map(fill, values)) if isinstance(values, tuple) else fill(values)


def all_valid(mask, input_ids):
    return torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()


def span(mask):
    """mask [B, T] bool -> slice from the first to the last column that is True in any row"""
    columns = mask.any(0).nonzero()[:, 0].tolist()
    return slice(columns[0], columns[-1] + 1) if columns else slice(0)


class Bidirectional(LanguageModel):
    """Masked diffusion: all tokens of a noisy copy see each other. `logps` passes every copy as a
    row of its own.
    """

    attention = "bidirectional"  # decides which sampler serves the model

    def grid(self, valid_mask, document_ids=None):
        """valid_mask [B, T] bool -> position_ids, block_ids [B, T] int64

        Positions count the valid tokens of a document. There are no blocks: all block_ids are 0.
        """
        position_ids = positions(valid_mask, document_ids)
        return position_ids, torch.zeros_like(position_ids)

    def visibility(self, block, valid, document_ids=None):
        """Every token sees every valid one of its document."""
        pattern = "packed" if document_ids is not None else "full" if valid.all() else "padded"
        return Visibility(pattern, block, valid, document_ids)

    def noisy_pass(self, input_ids, noisy_ids, score_mask, valid, document_ids):
        """-> of a forward that scores the noisy copies ids and positions [B, S] and Visibility; of
        the tokens [B, n] that it predicts, place in the R K T tokens and column of the hidden state
        """
        _, K, T = noisy_ids.shape
        copies = score_mask.any(2).flatten().nonzero()[:, 0]  # [B]
        copies = copies if len(copies) else copies.new_zeros(1)  # FSDP: every rank runs
        columns = span(valid)
        rows = lambda x: None if x is None else x[copies // K, columns]
        noisy = noisy_ids.flatten(0, 1)[copies, columns]
        token = copies[:, None] * T + torch.arange(T, device=valid.device)[columns]
        valid, document_ids = rows(valid), rows(document_ids)
        position_ids, block = self.grid(valid, document_ids)
        seen = self.visibility(block, valid, document_ids)
        return noisy, position_ids, seen, token, self.source(valid, document_ids)


class BlockCausal(LanguageModel):
    """Block diffusion: a token sees its own block and the blocks before it, from position 0 on.

    `logps` scores every block of a noisy copy given its noisy self and the clean blocks before it,
    in one pass over [clean | noisy_1 .. noisy_K]: the clean tokens are computed once for all
    copies. With K = 1 this is how SDAR and BD3-LM train.
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

    visibility = staticmethod(block_causal)

    def noisy_pass(self, input_ids, noisy_ids, score_mask, valid, document_ids):
        """As above. Only blocks with a scored token are in the noisy copies, and the clean copy
        ends before the last of them.
        """
        R, K, T = noisy_ids.shape
        position_ids, block = self.grid(valid, document_ids)
        column = noisy_columns(score_mask, block, valid)  # [R, n]
        last = (block * score_mask.any(1)).amax(1, keepdim=True)
        clean = span(valid & (block < last))
        join = lambda x, noisy: torch.cat([x[:, clean], noisy.gather(1, column)], 1)
        both = lambda x: None if x is None else join(x, x.repeat(1, K))
        copy = torch.arange(1, K + 1, device=block.device).repeat_interleave(T).expand(R, -1)
        copy = join(torch.zeros_like(block), copy)
        seen = Visibility("copies", both(block), both(valid), both(document_ids), copy)
        ids, at = join(input_ids, noisy_ids.flatten(1)), both(position_ids)
        token = column + K * T * torch.arange(R, device=block.device)[:, None]
        noisy = torch.arange(ids.shape[1], device=block.device)[-column.shape[1] :]
        return ids, at, seen, token, noisy.expand_as(token)
