"""The methods against brute force: enumerated likelihoods and bounds, the papers' numbers, and the inner loop's gradient."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_masked import model_of as masked_model_of

from algos import bgpo, coupled_grpo, d1, sft, spg
from models.tiny import TINY_LLADA, TINY_SDAR, random_model
from rollout import make_engine

MASK, EOS = 6, 5
TINY = TINY_SDAR | {
    "vocab_size": 8, "mask_token_id": MASK, "eos_token_id": EOS, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


def tiny_model(seed=0, scale=8.0, **config):
    """A peaked random SDAR in fp64 with 8 tokens, of which 6 is the mask and 5 the EOS, which is not too frequent."""
    config = TINY | config
    eos, model = config["eos_token_id"], random_model(config, seed).double()
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
        model.lm_head.weight[eos] = 0
        model.model.embed_tokens.weight.mul_(30)
    model.eos_token_ids, model.pad_token_id = [eos], eos
    return model


def family_model(family, seed=0):
    """`tiny_model`, or a bidirectional model of the same sizes and tokens."""
    if family == "sdar":
        return tiny_model(seed)
    tokens = {"vocab_size": 8, "mask_token_id": MASK} | (
        {"embedding_size": 8} if family == "llada" else {}
    )
    model = masked_model_of(family, scale=9, seed=seed, eos=[EOS], **tokens)
    model.pad_token_id = EOS
    return model


def single_rank(target):
    """Run a test body in one forked rank, because the scripts' counts are collectives."""

    def test(run_ranks, *args, **kwargs):
        run_ranks(1, lambda rank, world_size: target(*args, **kwargs))

    test.__name__, test.__doc__ = target.__name__, target.__doc__
    return test


def rollout_batch(
    module, model, args, prompts=((1, 2, 3), (4, 1, 2, 3, 0, 1), (2, 2)), gen_length=9
):
    """A rollout of ragged prompts: advantages of both signs, and the last group dead."""
    G = args.num_generations
    trace = make_engine(model).generate(
        [list(p) for p in prompts], num_samples=G, gen_length=gen_length, denoising_steps=2, seed=6
    )
    batch = module.make_batch(trace, model, seed=11)
    rewards = torch.tensor(
        [[1.0, 0.0, 0.0, 1.0]] * (len(prompts) - 1) + [[1.0] * 4], dtype=torch.float64
    )[:, :G].flatten()
    batch.advantages = module.compute_advantages(rewards, args)
    assert (
        (batch.advantages > 0).any()
        and (batch.advantages < 0).any()
        and not batch.advantages[-G:].any()
    )
    return batch


def blocks_of(batch):
    """Likelihood blocks with scored tokens. -> [(sequence, columns of its scored tokens)]"""
    found = []
    for b, (ids, scored) in enumerate(zip(batch.block_ids, batch.completion_mask, strict=True)):
        found += [
            (b, (ids == block).logical_and(scored).nonzero().flatten())
            for block in ids[scored].unique()
        ]
    return found


def test_the_rollout_has_every_kind_of_block(run_ranks):
    """What the tests below rely on: 4, 3, 2 and 1 scored tokens, up to three blocks in a sequence, an EOS inside a block."""

    def body(rank, world_size):
        batch = rollout_batch(bgpo, tiny_model(), bgpo.Args(num_generations=4))
        blocks = blocks_of(batch)
        sizes = [len(columns) for _, columns in blocks]
        assert sizes.count(4) >= 12 and {1, 2, 3, 4} == set(sizes)
        assert max(sum(b == i for b, _ in blocks) for i in range(12)) == 3
        after_eos = batch.trace.canvas_length - batch.completion_mask.sum(1)
        assert (
            (after_eos > 0).sum() >= 3
            and not batch.trace.truncated.all()
            and batch.trace.truncated.any()
        )
        later = [i for i in range(12) if after_eos[i] > 0 and sum(b == i for b, _ in blocks) > 1]
        assert later  # an EOS in the middle of a second or third block

    run_ranks(1, body)


# ---------------------------------------------------------------------------------------- likelihoods by enumeration


