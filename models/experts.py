"""Mixture of experts: a router that stays in fp32, and stacked experts computed by grouped
products.

On disk every expert has its own official tensors (`experts.3.gate_proj.weight`); in memory they are
stacked, [E, out, in].
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from models.logps import at_least_fp32


class Router(nn.Module):
    """Scores of all experts, fp32 weight times fp32 input: rounding flips near-tied experts.

    weight [E, D]. It, and buffers that a family adds, keep at least fp32 whatever dtype the model
    is cast to; under FSDP2 the router needs its own group (fp32_modules).
    """

    def __init__(self, num_experts, hidden_size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_experts, hidden_size, dtype=torch.float32))

    def _apply(self, fn, recurse=True):
        def keep(tensor):
            moved = fn(tensor)
            is_narrower = moved.dtype.itemsize < tensor.dtype.itemsize
            return tensor.to(moved.device) if is_narrower else moved

        return super()._apply(keep, recurse)

    def forward(self, x):
        """x [..., D] -> scores before the softmax or sigmoid [..., E], in at least fp32"""
        return F.linear(x.to(self.weight.dtype), self.weight)


def expert_parts(name, shape):
    """The official tensors inside a stacked one: `experts.gate_up` [E, 2f, D], `experts.down` [E,
    D, f].

    -> [(official name, index into it: expert and rows)]; any other tensor is itself, at ()
    """
    stem, _, last = name.rpartition(".")
    if not stem.endswith(".experts"):
        return [(name, ())]
    f = shape[1] // 2
    kinds = [("gate_proj", slice(0, f)), ("up_proj", slice(f, 2 * f))]
    kinds = kinds if last == "gate_up" else [("down_proj", slice(None))]
    return [
        (f"{stem}.{e}.{kind}.weight", (e, rows)) for e in range(shape[0]) for kind, rows in kinds
    ]


class Experts(nn.Module):
    """E gated feed-forward networks, down(silu(gate x) * up x); each token goes through k
    of them.
    """

    def __init__(self, num_experts, hidden_size, intermediate_size):
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(num_experts, 2 * intermediate_size, hidden_size))
        self.down = nn.Parameter(torch.zeros(num_experts, hidden_size, intermediate_size))
        self.sums = None  # set by router_metrics; compiled blocks do not see hooks added later

    def forward(self, x, index, weight):
        """x [..., D]; index [..., k] int64: experts of each token; weight [..., k]

        -> [..., D], the weighted sum of the experts' outputs, summed in fp32
        """
        if self.sums is not None:
            add_routing(self.sums, index, weight)
        compute = experts_grouped if self.is_grouped(x.dtype) else experts_loop
        return compute(x, index, weight, self.gate_up, self.down)

    def is_grouped(self, dtype):
        """Grouped products exist for bf16 alone, and for rows of a multiple of 16 bytes."""
        return dtype == torch.bfloat16 and all(size % 8 == 0 for size in self.down.shape[1:])


def experts_of(model):
    """-> the Experts of all its layers, [] of a dense model"""
    return [module for module in model.modules() if isinstance(module, Experts)]


def runs_grouped(device):
    """Whether grouped products run without the host: on Hopper and B200. On other GPUs torch reads
    back how many rows each expert has, which a CUDA graph cannot.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


class SoftmaxMoE(nn.Module):
    """A softmax router over all experts. is_normalized: the weights of the chosen ones sum to 1."""

    def __init__(self, config, intermediate_size, is_normalized=True):
        super().__init__()
        E, D = config.num_experts, config.hidden_size
        self.top_k, self.is_normalized = config.num_experts_per_tok, is_normalized
        self.gate = Router(E, D)
        self.experts = Experts(E, D, intermediate_size)

    def route(self, x):
        """x [..., D] -> chosen experts [..., k] int64 and their weights [..., k] in the
        dtype of x
        """
        weight, index = self.gate(x).softmax(-1).topk(self.top_k, dim=-1)
        if self.is_normalized:
            weight = weight / weight.sum(-1, keepdim=True)
        return index, weight.to(x.dtype)

    def forward(self, x):
        return self.experts(x, *self.route(x))


