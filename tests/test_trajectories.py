"""CJ-GRPO and MDPO: rows that replay a rollout, against traces, enumerated likelihoods and losses written without them."""

import itertools
import math
import zlib
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_families import run_script
from test_masked import model_of as masked_model_of
from test_methods import gradient, inner_gradient, relative, rows_of
from test_rollout import M, V
from test_rollout import model_of as block_model_of

from algos import cj_grpo, mdpo
from bench.train import coin
from evals import countdown
from evals.rewards import REWARDS
from models.tiny import TINY_LLADA2, random_model
from rollout import Trace, make_engine
from rollout.schedules import block_quotas
from runlog import RunLog

FAMILIES = ["sdar", "llada2", "llada", "dream"]
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13]]  # 3, 2 and 2 modulo the block of 4
MODULES, ALL_REDUCE = [cj_grpo, mdpo], cj_grpo.all_reduce
RAGGED = {"remasking": "low_confidence_dynamic", "confidence_threshold": 0.3, "denoising_steps": 4}
STATIC = {"remasking": "low_confidence_static", "denoising_steps": 2}
PAPERS = STATIC | {
    "schedule": "ascending",
    "eos_policy": "eoser",
    "block_length": 0,
}  # EOSER and ASS: blocks of 1 + 2 and 9


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    """The sums of a single rank are its own numbers: no process group."""
    for module in MODULES:
        monkeypatch.setattr(
            module,
            "all_reduce",
            lambda values, op=None: {name: float(v) for name, v in values.items()},
        )


def model_of(family, seed=0, scale=9):
    """A small random model in fp64 whose completions end inside a block, in later blocks, and not at all."""
    if family == "llada2":
        sizes = {
            "vocab_size": V,
            "hidden_size": 32,
            "intermediate_size": 48,
            "mask_token_id": M,
            "eos_token_id": 1,
        }
        model = random_model(
            TINY_LLADA2 | sizes | {"pad_token_id": 0}, seed=seed, dtype=torch.float64
        )
        with torch.no_grad():
            model.lm_head.weight.mul_(3)
            model.model.word_embeddings.weight.mul_(30)
        model.eos_token_ids, model.pad_token_id = [1, 2], 0
        return model
    build = block_model_of if family == "sdar" else masked_model_of
    return (
        build(scale=scale, seed=seed) if family == "sdar" else build(family, scale=scale, seed=seed)
    )


def batch_of(
    module, model, args, how=RAGGED, temperature=0.8, records=None, gen_length=12, prompts=PROMPTS
):
    """A rollout of three ragged prompts with live groups of both signs and a dead one, in one rank."""
    engine, G = make_engine(model), args.num_generations
    args.temperature = temperature
    how = {
        "block_length": 4 if model.attention == "bidirectional" else 0,
        "gen_length": gen_length,
    } | how
    trace = engine.generate(
        prompts, num_samples=G, seed=5, temperature=temperature, records=records, **how
    )
    batch = module.make_batch(trace, model, seed=11)
    rewards = torch.tensor(
        [[1.0, 0, 0, 3]] * (len(prompts) - 1) + [[0.1] * 4], dtype=torch.float64
    )[:, :G].flatten()
    batch.advantages = module.compute_advantages(rewards, args)
    return batch


