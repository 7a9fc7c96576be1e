"""VRPO against brute force: the loss in numbers, the estimator by enumeration, the gradient beside a full graph, real runs."""

import json
import math
import weakref
from dataclasses import replace

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from test_families import FAMILIES, imports, run_script, saved  # noqa: F401
from test_methods import EOS, MASK, gradient, relative, single_rank, tiny_model

from algos import vrpo
from bench import margin_variance
from data import reference
from data.reference import ReferenceCache, model_facts, weights_checksum
from evals import load_task
from models import add_lora, load_model, load_tokenizer, load_weights, meta_model, save_model
from models.tiny import TINY_LLADA, random_model

PAIRS = [
    ([1, 2, 3], [4, 0, 2, 1, EOS], [2, EOS]),
    ([4, 1, 2, 3, 0], [3, EOS], [1, 1, 0, 2, 4, 3, 0, EOS]),
    ([2, 2], [0, 1, EOS], [0, 4, EOS]),
    ([3, 1, 0, 0], [1, 2, 3, 4, 0, EOS], [3, EOS]),
]
TINY_BOTH = TINY_LLADA | {
    "vocab_size": 8, "embedding_size": 8, "mask_token_id": MASK, "eos_token_id": EOS, "pad_token_id": EOS,
}  # fmt: skip


def bidirectional_model(seed=0):
    model = random_model(TINY_BOTH, seed).double()
    model.mask_token_id, model.eos_token_ids, model.pad_token_id = MASK, [EOS], EOS
    return model


MODELS = {"block": tiny_model, "bidirectional": bidirectional_model}


def both(target):
    """Run a test body in one forked rank for each kind of attention: the script's counts are collectives."""

    def test(run_ranks, family):
        run_ranks(1, lambda rank, world_size: target(family))

    test.__name__, test.__doc__ = target.__name__, target.__doc__
    return pytest.mark.parametrize("family", MODELS)(test)


def args_of(**fields):
    return vrpo.Args(**({"batch_size": len(PAIRS), "mc_num": 3, "micro_batch_size": 4} | fields))


def batch_of(model, args, pairs=PAIRS, first=0, num_tokens=None):
    batch = vrpo.make_batch(pairs, first, args, model, 5, torch.device("cpu"))
    return batch if num_tokens is None else replace(batch, num_tokens=num_tokens)


def loss_of(elbos, ref_elbos, args, num_tokens=1.0):
    batch = vrpo.Batch(*[None] * 5, MASK, 0, 0, num_pairs=len(elbos) / 2, num_tokens=num_tokens)
    elbos = elbos.double().requires_grad_()
    loss, metrics = vrpo.preference_loss(elbos, ref_elbos.double(), batch, args)
    return (
        loss.item(),
        torch.autograd.grad(loss, elbos)[0],
        {name: value.item() for name, value in metrics.items()},
    )


# --- the loss in numbers -----------------------------------------------------------------------------------------------------


def test_equal_policies_have_loss_ln_2_and_slopes_of_half_beta():
    """V1: margin 0 exactly; d loss / d ELBO = -0.1 for the chosen and +0.1 for the rejected answer, spread over the draws."""
    elbos = torch.randn(2, 8) * 100
    loss, slope, metrics = loss_of(elbos, elbos, args_of(mc_num=8, sft_coef=0.0))
    assert (
        loss == pytest.approx(math.log(2), abs=1e-12)
        and metrics["reward/margin"] == 0
        and metrics["reward/accuracy"] == 0.5
    )
    torch.testing.assert_close(
        slope, torch.tensor([[-0.1 / 8] * 8, [0.1 / 8] * 8]).double(), rtol=0, atol=1e-9
    )
    assert metrics["reward/margin_var"] == 0


def test_a_margin_of_20_nats():
    """V2: beta 0.2; an estimate divided by a width of 512 would leave the loss near ln 2."""
    elbos, ref = torch.tensor([[-30.0], [-70.0]]), torch.tensor([[-40.0], [-60.0]])
    args = args_of(mc_num=1, sft_coef=0.0)
    loss, slope, metrics = loss_of(elbos, ref, args)
    assert loss == pytest.approx(0.018150, abs=1e-6) and metrics["reward/margin"] == pytest.approx(
        4.0
    )
    assert slope.flatten().tolist() == pytest.approx([-0.0035972, 0.0035972], abs=1e-7)
    assert {metrics["reward/chosen"], metrics["reward/rejected"]} == {2.0, -2.0} and metrics[
        "reward/accuracy"
    ] == 1
    assert "reward/margin_var" not in metrics  # nothing can be said from one timestep
    loss, slope, _ = loss_of(elbos / 512, ref / 512, args)
    assert loss == pytest.approx(0.689249, abs=1e-6) and slope[0].item() / 512 == pytest.approx(
        -1.9455e-4, abs=1e-8
    )


def test_the_supervised_term_is_nats_per_chosen_token():
    elbos, ref = (
        torch.tensor([[-30.0, -34.0], [-7.0, -9.0]]),
        torch.tensor([[-40.0, -20.0], [-5.0, -5.0]]),
    )
    without, with_it = (
        loss_of(elbos, ref, args_of(mc_num=2, sft_coef=c), num_tokens=16.0) for c in (0.0, 0.05)
    )
    assert with_it[2]["loss/sft"] == pytest.approx(2.0) and with_it[0] - without[
        0
    ] == pytest.approx(0.1)
    difference = with_it[1] - without[1]
    assert difference[0].tolist() == pytest.approx([-0.05 / 32] * 2) and not difference[1].any()


