"""The methods against brute force: enumerated likelihoods and bounds, the papers' numbers, and the inner loop's gradient."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from algos import bgpo, d1, sft
from models.random_init import TINY_SDAR, random_model
from rollout import make_engine

MASK, EOS = 6, 5
TINY = TINY_SDAR | {
    "vocab_size": 8, "mask_token_id": MASK, "eos_token_id": EOS, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


def tiny_model(seed=0, scale=8.0):
    """A peaked random SDAR in fp64 with 8 tokens, of which 6 is the mask and 5 the EOS."""
    model = random_model(TINY, seed).double()
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
        model.model.embed_tokens.weight.mul_(30)
    model.eos_token_ids, model.pad_token_id = [EOS], EOS
    return model


def single_rank(target):
    """Run a test body in one forked rank, because the scripts' counts are collectives."""

    def test(run_ranks, *args, **kwargs):
        run_ranks(1, lambda rank, world_size: target(*args, **kwargs))

    test.__name__, test.__doc__ = target.__name__, target.__doc__
    return test


def rollout_batch(module, model, args, prompts=((1, 2, 3), (4, 1, 2, 3, 0, 1)), gen_length=9):
    """A rollout of ragged prompts with advantages of both signs and a dead group."""
    trace = make_engine(model).generate(
        [list(p) for p in prompts], num_samples=args.num_generations, gen_length=gen_length, denoising_steps=2, seed=5
    )
    batch = module.make_batch(trace, model, seed=11)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0] * len(prompts), dtype=torch.float64)[: len(trace.prompt_ids)]
    batch.advantages = module.compute_advantages(rewards, args)
    return batch


# ---------------------------------------------------------------------------------------- likelihoods by enumeration


def exact_elbo(model, prompt, completion):
    """Mean over all orders of sum_k log p(y_order[k] | prompt, y_order[<k]) inside each block, blocks left to right.

    Independent of masks, counts and weights: this is what every unbiased estimator must give on average.
    """
    n, ids = model.block_length, [*prompt, *completion]
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, len(ids), n):
        where = [i for i in range(start, min(start + n, len(ids))) if i >= len(prompt)]
        orders = list(itertools.permutations(where))
        for order in orders:
            known = set(range(where[0])) if where else set()
            for i in order:
                state = [token if j in known else MASK for j, token in enumerate(ids[: start + n])]
                state += [MASK] * (start + n - len(state))
                logits = model.logits(torch.tensor([state]))[0, i]
                logits[MASK] = -math.inf
                total += logits.log_softmax(-1)[ids[i]] / len(orders)
                known.add(i)
    return total


def test_exact_elbo_is_a_bound_of_a_likelihood_that_sums_to_one():
    """V = 5 usable tokens... the random-order likelihood sums to 1 over all completions, and the ELBO lies below its log."""
    model, prompt = tiny_model(), [1, 2]  # two tokens complete the first block
    usable = [token for token in range(8) if token != MASK]
    likelihood, elbo = {}, {}
    for completion in itertools.product(usable, repeat=2):
        orders = []
        for order in itertools.permutations(range(2)):
            log_p, state = 0.0, [*prompt, MASK, MASK]
            for i in order:
                logits = model.logits(torch.tensor([state]))[0, 2 + i]
                logits[MASK] = -math.inf
                log_p += logits.log_softmax(-1)[completion[i]].item()
                state[2 + i] = completion[i]
            orders.append(log_p)
        likelihood[completion] = sum(map(math.exp, orders)) / 2
        elbo[completion] = sum(orders) / 2
        assert elbo[completion] == pytest.approx(exact_elbo(model, prompt, list(completion)).item(), abs=1e-9)
    assert sum(likelihood.values()) == pytest.approx(1, abs=1e-9)
    assert all(elbo[c] <= math.log(likelihood[c]) + 1e-12 for c in elbo)
    assert max(math.log(likelihood[c]) - elbo[c] for c in elbo) > 0.01  # and the bound is not trivially tight


