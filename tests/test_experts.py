"""models/experts.py and the routers of model files: against loops over tokens, in fp32
throughout.
"""

import math

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from models import add_lora, llada2
from models.experts import (
    Experts,
    add_routing,
    experts_grouped,
    experts_loop,
    router_metrics,
    routing_metrics,
)
from models.layers import memory_budget
from models.tensors import build_model
from models.tiny import TINY_LLADA2, TINY_SDAR, TINY_SDAR_MOE, random_model

# leading sizes, experts, D, f, k, experts in use
SIZES = [
    ((3, 7), 8, 16, 24, 2, 8),
    ((40,), 16, 32, 8, 4, 5),
    ((1,), 8, 16, 8, 1, 1),
    ((2, 1, 5), 4, 8, 8, 4, 4),
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
        (experts_loop, torch.float32, 1e-5),
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
    E, D = 64, 8
    gate_up, down = torch.full((E, 16, D), 0.25), torch.full((E, D, 8), 0.25)
    x, index, weight = (
        torch.ones(1, D),
        torch.arange(E)[None],
        torch.tensor([[1.0] + [0.001] * (E - 1)]),
    )
    want = token_by_token(
        *(v.double() if v.is_floating_point() else v for v in (x, index, weight, gate_up, down))
    )
    for compute in (experts_loop, experts_grouped):
        y = compute(x.bfloat16(), index, weight, gate_up.bfloat16(), down.bfloat16())
        assert (y.double() / want - 1).abs().max() < 0.006


def test_compiled_blocks_compute_no_grouped_product_twice():
    """A LoRA block of SDAR-30B's sizes: two forward, two for the gradients of their inputs"""
    sizes = {"hidden_size": 2048, "num_attention_heads": 32, "head_dim": 128}
    sizes |= {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    products = []

    def count(graph, inputs):
        nodes = graph.graph.nodes
        products.append(sum(node.target == torch.ops.aten._grouped_mm.default for node in nodes))
        return graph.forward

    model = add_lora(build_model(TINY_SDAR_MOE | sizes), 128, 1).bfloat16()
    with torch.device("meta"):
        x = torch.empty(8, 512, 2048, dtype=torch.bfloat16, requires_grad=True)
        tables = model.rope(torch.arange(512)[None], x.dtype)
    attend = lambda layer, *qkv: torch.ops.aten._scaled_dot_product_flash_attention(*qkv)[0]
    backend = aot_autograd(
        fw_compiler=count,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
    )
    model.layers[-1].compile(backend=backend)
    with torch._functorch.config.patch(activation_memory_budget=memory_budget(model)):
        model.layers[-1](x, *tables, attend).sum().backward()
    assert products == [2, 2]


# --- the routers ---------------------------------------------------------------------------------


def moe_of(bias, scores):
    """LLaDA2's MoE whose router gives token t the sigmoid scores scores[t], by one-hot inputs"""
    sizes = {"hidden_size": len(scores), "num_experts": len(bias), "num_experts_per_tok": 4}
    layer = llada2.MoE(llada2.Config.from_dict(TINY_LLADA2 | sizes))
    layer.gate.weight.data = torch.logit(scores).T.contiguous()
    layer.gate.expert_bias.copy_(bias)
    return layer, torch.eye(len(scores))


@pytest.mark.parametrize(
    "shift", [0.0, -2.0]
)  # all biased scores below 0: closed experts are not 0
def test_routing_of_llada2_against_loops(shift):
    """A group counts as the sum of its best two; the bias chooses and does not weigh."""
    g = torch.Generator().manual_seed(0)
    scores, bias = torch.rand(50, 16, generator=g) * 0.98 + 0.01, torch.randn(16, generator=g) * 0.2
    layer, x = moe_of(bias + shift, scores)
    index, weight = layer.route(x)
    for t, row in enumerate(scores):
        biased = (row + bias + shift).tolist()
        strength = lambda group, biased=biased: sum(sorted(biased[4 * group : 4 * group + 4])[-2:])
        groups = sorted(range(4), key=strength)[-2:]
        chosen = sorted((e for e in range(16) if e // 4 in groups), key=lambda e: biased[e])[-4:]
        assert sorted(index[t].tolist()) == sorted(chosen)
        torch.testing.assert_close(weight[t], row[index[t]] / row[chosen].sum() * 2.5)


def test_ties_give_distinct_experts_of_open_groups():
    layer, x = moe_of(torch.zeros(16), torch.full((5, 16), 0.5))
    index, weight = layer.route(x)
    for row in index.tolist():
        assert len(set(row)) == 4 and len({e // 4 for e in row}) <= 2
    assert (index == index[0]).all() and torch.equal(layer.route(x[2:3])[0][0], index[0])
    torch.testing.assert_close(weight, torch.full((5, 4), 2.5 / 4))


@torch.no_grad()
def test_sdar_chooses_experts_by_unrounded_scores():
    """bf16 activations: 5.0 and 5.001, which bf16 cannot tell apart, in either order."""
    block = random_model(TINY_SDAR_MOE, dtype=torch.bfloat16).layers[0].mlp
    x = torch.zeros(1, 96, dtype=torch.bfloat16)
    x[0, 0] = 1
    for best in range(2):
        block.gate.weight.zero_()
        block.gate.weight[:2, 0] = torch.tensor([5.0, 5.001] if best else [5.001, 5.0])
        index, weight = block.route(x)
        assert index[0].tolist() == [best, 1 - best] and weight.dtype == torch.bfloat16


# --- metrics -------------------------------------------------------------------------------------


def test_metrics_by_hand():
    """Three tokens, two experts each of four: loads 2, 3, 0, 1 of 6, mean weights (1.5, 1.25, 0,
    0.25) / 3. Of several layers the worst counts.
    """
    index = torch.tensor([[0, 1], [1, 3], [0, 1]])
    weight, sums = torch.tensor([[1.0, 1.0], [0.75, 0.25], [2.5, 0.0]]), torch.zeros(2, 4).double()
    add_routing(sums, index, weight)
    metrics = routing_metrics(sums[None])
    assert metrics["router/max_over_mean"] == pytest.approx(2)
    mean = [1.5 / 3, 1.25 / 3, 0.25 / 3]
    assert metrics["router/entropy"] == pytest.approx(-sum(p * math.log(p) for p in mean))
    one = torch.tensor([[0.0, 0, 0, 6], [1, 1, 1, 1]]).double()  # one expert; balanced weights
    metrics = routing_metrics(torch.stack([sums, one]))
    assert metrics["router/max_over_mean"] == 4
    assert metrics["router/entropy"] == pytest.approx(-sum(p * math.log(p) for p in mean))


@pytest.mark.parametrize("config", [TINY_SDAR_MOE, TINY_LLADA2], ids=["sdar-moe", "llada2"])
def test_metrics_of_a_model(config):
    """Over all forwards inside; nothing is recorded outside, nor after an error."""
    model, ids = random_model(config), torch.arange(40).view(2, 20)
    with router_metrics(model) as whole:
        model.logits(ids)
    with router_metrics(model) as parts:
        for row in ids.split(1):
            model.logits(row)
    assert parts == pytest.approx(whole) and whole["router/max_over_mean"] > 1
    assert 0 < whole["router/entropy"] < math.log(config["num_experts"])
    with router_metrics(model) as none:
        pass
    with router_metrics(random_model(TINY_SDAR)) as dense:
        pass
    assert none == dense == {}
    with pytest.raises(RuntimeError, match="inside"), router_metrics(model):
        raise RuntimeError("inside")
    assert all(module.sums is None for module in model.modules() if isinstance(module, Experts))


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
    counts = [graphs.frame_count]
    for _ in range(3):
        with router_metrics(model) as got:
            model.logits(ids)
        assert got == want
        counts.append(graphs.frame_count)
    assert counts[0] < counts[1] == counts[2] == counts[3]
    torch._dynamo.reset()


def test_metrics_are_those_of_all_ranks(run_ranks):
    model, ids = random_model(TINY_SDAR_MOE), torch.arange(40).view(2, 20)
    with router_metrics(model) as want:
        model.logits(ids)

    def body(rank, world_size):
        with router_metrics(model) as got:
            model.logits(ids[rank : rank + 1])
        assert all(got[name] == pytest.approx(want[name]) for name in want)

    run_ranks(2, body)
