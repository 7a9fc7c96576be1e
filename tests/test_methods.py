"""The methods against brute force: enumerated likelihoods and bounds, the papers' numbers, the
official code's values, and
the exact gradient of the inner loop."""

import importlib
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest
import torch
from oracles import (
    EOS,
    MASK,
    Group,
    OneBlock,
    blocks_of,
    changed,
    exact_elbo,
    full_graph_loss,
    gradient,
    made_batch,
    made_rows,
    peak_of_graphs,
    relative,
    rollout_batch,
    tiny_model,
)

from algos import bgpo, cj_grpo, coupled_grpo, d1, ebpo, espo, justgrpo, mdpo, sft, spg, wd1
from models.tiny import TINY_LLADA, random_model

families = pytest.mark.parametrize("family", ["sdar", "llada", "dream"])
CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_rank")


def draws_of(module, model, rows):
    with torch.no_grad():
        return module.draw_logps(model, rows)


def estimates_of(module, model, rows, args):
    return module.estimate_logps(draws_of(module, model, rows), rows, args)


def within(draws, want, sigmas=4.5):
    """Whether the mean of independent draws [n, ...] is the wanted value, within its standard
    error.
    """
    return (draws.mean(0) - want).abs() < sigmas * draws.std(0) / len(draws) ** 0.5 + 1e-6


def is_uniform(counts, n):
    """Chi-square test of numbers 1..n, which fails one time in 10,000."""
    times, want = torch.bincount(counts, minlength=n + 1)[1:].double(), len(counts) / n
    critical = {1: 1e-9, 2: 15.1, 3: 18.4, 4: 21.1}[n]
    return len(times) == n and ((times - want) ** 2 / want).sum() < critical


# --- likelihoods by enumeration -------------------------------------------------------------------


@families
def test_one_block_by_enumeration(family):
    """625 completions, 24 orders, 15 masks: ELBO by orders = ELBO by masks <= exact; SPG's bounds;
    BGPO's surrogate.
    """
    space = OneBlock(family)
    orders, table = space.by_order(), space.by_mask()  # [24, 625], [15, 625, 4]
    exact, elbo = orders.logsumexp(0) - math.log(24), orders.mean(0)
    assert exact.exp().sum().item() == pytest.approx(1, abs=1e-10)
    assert (elbo <= exact + 1e-10).all() and (exact - elbo).max() > 0.05
    # the masks and weights that BGPO draws are these 15, with weights n / m
    batch = made_batch(bgpo, space.ids, torch.ones(625, 4, dtype=torch.bool), mask=5)
    rows = bgpo.sample_masks(batch, 0, bgpo.Args(mc_num=4))
    masked = rows.masked[:, 0, 4:]
    assert torch.equal(rows.weights[:, 0], masked * (4 / masked.sum(1, keepdim=True)).float())
    assert len(masked.unique(dim=0)) == 15
    weights = space.patterns * 4.0 / space.patterns.sum(1, keepdim=True)  # [15, 4]
    draws = (weights[:, None] * table).sum(2).double()  # [15, 625]
    torch.testing.assert_close((space.chances[:, None] * draws).sum(0), elbo, atol=1e-6, rtol=0)
    assert (elbo - draws.mean(0)).abs().max() > 0.1  # other chances of the masks would not give it
    # SPG on 48 draws with each mask as often as it is likely: the expectation itself
    all48 = table.repeat_interleave(space.times, 0).transpose(0, 1)
    rows = made_rows(
        spg, weights.repeat_interleave(space.times, 0).expand(625, -1, -1), [1.0] * 625
    )
    bounds = [4 * spg.estimate_logps(all48, rows, spg.Args(eubo_beta=b)) for b in (1, 1.5, 2, 4)]
    lower, uppers = bounds[0][:, 0], torch.stack([bound[:, 1] for bound in bounds])
    torch.testing.assert_close(lower, elbo, atol=1e-6, rtol=0)
    assert (lower <= uppers[0] + 1e-6).all() and (uppers.diff(dim=0) >= -1e-10).all()
    # Hoelder: an upper bound where beta >= the number of tokens, and not below
    assert (exact <= uppers[3] + 1e-6).all() and (exact > uppers[1] + 1e-3).sum() > 20
    # BGPO: the mean of g lies below A exp(ELBO - old ELBO) for both signs of A
    moved = OneBlock(family, shift=0.01)
    d = (weights[:, None] * moved.by_mask()).sum(2) - draws
    mean = (moved.by_order().mean(0) - elbo).exp()
    for A in (1.3, -0.7):
        columns, gaps = d.repeat_interleave(space.times, 0).T[::25], []
        for column, ratio in zip(columns, mean[::25], strict=True):
            gaps.append(A * ratio - loss_of(bgpo, [column.tolist()], [A], 0.0, mc_num=48)[0])
        gaps = torch.stack(gaps)
        assert (gaps > -1e-6).all() and (gaps > 1e-4).double().mean() > 0.8


