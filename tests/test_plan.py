"""The plan of a run against real tensors, on CPU, and what scripts do with it."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from oracles import small_args

from algos import bgpo
from models import add_lora, load_model, load_weights, meta_model
from models.attention import bidirectional, make_attend
from run import plan

PLANS = (Path(__file__).parent / "golden/plans.jsonl").read_text().splitlines()
PROBLEMS = {split: [(None, range(24 + i)) for i in range(40)] for split in ("train", "test")}
FIELDS = {"compile": False, "task": "countdown", "lora_rank": 0, "gen_length": 16, "beta": 0.0}
FIELDS |= {"denoising_steps": 2, "num_iterations": 1, "eval_every": 25, "prompts_per_step": 8}
FIELDS |= {"num_generations": 8, "mc_num": 4, "micro_batch_size": 0}


@pytest.fixture
def on_gpu(monkeypatch):
    """on_gpu(GB, ranks) -> Plan of a script on such a machine, which stays set"""
    plans, make = [], plan.Plan

    def see(gigabytes, ranks=1, script=bgpo, **fields):
        monkeypatch.setattr(plan, "cuda_bytes", lambda: gigabytes * 1e9)
        monkeypatch.setattr(plan.torch.cuda, "get_device_name", lambda: "test H100")
        monkeypatch.setattr(plan.dist, "get_world_size", lambda *group: ranks)
        monkeypatch.setattr(plan.dist, "get_rank", lambda *group: 0)
        monkeypatch.setattr(
            plan, "Plan", lambda *a, **more: plans.append(make(*a, **more)) or plans[-1]
        )
        args = small_args(script, **FIELDS | fields)
        model = script.build_policy(torch.device("cuda"), args)
        plan.fit_rollouts(PROBLEMS, model, args, script.DRAWS_TOGETHER, script.USES_OLD)
        return plans[-1]

    return see


@pytest.mark.parametrize("line", PLANS, ids=range(len(PLANS)))
def test_plans_are_golden(on_gpu, monkeypatch, capsys, line):
    """Those of a version that was compared with measurements (docs/models.md)."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    case = json.loads(line)
    script, machine = import_module(f"algos.{case['script']}"), (case["gigabytes"], case["ranks"])
    if "plan for" in case["table"][0]:
        on_gpu(*machine, script, **case["flags"])
        assert capsys.readouterr().out.splitlines() == case["table"]
    else:
        with pytest.raises(SystemExit, match=f"^{re.escape(case['table'][0])}: try "):
            on_gpu(*machine, script, **case["flags"])


def test_what_a_block_keeps_is_what_its_graph_holds():
    """Counted without weights, against every tensor that the graph of a real block holds."""
    model, empty = load_model("tiny-llada"), meta_model("tiny-llada")
    for one in (model, empty):
        add_lora(one, 4, 8)
    x = torch.randn(1, 128, model.lm_head.in_features, requires_grad=True)
    valid = torch.ones(1, 128, dtype=torch.bool)
    cos, sin = model.rope(model.grid(valid)[0], x.dtype)
    y = model.layers[-1](x, cos, sin, make_attend(bidirectional(valid)))
    nodes, seen, held = [y.grad_fn], {None}, {}
    while nodes:
        if (node := nodes.pop()) in seen:
            continue
        seen.add(node)
        nodes += [parent for parent, _ in node.next_functions]
        values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        values = (value for value in values if isinstance(value, torch.Tensor))
        held |= {value.data_ptr(): value.untyped_storage().nbytes() for value in values}
    own = {value.data_ptr() for value in (*model.parameters(), cos, sin)}
    want = sum(held[at] for at in held.keys() - own) / 128
    got = plan.kept_per_token(empty, False, torch.float32)
    assert abs(got / want - 1) < 0.002  # the random state of attention's dropout
    assert plan.kept_per_token(empty, True, torch.float32) < 0.8 * got


@pytest.mark.parametrize("rank", [0, 4])
def test_parameters_and_moments_are_those_of_real_tensors(on_gpu, rank):
    planned = on_gpu(10, lora_rank=rank)
    planned.has_reference = True  # under adapters it is the policy itself
    memory = planned.memory(4)
    model = meta_model("tiny-sdar", torch.bfloat16 if rank else torch.float32)
    if rank:
        add_lora(model, rank, 8)
    load_weights(model, "cpu")
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for value in trained:
        value.grad = torch.zeros_like(value)
    optimizer.step()
    total = lambda values: sum(value.nbytes for value in values)
    moments = (value for state in optimizer.state.values() for value in state.values())
    assert memory["policy"] == total(model.parameters())
    assert memory["gradients"] == total(value.grad for value in trained)
    assert memory["optimizer"] == total(value for value in moments if value.dim())
    engine = load_model("tiny-sdar", dtype=torch.bfloat16)
    assert memory["sampler"] == total(engine.parameters()) + bool(rank) * total(trained) / 2
    assert memory["reference"] == (not rank) * total(engine.parameters())


def test_a_run_that_cannot_fit_is_refused_with_flags_that_do(on_gpu):
    with pytest.raises(SystemExit, match="^--micro-batch-size 256 .* try --micro-batch-size 16$"):
        on_gpu(0.04, micro_batch_size=256)
    words = "^--micro-batch-size 1 needs 0.0[0-9]+ GB .* 0.01 GB: try --lora-rank 128, or more GPUs"
    with pytest.raises(SystemExit, match=words):
        on_gpu(0.01)
    small = {"gen_length": 512, "prompts_per_step": 4, "num_generations": 2, "lora_rank": 4}
    with pytest.raises(SystemExit, match="try .*--sequence-parallel 2, or more GPUs"):
        on_gpu(0.022, ranks=4, **small)
    assert on_gpu(0.022, ranks=4, sequence_parallel=2, **small).size


def test_config_has_the_choice(run_ranks, tmp_path, on_gpu, capfd):
    most, _ = on_gpu(10).size, on_gpu(0.05)

    def body(rank, world_size):
        plan.dist.destroy_process_group()  # the script makes its own
        bgpo.main(small_args(bgpo, **FIELDS, eval_limit=0, max_steps=1, out=str(tmp_path)))
        plan.dist.init_process_group("gloo", store=plan.dist.HashStore(), rank=0, world_size=1)

    run_ranks(1, body)
    table = capfd.readouterr().out.splitlines()
    assert table[0].startswith("plan for one of 1 x test H100, --micro-batch-size ")
    assert "sampler" in table[1] and "update" in table[2]
    (config,) = tmp_path.glob("bgpo*/config.json")
    assert 0 < json.loads(config.read_text())["args"]["micro_batch_size"] < most