def test_margin_variance_is_that_of_the_means_of_timesteps():
    """Two timesteps of two masks each: chosen differences (1, 3), (5, 7), rejected (0, 0), (0, 4), by hand."""
    ref = torch.tensor([[-9.0, -8.0, -7.0, -6.0]] * 2)
    elbos = ref + torch.tensor([[1.0, 3.0, 5.0, 7.0], [0.0, 0.0, 0.0, 4.0]])
    *_, metrics = loss_of(elbos, ref, args_of(mc_num=2, masks_per_timestep=2))
    assert metrics["reward/margin_var"] == pytest.approx(
        0.2**2 * ((6 - 2) ** 2 / 2 + (2 - 0) ** 2 / 2) / 2
    )
    *_, metrics = loss_of(elbos, ref, args_of(mc_num=4))
    assert metrics["reward/margin_var"] == pytest.approx(0.2**2 * (20 / 3 + 4) / 4)


# --- the estimator -----------------------------------------------------------------------------------------------------------


def toy(rows, args, blocks=((3,),), prompt=2, seed=3):
    """Batch of equal rows without a model: prompt tokens of block 0, then the answer's blocks with these sizes."""
    sizes = blocks[0]
    block_ids = torch.tensor(
        [0] * prompt + [b for b, size in enumerate(sizes) for _ in range(size)]
    ).repeat(rows, 1)
    answer = torch.arange(block_ids.shape[1]).repeat(rows, 1) >= prompt
    valid = torch.ones_like(answer)
    return vrpo.Batch(
        block_ids, valid, answer, block_ids, torch.arange(rows), MASK, seed, 0, rows / 2, 1.0
    )


def tabular(masks, batch, table):
    """One-draw ELBOs [B, n] of a toy whose token i has log p = table[i][m], m masked tokens in its own block."""
    T, per_block = batch.block_ids.shape[1], torch.zeros_like(masks.weights)
    for b in batch.block_ids.unique():
        inside = (batch.block_ids == b)[:, None]
        per_block += inside * (masks.masked & inside).sum(2, keepdim=True)
    logps = torch.stack(
        [torch.as_tensor(table).double()[i][per_block[..., i].long()] for i in range(T)], -1
    )
    return (masks.weights * logps).sum(2)


def test_the_mean_over_draws_is_the_enumerated_bound():
    """p = .9, .5, .2 at 1, 2, 3 masked tokens: ln .9 + ln .5 + ln .2; every draw of the stratified set is unbiased alone."""
    args = args_of(mc_num=2)
    curve = [0.0, math.log(0.9), math.log(0.5), math.log(0.2)]
    for sizes, want in (((3,), -2.407946), ((3, 3), 2 * -2.407946)):
        batch = toy(20000, args, (sizes,))
        elbos = tabular(vrpo.sample_masks(batch, args), batch, [curve] * (2 + sum(sizes)))
        error = elbos.std(0) / len(elbos) ** 0.5
        assert ((elbos.mean(0) - want).abs() < 5 * error).all() and (error > 0).all()
        unweighted = vrpo.sample_masks(batch, args)
        unweighted.weights = (
            unweighted.weights > 0
        ).double()  # control: without k / m the sum is another one
        assert (
            abs(tabular(unweighted, batch, [curve] * (2 + sum(sizes))).mean() - want)
            > 10 * error[0]
        )


def test_draws_belong_on_timesteps_and_are_shared_with_the_reference():
    """V4: variance (4, 1) <= (2, 2) <= (1, 4) at equal cost, (8, 1) least; shared draws far below unshared; by 5,000 draws."""
    generator = torch.Generator().manual_seed(0)
    L, T = 8, 10
    level = torch.linspace(0.5, 1.5, L + 1)
    table = -(
        level * (3 * torch.rand(T, 1, generator=generator))
    )  # harder with more masks, and tokens differ
    reference = table * (1 + 0.05 * torch.randn(T, 1, generator=generator))
    variance = {}
    for budget in ((1, 1), (8, 1), (4, 1), (2, 2), (1, 4)):
        args = args_of(mc_num=budget[0], masks_per_timestep=budget[1])
        batch = toy(5000, args, ((L,),))
        masks, other = vrpo.sample_masks(batch, args), vrpo.sample_masks(batch, args, "ref")
        elbo = tabular(masks, batch, table).mean(1)
        variance[budget] = elbo.var().item()
        shared, unshared = (elbo - tabular(m, batch, reference).mean(1) for m in (masks, other))
        assert 50 * shared.var() < unshared.var()
        assert (
            abs(shared.mean() - unshared.mean()) < 5 * unshared.std() / len(elbo) ** 0.5
        )  # both are unbiased
    assert 1.1 * variance[8, 1] < variance[4, 1] and 1.1 * variance[4, 1] < variance[2, 2]
    assert 1.1 * variance[2, 2] < variance[1, 4] and 1.1 * variance[1, 4] < variance[1, 1]


