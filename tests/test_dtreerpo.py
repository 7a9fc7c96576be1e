"""d-TreeRPO: the segments, targets and likelihoods of trees; released values."""

import math

import pytest
import torch
from oracles import EOS, few_tokens, tilted, tiny_model, updated
from test_samplers import exact_distribution, reveal_quota

from algos import dtreerpo
from rollout import make_engine
from rollout.rows import Batch

pytestmark = pytest.mark.usefixtures("one_rank")

REWARDS = [3.0, 2, 1, 0, 0, 0, 1, 2, 5, 0, 0, 1]
SHAPE = {"gen_length": 8, "block_length": 4, "denoising_steps": 2, "temperature": 1.5}


def grow(engine, prompt, branches, **settings):
    """-> batch and rows of a tree, args"""
    how = SHAPE | settings
    args = dtreerpo.Args(branches=branches, micro_batch_size=99, lambda_max=0.02, **how)
    args.num_generations = leaves = math.prod(branches)
    trace = dtreerpo.sample_trees(engine, args, [prompt], leaves, 0, seed=42 << 32, **how)
    batch, rewards = Batch(trace, engine.model), torch.tensor(REWARDS * (leaves // 12))
    batch.advantages, batch.progress = dtreerpo.compute_advantages(rewards, args), 0.4
    return batch, dtreerpo.sample_masks(batch, 0, args), args


def along_paths(engine, prompt, branches, **settings):
    """-> batch of a tree; of the segments from the root to each leaf, added up: is a token scored,
    and its log-probability
    """
    batch, rows, _ = grow(engine, prompt, branches, **settings)
    nodes = torch.tensor(branches).cumprod(0).tolist()
    with torch.no_grad():
        logps = dtreerpo.draw_logps(engine.model, rows)[:, 0]
    parts = ((rows.weights[:, 0] > 0).split(nodes), logps.split(nodes))
    return batch, *(
        sum(x.repeat_interleave(nodes[-1] // len(x), 0) for x in part) for part in parts
    )


@pytest.mark.parametrize("family", ["sdar", "llada2", "llada", "dream"])
def test_segments_of_one_step(family):
    """They give the product of the probabilities with which the tokens up to the EOS were drawn."""
    engine, prompt = make_engine(tiny_model(family)), [3, 4, 0, 1, 2, 3, 4, 0]
    batch, times, got = along_paths(engine, prompt, (12, 2, 2, 2))
    torch.testing.assert_close(got, batch.trace.logps.double() * times, atol=1e-5, rtol=0)
    ids, steps = batch.trace.completion_ids, batch.trace.step_map
    when = torch.arange(8) // 4 * 2 + steps
    before = (when[:, None] <= when[..., None]) & torch.ones(8, 8).tril(-1).bool()
    seen = ((ids == EOS)[:, None] & before).any(2)
    assert torch.equal(times, (~seen & (steps >= 0)).long())
    assert len(ids.unique(dim=0)) > 12 and (times != batch.completion_mask).any()


@pytest.mark.parametrize("remasking", ["low_confidence_static", "entropy", "sequential"])
@pytest.mark.parametrize("family", ["sdar", "llada"])
@torch.no_grad()
def test_when_this_is_the_likelihood(family, remasking):
    """That of an enumeration of all draws: if the order of reveals does not depend on them."""
    engine, prompt = make_engine(tiny_model(family, **few_tokens(family, 6))), [3, 1, 4, 2, 0]
    how = {"gen_length": 3, "denoising_steps": 3, "block_length": 4 if family == "sdar" else 3}
    steps = [(range(3), quota) for quota in reveal_quota(how["block_length"], 3)]
    exact = exact_distribution(engine.model, prompt, steps, remasking, 0.3, 1.5)
    batch, _, got = along_paths(engine, prompt, (24, 2, 2), remasking=remasking, **how)
    whole = batch.completion_mask.all(1)
    want = [exact[tuple(ids)] for ids in batch.trace.completion_ids[whole].tolist()]
    gap = (got.sum(1)[whole] - torch.tensor(want).log()).abs().max()
    assert len(want) > 20 and (gap < 1e-5) == (remasking in ("entropy", "sequential"))


def test_a_tree_equals_the_released_code():
    """compute_loss and its backward of THU-BPM/d-TreeRPO 3eb6f21 on this tree, the mask token left
    out as in ours; old and reference values of tilted models.
    """
    models, how = [tilted(x) for x in (0, 0.3, -0.2)], {"gen_length": 12, "temperature": 1.0}
    models[0].eos_token_ids = [224]
    _, rows, args = grow(make_engine(models[0]), [20, 22, 26, 16, 13, 27], (3, 2, 2), **how)
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