@pytest.mark.parametrize("module", [bgpo, espo, spg])
def test_estimates_are_unbiased_on_rollouts(module):
    """Mean of many draws = ELBO over all orders: ragged prompts, several blocks, an EOS in the
    middle of a block.
    """
    model = tiny_model()
    settings = {"p_mask_context": 0.0} if module is spg else {}
    args = module.Args(num_generations=4, mc_num=2, **settings)
    batch, draws = rollout_batch(module, model, args), []
    trace, sizes = batch.trace, [len(columns) for _, columns in blocks_of(batch)]
    assert {1, 2, 3, 4} == set(sizes) and not trace.truncated.all()
    want = [exact_elbo(model, p, trace.completion(i)) for i, p in enumerate(trace.prompt_ids)]
    for iteration in range(150):
        rows = module.sample_masks(batch, iteration, args)
        assert (rows.masked[..., batch.P :] | batch.completion_mask[:, None]).all()
        got = estimates_of(module, model, changed(rows, weights=rows.weights.double()), args)
        lengths = batch.completion_mask.sum(1)
        draws += [got[:, 0] * lengths] if module is spg else got.view(len(got), -1).unbind(1)
    assert within(torch.stack(draws), torch.tensor(want)).all()
    assert (~within(torch.stack(draws) / 1.1, torch.tensor(want), 6)).sum() >= 8  # 10 % would show


@families
def test_coupled_scores_and_spg_bounds_have_the_mean_of_their_law(family):
    """One completion of one block: all masks with their chances against 20,000 of the script's own
    draws.
    """
    space, n, where = OneBlock(family), 20000, 137
    table = torch.cat([torch.zeros(1, 4), space.by_mask()[:, where]]).double()  # [16, 4], by code
    parts = list(itertools.product([False, True], repeat=4))
    ids, c = space.ids[where].expand(n, -1), torch.ones(n, 4, dtype=torch.bool)
    code = lambda rows: (rows.masked[..., 4:] * torch.tensor([8, 4, 2, 1])).sum(-1)
    # t by Gauss-Legendre, exact for these polynomials
    want = torch.zeros(4, dtype=torch.float64)
    for x, chance in zip(*numpy.polynomial.legendre.leggauss(8), strict=True):
        t = 0.5 + 0.3 * x
        for i, part in enumerate(parts):
            likely = chance / 2 * t ** sum(part) * (1 - t) ** (4 - sum(part))
            a = torch.tensor(part).double()
            want += likely * (table[15] + a / t * table[i] + (1 - a) / (1 - t) * table[15 - i]) / 2
    args = coupled_grpo.Args(num_generations=2)
    rows = coupled_grpo.sample_masks(made_batch(coupled_grpo, ids, c, mask=5), 0, args)
    rows = changed(rows, weights=rows.weights.double())
    assert within(coupled_grpo.estimate_logps(table[code(rows)], rows, args), want).all()
    plain = changed(rows, weights=(rows.weights != 0).double() / 2)
    assert not within(coupled_grpo.estimate_logps(table[code(rows)], plain, args), want, 20).all()
    # SPG at two draws: counts k and k + 2 modulo 4, the floor form; independent subsets
    want = torch.zeros(2, dtype=torch.float64)
    for first, second in itertools.product(range(1, 16), repeat=2):
        k, other = sum(parts[first]), sum(parts[second])
        if (k + 1) % 4 + 1 == other:
            masks = torch.tensor([parts[first], parts[second]]).double()
            pair = made_rows(spg, (masks * 4 / masks.sum(1, keepdim=True))[None], [1.0])
            pair.completion_mask = torch.ones(1, 4, dtype=torch.bool)
            bounds = spg.estimate_logps(table[[first, second]][None], pair, spg.Args())[0]
            want += bounds / (4 * math.comb(4, k) * math.comb(4, other))
    args = spg.Args(p_mask_context=0.0)
    rows = spg.sample_masks(made_batch(spg, ids, c, mask=5), 0, args)
    rows = changed(rows, weights=rows.weights.double())
    assert within(spg.estimate_logps(table[code(rows)], rows, args), want).all()


# --- the law of the masks -------------------------------------------------------------------------