def exact_elbo(model, prompt, completion):
    """Mean over all orders of sum_k log p(y_order[k] | prompt, y_order[<k]) inside each block, blocks left to right.

    Independent of masks, counts and weights: this is what every unbiased estimator must give on average.
    """
    n, ids = model.block_length, [*prompt, *completion]
    total = torch.zeros((), dtype=torch.float64)
    for start in range(len(prompt) // n * n, len(ids), n):
        where = [i for i in range(start, min(start + n, len(ids))) if i >= len(prompt)]
        # one forward of the states in which a subset of the block is known; after the EOS everything stays masked
        subsets = [
            known for size in range(len(where)) for known in itertools.combinations(where, size)
        ]
        shown = [[i < where[0] or i in known for i in range(start + n)] for known in subsets]
        padded = ids + [MASK] * n
        states = [[padded[i] if show else MASK for i, show in enumerate(row)] for row in shown]
        logits = model.logits(torch.tensor(states))
        logits[..., MASK] = -math.inf
        logps = dict(zip(subsets, logits.log_softmax(-1), strict=True))
        orders = list(itertools.permutations(where))
        for order in orders:
            for k, i in enumerate(order):
                total += logps[tuple(sorted(order[:k]))][i, ids[i]] / len(orders)
    return total


class OneBlock:
    """Every completion of one block over V = 5 usable tokens, after a prompt of one block: 625 of them."""

    MASK = 5
    prompt = [1, 2, 0, 3]
    completions = list(itertools.product(range(5), repeat=4))
    patterns = [p for p in itertools.product([False, True], repeat=4) if any(p)]  # 15 masks

    def __init__(self, seed=0, shift=0.0, family="sdar"):
        if family == "sdar":
            self.model = tiny_model(seed, vocab_size=6, mask_token_id=5, eos_token_id=4)
        else:
            tokens = {"vocab_size": 6, "mask_token_id": 5} | (
                {"embedding_size": 6} if family == "llada" else {}
            )
            self.model = masked_model_of(family, scale=9, seed=seed, eos=[4], **tokens)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(shift * torch.randn(p.shape, generator=generator, dtype=p.dtype))

    def by_order(self):
        """-> [24, 625] log-probability of each completion when its tokens are revealed in that order"""
        states = torch.tensor(
            list(itertools.product(range(6), repeat=4))
        )  # every partly masked block
        with torch.no_grad():
            logits = self.model.logits(
                torch.cat([torch.tensor([self.prompt] * len(states)), states], 1)
            )[:, 4:]
        logits[..., self.MASK] = -math.inf
        logps = logits.log_softmax(-1)  # [1296, 4, V]
        y, base, values = torch.tensor(self.completions), torch.tensor([216, 36, 6, 1]), []
        for order in itertools.permutations(range(4)):
            shown, value = torch.full_like(y, self.MASK), 0
            for i in order:
                value = value + logps[(shown * base).sum(1), i, y[:, i]]
                shown[:, i] = y[:, i]
            values.append(value)
        return torch.stack(values)

    def batch(self):
        input_ids = torch.tensor([[*self.prompt, *completion] for completion in self.completions])
        valid, n = torch.ones_like(input_ids, dtype=torch.bool), len(input_ids)
        return bgpo.Batch(
            input_ids=input_ids, valid_mask=valid, completion_mask=valid[:, :4], block_ids=self.model.grid(valid)[1][:, -4:],
            sample_index=torch.arange(n), trace=None, mask_token_id=self.MASK, seed=3, num_tokens=4.0 * n, num_sequences=n,
            advantages=torch.zeros(n),
        )  # fmt: skip

    def by_mask(self):
        """-> [15, 625] BGPO's one-draw ELBO for each mask, with the weights that its sample_masks gives to that mask"""
        batch, args, weights = self.batch(), bgpo.Args(mc_num=4), {}
        rows = bgpo.sample_masks(batch, 0, args)
        for pattern, weight in zip(
            rows.masked[:, 0, -4:].tolist(), rows.weights[:, 0].tolist(), strict=True
        ):
            weights.setdefault(tuple(pattern), set()).add(tuple(weight))
        assert set(weights) == set(self.patterns) and all(
            len(values) == 1 for values in weights.values()
        )
        values = []
        for pattern in self.patterns:
            exact = torch.tensor(pattern) * 4.0 / sum(pattern)
            assert torch.equal(torch.tensor(weights[pattern].pop()), exact)
            masked = torch.zeros_like(batch.valid_mask)
            masked[:, 4:] = torch.tensor(pattern)
            rows = batch.rows(masked[:, None], exact.expand(len(masked), 1, 4))
            rows.weights = (
                torch.tensor(pattern).double().mul(4).div(sum(pattern)).expand(len(masked), 1, 4)
            )
            with torch.no_grad():
                values.append(
                    bgpo.estimate_logps(bgpo.draw_logps(self.model, rows, 0)[:, None], rows, args)
                )
        return torch.stack(values)

    @classmethod
    def chances(cls):
        """[15] probability of each mask: m uniform on 1..4, then a subset of that size"""
        return torch.tensor(
            [1 / (4 * math.comb(4, sum(p))) for p in cls.patterns], dtype=torch.float64
        )


def elbo_of_one_block(space, completion):
    """The ELBO by a loop over orders, one forward per token: a check of the table of OneBlock."""
    total = 0.0
    for order in itertools.permutations(range(4)):
        state = [*space.prompt, *[space.MASK] * 4]
        for i in order:
            with torch.no_grad():
                logits = space.model.logits(torch.tensor([state]))[0, 4 + i]
            logits[space.MASK] = -math.inf
            total += logits.log_softmax(-1)[completion[i]].item() / 24
            state[4 + i] = completion[i]
    return total


families = pytest.mark.parametrize("family", ["sdar", "llada", "dream"])


@families
def test_elbo_by_orders_and_by_masks_bounds_a_likelihood_that_sums_to_one(family):
    """L = 4, V = 5: all 625 completions, all 24 orders, all 15 masks."""
    space = OneBlock(family=family)
    orders, masks = space.by_order(), space.by_mask()
    log_likelihood, elbo = orders.logsumexp(0) - math.log(24), orders.mean(0)
    assert log_likelihood.exp().sum().item() == pytest.approx(1, abs=1e-10)
    torch.testing.assert_close((space.chances()[:, None] * masks).sum(0), elbo, atol=1e-10, rtol=0)
    assert (elbo <= log_likelihood + 1e-10).all()
    assert (log_likelihood - elbo).max() > 0.1  # and the bound is not trivially tight
    assert (elbo - masks.mean(0)).abs().max() > 0.1  # nor would other chances of the masks give it
    for i in (0, 77, 624):
        assert elbo[i].item() == pytest.approx(
            elbo_of_one_block(space, space.completions[i]), abs=1e-10
        )


def scored_alone(module, args, logp_of_count, L, n=1):
    """Estimates [R, ...] of one-block completions of L tokens by a model that knows only how many of them are masked."""
    batch = one_block_batch(n, 2, L, [L], L)
    rows = module.sample_masks(batch, 0, args)
    rows.weights = rows.weights.double()
    counts = rows.masked[..., -L:].sum(2, keepdim=True)
    logps = torch.tensor(logp_of_count, dtype=torch.float64)[counts - 1] * (rows.weights != 0)
    return module.estimate_logps(logps, rows, args)


def test_elbo_of_a_model_that_counts_masks():
    """p = .9, .5, .2 with one, two and three tokens masked: ln .9 + ln .5 + ln .2 = -2.407946; three draws meet each once.

    Without the weights n / m it would be -2.106656, as a mean over tokens -0.802649.
    """
    p = [math.log(0.9), math.log(0.5), math.log(0.2)]
    draws = scored_alone(bgpo, bgpo.Args(mc_num=3), p, 3)
    assert draws.mean().item() == pytest.approx(-2.407946, abs=1e-6) and draws.std() > 0.1
    lower = scored_alone(spg, spg.Args(mc_num=3), p, 3, n=50)[:, 0]
    assert lower.tolist() == pytest.approx([-0.802649] * 50, abs=1e-6)  # SPG's is per token


def test_a_model_without_context_has_one_log_probability():
    """p = 0.25 whatever is shown: -1.386294 a token for every draw, prompt mask and number of draws."""
    p, n = [math.log(0.25)] * 6, 6
    for share in (0.0, 0.15, 1.0):
        assert scored_alone(d1, d1.Args(p_mask_prompt=share), p, n).tolist() == [
            pytest.approx([-1.386294] * n, abs=1e-6)
        ]
    assert scored_alone(bgpo, bgpo.Args(mc_num=5), p, n).tolist() == pytest.approx(
        [-1.386294 * n] * 5, abs=1e-5
    )
    for mc_num in (2, 3):
        lower = scored_alone(spg, spg.Args(mc_num=mc_num, p_mask_context=0.15), p, n, n=4)[:, 0]
        assert lower.tolist() == pytest.approx([-1.386294] * 4, abs=1e-6)


def test_bgpo_surrogate_bounds_the_elbo_objective_of_two_models():
    """From the d of every mask: the mean of g lies below A exp(ELBO - old ELBO), for both signs of A, at all 625."""
    new, old = OneBlock(shift=0.01), OneBlock()
    d = new.by_mask() - old.by_mask()  # [15, 625]
    mean = new.by_order().mean(0) - old.by_order().mean(0)
    times = (
        (48 * OneBlock.chances()).round().long()
    )  # 48 draws with each mask as often as it is likely
    assert times.sum() == 48 and mean.abs().max() > 0.3
    gaps = []
    for column, ratio in zip(d.repeat_interleave(times, 0).T, mean.exp(), strict=True):
        for A in (1.3, -0.7):
            surrogate, slope = bgpo_loss(column.tolist(), A, 48)
            gaps.append((A * ratio - surrogate).item())
            assert (slope * A > 0).all()
    gaps = torch.tensor(gaps).view(-1, 2)
    assert (gaps > -1e-10).all() and (gaps > 1e-4).double().mean() > 0.9


@single_rank
def test_bgpo_estimate_is_unbiased_against_all_orders():
    """Mean of many one-draw ELBOs = exact ELBO, over ragged prompts, several blocks and a mid-block EOS."""
    model = tiny_model()
    args = bgpo.Args(num_generations=4, mc_num=4)
    batch = rollout_batch(bgpo, model, args)
    draws, unweighted = [], []
    for iteration in range(200):
        rows = bgpo.sample_masks(batch, iteration, args)
        with torch.no_grad():
            rows.weights = rows.weights.double()
            logps = bgpo.draw_logps(model, rows, 0)[:, None]
            draws.append(bgpo.estimate_logps(logps, rows, args).view(args.mc_num, -1))
            rows.weights = (rows.weights > 0).double()
            unweighted.append(bgpo.estimate_logps(logps, rows, args).view(args.mc_num, -1))
    draws, unweighted = (
        torch.stack(draws).flatten(0, 1),
        torch.stack(unweighted).flatten(0, 1),
    )  # [800, B]
    with torch.no_grad():
        want = torch.stack(
            [
                exact_elbo(model, p, batch.trace.completion(i))
                for i, p in enumerate(batch.trace.prompt_ids)
            ]
        )
    score = lambda x: (x.mean(0) - want).abs() / (x.std(0) / len(x) ** 0.5 + 1e-9)
    assert (score(draws) < 4.5).all(), score(draws)
    assert (score(unweighted) > 6).sum() >= 10  # without the weight n / m the mean is elsewhere


@single_rank
def test_bgpo_counts_are_stratified_and_masks_stay_in_place():
    model, args = tiny_model(), bgpo.Args(num_generations=4, mc_num=4)
    batch = rollout_batch(bgpo, model, args)
    B, L = batch.completion_mask.shape
    exactly_stratified = 0
    for iteration, mc_num in itertools.product(range(5), (1, 3, 4, 6)):
        args.mc_num = mc_num
        rows = bgpo.sample_masks(batch, iteration, args)
        masked, weights = rows.masked.view(mc_num, B, -1), rows.weights.view(mc_num, B, L)
        assert not masked[..., :-L].any()  # the prompt is never masked
        assert (masked[..., -L:] | batch.completion_mask).all()  # after the EOS all is masked
        chosen = masked[..., -L:] & batch.completion_mask  # [draws, B, L]
        assert torch.equal(weights != 0, chosen)  # scored is what is masked, up to the EOS
        for b, columns in blocks_of(batch):
            n, m = len(columns), chosen[:, b, columns].sum(1)
            assert m.min() >= 1
            times = torch.bincount(m, minlength=n + 1)[1:]  # how often each count of 1..n came
            assert len(times) == n and times.max() - times.min() <= (
                mc_num % n > 0
            )  # the floor form stratifies exactly
            exactly_stratified += n == mc_num == 4
            torch.testing.assert_close(
                weights[:, b, columns], chosen[:, b, columns] * (n / m[:, None]).float()
            )
    assert exactly_stratified >= 5 * 12
    rows, other = bgpo.sample_masks(batch, 0, args), bgpo.sample_masks(batch, 1, args)
    assert not torch.equal(other.masked, rows.masked)
    assert torch.equal(bgpo.sample_masks(batch, 0, args).masked, rows.masked)


def chi_square(counts, chances):
    want = counts.sum() * chances
    return ((counts - want) ** 2 / want).sum().item()


CRITICAL = {
    0: 1e-9,
    1: 15.1,
    2: 18.4,
    3: 21.1,
    14: 42.6,
}  # degrees of freedom -> exceeded with probability 1e-4


@single_rank
def test_bgpo_counts_are_uniform_for_every_draw():
    """m = floor(((u + j/mc) mod 1) n) + 1 is uniform on 1..n for each j, also where mc is no multiple of n.

    Rounding to spaced counts instead is not: with n = 6 and mc = 4, round(k + j n / mc) meets one parity only.
    """
    model, args = tiny_model(), bgpo.Args(num_generations=4)
    batch = rollout_batch(bgpo, model, args)
    B, L = batch.completion_mask.shape
    blocks, tested = blocks_of(batch), 0
    for mc_num in (3, 4, 6):
        args.mc_num = mc_num
        iterations = [
            bgpo.sample_masks(batch, i, args).masked.view(mc_num, B, -1)[..., -L:]
            for i in range(150)
        ]
        masked = torch.stack(iterations)  # [iterations, draws, B, L]
        for n in (1, 2, 3, 4):
            m = torch.stack(
                [masked[:, :, b, columns].sum(2) for b, columns in blocks if len(columns) == n]
            )
            for j in range(mc_num):
                counts = torch.bincount(m[:, :, j].flatten(), minlength=n + 1)[1:].double()
                assert len(counts) == n
                assert chi_square(counts, torch.full((n,), 1 / n)) < CRITICAL[n - 1], (
                    mc_num,
                    n,
                    j,
                    counts,
                )
                tested += counts.sum().item()
    assert tested > 40000


@single_rank
def test_bgpo_masks_are_independent_subsets():
    """Given its size every subset is alike; draws, blocks and iterations do not share an order, blocks share no count."""
    model, args = tiny_model(), bgpo.Args(num_generations=4, mc_num=4)
    batch = rollout_batch(bgpo, model, args)
    B, L = batch.completion_mask.shape
    full = [(b, columns) for b, columns in blocks_of(batch) if len(columns) == 4]
    parts = []
    for iteration in range(300):
        masked = bgpo.sample_masks(batch, iteration, args).masked.view(4, B, -1)[..., -L:]
        parts.append(torch.stack([masked[:, b, columns] for b, columns in full], 1))
    chosen = torch.stack(parts)  # [iterations, draws, blocks, 4]
    m, code = chosen.sum(3), (chosen * torch.tensor([8, 4, 2, 1])).sum(3)
    for j in range(4):
        counts = torch.bincount(code[:, j].flatten(), minlength=16)[1:].double()
        assert chi_square(counts, OneBlock.chances()) < CRITICAL[14], (j, counts)
    share = lambda event, among: (event & among).sum().item() / among.sum().item()
    for i, j in [
        (0, 1),
        (1, 2),
        (2, 3),
        (3, 0),
    ]:  # with four draws of four tokens the next draw masks one more
        nested = (chosen[:, i] <= chosen[:, j]).all(2)
        assert share(nested, (m[:, i] == 1) & (m[:, j] == 2)) == pytest.approx(1 / 2, abs=0.1)
    again = (code[1:] == code[:-1]) & (m[1:] == 1)
    assert share(again, (m[1:] == 1) & (m[:-1] == 1)) == pytest.approx(1 / 4, abs=0.05)
    twins = [(x, y) for x, y in itertools.pairwise(range(len(full))) if full[x][0] == full[y][0]]
    assert len(twins) >= 5
    x, y = (list(side) for side in zip(*twins, strict=True))
    everywhere = torch.ones_like(m[:, :, x], dtype=torch.bool)
    assert share(m[:, :, x] == m[:, :, y], everywhere) == pytest.approx(1 / 4, abs=0.03)
    both = (m[:, :, x] == 1) & (m[:, :, y] == 1)
    assert share(code[:, :, x] == code[:, :, y], both) == pytest.approx(1 / 4, abs=0.08)


@single_rank
def test_masks_do_not_depend_on_padding_or_batch_layout():
    model, args = tiny_model(), bgpo.Args(num_generations=4, mc_num=2)
    batch = rollout_batch(bgpo, model, args)
    pad = 3
    F = torch.nn.functional
    wider = replace(
        batch,
        input_ids=F.pad(batch.input_ids, (pad, 0), value=EOS),
        valid_mask=F.pad(batch.valid_mask, (pad, 0), value=False),
    )
    for module, arguments in [
        (bgpo, args),
        (d1, d1.Args()),
        (coupled_grpo, coupled_grpo.Args(num_generations=4)),
        (spg, spg.Args()),
    ]:
        a, b = module.sample_masks(batch, 0, arguments), module.sample_masks(wider, 0, arguments)
        assert torch.equal(a.masked, b.masked[..., pad:]) and torch.equal(a.weights, b.weights)
        la, lb = module.draw_logps(model, a, 0), module.draw_logps(model, b, 0)
        torch.testing.assert_close(la, lb, atol=1e-12, rtol=0)
    half = replace(batch, **{
        name: getattr(batch, name)[4:]
        for name in ("input_ids", "valid_mask", "completion_mask", "block_ids", "sample_index", "advantages")
    })  # fmt: skip
    for module in (d1, coupled_grpo, spg):
        args = module.Args(num_generations=4)
        a, b = module.sample_masks(half, 0, args), module.sample_masks(batch, 0, args)
        assert torch.equal(a.masked, b.masked[4:]) and torch.equal(a.weights, b.weights[4:])


@single_rank
def test_masks_of_a_group_are_the_same_beside_wider_completions():
    """Completions of block models end with a block, so their width depends on the prompts of a rank: no draw is keyed by it."""
    model = tiny_model()
    for module in (d1, bgpo, coupled_grpo, spg):
        args, found = module.Args(num_generations=4), []
        for prompts in ([[1, 2, 3, 1]], [[1, 2, 3, 1], [4, 1, 2, 3, 0]]):
            trace = make_engine(model).generate(
                prompts, num_samples=4, gen_length=9, denoising_steps=2, seed=6
            )
            batch = replace(
                module.make_batch(trace, model, seed=11),
                advantages=torch.ones(len(trace.completion_ids)),
            )
            rows, L = module.sample_masks(batch, 0, args), batch.completion_mask.shape[1]
            mine = (
                torch.arange(len(rows.masked)) % len(batch.sample_index) < 4
            )  # rows of bgpo: draw by draw
            found.append((L, rows.masked[mine][:, :, -L:][..., :8], rows.weights[mine][..., :8]))
        (narrow, *alone), (wide, *beside) = found
        assert 8 <= narrow < wide
        assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True)), module.__name__


