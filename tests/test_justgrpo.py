"""JustGRPO: its likelihood is exact, is the sampler's, and gives the released code's gradient."""

import itertools
from dataclasses import replace

import pytest
import torch
from oracles import gradient, made_batch, tiny_model
from test_methods import TEXT
from test_samplers import SIZES, model_of

from algos import justgrpo
from models.tiny import TINY_LLADA, random_model
from rollout import make_engine
from rollout.traces import scored

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13]]  # 3, 2 and 2 modulo the block of 4


pytestmark = pytest.mark.usefixtures("one_rank")


def draw(model, prompts, n, temperature=0.8, **settings):
    """Left to right in blocks of n, 0: the model's own."""
    how = {"block_length": n, "denoising_steps": n or model.block_length, "records": "steps"}
    how |= {"remasking": "sequential", "temperature": temperature, "seed": 5}
    return make_engine(model).generate(prompts, **how, **settings)


def score(model, trace, **settings):
    """-> batch, rows, log-probabilities [B, K, L]"""
    batch, args = justgrpo.Batch(trace, model), justgrpo.Args(**settings)
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
    _, rows, logps = score(model, trace, temperature=0.8)
    assert rows.masked.shape[1] == K and one_of_each.sum() == 4**3 + 21
    chances = logps.sum((1, 2)).double().exp()[one_of_each]
    assert chances.sum().item() == pytest.approx(1, abs=1e-6) and chances.max() < 0.9


@pytest.mark.parametrize(
    "family, n", [("sdar", 0), ("llada2", 0), ("llada", 1), ("llada", 4), ("dream", 1)]
)
def test_the_learner_has_the_log_probabilities_of_the_sampler(family, n):
    """Of every token up to the EOS, each scored once with weight 1, in order."""
    model = model_of(SIZES[family], scale=9)
    trace = draw(model, PROMPTS, n, num_samples=4, gen_length=12)
    for b in range(12):
        places = list(zip(trace.blocks(b), trace.step_map[b].tolist(), strict=True))
        places = [place for place in places if place[1] >= 0]
        assert places == sorted(set(places))
    _, rows, logps = score(model, trace, temperature=0.8)
    c = trace.completion_mask
    assert not c.all() and torch.equal(rows.weights.sum(1), c.float())
    torch.testing.assert_close(logps.sum(1).double()[c], trace.logps[c], atol=2e-6, rtol=0)


@pytest.mark.parametrize("family, n", [("sdar", 0), ("llada", 1)])
def test_some_positions_stand_for_all(family, n):
    """Three of n are scored as they are among all, with weight n / 3; each is chosen as often."""
    model = model_of(SIZES[family], scale=9)
    trace = draw(model, PROMPTS, n, num_samples=2, gen_length=12)
    batch, rows, exact = score(model, trace)
    steps = (rows.weights > 0).any(2).sum(1)
    _, rows, logps = score(model, trace, positions=3)
    chosen = (rows.weights > 0).any(1)
    torch.testing.assert_close(logps.sum(1), exact.sum(1) * chosen, atol=2e-6, rtol=0)
    found, args = [], justgrpo.Args(positions=3)
    for iteration in range(400):
        w = justgrpo.sample_masks(batch, iteration, args).weights
        assert torch.equal((w > 0).any(2).sum(1), steps.clamp(max=3)) and w.shape[1] == 3
        assert torch.allclose(w.amax((1, 2)), (steps / 3).clamp(min=1))
        found.append(w.sum(1))
    mean = torch.stack(found).mean(0)
    torch.testing.assert_close(mean, trace.completion_mask.float(), atol=0.45, rtol=0)
    assert abs(mean.sum() / trace.completion_mask.sum() - 1) < 0.02


def test_the_gradient_is_that_of_the_released_code():
    """logprob_loss of LeapLabTHU/JustGRPO eebe50e on this model's logits, the mask token left out
    as in ours, its divisor 2 + 1e-5 as 2: rewards 1 and -1, temperature 0.8.
    """
    model, args = random_model(TINY_LLADA), justgrpo.Args(num_generations=2, temperature=0.8)
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
    batch = made_batch(justgrpo, TEXT, torch.ones(2, 12, dtype=torch.bool), mask=0)
    batch.trace.replay_map, batch.trace.num_replays = torch.arange(12).expand(2, -1), 12
    batch.advantages = justgrpo.compute_advantages(torch.tensor([1.0, -1.0]), args)
    rows = justgrpo.sample_masks(batch, 0, args)
    with torch.no_grad():
        got = justgrpo.draw_logps(model, rows).sum(1)[:, :3]
    want = [[-7.682903, -5.126947, -8.923998], [-9.829122, -8.118032, -8.553389]]
    torch.testing.assert_close(got, torch.tensor(want), atol=1e-5, rtol=0)
    justgrpo.backward(model, rows, 1.0, args)
    assert gradient(model).norm().item() == pytest.approx(43.611939, rel=1e-5)


def test_the_cost_is_said_before_weights_are_read(monkeypatch, capsys):
    monkeypatch.setattr(justgrpo, "setup_distributed", lambda *_: 1 / 0)
    passes = {"tiny-llada": (3, 1536), "tiny-sdar": (1, 512)}
    for model, (each, total) in passes.items():
        how = {"block_length": 1, "denoising_steps": 1} if each > 1 else {"denoising_steps": 4}
        with pytest.raises(ZeroDivisionError):
            justgrpo.main(justgrpo.Args(model=model, positions=3, **how))
        assert f"{total:,} forward and backward passes, {each} a comp" in capsys.readouterr().out