@single_rank
def test_bgpo_estimate_is_unbiased_against_all_orders():
    """Mean of many one-draw ELBOs = exact ELBO, over ragged prompts, several blocks and a mid-block EOS."""
    model = tiny_model()
    args = bgpo.Args(num_generations=4, mc_num=4)
    batch = rollout_batch(bgpo, model, args)
    draws = []
    for iteration in range(150):
        rows = bgpo.sample_masks(batch, iteration, args)
        with torch.no_grad():
            rows.weights = rows.weights.double()
            logps = bgpo.draw_logps(model, rows, 0)
            draws.append(bgpo.estimate_logps(logps[:, None], rows, args).view(args.mc_num, -1))
    draws = torch.stack(draws).flatten(0, 1)  # [600, B]
    for i in range(draws.shape[1]):
        with torch.no_grad():
            # after the EOS everything stays masked: the exact value has those positions masked too
            want = exact_elbo(model, batch.trace.prompt_ids[i], batch.trace.completion(i)).item()
        error = draws[:, i].std() / len(draws) ** 0.5
        assert abs(draws[:, i].mean() - want) < 5 * error + 1e-9, (i, draws[:, i].mean(), want, error)
    # negative control: without the weight n / m the mean is elsewhere
    assert (draws.mean(0) - (draws.mean(0) * 0.5)).abs().max() > 5 * error


@single_rank
def test_bgpo_counts_are_stratified_and_masks_stay_in_place():
    model, args = tiny_model(), bgpo.Args(num_generations=4, mc_num=4)
    batch = rollout_batch(bgpo, model, args)
    B, L = batch.completion_mask.shape
    rows = bgpo.sample_masks(batch, 0, args)
    masked = rows.masked.view(args.mc_num, B, -1)
    assert not masked[..., :-L].any()  # the prompt is never masked
    assert (masked[..., -L:] | batch.completion_mask).all()  # after the EOS all is masked
    chosen = masked[..., -L:] & batch.completion_mask  # [draws, B, L]
    for b in range(B):
        for block in batch.block_ids[b].unique():
            inside = (batch.block_ids[b] == block) & batch.completion_mask[b]
            n, counts = int(inside.sum()), sorted(chosen[:, b, inside].sum(1).tolist())
            if n:
                assert min(counts) >= 1 and max(counts) <= n
                if n == args.mc_num:
                    assert counts == list(range(1, n + 1))  # one draw of each count: the floor form stratifies exactly
                weights = rows.weights.view(args.mc_num, B, L)[:, b, inside]
                m = chosen[:, b, inside].sum(1, keepdim=True)
                torch.testing.assert_close(weights, chosen[:, b, inside] * (n / m).float())
    other = bgpo.sample_masks(batch, 1, args)
    assert not torch.equal(other.masked, rows.masked)
    assert torch.equal(bgpo.sample_masks(batch, 0, args).masked, rows.masked)


def test_floor_form_is_uniform_where_rounding_is_not():
    """m = floor(((u + j/n) mod 1) L) + 1 is uniform on 1..L; rounded spacing is not (L = 6, n = 4 hits one parity only)."""
    L, n = 6, 4
    u = (torch.arange(60000, dtype=torch.float64) + 0.5) / 60000
    for j in range(n):
        m = (((u + j / n) % 1) * L).floor() + 1
        assert torch.equal(m.unique(return_counts=True)[1], torch.full((L,), 10000))
    k = torch.arange(1, L + 1)
    rounded = ((k + torch.tensor(1 * L / n).round().long() - 1) % L) + 1
    assert rounded.unique().numel() == L  # one row alone is fine; half-even rounding of k + jL/n is what loses values:
    assert torch.tensor([round(int(x) + 1 * L / n) for x in k]).remainder(2).unique().numel() == 1