@pytest.mark.parametrize("n", [8, 4, 2])
def test_timesteps_are_stratified_in_every_block(n):
    """n timesteps over a block of 8: one count of masked tokens in each of n equal parts of 1..8, every count equally often."""
    batch = toy(2000, None, ((8, 8),))
    masks = vrpo.sample_masks(batch, args_of(mc_num=n))
    for block in (0, 1):
        counts = (masks.masked & (batch.block_ids == block)[:, None]).sum(2)
        parts = (counts - 1) // (8 // n)
        assert torch.equal(parts.sort(1).values, torch.arange(n).expand(2000, n))
        share = torch.bincount(counts[:, 0], minlength=9)[1:] / 2000
        torch.testing.assert_close(share, torch.full((8,), 1 / 8), atol=0.04, rtol=0)


@single_rank
def test_two_answers_are_drawn_apart_and_masks_of_the_reference_too():
    """'drawn independently for chosen and rejected': equal prompts and lengths, other masks; unshared: other masks again."""
    model, args = tiny_model(), args_of(batch_size=1)
    batch = batch_of(model, args, [([1, 2, 3, 0], [1] * 39 + [EOS], [2] * 39 + [EOS])])
    masks, again, other = (vrpo.sample_masks(batch, args, *stream) for stream in ((), (), ("ref",)))
    assert torch.equal(masks.masked, again.masked) and torch.equal(masks.weights, again.weights)
    assert not torch.equal(masks.masked[0], masks.masked[1])
    assert not any(torch.equal(masks.masked[i], other.masked[i]) for i in (0, 1))
    pairwise = vrpo.sample_masks(
        batch, replace(args, mc_num=3, masks_per_timestep=2)
    ).masked.unflatten(1, (3, 2))
    counts = pairwise.sum(-1)
    assert torch.equal(counts[..., 0], counts[..., 1]) and not torch.equal(
        pairwise[:, :, 0], pairwise[:, :, 1]
    )
    assert (
        counts[:, 0] != counts[:, 1]
    ).all()  # masks of one timestep stand together, and timesteps differ
    later = vrpo.sample_masks(replace(batch, step=6), args)
    assert not torch.equal(masks.masked, later.masked)


