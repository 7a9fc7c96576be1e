"""JustGRPO: its likelihood is exact and is the sampler's."""

import itertools
from dataclasses import replace

import pytest
import torch
from oracles import PROMPTS, few_tokens, tiny_model

from algos import justgrpo
from rollout import make_engine
from rollout.rows import Batch
from rollout.traces import scored

pytestmark = pytest.mark.usefixtures("one_rank")


def draw(model, prompts, n, **settings):
    """Left to right in blocks of n, 0: the model's own. -> a trace of four completions"""
    how = {"block_length": n, "denoising_steps": n or model.block_length, "records": "steps"}
    how |= {"remasking": "sequential", "temperature": 0.8, "seed": 5, "num_samples": 4}
    return make_engine(model).generate([*map(list, prompts)], **how | settings)


def score(model, trace, **settings):
    """-> batch, weights [B, K, L], log-probabilities [B, K, L]"""
    batch, args = Batch(trace, model), justgrpo.Args(temperature=0.8, **settings)
    batch.advantages = torch.ones(len(trace.prompt_ids))
    rows = justgrpo.sample_masks(batch, 0, args)
    with torch.no_grad():
        return batch, rows.weights, justgrpo.draw_logps(model, rows)


@pytest.mark.parametrize("family, n, K", [("sdar", 1, 1), ("sdar", 2, 2), ("llada", 1, 3)])
def test_the_probabilities_of_all_completions_add_up_to_one(family, n, K):
    """All of three tokens, or fewer with an EOS, over five tokens: a block of one token takes a
    single noisy copy.
    """
    model = tiny_model(family, **few_tokens(family, 6))
    model.block_length = n
    completions = torch.tensor(list(itertools.product(range(5), repeat=3)))
    trace = draw(model, [[1, 2, 3]], n, num_samples=125, gen_length=3, stop_at_eos=False)
    mask = scored(completions, trace.canvas_length, [4])
    one_of_each = (completions * ~mask == 0).all(1)  # those that differ behind the EOS are the same
    trace = replace(trace, completion_ids=completions, completion_mask=mask)
    _, weights, logps = score(model, trace)
    assert weights.shape[1] == K and one_of_each.sum() == 4**3 + 21
    chances = logps.sum((1, 2)).exp()[one_of_each]
    assert chances.sum().item() == pytest.approx(1, abs=1e-6) and chances.max() < 0.9


CASES = [("sdar", 0), ("llada2", 0), ("llada", 1), ("llada", 4), ("dream", 1)]


@pytest.mark.parametrize("family, n", CASES)
def test_the_learner_has_the_log_probabilities_of_the_sampler(family, n):
    """Of every token up to the EOS, each scored once with weight 1."""
    model = tiny_model(family)
    trace = draw(model, PROMPTS, n, gen_length=12)
    batch, weights, logps = score(model, trace)
    c = trace.completion_mask
    assert not c.all() and torch.equal(weights.sum(1), c.float())
    torch.testing.assert_close(logps.sum(1)[c], trace.logps[c].double(), atol=2e-6, rtol=0)
