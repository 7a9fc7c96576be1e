"""LLaDA2.0 and 2.1 (inclusionAI/LLaDA2.X, arXiv 2512.15745): a block diffusion mixture of experts.

As in SDAR a token sees every token of its own block of `block_length` positions and of the blocks before it, and logits at
position i are about token i. Its own: one fused projection to queries, keys and values, rotary embedding of the first
`partial_rotary_factor` of each head alone, the first `first_k_dense_replace` blocks dense, and in the others a sigmoid router
that picks groups first, biased for balance, beside a shared expert. 2.0 and 2.1 differ in training and decoding, not in the
forward. Module and parameter names are the official ones. Unlike there the embedding has no padding_idx: the padding token
also ends the text, and its row is trained.
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
    intermediate_size: int  # of the dense blocks
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    partial_rotary_factor: float
    rope_theta: float
    rms_norm_eps: float
    first_k_dense_replace: int
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    moe_intermediate_size: int
    n_group: int  # groups of experts, of which the best topk_group are open to a token
    topk_group: int
    routed_scaling_factor: float
    mask_token_id: int = 156895  # the official config.json states neither of these
    block_size: int = 32

    def to_dict(self):
        """As transformers' configurations have it, which peft 0.14 asks for."""
        return asdict(self)

    @property
    def rotary_dim(self):
        return int(self.head_dim * self.partial_rotary_factor)

    @classmethod
    def from_dict(cls, raw):
        """raw: config.json. SystemExit names missing keys and what this file does not implement."""
        fixed = {
            "hidden_act": "silu", "moe_router_enable_expert_bias": True, "norm_topk_prob": True, "router_dtype": "fp32",
            "score_function": "sigmoid", "use_qk_norm": True, "use_rmsnorm": True,
        }  # fmt: skip
        config = read_config(cls, raw, fixed, no_effect=("output_router_logits", "rotary_dim"))
        each, left = divmod(
            config.num_experts, config.n_group
        )  # experts of a group: its score is the sum of the best two
        if (
            left
            or each < 2
            or config.topk_group > config.n_group
            or config.num_experts_per_tok > each * config.topk_group
        ):
            names = ("num_experts", "n_group", "topk_group", "num_experts_per_tok")
            counts = ", ".join(f"{name} = {getattr(config, name)}" for name in names)
            raise SystemExit(
                f"config.json has {counts}: the groups do not divide the experts, or offer too few"
            )
        if config.rotary_dim % 2:
            raise SystemExit(
                f"config.json has partial_rotary_factor = {config.partial_rotary_factor}: an odd rotary width"
            )
        if raw.get("rotary_dim", config.rotary_dim) != config.rotary_dim:
            raise SystemExit(
                f"config.json has rotary_dim = {raw['rotary_dim']}, its other keys make it {config.rotary_dim}"
            )
        return config