# ---------------------------------------------------------------------------------------- d1


@single_rank
def test_d1_masks():
    """Whole completion masked, about 15 % of the prompt and never the padding, fresh for each inner update; RNG untouched."""
    model, args = tiny_model(), d1.Args(num_generations=4)
    batch = rollout_batch(d1, model, args, prompts=[list(range(1, 5)) * 8, [1, 2, 3]])
    state = torch.random.get_rng_state()
    L, masks = batch.completion_mask.shape[1], []
    for iteration in range(40):
        rows = d1.sample_masks(batch, iteration, args)
        assert (
            rows.masked[:, 0, -L:].all()
            and not (rows.masked[:, 0] & ~batch.valid_mask)[:, :-L].any()
        )
        masks.append(rows.masked[:, 0, :-L])
        hidden = masks[-1]
        assert (
            rows.input_ids[:, :-L][hidden] == MASK
        ).all()  # a block model reads the prompt from the clean copy
        assert torch.equal(rows.input_ids[:, :-L][~hidden], batch.input_ids[:, :-L][~hidden])
        assert torch.equal(rows.input_ids[:, -L:], batch.input_ids[:, -L:])
    assert torch.equal(state, torch.random.get_rng_state())
    masks = torch.stack(masks)
    share = masks.double().mean() / batch.valid_mask[:, :-L].double().mean()
    assert share == pytest.approx(0.15, abs=0.015)
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 40  # as many masks as updates
    assert not torch.equal(masks[:, 0], masks[:, 1])  # rows of a group differ
    none = d1.sample_masks(batch, 0, d1.Args(p_mask_prompt=0.0))
    assert torch.equal(none.input_ids, batch.input_ids)


@single_rank
def test_d1_estimate_is_mean_field_per_block():
    """log-prob of each token with its block all masked, given clean earlier blocks and the masked prompt."""
    model, args = tiny_model(), d1.Args(num_generations=4)
    batch = rollout_batch(d1, model, args)
    rows = d1.sample_masks(batch, 3, args)
    with torch.no_grad():
        got = d1.estimate_logps(d1.draw_logps(model, rows, 0)[:, None], rows, args)
    for i, prompt in enumerate(batch.trace.prompt_ids):
        P, completion = len(prompt), batch.trace.completion_ids[i].tolist()
        ids = rows.input_ids[i][batch.valid_mask[i]].tolist()
        assert ids[P:] == completion[: len(ids) - P]
        for j in range(int(batch.completion_mask[i].sum())):
            start = (P + j) // 4 * 4
            state = ids[:start] + [MASK if k >= P else ids[k] for k in range(start, start + 4)]
            logits = model.logits(torch.tensor([state]))[0, P + j].detach()
            logits[MASK] = -math.inf
            assert got[i, j].item() == pytest.approx(
                logits.log_softmax(-1)[ids[P + j]].item(), abs=1e-9
            )


def rows_of(weights, advantages, **fields):
    """Rows for testing policy_loss alone. weights [R, L]"""
    weights = torch.tensor(weights, dtype=torch.float64)[:, None]
    R, _, L = weights.shape
    defaults = dict(
        input_ids=torch.zeros(R, L), valid_mask=torch.ones(R, L), masked=torch.ones(R, 1, L), weights=weights,
        completion_mask=weights[:, 0] != 0, advantages=torch.tensor(advantages, dtype=torch.float64), mask_token_id=MASK,
        temperature=1.0, num_tokens=float((weights != 0).sum()), num_sequences=float(R),
    )  # fmt: skip
    return d1.Rows(**(defaults | fields))


def test_d1_advantages():
    """r - mean, no division by the std."""
    got = d1.compute_advantages(torch.tensor([2.0, 0, 0, 0, 0, 1]), d1.Args(num_generations=6))
    torch.testing.assert_close(got, torch.tensor([1.5, -0.5, -0.5, -0.5, -0.5, 0.5]))


@pytest.mark.parametrize("module", [d1, coupled_grpo, spg])
def test_equal_rewards_have_advantage_zero_bit_for_bit(module):
    """An ulp left over would be a full step of AdamW where no other group is alive: the mean of ten 0.1 is not 0.1 in fp32."""
    for G, value in itertools.product((2, 6, 8, 10), (0.1, 0.3, 0.7, 1 / 3, 2.1)):
        rewards = torch.cat([torch.full((G,), value), torch.zeros(G - 1), torch.ones(1)])
        got = module.compute_advantages(rewards, module.Args(num_generations=G))
        assert not got[:G].any() and got[G:].all()
    assert (
        torch.full((10,), 0.1) - torch.full((10,), 0.1).mean()
    ).any()  # what d1's formula alone would give


@pytest.mark.parametrize(
    "ratio, A, objective, live",
    [(2, 1, 1.5, False), (2, -1, -2, True), (4, -1, -4, True), (0.25, -1, -0.5, False)],
)
def test_d1_clip(ratio, A, objective, live):
    """eps 0.5, symmetric, no dual clip (which would give -3 for ratio 4, A -1)."""
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_()
    loss, _ = d1.policy_loss(new, old, None, rows_of([[1.0]], [A]), d1.Args(epsilon=0.5, beta=0.0))
    assert -loss.item() == pytest.approx(objective)
    assert bool(torch.autograd.grad(loss, new)[0] != 0) == live


def test_d1_kl_is_k3_towards_the_reference():
    lp, ref = (
        torch.tensor([[-1.0]], dtype=torch.float64),
        torch.tensor([[-1.2]], dtype=torch.float64),
    )
    _, metrics = d1.policy_loss(lp, lp, ref, rows_of([[1.0]], [0.0]), d1.Args(beta=1.0))
    assert metrics["loss/kl"].item() == pytest.approx(
        0.018731, abs=1e-6
    )  # the reversed direction gives 0.021403


def test_d1_normalises_by_the_tokens_of_the_step():
    """L = 3 and 1, A = +1, -1, ratio 1: token mean -0.5 (a sequence mean would be 0)."""
    lp = torch.zeros(2, 3, dtype=torch.float64)
    loss, _ = d1.policy_loss(
        lp, lp, None, rows_of([[1.0, 1, 1], [1, 0, 0]], [1.0, -1.0]), d1.Args(beta=0.0)
    )
    assert loss.item() == pytest.approx(-0.5)


# ---------------------------------------------------------------------------------------- Coupled-GRPO