@pytest.mark.parametrize("module", [bgpo, spg])
def test_counts_are_uniform_and_stratified_and_subsets_are_random(module):
    """In each block of each draw; also where the number of draws is no multiple of the block."""
    model, settings = tiny_model(), {"p_mask_context": 0.0} if module is spg else {}
    args = module.Args(num_generations=4, mc_num=4, **settings)
    batch = rollout_batch(module, model, args)
    blocks, L = blocks_of(batch), batch.completion_mask.shape[1]
    for mc_num in (3, 4):
        args.mc_num, drawn = mc_num, []
        for iteration in range(130):
            rows = module.sample_masks(batch, iteration, args)
            masked, weights = (x[..., -L:].transpose(0, 1) for x in (rows.masked, rows.weights))
            assert (masked | batch.completion_mask).all()  # after the EOS all is masked
            assert not rows.masked[..., :-L].any()
            chosen = masked & batch.completion_mask
            assert torch.equal(weights != 0, chosen)
            drawn.append(chosen)
            for b, columns in blocks:
                share = chosen[:, b, columns] * (
                    len(columns) / chosen[:, b, columns].sum(1)[:, None]
                )
                assert (weights[:, b, columns] - share).abs().max() < 1e-5
        drawn = torch.stack(drawn)  # [iterations, draws, B, L]
        for n in (1, 2, 3, 4):
            m = torch.stack([drawn[:, :, b, cols].sum(2) for b, cols in blocks if len(cols) == n])
            assert all(is_uniform(m[:, :, j].flatten(), n) for j in range(mc_num)), (mc_num, n)
            times = torch.stack([(m == k).sum(2) for k in range(1, n + 1)])
            assert (times.amax(0) - times.amin(0)).max() <= (mc_num % n > 0)
    # given its size every subset is alike, and draws, blocks and iterations are independent
    full = [(b, columns) for b, columns in blocks if len(columns) == 4]
    chosen = torch.stack(
        [drawn[:, :, b, columns] for b, columns in full], 2
    )  # [i, draws, blocks, 4]
    m, first = chosen.sum(3), chosen.float().argmax(3)
    for j in range(4):
        assert is_uniform(first[:, j][m[:, j] == 1] + 1, 4)
    both = (m[1:] == 1) & (m[:-1] == 1)
    assert (first[1:] == first[:-1])[both].double().mean() == pytest.approx(1 / 4, abs=0.06)
    twins = [(x, x + 1) for x in range(len(full) - 1) if full[x][0] == full[x + 1][0]]
    x, y = (list(side) for side in zip(*twins, strict=True))
    assert (m[:, :, x] == m[:, :, y]).double().mean() == pytest.approx(1 / 4, abs=0.04)
    nested = (chosen[:, 0] <= chosen[:, 1]).all(2)[(m[:, 0] == 1) & (m[:, 1] == 2)]
    assert nested.double().mean() == pytest.approx(1 / 2, abs=0.1)


def test_d1_spg_and_wd1_hide_the_prompt_in_both_copies():
    """About 15 % of the valid prompt, new for each update; a block model reads the prompt from the
    clean copy.
    """
    model, prompts = tiny_model(), [list(range(1, 5)) * 8, [1, 2, 3]]
    for module in (d1, spg, wd1):
        args, masks = module.Args(num_generations=4), []
        batch = rollout_batch(module, model, args, prompts)
        for iteration in range(40):
            rows = module.sample_masks(batch, iteration, args)
            hidden = rows.masked[:, 0, : batch.P]
            assert (rows.masked[:, :, : batch.P] == hidden[:, None]).all()
            assert not (hidden & ~batch.valid_mask[:, : batch.P]).any()
            shown = torch.where(hidden, MASK, batch.input_ids[:, : batch.P])
            assert torch.equal(rows.input_ids, torch.cat([shown, batch.input_ids[:, batch.P :]], 1))
            assert module is spg or rows.masked[:, :, batch.P :].all()
            masks.append(hidden)
        masks = torch.stack(masks)
        share = masks.double().mean() / batch.valid_mask[:, : batch.P].double().mean()
        assert share == pytest.approx(0.15, abs=0.015) and len(masks.unique(dim=0)) == 40


