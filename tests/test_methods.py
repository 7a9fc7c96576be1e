"""The methods against brute force: enumerated likelihoods and bounds, the law of their masks, the
papers' numbers, and values of the released code.
"""

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
    RELEASED,
    TEXT,
    OneBlock,
    blocks_of,
    changed,
    estimates_of,
    exact_elbo,
    made_batch,
    made_rows,
    rollout_batch,
    small_args,
    tilted,
    tiny_model,
    updated,
)

from algos import (
    bgpo,
    cj_grpo,
    coupled_grpo,
    d1,
    ebpo,
    espo,
    justgrpo,
    mdpo,
    sft,
    spg,
    tpg,
    tracerl,
    vrpo,
    wd1,
)

families = pytest.mark.parametrize("family", ["sdar", "llada", "dream"])
pytestmark = pytest.mark.usefixtures("one_rank")


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


PROMPT, COMPLETION = [4, 1, 2, 3, 0, 1], [2, 0, 3, 1, 4, 0, 2, 2, 5]
BLOCKS = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3])  # the EOS ends the third one early


def drawn(module, u, noise):
    """-> rows of one completion for each level u [n], with noise [n, 4] in every block; the sampler
    went on behind the EOS
    """
    n = len(u)
    ids = torch.tensor(PROMPT + COMPLETION + [0] * 3).expand(n, -1)
    c = (torch.arange(12) < 9).expand(n, -1)
    batch = made_batch(module, ids, c, BLOCKS.expand(n, -1))
    parts = {0: noise, 1: noise.flip(1)}
    uniform = lambda key: (
        parts[key].repeat(1, 5)[:, :18] if key in parts else u[:, None].repeat(1, 18)
    )
    batch.uniform = lambda iteration, key: uniform(key)
    return module.sample_masks(batch, 0, small_args(module, p_mask_context=0.0))


@pytest.mark.parametrize("module", [bgpo, ebpo, espo, spg])
def test_each_block_is_unbiased(module):
    """All levels and orders of noise, for each block of each draw: prompt tokens in the first, a
    last one cut by the EOS. The mean is the ELBO over all orders.
    """
    model = tiny_model()
    orders = torch.tensor(list(itertools.permutations([0.2, 0.4, 0.6, 0.8])))
    u = ((torch.arange(60) + 0.5) / 60).double().repeat_interleave(24)
    rows = drawn(module, u, orders.repeat(60, 1))
    assert not rows.masked[..., :6].any() and rows.masked[..., 15:].all()
    with torch.no_grad():
        logps = module.draw_logps(model, rows)
    terms = rows.weights.double() * logps  # [1440, K, 12]
    if module is espo:  # a pair of masks is a draw
        terms = terms.unflatten(1, (2, 2)).mean(2)
    ends = [0.0] + [exact_elbo(model, PROMPT, COMPLETION[:end]) for end in (2, 6, 9)]
    for block, want in enumerate(torch.tensor(ends).double().diff()):
        got = terms[..., BLOCKS == block].sum(2)
        assert (got.std(0) > 0.01).all()
        torch.testing.assert_close(got.mean(0), want.expand(2), atol=1e-6, rtol=0)
    whole = module.estimate_logps(logps, rows, spg.Args())
    whole = whole[:, 0] * 9 if module is spg else whole  # its lower bound, per token
    assert whole.mean().item() == pytest.approx(ends[-1], abs=1e-5)


def test_counts_of_ebpos_released_code():
    """_forward_process_ebpo of yjyddq/DARE 83ae8a3 for 6 + 9 tokens, two draws, offset 0.35."""
    noise = torch.tensor([[0.4, 0.1, 0.3, 0.2]])
    chosen = drawn(ebpo, torch.tensor([0.35]).double(), noise).weights[0] != 0
    counts = [[int(draw[BLOCKS == b].sum()) for b in range(3)] for draw in chosen]
    assert counts == [[1, 3, 3], [2, 1, 1]]
    # tokens of least noise: of .4 .1 .3 .2 three, then of .2 .3 .1 .4 one
    assert chosen[:, 2:6].tolist() == [[False, True, True, True], [False, False, True, False]]