@single_rank
def test_coupled_masks_partition_the_completion():
    """All, a part, the rest: every scored token in exactly one of the last two; clean prompt; nothing to see after the EOS."""
    model, args = tiny_model(), coupled_grpo.Args(num_generations=4)
    batch = rollout_batch(coupled_grpo, model, args)
    L, c, times = batch.completion_mask.shape[1], batch.completion_mask, []
    for iteration in range(60):
        rows = coupled_grpo.sample_masks(batch, iteration, args)
        everything, part, rest = rows.masked[:, :, -L:].unbind(1)
        assert not rows.masked[:, :, :-L].any() and torch.equal(rows.input_ids, batch.input_ids)
        assert everything.all() and torch.equal(part ^ rest, c) and (part & rest).eq(~c).all()
        assert torch.equal(rows.weights != 0, rows.masked[:, :, -L:] & c[:, None])
        t = 1 / (2 * rows.weights[:, 1].amax(1)), 1 - 1 / (2 * rows.weights[:, 2].amax(1))
        t = torch.where(t[0].isfinite(), t[0], t[1])  # a part may be empty
        want = torch.stack(
            [c * 0.5, (part & c) / (2 * t[:, None]), (rest & c) / (2 * (1 - t[:, None]))], 1
        )
        torch.testing.assert_close(rows.weights, want)
        torch.testing.assert_close(
            t.view(-1, 4), t.view(-1, 4)[:, :1].expand(-1, 4)
        )  # one t for a group
        times.append(t[::4])
    assert (
        len({round(value, 6) for value in torch.cat(times).tolist()}) == 60 * 3
    )  # and one for each group and update
    u = torch.full_like(batch.valid_mask, 0.5, dtype=torch.float64)
    batch.uniform = lambda iteration, draw: (
        u
    )  # u = t exactly: the complement is "not a", so each token is still in one part
    rows = coupled_grpo.sample_masks(batch, 0, args)
    assert torch.equal(rows.masked[:, 1, -L:] ^ rows.masked[:, 2, -L:], c)


@single_rank
def test_coupled_draws_follow_their_law():
    """t ~ U(0.2, 0.8): mean 0.5, std 0.1732. Each token is in the first part with probability t, for itself."""
    model, args = tiny_model(), coupled_grpo.Args(num_generations=2)
    batch = rollout_batch(bgpo, model, bgpo.Args(num_generations=4))
    n, L = 20000, 4
    batch = replace(
        batch, input_ids=torch.zeros(n, L + 2, dtype=torch.long), valid_mask=torch.ones(n, L + 2, dtype=torch.bool),
        completion_mask=torch.ones(n, L, dtype=torch.bool), sample_index=torch.arange(n), advantages=torch.ones(n),
    )  # fmt: skip
    rows = coupled_grpo.sample_masks(batch, 0, args)
    a, w = rows.masked[:, 1, -L:], rows.weights
    t = torch.where(a.any(1), 1 / (2 * w[:, 1].amax(1)), 1 - 1 / (2 * w[:, 2].amax(1)))
    assert t.mean() == pytest.approx(0.5, abs=0.006) and t.std() == pytest.approx(0.1732, abs=0.004)
    assert 0.2 <= t.min() < 0.202 and 0.798 < t.max() <= 0.8
    for low in (0.2, 0.4, 0.6):
        some = (t >= low) & (t < low + 0.2)
        residual = (a.double() - t[:, None])[some]
        assert residual.mean(0).abs().max() < 0.02
        covariance = residual.T @ residual / len(residual)
        assert (
            covariance - covariance.diag().diag()
        ).abs().max() < 0.015  # tokens are independent given t
    other = coupled_grpo.sample_masks(replace(batch, sample_index=torch.arange(n) + n), 0, args)
    assert (other.masked[:, 1] != rows.masked[:, 1])[:, -L:].double().mean() > 0.4


def coupled_score(pattern, t, logps):
    """estimate_logps under hand-made draws. pattern [L] bool, logps [3, L] -> [L]"""
    a = torch.tensor(pattern, dtype=torch.float64)
    weights = torch.stack([torch.full_like(a, 0.5), a / (2 * t), (1 - a) / (2 * (1 - t))])
    rows = replace(rows_of([[1.0] * len(a)], [1.0]), weights=weights[None])
    return coupled_grpo.estimate_logps(logps[None], rows, coupled_grpo.Args())[0]


def test_coupled_score_by_the_papers_numbers():
    """Context-free p = 0.5, t = 0.4: -1.213008 in the first part, -0.924196 in the second, 1.5 log p on average over both."""
    lp = torch.full((3, 2), math.log(0.5), dtype=torch.float64)
    first, second = coupled_score([True, False], 0.4, lp).tolist()
    assert first == pytest.approx(-1.213008, abs=1e-6) and second == pytest.approx(
        -0.924196, abs=1e-6
    )
    for t in (0.2, 0.4, 0.77):
        first, second = coupled_score([True, False], t, lp).tolist()
        assert t * first + (1 - t) * second == pytest.approx(1.5 * math.log(0.5), abs=1e-12)
    moved = coupled_score([True, False], 0.4, lp + 0.1) - coupled_score([True, False], 0.4, lp)
    assert moved[0].exp().item() == pytest.approx(1.191246, abs=1e-6)  # not exp(0.1) = 1.105171
    lp.requires_grad_()
    (slope,) = torch.autograd.grad(coupled_score([True, False], 0.4, lp).sum(), lp)
    torch.testing.assert_close(
        slope, torch.tensor([[0.5, 0.5], [1.25, 0], [0, 0.5 / 0.6]], dtype=torch.float64)
    )


def test_coupled_advantages():
    """Mean baseline; leave-one-out is 4/3 of it."""
    rewards = torch.tensor([1.0, 0, 0, 0])
    mean = coupled_grpo.compute_advantages(rewards, coupled_grpo.Args(num_generations=4))
    torch.testing.assert_close(mean, torch.tensor([0.75, -0.25, -0.25, -0.25]))
    loo = coupled_grpo.compute_advantages(
        rewards, coupled_grpo.Args(num_generations=4, baseline="loo")
    )
    torch.testing.assert_close(loo, torch.tensor([1, -1 / 3, -1 / 3, -1 / 3]))


@families
def test_coupled_score_is_unbiased_against_all_masks(family):
    """E score = 1/2 [lp under the full mask + E lp where the token is masked, at t + the same at 1 - t], all by enumeration.

    L = 4: 16 parts, each completion of one block; t by Gauss-Legendre, exact for these polynomials. The means of the script's
    own draws over 20000 samples meet it; without the weights they do not.
    """
    space, completion = OneBlock(family=family), (1, 3, 0, 2)
    subsets = list(itertools.product([False, True], repeat=4))
    state = torch.tensor([[*space.prompt, *completion]] * 16)
    masked = torch.zeros_like(state, dtype=torch.bool)
    masked[:, 4:] = torch.tensor(subsets)
    with torch.no_grad():
        table = space.model.logps(state, torch.where(masked, space.MASK, state), masked)[
            :, 4:
        ].double()  # [16, 4]
    points, weights = __import__("numpy").polynomial.legendre.leggauss(8)
    want, expected = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for t, chance in zip(0.5 + 0.3 * points, weights / 2, strict=True):
        for k in range(4):
            conditional = torch.zeros(2, dtype=torch.float64)  # of being masked at t, at 1 - t
            for subset, values in zip(subsets, table, strict=True):
                others = sum(subset) - 1
                if subset[k]:
                    conditional[0] += t**others * (1 - t) ** (3 - others) * values[k]
                    conditional[1] += (1 - t) ** others * t ** (3 - others) * values[k]
            want[k] += chance * (table[15, k] + conditional.sum()) / 2
        for i, subset in enumerate(subsets):
            likely = t ** sum(subset) * (1 - t) ** (4 - sum(subset))
            expected += (
                chance
                * likely
                * coupled_score(subset, t, torch.stack([table[15], table[i], table[15 - i]]))
            )
    torch.testing.assert_close(expected, want, atol=1e-12, rtol=0)
    batch = replace(
        space.batch(), input_ids=state[:1].repeat(20000, 1), valid_mask=torch.ones(20000, 8, dtype=torch.bool),
        completion_mask=torch.ones(20000, 4, dtype=torch.bool), sample_index=torch.arange(20000), advantages=torch.ones(20000),
    )  # fmt: skip
    args = coupled_grpo.Args(num_generations=2)
    rows = coupled_grpo.sample_masks(batch, 0, args)
    code = (rows.masked[..., -4:] * torch.tensor([8, 4, 2, 1])).sum(-1)  # [20000, 3]
    draws = coupled_grpo.estimate_logps(
        table[code], replace(rows, weights=rows.weights.double()), args
    )
    score = lambda x: ((x.mean(0) - want) / (x.std(0) / len(x) ** 0.5)).abs().max()
    assert score(draws) < 4.5
    plain = coupled_grpo.estimate_logps(
        table[code], replace(rows, weights=(rows.weights != 0).double() / 2), args
    )
    assert score(plain) > 20


# ---------------------------------------------------------------------------------------- SPG


def spg_bounds(masks, logps, lengths=None, **settings):
    """Bounds per token of one sequence. masks [m][L]: 1 where a draw masks (and scores) a token; logps broadcast to [m, L]"""
    masked = torch.tensor(masks, dtype=torch.float64)
    L = masked.shape[1] if lengths is None else lengths
    rows = replace(
        rows_of([[1.0] * masked.shape[1]], [1.0]),
        weights=(masked * L / masked.sum(1, keepdim=True))[None],
    )
    rows.completion_mask = (torch.arange(masked.shape[1]) < L)[None]
    logps = torch.as_tensor(logps, dtype=torch.float64)
    return spg.estimate_logps(logps.expand(masked.shape)[None], rows, spg.Args(**settings))[0]


def mixture(bounds, omega=0.5):
    return omega * bounds[1].item() + (1 - omega) * bounds[0].item()


def test_spg_bounds_by_the_papers_numbers():
    """Context-free p = 0.25, L = 4. One draw: both bounds have one gradient. Two: a log of a mean over what they cover."""
    lp = torch.full((4,), math.log(0.25), dtype=torch.float64, requires_grad=True)
    elbo, eubo = spg_bounds([[1, 1, 0, 0]], lp)
    assert elbo.item() == pytest.approx(-1.386294, abs=1e-6) and eubo.item() == pytest.approx(
        -0.924196, abs=1e-6
    )
    slopes = [
        torch.autograd.grad(bound, lp, retain_graph=True)[0].tolist() for bound in (elbo, eubo)
    ]
    assert slopes[0] == pytest.approx([0.5, 0.5, 0, 0]) and slopes[1] == pytest.approx(
        [0.5, 0.5, 0, 0]
    )  # why m = 1 is refused
    two = [[1, 1, 0, 0], [0, 1, 1, 0]]
    assert spg_bounds(two, lp, eubo_beta=1.0)[1].item() == pytest.approx(-1.155245, abs=1e-6)
    bounds = spg_bounds(two, lp)
    assert bounds[1].item() == pytest.approx(-1.232262, abs=1e-6)
    assert mixture(bounds) == pytest.approx(-1.309278, abs=1e-6)
    assert (
        torch.autograd.grad(bounds[1], lp)[0][3] == 0
    )  # never masked: not counted either, the divisor is 3


