"""VRPO against brute force: the loss and its gradient on a full graph, the estimator by
enumeration, held-out pairs.
"""

from types import SimpleNamespace

import pytest
import torch
from golden_runs import ANSWERS, EVERY, rows_of, run_script
from oracles import (
    EOS,
    gradient,
    made_batch,
    naive_logps,
    relative,
    tiny_model,
    updated,
)
from test_evals import write

from algos import vrpo
from evals import load_task
from run import problems

PAIRS = [
    ([1, 2, 3], [4, 0, 2, 1, EOS], [2, EOS]),
    ([4, 1, 2, 3, 0], [3, EOS], [1, 1, 0, 2, 4, 3, 0, EOS]),
    ([2, 2], [0, 1, EOS], [0, 4, EOS]),
    ([3, 1, 0, 0], [1, 2, 3, 4, 0, EOS], [3, EOS]),
]
CPU = torch.device("cpu")


def args_of(**fields):
    return vrpo.Args(**{"batch_size": 4, "mc_num": 2, "micro_batch_size": 64} | fields)


def test_the_plan_counts_the_padding_of_pairs(monkeypatch):
    """The longest prompt may stand beside the longest answer in a forward, as [P | L] columns."""
    monkeypatch.setattr(problems, "fit", lambda model, args, lengths, *_: lengths.sum(1).max())
    rows = SimpleNamespace(lengths=torch.tensor([[40, 5, 3], [5, 2, 41]]))
    assert problems.HeldOut.fit(SimpleNamespace(splits={}), rows, None, args_of()) == 81


def test_masks_of_a_timestep_hide_equally_many():
    """Chosen and rejected get masks of their own, as do the uses of an answer."""
    batch = made_batch(torch.zeros(500, 8).long(), torch.ones(500, 8).bool())
    args = args_of(mc_num=2, masks_per_timestep=2)
    masks, other = (vrpo.sample_masks(batch, use, args).masked for use in ("masks", "ref"))
    counts = masks.sum(2).view(500, 2, 2)
    assert torch.equal(counts[..., 0], counts[..., 1])
    assert (counts.diff(dim=1).abs() == 4).all()  # stratified: half of the 8 tokens apart
    for one, two in (masks, other), (masks[::2], masks[1::2]), masks.view(500, 2, 2, 8).unbind(2):
        assert (one != two).any((1, 2)).float().mean() > 0.9


def full_graph_loss(model, drawn, args):
    """The loss and its metrics written a second time, on one graph. A block model sees its last
    block whole, masked behind the answer.
    """
    n = 4 if model.attention == "block-causal" else 1
    answers, L = drawn.completion_mask, drawn.weights.shape[2]
    rows = [(prompt, answer) for prompt, *both in PAIRS for answer in both]
    for mask, ids, valid, masked, (prompt, answer) in zip(
        answers, drawn.input_ids, drawn.valid_mask, drawn.masked, rows, strict=True
    ):
        whole = len(prompt + answer)
        assert ids[valid][:whole].tolist() == prompt + answer
        assert valid.sum() == whole + -whole % n and mask.sum() == len(answer)
        assert mask[: len(answer)].all() and not masked[:, :-L].any()
        assert masked[:, -L:][:, ~mask].all()
    # a token's weight: tokens / masked tokens of its block
    position = drawn.valid_mask.cumsum(1)[:, None, -L:] - 1
    block = position // 4 * (n > 1)
    in_block = (block == block.mT).double()  # [B, L, L]
    scored = (drawn.masked[..., -L:] & answers[:, None]).double()
    weights = scored * (answers[:, None].double() @ in_block) / (scored @ in_block)
    drawn.weights = weights.nan_to_num().float()
    elbos, ref = (drawn.weights * naive_logps(model, drawn)).sum(2).mean(1), drawn.ref
    rewards = args.beta * (elbos - ref)
    chosen, rejected = rewards.view(-1, 2).T
    margin = chosen - rejected
    dpo = torch.log1p(torch.exp(-margin)).mean()
    sft = -elbos[::2].sum() / sum(len(answer) for _, answer, _ in PAIRS)
    return {
        "loss/total": dpo + args.sft_coef * sft,
        "loss/dpo": dpo,
        "loss/sft": sft,
        "reward/accuracy": (margin > 0).double().mean(),
        "reward/margin": margin.mean(),
        "reward/chosen": chosen.mean(),
        "reward/rejected": rejected.mean(),
    }


