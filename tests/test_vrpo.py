"""VRPO against brute force: the loss in numbers, the estimator by enumeration, the gradient of the
full graph, held-out pairs.
"""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from golden_runs import OFFLINE, rows_of, run_script
from oracles import EOS, MASK, Group, gradient, log_probs, peak_of_graphs, relative, tiny_model

from algos import vrpo
from evals import load_task

PAIRS = [
    ([1, 2, 3], [4, 0, 2, 1, EOS], [2, EOS]),
    ([4, 1, 2, 3, 0], [3, EOS], [1, 1, 0, 2, 4, 3, 0, EOS]),
    ([2, 2], [0, 1, EOS], [0, 4, EOS]),
    ([3, 1, 0, 0], [1, 2, 3, 4, 0, EOS], [3, EOS]),
]
CPU = torch.device("cpu")
families = pytest.mark.parametrize("family", ["sdar", "llada", "dream"])


def args_of(**fields):
    return vrpo.Args(**({"batch_size": 4, "mc_num": 3, "micro_batch_size": 64} | fields))


def batch_of(model, args, pairs=PAIRS, first=0):
    return vrpo.make_batch(pairs, first, args, model, 5, CPU)


def loss_of(elbos, ref_elbos, args, num_tokens=1.0):
    batch = vrpo.Batch(*[None] * 5, MASK, 0, 0, num_pairs=len(elbos) / 2, num_tokens=num_tokens)
    elbos = torch.tensor(elbos, dtype=torch.float64).requires_grad_()
    loss, metrics = vrpo.preference_loss(elbos, torch.tensor(ref_elbos).double(), batch, args)
    slope = torch.autograd.grad(loss, elbos)[0]
    return loss.item(), slope, {name: value.item() for name, value in metrics.items()}


def test_the_loss_in_numbers():
    """ln 2 and slopes of half beta where policy = reference; a margin of 20 nats; the supervised
    term; margin variance.
    """
    same = [[-50.0, -70.0]] * 2
    loss, slope, metrics = loss_of(same, same, args_of(mc_num=2, sft_coef=0.0))
    assert loss == pytest.approx(math.log(2), abs=1e-12) and metrics["reward/accuracy"] == 0.5
    assert slope.tolist() == [pytest.approx([-0.05] * 2), pytest.approx([0.05] * 2)]
    elbos, ref = [[-30.0], [-70.0]], [[-40.0], [-60.0]]
    loss, slope, metrics = loss_of(elbos, ref, args_of(mc_num=1, sft_coef=0.0))
    assert loss == pytest.approx(0.018150, abs=1e-6)
    assert slope.flatten().tolist() == pytest.approx([-0.0035972, 0.0035972], abs=1e-7)
    assert (metrics["reward/chosen"], metrics["reward/rejected"]) == (2.0, -2.0)
    assert metrics["reward/margin"] == 4 and metrics["reward/accuracy"] == 1
    elbos, ref = [[-30.0, -34.0], [-7.0, -9.0]], [[-40.0, -20.0], [-5.0, -5.0]]
    with_it, without = (loss_of(elbos, ref, args_of(mc_num=2, sft_coef=c), 16.0) for c in (0.05, 0))
    assert with_it[2]["loss/sft"] == 2.0 and with_it[0] - without[0] == pytest.approx(0.1)
    # two timesteps of two masks: chosen differences (1, 3), (5, 7), rejected (0, 0), (0, 4)
    ref = [[-9.0, -8.0, -7.0, -6.0]] * 2
    elbos = [[-8.0, -5.0, -2.0, 1.0], [-9.0, -8.0, -7.0, -2.0]]
    var = loss_of(elbos, ref, args_of(mc_num=2, masks_per_timestep=2))[2]["reward/margin_var"]
    assert var == pytest.approx(0.2**2 * ((6 - 2) ** 2 / 2 + (2 - 0) ** 2 / 2) / 2)