def test_spg_picks_blocks_of_the_rollout():
    """3 blocks of 4 with tokens: each picked a third of the time in every draw; all after the pick,
    and before it lightly.
    """
    n, c = 6000, torch.arange(16) < 11
    batch = made_batch(spg, torch.ones(n, 18, dtype=torch.long), c.expand(n, -1))
    for mc_num in (2, 3, 5):
        rows = spg.sample_masks(batch, 1, spg.Args(mc_num=mc_num, p_mask_context=0.0))
        masked = rows.masked[:, :, 2:]
        picked = masked.long().argmax(2) // 4  # block of the first masked token
        assert all(is_uniform(picked[:, j] + 1, 3) for j in range(mc_num))
        times = torch.stack([(picked == b).sum(1) for b in range(3)], 1)
        assert (times.amax(1) - times.amin(1)).max() <= 1
        parts = masked.view(n, mc_num, 4, 4)
        assert parts.all(3)[torch.arange(4) > picked[..., None]].all()
        size = torch.where(picked == 2, 3, 4)
        count = (parts & c.view(4, 4)).sum(3).gather(2, picked[..., None])[..., 0]
        assert all(is_uniform(count[size == k], k) for k in (3, 4))
        scored = masked & c
        want = scored * (11 / scored.sum(2, keepdim=True))
        torch.testing.assert_close(rows.weights, want.float())
    rows = spg.sample_masks(batch, 1, spg.Args(p_mask_context=0.15))
    second = rows.masked[:, :, 2:].view(n, 2, 4, 4)[:, :, 1]
    light = rows.masked[:, :, 2:6][(second.sum(2) > 0) & (second.sum(2) < 4)]
    assert light.double().mean() == pytest.approx(0.15, abs=0.02)


def test_coupled_masks_partition_the_completion():
    """All, a part, the rest; one t of U(0.2, 0.8) for each group; tokens independent given t;
    nothing shown after the EOS.
    """
    model, args = tiny_model(), coupled_grpo.Args(num_generations=4)
    batch = rollout_batch(coupled_grpo, model, args)
    c, P = batch.completion_mask, batch.P
    rows = coupled_grpo.sample_masks(batch, 0, args)
    everything, part, rest = rows.masked[:, :, P:].unbind(1)
    assert not rows.masked[:, :, :P].any() and torch.equal(rows.input_ids, batch.input_ids)
    assert everything.all() and torch.equal(part ^ rest, c) and (part & rest).eq(~c).all()
    assert torch.equal(rows.weights != 0, rows.masked[:, :, P:] & c[:, None])
    other = coupled_grpo.sample_masks(batch, 1, args)
    assert not torch.equal(other.masked, rows.masked)
    n, args = 20000, coupled_grpo.Args(num_generations=2)
    c = torch.ones(n, 4, dtype=torch.bool)
    rows = coupled_grpo.sample_masks(made_batch(coupled_grpo, torch.zeros(n, 6).long(), c), 0, args)
    a, w = rows.masked[:, 1, -4:], rows.weights
    t = torch.where(a.any(1), 1 / (2 * w[:, 1].amax(1)), 1 - 1 / (2 * w[:, 2].amax(1)))
    torch.testing.assert_close(t[::2], t[1::2])  # one for a group
    want = torch.stack([c / 2, a / (2 * t[:, None]), ~a / (2 * (1 - t[:, None]))], 1)
    torch.testing.assert_close(w, want)
    assert t.mean() == pytest.approx(0.5, abs=0.01) and t.std() == pytest.approx(0.1732, abs=0.004)
    assert 0.2 <= t.min() < 0.202 and 0.798 < t.max() <= 0.8
    residual = a.double() - t[:, None]
    assert (
        residual.mean(0).abs().max() < 0.02
        and abs(residual.T @ residual / n).fill_diagonal_(0).max() < 0.01
    )


@pytest.mark.parametrize("module", [d1, bgpo, coupled_grpo, spg, espo, ebpo, wd1, justgrpo])
def test_draws_depend_on_the_sample_alone(module):
    """Not on padding, on the part of the batch that a rank holds, or on the width of other
    completions.
    """
    model, args = tiny_model(), module.Args(num_generations=4)
    batch = rollout_batch(module, model, args)
    pad = lambda x, value: torch.nn.functional.pad(x, (3, 0), value=value)
    wide = changed(
        batch,
        input_ids=pad(batch.input_ids, EOS),
        valid_mask=pad(batch.valid_mask, False),
        P=batch.P + 3,
    )
    a, b = module.sample_masks(batch, 0, args), module.sample_masks(wide, 0, args)
    assert torch.equal(a.masked, b.masked[..., 3:]) and torch.equal(a.weights, b.weights)
    torch.testing.assert_close(
        draws_of(module, model, a), draws_of(module, model, b), atol=1e-12, rtol=0
    )
    assert torch.equal(module.sample_masks(batch, 0, args).masked, a.masked)
    # a rank that holds the later groups alone
    cut = lambda x: {k: v[4:] for k, v in vars(x).items() if isinstance(v, torch.Tensor)}
    part = changed(batch, **cut(batch), trace=changed(batch.trace, **cut(batch.trace)))
    assert torch.equal(module.sample_masks(part, 0, args).masked, a.masked[4:])
    found = []
    for prompts in ([[1, 2, 3, 1]], [[1, 2, 3, 1], [4, 1, 2, 3, 0]]):
        batch = rollout_batch(module, model, args, prompts + [[2, 2]])
        rows, L = module.sample_masks(batch, 0, args), batch.completion_mask.shape[1]
        found.append((rows.masked[:4, :, -L:][..., :8], rows.weights[:4, :, :8]))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