@both
def test_what_is_scored(family):
    """V8 of the spec's list: the end of turn is, pads are not; a block model sees its last block whole and masked."""
    model, args = MODELS[family](), args_of(mc_num=64)
    batch = batch_of(model, args)
    masks = vrpo.sample_masks(batch, args)
    rows = [prompt + answer for prompt, *answers in PAIRS for answer in answers]
    prompts = [prompt for prompt, *_ in PAIRS for _ in (0, 1)]
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        end = -(-len(row) // 4) * 4 if family == "block" else len(row)
        assert batch.input_ids[i, : len(row)].tolist() == row and batch.valid_mask[i].sum() == end
        scored = masks.weights[i].any(0).nonzero()[:, 0].tolist()
        assert scored == list(range(len(prompt), len(row)))
        assert (
            masks.masked[i, :, len(row) : end].all() and not masks.masked[i, :, : len(prompt)].any()
        )
        assert not masks.masked[i, :, end:].any()
    assert batch.num_tokens == sum(
        len(chosen) for _, chosen, _ in PAIRS
    ) and batch.num_pairs == len(PAIRS)


# --- the gradient ------------------------------------------------------------------------------------------------------------


def full_graph_loss(model, batch, masks, ref, args, fault=None):
    """The loss written a second time: one row, one draw after the other, weights counted anew, a single graph."""
    elbos = []
    for i in range(len(batch.input_ids)):
        length, draws = int(batch.valid_mask[i].sum()), []
        for j in range(masks.masked.shape[1]):
            masked, answer = masks.masked[i, j, :length], batch.answer_mask[i, :length]
            ids, total = batch.input_ids[i, :length], 0.0
            scored = masked & answer
            logps = model.logps(ids[None], torch.where(masked, MASK, ids)[None], scored[None])[0]
            position = torch.arange(length)
            block = (
                position // model.block_length
                if model.attention == "block-causal"
                else 0 * position
            )
            for b in block[answer].unique():
                inside = (block == b) & answer
                k, m = inside.sum().item(), (inside & masked).sum().item()
                total = total + (1 if fault == "weights" else k / m) * logps[inside & masked].sum()
            draws.append(total)
        elbos.append(torch.stack(draws).mean() / (len(ids) if fault == "normalised" else 1))
    loss = 0.0
    for p in range(len(elbos) // 2):
        w, l = (
            elbos[2 * p + side] - ref[2 * p + side].mean()
            for side in ((1, 0) if fault == "swapped" else (0, 1))
        )
        loss = loss + torch.log1p(torch.exp(-args.beta * (w - l))) / args.batch_size
        if fault != "no supervised term":
            loss = loss - args.sft_coef * elbos[2 * p] / batch.num_tokens
    return loss


def our_gradient(model, batch, masks, ref, args):
    model.zero_grad()
    model.set_requires_gradient_sync = lambda sync: None
    metrics = vrpo.backward(model, batch, masks, ref, 1, args)
    return gradient(model), metrics


def case(family, **fields):
    """-> model, batch, masks, reference values of another model, args: margins of both signs, away from 0"""
    model, args = MODELS[family](), args_of(**fields)
    batch = batch_of(model, args)
    masks = vrpo.sample_masks(batch, args)
    ref = vrpo.elbo_values(MODELS[family](1), batch, masks, args)
    return model, batch, masks, ref, args


@both
def test_the_gradient_is_that_of_the_full_graph(family):
    """V3 in fp64 to 1e-10, two masks per timestep too; planted faults are seen."""
    for fields in ({}, {"mc_num": 2, "masks_per_timestep": 2}):
        model, batch, masks, ref, args = case(family, **fields)
        got, metrics = our_gradient(model, batch, masks, ref, args)
        loss = full_graph_loss(model, batch, masks, ref, args)
        assert (
            metrics["loss/total"].item() == pytest.approx(loss.item(), rel=1e-10)
            and abs(metrics["reward/margin"]) > 0.01
        )
        assert relative(got, gradient(model, loss)) < 1e-10
    for fault in ("weights", "normalised", "swapped", "no supervised term"):
        wrong = gradient(model, full_graph_loss(model, batch, masks, ref, args, fault))
        assert relative(got, wrong) > 1e-3, fault


@both
def test_micro_batches_and_ranks_do_not_change_the_gradient(family):
    model, batch, masks, ref, args = case(family)
    want, _ = our_gradient(model, batch, masks, ref, args)
    for size in (1, 5, 1000):
        got, _ = our_gradient(model, batch, masks, ref, replace(args, micro_batch_size=size))
        assert relative(got, want) < 1e-10
    parts = []
    for first in (0, 2):  # two ranks with two pairs each
        part = batch_of(model, args, PAIRS[first : first + 2], first, batch.num_tokens)
        part_masks = vrpo.sample_masks(part, args)
        width = part.input_ids.shape[1]
        assert torch.equal(part_masks.masked, masks.masked[2 * first : 2 * first + 4, :, :width])
        parts.append(our_gradient(model, part, part_masks, ref[2 * first : 2 * first + 4], args)[0])
    assert relative(sum(parts), want) < 1e-10
    lost = batch_of(
        model, args, PAIRS[2:], 0, batch.num_tokens
    )  # control: a rank that numbers its pairs from 0
    assert not torch.equal(vrpo.sample_masks(lost, args).masked, part_masks.masked)


class Saved:
    """A tensor that a graph keeps for its backward pass, in a box that can be watched."""

    def __init__(self, tensor):
        self.tensor = tensor


def peak_of_saved_tensors(action):
    """Most elements that graphs held at one time."""
    boxes, peak = weakref.WeakSet(), 0

    def pack(tensor):
        nonlocal peak
        box = Saved(tensor)
        boxes.add(box)
        peak = max(peak, sum(b.tensor.numel() for b in boxes)) if len(boxes) % 8 == 0 else peak
        return box

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        action()
    return peak


@both
def test_activation_memory_does_not_grow_with_the_number_of_draws(family):
    """V3; control: the full graph's does."""
    peaks = []
    for n in (2, 6):
        model, batch, masks, ref, args = case(family, mc_num=n, micro_batch_size=2)
        batch, ref = replace(batch, sample_index=batch.sample_index[:2]), ref[:2]
        batch = replace(
            batch,
            **{
                name: getattr(batch, name)[:2]
                for name in ("input_ids", "valid_mask", "answer_mask")
            },
        )
        masks = vrpo.Masks(masks.masked[:2], masks.weights[:2])
        ours = peak_of_saved_tensors(lambda: our_gradient(model, batch, masks, ref, args))  # noqa: B023
        full = peak_of_saved_tensors(lambda: full_graph_loss(model, batch, masks, ref, args))  # noqa: B023
        peaks.append((ours, full))
    (ours, full), (ours_more, full_more) = peaks
    assert 0 < ours_more < 1.1 * ours and full_more > 2.5 * full


@both
def test_padding_on_the_right_changes_no_bit(family):
    """V5: more pads, and the same loss and gradient, bit for bit; tokens that are valid there are seen."""
    model, batch, masks, ref, args = case(family)
    want, metrics = our_gradient(model, batch, masks, ref, args)
    pad = lambda values, fill: F.pad(values, (0, 5), value=fill)
    wide = replace(
        batch,
        input_ids=pad(batch.input_ids, EOS),
        valid_mask=pad(batch.valid_mask, False),
        answer_mask=pad(batch.answer_mask, False),
        block_ids=model.grid(pad(batch.valid_mask, False))[1],
    )
    wide_masks = vrpo.sample_masks(wide, args)
    assert (
        torch.equal(wide_masks.masked[..., :-5], masks.masked)
        and not wide_masks.masked[..., -5:].any()
    )
    got, same = our_gradient(model, wide, wide_masks, ref, args)
    assert torch.equal(got, want) and all(
        torch.equal(same[name], metrics[name]) for name in metrics
    )
    if family == "bidirectional":
        valid = replace(wide, valid_mask=pad(batch.valid_mask, True))
        assert relative(our_gradient(model, valid, wide_masks, ref, args)[0], want) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_values_of_every_family_are_those_of_single_rows(run_ranks, family):
    """Micro-batches of ragged, padded rows against one row and one draw after the other; a mask moved by one is seen."""

    def body(rank, world_size):
        model, args = load_model(family, dtype=torch.float32), args_of(mc_num=2, micro_batch_size=5)
        letters = lambda text, *end: [*text.encode(), *end]
        end = model.eos_token_ids[0]
        pairs = [
            (letters(prompt), letters(a, end), letters(b, end))
            for prompt, a, b in (("1 2 3", "6", "1+2+3"), ("4", "5-1", "9"))
        ]
        batch = batch_of(model, args, pairs)
        masks = vrpo.sample_masks(batch, args)
        got, other = vrpo.elbo_values(model, batch, masks, args), torch.zeros(4, 2)
        for i, (prompt, answer) in enumerate(
            (prompt, answer) for prompt, *answers in pairs for answer in answers
        ):
            n, end_of_answer = int(batch.valid_mask[i].sum()), len(prompt) + len(answer)
            ids = torch.tensor([prompt + answer + [model.pad_token_id] * (n - end_of_answer)])
            for j in range(2):
                masked = masks.masked[i, j, :n]
                with torch.no_grad():
                    logps = log_probs(model, ids.where(~masked, model.mask_token_id))
                    if model.attention == "block-causal":  # every block noisy behind the clean ones
                        logps = torch.cat(
                            [
                                block_logps(model, ids, masked, b)
                                for b in range(n // model.block_length)
                            ],
                            1,
                        )
                scored = logps[0, torch.arange(n), ids[0]]
                assert (
                    masks.weights[i, j, end_of_answer:].sum() == 0 and masks.weights[i, j].sum() > 0
                )
                other[i, j] = (masks.weights[i, j, :n].float() * scored).sum()
        torch.testing.assert_close(got, other, atol=2e-4, rtol=1e-4)
        moved = replace(masks, masked=masks.masked.roll(1, 2) & batch.answer_mask[:, None])
        assert (vrpo.elbo_values(model, batch, moved, args) - other).abs().max() > 1e-3

    run_ranks(1, body)


def block_logps(model, ids, masked, b):
    """Log-probabilities of one block, its masked tokens hidden, all tokens before it clean. -> [1, block, V]"""
    end = (b + 1) * model.block_length
    inside = torch.arange(end) >= b * model.block_length
    noisy = ids[:, :end].where(~(masked[:end] & inside), model.mask_token_id)
    return log_probs(model, noisy)[:, -model.block_length :]


def log_probs(model, noisy):
    logits = model.logits(noisy)
    logits[..., model.mask_token_id] = -torch.inf  # never a prediction
    return logits.log_softmax(-1)


# --- held-out pairs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family, world_size", [("block", 1), ("block", 4), ("bidirectional", 2)])
def test_held_out_pairs_are_scored_on_fixed_draws(run_ranks, family, world_size):
    """Seven pairs on 1, 2 and 4 ranks, against one answer and one draw after the other; training's own draws do not matter."""

    def body(rank, world_size):
        args = args_of(micro_batch_size=3, sft_coef=0.0, seed=3)
        pairs = [*PAIRS, *((prompt, rejected, chosen) for prompt, chosen, rejected in PAIRS[1:])]
        model, reference = MODELS[family](), MODELS[family](1)
        drawn = vrpo.held_out_draws(pairs, args, model, reference, torch.device("cpu"))
        got = vrpo.held_out_metrics(model, *drawn, ("accuracy", "margin"), args)
        naive = replace(args, mc_num=1, masks_per_timestep=3, share_masks=False, batch_size=8)
        assert got == vrpo.held_out_metrics(model, *drawn, ("accuracy", "margin"), naive)
        again = vrpo.held_out_draws(pairs, naive, model, reference, torch.device("cpu"))
        assert torch.equal(again[1].masked, drawn[1].masked) and torch.equal(again[2], drawn[2])
        margins = []
        for number, pair in enumerate(pairs):
            batch = replace(
                vrpo.make_batch([pair], number, args, model, 0, torch.device("cpu")), step=-1
            )
            masks = vrpo.sample_masks(batch, replace(args, mc_num=4), "held")
            elbos = []
            for side in (0, 1):
                total = 0.0
                for draw in range(4):
                    row = torch.tensor([4 * side + draw])
                    with torch.no_grad():
                        total += vrpo.draw_elbos(model, batch, masks, row) - vrpo.draw_elbos(
                            reference, batch, masks, row
                        )
                elbos.append(total.item() / 4)
            margins.append(0.2 * (elbos[0] - elbos[1]))
        assert min(margins) < 0 < max(margins)
        assert got["accuracy"] == pytest.approx(sum(m > 0 for m in margins) / 7)
        assert got["margin"] == pytest.approx(sum(margins) / 7, rel=1e-9)

    run_ranks(world_size, body)


# --- cached reference values -------------------------------------------------------------------------------------------------


@single_rank
def test_digests_know_ids_and_masks_and_not_padding():
    model, args = tiny_model(), args_of()
    batch = batch_of(model, args)
    masks = vrpo.sample_masks(batch, args)
    digests = lambda batch, masks: vrpo.row_digests(
        batch.valid_mask, batch.input_ids, masks.masked, masks.weights
    ).tolist()
    want = digests(batch, masks)
    assert len(set(want)) == len(want) == 8
    pad = lambda value: F.pad(value, (0, 3))
    wide = replace(batch, valid_mask=pad(batch.valid_mask), input_ids=pad(batch.input_ids))
    assert digests(wide, vrpo.Masks(pad(masks.masked), pad(masks.weights))) == want
    other = batch.input_ids.clone()
    other[2, 0] += 1
    assert [
        a == b for a, b in zip(digests(replace(batch, input_ids=other), masks), want, strict=True)
    ] == [i != 2 for i in range(8)]
    flipped = masks.masked.clone()
    flipped[5, 1, 3] ^= True
    assert [
        a == b for a, b in zip(digests(batch, replace(masks, masked=flipped)), want, strict=True)
    ] == [i != 5 for i in range(8)]
    halved = digests(batch, replace(masks, weights=masks.weights / 2))
    assert not any(a == b for a, b in zip(halved, want, strict=True))


def test_the_checksum_of_weights_is_that_of_every_sharding(run_ranks, tmp_path):
    """Whole, on 2 and 3 ranks, in bf16 where no bit is lost, with adapters; another model or one changed bit: another sum."""
    plain = load_model("tiny-sdar").bfloat16()  # values that bf16 holds
    save_model(plain, tmp_path / "model", load_tokenizer("tiny-sdar"))
    name = str(tmp_path / "model")
    want = weights_checksum(plain)
    assert (
        weights_checksum(load_model(name, dtype=torch.float32))
        == want
        != weights_checksum(load_model("tiny-sdar"))
    )
    with torch.no_grad():
        next(plain.parameters()).view(-1)[7] *= 1.01
    assert weights_checksum(plain) != want

    experts = str(tmp_path / "experts")  # with a buffer, whole on every rank
    sums = {name: want, experts: weights_checksum(saved("tiny-llada2", experts))}

    def body(rank, world_size):
        for name, want in sums.items():
            for lora_rank in (0, 4):
                model = meta_model(name, torch.float32)
                model = vrpo.parallelize(
                    add_lora(model, lora_rank, 8) if lora_rank else model, vrpo.Args()
                )
                assert weights_checksum(load_weights(model, "cpu")) == want

    for ranks in (1, 3):
        run_ranks(ranks, body)


def test_a_cache_knows_the_config_of_its_model(tmp_path):
    """The same weights under another rotary base are another model; another name in config.json is not."""
    name, path = tmp_path / "model", tmp_path / "values.safetensors"
    save_model(load_model("tiny-sdar"), name, load_tokenizer("tiny-sdar"))
    config = json.loads((name / "config.json").read_text())
    facts = []
    for change in ({}, {"_name_or_path": "elsewhere"}, {"rope_theta": 2 * config["rope_theta"]}):
        (name / "config.json").write_text(json.dumps(config | change))
        facts.append(model_facts(load_model(str(name))))
    same, named, turned = facts
    assert (
        same == named
        and turned["weights"] == same["weights"]
        and turned["config"] != same["config"]
    )
    cache = ReferenceCache(path, same)
    cache.append(torch.zeros(2, 2), torch.arange(2))
    cache.save()
    with pytest.raises(
        SystemExit,
        match=f"is stale: config {same['config']} there, {turned['config']} here; name another",
    ):
        ReferenceCache(path, turned)


def test_runs_that_share_a_cache_write_it_whole(tmp_path, monkeypatch):
    """Under names of their own until it is complete: one saves while the other does, and neither is in the other's way."""
    path, save_file, seen = tmp_path / "values.safetensors", reference.save_file, []

    def filled(value):
        cache = ReferenceCache(path, {})
        cache.append(torch.full((2, 2), value), torch.arange(2))
        return cache

    def slowly(tensors, temporary, about):
        save_file(tensors, temporary, about)
        seen.append((path.exists(), temporary.parent == tmp_path))
        if len(seen) == 1:
            second.save()

    monkeypatch.setattr(reference, "save_file", slowly)
    first, second = filled(1.0), filled(2.0)
    first.save()
    assert seen == [(False, True)] * 2 and [file.name for file in tmp_path.iterdir()] == [path.name]
    assert (
        ReferenceCache(path, {}).values(0, 0, torch.arange(2)).tolist() == [[1.0, 1.0]] * 2
    )  # of the last to end


def test_a_cache_gives_back_what_was_put_in_by_all_ranks(run_ranks, tmp_path):
    path, values = tmp_path / "deep/values.safetensors", torch.randn(3, 4, 2)
    digests = torch.arange(12).view(3, 4) * 10**15

    def write(rank, world_size):
        cache = ReferenceCache(path, {"weights": 7})
        mine = slice(2 * rank, 2 * rank + 2)
        for step in range(3):
            assert len(cache) == step
            cache.append(values[step, mine], digests[step, mine])
        cache.save()

    run_ranks(2, write)
    cache = ReferenceCache(path, {"weights": 7})
    assert len(cache) == 3 and torch.equal(cache.values(1, 1, digests[1, 1:3]), values[1, 1:3])
    for step, first, wrong in (
        (0, 1, digests[1, 1:3]),
        (1, 0, digests[1, 1:3]),
        (1, 1, digests[1, 1:3] + 1),
    ):
        with pytest.raises(
            SystemExit,
            match=f"values.safetensors is stale: step {step + 1} has other data or masks",
        ):
            cache.values(step, first, wrong)
    with pytest.raises(SystemExit, match="is stale: weights 7 there, 8 here"):
        ReferenceCache(path, {"weights": 8})
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(SystemExit, match="no file of reference values, or a truncated one"):
        ReferenceCache(path, {"weights": 7})
    with pytest.raises(SystemExit, match="is a folder"):
        ReferenceCache(tmp_path, {"weights": 7})
    (tmp_path / "file").write_text("")
    unwritable = ReferenceCache(tmp_path / "file/values", {})
    unwritable.append(values[0], digests[0])
    with pytest.raises(SystemExit, match="cannot be written"):
        unwritable.save()


# --- runs --------------------------------------------------------------------------------------------------------------------


RUN = {"batch_size": 4, "mc_num": 2, "micro_batch_size": 8, "save_every": 2}


def steps_of(rows):
    exempt = ("time/", "speed/", "memory/")
    return [
        {name: value for name, value in row.items() if not name.startswith(exempt)} for row in rows
    ]


@pytest.mark.parametrize(
    "model, lora_rank", [("tiny-llada", 0), ("tiny-sdar", 4)], ids=["copy", "adapters off"]
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, imports, model, lora_rank):  # noqa: F811
    """Bit for bit: the reference is the first policy again. The first margin is 0, later ones are not."""
    flags = RUN | {"model": model, "lora_rank": lora_rank}
    whole = steps_of(run_script("vrpo", flags | {"max_steps": 4}, 1, tmp_path / "whole"))
    assert len(whole) == 4 and whole[0]["reward/margin"] == 0 and whole[0]["reward/accuracy"] == 0.5
    assert all(row["reward/margin"] != 0 and row["reward/margin_var"] > 0 for row in whole[1:])
    first = run_script("vrpo", flags, 1, tmp_path / "parts")
    (directory,) = (tmp_path / "parts").iterdir()
    both = run_script(
        "vrpo", flags | {"max_steps": 4, "resume": str(directory)}, 1, tmp_path / "parts"
    )
    assert len(first) == 2 and steps_of(both) == whole


CACHED = {"adapters off": {"lora_rank": 4}, "naive": {"mc_num": 1, "share_masks": False}}


@pytest.mark.parametrize("fields", CACHED.values(), ids=CACHED)
def test_cached_reference_values_are_those_of_the_step(tmp_path, imports, fields):  # noqa: F811
    flags = RUN | fields | {"model": "tiny-sdar", "ref_cache": str(tmp_path / "values.safetensors")}
    online, cached = (
        run_script("vrpo", flags | change, 1, tmp_path / str(change))
        for change in ({"ref_cache": ""}, {})
    )
    assert steps_of(cached) == steps_of(online)


def test_a_cache_is_made_extended_read_and_refused_when_stale(
    tmp_path, imports, monkeypatch, capfd
):  # noqa: F811
    """The run with a cache is the run without, bit for bit: made at the start, extended on resume, read again, and by two
    ranks. What does not fit is refused before a step."""
    path = str(tmp_path / "cache/values.safetensors")
    cached = RUN | {"model": "tiny-sdar", "ref_cache": path}
    want = steps_of(
        run_script("vrpo", cached | {"max_steps": 3, "ref_cache": ""}, 1, tmp_path / "online")
    )
    assert steps_of(run_script("vrpo", cached, 1, tmp_path / "made")) == want[:2]
    (directory,) = (tmp_path / "made").iterdir()
    resumed = run_script(
        "vrpo", cached | {"max_steps": 3, "resume": str(directory)}, 1, tmp_path / "made"
    )
    assert steps_of(resumed) == want
    monkeypatch.setattr(ReferenceCache, "append", lambda *_: pytest.fail("computed again"))
    for a, b in zip(
        want,
        steps_of(run_script("vrpo", cached | {"max_steps": 3}, 2, tmp_path / "two")),
        strict=True,
    ):
        assert all(a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5) for name in a)
    capfd.readouterr()
    for change in ({"model": "tiny-llada"}, {"seed": 1, "max_steps": 4}, {"mc_num": 3}):
        with pytest.raises(mp.ProcessExitedException):
            run_script("vrpo", cached | change, 1, tmp_path / str(change))
        out, error = capfd.readouterr()
        assert (
            f"--ref-cache {path} is stale" in error.strip().splitlines()[-1]
            and "step 1/" not in out
        )


def test_one_and_four_ranks_agree_and_held_out_pairs_too(tmp_path, imports):  # noqa: F811
    flags = RUN | {
        "model": "tiny-sdar",
        "max_steps": 2,
        "eval_every": 1,
        "eval_limit": 5,
        "learning_rate": 1e-2,
    }
    runs = [
        steps_of(run_script("vrpo", flags, ranks, tmp_path / f"ranks{ranks}")) for ranks in (1, 4)
    ]
    assert [row["step"] for row in runs[0]] == [0, 1, 2, 2]
    start, first, second, end = runs[0]
    assert start["reward/test_accuracy"] == 0.5 and start["reward/test_margin"] == 0
    assert (
        first["reward/eval_margin"] != second["reward/eval_margin"]
        and end["reward/test_margin"] != 0
    )
    for a, b in zip(*runs, strict=True):
        assert a.keys() == b.keys()
        assert all(a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5) for name in a)


def test_held_out_pairs_that_are_asked_for_must_be_there(tmp_path, imports, capfd):  # noqa: F811
    (tmp_path / "pairs.jsonl").write_text(
        json.dumps({"prompt": "1+1", "chosen": "2", "rejected": "2"}) + "\n"
    )
    (tmp_path / "folder").mkdir()
    for name, reason in (("pairs.jsonl", "have two equal sides"), ("folder", "no such split")):
        with pytest.raises(mp.ProcessExitedException):
            run_script(
                "vrpo",
                RUN | {"eval_pairs": str(tmp_path / name), "eval_limit": 4},
                1,
                tmp_path / f"run {name}",
            )
        line = capfd.readouterr().err.strip().splitlines()[-1]
        assert f"{name} holds no pairs for validation and test: {reason}" in line


def test_naive_dpo_is_a_matter_of_fields(tmp_path, imports):  # noqa: F811
    """One draw, masks of its own for the reference: noise in the first margin, though both policies are the same."""
    naive = RUN | {"model": "tiny-sdar", "mc_num": 1, "share_masks": False, "max_steps": 1}
    (row,) = run_script("vrpo", naive, 1, tmp_path / "naive")
    assert abs(row["reward/margin"]) > 1e-3 and "reward/margin_var" not in row
    (row,) = run_script("vrpo", naive | {"share_masks": True}, 1, tmp_path / "shared")
    assert row["reward/margin"] == 0


def test_files_of_pairs_train(tmp_path, imports, capfd):  # noqa: F811
    """ultrafeedback's layout from a file; what is dropped is said."""
    sides = lambda answer: [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": answer},
    ]
    rows = [
        {"prompt": "1+1", "chosen": sides(str(i)), "rejected": sides("x" * i)} for i in range(1, 6)
    ]
    rows.append({"prompt": "1+1", "chosen": sides("2"), "rejected": sides("2")})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = RUN | {"data": str(tmp_path / "pairs.jsonl"), "max_steps": 1}
    (row,) = run_script("vrpo", flags, 1, tmp_path / "run")
    assert row["loss/dpo"] == pytest.approx(math.log(2))
    said = capfd.readouterr().out
    assert "5 training pairs, 55 tokens, the longest has 13; 1 of 6 dropped:" in said
    assert "  1 have two equal sides; the first: row 6, '1+1' -> '2' rather than '2'" in said
    assert "validation pairs" not in said and "reward/eval_accuracy" not in row


def test_what_the_run_is_scored_on_is_not_trained_on(tmp_path, imports, capfd):  # noqa: F811
    """Neither problems nor held-out pairs of either split: one training pair asks each of them, five are new."""
    task, splits = load_task("countdown"), ("validation", "test")
    asked = [task.prompt(task.load(split)[0])[-1]["content"] for split in splits] + [
        f"held out for {split}" for split in splits
    ]
    prompts = {"train": [*asked, "0+1", "1+1", "2+1", "3+1", "4+1"]} | {
        split: [f"held out for {split}"] for split in splits
    }
    for split, texts in prompts.items():
        pairs = [{"prompt": text, "chosen": "1", "rejected": "2"} for text in texts]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    flags = RUN | {"model": "tiny-sdar", "data": str(tmp_path), "max_steps": 1, "eval_limit": 2}
    rows = run_script("vrpo", flags, 1, tmp_path / "run")
    assert "reward/test_accuracy" in rows[-1]
    said = capfd.readouterr().out
    assert (
        "5 training pairs, " in said
        and "4 of 9 dropped:\n  4 ask what the run is scored on; the first: row 1, " in said
    )


def test_the_bench_of_variances_runs(tmp_path, imports, capfd):  # noqa: F811
    """Policy = reference: no variance with shared draws, some with draws of its own. Rows of another model stay."""
    out = tmp_path / "rows.jsonl"
    out.write_text(
        json.dumps(
            {
                "model": "other",
                "mc_num": 1,
                "masks_per_timestep": 1,
                "share_masks": True,
                "variance": 3.0,
            }
        )
    )
    args = margin_variance.Args(
        "tiny-sdar", pairs=2, repeats=3, out=str(out), figure=str(tmp_path / "variance.png")
    )

    def child(rank):
        torch.set_num_threads(1)  # threads of the parent do not survive a fork
        margin_variance.main(args)

    mp.start_processes(child, nprocs=1, join=True, start_method="fork")
    printed = [
        line.split("|")[1:-1] for line in capfd.readouterr().out.splitlines() if " / " in line
    ][1:]
    assert len(printed) == 2 * len(margin_variance.BUDGETS)
    assert all((float(row[3]) > 0) == (row[1].strip() == "its own") for row in printed)
    other, *rows = map(json.loads, out.read_text().splitlines())
    assert other["model"] == "other" and len(rows) == len(printed)
    assert all(
        (row["variance"] > 0) != row["share_masks"]
        and (row["loss_variance"] > 0) != row["share_masks"]
        for row in rows
    )
    assert (tmp_path / "variance.png").read_bytes().startswith(b"\x89PNG")
