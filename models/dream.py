"""Dream (DreamLM/Dream, arXiv 2508.15487): Qwen2.5 made bidirectional, a masked diffusion language model.

Every token sees every other: there is no causal mask and no block. Dream started from an autoregressive model and kept its
alignment: the hidden state of token i - 1 predicts token i, and that of the first token predicts the first token too. This
shift happens here, in `align`, so that row i of `logits` and `logps` is about token i. Module and parameter names are the
official ones, so that safetensors files load and save without a table of names. The official code keeps the embedding of the
padding token, which also ends a text, out of training (padding_idx); here it learns.
"""

from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from kernels.fused import (
    add_product,
    add_rms_norm,
    fused_tables,
    gated,
    is_fused,
    project,
    rms_norm,
    rotate_heads,
)
from models.attention import bidirectional, make_attend, positions
from models.config import Objective, read_config
from models.logps import linear_logps


@dataclass(frozen=True)
class Config:
    """The keys of config.json that this architecture reads."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rms_norm_eps: float
    rope_theta: float
    mask_token_id: int
    block_length: int = (
        32  # of semi-autoregressive decoding, in no official file: the model itself has no blocks
    )

    def to_dict(self):
        """As transformers' configurations have it, which peft 0.14 asks for."""
        return asdict(self)

    @property
    def head_dim(self):
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_dict(cls, raw):
        """raw: config.json. SystemExit names missing keys and what this file does not implement."""
        fixed = {
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "rope_scaling": None,
        }
        config = read_config(cls, raw, fixed)
        d, heads, kv_heads = (
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
        )
        if d % heads or heads % kv_heads:
            sizes = f"hidden_size = {d}, num_attention_heads = {heads} and num_key_value_heads = {kv_heads}"
            raise SystemExit(f"config.json has {sizes}: each must be a multiple of the next")
        return config


