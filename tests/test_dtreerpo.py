"""d-TreeRPO: the segments, advantages and targets of trees."""

import math
from types import SimpleNamespace

import pytest
import torch
from oracles import changed, full_graph_loss, gradient, relative, tiny_model
from test_samplers import (
    EOS,
    SIZES,
    exact_distribution,
    model_of,
    reveal_quota,
    toy,
)

from algos import dtreerpo
from models.tiny import TINY_LLADA, random_model
from rollout import make_engine

pytestmark = pytest.mark.usefixtures("one_rank")


def grow(model, prompts, rewards, **settings):
    """-> args, batch and rows of trees; rewards: those of a tree's leaves"""
    engine = model if hasattr(model, "generate") else make_engine(model)
    shape = {"num_generations": 12, "branches": (3, 2, 2), "gen_length": 8, "block_length": 4}
    args = dtreerpo.Args(prompts_per_step=len(prompts), **shape | settings)
    sampling = {name: getattr(args, name) for name in dtreerpo.ROLLOUT.split()}
    how = {"num_samples": args.num_generations, "seed": args.seed << 32, "sample_offset": 0}
    trace = dtreerpo.sample_trees(engine, args, prompts, **how, **sampling)
    batch = dtreerpo.Batch(trace, engine.model)
    rewards = torch.tensor(rewards * len(prompts))
    batch.progress = 0.4
    batch.advantages = dtreerpo.compute_advantages(rewards, args)
    return args, batch, dtreerpo.sample_masks(batch, 0, args)


REWARDS = [3.0, 2, 1, 0, 0, 0, 1, 2, 5, 0, 0, 1]


def test_advantages():
    """By hand; those of siblings add up to 0, and equal rewards give exactly 0."""
    args = dtreerpo.Args(branches=(3, 2))
    want = [[2.25, 1], [2.25, -1], [-0.75, 1], [-0.75, -1], [-1.5, 0], [-1.5, 0]]
    got = dtreerpo.compute_advantages(torch.tensor(2 * [3.0, 2, 1, 0, 0, 0]), args)
    assert got.tolist() == 2 * want
    args = dtreerpo.Args(branches=(3, 2, 2, 2))
    got = dtreerpo.compute_advantages(torch.rand(48).double(), args)
    for s, K in enumerate(args.branches):
        sums = got[:: 2 ** (3 - s), s].view(-1, K).sum(1)
        assert sums.abs().max() < 1e-12 < got[:, s].abs().min()
    assert not dtreerpo.compute_advantages(torch.full((48,), 0.7), args).any()


def along_paths(args, values):
    """Sums of values [R, L] over the segments from the root to each leaf of the only tree"""
    total, first = 0, 0
    for s in range(len(args.branches)):
        leaves = math.prod(args.branches[s + 1 :])
        number = args.num_generations // leaves
        total = total + values[first : first + number].repeat_interleave(leaves, 0)
        first += number
    return total


@pytest.mark.parametrize("family", ["sdar", "llada"])
def test_trees_are_made_in_parts(family):
    """Two nodes, which step 6 of 12 forks into three leaves each; numbered over all ranks."""
    engine, prompts = make_engine(model_of(SIZES[family])), [[3, 4, 5], [6, 7, 8, 9, 10]]
    shape = {"gen_length": 12, "block_length": 4, "denoising_steps": 4}
    args = dtreerpo.Args(branches=(2, 3), num_generations=6, **shape)
    assert dtreerpo.tree_forks(args, 4) == [6]
    tree = dtreerpo.sample_trees(engine, args, prompts, 6, 24, seed=3, **shape)
    node = {"num_samples": 2, "sample_offset": 8, "until": 6}
    canvas = engine.generate(prompts, seed=3, **node, **shape)
    leaf = {"num_samples": 6, "sample_offset": 24, "canvas": canvas}
    leaves = engine.generate(prompts, seed=3, **leaf, **shape)
    assert torch.equal(tree.completion_ids, leaves.completion_ids)
    assert torch.equal(tree.logps, leaves.logps) and torch.equal(tree.step_map, leaves.step_map)


ONE_STEP = {"num_generations": 96, "temperature": 1.5, "branches": (24, 2, 2)}


@pytest.mark.parametrize("family", ["sdar", "llada2", "llada", "dream"])
def test_segments_of_one_step(family):
    """They give the product of the probabilities with which the tokens up to the EOS were drawn."""
    model, shape = (
        model_of(SIZES[family], scale=9),
        ONE_STEP | {"branches": (12, 2, 2, 2), "denoising_steps": 2},
    )
    args, batch, rows = grow(model, [[3, 4, 5, 6, 7, 8, 9, 10]], 8 * REWARDS, **shape)
    with torch.no_grad():
        logps = dtreerpo.draw_logps(model, rows)[:, 0].double()
    times, got = (along_paths(args, x) for x in (rows.weights[:, 0] > 0, logps))
    torch.testing.assert_close(got, batch.trace.logps * times, atol=1e-5, rtol=0)
    ids, steps = batch.trace.completion_ids, batch.trace.step_map
    is_eos, when = torch.isin(ids, torch.tensor(EOS)), torch.arange(8) // 4 * 2 + steps
    seen = is_eos[:, None] & (when[:, None] <= when[..., None]) & torch.ones(8, 8).tril(-1).bool()
    assert torch.equal(times, (~seen.any(2) & (steps >= 0)).long())
    assert len(ids.unique(dim=0)) > 12 and (times != batch.completion_mask).any()
    assert dtreerpo.sample_masks(batch, 1, args) is None