def transitions_of(trace, i):
    """[(state ids of the whole forward, [(position in it, token)])] of completion i in the order of its decoding, from step_map
    alone: a bidirectional model sees the whole canvas, a block-causal one its prefix and the block.
    """
    prompt, ids = trace.prompt_ids[i], trace.completion_ids[i].tolist()
    steps, n, P = (
        trace.step_map[i].tolist(),
        trace.settings["block_length"],
        len(trace.prompt_ids[i]),
    )
    blocked = trace.settings["attention"] == "block-causal"
    L = int(trace.canvas_length[i])
    block = [(P + j if blocked else j) // n for j in range(L)]
    found = []
    for b, k in sorted({(block[j], steps[j]) for j in range(L) if steps[j] >= 0}):
        now = [j for j in range(L) if (block[j], steps[j]) == (b, k)]
        shown = [0 <= steps[j] and (block[j], steps[j]) < (b, k) for j in range(L)]
        state = prompt + [ids[j] if shown[j] else M for j in range(L)]
        end = (b + 1) * n if blocked else len(state)
        found.append((state[:end], [(P + j, ids[j]) for j in now]))
    return found


def naive_logps(model, state, targets, temperature):
    """log-probabilities of targets [(position, token)] in one plain forward of one state"""
    logits = model.logits(torch.tensor([state]))[0] / temperature
    logits = torch.where(torch.arange(logits.shape[1]) == M, -math.inf, logits).log_softmax(-1)
    return torch.stack([logits[at, token] for at, token in targets])


# ---------------------------------------------------------------------------------------- CJ-GRPO: what is replayed


REPLAYED = [(family, how) for family in FAMILIES for how in (RAGGED, STATIC)] + [
    ("llada", PAPERS),
    ("dream", PAPERS),
]
NAMES = {id(RAGGED): "ragged", id(STATIC): "static", id(PAPERS): "eoser and ass"}


@pytest.mark.parametrize(
    "family, how", REPLAYED, ids=[f"{family}-{NAMES[id(how)]}" for family, how in REPLAYED]
)
def test_replayed_logps_are_those_of_the_rollout(family, how):
    """Every revealed token is scored once, in the state of the cached sampler's forward: the sums over a sequence agree."""
    model, args = model_of(family), cj_grpo.Args(num_generations=4)
    batch = batch_of(cj_grpo, model, args, how)
    trace, rows = batch.trace, cj_grpo.sample_masks(batch, 0, args)
    with torch.no_grad():
        logps = cj_grpo.estimate_logps(cj_grpo.draw_logps(model, rows, 0)[:, None], rows, args)
        off_by_one = replace(rows, masked=rows.masked.roll(1, -1))
        wrong = cj_grpo.draw_logps(model, off_by_one, 0)
    scored = rows.weights[:, 0] != 0
    B, revealed = len(trace.step_map), trace.step_map >= 0
    index = [
        next(b for b in range(B) if torch.equal(ids, batch.input_ids[b])) for ids in rows.input_ids
    ]
    times, total, total_wrong = (torch.zeros(revealed.shape, dtype=torch.float64) for _ in range(3))
    for r, b in enumerate(index):
        times[b] += scored[r]
        total[b] += logps[r]
        total_wrong[b] += wrong[r]
    assert torch.equal(times, revealed.double())
    torch.testing.assert_close(total, trace.logps, atol=1e-9, rtol=0)
    torch.testing.assert_close(total.sum(1), trace.logps.sum(1), atol=1e-8, rtol=0)
    assert (total_wrong - trace.logps)[revealed].abs().max() > 0.1
    if how is PAPERS:
        assert [len(group) for group in block_quotas(**trace.settings)] == [
            2,
            1,
        ] and trace.num_replays == 3
        assert (trace.step_map[:, 3:].unique().tolist(), trace.settings["eos_policy"]) in (
            ([0], "eoser"),
            ([-1, 0], "eoser"),
        )
    beyond = revealed & ~trace.completion_mask  # the terminal block behind its EOS: scored too
    assert beyond.any() and scored.any(1).all()
    counts = torch.bincount(torch.tensor(index), minlength=B)
    assert (counts <= trace.num_replays).all()
    if how is RAGGED:
        assert len(counts.unique()) > 1  # sequences with different numbers of forwards
    if model.attention == "block-causal":  # a forward for a local step, not for a step of one block
        transitions = torch.tensor([len(transitions_of(trace, b)) for b in range(B)])
        assert (counts <= how["denoising_steps"]).all() and (counts < transitions).any()
    assert cj_grpo.sample_masks(batch, 1, args) is None


@pytest.mark.parametrize("family", ["sdar", "llada"])
def test_weights_are_those_of_a_loop_over_transitions(family):
    """1 / (transitions x tokens): each transition of a sequence has the same share, each sequence the weight 1."""
    model, args = model_of(family), cj_grpo.Args(num_generations=4)
    batch = batch_of(cj_grpo, model, args)
    rows, sizes = cj_grpo.sample_masks(batch, 0, args), set()
    for b in range(12):
        mine = (rows.input_ids == batch.input_ids[b]).all(1)
        got, P = rows.weights[mine, 0].sum(0), len(batch.trace.prompt_ids[b])
        want, found = torch.zeros_like(got), transitions_of(batch.trace, b)
        for _, targets in found:
            sizes.add(len(targets))
            for at, _ in targets:
                want[at - P] = 1 / (len(found) * len(targets))
        torch.testing.assert_close(got, want)
        assert got.sum().item() == pytest.approx(1)
    assert len(sizes) > 1  # transitions of different sizes


def settings_of(attention, gen_length, denoising_steps):
    """Settings of a trace that no engine made."""
    decoding = {
        "schedule": "uniform",
        "editing_threshold": None,
        "max_post_steps": 0,
        "eos_token_ids": [1, 2],
    }
    shape = {
        "attention": attention,
        "gen_length": gen_length,
        "block_length": 4,
        "denoising_steps": denoising_steps,
    }
    return decoding | shape


def toy_batch(step_map, block_ids, num_steps, attention="block-causal"):
    """A batch of one sequence with this step map and no model behind it."""
    step_map, block_ids = torch.tensor([step_map]), torch.tensor([block_ids])
    replay = step_map if attention == "block-causal" else block_ids * num_steps + step_map
    L = step_map.shape[1]
    settings = settings_of(attention, step_map.shape[1], num_steps)
    ids, on = torch.arange(L)[None], torch.ones(1, L, dtype=torch.bool)
    zero, one = torch.zeros(1), torch.ones(1)
    trace = Trace(
        [[]], ids, on, torch.tensor([L]), step_map, replay, torch.zeros(1, L), zero, one, settings
    )
    blocks = block_ids if attention == "block-causal" else torch.zeros_like(block_ids)
    return cj_grpo.Batch(
        input_ids=ids, valid_mask=on, completion_mask=on, block_ids=blocks, sample_index=torch.zeros(1), trace=trace,
        mask_token_id=M, seed=0, num_tokens=float(L), num_sequences=1.0, advantages=torch.ones(1),
    )  # fmt: skip


def test_weights_by_the_specs_numbers():
    """Steps of 1, 2 and 4 tokens: 1/3, 1/6, 1/12. Blocks of steps (2, 2) and (1, 3): .125 .125 .25 .083333, half in step 0."""
    rows = cj_grpo.sample_masks(toy_batch([0, 1, 1, 2, 2, 2, 2], [0] * 7, 3), 0, cj_grpo.Args())
    assert rows.weights.sum((0, 1)).tolist() == pytest.approx([1 / 3, 1 / 6, 1 / 6] + [1 / 12] * 4)
    assert rows.masked[:, 0].sum(1).tolist() == [7, 6, 4]
    step_map, blocks = [0, 0, 1, 1, 0, 1, 1, 1], [0] * 4 + [1] * 4
    rows = cj_grpo.sample_masks(toy_batch(step_map, blocks, 2), 0, cj_grpo.Args())
    assert rows.weights[0, 0].tolist() == pytest.approx([0.125, 0.125, 0, 0, 0.25, 0, 0, 0])
    assert rows.weights[1, 0].tolist() == pytest.approx(
        [0, 0, 0.125, 0.125, 0, 1 / 12, 1 / 12, 1 / 12]
    )
    assert rows.weights[0].sum().item() == pytest.approx(0.5)
    rows = cj_grpo.sample_masks(
        toy_batch(step_map, blocks, 2, "bidirectional"), 0, cj_grpo.Args()
    )  # a forward each
    assert rows.weights.sum(2).flatten().tolist() == pytest.approx([0.25] * 4)
    assert rows.masked[:, 0].sum(1).tolist() == [8, 6, 4, 3]
    # a block that is done early (prompt tokens at its start, or confident ones) and tokens that were never revealed
    rows = cj_grpo.sample_masks(toy_batch([0, 0, 0, 0, 0, 1, 3, -1], blocks, 4), 0, cj_grpo.Args())
    assert rows.weights.sum(2).flatten().tolist() == pytest.approx(
        [0.5, 0.25, 0.25]
    )  # no row for step 2
    assert rows.masked[:, 0, 7].all() and not rows.weights[..., 7].any()


@pytest.mark.parametrize("family", ["sdar", "llada"])
def test_replayed_likelihoods_of_all_completions_sum_to_one(family):
    """L = 4 and V = 5 usable tokens, any order of reveals that does not depend on the draws: 625 completions, total 1."""
    build, names = (
        (block_model_of, {}) if family == "sdar" else (masked_model_of, {"embedding_size": 6})
    )
    if family == "sdar":
        from test_rollout import SMALL

        model = build(
            SMALL | {"vocab_size": 6, "mask_token_id": 5, "eos_token_id": 4}, scale=6, eos=[4]
        )
    else:
        model = build("llada", scale=6, eos=[4], vocab_size=6, mask_token_id=5, **names)
    prompt, completions = [1, 2, 0, 3], torch.tensor(list(itertools.product(range(5), repeat=4)))
    args, n = cj_grpo.Args(temperature=0.7), len(completions)
    for order in ([0, 0, 1, 1], [2, 0, 1, 0]):
        step_map = torch.tensor([order]).expand(n, 4)
        every = torch.ones_like(completions, dtype=torch.bool)
        settings = settings_of(model.attention, 4, 4)
        canvas, number = torch.full((n,), 4), torch.arange(n)
        trace = Trace(
            [prompt] * n,
            completions,
            every,
            canvas,
            step_map,
            step_map,
            torch.zeros(n, 4),
            number,
            canvas,
            settings,
        )
        batch = cj_grpo.make_batch(trace, model, seed=0)
        batch.advantages = number.double()
        rows = cj_grpo.sample_masks(batch, 0, args)
        with torch.no_grad():
            logps = cj_grpo.draw_logps(model, rows, 0).sum(1)
            wrong = cj_grpo.draw_logps(model, replace(rows, masked=rows.masked.roll(1, -1)), 0).sum(
                1
            )
        log_likelihood = torch.zeros(n, dtype=torch.float64).index_add_(
            0, rows.advantages.long(), logps
        )
        assert log_likelihood.exp().sum().item() == pytest.approx(1, abs=1e-10)
        wrong = torch.zeros(n, dtype=torch.float64).index_add_(0, rows.advantages.long(), wrong)
        assert abs(wrong.exp().sum().item() - 1) > 0.01


# ---------------------------------------------------------------------------------------- CJ-GRPO: its loss


def cj_loss(model, old_model, ref_model, batch, args):
    """Eq. 10 and 11 with loops over sequences, transitions and tokens, and every graph kept; reads the trace alone."""
    trace, total, clipped, tokens = batch.trace, 0.0, 0, 0
    for i, A in enumerate(batch.advantages.tolist()):
        transitions = transitions_of(trace, i)
        for state, targets in transitions:
            lp = naive_logps(model, state, targets, args.temperature)
            with torch.no_grad():
                old = (
                    naive_logps(old_model, state, targets, args.temperature)
                    if old_model
                    else lp.detach()
                )
                ref = (
                    naive_logps(ref_model, state, targets, args.temperature) if ref_model else None
                )
            for j in range(len(targets)):
                ratio = (lp[j] - old[j]).exp()
                limit = min(max(ratio.item(), 1 - args.epsilon), 1 + args.epsilon)
                inside = ratio.item() * A <= limit * A
                clipped, tokens = clipped + (not inside), tokens + 1
                term = -ratio * A if inside else -ratio.detach() * 0 - limit * A
                if ref is not None:
                    term = term + args.beta * ((ref[j] - lp[j]).exp() - (ref[j] - lp[j]) - 1)
                total = total + term / (len(targets) * len(transitions) * len(trace.prompt_ids))
    return total, clipped / tokens


def exact(weights):
    """fp32 weights that are 1 / n -> the same in fp64"""
    return torch.where(weights > 0, 1 / (1 / weights.double()).round(), 0.0)


def shifted(family, size, seed=3):
    model, generator = model_of(family), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(size * torch.randn(p.shape, generator=generator, dtype=p.dtype) * p.abs().mean())
    return model


@pytest.mark.parametrize("family", ["sdar", "llada"])
def test_cj_gradient_equals_a_full_graph_loss(family):
    """A later update with clip and KL at work, ragged steps: relative error <= 1e-10 in micro-batches of 3, 7 and all. Each
    block alone and all blocks of a local step in one pass give the same. Planted faults are found.
    """
    model, old, ref = model_of(family), shifted(family, 0.1), shifted(family, 0.3, seed=4)
    args = cj_grpo.Args(num_generations=4, beta=0.3, epsilon=0.1)
    batch = batch_of(cj_grpo, model, args)
    loss, clipped = cj_loss(model, old, ref, batch, args)
    want = gradient(model, loss)
    assert 0.02 < clipped < 0.9
    rows = cj_grpo.sample_masks(batch, 0, args)
    rows.weights = exact(rows.weights)
    rows.old, rows.ref = (cj_grpo.frozen_estimates(other, rows, args) for other in (old, ref))
    for size in (3, 7, 1000):
        args.micro_batch_size = size
        assert relative(inner_gradient(cj_grpo, model, rows, args), want) < 1e-10
    args.micro_batch_size = 50
    step_mean = replace(
        rows, weights=(rows.weights != 0) / (rows.weights != 0).sum()
    )  # tokens alike, not transitions
    unscaled = replace(rows, temperature=1.0)
    leaking = replace(
        rows, masked=rows.masked & (rows.weights == 0).new_tensor([True]) & rows.masked.roll(1, 0)
    )
    for wrong in (step_mean, unscaled, leaking):
        assert relative(inner_gradient(cj_grpo, model, wrong, args), want) > 0.01


def test_cj_first_update_is_the_policy_gradient_of_the_transitions():
    """One update a rollout: ratio 1, gradient -A / K sum over transitions of the mean gradient; none of dead groups."""
    model, args = model_of("sdar"), cj_grpo.Args(num_generations=4, beta=0.0)
    batch = batch_of(cj_grpo, model, args)
    assert not batch.advantages[
        -4:
    ].any()  # equal rewards of 0.1: exactly 0, though their mean rounds
    want = gradient(model, cj_loss(model, None, None, batch, args)[0])
    rows = cj_grpo.sample_masks(batch, 0, args)
    args.micro_batch_size = 50
    rows.weights = exact(rows.weights)
    live = rows.select(rows.advantages != 0)
    assert 0 < len(live.advantages) < len(rows.advantages)
    assert relative(inner_gradient(cj_grpo, model, live, args), want) < 1e-10
    assert not inner_gradient(cj_grpo, model, rows.select(rows.advantages == 0), args).any()


@pytest.mark.parametrize("family", ["sdar", "llada"])
def test_ranks_with_different_numbers_of_steps_forward_equally_often(
    run_ranks, monkeypatch, family
):
    """Two ranks whose sequences took different numbers of steps: equally many micro-batches, and their gradients add up to
    that of one rank with all sequences.
    """
    prompts = [[3, 4, 5], [12, 13], [6, 7, 8, 9, 10, 11], [14, 15, 16]]
    model, args = model_of(family), cj_grpo.Args(num_generations=4, micro_batch_size=6, beta=0.0)
    whole = cj_grpo.sample_masks(batch_of(cj_grpo, model, args, prompts=prompts), 0, args)
    want = inner_gradient(cj_grpo, model, whole, args)
    monkeypatch.setattr(cj_grpo, "all_reduce", ALL_REDUCE)

    def body(rank, world_size):
        trace = make_engine(model).generate(
            prompts[2 * rank : 2 * rank + 2], num_samples=4, seed=5, sample_offset=8 * rank, gen_length=12, block_length=4,
            temperature=0.8, **RAGGED,
        )  # fmt: skip
        batch = cj_grpo.make_batch(trace, model, seed=11)
        groups = [[1.0, 0, 0, 3], [1.0, 0, 0, 3]] if rank == 0 else [[1.0, 0, 0, 3], [0.1] * 4]
        batch.advantages = cj_grpo.compute_advantages(
            torch.tensor(groups, dtype=torch.float64).flatten(), args
        )
        rows, total, forwards = cj_grpo.sample_masks(batch, 0, args), 0, 0
        own = torch.zeros(2)
        own[rank] = len(rows.split(args.micro_batch_size))
        dist.all_reduce(own)
        assert own[0] != own[1]  # else there is nothing to even out
        model.zero_grad()
        model.set_requires_gradient_sync = lambda sync: None
        for micro, is_real in cj_grpo.micro_batches(rows, args):
            cj_grpo.backward(model, micro, float(is_real), True, args)
            forwards += 1
        assert forwards == own.max()
        total = gradient(model)
        dist.all_reduce(total)
        assert relative(total, want) < 1e-10

    run_ranks(2, body)


def test_cj_advantages():
    """Algorithm 1 divides by the std, the released code does not; without spread exactly 0 in both."""
    rewards = torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0])
    got = cj_grpo.compute_advantages(rewards, cj_grpo.Args(num_generations=8))
    torch.testing.assert_close(
        got, torch.tensor([1.620182] * 2 + [-0.540060] * 6), atol=1e-5, rtol=0
    )
    released = cj_grpo.Args(num_generations=8, scale_rewards=False)
    torch.testing.assert_close(
        cj_grpo.compute_advantages(rewards, released), torch.tensor([0.75] * 2 + [-0.25] * 6)
    )
    for args in (cj_grpo.Args(), released):
        assert not cj_grpo.compute_advantages(
            torch.full((args.num_generations * 3,), 0.1), args
        ).any()


