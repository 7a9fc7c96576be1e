"""models/experts.py and the routers of model files: against loops over tokens, in fp32 throughout."""

import copy
import math

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from models import experts as moe
from models import llada2
from models.experts import (
    Experts,
    Router,
    experts_grouped,
    experts_loop,
    router_metrics,
    routing_extremes,
    routing_metrics,
    routing_sums,
)
from models.tiny import TINY_LLADA2, TINY_SDAR_MOE, random_model

# leading sizes, experts, D, f, k, experts in use
SIZES = [
    ((3, 7), 8, 16, 24, 2, 8),
    ((40,), 16, 32, 8, 4, 5),
    ((1,), 8, 16, 8, 1, 1),
    ((2, 1, 5), 4, 8, 8, 4, 4),
]


def case(lead, E, D, f, k, used, seed=0):
    """Random x, distinct experts of each token among the last `used` ones, weights, gate_up and down, all fp64."""
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
    """-> output and gradients of x, weight, gate_up and down of a loss that treats no entry like another"""
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
    """Share of the largest entry; experts without tokens have gradient 0, not whatever lay in memory."""
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
    in_bf16 = (want[0, 0] / weight.sum()).bfloat16()
    one_by_one = torch.tensor(0.0, dtype=torch.bfloat16)
    for w in weight[0]:
        one_by_one = one_by_one + (in_bf16 * w).bfloat16()
    error = lambda y: (y.double() / want - 1).abs().max()
    for compute in (experts_loop, experts_grouped):
        assert (
            error(compute(x.bfloat16(), index, weight, gate_up.bfloat16(), down.bfloat16())) < 0.006
        )
    assert error(one_by_one) > 0.03  # negative control


@pytest.mark.parametrize(
    "dtype, D, f, want",
    [
        (torch.bfloat16, 16, 24, "experts_grouped"),
        (torch.bfloat16, 12, 24, "experts_loop"),  # rows of 24 bytes: grouped_mm refuses them
        (torch.bfloat16, 16, 20, "experts_loop"),
        (torch.float32, 16, 24, "experts_loop"),
        (torch.float64, 16, 24, "experts_loop"),
    ],
)
def test_grouped_products_are_used_where_they_work(monkeypatch, dtype, D, f, want):
    x, index, weight, gate_up, down = case((5,), 8, D, f, 2, 8)
    experts = Experts(8, D, f)
    experts.gate_up.data, experts.down.data = gate_up, down
    experts, used = experts.to(dtype), []
    for name in ("experts_loop", "experts_grouped"):
        real = getattr(moe, name)
        monkeypatch.setattr(
            moe, name, lambda *args, name=name, real=real: used.append(name) or real(*args)
        )
    y = experts(x.to(dtype), index, weight.to(dtype))
    assert used == [want]
    assert (y - token_by_token(x, index, weight, gate_up, down)).abs().max() < (
        1e-5 if dtype != torch.bfloat16 else 0.1
    )


# --- the routers --------------------------------------------------------------------------------


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


def filled_router(E=8, D=16):
    router, g = Router(E, D, with_bias=True), torch.Generator().manual_seed(0)
    router.weight.data.normal_(generator=g)
    router.expert_bias.normal_(generator=g)
    return router


def test_the_router_stays_fp32():
    """'Both keep at least fp32 whatever dtype the model is cast to'; values are not rounded on the way either."""
    router = filled_router()
    for cast in (
        nn.Module.bfloat16,
        nn.Module.half,
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("cpu", torch.bfloat16),
    ):
        holder = cast(nn.ModuleDict({"gate": copy.deepcopy(router), "linear": nn.Linear(2, 2)}))
        assert holder["linear"].weight.dtype in (torch.bfloat16, torch.float16)
        for name, value in router.state_dict().items():
            assert (
                torch.equal(holder["gate"].state_dict()[name], value)
                and value.dtype == torch.float32
            )
    assert {value.dtype for value in copy.deepcopy(router).double().state_dict().values()} == {
        torch.float64
    }
    with torch.device("meta"):
        empty = Router(8, 16, with_bias=True).bfloat16()
    assert {value.device.type for value in empty.state_dict().values()} == {"meta"}
    for value in empty.to_empty(device="cpu").state_dict().values():
        assert value.dtype == torch.float32 and value.device.type == "cpu"