class RMSNorm(nn.Module):
    """x / sqrt(mean x^2 + eps) in fp32, rounded to the dtype of x, then times weight: the order of the official code."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        if is_fused(x):
            return rms_norm(x, self, round_first=True)
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(
            x.dtype
        )


def frequencies(head_dim, theta, device):
    """-> [head_dim / 2] fp32: radians a position"""
    exponent = torch.arange(0, head_dim, 2, device=device).float() / head_dim
    return 1 / theta**exponent


def rope_tables(position_ids, head_dim, theta, dtype):
    """position_ids [B, T] -> cos, sin [B, 1, T, head_dim]. Angles in fp32, from integers, so that no cast can round them."""
    frequency = frequencies(head_dim, theta, position_ids.device)
    angle = position_ids[:, None, :, None].float() * frequency  # [B, 1, T, head_dim / 2]
    angle = torch.cat([angle, angle], -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x, cos, sin):
    """Rotary embedding, half-split layout: dimension j pairs with j + head_dim / 2. x [B, H, T, head_dim]"""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, kv_size)
        self.v_proj = nn.Linear(config.hidden_size, kv_size)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x, cos, sin, attend):
        heads = lambda y: y.unflatten(-1, (-1, self.head_dim)).transpose(
            1, 2
        )  # [B, T, H h] -> [B, H, T, h]
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        q, k = (
            rotate_heads(q, k, cos, sin)
            if is_fused(x)
            else (rotate(q, cos, sin), rotate(k, cos, sin))
        )
        return project(attend(self.layer, q, k, v).transpose(1, 2).flatten(2), self.o_proj)[0]


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x, onto):
        """-> onto + the MLP of x"""
        return add_product(onto, gated(x, self.gate_proj, self.up_proj), self.down_proj)


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, cos, sin, attend):
        y, norm = (
            self.self_attn(self.input_layernorm(x), cos, sin, attend),
            self.post_attention_layernorm,
        )
        if is_fused(x):
            x, y = add_rms_norm(x, y, norm, round_first=True)
        else:
            x = x + y
            y = norm(x)
        return self.mlp(y, onto=x)


class Dream(nn.Module):
    """The language model. Its one forward is `hidden`; `logits` and `logps` are what callers use (FSDP2 forward methods)."""

    attention = "bidirectional"  # the engine that can serve it
    together = (("gate_proj", "up_proj"),)  # an engine multiplies them as one
    turn_end = "<|im_end|>"  # what ends an answer
    # DreamLM/Dream, src/trainer/fsdp_sft_trainer.py; there the mean is over masked tokens (docs/algos/sft.md, detail 5)
    objective = Objective(1e-3, 1.0, weight="1/t", mean="tokens", tail="drawn", has_cart=True)
    lora_targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.attention_backend = "auto"  # of models/attention.py
        self.mask_token_id, self.block_length = config.mask_token_id, config.block_length
        self.eos_token_ids, self.pad_token_id = [], 0  # meta_model sets them from the checkpoint
        self.activation_checkpointing = False
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(
            Block(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.model.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def layers(self):
        return self.model.layers

    @property
    def fp32_modules(self):
        """Modules whose parameters stay fp32 in compute: each is an FSDP2 group of its own."""
        return []

    def hidden(self, input_ids, position_ids, attend):
        """input_ids, position_ids [B, T] -> final hidden states [B, T, D], normed, where they are computed: not shifted.

        attend(layer, q, k, v): q [B, H, T, h] and k, v [B, K, T, h] of layer number `layer`, q and k rotated -> [B, H, T, h].
        Training passes masks, engines keep keys and values.
        """
        x = self.model.embed_tokens(input_ids)
        tables = partial(fused_tables, frequencies) if is_fused(x) else rope_tables
        cos, sin = tables(position_ids, self.config.head_dim, self.config.rope_theta, x.dtype)
        for layer in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, attend, use_reentrant=False)
            else:
                x = layer(x, cos, sin, attend)
        return self.model.norm(x)

    def align(self, hidden, valid_mask, document_ids=None):
        """The shift: hidden [B, T, D], valid_mask [B, T] bool -> [B, T, D] whose row i is about token i, as `head` takes it.

        Row i is that of the last valid token before i; the first valid token, of each document in a packed row, keeps its own.
        To align some columns alone, pass the column before them as well and drop the first row of the result.
        """
        column = torch.arange(hidden.shape[1], device=hidden.device)
        latest = (
            torch.where(valid_mask, column, -1).cummax(1).values
        )  # last valid column up to each one, -1: none
        before = F.pad(latest[:, :-1], (1, 0), value=-1)
        is_first = before < 0
        if document_ids is not None:
            is_first = is_first | (document_ids.gather(1, before.clamp(min=0)) != document_ids)
        source = torch.where(is_first, column, before)
        return hidden.gather(1, source[..., None].expand_as(hidden))

    def head(self, hidden):
        """hidden [..., D], aligned -> logits [..., V] in the dtype of the model."""
        return self.lm_head(hidden)

    def grid(self, valid_mask, document_ids=None):
        """valid_mask [B, T] bool -> position_ids, over valid tokens of a document, and block_ids [B, T], which are 0."""
        position_ids = positions(valid_mask, document_ids)
        return position_ids, torch.zeros_like(position_ids)

    def logits(self, input_ids, attention_mask=None):
        """[B, T] -> [B, T, V] under full attention; row i is about token i. attention_mask [B, T] bool: False on padding."""
        valid = (
            torch.ones_like(input_ids, dtype=torch.bool)
            if attention_mask is None
            else attention_mask.bool()
        )
        position_ids, _ = self.grid(valid)
        hidden = self.hidden(
            input_ids, position_ids, make_attend(bidirectional(valid), self.attention_backend)
        )
        return self.head(self.align(hidden, valid))

    def logps(
        self,
        input_ids,
        noisy_ids,
        score_mask,
        valid_mask=None,
        temperature=1.0,
        entropy=False,
        document_ids=None,
    ):
        """Log-probabilities of clean tokens given the noisy sequence, in one pass over it.

        input_ids, noisy_ids [B, T] int64: clean tokens, and the same with some replaced by the mask token; score_mask [B, T]
        bool: which tokens are scored; valid_mask [B, T] bool: False on padding; document_ids [B, T] int64: where documents are
        packed into a row, which one a token is of: each is computed as if alone. The mask token has probability 0.
        -> [B, T] fp32 log softmax(logits / temperature), 0 where not scored; with entropy=True a pair (logps, entropy in nats).
        """
        valid = torch.ones_like(input_ids, dtype=torch.bool) if valid_mask is None else valid_mask
        index = score_mask.flatten().nonzero()[
            :, 0
        ]  # [n], before the forward: after it, this would wait for it
        position_ids, _ = self.grid(valid, document_ids)
        visibility = bidirectional(valid, document_ids)
        hidden = self.hidden(
            noisy_ids, position_ids, make_attend(visibility, self.attention_backend)
        )
        hidden = self.align(hidden, valid, document_ids)
        scored = linear_logps(
            hidden.flatten(0, 1).index_select(0, index),  # [n, D]: the head sees scored rows alone
            self.lm_head.weight,
            input_ids.flatten()[index],
            temperature=temperature,
            banned_id=self.mask_token_id,
            entropy=entropy,
        )
        place = index // input_ids.shape[1], index % input_ids.shape[1]
        fill = lambda values: values.new_zeros(input_ids.shape).index_put(place, values)
        return tuple(fill(values) for values in scored) if entropy else fill(scored)