def test_cj_loss_by_hand():
    """Two transitions of one and two tokens, A = 2, ratios 1.5, 0.5 and 3 with eps 0.2, KL k3 of ref - logps = 0.2."""
    old = torch.tensor([[-1.0, 0, 0], [0, -2, -3]], dtype=torch.float64)
    lp = old + torch.tensor([[1.5, 1, 1], [1, 0.5, 3]], dtype=torch.float64).log()
    rows = rows_of([[0.5, 0, 0], [0, 0.25, 0.25]], [2.0, 2.0], num_sequences=1.0)
    args = cj_grpo.Args(epsilon=0.2, beta=0.5)
    loss, metrics = cj_grpo.policy_loss(lp, old, lp + 0.2, rows, args)
    policy, kl = -2 * (0.5 * 1.2 + 0.25 * 0.5 + 0.25 * 1.2), math.exp(0.2) - 1.2
    assert metrics["loss/policy"].item() == pytest.approx(policy) and metrics[
        "loss/kl"
    ].item() == pytest.approx(kl)
    assert loss.item() == pytest.approx(policy + 0.5 * kl)
    assert metrics["policy/weight"].item() == 1 and metrics[
        "policy/clip_frac"
    ].item() == pytest.approx(0.75)


# ---------------------------------------------------------------------------------------- MDPO


