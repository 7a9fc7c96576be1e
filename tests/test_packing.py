"""Objectives of algos/sft.py against enumeration and official code; packed documents alone."""

import math
from copy import copy
from itertools import product

import pytest
import torch

from algos import sft
from models.tiny import TINY_CONFIGS, TINY_SDAR, random_model
from rollout.sampling import keyed_uniform

FAMILIES = list(TINY_CONFIGS)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """One process without a process group."""
    floats = lambda values: {name: float(value) for name, value in values.items()}
    monkeypatch.setattr(sft, "all_reduce", floats)


def model_of(family):
    """A peaked random model in fp64 with random biases and norms."""
    model = random_model(TINY_CONFIGS[family])
    model.eos_token_ids, model.pad_token_id = [256], 256
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
        for value in model.state_dict().values():
            if value.dim() == 1:
                value.add_(torch.randn(value.shape, generator=generator) * 0.1)
    return model.double()


def examples_of(number=7):
    """[(prompt ids, answer ids)] of 1 to 24 tokens; without a prompt the first token is scored."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda low, high: torch.randint(low, high, (1,), generator=generator).item()
    ids = lambda n: torch.randint(0, 256, (n,), generator=generator).tolist()
    return [(ids(draw(1, 9) if i % 3 else 0), [*ids(draw(0, 15)), 256]) for i in range(number)]


def args_of(**changes):
    defaults = {"batch_size": 7, "micro_batch_size": 2, "eos_tail": 5, "max_length": 32}
    return sft.Args(**(defaults | {"group_by_length": False} | changes))


def batch_of(examples, args, model, step=0):
    return sft.make_batch(examples, args, model, step, 0, 1, torch.device("cpu"))


def step_of(model, args, examples):
    """-> a step's loss and gradients, as `main` makes them"""
    model.zero_grad()
    batch = batch_of(examples, args, model)
    noise, loss = sft.sample_masks(batch, args, model.objective), 0.0
    for i in range(0, len(batch.input_ids), args.micro_batch_size):
        share = sft.micro_loss(model, batch, *noise, slice(i, i + args.micro_batch_size), args)
        share.backward()
        loss += share.item()
    return loss, [p.grad.clone() for p in model.parameters()]