def test_spg_upper_bound_follows_the_confident_draw():
    """p = 0.9 and 0.1 in two draws at equal t, beta 1.5: slopes 0.964286 and 0.035714; the lower bound has 0.5 and 0.5."""
    lp = torch.tensor([[0.9], [0.1]], dtype=torch.float64).log().requires_grad_()
    elbo, eubo = spg_bounds([[1], [1]], lp)
    assert torch.autograd.grad(eubo, lp, retain_graph=True)[0].flatten().tolist() == pytest.approx(
        [0.964286, 0.035714], abs=1e-6
    )
    assert torch.autograd.grad(elbo, lp)[0].flatten().tolist() == pytest.approx([0.5, 0.5])


def test_spg_upper_bound_is_in_log_space():
    """p = 1e-32: p^1.5 is 0 in fp32, and a sum of such numbers would lose the token and its gradient."""
    lp = torch.full((1, 1, 1), math.log(1e-32), requires_grad=True)
    rows = replace(rows_of([[1.0]], [1.0]), weights=torch.ones(1, 1, 1))
    eubo = spg.estimate_logps(lp, rows, spg.Args())[0, 1]
    assert (
        eubo.item() == pytest.approx(math.log(1e-32), rel=1e-6)
        and torch.autograd.grad(eubo, lp)[0].item() == 1
    )
    assert lp.exp().pow(1.5).item() == 0


def test_spg_bounds_equal_the_released_code():
    """Golden values: _get_per_seq_logps of facebookresearch/SPG a1c7120, spg/spg_trainer.py, run with a stub model, two draws,
    beta 1.5, mixture 0.5; its masks and log-probabilities are given here, the first completion ends at its fifth token.
    """
    masks = [[[0, 0, 0, 1, 1, 0], [1, 1, 1, 1, 1, 0]], [[1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 0, 1]]]
    logps = [
        [
            [-0.28593, -2.63509, -1.72372, -5.93816, -1.86509, 0],
            [-3.84332, -7.29089, -5.91692, -5.11072, -2.32843, 0],
        ],
        [
            [-3.06870, -2.42982, -5.32979, -7.26386, -6.56194, -1.58482],
            [-4.33319, -2.71916, -1.44624, -3.03803, -4.14538, -0.79638],
        ],
    ]
    released = [(5, -4.399839, -5.048532, -4.724186), (6, -3.145181, -3.744533, -3.444857)]
    for masked, values, (length, elbo, eubo, mix) in zip(masks, logps, released, strict=True):
        bounds = spg_bounds(masked, torch.tensor(values, dtype=torch.float64), length)
        assert [*bounds.tolist(), mixture(bounds)] == pytest.approx([elbo, eubo, mix], abs=1e-5)


def test_spg_loss_is_a_token_mean_of_advantage_times_bound():
    """A = 1, -1, L = 3, 1, bounds -1, -2: (3 - 2) / 4. A > 0 takes the lower bound, A < 0 the mixture."""
    rows = rows_of([[1.0, 1, 1], [1, 0, 0], [1, 1, 1]], [1.0, -1.0, 0.0], num_tokens=4.0)
    bounds = torch.tensor(
        [[-1.0, 5.0], [-3.0, -1.0], [7.0, 7.0]], dtype=torch.float64, requires_grad=True
    )
    loss, metrics = spg.policy_loss(bounds, None, None, rows, spg.Args())
    assert loss.item() == pytest.approx(0.25)
    slope = torch.autograd.grad(loss, bounds)[0].tolist()
    assert slope == [[-0.75, 0], [0.125, 0.125], [0, 0]]
    for omega, want in [(0.0, 0.0), (1.0, 0.5)]:  # the paper's rows with one bound
        assert spg.policy_loss(bounds, None, None, rows, spg.Args(omega=omega))[
            0
        ].item() == pytest.approx(want)


@families
def test_spg_sandwich_by_enumeration(family):
    """L = 4, V = 5, all 15 masks: lower <= exact, lower <= upper, upper grows with beta; exact <= upper from beta = L on.

    sum_i 1/beta log E[w p_i^beta] is the paper's upper bound without its constant. Hoelder's inequality makes it a bound where
    beta >= the number of tokens. Below that it is none: at 1.5 the exact value of some completions lies above it.
    """
    space = OneBlock(family=family)
    orders, batch, chances = space.by_order(), space.batch(), space.chances()
    exact, table, weights = (
        orders.logsumexp(0) - math.log(24),
        [],
        torch.tensor(space.patterns).double(),
    )
    weights = 4 * weights / weights.sum(1, keepdim=True)  # [15, 4]
    for pattern in space.patterns:
        masked = torch.zeros_like(batch.valid_mask)
        masked[:, 4:] = torch.tensor(pattern)
        noisy = torch.where(masked, space.MASK, batch.input_ids)
        with torch.no_grad():
            table.append(space.model.logps(batch.input_ids, noisy, masked)[:, 4:].double())
    table = torch.stack(table, 1)  # [625, 15, 4]
    times = (
        (48 * chances).round().long()
    )  # 48 draws with each mask as often as it is likely: the expectation itself
    rows = replace(
        rows_of([[1.0] * 4] * 625, [1.0] * 625), weights=weights.repeat_interleave(times, 0).expand(625, -1, -1)
    )  # fmt: skip
    bounds = {
        b: 4 * spg.estimate_logps(table.repeat_interleave(times, 1), rows, spg.Args(eubo_beta=b))
        for b in (1, 1.5, 2, 4)
    }
    lower = bounds[1][:, 0]
    torch.testing.assert_close(lower, orders.mean(0), atol=1e-10, rtol=0)
    uppers = torch.stack([bounds[b][:, 1] for b in (1, 1.5, 2, 4)])
    assert (lower <= exact + 1e-10).all() and (lower <= uppers[0] + 1e-10).all()
    assert (uppers.diff(dim=0) >= -1e-10).all()
    assert (exact <= uppers[3] + 1e-10).all()
    assert (exact > uppers[1] + 1e-3).sum() > 20 and (exact > uppers[0] + 1e-3).sum() > 50


@single_rank
def test_spg_lower_bound_is_unbiased_against_all_orders():
    """Block model, ragged prompts, EOS inside a block: mean of L elbo = exact ELBO with a clean prompt."""
    model, args = tiny_model(), spg.Args(num_generations=4, p_mask_context=0.0)
    batch = rollout_batch(spg, model, args)
    draws = []
    for iteration in range(200):
        rows = spg.sample_masks(batch, iteration, args)
        rows.weights = rows.weights.double()
        with torch.no_grad():
            logps = torch.stack([spg.draw_logps(model, rows, k) for k in range(2)], 1)
        draws.append(spg.estimate_logps(logps, rows, args)[:, 0] * batch.completion_mask.sum(1))
    draws = torch.stack(draws)
    with torch.no_grad():
        want = torch.stack(
            [
                exact_elbo(model, p, batch.trace.completion(i))
                for i, p in enumerate(batch.trace.prompt_ids)
            ]
        )
    assert ((draws.mean(0) - want).abs() < 4.5 * draws.std(0) / len(draws) ** 0.5 + 1e-9).all()
    assert (
        (draws.mean(0) / 1.1 - want).abs() > 6 * draws.std(0) / len(draws) ** 0.5
    ).sum() >= 8  # a tenth more would show


@families
def test_spg_expectation_of_two_draws(family):
    """Both bounds at m = 2: the mean over the script's own draws is the mean over all pairs of masks of its law.

    Counts k and k + 2 (modulo 4), the floor form; independent subsets. Unstratified counts have another mean.
    """
    space, completion, n = OneBlock(family=family), (1, 3, 0, 2), 20000
    state = torch.tensor([[*space.prompt, *completion]] * 15)
    masked = torch.zeros_like(state, dtype=torch.bool)
    masked[:, 4:] = torch.tensor(space.patterns)
    with torch.no_grad():
        table = space.model.logps(state, torch.where(masked, space.MASK, state), masked)[
            :, 4:
        ].double()
    want, independent = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for (i, first), (j, second) in itertools.product(enumerate(space.patterns), repeat=2):
        bounds = spg_bounds([first, second], torch.stack([table[i], table[j]]))
        chance = 1 / (4 * math.comb(4, sum(first)) * math.comb(4, sum(second)))
        want += chance * bounds * ((sum(first) + 1) % 4 + 1 == sum(second))
        independent += chance / 4 * bounds
    batch = replace(
        space.batch(), input_ids=state[:1].repeat(n, 1), valid_mask=torch.ones(n, 8, dtype=torch.bool), num_tokens=4.0 * n,
        completion_mask=torch.ones(n, 4, dtype=torch.bool), block_ids=torch.ones(n, 4, dtype=torch.long),
        sample_index=torch.arange(n), advantages=torch.ones(n), trace=SimpleNamespace(settings={"block_length": 4}),
    )  # fmt: skip
    args = spg.Args(p_mask_context=0.0)
    rows = spg.sample_masks(batch, 0, args)
    code = (rows.masked[..., -4:] * torch.tensor([8, 4, 2, 1])).sum(
        -1
    ) - 1  # [n, 2], the patterns in this order
    draws = spg.estimate_logps(table[code], replace(rows, weights=rows.weights.double()), args)
    score = lambda x: (x.mean(0) - want).abs() / (draws.std(0) / n**0.5)
    assert (score(draws) < 4.5).all()
    assert (
        score(independent[None])[1] > 8 and score(independent[None])[0] < 1e-6
    )  # the lower bound is the same for both


def one_block_batch(n, P, L, lengths, block_length):
    """n rows of a bidirectional model: one likelihood block, several blocks of the rollout."""
    length = torch.tensor(lengths).repeat(n)[:, None]
    n = len(length)
    return spg.Batch(
        input_ids=torch.ones(n, P + L, dtype=torch.long), valid_mask=torch.ones(n, P + L, dtype=torch.bool),
        completion_mask=torch.arange(L) < length, block_ids=torch.zeros(n, L, dtype=torch.long), sample_index=torch.arange(n),
        trace=SimpleNamespace(settings={"block_length": block_length}), mask_token_id=MASK, seed=3,
        num_tokens=float(length.sum()), num_sequences=float(n), advantages=torch.ones(n),
    )  # fmt: skip