@families
def test_law_and_variance_of_espos_pairs(family):
    """Each size of a part as often, all parts of a size alike. Over all 16 parts of a block, for
    625 completions, the mean is the ELBO, with less variance than that of one side.
    """
    c, space = torch.ones(8000, 4, dtype=torch.bool), OneBlock(family)
    rows = espo.sample_masks(made_batch(espo, c.long(), c), 0, espo.Args(mc_num=1))
    code = (rows.masked[:, 0] * torch.tensor([8, 4, 2, 1])).sum(1)
    chances = torch.cat([torch.full((1,), 0.2), space.chances * 4 / 5]).double()
    assert within((code[:, None] == torch.arange(16)).double(), chances).all()
    assert torch.equal(rows.masked[:, 1], ~rows.masked[:, 0])
    weights = rows.weights[[code.tolist().index(part) for part in range(16)]]
    assert torch.equal(rows.weights, weights[code])
    table = torch.cat([torch.zeros(1, 625, 4), space.by_mask()]).double()  # [16, 625, 4]
    both = torch.stack([table, table.flip(0)], 1)  # the rest of part i is part 15 - i
    sides = (weights[:, :, None] * both).sum(3)  # [16, 2, 625]
    elbo, pairs = space.by_order().mean(0), sides.mean(1)
    torch.testing.assert_close(chances @ pairs, elbo, atol=1e-6, rtol=0)
    assert (chances @ (pairs - elbo) ** 2 < chances @ (sides[:, 0] - elbo) ** 2).all()


def test_pairs_of_espo_are_stratified():
    """t differs by 1 / M of pairs."""
    c = torch.ones(4, 4000, dtype=torch.bool)
    masked = espo.sample_masks(made_batch(espo, c.long(), c), 0, espo.Args()).masked
    apart = (masked[:, 0].double().mean(1) - masked[:, 2].double().mean(1)).abs()
    assert ((apart - 0.5).abs() < 0.06).all()


@families
def test_coupled_scores_have_the_mean_of_their_law(family):
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


@families
def test_two_draws_of_spg_have_the_mean_of_their_law(family):
    """Of both bounds: numbers k and k + 2 modulo 4 of masked tokens, independent parts."""
    space, n, where, args = OneBlock(family), 20000, 137, spg.Args(p_mask_context=0.0)
    ids, c = space.ids[where].expand(n, -1), torch.ones(n, 4, dtype=torch.bool)
    rows = spg.sample_masks(made_batch(spg, ids, c, mask=5), 0, args)
    code = (rows.masked[..., 4:] * torch.tensor([8, 4, 2, 1])).sum(-1) - 1
    table, size = space.by_mask()[:, where], space.patterns.sum(1)
    got = spg.estimate_logps(table[code], changed(rows, weights=rows.weights.double()), args)
    pairs = torch.cartesian_prod(torch.arange(15), torch.arange(15))
    pairs = pairs[(size[pairs[:, 0]] + 1) % 4 + 1 == size[pairs[:, 1]]]
    law = made_rows(spg, (space.patterns * 4 / size[:, None])[pairs], torch.ones(len(pairs)))
    law.completion_mask = c[: len(pairs)]
    chances = space.chances[pairs].prod(1) * 4
    assert within(got, chances @ spg.estimate_logps(table[pairs], law, args)).all()


# --- the law of the masks -------------------------------------------------------------------------


@pytest.mark.parametrize("mc_num", [3, 4])
@pytest.mark.parametrize("module", [bgpo, spg])
def test_counts_are_uniform_and_stratified(module, mc_num):
    """In each block of each draw; also where the number of draws is no multiple of the block."""
    args, drawn = small_args(module, gen_length=9, p_mask_context=0.0, mc_num=mc_num), []
    batch = rollout_batch(module, tiny_model(), args)
    blocks, c, L = blocks_of(batch), batch.completion_mask, batch.completion_mask.shape[1]
    for iteration in range(130):
        rows = module.sample_masks(batch, iteration, args)
        masked, weights = (x[..., -L:].transpose(0, 1) for x in (rows.masked, rows.weights))
        assert (masked | c).all() and not rows.masked[..., :-L].any()  # after the EOS all is masked
        drawn.append(masked & c)
        assert torch.equal(weights != 0, drawn[-1])
    drawn = torch.stack(drawn)  # [iterations, draws, B, L]
    for n in (1, 2, 3, 4):
        m = torch.stack([drawn[:, :, b, cols].sum(2) for b, cols in blocks if len(cols) == n])
        assert all(is_uniform(m[:, :, j].flatten(), n) for j in range(mc_num))
        times = torch.stack([(m == k).sum(2) for k in range(1, n + 1)])
        assert (times.amax(0) - times.amin(0)).max() <= (mc_num % n > 0)