@pytest.mark.parametrize("remasking", ["low_confidence_static", "entropy", "sequential"])
@pytest.mark.parametrize("family", ["sdar", "llada"])
def test_when_this_is_the_likelihood(family, remasking):
    """That of an enumeration of all draws: if the order of reveals does not depend on them."""
    engine, block, prompt = toy(family), 4 if family == "sdar" else 3, [3, 1, 4, 2, 0]
    law = reveal_quota(block, 3), remasking, 0.3, 1.5
    exact = exact_distribution(engine.model, prompt, 3, *law)
    shape = {"gen_length": 3, "block_length": block, "denoising_steps": 3, "remasking": remasking}
    args, batch, rows = grow(engine, [prompt], 8 * REWARDS, **ONE_STEP | shape)
    with torch.no_grad():
        got = along_paths(args, dtreerpo.draw_logps(engine.model, rows)[:, 0]).sum(1).double()
    whole, ids = batch.completion_mask.all(1), batch.trace.completion_ids
    want = torch.tensor([exact[tuple(row)] for row in ids[whole].tolist()]).log()
    is_fixed = remasking in ("entropy", "sequential")
    assert len(want) > 20 and ((got[whole] - want).abs().max() < 1e-5) == is_fixed


@pytest.mark.parametrize("family", ["sdar", "llada", "dream"])
def test_the_gradient_is_that_of_the_full_graph(family):
    """To 1e-10 in fp64 for any micro-batch; clip, KL and self-distillation active."""
    model, prompts = tiny_model(family), [[1, 2, 3], [2, 2]]
    settings = {"epsilon": 0.1, "beta": 0.3, "lambda_max": 2.0}
    args, batch, rows = grow(model, prompts, REWARDS, **settings)
    rows.weights, rows.targets = rows.weights.double(), rows.targets.double()
    with torch.no_grad():
        for name, other in ("old", tiny_model(family, shift=0.02)), ("ref", tiny_model(family, 1)):
            setattr(rows, name, dtreerpo.draw_logps(other, rows)[:, 0])
    rows.batch = changed(batch, num_sequences=1.0)
    want = gradient(model, full_graph_loss("cj_grpo", model, rows, args))
    # minus the sum of targets times logps is BGPO's loss with A = 1
    none = {"old": torch.zeros(len(rows.masked), 1), "advantages": torch.ones(len(rows.masked))}
    targets = changed(rows, weights=rows.targets[:, None], **none)
    want += gradient(model, full_graph_loss("bgpo", model, targets, SimpleNamespace(mc_num=1)))
    for args.micro_batch_size in (1, 5):
        model.zero_grad()
        for micro, _ in dtreerpo.micro_batches(rows, args):
            dtreerpo.backward(model, micro, 1, args)
        assert relative(gradient(model), want) < 1e-10


def test_a_tree_equals_the_released_code():
    """compute_loss and its backward of THU-BPM/d-TreeRPO 3eb6f21 on this tree, the mask token left
    out as in ours; old and reference values of tilted models.
    """

    def tilted(tilt=0.0):
        model = random_model(TINY_LLADA)
        width = model.lm_head.weight.shape[1]
        with torch.no_grad():
            model.lm_head.weight.mul_(10 * (1 + tilt * torch.linspace(-1, 1, width)))
        model.eos_token_ids = [224]
        return model

    model, shape = tilted(), {"gen_length": 12, "denoising_steps": 2, "temperature": 1.0}
    args, _, rows = grow(tilted(), [[20, 22, 26, 16, 13, 27]], REWARDS, lambda_max=0.02, **shape)
    with torch.no_grad():
        rows.old, rows.ref = (dtreerpo.draw_logps(tilted(t), rows)[:, 0] for t in (0.3, -0.2))
    metrics = dtreerpo.backward(model, rows, 1.0, args)
    assert metrics["loss/policy"].item() == pytest.approx(-0.05186898, abs=1e-6)
    assert args.beta * metrics["loss/kl"].item() == pytest.approx(1.780197e-4, abs=1e-7)
    assert gradient(model).norm().item() == pytest.approx(20.960644, rel=1e-5)


def test_targets_of_siblings():
    """Among those with A > 0 that reveal the position: alike if tau is large, the best if small."""
    A, active = torch.tensor([[1.0, 2.0, -3.0]]), torch.ones(1, 3, 3, dtype=torch.bool)
    active[0, 0, 1] = active[0, :2, 2] = False
    alike, best = (dtreerpo.sibling_targets(A, active, tau)[0].T.tolist() for tau in (1e9, 1e-6))
    assert alike == [[0.5, 0.5, 0], [0, 1, 0], [0, 0, 0]] and best[0] == [0, 1, 0]
    ends = [dtreerpo.schedule(progress, dtreerpo.Args()) for progress in (0.0, 1.0)]
    assert ends == [(0, 2), (3e-3, 1e-6)]