def uniform_counts(counts, n):
    """Are these numbers uniform on 1..n?"""
    times = torch.bincount(counts, minlength=n + 1)[1:].double()
    return (
        len(times) == n
        and chi_square(times, torch.full((n,), 1 / n, dtype=torch.float64)) < CRITICAL[n - 1]
    )


def test_spg_masks_of_a_bidirectional_model():
    """P = 5, N = 8, blocks of 4, completions of 6, 8 and 3 tokens: one block in part, later ones all, earlier ones lightly."""
    batch, L = one_block_batch(4000, 5, 8, [6, 8, 3], 4), 8
    for p in (0.0, 0.15):
        rows, c = (
            spg.sample_masks(batch, 0, spg.Args(mc_num=2, p_mask_context=p)),
            batch.completion_mask,
        )
        masked, hidden = rows.masked[:, :, -L:], rows.masked[:, :, :-L]
        scored = masked & c[:, None]
        assert (masked | c[:, None]).all()  # all that follows the EOS is masked
        assert torch.equal(rows.weights != 0, scored)
        torch.testing.assert_close(
            rows.weights, scored * (c.sum(1)[:, None] / scored.sum(2))[..., None]
        )
        assert hidden.double().mean() == pytest.approx(p, abs=0.01) and torch.equal(
            hidden[:, 0], hidden[:, 1]
        )
        assert (
            torch.equal(rows.input_ids[:, :-L] == MASK, hidden[:, 0])
            and not (rows.input_ids[:, -L:] == MASK).any()
        )
        for length, size in [(6, 2), (8, 4)]:
            first, second = (
                scored[c.sum(1) == length].view(-1, 2, 2, 4).unbind(2)
            )  # [rows, draws, 4]
            if not p:  # then what is masked says which block was picked
                in_second = ~first.any(2)
                assert (in_second.sum(1) == 1).all() and uniform_counts(
                    in_second[:, 0] + 1, 2
                )  # two draws, two blocks
                assert (second[~in_second].sum(1) == size).all() and uniform_counts(
                    first[~in_second].sum(1), 4
                )
                assert uniform_counts(second[in_second].sum(1), size)
            else:  # the earlier block, lightly: where the second one was picked and is not all masked
                light = first[second.sum(2) < size]
                assert light.double().mean() == pytest.approx(p, abs=0.015)
        alone = scored[c.sum(1) == 3].sum(2)
        assert (
            all(uniform_counts(alone[:, j], 3) for j in range(2))
            and (alone[:, 0] != alone[:, 1]).all()
        )


def test_spg_blocks_are_picked_uniformly_and_stratified():
    """3 blocks of 4 are touched: each a third of the time, in every draw. The released permutation modulo 3: 1/2, 1/4, 1/4."""
    batch = one_block_batch(6000, 2, 16, [11], 4)
    for mc_num in (2, 3, 5):
        rows = spg.sample_masks(batch, 1, spg.Args(mc_num=mc_num, p_mask_context=0.0))
        picked = rows.masked[:, :, 2:].long().argmax(2) // 4  # block of the first masked token
        assert set(picked.flatten().tolist()) == {0, 1, 2}
        for j in range(mc_num):
            assert uniform_counts(picked[:, j] + 1, 3)
        times = torch.stack([(picked == b).sum(1) for b in range(3)], 1)
        assert (times.amax(1) - times.amin(1)).max() <= 1
        full = rows.masked[:, :, 2:].view(len(picked), mc_num, 4, 4).all(3)
        after = torch.arange(4) > picked[..., None]
        assert full[after].all() and not rows.masked[:, :, :2].any()


@single_rank
def test_spg_masks_of_a_block_model():
    """Every block of every draw has a target: counts uniform and stratified in each, and the prompt's mask in both copies."""
    model, args = tiny_model(), spg.Args(num_generations=4, mc_num=2)
    batch = rollout_batch(spg, model, args, prompts=[list(range(1, 5)) * 3, [1, 2, 3], [2, 2]])
    L, counts, hidden = batch.completion_mask.shape[1], {n: [] for n in (1, 2, 3, 4)}, []
    for iteration in range(150):
        rows = spg.sample_masks(batch, iteration, args)
        scored = rows.masked[:, :, -L:] & batch.completion_mask[:, None]
        assert (rows.masked[:, :, -L:] | batch.completion_mask[:, None]).all()
        assert torch.equal(rows.weights != 0, scored)
        for b, columns in blocks_of(batch):
            k = scored[b][:, columns].sum(1)
            assert k.min() >= 1
            torch.testing.assert_close(
                rows.weights[b][:, columns],
                scored[b][:, columns] * (len(columns) / k[:, None]).float(),
            )
            counts[len(columns)].append(k)
        hidden.append(rows.masked[:, 0, :-L])
        assert (
            torch.equal(rows.masked[:, 1, :-L], hidden[-1])
            and not (hidden[-1] & ~batch.valid_mask[:, :-L]).any()
        )
        assert torch.equal(
            rows.input_ids[:, :-L] == MASK, hidden[-1] | (batch.input_ids[:, :-L] == MASK)
        )
    share = torch.stack(hidden).double().mean() / batch.valid_mask[:, :-L].double().mean()
    assert share == pytest.approx(0.15, abs=0.015)
    for n in (2, 3, 4):
        k = torch.stack(counts[n])
        assert (k[:, 0] != k[:, 1]).all()
        for j in range(2):
            assert uniform_counts(k[:, j], n)


# ---------------------------------------------------------------------------------------- the released estimators


TOKENS = torch.tensor([
    [20, 22, 26, 16, 13, 27, 17, 9, 18, 16, 13, 11, 13, 22, 17, 10, 21, 27],
    [13, 23, 26, 20, 25, 6, 13, 23, 23, 7, 10, 8, 6, 20, 21, 18, 10, 6]
])  # fmt: skip


def released_case(masks, lengths, tilt=0.0):
    """A random LLaDA and rows with masks that the released code drew: 6 tokens of prompt, 12 of completion. tilt: makes the old
    policy (0.3) and the reference (-0.2) of it. -> model, rows
    """
    model = random_model(TINY_LLADA)
    with torch.no_grad():
        model.lm_head.weight.mul_(
            10 * (1 + tilt * torch.linspace(-1, 1, model.lm_head.weight.shape[1]))
        )
    masked = torch.tensor([[[char == "1" for char in draw] for draw in row] for row in masks])
    c = torch.arange(12) < torch.tensor(lengths)[:, None]
    scored = masked[:, :, -12:] & c[:, None]
    weights = scored * (c.sum(1)[:, None] / scored.sum(2))[..., None]
    rows = d1.Rows(
        input_ids=TOKENS, valid_mask=torch.ones(2, 18, dtype=torch.bool), masked=masked, weights=weights, completion_mask=c,
        advantages=torch.tensor([1.5, -0.5]), mask_token_id=model.mask_token_id, temperature=1.0,
        num_tokens=float(sum(lengths)), num_sequences=2.0,
    )  # fmt: skip
    return model, rows


def draws_of(module, model, rows):
    with torch.no_grad():
        return torch.stack(
            [module.draw_logps(model, rows, k) for k in range(rows.masked.shape[1])], 1
        )


def loss_and_norm(module, masks, lengths, weights=None, A=(1.5, -0.5), **settings):
    """-> loss and gradient norm where the released compute_loss was run; old and reference values of tilted models"""
    args, values = module.Args(**settings), {}
    model, rows = released_case(masks, lengths)
    rows.advantages, rows.weights = (
        torch.tensor(A),
        rows.weights if weights is None else weights(rows),
    )
    for name, tilt in (("old", 0.3), ("ref", -0.2)):
        other = released_case(masks, lengths, tilt)[0]
        values[name] = module.estimate_logps(draws_of(module, other, rows), rows, args)
    rows.old, rows.ref = values["old"], values["ref"] if module.USES_REF else None
    model.set_requires_gradient_sync = lambda sync: None
    metrics = module.backward(model, rows, 1.0, True, args)
    return metrics["loss/total"].item(), gradient(model).norm().item()


D1_MASKS = [["010001111111111111"], ["100010111111111111"]]
SPG_MASKS = [
    ["000010000111011111", "100000101011111111"],
    ["000000010111111111", "000000011100100101"],
]
COUPLED_MASKS = [
    ["000000111111111111", "000000010010110010", "000000101101001101"],
    ["000000111111111111", "000000011110011101", "000000100001100010"],
]
COUPLED_T = 1 / 2.1212158977855418


def coupled_weights(rows):
    return (rows.weights != 0) / (2 * torch.tensor([1, COUPLED_T, 1 - COUPLED_T]))[:, None]


def test_d1_on_a_tiny_llada_equals_the_released_code():
    """Golden values: forward_process and _get_per_token_logps of dllm-reasoning/d1 837888f, diffu-grpo/diffu_grpo_trainer.py
    (seed 5, 15 % of the prompt), on the logits of this model, the mask token left out as in ours.
    """
    want = [
        [-6.655033, -5.137215, -8.31731, -5.330443, -9.173655, -6.732651, -9.175271, 0, 0, 0, 0, 0],  # to the EOS
        [-8.367432, -7.175927, -7.200868, -9.594081, -9.123385, -8.384454, -11.542881, -4.963068, -6.073565, -7.9355,
         -8.963161, -11.626275],
    ]  # fmt: skip
    model, rows = released_case(D1_MASKS, [7, 12])
    got = d1.estimate_logps(draws_of(d1, model, rows), rows, d1.Args())
    torch.testing.assert_close(got, torch.tensor(want), atol=1e-5, rtol=1e-6)
    rows.masked[:, :, :6] = False  # what the prompt's masks are worth
    assert (d1.estimate_logps(draws_of(d1, model, rows), rows, d1.Args()) - got).abs().max() > 0.1