@single_rank
def test_masks_do_not_depend_on_padding_or_batch_layout():
    model, args = tiny_model(), bgpo.Args(num_generations=4, mc_num=2)
    batch = rollout_batch(bgpo, model, args)
    pad = 3
    F = torch.nn.functional
    wider = replace(
        batch, input_ids=F.pad(batch.input_ids, (pad, 0), value=EOS), valid_mask=F.pad(batch.valid_mask, (pad, 0), value=False)
    )
    for module, arguments in [(bgpo, args), (d1, d1.Args())]:
        a, b = module.sample_masks(batch, 0, arguments), module.sample_masks(wider, 0, arguments)
        assert torch.equal(a.masked, b.masked[..., pad:]) and torch.equal(a.weights, b.weights)
        la, lb = module.draw_logps(model, a, 0), module.draw_logps(model, b, 0)
        torch.testing.assert_close(la, lb, atol=1e-12, rtol=0)
    half = replace(batch, **{
        name: getattr(batch, name)[4:]
        for name in ("input_ids", "valid_mask", "completion_mask", "block_ids", "sample_index", "advantages")
    })  # fmt: skip
    assert torch.equal(d1.sample_masks(half, 0, d1.Args()).masked, d1.sample_masks(batch, 0, d1.Args()).masked[4:])


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
        assert rows.masked[:, 0, -L:].all() and not (rows.masked[:, 0] & ~batch.valid_mask)[:, :-L].any()
        masks.append(rows.masked[:, 0, :-L])
        hidden = masks[-1]
        assert (rows.input_ids[:, :-L][hidden] == MASK).all()  # a block model reads the prompt from the clean copy
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
            assert got[i, j].item() == pytest.approx(logits.log_softmax(-1)[ids[P + j]].item(), abs=1e-9)


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


@pytest.mark.parametrize(
    "ratio, A, objective, live", [(2, 1, 1.5, False), (2, -1, -2, True), (4, -1, -4, True), (0.25, -1, -0.5, False)]
)
def test_d1_clip(ratio, A, objective, live):
    """eps 0.5, symmetric, no dual clip (which would give -3 for ratio 4, A -1)."""
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_()
    loss, _ = d1.policy_loss(new, old, None, rows_of([[1.0]], [A]), d1.Args(epsilon=0.5, beta=0.0))
    assert -loss.item() == pytest.approx(objective)
    assert bool(torch.autograd.grad(loss, new)[0] != 0) == live


def test_d1_kl_is_k3_towards_the_reference():
    lp, ref = torch.tensor([[-1.0]], dtype=torch.float64), torch.tensor([[-1.2]], dtype=torch.float64)
    _, metrics = d1.policy_loss(lp, lp, ref, rows_of([[1.0]], [0.0]), d1.Args(beta=1.0))
    assert metrics["loss/kl"].item() == pytest.approx(0.018731, abs=1e-6)  # the reversed direction gives 0.021403


def test_d1_normalises_by_the_tokens_of_the_step():
    """L = 3 and 1, A = +1, -1, ratio 1: token mean -0.5 (a sequence mean would be 0)."""
    lp = torch.zeros(2, 3, dtype=torch.float64)
    loss, _ = d1.policy_loss(lp, lp, None, rows_of([[1.0, 1, 1], [1, 0, 0]], [1.0, -1.0]), d1.Args(beta=0.0))
    assert loss.item() == pytest.approx(-0.5)


# ---------------------------------------------------------------------------------------- BGPO


def bgpo_loss(d, A, mc_num):
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
    assert bgpo_loss([1000.0], 1.0, 1)[1].isfinite().all()  # and the branch that is not taken cannot overflow into the gradient


def test_bgpo_advantages():
    """(r - mean) / std with the unbiased std; exactly 0 without spread, also where the mean rounds."""
    got = bgpo.compute_advantages(torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0]), bgpo.Args())
    torch.testing.assert_close(got, torch.tensor([1.620182] * 2 + [-0.540060] * 6), atol=1e-5, rtol=0)
    assert not bgpo.compute_advantages(torch.full((6,), 0.1), bgpo.Args(num_generations=6)).any()


# ---------------------------------------------------------------------------------------- the inner loop


def coupled_estimate(logps, rows, args):
    """A stand-in method whose loss couples its K draws: log of a mean of exponentials."""
    return ((rows.weights * logps).sum(2)).logsumexp(1) - math.log(logps.shape[1])


