"""Mixture of experts: a router that stays in fp32, and stacked experts computed by grouped matrix products.

On disk every expert has its own official tensors (`experts.3.gate_proj.weight`); in memory they are stacked, [E, out, in].
"""

import torch
import torch.nn.functional as F
from torch import nn


class Router(nn.Module):
    """Scores of all experts, fp32 weight times fp32 input: rounding flips near-tied experts. weight [E, D]

    with_bias: a selection bias `expert_bias` [E], a buffer: it is in the checkpoint but gets no gradient.
    Both keep at least fp32 whatever dtype the model is cast to, and under FSDP2 the router needs its own group (fp32_modules).
    """

    def __init__(self, num_experts, hidden_size, with_bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_experts, hidden_size, dtype=torch.float32))
        if with_bias:
            self.register_buffer("expert_bias", torch.zeros(num_experts, dtype=torch.float32))

    def _apply(self, fn, recurse=True):
        def keep(tensor):
            moved = fn(tensor)
            return moved if moved.dtype.itemsize >= tensor.dtype.itemsize else tensor.to(moved.device)

        return super()._apply(keep, recurse)

    def forward(self, x):
        """x [..., D] -> scores before the softmax or sigmoid [..., E], in at least fp32"""
        return F.linear(x.to(self.weight.dtype), self.weight)


def expert_parts(name, shape):
    """The official tensors inside a stacked one. `….experts.gate_up` [E, 2f, D] or `….experts.down` [E, D, f]

    -> [(official name, expert, rows of that expert's matrix)], or [] for the name of an ordinary tensor.
    """
    stem, _, last = name.rpartition(".")
    if not stem.endswith(".experts"):
        return []
    f = shape[1] // 2
    kinds = {"gate_up": [("gate_proj", slice(0, f)), ("up_proj", slice(f, 2 * f))], "down": [("down_proj", slice(None))]}[last]
    return [(f"{stem}.{e}.{kind}.weight", e, rows) for e in range(shape[0]) for kind, rows in kinds]


class Experts(nn.Module):
    """E gated feed-forward networks, down(silu(gate x) * up x), each token through its own k of them."""

    def __init__(self, num_experts, hidden_size, intermediate_size):
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(num_experts, 2 * intermediate_size, hidden_size))
        self.down = nn.Parameter(torch.zeros(num_experts, hidden_size, intermediate_size))

    def forward(self, x, index, weight):
        """x [..., D]; index [..., k] int64 experts of each token, weight [..., k] -> [..., D], weighted sum in fp32"""
        return experts_loop(x, index, weight, self.gate_up, self.down)


def experts_loop(x, index, weight, gate_up, down):
    """The plain reference: one expert after the other. Shapes as in Experts."""
    tokens, index, weight = x.flatten(0, -2), index.flatten(0, -2), weight.flatten(0, -2)
    y = torch.zeros(tokens.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for e in range(len(gate_up)):
        row, place = (index == e).nonzero(as_tuple=True)
        gate, up = (tokens[row] @ gate_up[e].T).chunk(2, -1)
        out = (F.silu(gate) * up) @ down[e].T
        y = y.index_add(0, row, (out * weight[row, place, None]).to(y.dtype))
    return y.to(x.dtype).view(x.shape)