def experts_loop(x, index, weight, gate_up, down):
    """The plain definition, one expert after the other. Shapes as in Experts."""
    tokens, index, weight = x.flatten(0, -2), index.flatten(0, -2), weight.flatten(0, -2)
    y = torch.zeros(tokens.shape, dtype=at_least_fp32(x), device=x.device)
    for e in range(len(gate_up)):
        row, place = (index == e).nonzero(as_tuple=True)
        gate, up = (tokens[row] @ gate_up[e].T).chunk(2, -1)
        out = (F.silu(gate) * up) @ down[e].T
        y = y.index_add(0, row, (out * weight[row, place, None]).to(y.dtype))
    return y.to(x.dtype).view(x.shape)


class Copies(torch.autograd.Function):
    """k copies of each of n rows, reordered: out[i] = x[order[i] // k]. x [n, D], order [n k].

    Every row has k copies, so its gradient is a gather too: torch would add it up with atomics.
    """

    @staticmethod
    def forward(ctx, x, order, inverse, k):
        """inverse: order[inverse] is 0, 1, ..."""
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse).unflatten(0, (-1, ctx.k)).sum(1), None, None, None


def experts_grouped(x, index, weight, gate_up, down):
    """The same for k copies of every token, sorted by expert: one grouped product for all experts.

    No synchronisation with the host, no atomics. The second product gets weighted inputs, so that
    no gradient needs its result.
    """
    expert, order = index.flatten().sort(stable=True)
    inverse = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=x.device))
    experts = torch.arange(len(gate_up), device=x.device)
    ends = torch.searchsorted(expert, experts, right=True, out_int32=True)
    copies = Copies.apply(x.flatten(0, -2), order, inverse, index.shape[-1])
    share = Copies.apply(weight.flatten()[:, None], order, inverse, 1)
    gate, up = F.grouped_mm(copies, gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    weighted = (F.silu(gate) * up * share).to(x.dtype)
    out = F.grouped_mm(weighted, down.transpose(1, 2), offs=ends)
    out = Copies.apply(out, inverse, order, 1).view(*index.shape, -1)
    return out.sum(-2, dtype=at_least_fp32(x)).to(x.dtype)


def add_routing(sums, index, weight):
    """sums [2, E] fp64; index, weight [..., k]: add to row 0 the tokens of each expert, to row 1
    the share of weight that they gave it.
    """
    share = weight.detach().double()
    share = share / share.sum(-1, keepdim=True)
    values = torch.stack([torch.ones_like(share), share]).flatten(1)
    sums += torch.zeros_like(sums).index_add(1, index.flatten(), values)


@contextmanager
def router_metrics(model):
    """with router_metrics(model) as metrics: ...   -> the worst values of all layers, {} without
    experts

    max_over_mean: of the experts' shares of all assignments, 1 when balanced. entropy: of the mean
    routing distribution (each token's weights, made to sum to 1), in nats; ln E when balanced.
    Filled at the end, over all tokens of all ranks' forwards inside the block. These include
    recomputed forwards, padding and the clean copy of block models, so the values depend slightly
    on the batch layout. Collective where ranks are.
    """
    metrics, modules = {}, experts_of(model)
    if not modules:
        yield metrics
        return
    try:
        for module in modules:
            device = module.down.device
            module.sums = torch.zeros(2, len(module.down), dtype=torch.float64, device=device)
        yield metrics
        sums = torch.stack([module.sums for module in modules])
        if dist.is_initialized():
            dist.all_reduce(sums)
        if sums.any():
            load, mean = (sums / sums.sum(-1, keepdim=True)).unbind(1)
            metrics["router/max_over_mean"] = (load.amax(-1) / load.mean(-1)).max().item()
            metrics["router/entropy"] = torch.special.entr(mean).sum(-1).min().item()
    finally:
        for module in modules:
            module.sums = None
