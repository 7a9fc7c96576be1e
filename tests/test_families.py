"""Every family on several ranks: sharded loading, modules that stay fp32, and all scripts."""

import math

import pytest
import torch
from golden_runs import CASES, assert_same, rows_of, run_case
from oracles import A2D
from sync_shared import METHODS
from test_models import model_of
from torch.distributed.tensor import DTensor

from algos import d1
from distributed.sharding import sharding
from models import (
    add_lora,
    export_weights,
    layers,
    load_model,
    load_weights,
    meta_model,
    save_model,
)
from models.tiny import TINY_CONFIGS, byte_tokenizer

CONFIGS = TINY_CONFIGS | A2D
ARGS = d1.Args()


# --- loading -------------------------------------------------------------------------------------

UNEVEN = {"vocab_size": 265, "num_experts": 2, "n_group": 1, "topk_group": 1}
SHARDED = [(family, 2, {}) for family in CONFIGS] + [("tiny-llada2", 3, UNEVEN)]


@pytest.mark.parametrize("family, ranks, changes", SHARDED)
def test_each_rank_loads_its_rows(run_ranks, tmp_path, family, ranks, changes):
    """Gathered weights are the file's, bit for bit; first adapters those of an unsharded model."""
    whole, directory = model_of(CONFIGS[family] | changes), str(tmp_path / "model")
    save_model(whole, directory, byte_tokenizer())
    want = dict(export_weights(whole))
    adapted = add_lora(load_model(directory), 4, 8, seed=3)

    def body(rank, world_size):
        model = d1.parallelize(meta_model(directory), ARGS)
        assert all(parameter.is_meta for parameter in model.parameters())
        load_weights(model, "cpu")
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        for name, value in export_weights(model):
            assert torch.equal(value, want[name]), name
        model = d1.parallelize(add_lora(meta_model(directory), 4, 8, seed=3), ARGS)
        load_weights(model, "cpu")
        for (name, a), b in zip(model.named_parameters(), adapted.parameters(), strict=True):
            assert torch.equal(a.full_tensor(), b) and a.requires_grad == b.requires_grad, name

    run_ranks(ranks, body)


# --- precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["tiny-llada", "tiny-llada2"])
def test_routers_and_rotary_tables_stay_fp32(run_ranks, monkeypatch, family):
    """Inside FSDP2's bf16 compute; LLaDA rotates with fp32 tables."""
    rotate, tables = layers.rotate, []
    spy = lambda x, cos, sin: tables.append((x.dtype, cos.dtype)) or rotate(x, cos, sin)
    monkeypatch.setattr(layers, "rotate", spy)
    on_gpu = lambda model, _: sharding(model, (torch.bfloat16, torch.float32))
    monkeypatch.setattr(d1, "sharding", on_gpu)

    def body(rank, world_size):
        model, seen = load_weights(d1.parallelize(meta_model(family), ARGS), "cpu"), []
        for module in model.fp32_modules:
            module.register_forward_hook(lambda module, inputs, out: seen.append(out.dtype))
        model.logits(torch.zeros(1, 8, dtype=torch.long))
        assert seen == [torch.float32] * (family == "tiny-llada2")
        kind = torch.float32 if family == "tiny-llada" else torch.bfloat16
        assert set(tables) == {(torch.bfloat16, kind)}

    run_ranks(1, body)


# --- scripts -------------------------------------------------------------------------------------

GRID = [
    (script, f"tiny-{family}", 4 * ((i + j) % 2))
    for i, (script, method) in enumerate(METHODS.items())
    for j, family in enumerate(method.families)
]


@pytest.mark.full
@pytest.mark.parametrize("script, family, lora_rank", GRID)
def test_scripts_run_on_every_family(warm, tmp_path, script, family, lora_rank):
    """Full or LoRA: finite and moving; two ranks with other micro-batches equal one."""
    *_, case = (case for case in CASES if case.split("-")[0] == script)
    flags, size = {"model": family, "lora_rank": lora_rank}, 16 if script == "vrpo" else 5
    one = run_case(case, tmp_path / "one", **flags)
    two = run_case(case, tmp_path / "two", 2, micro_batch_size=size, **flags)
    experts = TINY_CONFIGS[family].get("num_experts")
    steps = [row for row in rows_of(one) if "loss/total" in row]
    assert any(row["optim/grad_norm"] > 0 for row in steps)
    for row in steps:
        assert ("router/entropy" in row) == bool(experts)
        assert not experts or 0 < row["router/entropy"] < math.log(experts)
    assert_same(one, two)
