"""VRPO against brute force: the loss in numbers, the estimator by enumeration, the gradient of the
full graph, held-out pairs.
"""

import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from golden_runs import ANSWERS, EVERY, rows_of, run_script
from oracles import EOS, MASK, Group, gradient, naive_logps, peak_of_graphs, relative, tiny_model
from test_methods import within

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
    term, of the chosen answer; margin variance.
    """
    same = [[-50.0, -70.0]] * 2
    loss, slope, metrics = loss_of(same, same, args_of(mc_num=2, sft_coef=0.0))
    assert loss == pytest.approx(math.log(2), abs=1e-12) and metrics["reward/accuracy"] == 0.5
    assert slope.tolist() == [pytest.approx([-0.05] * 2), pytest.approx([0.05] * 2)]
    elbos, ref = [[-30.0], [-70.0]], [[-40.0], [-60.0]]
    loss, slope, metrics = loss_of(elbos, ref, args_of(mc_num=1, sft_coef=0.05), 16.0)
    assert metrics["loss/sft"] == 30 / 16 and loss == pytest.approx(0.018150 + 1.5 / 16, abs=1e-6)
    assert slope[1].item() == pytest.approx(0.0035972, abs=1e-7)
    assert (metrics["reward/chosen"], metrics["reward/rejected"]) == (2.0, -2.0)
    assert metrics["reward/margin"] == 4 and metrics["reward/accuracy"] == 1
    # two timesteps of two masks: chosen differences (1, 3), (5, 7), rejected (0, 0), (0, 4)
    ref = [[-9.0, -8.0, -7.0, -6.0]] * 2
    elbos = [[-8.0, -5.0, -2.0, 1.0], [-9.0, -8.0, -7.0, -2.0]]
    var = loss_of(elbos, ref, args_of(mc_num=2, masks_per_timestep=2))[2]["reward/margin_var"]
    assert var == pytest.approx(0.2**2 * ((6 - 2) ** 2 / 2 + (2 - 0) ** 2 / 2) / 2)


def elbos_of(masks, table):
    """One-draw ELBOs [B, n] where token i has log p = table[i][m], m masked tokens of a row."""
    size = masks.masked.sum(2, keepdim=True)
    return (masks.weights * table[torch.arange(len(table)), size]).sum(2)


def test_draws_are_unbiased_stratified_and_shared():
    """Equal answers of 8 tokens without a model, whose hardness depends on how many are masked.
    Variance at equal cost: (8, 1) < (4, 1) < (2, 2) < (1, 4); masks shared with the reference far
    below unshared ones.
    """
    ids, index = torch.zeros(5000, 10).long(), torch.arange(5000)
    answer, variance = (torch.arange(10) >= 2).repeat(5000, 1), []
    batch = vrpo.Batch(ids, answer | ~answer, answer, ids, index, MASK, 3, 0, 2500, 1.0)
    table = -torch.linspace(0.5, 1.5, 9) * torch.linspace(0.1, 3, 10)[:, None].double()
    for n, each in ((8, 1), (4, 1), (2, 2), (1, 4)):
        args = args_of(mc_num=n, masks_per_timestep=each)
        masks, other = vrpo.sample_masks(batch, args), vrpo.sample_masks(batch, args, "ref")
        elbo = elbos_of(masks, table).mean(1)
        variance.append(elbo.var().item())
        assert within(elbo, table[2:, 1:].mean(1).sum())
        shared, unshared = (elbo - elbos_of(m, 1.05 * table).mean(1) for m in (masks, other))
        assert 50 * shared.var() < unshared.var()
        counts = masks.masked.sum(2).view(5000, n, each)
        assert (counts == counts[..., :1]).all()  # masks of one timestep stand together
        parts = (counts[..., 0] - 1) // (8 // n)  # one count in each of n equal parts of 1..8
        assert torch.equal(parts.sort(1).values, torch.arange(n).expand(5000, -1))
        assert not torch.equal(masks.masked[0::2], masks.masked[1::2])  # chosen and rejected differ
    assert all(1.1 * a < b for a, b in itertools.pairwise(variance))


def full_graph_loss(model, batch, masks, ref, args):
    """The loss written a second time, on one graph. A block model sees its last block whole, masked
    behind the answer.
    """
    rows = [(prompt, answer) for prompt, *answers in PAIRS for answer in answers]
    answers = torch.zeros_like(batch.answer_mask)
    for answer_mask, (prompt, answer), ids, masked in zip(
        answers, rows, batch.input_ids, masks.masked, strict=True
    ):
        P, stop = len(prompt), len(prompt + answer)
        end = -(-stop // 4) * 4 if model.attention == "block-causal" else stop
        assert ids[:stop].tolist() == prompt + answer and masked[:, stop:end].all()
        assert not masked[:, :P].any() and not masked[:, end:].any()
        answer_mask[P:stop] = True
    # a token's weight: tokens / masked tokens of its block
    position = torch.arange(len(answers[0])) // (4 if model.attention == "block-causal" else 99)
    in_block = (position == position[:, None]).double()
    scored = masks.masked & answers[:, None]
    weights = scored * (answers.double() @ in_block)[:, None] / (scored.double() @ in_block)
    drawn = vars(batch) | {"masked": masks.masked, "weights": weights.nan_to_num()}
    drawn = SimpleNamespace(**drawn, targets=None, temperature=1.0)
    elbos = (drawn.weights * naive_logps(model, drawn)).sum(2).mean(1)
    margins = (elbos - ref.mean(1)).view(-1, 2)
    loss = torch.log1p(torch.exp(-args.beta * (margins[:, 0] - margins[:, 1]))).mean()
    return loss - args.sft_coef * elbos[::2].sum() / sum(len(chosen) for _, chosen, _ in PAIRS)


@families
def test_the_gradient_is_that_of_the_full_graph(one_rank, family):
    """1e-10 in fp64, for micro-batches of any number of whole pairs; memory of a micro-batch,
    gradients reduced once.
    """
    model, args = tiny_model(family), args_of(masks_per_timestep=2, mc_num=2)

    def step():
        model.zero_grad()
        metrics = vrpo.backward(model, batch, masks, ref, args)
        return gradient(model), metrics

    batch = batch_of(model, args)
    masks = vrpo.sample_masks(batch, args)
    # draws do not depend on the rank that holds a pair, or on the lengths of others
    narrow = vrpo.sample_masks(batch_of(model, args, PAIRS[2:], 2), args).masked
    assert torch.equal(narrow, masks.masked[4:, :, : narrow.shape[2]]) and narrow.shape[2] < 16
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


@pytest.mark.parametrize("family, world_size", [("sdar", 4), ("llada", 2)])
def test_held_out_pairs_are_scored_on_fixed_draws(run_ranks, family, world_size):
    """Seven pairs on 2 and 4 ranks against one pair after the other."""

    def body(rank, ranks):
        args = args_of(micro_batch_size=3, seed=3)
        pairs = [*PAIRS, *((prompt, rejected, chosen) for prompt, chosen, rejected in PAIRS[1:])]
        model, reference, prefix = tiny_model(family), tiny_model(family, 1), "held"
        drawn = vrpo.held_out_draws(pairs, args, model, reference, CPU)
        got = vrpo.held_out_metrics(model, *drawn, prefix, args)
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

RUN = EVERY | ANSWERS | {"max_steps": 1, "mc_num": 2, "micro_batch_size": 8}


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
    assert "5 rows to train on, " in said and "\n  dropped: 4 ask what the run" in said