def toy(rows, sizes, prompt=2):
    """Equal rows without a model: prompt tokens of block 0, then the answer's blocks with these
    sizes.
    """
    ids = [0] * prompt + [b for b, size in enumerate(sizes) for _ in range(size)]
    block, index = torch.tensor(ids).repeat(rows, 1), torch.arange(rows)
    answer = torch.arange(len(ids)).repeat(rows, 1) >= prompt
    valid = torch.ones_like(answer)
    return vrpo.Batch(block, valid, answer, block, index, MASK, 3, 0, rows / 2, 1.0)


def elbos_of(masks, batch, table):
    """One-draw ELBOs [B, n] where token i has log p = table[i][m], m masked tokens in its block."""
    per_block = torch.zeros_like(masks.weights)
    for b in batch.block_ids.unique():
        inside = (batch.block_ids == b)[:, None]
        per_block += inside * (masks.masked & inside).sum(2, keepdim=True)
    columns = torch.arange(batch.block_ids.shape[1])
    return (masks.weights * table[columns, per_block.long()]).sum(2)


def test_draws_are_unbiased_stratified_and_shared():
    """p = .9, .5, .2 at 1, 2, 3 masked tokens: ln .9 + ln .5 + ln .2 a block. Variance at equal
    cost: (8, 1) < (4, 1) < (2, 2)
    < (1, 4); masks shared with the reference far below unshared ones."""
    curve = torch.tensor([1.0, 0.9, 0.5, 0.2]).double().log()
    for sizes in ((3,), (3, 3)):
        batch = toy(20000, sizes)
        got = elbos_of(vrpo.sample_masks(batch, args_of(mc_num=2)), batch, curve.expand(8, 4))
        error = got.std(0) / len(got) ** 0.5
        assert ((got.mean(0) + 2.407946 * len(sizes)).abs() < 5 * error).all()
    generator, batch, variance = torch.Generator().manual_seed(0), toy(5000, (8,)), []
    hardness = -3 * torch.rand(10, 1, generator=generator).double()
    table = torch.linspace(0.5, 1.5, 9) * hardness
    reference = table * (1 + 0.05 * torch.randn(10, 1, generator=generator))
    for n, each in ((8, 1), (4, 1), (2, 2), (1, 4)):
        args = args_of(mc_num=n, masks_per_timestep=each)
        masks, other = vrpo.sample_masks(batch, args), vrpo.sample_masks(batch, args, "ref")
        elbo = elbos_of(masks, batch, table).mean(1)
        variance.append(elbo.var().item())
        shared, unshared = (elbo - elbos_of(m, batch, reference).mean(1) for m in (masks, other))
        assert 50 * shared.var() < unshared.var()
        counts = masks.masked.sum(2).view(5000, n, each)
        assert (counts == counts[..., :1]).all()  # masks of one timestep stand together
        parts = (counts[..., 0] - 1) // (8 // n)  # one count in each of n equal parts of 1..8
        assert torch.equal(parts.sort(1).values, torch.arange(n).expand(5000, -1))
        assert not torch.equal(masks.masked[0::2], masks.masked[1::2])  # chosen and rejected differ
    assert all(1.1 * a < b for a, b in itertools.pairwise(variance))