def recorded(model, G, temperature, revise=False, gen_length=12, prompts=PROMPTS, seed=0):
    """A rollout in blocks of 4 with up to three steps each, made by a loop that knows model.logits alone, with all its states:
    blocks take different numbers of steps, a row ends at the block of its EOS, and with `revise` a token is masked again.
    """
    generator, rows = torch.Generator().manual_seed(seed), []
    uniform = lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64)
    L, steps = gen_length, 3
    for prompt in [prompt for prompt in prompts for _ in range(G)]:
        ids, hidden = torch.full((L,), M), torch.ones(L, dtype=torch.bool)
        masked, predictions, confidences = torch.zeros(3, L // 4 * steps, L).unbind()
        masked, predictions = masked.bool(), predictions.int()
        for start in range(0, L, 4):
            for k in range(steps):
                if not hidden[start : start + 4].any():
                    continue
                with torch.no_grad():
                    logits = (
                        model.logits(torch.tensor([prompt + ids.tolist()]))[0, -L:] / temperature
                    )
                logits[:, M] = -math.inf
                p = logits.softmax(-1)
                drawn = torch.multinomial(p, 1, generator=generator)[:, 0]
                s = start // 4 * steps + k
                masked[s], predictions[s] = hidden, torch.where(hidden, drawn, ids).int()
                confidences[s] = torch.where(hidden, p.gather(1, drawn[:, None])[:, 0], 0.0).float()
                now = (
                    hidden
                    & (uniform(L) < (0.5 if k < steps - 1 else 2))
                    & (torch.arange(L) // 4 == start // 4)
                )
                ids, hidden = torch.where(now, drawn, ids), hidden & ~now
                if revise and k < steps - 1:
                    hidden[start] = True
                    ids[start] = M
            if torch.isin(ids[start : start + 4], torch.tensor([1, 2])).any():
                break
        rows.append((torch.where(hidden, 0, ids), ~hidden, masked, predictions, confidences))
    ids, shown, masked, predictions, confidences = (
        torch.stack(values) for values in zip(*rows, strict=True)
    )
    is_eos = (torch.isin(ids, torch.tensor([1, 2])) & shown).long()
    N, settings = len(ids), settings_of("bidirectional", L, steps)
    zero, number = torch.zeros(N, L), torch.arange(N)
    records = {"masked": masked, "predictions": predictions, "confidences": confidences}
    owners, scored, canvas = (
        [p for p in prompts for _ in range(G)],
        shown & (is_eos.cumsum(1) - is_eos == 0),
        torch.full((N,), L),
    )
    return Trace(
        owners,
        ids,
        scored,
        canvas,
        shown.long(),
        shown.long(),
        zero,
        number,
        number,
        settings,
        records,
    )


def mdpo_batch(model, args, revise=False, prompts=PROMPTS):
    """A recorded rollout with made-up rewards of its steps; the last group is dead at every step. Confidences are rounded up to
    multiples of 1/256, so that fp64 can have them exactly.
    """
    args.temperature = 0.8
    trace = recorded(model, args.num_generations, args.temperature, revise, prompts=prompts)
    trace.records["confidences"] = (trace.records["confidences"] * 256).ceil() / 256
    batch = mdpo.make_batch(trace, model, seed=11)
    generator = torch.Generator().manual_seed(2)
    rewards = torch.randint(0, 2, trace.records["masked"].shape[:2], generator=generator).double()
    rewards[-args.num_generations :] = 0.1
    batch.advantages = mdpo.compute_advantages(rewards, args)
    return batch


FIGURE = torch.tensor(
    [[0.0, 0, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]], dtype=torch.float64
)  # the authors' figure
ADVANTAGES = [
    [-0.387, -0.548, 0.866, 1.162],
    [0.387, 0.548, -0.866, -1.162],
    [-1.162, -1.095, -0.866, -0.387],
    [1.162, 1.095, 0.866, 0.387],
]


def test_mdpo_advantages_of_the_figure():
    """r_t - r_{t+1} + mean of r_0 .. r_{t-1}, t counted down; normalised over the group at each step."""
    got = mdpo.compute_advantages(FIGURE, mdpo.Args(num_generations=4))
    torch.testing.assert_close(
        got, torch.tensor(ADVANTAGES, dtype=torch.float64), atol=6e-4, rtol=0
    )
    assert got.abs().sum(0).tolist() == pytest.approx([3.098, 3.286, 3.464, 3.098], abs=1e-3)


def test_mdpo_advantages_against_a_loop_that_counts_down():
    """Six steps, two groups of three; (0, 1, 1, 0) has the sums 0.66667, 1.5, 0, -1."""
    rewards = torch.rand(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rewards[0, 2:], rewards[0, :2] = torch.tensor([0.0, 1, 1, 0], dtype=torch.float64), 0

    def sums(row):
        r = {len(row) - 1 - s: value for s, value in enumerate(row)} | {len(row): 0.0}  # by t
        later = {t: sum(r[j] for j in range(t)) / t if t else r[0] for t in range(len(row))}
        return [r[t] - r[t + 1] + later[t] for t in reversed(range(len(row)))]

    assert sums([0.0, 1, 1, 0]) == pytest.approx([2 / 3, 1.5, 0, -1])
    assert sums([0.0, 0, 0, 1]) == pytest.approx([1 / 3, 0.5, 1, 2])
    a = torch.tensor([sums(row) for row in rewards.tolist()], dtype=torch.float64).view(2, 3, 6)
    want = ((a - a.mean(1, keepdim=True)) / (a.std(1, keepdim=True) + 1e-4)).view(6, 6)
    torch.testing.assert_close(mdpo.compute_advantages(rewards, mdpo.Args(num_generations=3)), want)
    for value in (
        0.1,
        1 / 3,
        1.0,
    ):  # a group without spread: exactly 0, in fp32 too, whose means round
        assert not mdpo.compute_advantages(torch.full((8, 128), value), mdpo.Args()).any()


@pytest.mark.parametrize("steps_of", ["group", "sequence"])
def test_mdpo_chooses_the_steps_with_the_largest_advantages(steps_of):
    """Of the figure: K = 1 takes step 2 of all rows, K = 2 steps 1 and 2; by sequence each its own. None without a forward."""
    model, K = model_of("llada"), {"group": {1: [[2]] * 4, 2: [[1, 2]] * 4}}
    K["sequence"] = {1: [[3], [3], [0], [0]], 2: [[2, 3], [2, 3], [0, 1], [0, 1]]}
    trace = recorded(model, 4, 1.0, prompts=PROMPTS[:1])
    batch = mdpo.make_batch(trace, model, seed=0)
    batch.advantages = mdpo.compute_advantages(FIGURE, mdpo.Args(num_generations=4))
    for name in ("predictions", "confidences"):
        trace.records[name] = trace.records[name][:, :4]
    trace.records["masked"] = torch.ones(4, 4, 12, dtype=torch.bool)
    number = 10.0 * torch.arange(4)[:, None] + torch.arange(
        1, 5
    )  # says which sequence and step a row is
    trace.records["confidences"] = number[..., None].expand(4, 4, 12)

    def chosen(train_steps):
        rows = mdpo.sample_masks(
            batch, 0, mdpo.Args(num_generations=4, train_steps=train_steps, steps_of=steps_of)
        )
        found = [[] for _ in range(4)]
        for code, A in zip(
            (rows.weights[:, 0, 0] * 12).round().int().tolist(),
            rows.advantages.tolist(),
            strict=True,
        ):
            b, s = code // 10, code % 10 - 1
            assert A == batch.advantages[b, s]
            found[b].append(s)
        return found

    for k, want in K[steps_of].items():
        assert chosen(k) == want
    assert chosen(100) == [[0, 1, 2, 3]] * 4  # all there are
    trace.records["masked"][:, 2] = False  # no row made it
    assert chosen(1) == {"group": [[1]] * 4, "sequence": K["sequence"][1]}[steps_of]
    assert chosen(100) == [[0, 1, 3]] * 4
    trace.records["masked"][1:, 2] = (
        True  # one row did not: its advantage there counts for nobody, and it has no such row
    )
    assert chosen(1) == {"group": [[1]] * 4, "sequence": K["sequence"][1]}[steps_of]
    assert chosen(4) == [[0, 1, 3]] + [[0, 1, 2, 3]] * 3
    trace.records["masked"][:], batch.advantages = True, torch.zeros(4, 4, dtype=torch.float64)
    trace.records["masked"][:, 1] = (
        False  # nobody made it: it takes the place of no step that was made, whose KL counts
    )
    assert chosen(3) == [[0, 2, 3]] * 4
    assert mdpo.sample_masks(batch, 1, mdpo.Args()) is None


def test_step_rewards_grade_each_prediction_up_to_its_own_end():
    """The reward sees the text up to the prediction's own EOS; a step without a forward has the reward of the one before it;
    neither the completion nor a repeated prediction is graded again.
    """
    words, asked = {1: "", 2: "", 3: "a", 4: "b", 5: "c"}, []
    tokenizer = SimpleNamespace(
        decode=lambda ids, skip_special_tokens: "".join(words[i] for i in ids)
    )

    def reward(texts, examples):
        asked.append(list(zip(texts, examples, strict=True)))
        return [{"length": float(len(text)), "bonus": 0.5} for text in texts]

    predictions = torch.tensor(
        [
            [[3, 1, 4, 4], [3, 4, 5, 5], [0, 0, 0, 0], [3, 4, 2, 5]],
            [[5, 5, 5, 5], [5, 1, 5, 5], [0] * 4, [0] * 4],
        ]
    )
    masked = torch.tensor([[True, True, False, True], [True, True, False, False]])[
        ..., None
    ].expand(2, 4, 4)
    scored = torch.tensor([[True, True, True, False], [True, True, False, False]])
    ids, settings = torch.tensor([[3, 4, 2, 0], [5, 1, 0, 0]]), settings_of("bidirectional", 4, 4)
    records = {
        "masked": masked,
        "predictions": predictions.int(),
        "confidences": torch.ones(2, 4, 4),
    }
    trace = Trace(
        [[3], [3]],
        ids,
        scored,
        None,
        scored.long(),
        scored.long(),
        None,
        torch.arange(2),
        None,
        settings,
        records,
    )
    got = mdpo.step_rewards(trace, torch.tensor([7.0, 8.0]), reward, tokenizer, ["x", "y"])
    assert got.tolist() == [[1.5, 4.5, 4.5, 7.0], [4.5, 8.0, 8.0, 8.0]]
    assert asked == [[("a", "x"), ("abcc", "x"), ("cccc", "y")]]  # one batch


def test_mdpo_loss_by_hand():
    """L = 512 with 64 masked: factor 8; gradient of token i in the first update -A 8 q_i / 64, of all others exactly 0."""
    q = torch.zeros(1, 512, dtype=torch.float64)
    q[0, 100:164] = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    masked = torch.zeros(1, 1, 600, dtype=torch.bool)
    masked[0, 0, 188:252] = True
    rows = rows_of((q / 64).tolist(), [1.7], masked=masked, num_sequences=2.0)
    lp = torch.full((1, 512), -1.0, dtype=torch.float64).requires_grad_()
    loss, metrics = mdpo.policy_loss(lp, lp.detach(), None, rows, mdpo.Args(beta=0.0))
    (slope,) = torch.autograd.grad(loss, lp)
    torch.testing.assert_close(slope, -1.7 * 8 * q / 64 / 2)
    assert (slope != 0).sum() == 64
    loss, metrics = mdpo.policy_loss(
        lp, lp.detach(), lp.detach() - 0.3, rows, mdpo.Args(beta=0.5)
    )  # k2, without the factor
    assert metrics["loss/kl"].item() == pytest.approx(0.09 / 2 * q.sum().item() / 64 / 2)
    assert loss.item() == pytest.approx(
        metrics["loss/policy"].item() + 0.5 * metrics["loss/kl"].item()
    )


def exact_weights(rows):
    """q / M in fp64 from fp32, where q is a multiple of 1/256"""
    counts = rows.masked.sum(2).double()[..., None]
    return (rows.weights * counts * 256).round() / 256 / counts


def mdpo_loss(model, old_model, ref_model, batch, args):
    """The objective with loops over groups, steps, sequences and tokens, and every graph kept; reads the trace's records."""
    record, A, G, total = batch.trace.records, batch.advantages, args.num_generations, 0.0
    B, S = A.shape
    for first in range(0, B, G):
        made = [
            [bool(record["masked"][b, s].any()) for s in range(S)] for b in range(first, first + G)
        ]
        weight = lambda s: sum(abs(A[first + g, s].item()) for g in range(G) if made[g][s])  # noqa: B023
        steps = sorted(
            (s for s in range(S) if any(row[s] for row in made)), key=weight, reverse=True
        )[: args.train_steps]
        for b, s in [(first + g, s) for g in range(G) for s in steps if made[g][s]]:
            hidden = record["masked"][b, s].nonzero().flatten().tolist()
            prompt, prediction = batch.trace.prompt_ids[b], record["predictions"][b, s].tolist()
            state = prompt + [M if j in hidden else token for j, token in enumerate(prediction)]
            targets = [(len(prompt) + j, prediction[j]) for j in hidden]
            lp = naive_logps(model, state, targets, args.temperature)
            with torch.no_grad():
                old = (
                    naive_logps(old_model, state, targets, args.temperature)
                    if old_model
                    else lp.detach()
                )
                ref = (
                    naive_logps(ref_model, state, targets, args.temperature)
                    if ref_model
                    else lp.detach()
                )
            for i, j in enumerate(hidden):
                ratio, a = (lp[i] - old[i]).exp(), A[b, s].item()
                limit = min(max(ratio.item(), 1 - args.epsilon), 1 + args.epsilon)
                surrogate = (
                    ratio * a if ratio.item() * a <= limit * a else ratio.detach() * 0 + limit * a
                )
                q = record["confidences"][b, s, j].item()
                token = (
                    -surrogate * len(prediction) / len(hidden)
                    + args.beta * (ref[i] - lp[i]) ** 2 / 2
                )
                total = total + q * token / len(hidden) / B
    return total


@pytest.mark.parametrize("family, revise", [("llada", False), ("dream", True)])
def test_mdpo_gradient_equals_a_full_graph_loss(family, revise):
    """fp64, clip and KL at work, ragged steps, tokens that are masked again; relative error <= 1e-10."""
    model, old, ref = model_of(family), shifted(family, 0.1), shifted(family, 0.3, seed=4)
    args = mdpo.Args(num_generations=4, beta=0.3, epsilon=0.1, train_steps=3)
    batch = mdpo_batch(model, args, revise)
    made = batch.trace.records["masked"].any(2)
    assert len(made.sum(1).unique()) > 1 and not made.all(1).all()
    want = gradient(model, mdpo_loss(model, old, ref, batch, args))
    rows = mdpo.sample_masks(batch, 0, args)
    counts = rows.masked.sum(2).double()[..., None]
    rows.weights = exact_weights(rows)
    rows.old, rows.ref = (mdpo.frozen_estimates(other, rows, args) for other in (old, ref))
    for size in (3, 1000):
        args.micro_batch_size = size
        assert relative(inner_gradient(mdpo, model, rows, args), want) < 1e-10
    final = batch.input_ids[:1].expand_as(rows.input_ids).clone()
    final[:, :-12] = rows.input_ids[:, :-12]
    faults = {
        "targets of another sequence": replace(rows, input_ids=final),
        "no confidence": replace(rows, weights=(rows.weights > 0) / counts),
        "temperature 1": replace(rows, temperature=1.0),
        "advantage of another step": replace(rows, advantages=rows.advantages.roll(1)),
    }
    for name, wrong in faults.items():
        assert relative(inner_gradient(mdpo, model, wrong, args), want) > 0.01, name


def test_mdpo_first_update_and_dead_groups():
    model, args = (
        model_of("llada"),
        mdpo.Args(num_generations=4, beta=0.0, train_steps=3, micro_batch_size=50),
    )
    batch = mdpo_batch(model, args)
    assert not batch.advantages[-4:].any()
    rows = mdpo.sample_masks(batch, 0, args)
    want = gradient(model, mdpo_loss(model, None, None, batch, args))
    rows.weights = exact_weights(rows)
    assert (
        relative(inner_gradient(mdpo, model, rows.select(rows.advantages != 0), args), want) < 1e-10
    )
    assert not inner_gradient(mdpo, model, rows.select(rows.advantages == 0), args).any()


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_mdpo_scores_the_distribution_that_predicted(family):
    """exp of the estimate is the recorded confidence of every masked token, at states with revised tokens too; over the
    vocabulary these probabilities sum to 1.
    """
    model, args = model_of(family), mdpo.Args(num_generations=4, train_steps=100, temperature=0.8)
    batch = mdpo.make_batch(recorded(model, 4, 0.8, revise=True), model, seed=11)
    batch.advantages = torch.ones(batch.trace.records["masked"].shape[:2])
    rows = mdpo.sample_masks(batch, 0, args)
    state, L = rows.masked[:, 0, -12:], 12
    with torch.no_grad():
        p = mdpo.draw_logps(model, rows, 0).exp()
        q = rows.weights[:, 0] * state.sum(1, keepdim=True)
        torch.testing.assert_close(p[state], q[state].double(), atol=1e-6, rtol=1e-5)
        total = torch.zeros_like(p)
        for token in range(V):
            if token != M:
                ids = rows.input_ids.clone()
                ids[:, -L:] = torch.where(state, token, ids[:, -L:])
                total += mdpo.draw_logps(model, replace(rows, input_ids=ids), 0).exp()
    torch.testing.assert_close(total[state], torch.ones_like(total[state]), atol=1e-10, rtol=0)
    assert (total[~state] - (V - 1)).abs().max() < 1e-12  # not scored: exp(0) for each


def test_mdpo_ranks_with_different_numbers_of_steps_forward_equally_often(run_ranks, monkeypatch):
    """As for CJ-GRPO: the gradients of two ranks add up to that of one, though one has more rows."""
    prompts = [[3, 4, 5], [12, 13], [6, 7, 8, 9, 10, 11], [14, 15, 16]]
    model, args = (
        model_of("llada"),
        mdpo.Args(num_generations=4, train_steps=100, micro_batch_size=5, beta=0.0),
    )
    whole = mdpo_batch(model, args, prompts=prompts)
    want = inner_gradient(mdpo, model, mdpo.sample_masks(whole, 0, args), args)
    monkeypatch.setattr(mdpo, "all_reduce", ALL_REDUCE)

    def body(rank, world_size):
        mine, trace = slice(8 * rank, 8 * rank + 8), whole.trace
        values = {
            f.name: getattr(trace, f.name)
            for f in fields(Trace)
            if f.name not in ("settings", "records")
        }
        records = {name: value[mine] for name, value in trace.records.items()}
        half = Trace(
            **{name: value[mine] for name, value in values.items()},
            settings=trace.settings,
            records=records,
        )
        batch = mdpo.make_batch(half, model, seed=11)
        batch.advantages = whole.advantages[mine]
        rows, own = mdpo.sample_masks(batch, 0, args), torch.zeros(2)
        own[rank] = len(rows.split(args.micro_batch_size))
        dist.all_reduce(own)
        assert own[0] != own[1]
        model.zero_grad()
        model.set_requires_gradient_sync = lambda sync: None
        micros = mdpo.micro_batches(rows, args)
        assert len(micros) == own.max()
        for micro, is_real in micros:
            mdpo.backward(model, micro, float(is_real), True, args)
        total = gradient(model)
        dist.all_reduce(total)
        assert relative(total, want) < 1e-10

    run_ranks(2, body)


# ---------------------------------------------------------------------------------------- MDPO on the sampler's own records


@pytest.mark.parametrize(
    "how", [RAGGED, STATIC, STATIC | {"remasking": "rcr"}], ids=["ragged", "static", "rcr"]
)
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_mdpo_replays_what_the_sampler_predicted(family, how):
    """States, predictions and confidences of the engine: exp of the estimates of every masked token, those behind the block in
    work too. Where a block is done, its row's last prediction is the completion, and so is the last reward.
    """
    model, args = model_of(family), mdpo.Args(num_generations=4, train_steps=100)
    batch = batch_of(cj_grpo, model, cj_grpo.Args(num_generations=4), how, records="states")
    trace, args.temperature = batch.trace, 0.8
    record, made = trace.records, trace.records["masked"].any(2)
    assert made.shape == (12, trace.num_replays) and made[:, 0].all()
    batch.advantages = torch.ones(made.shape)
    rows = mdpo.sample_masks(batch, 0, args)
    assert len(rows.input_ids) == made.sum() and record["masked"][:, 0].all()
    state = rows.masked[:, 0, -12:]
    with torch.no_grad():
        p = mdpo.draw_logps(model, rows, 0).exp()
        wrong = mdpo.draw_logps(model, replace(rows, masked=rows.masked.roll(1, 0)), 0).exp()
    q = rows.weights[:, 0].double() * state.sum(1, keepdim=True)
    torch.testing.assert_close(p[state], q[state], atol=1e-6, rtol=1e-5)
    assert (wrong[state] - q[state]).abs().max() > 0.1
    letters = SimpleNamespace(
        decode=lambda ids, skip_special_tokens: "".join(chr(65 + token) for token in ids)
    )
    reward = lambda texts, examples: [
        {"x": float(zlib.crc32(text.encode()) % 97)} for text in texts
    ]
    texts = [letters.decode(trace.completion(i), True) for i in range(12)]
    final = torch.tensor([parts["x"] for parts in reward(texts, [None] * 12)])
    graded = mdpo.step_rewards(trace, final, reward, letters, [None] * 12)
    assert torch.equal(graded[:, -1], final) and (graded[:, 0] != final).any()
    fresh = mdpo.step_rewards(
        trace, final + 1000, reward, letters, [None] * 12
    )  # the last prediction is the completion itself
    assert (fresh[:, -1] == final + 1000).all()


# ---------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("script", ["cj_grpo", "mdpo", "coupled_grpo"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, monkeypatch, script):
    """Ragged rollouts, two steps in one go and 1 + 1: the same metrics, bit for bit. Coupled-GRPO's reference moves between."""
    import torch._dynamo  # noqa: F401, else every child imports it for itself

    monkeypatch.setitem(REWARDS, "coin", coin)
    monkeypatch.setattr(RunLog, "plot", lambda self: None)
    load = countdown.load
    monkeypatch.setattr(
        countdown,
        "load",
        lambda split, path=None, limit=None: load(split, path, min(limit or 60, 60)),
    )
    flags = {
        "model": "tiny-llada",
        "max_steps": 2,
        "save_every": 1,
        "denoising_steps": 4,
        "confidence_threshold": 0.6,
        "micro_batch_size": 64,
    }
    flags["remasking"] = "low_confidence_dynamic"
    flags |= {"beta": 0.3, "ref_sync_steps": 2} if script == "coupled_grpo" else {}
    want = run_script(script, flags, 1, tmp_path / "whole")
    run_script(script, flags | {"max_steps": 1}, 1, tmp_path / "parts")
    (directory,) = (tmp_path / "parts").iterdir()
    got = run_script(script, flags | {"resume": str(directory)}, 1, tmp_path / "parts")
    steps = [[row for row in rows if "loss/total" in row] for rows in (want, got)]
    assert len(steps[0]) == 2 and steps[0][1]["optim/grad_norm"] > 0
    assert script != "coupled_grpo" or steps[0][1]["loss/kl"] > 0
    for a, b in zip(*steps, strict=True):
        assert all(
            a[name] == b[name] for name in a if not name.startswith(("time/", "speed/", "memory/"))
        )


BAD = {
    "lonely": (cj_grpo, {"num_generations": 1}, "--num-generations 1: a group needs at least 2"),
    "cached replay": (
        cj_grpo,
        {"model": "tiny-llada", "cache": "dual"},
        "--cache dual is approximate: what a method replays",
    ),
    "cached states": (
        mdpo,
        {"cache": "prefix"},
        "--cache prefix is approximate: what a method replays",
    ),
    "decoder of others": (
        cj_grpo,
        {"eos_policy": "eoser"},
        "--eos-policy eoser: the sampler of a block-causal model has none",
    ),
    "blocks": (
        mdpo,
        {"model": "tiny-sdar"},
        "--model tiny-sdar: mdpo needs a bidirectional model; a block-causal one",
    ),
}


@pytest.mark.parametrize("module, flags, message", BAD.values(), ids=list(BAD))
def test_bad_input_is_refused_in_one_line(run_ranks, tmp_path, monkeypatch, module, flags, message):
    load = countdown.load
    monkeypatch.setattr(
        countdown,
        "load",
        lambda split, path=None, limit=None: load(split, path, min(limit or 9, 9)),
    )

    def body(rank, world_size):
        dist.destroy_process_group()  # main makes its own
        with pytest.raises(SystemExit) as refused:
            module.main(module.Args(out=str(tmp_path), **flags))
        assert str(refused.value).startswith(message) and "\n" not in str(refused.value)
        assert not list(tmp_path.glob("*-*"))  # nothing was begun
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo", store=dist.HashStore(), rank=0, world_size=1
            )  # which the fixture ends

    run_ranks(1, body)
