"""LLaDA (ML-GSAI/LLaDA, arXiv 2502.09992; 1.5: 2505.19223): a bidirectional LLaMA.

A masked diffusion language model: every token sees every other, without causal mask or blocks.
Logits at position i are about token i: there is no shift. Module and parameter names are the
official ones, so safetensors files need no table of names. In a block `ff_proj` is the gate,
`up_proj` the up and `ff_out` the down projection; `model.transformer.ff_out` is the head. The
forward `hidden`, `grid`, `logits` and `logps` are in models/language_model.py.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from models.config import Keys, Objective
from models.language_model import Bidirectional
from models.layers import RMSNorm, embedding_table, project, rotate_and_attend


@dataclass(frozen=True)
class Config(Keys):
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
    block_length: int = 32  # of semi-autoregressive decoding; official files state none

    # as the other families name them
    num_attention_heads = property(lambda self: self.n_heads)
    num_key_value_heads = property(lambda self: self.n_kv_heads)
    head_dim = property(lambda self: self.d_model // self.n_heads)

    fixed = {"activation_type": "silu", "block_type": "llama", "layer_norm_type": "rms"}
    fixed |= {"rope": True, "weight_tying": False}
    # Where config.json does not state these, the official code assumes an older architecture.
    needed = tuple(fixed)
    fixed |= {"block_group_size": 1, "layer_norm_with_affine": True, "rope_full_precision": True}
    no_effect = (
        "alibi_bias_max attention_layer_norm_with_affine flash_attention flash_attn_varlen "
        "init_cutoff_factor init_device init_fn init_std max_sequence_length mlp_ratio "
        "precision vocab_size"
    )


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        d, f = config.d_model, config.mlp_hidden_size
        self.layer, self.head_dim = layer, config.head_dim
        kv_size = config.n_kv_heads * self.head_dim
        self.attn_norm = RMSNorm(d, config)
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, kv_size, bias=False)
        self.v_proj = nn.Linear(d, kv_size, bias=False)
        self.attn_out = nn.Linear(d, d, bias=False)
        self.ff_norm = RMSNorm(d, config)
        self.ff_proj = nn.Linear(d, f, bias=False)
        self.up_proj = nn.Linear(d, f, bias=False)
        self.ff_out = nn.Linear(f, d, bias=False)

    def forward(self, x, cos, sin, attend):
        y = self.attn_norm(x)
        q, k, v = project(y, self.head_dim, self.q_proj, self.k_proj, self.v_proj)
        x = x + self.attn_out(rotate_and_attend(self.layer, q, k, v, cos, sin, attend))
        y = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(y)) * self.up_proj(y))


class LLaDA(Bidirectional):
    """The language model. Callers use `hidden`, `logits` and `logps`."""

    embedding, final_norm = "model.transformer.wte", "model.transformer.ln_f"
    rope_dtype = torch.float32
    turn_end = "<|eot_id|>"  # ends an answer
    # ML-GSAI/LLaDA, GUIDELINES.md
    objective = Objective(mean="answers")

    def build(self, config):
        d, rows = config.d_model, config.embedding_size
        self.model = nn.Module()
        self.model.transformer = nn.Module()
        self.model.transformer.wte = embedding_table(rows, d)
        blocks = (Block(config, layer) for layer in range(config.n_layers))
        self.model.transformer.blocks = nn.ModuleList(blocks)
        self.model.transformer.ln_f = RMSNorm(d, config)
        self.model.transformer.ff_out = nn.Linear(d, rows, bias=False)

    @property
    def layers(self):
        return self.model.transformer.blocks

    @property
    def lm_head(self):
        return self.model.transformer.ff_out