LAYOUTS = {
    "packed": {"pack_length": 40},
    "one row": {"pack_length": 400},
    "grouped": {"group_by_length": True},
    "micro-batches": {"micro_batch_size": 7},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_the_documents_alone(family):
    """Loss and gradients of a step in fp64, whatever the layout of its examples."""
    model, examples = model_of(family), examples_of()
    loss, gradients = step_of(model, args_of(), examples)
    largest = max(gradient.abs().max() for gradient in gradients)
    for layout in LAYOUTS.values():
        other, others = step_of(model, args_of(**layout), examples)
        assert math.isclose(other, loss, rel_tol=1e-10)
        for x, y in zip(others, gradients, strict=True):
            assert (x - y).abs().max() < 1e-10 * largest
    assert len(batch_of(examples, args_of(pack_length=400), model).input_ids) == 1


@pytest.mark.parametrize("pack_length", [0, 48])
def test_rows_hold_every_document_once_and_are_equally_many_on_every_rank(pack_length):
    documents = [(i, prompt, answer) for i, (prompt, answer) in enumerate(examples_of(40))]
    rows = sft.lay_out(documents, args_of(pack_length=pack_length), 3)
    own = [row for row in rows if row[0][0] >= 0]
    assert sorted(sum(own, [])) == documents and len(rows) % 3 == 0
    fillers = rows[len(own) :]
    assert len(fillers) < 3 and all(len(row) == 1 and not row[0][2] for row in fillers)
    sizes = [sum(len(prompt) + len(answer) for _, prompt, answer in row) for row in own]
    if pack_length:  # no two rows would fit into one
        assert max(sizes) <= pack_length
        assert all(a + b > pack_length for i, a in enumerate(sizes) for b in sizes[:i])


# --- objectives ----------------------------------------------------------------------------------


def test_two_packed_documents_give_the_loss_of_the_official_sdar_code():
    """JetAstra/SDAR c2041a8, SDARForCausalLM.forward in training mode (transformers 4.52.4, torch
    2.13, CPU, fp64) on the same weights, documents and masks; FlexAttention replaced by SDPA with
    its mask, the Triton loss and norm by their formulas. The official softmax gives the mask token
    a probability, ours 0: model.mask_token_id = None lets it in."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 256, (1, 28), generator=generator)
    labelled = torch.ones(1, 28, dtype=torch.bool)
    labelled[0, :3] = labelled[0, 12:18] = False
    t = torch.tensor([0.4] * 12 + [0.75] * 16)[None]
    masked = (torch.rand(1, 28, generator=generator) < t) & labelled
    assert masked.nonzero()[:, 1].tolist() == [8, 9, 10, 11, 18, 19, 20, 21, 22, 25, 26, 27]
    model = random_model(TINY_SDAR | {"num_hidden_layers": 2}).double()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
        model.model.embed_tokens.weight.mul_(30)
    model.mask_token_id = None

    def loss_of(*lengths):
        documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
        noisy = torch.where(masked, 257, ids)[:, None]
        logps = model.logps(ids, noisy, masked[:, None], document_ids=documents)[:, 0]
        return sft.sft_loss(logps, masked / t, labelled.sum())

    loss = loss_of(12, 16)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    assert loss.item() == pytest.approx(16.494638259163, abs=1e-6)
    assert norm == pytest.approx(68.412350851422, abs=1e-5)
    assert abs(loss_of(28) - loss) > 0.01  # one long document is something else


@pytest.mark.parametrize("family", FAMILIES)
def test_the_mean_loss_is_the_mean_cross_entropy(family):
    """For fixed logits, over the noise: per answer (LLaDA) or per token (the others).

    LLaDA2's loss is a ratio, sum over masked tokens / their number: its bias in steps of 8 answers
    is below half a per cent here.
    """
    model, args = (
        random_model(TINY_CONFIGS[family]),
        args_of(batch_size=8, max_length=80, eos_tail=0),
    )
    batch = batch_of([([1, 2], [3] * n) for n in (6, 10, 14, 18, 22, 38, 46, 62)], args, model)
    # A cross-entropy for every token, larger in shorter answers: the two means differ.
    ce = (
        keyed_uniform(99, batch.document_ids, batch.position_ids) + 8 / batch.answer_length.double()
    )
    per_answer = (ce * batch.answer_mask / batch.answer_length).sum() / 8
    per_token = ce[batch.answer_mask].mean()
    is_llada = family in ("tiny-llada", "tiny-llada-moe")
    want, losses, batch = per_answer if is_llada else per_token, [], copy(batch)
    for batch.step in range(1500):
        _, weights, divisor = sft.sample_masks(batch, args, model.objective)
        losses.append(sft.sft_loss(-ce, weights, divisor))
    losses = torch.stack(losses)
    error = 5 * losses.std().item() / len(losses) ** 0.5
    error += 0.005 * want.item() * (family == "tiny-llada2")
    assert losses.mean().item() == pytest.approx(want.item(), abs=error)
    assert error < 0.1 * want and abs(per_answer - per_token) > 2 * error


@pytest.mark.parametrize("pack_length", [0, 32])
def test_context_adaptive_weights_by_loops(pack_length):
    """w_i = sum over clean j != i of its document of p (1 - p)^(|i - j| - 1) / 2."""
    model, p = random_model(TINY_CONFIGS["tiny-dream"]), 0.3
    args = args_of(cart_p=p, pack_length=pack_length, eos_tail=3)
    examples = [([1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 256]), ([], [1, 2, 256]), ([1], [2, 3, 256])]
    batch = batch_of(examples, args, model, 1)
    masked, weights, divisor = sft.sample_masks(batch, args, model.objective)
    assert divisor == masked.sum() > 3 and len(batch.input_ids) == (1 if pack_length else 3)
    clean, document = batch.valid_mask & ~masked, batch.document_ids
    for b, i in product(range(len(masked)), range(masked.shape[1])):
        near = [j for j in clean[b].nonzero()[:, 0].tolist() if document[b, i] == document[b, j]]
        want = (
            sum(p * (1 - p) ** (abs(i - j) - 1) / 2 for j in near if i != j) if masked[b, i] else 0
        )
        assert weights[b, i].item() == pytest.approx(want, rel=1e-6, abs=1e-12)
    assert not sft.context_weights(batch.valid_mask, batch, p).any()  # nothing clean: 0, not NaN