def test_losses_on_a_tiny_llada_equal_the_released_code():
    """Golden values: compute_loss of the same three, and the gradient norm of its backward; advantages 1.5 and -0.5. Clip (at
    d1's two of 19 tokens) and KL at work. SPG's two: either completion may be the one that is pushed down.
    """
    c = lambda rows: rows.completion_mask[:, None].float()
    got = loss_and_norm(d1, D1_MASKS, [7, 12], c)
    assert got == (pytest.approx(-0.16257532, abs=1e-5), pytest.approx(39.217370, rel=1e-5))
    got = loss_and_norm(coupled_grpo, COUPLED_MASKS, [12, 12], coupled_weights)
    assert got == (pytest.approx(-0.41799942, abs=1e-5), pytest.approx(80.015862, rel=1e-5))
    got = loss_and_norm(spg, SPG_MASKS, [7, 12])
    assert got == (pytest.approx(1.5620037, abs=1e-5), pytest.approx(74.788597, rel=1e-5))
    got = loss_and_norm(spg, SPG_MASKS, [7, 12], A=(-0.5, 1.5))
    assert got == (pytest.approx(6.8037224, abs=1e-5), pytest.approx(88.594437, rel=1e-5))


def test_spg_on_a_tiny_llada_equals_the_released_code():
    """Golden values: forward_process and _get_per_seq_logps of facebookresearch/SPG a1c7120 (block_random, two draws, seed 3,
    beta 1.5) on the logits of this model, the mask token left out as in ours; the first completion ends at its 7th token.
    """
    model, rows = released_case(SPG_MASKS, [7, 12])
    bounds = spg.estimate_logps(draws_of(spg, model, rows), rows, spg.Args())
    torch.testing.assert_close(
        bounds,
        torch.tensor([[-7.721592, -8.687874], [-7.770414, -8.445008]]).T,
        atol=1e-5,
        rtol=1e-6,
    )


def test_coupled_on_a_tiny_llada_equals_the_released_code():
    """Golden values: forward_process and _get_per_token_logps of apple/ml-diffucoder f735e01 (seed 11, without Dream's
    shift) on the logits of this model, the mask token left out as in ours.
    """
    model, rows = released_case(COUPLED_MASKS, [12, 12])
    rows.weights = coupled_weights(rows)
    want = [
        [-10.004365, -11.106958, -12.714579, -8.98806, -14.178948, -11.748976, -13.971359, -12.844914,
         -10.085393, -10.947598, -12.160315, -7.905195],
        [-12.455626, -12.65262, -12.767717, -13.712442, -12.970622, -12.313066, -15.134388, -9.807581,
         -9.014332, -11.984107, -12.034094, -16.668304],
    ]  # fmt: skip
    got = coupled_grpo.estimate_logps(
        draws_of(coupled_grpo, model, rows), rows, coupled_grpo.Args()
    )
    torch.testing.assert_close(got, torch.tensor(want), atol=1e-5, rtol=1e-6)


# ---------------------------------------------------------------------------------------- BGPO


def bgpo_loss(d, A, mc_num):
    """-> the surrogate of one sequence with these d, its slope in d"""
    d = torch.tensor(d, dtype=torch.float64).requires_grad_()
    rows = rows_of([[1.0]] * len(d), [A] * len(d), num_sequences=len(d) / mc_num)
    loss, _ = bgpo.policy_loss(d, torch.zeros_like(d), None, rows, bgpo.Args(mc_num=mc_num))
    return -loss.item(), -torch.autograd.grad(loss, d)[0]


def test_bgpo_bounds_by_the_papers_numbers():
    """d = (1, -.5, .3, 0): 1.2 for A = 1 and -1.418668 for A = -1, below +-exp(mean d) = +-1.221403."""
    value, slope = bgpo_loss([1, -0.5, 0.3, 0], 1.0, 4)
    assert value == pytest.approx(1.2) and slope.tolist() == pytest.approx([0.25] * 4)
    value, slope = bgpo_loss([1, -0.5, 0.3, 0], -1.0, 4)
    assert value == pytest.approx(-1.418668, abs=1e-6)
    assert slope.tolist() == pytest.approx([-0.679570, -0.151633, -0.337465, -0.25], abs=1e-6)


def test_bgpo_is_a_lower_bound_tangent_at_the_old_policy():
    generator = torch.Generator().manual_seed(0)
    for A in (1.0, -1.0, 0.5, -2.0):
        value, slope = bgpo_loss([0.0] * 4, A, 4)
        assert value == pytest.approx(A) and slope.tolist() == pytest.approx([A / 4] * 4)
        for _ in range(100):
            d = torch.randn(4, generator=generator, dtype=torch.float64) * 2
            assert bgpo_loss(d.tolist(), A, 4)[0] <= A * d.mean().exp().item() + 1e-12
    assert bgpo_loss([-2.0], 1.0, 1)[0] == pytest.approx(-1)  # finite where log(1 + d) is not
    assert (
        bgpo_loss([1000.0], 1.0, 1)[1].isfinite().all()
    )  # and the branch that is not taken cannot overflow into the gradient


def test_bgpo_advantages():
    """(r - mean) / std with the unbiased std; exactly 0 without spread, also where the mean rounds."""
    got = bgpo.compute_advantages(torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0]), bgpo.Args())
    torch.testing.assert_close(
        got, torch.tensor([1.620182] * 2 + [-0.540060] * 6), atol=1e-5, rtol=0
    )
    assert not bgpo.compute_advantages(torch.full((6,), 0.1), bgpo.Args(num_generations=6)).any()


# ---------------------------------------------------------------------------------------- the inner loop


