"""The plan of a run against real tensors, on CPU, and what scripts do with it."""

import json

import pytest
import torch

import plan
from algos import bgpo, d1
from models import add_lora, load_model, load_weights, meta_model
from models.attention import bidirectional, make_attend

PROBLEMS = {split: [(None, range(24))] * 40 for split in ("train", "validation", "test")}
SETTINGS = {"compile": False, "num_generations": 4, "prompts_per_step": 8, "gen_length": 16}


@pytest.fixture
def on_gpu(monkeypatch):
    """on_gpu(GB, ranks): what a script then sees of its machine"""

    def see(gigabytes, ranks=1):
        gpu = plan.Gpu("test", gigabytes * 1e9, 1e15, 1e12)
        monkeypatch.setattr(plan, "this_gpu", lambda: gpu)
        monkeypatch.setattr(plan.dist, "get_world_size", lambda *group: ranks)
        monkeypatch.setattr(plan.dist, "get_rank", lambda *group: 0)

    return see


def planned(module, **fields):
    """-> the micro-batch that a script chooses, its Args"""
    args = module.Args(**SETTINGS | fields)
    return plan.fit(args, PROBLEMS, module.DRAWS, module.DRAWS_TOGETHER, module.USES_OLD), args


def made(monkeypatch, module, **fields):
    """-> the Plan behind it"""
    plans, choose = [], plan.Plan

    def remember(*args):
        plans.append(choose(*args))
        return plans[-1]

    monkeypatch.setattr(plan, "Plan", remember)
    planned(module, **fields)
    monkeypatch.setattr(plan, "Plan", choose)
    return plans[0]


def graph_bytes(output):
    """Bytes of all tensors that the nodes of a graph hold"""
    nodes, seen, held = [output.grad_fn], set(), {}
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [parent for parent, _ in node.next_functions]
        for name in dir(node):
            value = getattr(node, name) if name.startswith("_saved_") else None
            if isinstance(value, torch.Tensor):
                held[value.data_ptr()] = value.untyped_storage()
    return held


@pytest.mark.parametrize("family, rank", [("llada", 0), ("llada", 4), ("dream", 4)])
def test_what_a_block_keeps_is_what_its_graph_holds(family, rank):
    """Counted without weights, against every tensor that the graph of a real block holds."""
    model, empty = load_model(f"tiny-{family}"), meta_model(f"tiny-{family}")
    for one in (model, empty) if rank else ():
        add_lora(one, rank, 8)
    x = torch.randn(1, 128, model.lm_head.in_features, requires_grad=True)
    valid = torch.ones(1, 128, dtype=torch.bool)
    cos, sin = model.rope(model.grid(valid)[0], x.dtype)
    held = graph_bytes(model.layers[-1](x, cos, sin, make_attend(bidirectional(valid))))
    for value in (*model.parameters(), cos, sin):
        held.pop(value.data_ptr(), None)
    want = sum(storage.nbytes() for storage in held.values()) / 128
    got = plan.kept_per_token(empty, False, torch.float32)
    assert abs(got / want - 1) < 0.002  # the random state of attention's dropout
    if rank and family == "llada":
        assert plan.kept_per_token(empty, True, torch.float32) < 0.8 * got


@pytest.mark.parametrize("rank", [0, 4])
def test_parameters_and_moments_are_those_of_real_tensors(monkeypatch, on_gpu, rank):
    on_gpu(10)
    memory = made(monkeypatch, bgpo, lora_rank=rank).memory(4)
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
    base = sum(p.numel() for p in meta_model("tiny-sdar").parameters())
    assert memory["sampler"] == 2 * (base + (total(trained) / 4 if rank else 0))


def test_more_memory_never_gives_a_smaller_micro_batch(monkeypatch, on_gpu):
    sizes = []
    for gigabytes in (0.03, 0.04, 0.06, 0.1, 0.2, 10):
        on_gpu(gigabytes)
        sizes.append(planned(bgpo)[0])
    assert sizes == sorted(sizes) and sizes[0] < sizes[2] < sizes[-1] == 32 * 16
    one = made(monkeypatch, bgpo)
    need = [sum(one.memory(size).values()) for size in one.fitting]
    assert need == sorted(need)


def test_more_ranks_and_adapters_need_less(monkeypatch, on_gpu):
    def need(ranks, **fields):
        on_gpu(10, ranks)
        return sum(made(monkeypatch, bgpo, micro_batch_size=64, **fields).memory(64).values())

    assert need(1) > need(1, lora_rank=4) > 0
    assert need(1) > need(2, sync_every_backward=True) > need(4, sync_every_backward=True)
    assert need(1) > need(1, activation_checkpointing=True)


def test_a_run_that_cannot_fit_is_refused_with_flags_that_do(on_gpu):
    on_gpu(0.016)
    with pytest.raises(SystemExit) as error:
        planned(bgpo)
    line = str(error.value)
    assert line.startswith("--micro-batch-size 1 needs 0 GB on a GPU of 0 GB: try ")
    assert "\n" not in line and "try a smaller" not in line
    on_gpu(10)
    with pytest.raises(
        SystemExit, match=r"^--micro-batch-size 2 does not hold the 3 draws of a row"
    ):
        plan.fit(bgpo.Args(micro_batch_size=2), PROBLEMS, lambda args, replays: 3, True, False)


def test_the_table_and_the_seconds(on_gpu, capsys):
    on_gpu(10)
    size, _ = planned(d1, beta=0.1)
    title, memory, seconds = capsys.readouterr().out.splitlines()
    assert title == f"plan for one of 1 x test, --micro-batch-size {size}"
    assert "reference" in memory and "old and reference values" in seconds


def test_config_has_the_choice_and_resume_keeps_it(run_ranks, tmp_path, on_gpu, monkeypatch):
    on_gpu(0.05)
    fields = SETTINGS | {"mc_num": 2, "eval_limit": 0, "save_every": 1, "out": str(tmp_path / "r")}
    sizes = []

    def body(rank, world_size):
        plan.dist.destroy_process_group()
        monkeypatch.setattr(bgpo, "Stopwatch", lambda size: (sizes.append(size), clock(size))[1])
        bgpo.main(bgpo.Args(max_steps=1, **fields))
        plan.dist.init_process_group("gloo", store=plan.dist.HashStore(), rank=0, world_size=1)

    clock = bgpo.Stopwatch
    run_ranks(1, body)
    (directory,) = (tmp_path / "r").iterdir()
    args = json.loads((directory / "config.json").read_text())["args"]
    assert args["micro_batch_size"] == planned(bgpo, mc_num=2, eval_limit=0)[0] > 0
    monkeypatch.setattr("sys.argv", ["bgpo.py", "--resume", str(directory), "--max-steps", "2"])
    on_gpu(10)  # where more would fit
    from runlog import command_line

    resumed = command_line(bgpo.Args)
    got = plan.fit(resumed, PROBLEMS, bgpo.DRAWS, bgpo.DRAWS_TOGETHER, bgpo.USES_OLD)
    assert got == args["micro_batch_size"] < planned(bgpo, mc_num=2)[0]