# --- numbers of the papers and values of the official code ----------------------------------------


def loss_of(module, estimates, A, old=None, ref=None, **settings):
    """-> objective (minus the loss), its slope. estimates [R, ...]"""
    estimates = torch.tensor(estimates, dtype=torch.float64).requires_grad_()
    old = estimates.detach() if old is None else torch.tensor(old, dtype=torch.float64)
    rows = made_rows(module, torch.ones(len(A), 1, 1), A)
    ref = ref if ref is None else torch.tensor(ref, dtype=torch.float64)
    loss, _ = module.policy_loss(estimates, old, ref, rows, module.Args(**settings))
    return -loss.item(), -torch.autograd.grad(loss, estimates)[0]


@pytest.mark.parametrize("module", [d1, coupled_grpo, cj_grpo])
def test_clip_and_kl(module):
    """eps 0.5, symmetric, no dual clip (which would give -3 for ratio 4, A -1); k3 towards the
    reference (reversed: 0.021403).
    """
    for ratio, A, objective, live in [
        (2, 1, 1.5, 0),
        (2, -1, -2, 1),
        (4, -1, -4, 1),
        (0.25, -1, -0.5, 0),
    ]:
        got, slope = loss_of(module, [[math.log(ratio)]], [A], [[0.0]], epsilon=0.5, beta=0.0)
        assert got == pytest.approx(objective) and bool(slope.any()) == live
    got, _ = loss_of(module, [[-1.0]], [0.0], ref=[[-1.2]], beta=1.0)
    assert -got == pytest.approx(0.018731, abs=1e-6)


def test_bgpo_does_not_overflow_in_the_bound_that_is_not_taken():
    assert loss_of(bgpo, [[1000.0]], [1.0], [[0.0]], mc_num=1)[1].isfinite().all()


def test_spg_bounds_by_the_papers_numbers():
    """p = 0.25, L = 4, two draws of two tokens; slopes follow the confident draw; log space where
    p^1.5 is 0 in fp32.
    """

    def bounds(masks, logps, beta=1.5):
        masked = torch.tensor(masks, dtype=torch.float64)
        weights = masked * masked.shape[1] / masked.sum(1, keepdim=True)
        rows = made_rows(spg, weights[None], [1.0])
        rows.completion_mask = torch.ones(1, masked.shape[1])
        logps = torch.as_tensor(logps, dtype=torch.float64).expand(masked.shape)
        return spg.estimate_logps(logps[None], rows, spg.Args(eubo_beta=beta))[0]

    lp = math.log(0.25)
    two = [[1, 1, 0, 0], [0, 1, 1, 0]]
    assert bounds([two[0]], lp).tolist() == pytest.approx([-1.386294, -0.924196], abs=1e-6)
    assert bounds(two, lp, 1.0)[1].item() == pytest.approx(-1.155245, abs=1e-6)
    assert bounds(two, lp)[1].item() == pytest.approx(-1.232262, abs=1e-6)
    lp = torch.tensor([[0.9], [0.1]], dtype=torch.float64).log().requires_grad_()
    (slope,) = torch.autograd.grad(bounds([[1], [1]], lp)[1], lp)
    assert slope.flatten().tolist() == pytest.approx([0.964286, 0.035714], abs=1e-6)
    tiny = torch.full((1, 1, 1), math.log(1e-32), requires_grad=True)
    rows = changed(made_rows(spg, [[[1.0]]], [1.0]), weights=torch.ones(1, 1, 1))
    eubo = spg.estimate_logps(tiny, rows, spg.Args())[0, 1]
    assert torch.autograd.grad(eubo, tiny)[0].item() == 1