class RMSNorm(nn.Module):
    """x / sqrt(mean x^2 + eps) in fp32, rounded to the dtype of x, then times weight: the order of the official code."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        if is_fused(x):
            return rms_norm(x, self, round_first=True)
        if x.is_cuda:  # one kernel for seven, with the same rounding
            return self.weight * F.rms_norm(x, self.weight.shape, None, self.eps)
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(
            x.dtype
        )


def frequencies(rotary_dim, theta, device):
    """-> [rotary_dim / 2] fp32: radians a position"""
    exponent = torch.arange(0, rotary_dim, 2, device=device).float() / rotary_dim
    return 1 / theta**exponent


def rope_tables(position_ids, rotary_dim, theta, dtype):
    """position_ids [B, T] -> cos, sin [B, 1, T, rotary_dim]. Angles in fp32, from integers, so that no cast can round them."""
    frequency = frequencies(rotary_dim, theta, position_ids.device)
    angle = position_ids[:, None, :, None].float() * frequency  # [B, 1, T, rotary_dim / 2]
    angle = torch.cat([angle, angle], -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x, cos, sin):
    """Rotary embedding of the first r dimensions, dimension j paired with j + r / 2. x [B, H, T, head_dim], cos [..., T, r]"""
    turned, kept = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    a, b = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-b, a], -1) * sin, kept], -1)


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.heads = [
            config.num_attention_heads,
            config.num_key_value_heads,
            config.num_key_value_heads,
        ]
        self.query_key_value = nn.Linear(
            config.hidden_size, sum(self.heads) * config.head_dim, bias=False
        )
        self.dense = nn.Linear(
            config.num_attention_heads * config.head_dim, config.hidden_size, bias=False
        )
        self.query_layernorm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.key_layernorm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x, cos, sin, attend):
        heads = (
            project(x, self.query_key_value)[0].unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        )  # [B, H + 2 K, T, h]
        q, k, v = heads.split(self.heads, 1)
        if is_fused(x):
            q, k = norm_rotate(
                q, k, self.query_layernorm, self.key_layernorm, cos, sin, round_first=True
            )
        else:
            q, k = (
                rotate(self.query_layernorm(q), cos, sin),
                rotate(self.key_layernorm(k), cos, sin),
            )
        y = attend(self.layer, q, k, v)
        return project(y.transpose(1, 2).flatten(2), self.dense)[0]


class MLP(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x, onto=None):
        """-> the MLP of x, or onto + it"""
        y = gated(x, self.gate_proj, self.up_proj)
        return (
            project(y, self.down_proj)[0] if onto is None else add_product(onto, y, self.down_proj)
        )


class MoE(nn.Module):
    """Routed experts plus a shared one. The bias takes part in choosing experts, not in weighing them."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.gate = Router(config.num_experts, config.hidden_size, with_bias=True)
        self.experts = Experts(config.num_experts, config.hidden_size, config.moe_intermediate_size)
        self.shared_experts = MLP(
            config.hidden_size, config.moe_intermediate_size * config.num_shared_experts
        )

    def route(self, x):
        """x [..., D] -> chosen experts [..., k] int64 and their weights [..., k], at least fp32"""
        if is_fused(x) and can_route(self.gate, self.config.n_group):
            groups = self.config.n_group, self.config.topk_group
            k, scale = self.config.num_experts_per_tok, self.config.routed_scaling_factor
            return route(
                x, self.gate.weight, k, torch.float32, self.gate.expert_bias, *groups, scale
            )
        score = self.gate(x).sigmoid()
        grouped = (score + self.gate.expert_bias).unflatten(
            -1, (self.config.n_group, -1)
        )  # [..., groups, experts of each]
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.config.topk_group, dim=-1).indices
        is_closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
        open_scores = grouped.masked_fill(is_closed[..., None], float("-inf")).flatten(-2)
        index = open_scores.topk(self.config.num_experts_per_tok, dim=-1).indices
        weight = score.gather(-1, index)
        return index, weight / (
            weight.sum(-1, keepdim=True) + 1e-20
        ) * self.config.routed_scaling_factor

    def forward(self, x, onto):
        """-> onto + the experts of x, the shared one among them"""
        index, weight = self.route(x)
        if is_fused(x):
            return self.experts(x, index, weight, self.shared_experts(x), onto)
        return onto + (self.experts(x, index, weight) + self.shared_experts(x))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        is_dense = layer < config.first_k_dense_replace
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size) if is_dense else MoE(config)

    def forward(self, x, cos, sin, attend):
        y, norm = (
            self.attention(self.input_layernorm(x), cos, sin, attend),
            self.post_attention_layernorm,
        )
        if is_fused(x):
            x, y = add_rms_norm(x, y, norm, round_first=True)
        else:
            x = x + y
            y = norm(x)
        return self.mlp(y, onto=x)


class LLaDA2(nn.Module):
    """The language model. Its one forward is `hidden`; `logits` and `logps` are what callers use (FSDP2 forward methods)."""

    attention = "block-causal"  # the engine that can serve it
    turn_end = "<|role_end|>"  # what ends an answer
    objective = Objective(
        0.3, 0.8, weight="1", mean="masked", tail="block"
    )  # inclusionAI/dFactory, train_llada2_bd.py
    is_edited = True  # 2.1 was trained to replace tokens that it had revealed; 2.0 was not, and its config.json is the same
    together = (("gate_proj", "up_proj"),)  # an engine multiplies them as one
    eos_token_id = 156892  # <|endoftext|>, which no official config file states
    lora_targets = (
        "query_key_value",
        "dense",
        "gate_proj",
        "up_proj",
        "down_proj",
    )  # dense blocks' and shared experts' MLPs

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.attention_backend = "auto"  # of models/attention.py
        self.mask_token_id, self.block_length = config.mask_token_id, config.block_size
        self.eos_token_ids, self.pad_token_id = [], 0  # meta_model sets them from the checkpoint
        self.activation_checkpointing = False
        self.model = nn.Module()
        self.model.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
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
        return [layer.mlp.gate for layer in self.layers if isinstance(layer.mlp, MoE)]

    def hidden(self, input_ids, position_ids, attend):
        """input_ids, position_ids [B, T] -> final hidden states [B, T, D], normed.

        attend(layer, q, k, v): q [B, H, T, h] and k, v [B, K, T, h] of layer number `layer`, q and k rotated -> [B, H, T, h].
        Training passes masks, engines their KV cache.
        """
        x = self.model.word_embeddings(input_ids)
        tables = partial(fused_tables, frequencies) if is_fused(x) else rope_tables
        cos, sin = tables(position_ids, self.config.rotary_dim, self.config.rope_theta, x.dtype)
        for layer in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, attend, use_reentrant=False)
            else:
                x = layer(x, cos, sin, attend)
        return self.model.norm(x)

    def head(self, hidden):
        """hidden [..., D] -> logits [..., V] in at least fp32, cast after the product."""
        logits = self.lm_head(hidden)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

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
