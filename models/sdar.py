"""SDAR (JetAstra/SDAR, arXiv 2510.06303): a Qwen3 decoder with block-causal attention, a block diffusion language model.

A token sees every token of its own block of `block_length` positions and of the blocks before it. The grid of blocks starts at
position 0 of the prompt. Logits at position i are about token i: there is no shift. Module and parameter names are the official
ones, so that safetensors files load and save without a table of names.
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
    norm_rotate,
    project,
    rms_norm,
)
from models.attention import block_causal, make_attend, positions, scored_columns, two_copy
from models.config import Objective, read_config
from models.experts import Experts, Router, can_route, route
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
    head_dim: int  # not hidden_size / heads: SDAR-4B has 32 heads of 128 at width 2560
    rms_norm_eps: float
    rope_theta: float
    mask_token_id: int
    block_size: int
    tie_word_embeddings: bool = False
    num_experts: int = 0  # 0: dense
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0

    def to_dict(self):
        """As transformers' configurations have it, which peft 0.14 asks for."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw):
        """raw: config.json. SystemExit names missing keys and what this file does not implement."""
        fixed = {
            "hidden_act": "silu",
            "attention_bias": False,
            "use_sliding_window": False,
            "rope_scaling": None,
        }
        if (
            raw["model_type"] == "sdar_moe"
        ):  # what config.json leaves out is the official code's default
            raw = {"mask_token_id": 151669, "block_size": 4, "norm_topk_prob": False} | raw
            needed = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
            if missing := [name for name in needed if not raw.get(name)]:
                raise SystemExit(f"config.json of a sdar_moe model lacks {', '.join(missing)}")
            if raw["num_experts_per_tok"] > raw["num_experts"]:
                counts = f"num_experts_per_tok = {raw['num_experts_per_tok']}, num_experts = {raw['num_experts']}"
                raise SystemExit(
                    f"config.json has {counts}: a token cannot use more experts than there are"
                )
            fixed |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        no_effect = (
            "debug", "ep_size", "fuse_cross_entropy", "layer_types", "micro_forward", "output_router_logits",
            "router_aux_loss_coef", "skip_checkpoint",
        )  # fmt: skip
        return read_config(cls, raw, fixed, no_effect)


class RMSNorm(nn.Module):
    """x / sqrt(mean x^2 + eps) * weight, in fp32 and rounded once (as the fused kernel of the official code)."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        if is_fused(x):
            return rms_norm(x, self)
        if x.is_cuda:  # one kernel for eight, with the same rounding
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(
            x.dtype
        )


def frequencies(head_dim, theta, device):
    """-> [head_dim / 2] fp32: radians a position"""
    exponent = torch.arange(0, head_dim, 2, device=device).float() / head_dim
    return theta**-exponent


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
        q_size, kv_size = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x, cos, sin, attend):
        heads = lambda y: y.unflatten(-1, (-1, self.head_dim)).transpose(
            1, 2
        )  # [B, T, H h] -> [B, H, T, h]
        q, k, v = (heads(y) for y in project(x, self.q_proj, self.k_proj, self.v_proj))
        if is_fused(x):
            q, k = norm_rotate(q, k, self.q_norm, self.k_norm, cos, sin)
        else:
            q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        y = attend(self.layer, q, k, v)
        return project(y.transpose(1, 2).flatten(2), self.o_proj)[0]


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x, onto):
        """-> onto + the MLP of x"""
        return add_product(onto, gated(x, self.gate_proj, self.up_proj), self.down_proj)


class MoE(nn.Module):
    """Softmax router over all experts; the weights of the chosen ones are normalised."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = Router(config.num_experts, config.hidden_size)
        self.experts = Experts(config.num_experts, config.hidden_size, config.moe_intermediate_size)

    def forward(self, x, onto):
        """-> onto + the experts of x"""
        if is_fused(x) and can_route(self.gate):
            return self.experts(x, *route(x, self.gate.weight, self.top_k, x.dtype), onto)
        weight, index = self.gate(x).softmax(-1).topk(self.top_k, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        return self.experts(x, index, weight.to(x.dtype), onto)


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config) if config.num_experts else MLP(config)

    def forward(self, x, cos, sin, attend):
        y, norm = (
            self.self_attn(self.input_layernorm(x), cos, sin, attend),
            self.post_attention_layernorm,
        )
        if is_fused(x):
            x, y = add_rms_norm(x, y, norm)
        else:
            x = x + y
            y = norm(x)
        return self.mlp(y, onto=x)


