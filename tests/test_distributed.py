"""FSDP2 on gloo: two ranks and two nodes equal one rank; the known traps: stale root, sync."""

import math
from types import SimpleNamespace

import pytest
import torch
from oracles import MASK, tiny_model
from test_models import ragged
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from algos import d1
from distributed.groups import StepMetrics
from distributed.sharding import reduce_gradients
from evals import mean_score
from models import add_lora
from models.lora import adapter_tensors
from rollout import make_engine, sync_engine

EXPERTS = {"model_type": "sdar_moe", "num_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 16, "norm_topk_prob": True}


def batch_of(rows=8):
    return ragged([12 - row % 4 for row in range(rows)], mask=MASK)


def accumulate(model, batch, scale=1.0, every=False):
    """A gradient accumulated over micro-batches of one row, as the scripts do it."""
    for i in range(len(batch[0])):
        reduce_gradients(model, i + 1 == len(batch[0]), every)
        (-model.logps(*(tensor[i : i + 1] for tensor in batch)).sum() * scale).backward()


def test_sums_without_a_weight_are_refused(monkeypatch):
    monkeypatch.setattr("distributed.groups.all_reduce", lambda sums: sums)
    sums, norm = StepMetrics({"policy/x": 6.0, "loss/total": 1}), SimpleNamespace(item=lambda: 2.0)
    norm.full_tensor = lambda: norm
    with pytest.raises(SystemExit, match="no policy/weight to divide by"):
        sums.reduce(1, norm)
    sums["policy/weight"] = 3.0
    assert sums.reduce(1, norm) == {"policy/x": 2.0, "loss/total": 1, "optim/grad_norm": 2.0}


def adapted(lora_rank, **config):
    """-> a model, with adapters of this rank that matter, if any"""
    model = tiny_model(**config)
    if lora_rank:
        add_lora(model, lora_rank, 8, dtype=torch.float64)
        for value in adapter_tensors(model).values():
            value.add_(0.1)
    return model


@pytest.mark.parametrize(
    "nodes, gpu_bytes, lora_rank",
    [(1, 0, 0), (2, 0, 0), (1, 1 << 40, 0), (1, 0, 4), (2, 1 << 40, 4)],
)
def test_ranks_with_checkpointing_give_the_gradient_of_one(
    run_ranks, monkeypatch, nodes, gpu_bytes, lora_rank
):
    """Ragged masks, and a rank whose first micro-batch scores nothing: 1e-10 in fp64. Two ranks, or
    two nodes of two ranks, which hold a copy each; blocks gathered one by one, or all at once; a
    base under adapters sharded, or whole on every rank: then a sampler takes it as it is.
    """
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("distributed.sharding.cuda_bytes", lambda: gpu_bytes)

    def body(rank, world_size):
        whole, batch, share = adapted(lora_rank), batch_of(), 8 // world_size
        batch[2][4:7:2] = False
        accumulate(whole, batch)
        for every in (False, True):
            sharded = sharded_model(lora_rank, activation_checkpointing=True)
            mine = [tensor[rank * share : rank * share + share] for tensor in batch]
            accumulate(sharded, mine, world_size, every)
            sync_engine(engine := make_engine(adapted(lora_rank)), sharded, True)
            each = (net.parameters() for net in (sharded, whole, engine.model))
            for p, q, r in zip(*each, strict=True):
                is_apart = r.data_ptr() != p.data_ptr()
                assert hasattr(p, "device_mesh") == (p.requires_grad or not gpu_bytes) == is_apart
                assert torch.equal(r, q)
                assert (q.grad is not None) == p.requires_grad
                if p.requires_grad:
                    assert p.device_mesh.shape == ((2,) if nodes == 1 else (nodes, 2))
                    torch.testing.assert_close(p.grad.full_tensor(), q.grad, atol=1e-10, rtol=1e-8)

    run_ranks(2 * nodes, body)


@pytest.mark.parametrize("gpu_bytes, per_step", [(0, 4 * (2 * 2 + 1 + 1)), (1 << 40, 1)])
def test_how_often_an_optimizer_step_gathers(run_ranks, monkeypatch, gpu_bytes, per_step):
    """Four micro-batches: each of two blocks before both passes and the root before and after the
    blocks, or everything once.
    """
    monkeypatch.setattr("distributed.sharding.cuda_bytes", lambda: gpu_bytes)
    gathers, to_unsharded = [], FSDPParamGroup._to_unsharded
    spy = lambda group: gathers.append(group) or to_unsharded(group)
    monkeypatch.setattr(FSDPParamGroup, "_to_unsharded", spy)

    def body(rank, world_size):
        model = sharded_model()
        for step in (1, 2):
            accumulate(model, batch_of(4))
            assert len(gathers) == step * per_step

    run_ranks(2, body)


def sharded_model(lora_rank=0, activation_checkpointing=False, **config):
    args = d1.Args(activation_checkpointing=activation_checkpointing)
    return d1.parallelize(adapted(lora_rank, **config), args)


@pytest.mark.parametrize("gpu_bytes", [0, 1 << 40])
def test_a_no_grad_forward_changes_nothing(run_ranks, monkeypatch, gpu_bytes):
    """Between backward and step. What it left gathered would hide the step, of routers too."""
    monkeypatch.setattr("distributed.sharding.cuda_bytes", lambda: gpu_bytes)

    def body(rank, world_size):
        batch, results = batch_of(4), []
        for evaluates in (False, True):
            model = sharded_model(**EXPERTS)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            accumulate(model, batch)
            with torch.no_grad():
                if evaluates:
                    model.logits(batch[0])
                optimizer.step()
                results.append(model.logits(batch[0]))
        assert torch.equal(*results)

    run_ranks(2, body)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_held_out_problems_are_dealt_out_with_their_own_numbers(run_ranks, world_size):
    """Five problems, each answered once as the sample of its number; of four ranks one is idle."""

    class Answers:
        device = "cpu"

        def generate(self, prompts, sample_offset, **settings):
            assert settings == {"temperature": 0.5} and 0 < len(prompts) <= -(-5 // world_size)
            numbers = [(sample_offset + i, *ids) for i, ids in enumerate(prompts)]
            describe = lambda i, *facts: numbers[i]
            return SimpleNamespace(texts=lambda tokenizer: numbers, describe=describe)

    task = SimpleNamespace(NAME="t")
    task.score = lambda numbers, of: 2.0 ** -of["i"] * (numbers == (of["i"], of["i"]))
    task.prompt = lambda of: max(of["i"], 1)

    def body(rank, ranks):
        problems = [({"i": i}, [i]) for i in range(5)]  # the first two ask the same
        engine, freed = Answers(), []
        engine.release = lambda: freed.append(1)
        for held in 0, None:  # None: nothing else makes room before the next update
            engine.held = held
            found, kept = mean_score(engine, task, None, problems, "test", temperature=0.5)
            error = math.hypot(0.725, 0.1375, 0.2625, 0.325) / 5
            assert found == pytest.approx(
                {"test/t": 31 / 16 / 5, "error/test": error, "problems/test": 4}
            )
            assert rank or kept[0] == (0, 0)
        assert len(freed) == (rank * -(-5 // ranks) < 5)

    run_ranks(world_size, body)
