"""Layers that several families use: RMSNorm, rotary embedding, attention, gated MLP."""

from contextlib import contextmanager

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import nn

from models.experts import experts_of


def memory_budget(model):
    """torch.compile's activation_memory_budget. 0.7 recomputes cheap operations in the backward
    pass: less memory, same speed. It takes the grouped products of a mixture for cheap; 0.9 keeps
    them.
    """
    return 0.9 if experts_of(model) else 0.7


class RMSNorm(nn.Module):
    """x / sqrt(mean x^2 + eps) * weight, computed in fp32."""

    def __init__(self, size, config):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), config.rms_norm_eps
        self.round_first = config.round_first

    def forward(self, x):
        weight = None if self.round_first else self.weight
        y = F.rms_norm(x, self.weight.shape, weight, self.eps)
        return self.weight * y if self.round_first else y


def rotate(x, cos, sin):
    """Rotary embedding, half-split layout: of the first r dimensions j pairs with j + r / 2.

    x [B, H, T, h]; cos, sin [B, 1, T, r], r <= h. Tables in fp32 raise a bf16 x to fp32, and the
    result is rounded once.
    """
    if (r := cos.shape[-1]) < x.shape[-1]:
        turned, kept = x.split([r, x.shape[-1] - r], -1)
        return torch.cat([rotate(turned, cos, sin), kept], -1)
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)


def project(x, head_dim, *linears):
    """x [B, T, D] -> the output of each linear layer, head by head [B, H, T, head_dim]"""
    return [linear(x).unflatten(-1, (-1, head_dim)).transpose(1, 2) for linear in linears]


def rotate_and_attend(layer, q, k, v, cos, sin, attend):
    """q [B, H, T, h], k and v [B, K, T, h] of layer number `layer` -> [B, T, H * h]"""
    return attend(layer, rotate(q, cos, sin), rotate(k, cos, sin), v).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Attention of most families. bias: of queries, keys and values; norm: whether every head of
    queries and keys has one
    """

    def __init__(self, config, layer, bias=False, norm=False, out_bias=False):
        super().__init__()
        D, h = config.hidden_size, config.head_dim
        self.layer, self.head_dim, self.norm = layer, h, norm
        q_size, kv_size = config.num_attention_heads * h, config.num_key_value_heads * h
        self.q_proj = nn.Linear(D, q_size, bias)
        self.k_proj = nn.Linear(D, kv_size, bias)
        self.v_proj = nn.Linear(D, kv_size, bias)
        self.o_proj = nn.Linear(q_size, D, out_bias)
        if norm:
            self.q_norm, self.k_norm = RMSNorm(h, config), RMSNorm(h, config)

    def forward(self, x, cos, sin, attend):
        q, k, v = project(x, self.head_dim, self.q_proj, self.k_proj, self.v_proj)
        if self.norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.o_proj(rotate_and_attend(self.layer, q, k, v, cos, sin, attend))


class Block(nn.Module):
    """A decoder layer of all families but LLaDA: attention, then an MLP or experts, norms before
    both.

    name: of the attention module, which differs between families
    """

    def __init__(self, config, attention, mlp, name="self_attn"):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config)
        self.add_module(name, attention)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config)
        self.mlp, self.name = mlp, name

    def forward(self, x, cos, sin, attend):
        x = x + getattr(self, self.name)(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


def embedding_table(rows, size):
    """nn.Embedding would start with random numbers, for which the meta device imports
    torch._dynamo: 1.3 s in every evaluation.
    """
    return nn.Embedding.from_pretrained(torch.empty(rows, size), freeze=False)


class MLP(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


# Sources, as torch._dynamo names them, whose sizes may differ between calls of a block: all inputs,
# but for FlexAttention's tiles, which its kernels take as constants; of the block itself the number
# of its layer, for which torch 2.11 would compile every layer.
INPUTS = r"L\['(?!self(?!.*\.layer$))(?!.*BLOCK_SIZE)"


def set_speed(model, attention, activation_checkpointing, compiled):
    """How a model that learns computes: its attention backend, whether it recomputes every block in
    the backward pass, and whether blocks are compiled: not on CPUs, where compiling costs more than
    it gains.
    """
    model.attention_backend, model.activation_checkpointing = attention, activation_checkpointing
    if not (compiled and torch.cuda.is_available()):
        return
    torch._functorch.config.activation_memory_budget = memory_budget(model)
    # Sums over the copies of a token (`Copies`) become element-wise code. As reductions over 8
    # numbers they took more than five times as long as reading their bytes does.
    from torch._inductor import async_compile, config  # not at the top: takes a second

    config.unroll_reductions_threshold = 16
    # Processes that compile kernels side by side; until they run, for seconds, torch compiles one
    # after the other. By default they start with the first graph.
    async_compile.maybe_warm_pool()
    # All numbers and lengths of rows share a graph; a single row, passes without gradient or
    # adapters need their own. By default the first call's sizes would get graphs of their own.
    torch.compiler.config.dynamic_sources = INPUTS
    torch._dynamo.config.recompile_limit = 32
    for layer in model.layers:
        layer.compile()


@contextmanager
def uncompiled(model):
    """Blocks as they are written, for a few forwards that no graph is worth."""
    compiled = {layer: layer._compiled_call_impl for layer in model.layers}
    for layer in compiled:
        layer._compiled_call_impl = None
    yield
    for layer, call in compiled.items():
        layer._compiled_call_impl = call