class SDAR(nn.Module):
    """The language model. Its one forward is `hidden`; `logits` and `logps` are what callers use (FSDP2 forward methods)."""

    attention = "block-causal"  # the engine that can serve it
    turn_end = "<|im_end|>"  # what ends an answer
    objective = Objective(
        1e-3, 1.0, weight="1/t", mean="tokens", tail="block"
    )  # JetAstra/SDAR, training/
    together = (
        ("q_proj", "k_proj", "v_proj"),
        ("gate_proj", "up_proj"),
    )  # an engine multiplies them as one

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.lora_targets = ("q_proj", "k_proj", "v_proj", "o_proj") + (
            "gate_proj",
            "up_proj",
            "down_proj",
        ) * (not config.num_experts)
        self.attention_backend = "auto"  # of models/attention.py
        self.mask_token_id, self.block_length = config.mask_token_id, config.block_size
        self.eos_token_ids, self.pad_token_id = [], 0  # meta_model sets them from the checkpoint
        self.activation_checkpointing = False
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(
            Block(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.model.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def layers(self):
        return self.model.layers

    @property
    def fp32_modules(self):
        """Modules whose parameters stay fp32 in compute: each is an FSDP2 group of its own."""
        return [layer.mlp.gate for layer in self.layers if self.config.num_experts]

    def hidden(self, input_ids, position_ids, attend):
        """input_ids, position_ids [B, T] -> final hidden states [B, T, D], normed.

        attend(layer, q, k, v): q [B, H, T, h] and k, v [B, K, T, h] of layer number `layer`, q and k rotated -> [B, H, T, h].
        Training passes masks, engines their KV cache.
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

    def head(self, hidden):
        """hidden [..., D] -> logits [..., V] in the dtype of the model."""
        return self.lm_head(hidden)

    def grid(self, valid_mask, document_ids=None):
        """valid_mask [B, T] bool -> position_ids, block_ids [B, T], counted over valid tokens: padding shifts neither.

        Where a row holds several documents, positions start again at 0 with each, and so does the grid of blocks; their
        numbers go on.
        """
        position_ids = positions(valid_mask, document_ids)
        opens_block = valid_mask & (position_ids % self.block_length == 0)
        return position_ids, (opens_block.cumsum(1) - 1).clamp(min=0)

    def logits(self, input_ids, attention_mask=None):
        """[B, T] -> [B, T, V] under block-causal attention; row i is about token i. attention_mask [B, T] bool."""
        valid = (
            torch.ones_like(input_ids, dtype=torch.bool)
            if attention_mask is None
            else attention_mask.bool()
        )
        position_ids, block = self.grid(valid)
        return self.head(
            self.hidden(
                input_ids,
                position_ids,
                make_attend(block_causal(block, valid), self.attention_backend),
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
        """Log-probabilities of clean tokens where a block is noised, given its noisy self and the clean blocks before it.

        input_ids, noisy_ids [B, T] int64: clean tokens, and the same with some replaced by the mask token; score_mask [B, T]
        bool: which tokens are scored; valid_mask [B, T] bool: False on padding; document_ids [B, T] int64: where documents are
        packed into a row, which one a token is of: each is computed as if alone. The mask token has probability 0.
        -> [B, T] fp32 log softmax(logits / temperature), 0 where not scored; with entropy=True a pair (logps, entropy in nats).
        """
        valid = torch.ones_like(input_ids, dtype=torch.bool) if valid_mask is None else valid_mask
        position_ids, block = self.grid(valid, document_ids)
        if (
            document_ids is None
        ):  # the noisy copy starts at the first block that any row scores: nothing else of it is read
            first_block = torch.where(score_mask, block, block.max()).amin(1, keepdim=True)
            start = int((valid & (block >= first_block)).any(0).int().argmax())
            noisy, place = (
                lambda values: values[:, start:],
                lambda values: F.pad(values, (start, 0)),
            )
        else:  # prompts stand between the answers: of each row only the blocks with a scored token
            start = scored_columns(score_mask, block, valid)
            noisy = lambda values: values.gather(1, start)
            place = lambda values: values.new_zeros(input_ids.shape).scatter(1, start, values)
        index = (
            noisy(score_mask).flatten().nonzero()[:, 0]
        )  # [n], before the forward: after it, this would wait for it
        hidden = self.hidden(
            torch.cat([noisy(noisy_ids), input_ids], 1),
            torch.cat([noisy(position_ids), position_ids], 1),
            make_attend(two_copy(block, valid, start, document_ids), self.attention_backend),
        )
        targets = noisy(input_ids)
        scored = linear_logps(
            hidden[:, : targets.shape[1]]
            .flatten(0, 1)
            .index_select(0, index),  # [n, D]: the head sees scored rows alone
            self.lm_head.weight,
            targets.flatten()[index],
            temperature=temperature,
            banned_id=self.mask_token_id,
            entropy=entropy,
        )
        spread = lambda values: (
            values.new_zeros(targets.numel()).index_copy(0, index, values).view(targets.shape)
        )
        fill = lambda values: place(spread(values))
        return tuple(fill(values) for values in scored) if entropy else fill(scored)