def coupled_loss(estimates, old, ref, rows, args):
    loss = -(rows.advantages * (estimates - old).exp()).sum() / rows.num_sequences
    return loss, {"loss/policy": loss, "policy/weight": torch.ones(())}


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
                start = (P + j) // 4 * 4
                block = torch.where(noisy_mask[k, start : start + 4], MASK, clean[start : start + 4])
                logits = model.logits(torch.cat([clean[:start], block])[None])[0, P + j]
                logits = torch.where(torch.arange(8) == MASK, -math.inf, logits)
                row.append(logits.log_softmax(-1)[clean[P + j]])
            values.append(torch.stack(row))
        lp = torch.stack(values)
        A, w, c = rows.advantages[r], rows.weights[r], rows.completion_mask[r]
        if module is d1:
            for j in range(L):
                if c[j]:
                    ratio = (lp[0, j] - old[r][j]).exp()
                    clipped = min(max(ratio.item(), 1 - args.epsilon), 1 + args.epsilon)
                    surrogate = ratio * A if (ratio * A).item() <= clipped * A.item() else ratio.detach() * 0 + clipped * A
                    delta = ref[r][j] - lp[0, j]
                    total = total + (-surrogate + args.beta * (delta.exp() - delta - 1)) / batch.num_tokens
        elif module is bgpo:
            d = (w[0] * lp[0]).sum() - old[r]
            total = total - (A * (1 + d) if A >= 0 else A * d.exp()) / (batch.num_sequences * args.mc_num)
        else:
            mean = torch.stack([(w[k] * lp[k]).sum().exp() for k in range(K)]).mean()
            total = total - A * (mean.log() - old[r]).exp() / batch.num_sequences
    return total


def gradient(model, loss=None):
    grads = (
        [p.grad.clone() for p in model.parameters()] if loss is None else torch.autograd.grad(loss, list(model.parameters()))
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


def gradient_case(method):
    """-> module, model, batch, rows with old and reference values of other policies, args: a later update, clip active"""
    model, other = tiny_model(0), tiny_model(0)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype))
    module = bgpo if method == "bgpo" else d1
    args = bgpo.Args(num_generations=4, mc_num=3) if method == "bgpo" else d1.Args(num_generations=4, beta=0.3, epsilon=0.1)
    batch = rollout_batch(module, model, args)
    rows = module.sample_masks(batch, 0, args)
    rows.weights = rows.weights.double()
    if method == "coupled":  # three forwards a row
        parts = [bgpo.sample_masks(batch, i, bgpo.Args(mc_num=1)) for i in range(3)]
        rows = replace(
            parts[0],
            masked=torch.cat([p.masked for p in parts], 1),
            weights=torch.cat([p.weights for p in parts], 1).double() / 9,
        )
    with torch.no_grad():
        rows.old = module.frozen_estimates(other, rows, args)
        rows.ref = module.frozen_estimates(tiny_model(1), rows, args) if method == "d1" else None
    return module, model, batch, rows, args


@pytest.mark.parametrize("method", ["d1", "bgpo", "coupled"])
def test_inner_loop_gradient_equals_a_full_graph_loss(run_ranks, monkeypatch, method):
    """Relative error <= 1e-10 in fp64 for micro-batches of 1, 3, 7 and all; planted faults are found."""

    def body(rank, world_size):
        if method == "coupled":
            d1.estimate_logps, d1.policy_loss = coupled_estimate, coupled_loss
        module, model, batch, rows, args = gradient_case(method)
        written = None if method == "coupled" else module
        want = gradient(model, full_graph_loss(written, model, batch, args, rows, rows.old, rows.ref))
        for size in (1, 3, 7, 1000):
            args.micro_batch_size = size
            got = inner_gradient(module, model, rows, args)
            assert relative(got, want) < 1e-10, (method, size, relative(got, want))
        if method == "d1":  # the clip is at work, and not everywhere
            ratio = (module.frozen_estimates(model, rows, args) - rows.old).exp()[rows.completion_mask]
            clipped = ((ratio - 1).abs() > args.epsilon).double().mean()
            assert 0.02 < clipped < 0.9, clipped
        # planted faults: masks off by one token, and (several draws) the slope of another draw
        wrong = replace(rows, masked=rows.masked.roll(1, -1))
        assert relative(inner_gradient(module, model, wrong, args), want) > 0.01
        if method == "coupled":
            true_draw, calls = module.draw_logps, [0]

            def swapped(model, rows, k):
                calls[0] += 1
                return true_draw(model, rows, (k + 1) % 3 if torch.is_grad_enabled() else k)

            module.draw_logps = swapped
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


# ---------------------------------------------------------------------------------------- SFT


