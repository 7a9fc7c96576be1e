"""The plan of a run against real tensors, on CPU."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from golden_runs import parsed
from oracles import small_args

from algos import bgpo, d1
from distributed import groups
from models import add_lora, load_model, load_weights, meta_model, names
from run import plan

PLANS = (Path(__file__).parent / "golden/plans.jsonl").read_text().splitlines()
FIELDS = {"compile": False, "task": "countdown", "lora_rank": 0, "gen_length": 16, "beta": 0.0}
FIELDS |= {"denoising_steps": 2, "num_iterations": 1, "eval_every": 25, "prompts_per_step": 8}
FIELDS |= {"num_generations": 8, "mc_num": 4, "micro_batch_size": 0}


def run_of(script, **flags):
    """-> what a plan is made of: model, args, lengths"""
    args = small_args(script, **FIELDS | flags)
    lengths = [(24 + i, args.gen_length) for i in range(40)]
    return script.build_policy(torch.device("cuda"), args), args, lengths


@pytest.mark.parametrize("line", PLANS, ids=range(len(PLANS)))
def test_plans_are_golden(monkeypatch, capsys, line):
    """Those of a version that was compared with measurements (docs/models.md)."""
    case = json.loads(line)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(plan, "cuda_bytes", lambda: case["gigabytes"] * 1e9)
    monkeypatch.setattr(plan.torch.cuda, "get_device_name", lambda: case.get("gpu", "H100"))
    monkeypatch.setattr(plan.dist, "get_world_size", lambda *group: case["ranks"])
    monkeypatch.setattr(plan.dist, "get_rank", lambda *group: 0)
    script = import_module(f"algos.{case['script']}")
    problems = {"test": range(40)}
    run = *run_of(script, **case["flags"]), problems, script.DRAWS_TOGETHER, script.USES_OLD
    try:
        plan.fit(*run)
        said = capsys.readouterr().out
    except SystemExit as error:
        said = str(error)
    assert said.splitlines() == case["table"]


@pytest.mark.parametrize(
    "gigabytes, ranks, rank", [(0.0109, 1, 0), (0.009, 2, 128), (0.0106, 16, 0)]
)
def test_what_is_advised_fits(monkeypatch, gigabytes, ranks, rank):
    """Planned again with these flags, in nodes of 8; twice an advised rank of adapters does not."""
    machine = {"room": gigabytes * 1e9, "gpu": ""}

    def planned(ranks, **flags):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
        run = run_of(bgpo, model="tiny-sdar", **{"lora_rank": rank} | flags)
        return plan.Plan(*run, 40, False, True, ranks=ranks, **machine)

    refused = planned(ranks)
    assert not refused.fitting
    advised = re.findall(r"(\d+)((?: --[\w-]+(?: \d+)?)*)(?:, or|;)", refused.advice())
    assert any("--lora-rank" in words for _, words in advised)
    for number, words in advised:
        flags = re.findall(r"--([\w-]+)(?: (\d+))?", words)
        flags = {name.replace("-", "_"): int(value or 1) for name, value in flags}
        assert planned(int(number), **flags).fitting, words
        if "lora_rank" in flags:
            assert int(number) == ranks
            assert not planned(ranks, **flags | {"lora_rank": 2 * flags["lora_rank"]}).fitting


@pytest.mark.parametrize("gpus", ["2 x A100-40", "8x24"])
def test_a_plan_needs_no_gpu(monkeypatch, capsys, gpus):
    """And reads no weights: `main` ends before."""
    monkeypatch.setattr(plan, "ASKED", None)
    monkeypatch.setattr(names, "FILES", [*names.FILES])
    monkeypatch.setattr(groups, "own_device", groups.own_device)
    monkeypatch.setattr(bgpo, "load_models", None)
    with pytest.raises(SystemExit, match="^0$"):
        bgpo.main(parsed("bgpo", "--no-compile", "--plan", gpus))
    torch.distributed.destroy_process_group()
    first, memory, seconds, save = capsys.readouterr().out.splitlines()
    assert first.startswith(
        f"plan for one of {gpus.replace(' ', '').replace('x', ' x ')}, --micro-batch-size "
    )
    assert memory.startswith(f"  GB of {'42' if 'A100' in gpus else '24'}: policy ")
    assert ("unknown" in seconds) == ("A100" not in gpus) and "for --resume 0.00" in save


@pytest.mark.parametrize("rank", [0, 4])
def test_parameters_and_moments_are_those_of_real_tensors(rank):
    """Of a frozen reference too; under adapters it is the policy itself."""
    run = run_of(d1, lora_rank=rank, beta=0.1)
    memory = plan.Plan(*run, 40, False, False, room=1e10, gpu="", ranks=1).memory(4)
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
    # under adapters it shares the base
    assert memory["sampler"] == (total(trained) / 2 if rank else total(engine.parameters()))
    assert memory["reference"] == (not rank) * total(engine.parameters())
