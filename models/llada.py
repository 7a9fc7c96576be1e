"""LLaDA (ML-GSAI/LLaDA, arXiv 2502.09992; 1.5: 2505.19223): a bidirectional LLaMA, a masked diffusion language model.

Every token sees every other: there is no causal mask and no block. Logits at position i are about token i: there is no shift.
Module and parameter names are the official ones, so that safetensors files load and save without a table of names: in a block
`ff_proj` is the gate, `up_proj` the up and `ff_out` the down projection; `model.transformer.ff_out` is the head.
"""

from dataclasses import asdict, dataclass
from functools import partial

import torch
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

    embedding_size: int  # rows of embedding and head, more than the tokenizer has tokens
    d_model: int
    mlp_hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
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
        return self.d_model // self.n_heads

    @classmethod
    def from_dict(cls, raw):
        """raw: config.json. SystemExit names missing keys and what this file does not implement."""
        fixed = {
            "activation_type": "silu", "block_group_size": 1, "block_type": "llama", "layer_norm_type": "rms",
            "layer_norm_with_affine": True, "rope": True, "rope_full_precision": True, "weight_tying": False,
        }  # fmt: skip
        no_effect = (
            "alibi_bias_max", "attention_layer_norm_with_affine", "flash_attention", "flash_attn_varlen", "init_cutoff_factor",
            "init_device", "init_fn", "init_std", "max_sequence_length", "mlp_ratio", "precision", "vocab_size",
        )  # fmt: skip
        # Where config.json is silent, the official code assumes an older architecture.
        if (
            missing := {"activation_type", "block_type", "layer_norm_type", "rope", "weight_tying"}
            - raw.keys()
        ):
            raise SystemExit(f"config.json of a llada model lacks {', '.join(sorted(missing))}")
        config = read_config(cls, raw, fixed, no_effect)
        if config.d_model % config.n_heads or config.n_heads % config.n_kv_heads:
            sizes = f"d_model = {config.d_model}, n_heads = {config.n_heads} and n_kv_heads = {config.n_kv_heads}"
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


def rope_tables(position_ids, head_dim, theta):
    """position_ids [B, T] -> cos, sin [B, 1, T, head_dim] fp32, from integers, so that no cast can round the angles."""
    frequency = frequencies(head_dim, theta, position_ids.device)
    angle = position_ids[:, None, :, None].float() * frequency  # [B, 1, T, head_dim / 2]
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotary embedding, half-split layout: dimension j pairs with j + head_dim / 2. x [B, H, T, head_dim]

    The fp32 tables carry a bf16 x into fp32; the result is rounded once.
    """
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        d, f = config.d_model, config.mlp_hidden_size
        self.layer, self.head_dim = layer, config.head_dim
        kv_size = config.n_kv_heads * self.head_dim
        self.attn_norm = RMSNorm(d, config.rms_norm_eps)
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, kv_size, bias=False)
        self.v_proj = nn.Linear(d, kv_size, bias=False)
        self.attn_out = nn.Linear(d, d, bias=False)
        self.ff_norm = RMSNorm(d, config.rms_norm_eps)
        self.ff_proj = nn.Linear(d, f, bias=False)
        self.up_proj = nn.Linear(d, f, bias=False)
        self.ff_out = nn.Linear(f, d, bias=False)

    def forward(self, x, cos, sin, attend):
        heads = lambda y: y.unflatten(-1, (-1, self.head_dim)).transpose(
            1, 2
        )  # [B, T, H h] -> [B, H, T, h]
        q, k, v = map(heads, project(self.attn_norm(x), self.q_proj, self.k_proj, self.v_proj))
        q, k = (
            rotate_heads(q, k, cos, sin)
            if is_fused(x)
            else (rotate(q, cos, sin), rotate(k, cos, sin))
        )
        y = project(attend(self.layer, q, k, v).transpose(1, 2).flatten(2), self.attn_out)[0]
        if is_fused(x):
            x, y = add_rms_norm(x, y, self.ff_norm, round_first=True)
        else:
            x = x + y
            y = self.ff_norm(x)
        return add_product(x, gated(y, self.ff_proj, self.up_proj), self.ff_out)


class LLaDA(nn.Module):
    """The language model. Its one forward is `hidden`; `logits` and `logps` are what callers use (FSDP2 forward methods)."""

    attention = "bidirectional"  # the engine that can serve it
    together = (
        ("q_proj", "k_proj", "v_proj"),
        ("ff_proj", "up_proj"),
    )  # an engine multiplies them as one
    turn_end = "<|eot_id|>"  # what ends an answer
    objective = Objective(
        1e-3, 1.0, weight="1/t", mean="answers", tail="drawn"
    )  # ML-GSAI/LLaDA, GUIDELINES.md
    lora_targets = ("q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "up_proj", "ff_out")

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.attention_backend = "auto"  # of models/attention.py
        self.mask_token_id, self.block_length = config.mask_token_id, config.block_length
        self.eos_token_ids, self.pad_token_id = [], 0  # meta_model sets them from the checkpoint
        self.activation_checkpointing = False
        self.model = nn.Module()
        self.model.transformer = nn.Module()
        self.model.transformer.wte = nn.Embedding(config.embedding_size, config.d_model)
        self.model.transformer.blocks = nn.ModuleList(
            Block(config, layer) for layer in range(config.n_layers)
        )
        self.model.transformer.ln_f = RMSNorm(config.d_model, config.rms_norm_eps)
        self.model.transformer.ff_out = nn.Linear(config.d_model, config.embedding_size, bias=False)

    @property
    def layers(self):
        return self.model.transformer.blocks

    @property
    def lm_head(self):
        return self.model.transformer.ff_out

    @property
    def fp32_modules(self):
        """Modules whose parameters stay fp32 in compute: each is an FSDP2 group of its own."""
        return []

    def hidden(self, input_ids, position_ids, attend):
        """input_ids, position_ids [B, T] -> final hidden states [B, T, D], normed.

        attend(layer, q, k, v): q [B, H, T, h] and k, v [B, K, T, h] of layer number `layer`, q and k rotated -> [B, H, T, h].
        Training passes masks, engines keep keys and values.
        """
        x = self.model.transformer.wte(input_ids)
        tables = partial(fused_tables, frequencies) if is_fused(x) else rope_tables
        cos, sin = tables(position_ids, self.config.head_dim, self.config.rope_theta)
        for layer in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, attend, use_reentrant=False)
            else:
                x = layer(x, cos, sin, attend)
        return self.model.transformer.ln_f(x)

    def head(self, hidden):
        """hidden [..., D] -> logits [..., V] in the dtype of the model."""
        return self.lm_head(hidden)

    def grid(self, valid_mask, document_ids=None):
        """valid_mask [B, T] bool -> position_ids, over valid tokens of a document, and block_ids [B, T], which are 0."""
        position_ids = positions(valid_mask, document_ids)
        return position_ids, torch.zeros_like(position_ids)

    def logits(self, input_ids, attention_mask=None):
        """[B, T] -> [B, T, V] under full attention; row i is about token i. attention_mask [B, T] bool: False on padding.

        Padding is no key, so that a padded row equals the row alone; the first official files ignore attention_mask.
        """
        valid = (
            torch.ones_like(input_ids, dtype=torch.bool)
            if attention_mask is None
            else attention_mask.bool()
        )
        position_ids, _ = self.grid(valid)
        return self.head(
            self.hidden(
                input_ids, position_ids, make_attend(bidirectional(valid), self.attention_backend)
            )
        )

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