ADVANTAGES = [  # script, settings, rewards, advantages
    (d1, {}, [2.0, 0, 0, 0, 0, 1], [1.5, -0.5, -0.5, -0.5, -0.5, 0.5]),
    (spg, {}, [2.0, 0, 0, 0, 0, 1], [1.5, -0.5, -0.5, -0.5, -0.5, 0.5]),
    (coupled_grpo, {}, [1.0, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
    (coupled_grpo, {"baseline": "loo"}, [1.0, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
    (ebpo, {}, [1.0, 1] + [0.0] * 6, [1.620182] * 2 + [-0.540060] * 6),
    (espo, {}, [1.0, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
    (bgpo, {}, [1.0, 1] + [0.0] * 6, [1.620182] * 2 + [-0.540060] * 6),
    (cj_grpo, {}, [1.0, 1] + [0.0] * 6, [1.620182] * 2 + [-0.540060] * 6),
    (cj_grpo, {"scale_rewards": False}, [1.0, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
    (justgrpo, {}, [1.0, 1] + [0.0] * 6, [1.619836] * 2 + [-0.539945] * 6),
    # softmax of A and of -A as in the released code
    (wd1, {}, [2.0, 0, 0, 0, 0, 1], [0.493721] + [-0.151178] * 4 + [0.110993]),
    (wd1, {"psi": 0.5}, [2.0, 0, 0, 0, 0, 1], [0.250927] + [-0.081512] * 4 + [0.075120]),
    # three steps: gains 1 -1 1, 0 1 0 and 0 0 0 plus means of the later rewards
    (
        mdpo,
        {},
        [[1.0, 0, 1], [0, 1, 1], [0, 0, 0]],
        [[0.872757, -0.5773, 0.9999], [0.218189, 1.154601, 0], [-1.090946, -0.5773, -0.9999]],
    ),
]


@pytest.mark.parametrize("module, settings, rewards, want", ADVANTAGES)
def test_advantages(module, settings, rewards, want):
    """By hand, two groups; exactly 0 for equal rewards: an ulp would be a full step of AdamW."""
    args = module.Args(num_generations=len(want), **settings)
    got = module.compute_advantages(torch.tensor(2 * rewards), args)
    torch.testing.assert_close(got, torch.tensor(2 * want), atol=1e-5, rtol=0)
    for G, value in itertools.product((2, 6, 8, 10), (0.1, 0.3, 0.7, 1 / 3, 2.1)):
        equal = torch.full((G, *got.shape[1:]), value)
        assert not module.compute_advantages(equal, replace(args, num_generations=G)).any()


TEXT = torch.tensor([
    [20, 22, 26, 16, 13, 27, 17, 9, 18, 16, 13, 11, 13, 22, 17, 10, 21, 27],
    [13, 23, 26, 20, 25, 6, 13, 23, 23, 7, 10, 8, 6, 20, 21, 18, 10, 6],
])  # fmt: skip
D1 = [["010001111111111111"], ["100010111111111111"]]
SPG = [["000010000111011111", "100000101011111111"], ["000000010111111111", "000000011100100101"]]
COUPLED = [
    ["000000111111111111", "000000010010110010", "000000101101001101"],
    ["000000111111111111", "000000011110011101", "000000100001100010"],
]
T = 1 / 2.1212158977855418
RELEASED = [  # module, masks, lengths, advantages, loss, gradient norm, first estimates
    (d1, D1, [7, 12], [1.5, -0.5], -0.16257532, 39.217370, [-6.655033, -5.137215, -8.31731]),
    (
        coupled_grpo,
        COUPLED,
        [12, 12],
        [1.5, -0.5],
        -0.41799942,
        80.015862,
        [-10.004365, -11.106958],
    ),
    (spg, SPG, [7, 12], [1.5, -0.5], 1.5620037, 74.788597, [-7.721592, -7.770414]),
    (spg, SPG, [7, 12], [-0.5, 1.5], 6.8037224, 88.594437, [-7.721592, -7.770414]),
    # rewards 0 and 0.5
    (wd1, D1, [7, 12], [-0.24491867, 0.24491867], 12.351006, 191.84248, [-6.655033, -5.137215]),
]


def tilted(tilt=0.0):
    """A tiny LLaDA; tilt: how far it is from the first."""
    model = random_model(TINY_LLADA)
    width = model.lm_head.weight.shape[1]
    with torch.no_grad():
        model.lm_head.weight.mul_(10 * (1 + tilt * torch.linspace(-1, 1, width)))
    return model


@pytest.mark.parametrize("module, masks, lengths, A, loss, norm, first", RELEASED)
def test_a_tiny_llada_equals_the_released_code(module, masks, lengths, A, loss, norm, first):
    """compute_loss and its backward of dllm-reasoning/d1 837888f, apple/ml-diffucoder f735e01,
    facebookresearch/SPG a1c7120 and xiaohangt/wd1 0898985 on this model's logits, the mask token
    left out as in ours; old and reference values of tilted models."""

    model, c = tilted(), torch.arange(12) < torch.tensor(lengths)[:, None]
    masked = torch.tensor([[[char == "1" for char in draw] for draw in row] for row in masks])
    scored = masked[:, :, 6:] & c[:, None]
    weights = scored * (c.sum(1)[:, None] / scored.sum(2))[..., None]
    if module is coupled_grpo:
        weights = scored / (2 * torch.tensor([1, T, 1 - T]))[:, None]
    batch = made_batch(module, TEXT, c, mask=model.mask_token_id)
    batch.advantages = torch.tensor(A)
    rows, args = (
        module.Rows(batch, masked, c[:, None] if masks is D1 else weights),
        module.Args(num_generations=2),
    )
    got = estimates_of(module, model, rows, args)
    got = got[0, : len(first)]
    torch.testing.assert_close(got, torch.tensor(first), atol=1e-5, rtol=1e-6)
    rows.old = estimates_of(module, tilted(0.3), rows, args)
    rows.ref = estimates_of(module, tilted(-0.2), rows, args) if module.USES_REF else None
    metrics = module.backward(model, rows, 1.0, args)
    assert metrics["loss/total"].item() == pytest.approx(loss, abs=1e-5)
    assert gradient(model).norm().item() == pytest.approx(norm, rel=1e-5)


# --- the inner loop -------------------------------------------------------------------------------

TOLD = [
    (method, family)
    for method in (
        "d1",
        "bgpo",
        "coupled_grpo",
        "spg",
        "cj_grpo",
        "mdpo",
        "espo",
        "ebpo",
        "wd1",
        "justgrpo",
        "tpg",
    )  # fmt: skip
    for family in ("sdar", "llada", "dream")
    if (method, family) != ("mdpo", "sdar") and (method != "ebpo" or family == "sdar")
]


@pytest.mark.parametrize("method, family", TOLD)
def test_the_gradient_is_that_of_the_full_graph(method, family):
    """To 1e-10 in fp64 for micro-batches of some rows and of some draws of a row, and for any order
    of rows and draws, clip and KL active; one shifted mask is seen.
    """
    module, model = importlib.import_module(f"algos.{method}"), tiny_model(family)
    chosen = {"beta": 0.3, "epsilon": 0.1, "mc_num": 3}
    chosen = {name: value for name, value in chosen.items() if hasattr(module.Args, name)}
    args = module.Args(num_generations=4, micro_batch_size=1, **chosen)
    prompts = (1, 2, 3), (4, 1, 2, 3, 0, 1)
    batch = rollout_batch(module, model, args, prompts, 8, module.RECORDS)
    batch.num_tokens, batch.num_sequences = 50.0, 24.0  # other ranks have more
    rows = module.sample_masks(batch, 0, args)
    before, reference = tiny_model(family, shift=0.02), tiny_model(family, 1)
    K, draws = rows.masked.shape[1], module.DRAWS(args, batch.trace.num_replays)
    assert len(rows.masked) * K <= len(batch.input_ids) * draws  # what the plan counts
    assert method in ("mdpo", "tpg") or K == draws

    def valued(rows):
        rows = changed(rows, weights=rows.weights.double())
        ref = estimates_of(module, reference, rows, args) if module.USES_REF else None
        return changed(rows, old=estimates_of(module, before, rows, args), ref=ref)

    def inner_gradient(rows, size=1000, **values):
        model.zero_grad()
        args.micro_batch_size = size
        rows = changed(valued(rows.split(size)), **values)
        assert rows.masked.shape[1] <= size
        for micro, _ in module.micro_batches(rows, args):
            module.backward(model, micro, 1, args)
        return gradient(model)

    want = gradient(model, full_graph_loss(method, model, valued(rows), args))
    for size in (1, 5, 1000):
        if module.DRAWS_TOGETHER and size < K:
            with pytest.raises(AssertionError):
                inner_gradient(rows, size)
        else:
            assert relative(inner_gradient(rows, size), want) < 1e-10
    order = torch.randperm(len(rows.masked), generator=torch.Generator().manual_seed(0))
    shuffled = rows.select(order)
    shuffled.masked, shuffled.weights = shuffled.masked.flip(1), shuffled.weights.flip(1)
    assert relative(inner_gradient(shuffled), want) < 1e-10
    assert relative(inner_gradient(changed(rows, masked=rows.masked.roll(1, -1))), want) > 0.01
    if method == "bgpo":  # with one update the old values are the current ones
        now = changed(valued(rows), old=estimates_of(module, model, valued(rows), args))
        want = gradient(model, full_graph_loss(method, model, now, args))
        assert relative(inner_gradient(rows, old=None), want) < 1e-10


@pytest.mark.parametrize("module", [bgpo, spg])
def test_memory_is_that_of_a_micro_batch_and_gradients_are_reduced_once(monkeypatch, module):
    """Whatever the number of draws, if the loss is a sum over them; else they must fit."""
    model, peaks = tiny_model(), []
    (group,) = model.groups = [Group()]
    synced = group.synced
    monkeypatch.setattr(module, "optimizer_step", lambda optimizer, sums, step, args: sums)
    args = module.Args(num_generations=4, num_iterations=1, micro_batch_size=4)
    batch = rollout_batch(module, model, args)
    step = lambda: module.update(model, None, None, batch, 0, args)
    for args.mc_num in (2, 4, 8, 16):
        if module.DRAWS_TOGETHER and args.mc_num > 4:
            with pytest.raises(AssertionError):
                step()
            continue
        synced.clear()
        peaks.append(peak_of_graphs(step))
        assert synced == [False] * (2 * args.mc_num - 1) + [True]  # 8 live rows
    assert max(peaks) < 1.1 * peaks[0]
    args.mc_num, args.sync_every_backward = 4, True
    synced.clear()
    step()
    assert len(synced) == 8 and all(synced)
    args.micro_batch_size = 32
    assert peak_of_graphs(step) > 3 * peaks[0]


# --- SFT ------------------------------------------------------------------------------------------


def sft_batch(model, rows, step=0, rank=0, ranks=1, **settings):
    args = sft.Args(batch_size=len(rows), **{"group_by_length": False} | settings)
    return args, sft.make_batch(rows, args, model, step, rank, ranks, CPU)


def test_sft_tails_belong_to_the_answer():
    """Block models: end tokens fill the last block. Others: 0 to eos_tail, within max_length, each
    row for itself.
    """
    model = tiny_model()
    _, batch = sft_batch(model, [([1, 2, 3], [4, EOS]), ([1], [2, 3, 4, 0, 1, 2, EOS])])
    assert batch.input_ids.tolist() == [[1, 2, 3, 4] + [EOS] * 4, [1, 2, 3, 4, 0, 1, 2, EOS]]
    assert batch.answer_mask.sum(1).tolist() == [5, 7] and batch.valid_mask.all()
    _, batch = sft_batch(model, [([1, 2, 3], [EOS]), ([1], [2] * 7)])
    assert batch.valid_mask.sum(1).tolist() == [4, 8] and batch.num_tokens == 8
    model = tiny_model("llada")
    rows = ([1, 2], [3, EOS]), ([1, 2], [3, 4, 0, 1, EOS]), ([1, 2], [3, 4, 0, 1, 2, 0, EOS])
    lengths = lambda rows, step=0: (
        sft_batch(model, rows, step, eos_tail=5, max_length=9)[1].valid_mask.sum(1).tolist()
    )  # noqa: E501
    found = [lengths([row] * 64) for row in rows]
    assert [set(lengths) for lengths in found] == [{4, 5, 6, 7, 8, 9}, {7, 8, 9}, {9}]
    assert found[1] == [min(n + 3, 9) for n in found[0]] and lengths([rows[0]] * 64, 1) != found[0]
    assert lengths(rows) == [found[i][i] for i in range(3)]


def test_sft_noise_is_stratified_over_the_step_and_keyed_by_the_example():
    model, rows = tiny_model(), [([1, 2, 3, 4], [4] * 400)] * 8
    args, batch = sft_batch(model, rows, 3)
    masked, weights, _ = sft.sample_masks(batch, args, model.objective)
    t = 1 / weights.amax(1)
    torch.testing.assert_close(
        t.sort().values.diff(), torch.full((7,), 0.999 / 8), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(masked.sum(1) / 400, t, atol=0.12, rtol=0)
    _, second = sft_batch(model, rows, 3, 1, 2)  # the second of two ranks
    assert torch.equal(sft.sample_masks(second, args, model.objective)[0], masked[1::2])
    for other in (replace(batch, step=4), replace(batch, seed=1)):
        assert not torch.equal(other.uniform(), batch.uniform())
        assert (sft.sample_masks(other, args, model.objective)[1].amax(1) != weights.amax(1)).all()


# --- MDPO's rewards -------------------------------------------------------------------------------


def test_mdpo_grades_every_prediction():
    """Up to its own EOS; a step without a forward repeats the last."""
    masked = torch.tensor([[[1, 1, 1], [0, 0, 0], [0, 1, 0]]]).bool()
    predictions = torch.tensor([[[1, EOS, 3], [0, 0, 0], [1, 2, 4]]])
    records, tokenizer = {"masked": masked, "predictions": predictions}, SimpleNamespace()
    trace = SimpleNamespace(records=records, settings={"eos_token_ids": [EOS]})
    tokenizer.decode = lambda ids, skip_special_tokens: ids
    reward = lambda texts, examples: [
        {"a": float(sum(text)), "b": example} for text, example in zip(texts, examples, strict=True)
    ]
    got = mdpo.step_rewards(trace, reward, tokenizer, [0.25])
    assert got.tolist() == [[6.25, 6.25, 7.25]]
