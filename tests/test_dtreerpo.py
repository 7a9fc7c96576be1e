"""d-TreeRPO: the segments, targets and likelihoods of trees; released values."""

import pytest
import torch
from oracles import EOS, tilted, tiny_model, updated
from test_samplers import exact_distribution, reveal_quota, toy

from algos import dtreerpo
from rollout import make_engine
from rollout.rows import Batch

pytestmark = pytest.mark.usefixtures("one_rank")

REWARDS = [3.0, 2, 1, 0, 0, 0, 1, 2, 5, 0, 0, 1]
SHAPE = {"num_generations": 12, "branches": (3, 2, 2), "gen_length": 8, "block_length": 4}
ONE_STEP = {"num_generations": 96, "temperature": 1.5, "branches": (24, 2, 2)}
NAMES = "gen_length block_length denoising_steps temperature remasking".split()


def grow(engine, prompts, **settings):
    """-> args, batch and rows of trees"""
    args = dtreerpo.Args(**SHAPE | {"denoising_steps": 2} | settings)
    how = {name: getattr(args, name) for name in NAMES} | {"seed": 42 << 32}
    trace = dtreerpo.sample_trees(engine, args, prompts, args.num_generations, 0, **how)
    batch, leaves = Batch(trace, engine.model), args.num_generations * len(prompts)
    batch.advantages = dtreerpo.compute_advantages(torch.tensor(leaves // 12 * REWARDS), args)
    batch.progress = 0.4
    return args, batch, dtreerpo.sample_masks(batch, 0, args)


def test_segments_have_equally_many_steps():
    args = dtreerpo.Args(branches=(2, 3, 2), num_generations=12, gen_length=12, denoising_steps=4)
    assert dtreerpo.tree_forks(args, 4) == [4, 8]


def test_advantages():
    """By hand; equal rewards give exactly 0."""
    args = dtreerpo.Args(branches=(3, 2))
    want = [[2.25, 1], [2.25, -1], [-0.75, 1], [-0.75, -1], [-1.5, 0], [-1.5, 0]]
    got = dtreerpo.compute_advantages(torch.tensor(2 * [3.0, 2, 1, 0, 0, 0]), args)
    assert got.tolist() == 2 * want
    assert not dtreerpo.compute_advantages(torch.full((12,), 0.7), args).any()


def along_paths(args, values):
    """Sums of values [R, L] over the segments from the root to each leaf of the only tree"""
    total, first, number = 0, 0, 1
    for branches in args.branches:
        number *= branches
        part = values[first : first + number]
        total = total + part.repeat_interleave(args.num_generations // number, 0)
        first += number
    return total


@pytest.mark.parametrize("family", ["sdar", "llada2", "llada", "dream"])
def test_segments_of_one_step(family):
    """They give the product of the probabilities with which the tokens up to the EOS were drawn."""
    shape = ONE_STEP | {"branches": (12, 2, 2, 2)}
    engine = make_engine(tiny_model(family))
    args, batch, rows = grow(engine, [[3, 4, 0, 1, 2, 3, 4, 0]], **shape)
    with torch.no_grad():
        logps = dtreerpo.draw_logps(engine.model, rows)[:, 0]
    times, got = (along_paths(args, x) for x in (rows.weights[:, 0] > 0, logps))
    want = (batch.trace.logps * times).double()
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    ids, steps = batch.trace.completion_ids, batch.trace.step_map
    when = torch.arange(8) // 4 * 2 + steps
    before = (when[:, None] <= when[..., None]) & torch.ones(8, 8).tril(-1).bool()
    seen = ((ids == EOS)[:, None] & before).any(2)
    assert torch.equal(times, (~seen & (steps >= 0)).long())
    assert len(ids.unique(dim=0)) > 12 and (times != batch.completion_mask).any()


@pytest.mark.parametrize("remasking", ["low_confidence_static", "entropy", "sequential"])
@pytest.mark.parametrize("family", ["sdar", "llada"])
def test_when_this_is_the_likelihood(family, remasking):
    """That of an enumeration of all draws: if the order of reveals does not depend on them."""
    engine, block, prompt = toy(family), 4 if family == "sdar" else 3, [3, 1, 4, 2, 0]
    law = reveal_quota(block, 3), remasking, 0.3, 1.5
    exact = exact_distribution(engine.model, prompt, 3, *law)
    shape = {"gen_length": 3, "block_length": block, "denoising_steps": 3, "remasking": remasking}
    args, batch, rows = grow(engine, [prompt], **ONE_STEP | shape)
    with torch.no_grad():
        got = along_paths(args, dtreerpo.draw_logps(engine.model, rows)[:, 0]).sum(1).double()
    whole, ids = batch.completion_mask.all(1), batch.trace.completion_ids
    want = torch.tensor([exact[tuple(row)] for row in ids[whole].tolist()]).log()
    is_fixed = remasking in ("entropy", "sequential")
    assert len(want) > 20 and ((got[whole] - want).abs().max() < 1e-5) == is_fixed


def test_a_tree_equals_the_released_code():
    """compute_loss and its backward of THU-BPM/d-TreeRPO 3eb6f21 on this tree, the mask token left
    out as in ours; old and reference values of tilted models.
    """
    models = [tilted(tilt) for tilt in (0, 0.3, -0.2)]
    models[0].eos_token_ids = [224]
    shape = {"gen_length": 12, "temperature": 1.0, "micro_batch_size": 99, "lambda_max": 0.02}
    args, _, rows = grow(make_engine(models[0]), [[20, 22, 26, 16, 13, 27]], **shape)
    with torch.no_grad():
        rows.old, rows.ref = (dtreerpo.draw_logps(model, rows)[:, 0] for model in models[1:])
    rows.has_gradient = True
    metrics, grads = updated(dtreerpo, models[0], rows, args)
    assert metrics["loss/policy"] == pytest.approx(-0.05186898, abs=1e-6)
    assert args.beta * metrics["loss/kl"] == pytest.approx(1.780197e-4, abs=1e-7)
    assert grads.norm().item() == pytest.approx(20.960644, rel=1e-5)


def test_targets_of_siblings():
    """Among those with A > 0 that reveal the position: alike if tau is large, the best if small."""
    A, active = torch.tensor([[1.0, 2.0, 0.0]]), torch.ones(1, 3, 3, dtype=torch.bool)
    active[0, 0, 1] = active[0, :2, 2] = False
    alike, best = (dtreerpo.sibling_targets(A, active, tau)[0].T.tolist() for tau in (1e9, 1e-6))
    assert alike == [[0.5, 0.5, 0], [0, 1, 0], [0, 0, 0]] and best[0] == [0, 1, 0]
    ends = [dtreerpo.schedule(progress, dtreerpo.Args()) for progress in (0.0, 1.0)]
    assert ends == [(0, 2), (3e-3, 1e-6)]