@families
def test_what_is_scored(one_rank, family):
    """Answers with their end of turn; a block model sees its last block whole and masked; values =
    one row after the other.
    """
    model, args = tiny_model(family), args_of(mc_num=2, micro_batch_size=3)
    batch = batch_of(model, args)
    masks = vrpo.sample_masks(batch, args)
    got = vrpo.elbo_values(model, batch, masks, args)
    rows = [(prompt, answer) for prompt, *answers in PAIRS for answer in answers]
    for i, (prompt, answer) in enumerate(rows):
        stop, P = len(prompt + answer), len(prompt)
        end = -(-stop // 4) * 4 if family == "sdar" else stop
        assert batch.input_ids[i, :stop].tolist() == prompt + answer
        assert batch.valid_mask[i].sum() == end
        assert batch.answer_mask[i].nonzero()[:, 0].tolist() == [*range(P, stop)]
        masked = masks.masked[i]
        assert masked[:, stop:end].all() and not masked[:, :P].any() and not masked[:, end:].any()
        for j in range(2):
            ids, total, size = batch.input_ids[i, :end], 0.0, 4 if family == "sdar" else end
            for start in range(0, end, size):  # every block noisy, the blocks before it clean
                hidden = masked[j, :end] & (torch.arange(end) >= start)
                noisy = torch.where(hidden, MASK, ids)[: start + size]
                logps = log_probs(model, noisy[None])[0]
                for k in (masks.weights[i, j, start : start + size] != 0).nonzero()[:, 0] + start:
                    total += masks.weights[i, j, k] * logps[k, ids[k]]
            assert got[i, j].item() == pytest.approx(float(total), abs=1e-9)
    assert batch.num_tokens == sum(len(chosen) for _, chosen, _ in PAIRS)


def full_graph_loss(model, batch, masks, ref, args):
    """The loss written a second time: one row, one draw after the other, weights counted anew, a
    single graph.
    """
    elbos = []
    for i, valid in enumerate(batch.valid_mask):
        length, draws = int(valid.sum()), []
        ids, answer = batch.input_ids[i, :length], batch.answer_mask[i, :length]
        block = torch.arange(length) // (4 if model.attention == "block-causal" else length)
        inside = [(block == b) & answer for b in block[answer].unique()]
        for masked in masks.masked[i, :, :length]:
            noisy, scored = torch.where(masked, MASK, ids), masked & answer
            logps = model.logps(ids[None], noisy[None, None], scored[None, None])[0, 0]
            shares = [b.sum().item() / (b & masked).sum().item() for b in inside]
            parts = [w * logps[b & masked].sum() for w, b in zip(shares, inside, strict=True)]
            draws.append(sum(parts))
        elbos.append(torch.stack(draws).mean())
    loss = 0.0
    for p in range(0, len(elbos), 2):
        w, l = (elbos[p + side] - ref[p + side].mean() for side in (0, 1))
        loss = loss + torch.log1p(torch.exp(-args.beta * (w - l))) / args.batch_size
        loss = loss - args.sft_coef * elbos[p] / batch.num_tokens
    return loss


def gradient_of(model, batch, masks, ref, args):
    model.zero_grad()
    metrics = vrpo.backward(model, batch, masks, ref, args)
    return gradient(model), metrics


@families
def test_the_gradient_is_that_of_the_full_graph(one_rank, family):
    """1e-10 in fp64, for micro-batches of any number of whole pairs, any padding, and as the sum of
    two ranks' gradients; memory of a micro-batch, gradients reduced once.
    """
    model, args = tiny_model(family), args_of(masks_per_timestep=2, mc_num=2)
    step = lambda: gradient_of(model, batch, masks, ref, args)
    batch = batch_of(model, args)
    masks = vrpo.sample_masks(batch, args)
    ref = vrpo.elbo_values(tiny_model(family, 1), batch, masks, args)
    loss = full_graph_loss(model, batch, masks, ref, args)
    want, (got, metrics) = gradient(model, loss), step()
    assert metrics["loss/total"].item() == pytest.approx(loss.item(), rel=1e-10)
    assert relative(got, want) < 1e-10
    for size, reduced in ((24, [0, 1]), (17, [0, 1]), (15, [0, 0, 0, 1]), (8, [0, 0, 0, 1])):
        args.micro_batch_size, model.groups = size, [Group()]
        again, shares = step()
        assert relative(again, want) < 1e-10 and model.groups[0].synced == reduced
        for name, value in metrics.items():
            torch.testing.assert_close(shares[name], value, rtol=1e-10, atol=1e-12)
    part, args.micro_batch_size = peak_of_graphs(step), 64
    assert 2 * part < peak_of_graphs(step)
    pad = lambda name: F.pad(getattr(batch, name), (0, 5))
    names = ("input_ids", "valid_mask", "answer_mask")
    wide = replace(batch, **{name: pad(name) for name in names})
    wide.block_ids = model.grid(wide.valid_mask)[1]
    wide_masks = vrpo.sample_masks(wide, args)
    assert torch.equal(wide_masks.masked[..., :-5], masks.masked)
    assert torch.equal(gradient_of(model, wide, wide_masks, ref, args)[0], got)
    parts = []
    for first in (0, 2):  # two ranks with two pairs each
        rows, part = (
            slice(2 * first, 2 * first + 4),
            batch_of(model, args, PAIRS[first:][:2], first),
        )
        part.num_tokens = batch.num_tokens
        part_masks = vrpo.sample_masks(part, args)
        assert torch.equal(part_masks.masked, masks.masked[rows, :, : part.input_ids.shape[1]])
        parts.append(gradient_of(model, part, part_masks, ref[rows], args)[0])
    assert relative(sum(parts), want) < 1e-10


@pytest.mark.parametrize("family, world_size", [("sdar", 1), ("sdar", 4), ("llada", 2)])
def test_held_out_pairs_are_scored_on_fixed_draws(run_ranks, family, world_size):
    """Seven pairs on 1, 2 and 4 ranks against one pair after the other; training's own draws do not
    matter.
    """

    def body(rank, ranks):
        args = args_of(micro_batch_size=3, seed=3)
        pairs = [*PAIRS, *((prompt, rejected, chosen) for prompt, chosen, rejected in PAIRS[1:])]
        model, reference, prefix = tiny_model(family), tiny_model(family, 1), "held"
        drawn = vrpo.held_out_draws(pairs, args, model, reference, CPU)
        got = vrpo.held_out_metrics(model, *drawn, prefix, args)
        naive = replace(args, mc_num=1, masks_per_timestep=3, share_masks=False, batch_size=8)
        again = vrpo.held_out_draws(pairs, naive, model, reference, CPU)
        assert got == vrpo.held_out_metrics(model, *again, prefix, naive)
        margins = []
        for number, pair in enumerate(pairs):
            batch = vrpo.make_batch([pair], number, args, model, -1, CPU)
            masks = vrpo.sample_masks(batch, replace(args, mc_num=4), "held")
            values = [vrpo.elbo_values(m, batch, masks, args).mean(1) for m in (model, reference)]
            margins.append(-0.2 * (values[0] - values[1]).diff().item())
        assert min(margins) < 0 < max(margins)
        assert got["reward/held_accuracy"] == pytest.approx(sum(m > 0 for m in margins) / 7)
        assert got["reward/held_margin"] == pytest.approx(sum(margins) / 7, rel=1e-9)

    run_ranks(world_size, body)


# --- runs -----------------------------------------------------------------------------------------

RUN = OFFLINE | {
    "max_steps": 1,
    "mc_num": 2,
    "eval_limit": 2,
    "batch_size": 4,
    "micro_batch_size": 8,
    "model": "tiny-sdar",
}


def write(path, pairs):
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def test_what_the_run_is_scored_on_is_not_trained_on(warm, tmp_path, capfd):
    """Neither problems nor held-out pairs of either split: one training pair asks each of them,
    five are new.
    """
    task, splits = load_task("countdown"), ("validation", "test")
    prompts = {split: [f"held out for {split}"] for split in splits}
    asked = [task.prompt(task.load(split)[0])[-1]["content"] for split in splits]
    prompts["train"] = (
        asked + prompts["validation"] + prompts["test"] + [f"{i}+1" for i in range(5)]
    )
    for split, texts in prompts.items():
        pairs = [{"prompt": text, "chosen": "1", "rejected": "2"} for text in texts]
        write(tmp_path / f"{split}.jsonl", pairs)
    directory = run_script("vrpo", RUN | {"data": str(tmp_path)}, 1, tmp_path / "run")
    assert "reward/test_accuracy" in rows_of(directory)[-1]
    said = capfd.readouterr().out
    assert "5 training pairs, " in said and "4 of 9 dropped:\n  4 ask what the run" in said


def test_held_out_pairs_that_are_asked_for_must_be_there(warm, tmp_path, capfd):
    write(tmp_path / "pairs.jsonl", [{"prompt": "1+1", "chosen": "2", "rejected": "2"}])
    with pytest.raises(mp.ProcessExitedException):
        run_script("vrpo", RUN | {"eval_pairs": str(tmp_path / "pairs.jsonl")}, 1, tmp_path / "run")
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert "pairs.jsonl: no pairs for validation: 1 have two equal sides" in line
