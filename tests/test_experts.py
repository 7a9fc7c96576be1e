"""models/experts.py and the routers of model files: against loops over tokens, in fp32
throughout.
"""

import math

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from oracles import TINY_SDAR_MOE

from models.experts import (
    Experts,
    experts_grouped,
    experts_loop,
    router_metrics,
)
from models.tiny import random_model

# leading sizes, experts, D, f, k, experts in use
SIZES = [
    ((2, 1, 5), 8, 16, 24, 2, 8),
    ((40,), 16, 32, 8, 4, 5),
    ((1,), 8, 16, 8, 1, 1),
]


def case(lead, E, D, f, k, used, seed=0):
    """Random x, distinct experts of each token among the last `used` ones, weights, gate_up and
    down, all fp64.
    """
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)
    index = E - 1 - torch.rand(*lead, used, generator=g).argsort(-1)[..., :k]
    weight = torch.rand(*lead, k, generator=g, dtype=torch.float64)
    return (
        draw(*lead, D),
        index,
        weight,
        draw(E, 2 * f, D) / math.sqrt(D),
        draw(E, D, f) / math.sqrt(f),
    )


def token_by_token(x, index, weight, gate_up, down):
    """The definition: sum of weight * down(silu(gate x) * up x) over the experts of each token."""
    rows, f = [], down.shape[-1]
    for token, experts, weights in zip(
        x.flatten(0, -2), index.flatten(0, -2), weight.flatten(0, -2), strict=True
    ):
        y = 0
        for e, w in zip(experts.tolist(), weights, strict=True):
            y = y + w * (down[e] @ (F.silu(gate_up[e, :f] @ token) * (gate_up[e, f:] @ token)))
        rows.append(y)
    return torch.stack(rows).view(x.shape)


def outcome(compute, x, index, weight, gate_up, down, dtype):
    """-> output and gradients of x, weight, gate_up and down of a loss that treats no entry like
    another
    """
    inputs = [value.to(dtype, copy=True).requires_grad_() for value in (x, weight, gate_up, down)]
    y = compute(inputs[0], index, *inputs[1:])
    assert y.dtype == dtype and y.shape == x.shape
    slope = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return [y.detach(), *torch.autograd.grad((y.double() * slope).sum(), inputs)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    "compute, dtype, tolerance",
    [
        (experts_loop, torch.float64, 1e-12),
        (experts_grouped, torch.float32, 1e-5),
        (experts_loop, torch.bfloat16, 0.05),
        (experts_grouped, torch.bfloat16, 0.05),
    ],
)
def test_experts_and_their_gradients_are_those_of_the_definition(compute, dtype, tolerance, sizes):
    """Share of the largest entry; experts without tokens have gradient 0, not whatever lay in
    memory.
    """
    values = case(*sizes)
    for got, want in zip(
        outcome(compute, *values, dtype),
        outcome(token_by_token, *values, torch.float64),
        strict=True,
    ):
        assert (got - want).abs().max() <= tolerance * want.abs().max()
    grad_gate_up, grad_down = outcome(compute, *values, dtype)[3:]
    idle = [e for e in range(sizes[1]) if e not in values[1]]
    assert len(idle) >= sizes[1] - sizes[5]
    assert not grad_gate_up[idle].any() and not grad_down[idle].any()


def test_weighted_outputs_are_summed_in_fp32():
    """bf16: one large and many small contributions, which a sum in bf16 would lose."""
    E = 64
    x, index, weight = torch.ones(1, 8), torch.arange(E)[None], torch.full((1, E), 0.001)
    weight[0, 0] = 1
    tensors = x, index, weight, torch.full((E, 16, 8), 0.25), torch.full((E, 8, 8), 0.25)
    want = token_by_token(*tensors)
    parts = [part.bfloat16() for part in tensors[3:]]
    for compute in (experts_loop, experts_grouped):
        y = compute(x.bfloat16(), index, weight, *parts)
        assert (y / want - 1).abs().max() < 0.006


# --- metrics -------------------------------------------------------------------------------------


def test_metrics_by_hand():
    """Three tokens in two forwards, two experts each of four: loads 2, 3, 0, 1 of 6, mean weights
    (1.5, 1.25, 0, 0.25) / 3. Nothing is recorded after an error.
    """
    index = torch.tensor([[0, 1], [1, 3], [0, 1]])
    weight = torch.tensor([[1.0, 1.0], [0.75, 0.25], [2.5, 0.0]])
    experts = Experts(4, 8, 8)
    with router_metrics(experts) as metrics:
        for rows in (slice(2), slice(2, 3)):
            experts(torch.zeros(3, 8)[rows], index[rows], weight[rows])
    assert metrics["router/max_over_mean"] == pytest.approx(2)
    mean = [1.5 / 3, 1.25 / 3, 0.25 / 3]
    assert metrics["router/entropy"] == pytest.approx(-sum(p * math.log(p) for p in mean))
    with pytest.raises(RuntimeError, match="inside"), router_metrics(experts):
        raise RuntimeError("inside")
    assert experts.sums is None


def test_metrics_reach_compiled_blocks():
    """Also blocks compiled before, which do not see hooks added later; at the price of one more
    version.
    """
    model, ids = random_model(TINY_SDAR_MOE, dtype=torch.bfloat16), torch.arange(40).view(2, 20)
    with router_metrics(model) as want:
        model.logits(ids)
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("eager")
    for layer in model.layers:
        layer.compile(backend=graphs)
    model.logits(ids)
    for _ in range(2):
        with router_metrics(model) as got:
            model.logits(ids)
        assert got == want
    torch._dynamo.reset()