def _sharded_router(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    whole, x = (
        filled_router(E=7),
        torch.randn(5, 16, generator=torch.Generator().manual_seed(rank)).bfloat16(),
    )
    whole(x).square().sum().backward()
    for has_own_group in (True, False):
        block = nn.Sequential(filled_router(E=7), nn.Identity())
        if has_own_group:
            fully_shard(block[0], mesh=mesh)
        fully_shard(block, mesh=mesh, mp_policy=policy)
        scores = block(x)
        # in the block's group the router computes in bf16: the negative control
        assert (scores.dtype == torch.float32) == has_own_group
        if has_own_group:
            assert torch.equal(scores, whole(x))
            scores.square().sum().backward()
            mean = whole.weight.grad.clone()
            torch.distributed.all_reduce(mean)
            torch.testing.assert_close(block[0].weight.grad.full_tensor(), mean / world_size)
            block.to(torch.bfloat16)
            assert block[0].weight.dtype == block[0].expert_bias.dtype == torch.float32


def test_a_sharded_router_computes_in_fp32(run_ranks):
    """FSDP2 with bf16 compute: in its own group the router gives the scores and gradients of the unsharded one."""
    run_ranks(2, _sharded_router)


# --- metrics -----------------------------------------------------------------------------------------------------------------


def test_metrics_by_hand():
    """Three tokens, two experts each of four: loads 2, 3, 0, 1 of 6, mean distribution (1.5, 1.25, 0, 0.25) / 3."""
    index, weight = (
        torch.tensor([[0, 1], [1, 3], [0, 1]]),
        torch.tensor([[1.0, 1.0], [0.75, 0.25], [2.5, 0.0]]),
    )
    metrics = routing_metrics(routing_sums(index, weight, 4))
    torch.testing.assert_close(metrics["load"], torch.tensor([2, 3, 0, 1], dtype=torch.float64) / 6)
    assert metrics["max_over_mean"] == pytest.approx(2)
    mean = [1.5 / 3, 1.25 / 3, 0.25 / 3]
    assert metrics["entropy"] == pytest.approx(-sum(p * math.log(p) for p in mean))


@pytest.mark.parametrize("config", [TINY_SDAR_MOE, TINY_LLADA2], ids=["sdar-moe", "llada2"])
def test_metrics_of_a_model(config, monkeypatch):
    """One entry a MoE layer, over all forwards inside; nothing is recorded outside, not even after an error."""
    model, ids = random_model(config), torch.arange(40).view(2, 20)
    names = [
        f"model.layers.{i}.mlp.experts" for i in range(config.get("first_k_dense_replace", 0), 2)
    ]
    calls, real = [], moe.experts_loop
    monkeypatch.setattr(moe, "experts_loop", lambda *args: calls.append(args[1:3]) or real(*args))
    before = model.logits(ids)
    assert len(calls) == len(names)
    calls.clear()
    with router_metrics(model) as metrics:
        assert torch.equal(model.logits(ids), before)
        model.logits(ids[:1, :9] + 50)
    assert list(metrics) == names and len(calls) == 2 * len(names)
    for i, name in enumerate(names):
        sums = sum(routing_sums(*call, config["num_experts"]) for call in calls[i :: len(names)])
        want = routing_metrics(sums)
        assert torch.equal(metrics[name].pop("load"), want.pop("load")) and metrics[name] == want
        assert 0 < want["entropy"] < math.log(config["num_experts"]) and want["max_over_mean"] > 1
    with pytest.raises(RuntimeError, match="inside"), router_metrics(model):
        raise RuntimeError("inside")
    assert all(module.sums is None for module in model.modules() if isinstance(module, Experts))
    with router_metrics(model) as metrics:
        pass
    assert metrics == {}


def test_metrics_reach_compiled_blocks():
    """A block that was compiled before is watched too: a forward hook that comes later would not be called."""
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
        assert got.keys() == want.keys() and all(
            torch.equal(got[name]["load"], want[name]["load"]) for name in want
        )
        counts.append(graphs.frame_count)
    assert (
        counts[0] < counts[1] == counts[2] == counts[3]
    )  # watching costs one more version, not one each time
    torch._dynamo.reset()


def _watched_ranks(rank, world_size):
    model, ids = random_model(TINY_SDAR_MOE), torch.arange(40).view(2, 20)
    with router_metrics(model) as metrics:
        model.logits(ids[rank : rank + 1])
    whole = model.layers[0].mlp.experts
    whole.sums = torch.zeros(2, 8, dtype=torch.float64)
    for row in ids.split(1):
        model.logits(row)
    sums, whole.sums = whole.sums, None
    got, want = metrics["model.layers.0.mlp.experts"], routing_metrics(sums)
    torch.testing.assert_close(got["load"], want["load"])
    assert got["entropy"] == pytest.approx(want["entropy"]) and got[
        "max_over_mean"
    ] == pytest.approx(want["max_over_mean"])


def test_metrics_are_those_of_all_ranks(run_ranks):
    """Two ranks with a row each: the load of both rows, on both ranks."""
    run_ranks(2, _watched_ranks)