def full_graph_loss(module, model, batch, args, rows, old, ref):
    """The objective written out with every graph kept: loops over rows, tokens and blocks, shares nothing with the script."""
    R, K, L = rows.weights.shape
    total = torch.zeros((), dtype=torch.float64)
    for r in range(R):
        lp = torch.zeros(K, L, dtype=torch.float64)
        valid = rows.valid_mask[r]
        clean, noisy_mask = rows.input_ids[r][valid], rows.masked[r][:, valid]
        offset = int((~valid[:-L]).sum())  # left padding
        P = len(valid) - L - offset
        values = []
        for k in range(K):
            row = []
            for j in range(L):
                if rows.weights[r, k, j] == 0:
                    row.append(torch.zeros((), dtype=torch.float64))
                    continue
                # a block model sees clean blocks and the token's own; others see the noisy canvas
                start, end = (
                    ((P + j) // 4 * 4, (P + j) // 4 * 4 + 4)
                    if model.attention == "block-causal"
                    else (0, None)
                )
                noisy = torch.where(noisy_mask[k, start:end], MASK, clean[start:end])
                logits = model.logits(torch.cat([clean[:start], noisy])[None])[0, P + j]
                logits = torch.where(torch.arange(8) == MASK, -math.inf, logits)
                row.append(logits.log_softmax(-1)[clean[P + j]])
            values.append(torch.stack(row))
        lp = torch.stack(values)
        A, w, c = rows.advantages[r], rows.weights[r], rows.completion_mask[r]
        if module in (d1, coupled_grpo):
            score = lp[0] if module is d1 else w[0] * lp[0] + w[1] * lp[1] + w[2] * lp[2]
            for j in range(L):
                if c[j]:
                    ratio = (score[j] - old[r][j]).exp()
                    clipped = min(max(ratio.item(), 1 - args.epsilon), 1 + args.epsilon)
                    surrogate = (
                        ratio * A
                        if (ratio * A).item() <= clipped * A.item()
                        else ratio.detach() * 0 + clipped * A
                    )
                    delta = ref[r][j] - score[j]
                    total = (
                        total
                        + (-surrogate + args.beta * (delta.exp() - delta - 1)) / batch.num_tokens
                    )
        elif module is bgpo:
            d = (w[0] * lp[0]).sum() - old[r]
            total = total - (A * (1 + d) if A >= 0 else A * d.exp()) / (
                batch.num_sequences * args.mc_num
            )
        elif module is spg:
            length = c.sum().item()
            bound = sum((w[k] * lp[k]).sum() for k in range(K)) / K
            if A < 0:
                means = [
                    sum(w[k, j] * lp[k, j].exp() ** args.eubo_beta for k in range(K) if w[k, j]) / K
                    for j in range(L)
                ]
                covered = [mean for mean in means if torch.is_tensor(mean)]
                upper = sum(mean.log() for mean in covered) / args.eubo_beta / len(covered) * length
                bound = args.omega * upper + (1 - args.omega) * bound
            total = total - A * bound / batch.num_tokens
    return total


def gradient(model, loss=None):
    grads = (
        [p.grad.clone() for p in model.parameters()]
        if loss is None
        else torch.autograd.grad(loss, list(model.parameters()))
    )
    return torch.cat([g.flatten() for g in grads])


def inner_gradient(module, model, rows, args):
    model.zero_grad()
    model.set_requires_gradient_sync = lambda sync: None
    for i, (micro, _) in enumerate(module.micro_batches(rows, args)):
        module.backward(model, micro, 1, i == 0, args)
    return gradient(model)


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def gradient_case(method, family="sdar"):
    """-> module, model, batch, rows with old and reference values of other policies, args: a later update, clip active"""
    model, other = family_model(family), family_model(family)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(
                0.02
                * torch.randn(
                    p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype
                )
            )
    module, args = {
        "d1": (d1, d1.Args(num_generations=4, beta=0.3, epsilon=0.1)),
        "bgpo": (bgpo, bgpo.Args(num_generations=4, mc_num=3)),
        "coupled_grpo": (coupled_grpo, coupled_grpo.Args(num_generations=4, beta=0.3, epsilon=0.1)),
        "spg": (spg, spg.Args(num_generations=4, mc_num=3)),
    }[method]
    batch = rollout_batch(module, model, args)
    rows = module.sample_masks(batch, 0, args)
    rows.weights = rows.weights.double()
    with torch.no_grad():
        rows.old = module.frozen_estimates(other, rows, args)
        rows.ref = (
            module.frozen_estimates(family_model(family, 1), rows, args)
            if module.USES_REF
            else None
        )
    return module, model, batch, rows, args


@families
@pytest.mark.parametrize("method", ["d1", "bgpo", "coupled_grpo", "spg"])
def test_inner_loop_gradient_equals_a_full_graph_loss(run_ranks, monkeypatch, method, family):
    """Relative error <= 1e-10 in fp64 for micro-batches of 1, 3, 7 and all, also with rows and draws in another order; planted
    faults are found.
    """

    def body(rank, world_size):
        module, model, batch, rows, args = gradient_case(method, family)
        want, K = (
            gradient(model, full_graph_loss(module, model, batch, args, rows, rows.old, rows.ref)),
            rows.masked.shape[1],
        )
        for size in (1, 3, 7, 1000) if family == "sdar" else (5, 1000):
            args.micro_batch_size = size
            got = inner_gradient(module, model, rows, args)
            assert relative(got, want) < 1e-10, (method, size, relative(got, want))
        shuffled = rows.select(
            torch.randperm(len(rows.masked), generator=torch.Generator().manual_seed(0))
        )
        shuffled.masked, shuffled.weights = shuffled.masked.flip(1), shuffled.weights.flip(1)
        assert relative(inner_gradient(module, model, shuffled, args), want) < 1e-10
        if module.USES_REF:  # the clip is at work, and not everywhere
            ratio = (module.frozen_estimates(model, rows, args) - rows.old).exp()[
                rows.completion_mask
            ]
            clipped = ((ratio - 1).abs() > args.epsilon).double().mean()
            assert 0.02 < clipped < 0.9, clipped
        # planted faults: masks off by one token, and (several draws) the slope of another draw
        wrong = replace(rows, masked=rows.masked.roll(1, -1))
        assert relative(inner_gradient(module, model, wrong, args), want) > 0.01
        if K > 1:
            true_draw = module.draw_logps
            module.draw_logps = lambda model, rows, k: true_draw(
                model, rows, (k + 1) % K if torch.is_grad_enabled() else k
            )
            assert relative(inner_gradient(module, model, rows, args), want) > 0.01

    run_ranks(1, body)


@single_rank
def test_first_update_has_ratio_one_and_the_gradient_of_the_policy_gradient():
    """With one update per rollout old is the estimate itself: no second pass, and d loss = -A / count d logps."""
    module, model, batch, rows, args = gradient_case("bgpo")
    rows.old = None
    got = inner_gradient(module, model, rows, args)
    with torch.no_grad():
        old = module.frozen_estimates(model, rows, args)
    want = gradient(model, full_graph_loss(module, model, batch, args, rows, old, None))
    assert relative(got, want) < 1e-10
    # the same as of the objective that it bounds: A exp(ELBO - old ELBO), the mean over draws inside the exponential
    d = module.estimate_logps(module.draw_logps(model, rows, 0)[:, None], rows, args) - old
    objective = (
        batch.advantages * d.view(args.mc_num, -1).mean(0).exp()
    ).sum() / batch.num_sequences
    assert relative(got, gradient(model, -objective)) < 1e-10


def peak_of_graphs(run):
    """Most bytes that autograd held for backward passes at one time while run() ran."""
    held = {"now": 0, "peak": 0}

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor
            held["now"] += tensor.nbytes
            held["peak"] = max(held["peak"], held["now"])

        def __del__(self):
            held["now"] -= self.tensor.nbytes

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        run()
    assert held["now"] == 0
    return held["peak"]


@single_rank
def test_memory_is_that_of_one_draw_and_gradients_are_synced_once():
    """Eight draws hold no more for the backward pass than two; the last backward of a step alone reduces over ranks."""
    model, synced = tiny_model(), []
    model.set_requires_gradient_sync = synced.append
    for module, rows_per_draw in ((bgpo, True), (spg, False)):
        peaks = []
        for mc_num in (2, 8):
            args = module.Args(num_generations=4, mc_num=mc_num, micro_batch_size=4)
            rows = module.sample_masks(rollout_batch(module, model, args), 0, args)
            micros = module.micro_batches(rows, args)

            def step():
                synced.clear()
                for i, (micro, _) in enumerate(micros):  # noqa: B023
                    module.backward(model, micro, 1, i == len(micros) - 1, args)  # noqa: B023

            peaks.append(peak_of_graphs(step))
            assert len(synced) == 12 // 4 * mc_num and synced == [False] * (len(synced) - 1) + [
                True
            ]
            assert len(micros) == (12 // 4 * mc_num if rows_per_draw else 12 // 4)
        assert peaks[1] < 1.2 * peaks[0]
    whole = lambda: sum(
        spg.draw_logps(model, rows.select(slice(0, 4)), k).sum() for k in range(8)
    ).backward()
    assert peak_of_graphs(whole) > 5 * peaks[0]  # what the plain graph of a row would hold
    args.sync_every_backward = True
    step()
    assert synced == [True] * len(synced)


# ---------------------------------------------------------------------------------------- SFT


@single_rank
def test_sft_loss_is_unbiased_and_ignores_the_prompt():
    """Mean over noise of the loss = mean over tokens of the expected cross-entropy under uniform p, by enumeration of masks."""
    model, args = tiny_model(), sft.Args(batch_size=1)
    rows = [([1, 2, 3], [4, 0, 2, 1, EOS])]  # 8 tokens: two blocks, one shared with the prompt
    batch = sft.make_batch(rows, args, model, 0, 0, 1, torch.device("cpu"))
    answer = [3, 4, 5, 6, 7]
    ids = batch.input_ids
    want = 0.0
    # E over p ~ U(eps, 1) of sum_masks P(mask | p) sum -logp / p, with p integrated by Gauss-Legendre nodes
    nodes, node_weights = (
        torch.from_numpy(__import__("numpy").polynomial.legendre.leggauss(12)[0]),
        torch.from_numpy(__import__("numpy").polynomial.legendre.leggauss(12)[1]),
    )
    ps = 1e-3 + (1 - 1e-3) * (nodes + 1) / 2
    for pattern in itertools.product([False, True], repeat=len(answer)):
        masked = torch.zeros_like(batch.answer_mask)
        masked[0, answer] = torch.tensor(pattern)
        if masked.any():
            with torch.no_grad():
                nll = -model.logps(ids, torch.where(masked, MASK, ids), masked).sum().item()
            k = sum(pattern)
            want += (
                sum(
                    (w / 2 * p ** (k - 1) * (1 - p) ** (len(answer) - k)).item()
                    for p, w in zip(ps, node_weights, strict=True)
                )
                * nll
            )
    want /= len(answer)
    losses = []
    for step in range(4000):
        noisy = replace(batch, step=step)
        masked, weights, divisor = sft.sample_masks(noisy, args, model.objective)
        assert not masked[0, :3].any() and divisor == 5
        losses.append((masked, weights))
    cache, values = {}, []
    for masked, weights in losses:
        key = tuple(masked[0].tolist())
        if key not in cache:
            with torch.no_grad():
                cache[key] = model.logps(ids, torch.where(masked, MASK, ids), masked)
        values.append(sft.sft_loss(cache[key], weights, divisor).item())
    values = torch.tensor(values)
    assert abs(values.mean() - want) < 5 * values.std() / len(values) ** 0.5, (values.mean(), want)


@single_rank
def test_sft_pads_to_whole_blocks_and_scores_the_padding():
    """SDAR's recipe: EOS closes the answer, scored pads fill its last block; pads beyond are invalid."""
    model, args = tiny_model(), sft.Args(batch_size=2, group_by_length=False)
    batch = sft.make_batch(
        [([1, 2, 3], [4, EOS]), ([1], [2, 3, 4, 0, 1, 2, EOS])],
        args,
        model,
        0,
        0,
        1,
        torch.device("cpu"),
    )
    assert batch.input_ids.tolist() == [
        [1, 2, 3, 4, EOS, EOS, EOS, EOS],
        [1, 2, 3, 4, 0, 1, 2, EOS],
    ]
    assert (
        batch.answer_mask.sum(1).tolist() == [5, 7]
        and batch.valid_mask.all()
        and batch.num_tokens == 12
    )
    longer = sft.make_batch(
        [([1, 2, 3], [EOS]), ([1], [2] * 7)], args, model, 0, 0, 1, torch.device("cpu")
    )
    assert longer.valid_mask.sum(1).tolist() == [4, 8] and longer.answer_mask.sum(1).tolist() == [
        1,
        7,
    ]


@single_rank
def test_sft_tails_of_bidirectional_models_stay_within_max_length():
    """0 to eos_tail end tokens, every number of them, but no row is longer than --max-length; no row depends on the others."""
    model, args = (
        random_model(TINY_LLADA),
        sft.Args(batch_size=64, eos_tail=5, max_length=9, group_by_length=False),
    )
    model.pad_token_id = EOS
    short, long, longest = (
        ([1, 2], [3, EOS]),
        ([1, 2], [3, 4, 5, 6, EOS]),
        ([1, 2], [3, 4, 5, 6, 7, 0, EOS]),
    )
    make = lambda rows, step=0: sft.make_batch(rows, args, model, step, 0, 1, torch.device("cpu"))
    lengths = [make([row] * 64).valid_mask.sum(1).tolist() for row in (short, long, longest)]
    assert [set(found) for found in lengths] == [{4, 5, 6, 7, 8, 9}, {7, 8, 9}, {9}]
    assert lengths[1] == [min(n + 3, 9) for n in lengths[0]]
    assert (
        make([short] * 64, 1).valid_mask.sum(1).tolist() != lengths[0]
    )  # drawn anew in every step
    mixed = make([short, long, longest])
    assert mixed.valid_mask.sum(1).tolist() == [found[i] for i, found in enumerate(lengths)]
    assert (mixed.answer_mask.sum(1) == mixed.valid_mask.sum(1) - 2).all()
    for ids, row in zip(mixed.input_ids.tolist(), (short, long, longest), strict=True):
        prompt, answer = row
        assert ids[: len(prompt + answer)] == prompt + answer and set(
            ids[len(prompt + answer) :]
        ) <= {EOS, 0}


@single_rank
def test_sft_noise_levels_are_stratified_over_the_step_and_keyed_by_sample():
    model, args = tiny_model(), sft.Args(batch_size=8)
    rows = [([1, 2, 3, 4], [4] * 400)] * 8
    batch = sft.make_batch(rows, args, model, 3, 0, 1, torch.device("cpu"))
    masked, weights, _ = sft.sample_masks(batch, args, model.objective)
    p = 1 / weights.amax(1)
    gaps = p.sort().values.diff()
    torch.testing.assert_close(gaps, torch.full((7,), (1 - 1e-3) / 8), atol=1e-5, rtol=0)
    torch.testing.assert_close(masked.sum(1) / 400, p, atol=0.12, rtol=0)
    second = sft.make_batch(
        rows, args, model, 3, 1, 2, torch.device("cpu")
    )  # the second of two ranks
    assert torch.equal(sft.sample_masks(second, args, model.objective)[0], masked[1::2])


def test_world_is_not_initialised():
    assert not dist.is_initialized()  # bodies ran in children
