"""JustGRPO: its likelihood is exact, is the sampler's, and gives the released code's gradient."""

import itertools
from dataclasses import replace

import pytest
import torch
from oracles import TEXT, made_batch, tilted, tiny_model, updated

from algos import justgrpo
from rollout import make_engine
from rollout.rows import Batch
from rollout.traces import scored

PROMPTS = [[3, 4, 0], [1, 2, 3, 4, 0, 1], [2, 3]]  # 3, 2 and 2 modulo the block of 4
pytestmark = pytest.mark.usefixtures("one_rank")


def draw(model, prompts, n, **settings):
    """Left to right in blocks of n, 0: the model's own."""
    how = {"block_length": n, "denoising_steps": n or model.block_length, "records": "steps"}
    how |= {"remasking": "sequential", "temperature": 0.8, "seed": 5}
    return make_engine(model).generate(prompts, **how, **settings)


def score(model, trace, **settings):
    """-> batch, rows, log-probabilities [B, K, L]"""
    batch, args = Batch(trace, model), justgrpo.Args(**{"temperature": 0.8} | settings)
    batch.advantages = torch.ones(len(trace.prompt_ids))
    rows = justgrpo.sample_masks(batch, 0, args)
    with torch.no_grad():
        return batch, rows, justgrpo.draw_logps(model, rows)


@pytest.mark.parametrize("family, n, K", [("sdar", 1, 1), ("sdar", 2, 2), ("llada", 1, 3)])
def test_the_probabilities_of_all_completions_add_up_to_one(family, n, K):
    """All of three tokens, or fewer with an EOS, over five tokens: a block of one token takes a
    single noisy copy.
    """
    ids = {"vocab_size": 6, "mask_token_id": 5, "eos_token_id": 4, "pad_token_id": 4}
    ids |= {"embedding_size": 6} if family == "llada" else {}
    model = tiny_model(family, **ids)
    model.block_length = n
    completions = torch.tensor(list(itertools.product(range(5), repeat=3)))
    trace = draw(model, [[1, 2, 3]], n, num_samples=125, gen_length=3, stop_at_eos=False)
    mask = scored(completions, trace.canvas_length, [4])
    one_of_each = (completions * ~mask == 0).all(1)  # those that differ behind the EOS are the same
    trace = replace(trace, completion_ids=completions, completion_mask=mask)
    _, rows, logps = score(model, trace)
    assert rows.masked.shape[1] == K and one_of_each.sum() == 4**3 + 21
    chances = logps.sum((1, 2)).exp()[one_of_each]
    assert chances.sum().item() == pytest.approx(1, abs=1e-6) and chances.max() < 0.9


@pytest.mark.parametrize(
    "family, n", [("sdar", 0), ("llada2", 0), ("llada", 1), ("llada", 4), ("dream", 1)]
)
def test_the_learner_has_the_log_probabilities_of_the_sampler(family, n):
    """Of every token up to the EOS, each scored once with weight 1; and so where three of n
    positions stand for all, with weight n / 3, each chosen as often.
    """
    model = tiny_model(family)
    trace = draw(model, PROMPTS, n, num_samples=4, gen_length=12)
    batch, rows, logps = score(model, trace)
    c, steps = trace.completion_mask, (rows.weights > 0).any(2).sum(1)
    assert not c.all() and torch.equal(rows.weights.sum(1), c.float())
    torch.testing.assert_close(logps.sum(1)[c], trace.logps[c].double(), atol=2e-6, rtol=0)
    _, rows, some = score(model, trace, positions=3)
    chosen, found, args = (rows.weights > 0).any(1), [], justgrpo.Args(positions=3)
    torch.testing.assert_close(some.sum(1), logps.sum(1) * chosen, atol=2e-6, rtol=0)
    for iteration in range(400):
        w = justgrpo.sample_masks(batch, iteration, args).weights
        assert torch.equal((w > 0).any(2).sum(1), steps.clamp(max=3)) and w.shape[1] <= 3
        assert torch.allclose(w.amax((1, 2)), (steps / 3).clamp(min=1))
        found.append(w.sum(1))
    mean = torch.stack(found).mean(0)
    torch.testing.assert_close(mean, c.float(), atol=0.45, rtol=0)
    assert abs(mean.sum() / c.sum() - 1) < 0.02


def test_the_gradient_is_that_of_the_released_code():
    """logprob_loss of LeapLabTHU/JustGRPO eebe50e on this model's logits, the mask token left out
    as in ours, its divisor 2 + 1e-5 as 2: rewards 1 and -1, temperature 0.8.
    """
    args = justgrpo.Args(num_generations=2, temperature=0.8, micro_batch_size=24)
    batch = made_batch(justgrpo, TEXT, torch.ones(2, 12, dtype=torch.bool), mask=0)
    batch.trace.replay_map, batch.trace.num_replays = torch.arange(12).expand(2, -1), 12
    batch.advantages = justgrpo.compute_advantages(torch.tensor([1.0, -1.0]), args)
    (rows,) = justgrpo.prepare_rows(None, None, batch, args)
    with torch.no_grad():
        got = justgrpo.draw_logps(tilted(), rows).sum(1)[:, :3]
    want = [[-7.682903, -5.126947, -8.923998], [-9.829122, -8.118032, -8.553389]]
    torch.testing.assert_close(got, torch.tensor(want), atol=1e-5, rtol=0)
    _, grads = updated(justgrpo, tilted(), rows, args)
    assert grads.norm().item() == pytest.approx(43.611939, rel=1e-5)
