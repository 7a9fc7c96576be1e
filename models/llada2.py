"""LLaDA2.0 and 2.1 (inclusionAI/LLaDA2.X, arXiv 2512.15745): a block diffusion mixture of experts.

As in SDAR a token sees every token of its own block of `block_length` positions and of the blocks
before it, and logits at position i are about token i. Different from SDAR: queries, keys and values
come from one projection; rotary embedding covers the first `partial_rotary_factor` of each head;
the first `first_k_dense_replace` blocks are dense; in the others a sigmoid router with a balancing
bias picks groups of experts first, and there is a shared expert. 2.0 and 2.1 differ in training and
decoding, not in the forward. Module and parameter names are the official ones. Unlike there the
embedding has no padding_idx: the padding token also ends the text, so its row is trained.
"""

from dataclasses import dataclass

import torch
from torch import nn

from models.config import DecoderKeys, Objective
from models.experts import SoftmaxMoE
from models.language_model import BlockCausal
from models.layers import MLP, Block, RMSNorm, project, rotate_and_attend


@dataclass(frozen=True)
class Config(DecoderKeys):
    """The keys of config.json that this architecture reads, besides those of every decoder."""

    intermediate_size: int
    head_dim: int
    partial_rotary_factor: float
    first_k_dense_replace: int
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    moe_intermediate_size: int
    n_group: int  # groups of experts; a token uses experts of its best topk_group groups
    topk_group: int
    routed_scaling_factor: float
    mask_token_id: int = 156895  # the official config.json states neither of these two
    block_size: int = 32

    @property
    def rotary_dim(self):
        return int(self.head_dim * self.partial_rotary_factor)

    fixed = DecoderKeys.fixed | {"router_dtype": "fp32", "score_function": "sigmoid"}
    fixed |= {"moe_router_enable_expert_bias": True, "norm_topk_prob": True}
    fixed |= {"use_qk_norm": True, "use_rmsnorm": True}
    no_effect = "output_router_logits rotary_dim"


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.head_dim, self.rotary_dim = layer, config.head_dim, config.rotary_dim
        H, K = config.num_attention_heads, config.num_key_value_heads
        self.heads = [H, K, K]
        D, h = config.hidden_size, config.head_dim
        self.query_key_value = nn.Linear(D, (H + 2 * K) * h, bias=False)
        self.dense = nn.Linear(H * h, D, bias=False)
        self.query_layernorm = RMSNorm(h, config)
        self.key_layernorm = RMSNorm(h, config)

    def forward(self, x, cos, sin, attend):
        (heads,) = project(x, self.head_dim, self.query_key_value)
        q, k, v = heads.split(self.heads, 1)  # [B, H, T, h], [B, K, T, h] twice
        q, k = self.query_layernorm(q), self.key_layernorm(k)
        # tells torch.compile that the last size of the tables is a constant
        cos, sin = (table.expand(-1, -1, -1, self.rotary_dim) for table in (cos, sin))
        return self.dense(rotate_and_attend(self.layer, q, k, v, cos, sin, attend))


class MoE(SoftmaxMoE):
    """Sigmoids in place of the softmax, groups, and a shared expert. The bias helps to choose
    experts but does not weigh them.
    """

    def __init__(self, config):
        super().__init__(config, config.moe_intermediate_size)
        self.config = config
        # in the checkpoint, but without gradient
        bias = torch.zeros(config.num_experts, dtype=torch.float32)
        self.gate.register_buffer("expert_bias", bias)
        shared_size = config.moe_intermediate_size * config.num_shared_experts
        self.shared_experts = MLP(config.hidden_size, shared_size)

    def route(self, x):
        """x [..., D] -> chosen experts [..., k] int64 and their weights [..., k], at least fp32"""
        config, score = self.config, self.gate(x).sigmoid()
        grouped = (score + self.gate.expert_bias).unflatten(-1, (config.n_group, -1))
        # A group counts as the sum of its two best experts; experts of closed groups are out.
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1).indices
        is_closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
        open_scores = grouped.masked_fill(is_closed[..., None], float("-inf")).flatten(-2)
        index = open_scores.topk(config.num_experts_per_tok, dim=-1).indices
        weight = score.gather(-1, index)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
        return index, weight

    def forward(self, x):
        return super().forward(x) + self.shared_experts(x)


class LLaDA2(BlockCausal):
    """The language model. Callers use `hidden`, `logits` and `logps`."""

    turn_end = "<|role_end|>"  # ends an answer
    # inclusionAI/dFactory, train_llada2_bd.py
    objective = Objective(mean="masked", t_min=0.3, t_max=0.8, weight="1")
    # 2.1 was trained to replace revealed tokens; 2.0, with the same config, was not
    is_edited = True
    embedding = "model.word_embeddings"
    eos_token_id = 156892  # <|endoftext|>, which no official config file states

    def block(self, layer):
        config, is_dense = self.config, layer < self.config.first_k_dense_replace
        mlp = MLP(config.hidden_size, config.intermediate_size) if is_dense else MoE(config)
        return Block(config, Attention(config, layer), mlp, "attention")
