"""The plan of a run against real tensors, on CPU, and what scripts do with it."""

import json
from dataclasses import replace

import pytest
import torch

from algos import bgpo
from models import add_lora, load_model, load_weights, meta_model
from models.attention import bidirectional, make_attend
from run import plan

PROBLEMS = {split: [(None, range(24))] * 40 for split in ("train", "validation", "test")}
FIELDS = {"compile": False, "prompts_per_step": 8, "gen_length": 16, "eval_limit": 0, "mc_num": 4}
FIELDS |= {"task": "countdown", "lora_rank": 0, "denoising_steps": 2}


@pytest.fixture
def on_gpu(monkeypatch):
    """on_gpu(GB, ranks, args) -> Plan of a script on such a machine, which stays set"""
    plans, make = [], plan.Plan

    def see(gigabytes, ranks=1, args=None, **fields):
        monkeypatch.setattr(plan, "cuda_bytes", lambda: gigabytes * 1e9)
        monkeypatch.setattr(plan.torch.cuda, "get_device_name", lambda: "test H100")
        monkeypatch.setattr(plan.dist, "get_world_size", lambda *group: ranks)
        monkeypatch.setattr(plan.dist, "get_rank", lambda *group: 0)
        monkeypatch.setattr(
            plan, "Plan", lambda *a, **numbers: plans.append(make(*a, **numbers)) or plans[-1]
        )
        args = args or bgpo.Args(**FIELDS | fields)
        model = bgpo.build_policy(torch.device("cuda"), args)
        plan.fit_rollouts(PROBLEMS, model, args, bgpo.DRAWS_TOGETHER, bgpo.USES_OLD)
        return plans[-1]

    return see


@pytest.mark.parametrize("lora_rank, ranks", [(0, 1), (0, 2), (4, 1), (4, 2)])
def test_what_is_gathered(on_gpu, lora_rank, ranks):
    """All that is not whole on every rank: at once where it fills little of the GPU, and then twice
    for a moment on several ranks; else ends and two blocks, of which the first may be smaller.
    """
    model = "tiny-llada2"
    net = on_gpu(1e3, ranks, model=model, lora_rank=lora_rank).model
    size = lambda module: 2 * sum(p.numel() for p in module.parameters() if p.requires_grad)
    memory = lambda gigabytes: on_gpu(gigabytes, ranks, model=model, lora_rank=lora_rank).memory(8)
    assert memory(1e3)["gathered"] == ranks * size(net)
    if not lora_rank:
        assert size(net.layers[0]) < size(net.layers[1])
        blocks = size(net) - size(net.layers) + 2 * size(net.layers[-1])
        assert memory(49 * size(net) / 1e9)["gathered"] == blocks


def need(plan, size):
    return plan.memory(size)["sum"]


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


def test_the_size_grows_with_memory_and_the_need_with_the_size(on_gpu, monkeypatch):
    plans = [on_gpu(gigabytes) for gigabytes in (0.04, 0.06, 0.1, 10)]
    sizes = [each.size for each in plans]
    assert sizes == sorted(sizes) and sizes[0] < sizes[1] < sizes[-1] == 64 * 4
    needs = [need(plans[-1], size) for size in plans[-1].fitting]
    assert needs == sorted(needs)
    whole, changes = need(plans[-1], 64), ({"lora_rank": 4}, {"activation_checkpointing": True})
    assert all(need(on_gpu(10, **change), 64) < whole for change in changes)
    assert need(two := on_gpu(10, ranks=2), 64) < whole
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # a copy of what is sharded on every node
    assert on_gpu(10, ranks=4).memory(64)["optimizer"] > two.memory(64)["optimizer"] / 2


def test_a_sampler_takes_fewer_completions_at_a_time_where_their_cache_does_not_fit(on_gpu):
    fields = {"model": "tiny-llada", "gen_length": 1024, "block_length": 4, "cache": "dual"}
    small, large = on_gpu(0.2, **fields), on_gpu(10, **fields)
    assert 1 < small.rows < large.rows == 64 and small.size
    small.rows *= 2
    assert need(small, 1) > 0.93 * 0.2e9
    # fewer held-out problems than ranks
    assert replace(large, rollout=0, held_out=4, ranks=8).rows == 1


def test_later_steps_hold_the_cache_of_the_sampler_where_it_fits(on_gpu):
    each = on_gpu(10, model="tiny-llada", gen_length=1024, block_length=4, cache="dual")
    held, cache = need(each, each.size), each.rollout * each.row_cache
    offline = replace(each, rollout=0, held_out=each.rollout)  # frees it after every evaluation
    assert offline.rows == each.rollout and "later steps" not in offline.table()
    for room, expected in (10e9, held + cache), ((held + cache / 2) / 0.9, held + cache / 2):
        each.room = room
        later = each.table().split("up to about ")[1].split()[0]
        assert float(later) * 1e9 == pytest.approx(expected, rel=cache / held / 8)
    each.room = held
    assert "later steps" not in each.table()


def test_a_run_that_cannot_fit_is_refused_with_flags_that_do(on_gpu):
    with pytest.raises(SystemExit, match="^--micro-batch-size 256 .* try --micro-batch-size 16$"):
        on_gpu(0.04, micro_batch_size=256)
    words = "^--micro-batch-size 1 needs 0.0[0-9]+ GB .* 0.01 GB: try --lora-rank 128, or more GPUs"
    with pytest.raises(SystemExit, match=words):
        on_gpu(0.01)
    assert on_gpu(0.01, ranks=4).size


def test_ranks_that_share_rows_divide_activations_not_parameters(on_gpu):
    """Twice as many rows fit two; then a step takes as long. Refusals propose it for long rows."""
    alone, two = on_gpu(10, ranks=4), on_gpu(10, ranks=4, sequence_parallel=2)
    assert (two.noised, two.size) == (2 * alone.noised, 2 * alone.size)
    assert two.memory(32) == alone.memory(16)
    assert two.seconds() == pytest.approx(alone.seconds())
    small = {"gen_length": 512, "prompts_per_step": 4, "num_generations": 2, "lora_rank": 4}
    with pytest.raises(SystemExit, match="try .*--sequence-parallel 2, or more GPUs"):
        on_gpu(0.02, ranks=4, **small)
    assert on_gpu(0.02, ranks=4, sequence_parallel=2, **small).size


def test_config_has_the_choice(run_ranks, tmp_path, on_gpu, capfd):
    size = on_gpu(0.05).size

    def body(rank, world_size):
        plan.dist.destroy_process_group()  # the script makes its own
        bgpo.main(bgpo.Args(max_steps=1, out=str(tmp_path), **FIELDS))
        plan.dist.init_process_group("gloo", store=plan.dist.HashStore(), rank=0, world_size=1)

    run_ranks(1, body)
    table = capfd.readouterr().out.splitlines()
    assert table[0].startswith("plan for one of 1 x test H100, --micro-batch-size ")
    assert "sampler" in table[1] and "update" in table[2]
    (config,) = tmp_path.glob("bgpo*/config.json")
    assert 0 < json.loads(config.read_text())["args"]["micro_batch_size"] <= size
