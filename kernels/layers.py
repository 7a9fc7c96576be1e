"""Fused decoder layers for samplers, for bf16 and fp16 on CUDA: one `hidden` for all families.

At small batches the ~30 element-wise kernels of a plain layer cost half as much as reading its
weights. Fused they are five, and projections that read the same input are one product. SDAR-8B on
one H200, ms a step at 473 positions:

    rows    plain layers and attention    fused
      16                           8.2      5.5
     128                          19.8     14.8

The kernels round where the plain layers round. Sums of squares in another order move the last bit
of a few values in a thousand.
"""

from collections import namedtuple
from types import MethodType

import torch
import torch.nn.functional as F
from torch import nn

from kernels.fused_triton import add_rms_norm, norm_rotate, silu_mul
from kernels.moe_triton import MOST, experts_fused, route_fused
from models.experts import runs_grouped
from models.layers import Attention

# Where a layer keeps its parts: norms before and after the attention, its projections, the norms of
# its heads, the MLP.
MLP = "mlp.gate_proj mlp.up_proj mlp.down_proj"
Names = namedtuple("Names", "before after qkv out head_norms mlp", defaults=("", MLP))
NORMS = "input_layernorm", "post_attention_layernorm"
QKV = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
QWEN = Names(*NORMS, QKV, "self_attn.o_proj")
QWEN3 = QWEN._replace(head_norms="self_attn.q_norm self_attn.k_norm")
FAMILIES = {  # whose attention is not that of models/layers.py
    "LLaDA2": Names(
        *NORMS, "attention.query_key_value", "attention.dense",
        "attention.query_layernorm attention.key_layernorm",
    ),
    "LLaDA": Names(
        "attn_norm", "ff_norm", "q_proj k_proj v_proj", "attn_out", mlp="ff_proj up_proj ff_out"
    ),
}  # fmt: skip


def names_of(model):
    """-> Names, or None"""
    attention = getattr(model.layers[0], "self_attn", None)
    if isinstance(attention, Attention):
        return QWEN3 if attention.norm else QWEN
    return FAMILIES.get(type(model).__name__)


def parts(module, names):
    return [module.get_submodule(name) for name in names.split()]


@torch.no_grad()
def install(model):
    """Replace the `hidden` of this model and join weights, in place."""
    names = names_of(model)
    if names is None:
        print(f"no fused layers for {type(model).__name__}: see kernels/layers.py", flush=True)
        return
    model.hidden = MethodType(hidden, model)
    for layer in model.layers:
        mlp = mlp_of(layer, names)[0]
        for linears in parts(layer, names.qkv), parts(layer, names.out), mlp[:2], mlp[2:]:
            join_weights(linears)


def mlp_of(layer, names):
    """-> [gate, up, down] of the MLP or the shared expert, or [] without; the MoE layer, or None"""
    moe = getattr(layer, "mlp", None)
    if not hasattr(moe, "experts"):
        return parts(layer, names.mlp), None
    shared = getattr(moe, "shared_experts", None)
    return parts(shared, "gate_proj up_proj down_proj") if shared else [], moe


def readers(linears):
    """What reads the input of these layers: the A of their adapters, if all have one"""
    is_adapted = linears and all(hasattr(layer, "lora_A") for layer in linears)
    return [layer.lora_A["default"] for layer in linears] if is_adapted else linears


def join_weights(linears):
    """Move weights that multiply the same input, and their biases, into one tensor, for `project`.
    Not those that are frozen, as under adapters: a learner holds them too.

    The layers keep views, so names and shapes stay and copies in place reach both.
    """
    first = readers(linears)
    is_own = all(type(layer) is nn.Linear and layer.weight.requires_grad for layer in first)
    if is_own and (first is not linears or len(first) > 1):
        first[0].joined = joined = {}
        for name, _ in first[0].named_parameters():
            values = [getattr(layer, name) for layer in first]
            joined[name] = torch.cat(values)
            for value, part in zip(values, joined[name].split([*map(len, values)]), strict=True):
                value.data = part


def project(x, linears):
    """[layer(x) for layer in linears], as one product where their weights were joined. Adapters add
    to the layer's output in one more, with alpha / rank and without rounding in between.
    """
    first = readers(linears)
    # adapters may have come later
    if not hasattr(first[0], "joined") or any(type(layer) is not nn.Linear for layer in first):
        return [layer(x) for layer in linears]
    found = F.linear(x, **first[0].joined).split([layer.out_features for layer in first], -1)
    if first is linears:
        return found
    outputs = [layer.base_layer(x) for layer in linears]
    for layer, output, low in zip(linears, outputs, found, strict=True):
        B, scale = layer.lora_B["default"].weight, layer.scaling["default"]
        output.flatten(0, -2).addmm_(low.flatten(0, -2), B.t(), alpha=scale)
    return outputs


@torch.no_grad()
def hidden(model, input_ids, position_ids, attend):
    """As the `hidden` of the family's file. Each norm also adds the output of the layer
    before it.
    """
    names, h = names_of(model), model.config.head_dim
    x = model.get_submodule(model.embedding)(input_ids)
    delta = torch.zeros_like(x)
    cos, sin = model.rope(position_ids, x.dtype)
    for number, layer in enumerate(model.layers):
        before, after = parts(layer, f"{names.before} {names.after}")
        x, y = add_rms_norm(x, delta, before)
        qkv = project(y, parts(layer, names.qkv))
        if len(qkv) == 1:  # LLaDA2 has one projection for all three
            qkv = qkv[0].split([h * heads for heads in layer.attention.heads], -1)
        q, k = norm_rotate(*qkv[:2], parts(layer, names.head_norms), cos, sin, h)
        y = attend(number, q, k, qkv[2].unflatten(-1, (-1, h)).transpose(1, 2))
        [y] = project(y.transpose(1, 2).flatten(2), parts(layer, names.out))
        x, y = add_rms_norm(x, y, after)
        linears, moe = mlp_of(layer, names)
        delta = gated(y, *linears) if linears else None
        if moe is not None:
            routed = mixture(moe, y)
            delta = routed if delta is None else routed + delta
    return add_rms_norm(x, delta, model.get_submodule(model.final_norm))[1]


def gated(x, gate, up, down):
    return project(silu_mul(*project(x, [gate, up])), [down])[0]


def mixture(moe, x):
    """The routed experts of x"""
    index, weight = route_fused(moe, x)
    experts = moe.experts
    is_much = index.numel() > MOST * len(experts.down)
    if is_much and runs_grouped(x.device):  # torch's grouped products are faster
        return experts(x, index, weight)
    return experts_fused(x, index, weight, experts.gate_up, experts.down)