@single_rank
def test_sft_loss_is_unbiased_and_ignores_the_prompt():
    """Mean over noise of the loss = mean over tokens of the expected cross-entropy under uniform p, by enumeration of masks."""
    model, args = tiny_model(), sft.Args(batch_size=1, eps=1e-3)
    rows = [([1, 2, 3], [4, 0, 2, 1, EOS])]  # 8 tokens: two blocks, one shared with the prompt
    batch = sft.make_batch(rows, 0, args, model, 0, torch.device("cpu"))
    answer = [3, 4, 5, 6, 7]
    ids = batch.input_ids
    want = 0.0
    # E over p ~ U(eps, 1) of sum_masks P(mask | p) sum -logp / p, with p integrated by Gauss-Legendre nodes
    nodes, node_weights = (
        torch.from_numpy(__import__("numpy").polynomial.legendre.leggauss(12)[0]),
        torch.from_numpy(__import__("numpy").polynomial.legendre.leggauss(12)[1]),
    )
    ps = args.eps + (1 - args.eps) * (nodes + 1) / 2
    for pattern in itertools.product([False, True], repeat=len(answer)):
        masked = torch.zeros_like(batch.answer_mask)
        masked[0, answer] = torch.tensor(pattern)
        if masked.any():
            with torch.no_grad():
                nll = -model.logps(ids, torch.where(masked, MASK, ids), masked).sum().item()
            k = sum(pattern)
            want += (
                sum((w / 2 * p ** (k - 1) * (1 - p) ** (len(answer) - k)).item() for p, w in zip(ps, node_weights, strict=True))
                * nll
            )
    want /= len(answer)
    losses = []
    for step in range(4000):
        noisy = replace(batch, step=step)
        masked, weights = sft.sample_masks(noisy, args)
        assert not masked[0, :3].any()
        with torch.no_grad():
            losses.append((masked, weights))
    cache, values = {}, []
    for masked, weights in losses:
        key = tuple(masked[0].tolist())
        if key not in cache:
            with torch.no_grad():
                cache[key] = model.logps(ids, torch.where(masked, MASK, ids), masked)
        values.append(sft.sft_loss(cache[key], weights, batch).item())
    values = torch.tensor(values)
    assert abs(values.mean() - want) < 5 * values.std() / len(values) ** 0.5, (values.mean(), want)


@single_rank
def test_sft_pads_to_whole_blocks_and_scores_the_padding():
    """SDAR's recipe: EOS closes the answer, scored pads fill its last block; pads beyond are invalid."""
    model, args = tiny_model(), sft.Args(batch_size=2)
    batch = sft.make_batch([([1, 2, 3], [4, EOS]), ([1], [2, 3, 4, 0, 1, 2, EOS])], 0, args, model, 0, torch.device("cpu"))
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, EOS, EOS, EOS, EOS], [1, 2, 3, 4, 0, 1, 2, EOS]]
    assert batch.answer_mask.sum(1).tolist() == [5, 7] and batch.valid_mask.all() and batch.num_tokens == 12
    longer = sft.make_batch([([1, 2, 3], [EOS]), ([1], [2] * 7)], 0, args, model, 0, torch.device("cpu"))
    assert longer.valid_mask.sum(1).tolist() == [4, 8] and longer.answer_mask.sum(1).tolist() == [1, 7]


@single_rank
def test_sft_noise_levels_are_stratified_over_the_step_and_keyed_by_sample():
    model, args = tiny_model(), sft.Args(batch_size=8)
    rows = [([1, 2, 3, 4], [4] * 400)] * 8
    batch = sft.make_batch(rows, 0, args, model, 3, torch.device("cpu"))
    masked, weights = sft.sample_masks(batch, args)
    p = 1 / weights.amax(1)
    gaps = p.sort().values.diff()
    torch.testing.assert_close(gaps, torch.full((7,), (1 - args.eps) / 8), atol=1e-5, rtol=0)
    torch.testing.assert_close(masked.sum(1) / 400, p, atol=0.12, rtol=0)
    second = sft.make_batch(rows[4:], 4, args, model, 3, torch.device("cpu"))  # the second of two ranks
    assert torch.equal(sft.sample_masks(second, args)[0], masked[4:])


def test_world_is_not_initialised():
    assert not dist.is_initialized()  # bodies ran in children