@pytest.mark.parametrize("module", [bgpo, ebpo, espo, spg, vrpo])
def test_draws_blocks_and_updates_are_independent(module):
    """Given how many of a block are masked, all its tokens are alike, and nothing else tells
    which; numbers are independent in all updates, and in all blocks unless EBPO couples these.
    """
    n, c, found = 8000, torch.ones(8000, 8, dtype=torch.bool), []
    blocks, args = (torch.arange(8) // 4).expand(n, -1), small_args(module, p_mask_context=0.0)
    for iteration in range(2):
        if module is vrpo:
            pairs = vrpo.Batch(blocks, c, c, blocks, torch.arange(n), MASK, 3, iteration, n, n)
            masked = vrpo.sample_masks(pairs, args).masked
        else:
            batch = made_batch(module, blocks, c, blocks)
            masked = module.sample_masks(batch, iteration, args).masked
        masked = masked[:, :: 2 if module is espo else 1].view(n, 2, 2, 4).double()
        size = masked.mean(3, keepdim=True)
        assert within(masked - size, 0.0).all()
        found += [(masked - size)[..., 0].flatten(1), size[:, 0, : 1 + (module is not ebpo), 0]]
    assert torch.cat(found, 1).T.corrcoef().fill_diagonal_(0).abs().max() < 0.055


@pytest.mark.parametrize("module", [d1, spg, wd1])
def test_the_prompt_is_hidden_in_both_copies(module):
    """About 15 % of the valid prompt, new for each update; a block model reads the prompt from the
    clean copy.
    """
    args, masks = small_args(module), []
    batch = rollout_batch(module, tiny_model(), args, [list(range(1, 5)) * 8, [1, 2, 3]])
    P = batch.P
    for iteration in range(40):
        rows = module.sample_masks(batch, iteration, args)
        hidden = rows.masked[:, 0, :P]
        assert (rows.masked[:, :, :P] == hidden[:, None]).all()
        shown = torch.where(hidden, MASK, batch.input_ids[:, :P])
        assert torch.equal(rows.input_ids, torch.cat([shown, batch.input_ids[:, P:]], 1))
        assert module is spg or rows.masked[:, :, P:].all()
        masks.append(hidden)
    masks, valid = torch.stack(masks), batch.valid_mask[:, :P]
    assert not (masks & ~valid).any() and len(masks.unique(dim=0)) == 40
    assert masks.double().mean() / valid.double().mean() == pytest.approx(0.15, abs=0.015)


def test_spg_picks_blocks_of_the_rollout():
    """3 blocks of 4 with tokens: each picked as often, over the draws as evenly as can be; all
    after the pick, and before it lightly.
    """
    n, c = 6000, torch.arange(16) < 11
    batch = made_batch(spg, torch.ones(n, 18, dtype=torch.long), c.expand(n, -1))
    for mc_num in (2, 5):
        rows = spg.sample_masks(batch, 1, spg.Args(mc_num=mc_num, p_mask_context=0.0))
        masked = rows.masked[:, :, 2:]
        picked = masked.long().argmax(2) // 4  # block of the first masked token
        assert all(is_uniform(picked[:, j] + 1, 3) for j in range(mc_num))
        times = torch.stack([(picked == b).sum(1) for b in range(3)], 1)
        assert (times.amax(1) - times.amin(1)).max() <= 1
        parts = masked.view(n, mc_num, 4, 4)
        assert parts.all(3)[torch.arange(4) > picked[..., None]].all()
        count = (parts & c.view(4, 4)).sum(3).gather(2, picked[..., None])[..., 0]
        assert all(is_uniform(count[(picked == 2) == (k == 3)], k) for k in (3, 4))
        scored = masked & c
        want = scored * (11 / scored.sum(2, keepdim=True))
        torch.testing.assert_close(rows.weights, want.float())
    masked = spg.sample_masks(batch, 1, spg.Args(p_mask_context=0.15)).masked[:, :, 2:]
    light = masked[..., :4][(masked[..., 8:12].sum(2) < 4) & (masked[..., 4:8].sum(2) < 3)]
    assert light.double().mean() == pytest.approx(0.15, abs=0.02)


def test_coupled_masks_partition_the_completion():
    """All, a part, the rest; one t of U(0.2, 0.8) for each group; nothing shown after the EOS."""
    args = small_args(coupled_grpo)
    batch = rollout_batch(coupled_grpo, tiny_model(), args)
    c, P = batch.completion_mask, batch.P
    rows = coupled_grpo.sample_masks(batch, 0, args)
    everything, part, rest = rows.masked[:, :, P:].unbind(1)
    assert not rows.masked[:, :, :P].any() and everything.all()
    assert torch.equal(part ^ rest, c) and (part & rest).eq(~c).all()
    assert torch.equal(rows.weights != 0, rows.masked[:, :, P:] & c[:, None])
    c = torch.ones(20000, 4, dtype=torch.bool)
    rows = coupled_grpo.sample_masks(made_batch(coupled_grpo, c.long(), c), 0, args)
    w = rows.weights
    t = torch.where(w[:, 1].any(1), 1 / (2 * w[:, 1].amax(1)), 1 - 1 / (2 * w[:, 2].amax(1)))
    torch.testing.assert_close(t.view(-1, 4), t[::4, None].expand(-1, 4))
    assert 0.2 <= t.min() < 0.202 and 0.798 < t.max() <= 0.8
    assert is_uniform(((t[::4] - 0.2) / 0.15).long().clamp(max=3) + 1, 4)
    residual = rows.masked[:, 1].double() - t[:, None]  # tokens are independent given t
    assert within(residual, 0.0).all()
    assert residual.T.corrcoef().fill_diagonal_(0).abs().max() < 0.035


# --- numbers of the papers and values of the official code ----------------------------------------


def loss_of(module, estimates, A, old=None, ref=None, **settings):
    """-> objective (minus the loss), its slope. estimates [R, ...]"""
    estimates = torch.tensor(estimates, dtype=torch.float64).requires_grad_()
    old = estimates.detach() if old is None else torch.tensor(old, dtype=torch.float64)
    rows = made_rows(module, torch.ones(len(A), 1, 1), A)
    ref = ref if ref is None else torch.tensor(ref, dtype=torch.float64)
    loss, _ = module.policy_loss(estimates, old, ref, rows, module.Args(**settings))
    return -loss.item(), -torch.autograd.grad(loss, estimates)[0]


CLIPS = [  # ratio, A, objective, whether it has a slope, with epsilon 0.5
    (2, 1, 1.5, False),
    (2, -1, -2, True),
    (4, -1, -4, True),  # a dual clip would give -3
    (0.25, -1, -0.5, False),
    (0.25, 1, 0.25, True),
    (math.exp(90), 1, 1.5, False),
]


@pytest.mark.parametrize("module", [d1, coupled_grpo, cj_grpo, ebpo, espo])
def test_clip_and_kl(module):
    """Of either side, and not at the old policy, epsilon 0 included; k3 towards the reference
    (reversed: 0.021403). EBPO's clip is in log space, as compute_policy_loss_ebpo of yjyddq/DARE
    83ae8a3.
    """
    of = lambda value: [value] if module in (ebpo, espo) else [[value]]
    for ratio, A, objective, live in CLIPS:
        got, slope = loss_of(module, of(math.log(ratio)), [A], of(0.0), epsilon=0.5)
        assert got == pytest.approx(objective) and slope.isfinite().all()
        assert slope.item() == pytest.approx(objective if live else 0)
    assert loss_of(module, of(0.0), [2.0], of(0.0), epsilon=0.0)[1].item() == 2
    if module not in (ebpo, espo):
        got, _ = loss_of(module, [[-1.0]], [0.0], ref=[[-1.2]], beta=1.0)
        assert -got == pytest.approx(0.018731, abs=1e-6)


def test_bgpo_does_not_overflow_in_the_bound_that_is_not_taken():
    assert loss_of(bgpo, [[1000.0]], [1.0], [[0.0]], mc_num=1)[1].isfinite().all()


@pytest.mark.parametrize("A", [1.0, -1.0])
def test_ebpo_clips_before_it_takes_the_exponential(A):
    got, slope = loss_of(ebpo, [A * 1e4], [A], [0.0], epsilon=0.2)
    assert got == pytest.approx(A + 0.2) and slope.item() == 0


def test_spg_bounds_by_the_papers_numbers():
    """p = 0.25, L = 4, two draws of two tokens; slopes follow the confident draw; log space where
    p^1.5 is 0 in fp32.
    """

    def bounds(weights, logps, beta=1.5):
        rows = made_rows(spg, [weights], [1.0])
        rows.weights = rows.weights.to(logps.dtype)
        rows.completion_mask = torch.ones(1, len(weights[0]))
        return spg.estimate_logps(logps.expand(rows.weights.shape), rows, spg.Args(eubo_beta=beta))[
            0
        ]

    lp, two = torch.tensor(0.25).double().log(), [[2, 2, 0, 0], [0, 2, 2, 0]]
    assert bounds(two[:1], lp).tolist() == pytest.approx([-1.386294, -0.924196], abs=1e-6)
    assert bounds(two, lp, 1.0)[1].item() == pytest.approx(-1.155245, abs=1e-6)
    assert bounds(two, lp)[1].item() == pytest.approx(-1.232262, abs=1e-6)
    lp = torch.tensor([[0.9], [0.1]]).double().log().requires_grad_()
    (slope,) = torch.autograd.grad(bounds([[1], [1]], lp)[1], lp)
    assert slope.flatten().tolist() == pytest.approx([0.964286, 0.035714], abs=1e-6)
    tiny = torch.full((1, 1), math.log(1e-32), requires_grad=True)
    assert torch.autograd.grad(bounds([[1]], tiny)[1], tiny)[0].item() == 1


ADVANTAGES = [  # script, flags, advantages of the first and of the others for rewards 1, 0, 0, 0
    (d1, {}, 0.75, -0.25),
    (spg, {}, 0.75, -0.25),
    (tpg, {}, 0.75, -0.25),
    (coupled_grpo, {}, 0.75, -0.25),
    (coupled_grpo, {"baseline": "loo"}, 1.0, -0.333333),
    (espo, {}, 1.0, -0.333333),
    (bgpo, {}, 1.499997, -0.499999),
    (ebpo, {}, 1.499997, -0.499999),
    (cj_grpo, {}, 1.499997, -0.499999),
    (cj_grpo, {"scale_rewards": False}, 0.75, -0.25),
    (justgrpo, {}, 1.4997, -0.4999),
    # biased standard deviation; 0 outside of the range of accuracies, whose ends count
    (tracerl, {}, 1.732051, -0.577350),
    (tracerl, {"accuracy_range": (0.0, 0.25)}, 1.732051, -0.577350),
    (tracerl, {"accuracy_range": (0.3, 0.8)}, 0.0, 0.0),
    # softmax of A and of -A as in the released code
    (wd1, {}, 0.366135, -0.122045),
    (wd1, {"psi": 0.5}, 0.186485, -0.062162),
]


@pytest.mark.parametrize("module, flags, first, other", ADVANTAGES)
def test_advantages(module, flags, first, other):
    """By hand; exactly 0 for equal rewards: an ulp would be a full step of AdamW."""
    args = module.Args(num_generations=4, **flags)
    got = module.compute_advantages(torch.tensor([1.0, 0, 0, 0] * 2), args)
    torch.testing.assert_close(got, torch.tensor(2 * [first, *[other] * 3]), atol=1e-6, rtol=0)
    for G, value in itertools.product((2, 6, 8, 10), (0.1, 0.3, 0.7, 1 / 3, 2.1)):
        equal = torch.full((G,), value)
        assert not module.compute_advantages(equal, replace(args, num_generations=G)).any()


def test_advantages_of_mdpo():
    """Three steps: gains 1 -1 1, 0 1 0 and 0 0 0 plus means of the later rewards."""
    args = mdpo.Args(num_generations=3)
    got = mdpo.compute_advantages(torch.tensor([[1.0, 0, 1], [0, 1, 1], [0, 0, 0]]), args)
    want = [[0.872757, -0.5773, 0.9999], [0.218189, 1.154601, 0], [-1.090946, -0.5773, -0.9999]]
    torch.testing.assert_close(got, torch.tensor(want), atol=1e-5, rtol=0)
    assert not mdpo.compute_advantages(torch.full((6, 3), 0.7), args).any()


@pytest.mark.parametrize("row", RELEASED["rows"], ids=lambda row: row["code"][:24])
def test_a_tiny_llada_equals_the_released_code(row):
    """compute_loss and its backward on this model's logits, the mask token left out as in ours; old
    and reference values of tilted models.
    """
    module, name = importlib.import_module(f"algos.{row['script']}"), row["script"]
    args = module.Args(num_generations=2, micro_batch_size=64, **row["flags"])
    masked = torch.tensor([[[int(c) for c in draw] for draw in rows] for rows in row["masks"]]) > 0
    c = torch.arange(12) < torch.tensor(row["lengths"])[:, None]
    scored, n = masked[:, :, 6:] & c[:, None], c.sum(1)[:, None] + (name == "espo")
    weights = scored if name in ("d1", "wd1") else scored * (n / scored.sum(2))[..., None]
    if name == "coupled_grpo":
        t = 1 / 2.1212158977855418
        weights = scored / (2 * torch.tensor([1, t, 1 - t]))[:, None]
    batch = made_batch(module, TEXT, c, mask=tilted().mask_token_id)
    batch.advantages = torch.tensor(row["advantages"])
    rows = module.Rows(batch, masked, weights)
    values = [estimates_of(module, tilted(x), rows, args) for x in (0, 0.3, -0.2)]
    got = values[0].flatten()[: len(row["first"])]
    torch.testing.assert_close(got, torch.tensor(row["first"]), atol=1e-5, rtol=2e-6)
    rows.has_gradient, rows.old, rows.ref = True, *values[1:]
    metrics, grads = updated(module, tilted(), rows, args)
    assert metrics["loss/total"] == pytest.approx(row["loss"], abs=1e-5)
    assert grads.norm().item() == pytest.approx(row["norm"], rel=1e-5)
    assert name != "espo" or metrics["policy/clip_frac"] == 0.5


# --- SFT and MDPO's rewards -----------------------------------------------------------------------


def sft_batch(model, rows, step=0, rank=0, ranks=1, **settings):
    settings = {"group_by_length": False, "max_length": 2048} | settings
    args = sft.Args(batch_size=len(rows), **settings)
    return args, sft.make_batch(rows, args, model, step, rank, ranks, torch.device("cpu"))


def test_sft_tails_belong_to_the_answer():
    """Block models: end tokens fill the last block. Others: 0 to eos_tail, within max_length, each
    row for itself.
    """
    _, batch = sft_batch(tiny_model(), [([1, 2, 3], [4, EOS]), ([1], [2, 3, 4, 0, 1, 2, EOS])])
    assert batch.input_ids.tolist() == [[1, 2, 3, 4] + [EOS] * 4, [1, 2, 3, 4, 0, 1, 2, EOS]]
    assert batch.answer_mask.sum(1).tolist() == [5, 7] and batch.num_tokens == 12
    model, rows, found = tiny_model("llada"), [([1, 2], [3] * n + [EOS]) for n in (1, 4, 6)], []
    for step in (0, 0, 1):
        batch = sft_batch(model, rows * 64, step, eos_tail=5, max_length=9)[1]
        found.append(batch.valid_mask.sum(1).view(-1, 3))
    assert [set(x.tolist()) for x in found[0].T] == [{*range(4, 10)}, {7, 8, 9}, {9}]
    assert torch.equal(*found[:2]) and not torch.equal(*found[1:])


def test_sft_noise_is_stratified_over_the_step_and_keyed_by_the_example():
    model, rows = tiny_model(), [([1, 2, 3, 4], [4] * 400)] * 8
    args, batch = sft_batch(model, rows, 3)
    masked, weights, _ = sft.sample_masks(batch, args, model.objective)
    t = 1 / weights.amax(1)
    steps = t.sort().values.diff()
    torch.testing.assert_close(steps, torch.full((7,), 0.999 / 8), atol=1e-5, rtol=0)
    torch.testing.assert_close(masked.sum(1) / 400, t, atol=0.12, rtol=0)
    _, second = sft_batch(model, rows, 3, 1, 2)  # the second of two ranks
    assert torch.equal(sft.sample_masks(second, args, model.objective)[0], masked[1::2])
    for other in (replace(batch, step=4), replace(batch, seed=1)):
        assert (sft.sample_masks(other, args, model.objective)[1].amax(1) != weights.amax(1)).all()


def test_mdpo_grades_every_prediction():
    """Up to its own EOS; a step without a forward repeats the last."""
    draws = torch.tensor([[[1, EOS, 4], [-1, -1, -1], [-1, 2, -1]]])
    trace = SimpleNamespace(records={"tokens": draws}, settings={"eos_token_ids": [EOS]})
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: ids)
    grade = lambda texts, examples: [
        {"a": float(sum(text)), "b": example} for text, example in zip(texts, examples, strict=True)
    ]
    problems = SimpleNamespace(tokenizer=tokenizer, grade=grade)
    assert mdpo.step_rewards(trace, problems, [0.25]).tolist() == [[6.25, 6.25, 7.25]]