@pytest.mark.parametrize("family", ["sdar", "llada", "dream"])
def test_the_gradient_is_that_of_the_full_graph(one_rank, family):
    """1e-10 in fp64, for micro-batches of any number of whole pairs."""
    model, args = tiny_model(family), args_of(masks_per_timestep=2)
    batch = vrpo.make_batch(PAIRS, 0, args, model, 5, CPU)
    rows = vrpo.sample_masks(batch, "masks", args)
    # draws do not depend on the rank that holds a pair, or on the lengths of others
    part = vrpo.make_batch(PAIRS[2:], 2, args, model, 5, CPU)
    narrow = vrpo.sample_masks(part, "masks", args).weights
    assert torch.equal(narrow, rows.weights[4:, :, : narrow.shape[2]])
    assert len(part.input_ids[0]) < len(batch.input_ids[0])
    rows.ref = vrpo.elbo_values(tiny_model(family, 1), rows, args)
    want = full_graph_loss(model, rows.select(slice(None)), args)
    grads = gradient(model, want["loss/total"])
    for args.micro_batch_size in (64, 24, 17, 8):
        metrics, got = updated(vrpo, model, rows, args)
        assert relative(got, grads) < 1e-10
        found = {name: metrics[name] for name in want}
        assert found == pytest.approx({name: x.item() for name, x in want.items()}, rel=1e-9)


@pytest.mark.parametrize("family, world_size", [("sdar", 4), ("llada", 2)])
def test_held_out_pairs_are_scored_on_fixed_draws(run_ranks, family, world_size):
    """Seven pairs on 2 and 4 ranks against one pair after the other."""

    def body(rank, ranks):
        args, margins = args_of(mc_num=4, micro_batch_size=3, seed=3), []
        pairs = [*PAIRS, *((prompt, rejected, chosen) for prompt, chosen, rejected in PAIRS[1:])]
        model, reference = tiny_model(family), tiny_model(family, 1)
        drawn = vrpo.held_out_draws(pairs, args, model, reference, CPU)
        got = vrpo.held_out_metrics(model, drawn, "held", args)
        for number, pair in enumerate(pairs):
            batch = vrpo.make_batch([pair], number, args, model, -1, CPU)
            rows = vrpo.sample_masks(batch, "held", args)
            values = [vrpo.elbo_values(m, rows, args) for m in (model, reference)]
            margins.append(-0.2 * (values[0] - values[1]).diff().item())
        assert min(margins) < 0 < max(margins)
        wins = sum(m > 0 for m in margins)
        want = {"reward/held_accuracy": wins / 7, "reward/held_margin": sum(margins) / 7}
        assert got == pytest.approx(want, rel=1e-9)

    run_ranks(world_size, body)


def test_what_the_run_is_scored_on_is_not_trained_on(warm, tmp_path, capfd):
    """Neither problems nor held-out pairs of either split: one training pair asks each of them,
    five are new.
    """
    task, prompts = load_task("countdown"), {"train": [f"{i}+1" for i in range(5)]}
    for split in ("validation", "test"):
        prompts[split] = [f"held out for {split}"]
        prompts["train"] += prompts[split] + [task.prompt(task.load(split)[0])[-1]["content"]]
    for split, texts in prompts.items():
        pairs = [{"prompt": text, "chosen": "1", "rejected": "2"} for text in texts]
        write(tmp_path / f"{split}.jsonl", pairs)
    how = EVERY | ANSWERS | {"max_steps": 1, "mc_num": 2, "micro_batch_size": 8}
    directory = run_script("vrpo", how | {"data": str(tmp_path)}, 1, tmp_path / "run")
    assert "reward/test_accuracy" in rows_of(directory)[-1]
    said = capfd.readouterr().out
    assert "5 rows to train on, " in said and "\n  dropped: 4 ask what the run" in said
