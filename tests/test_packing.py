"""Objectives of algos/sft.py against enumeration and official code; packed documents alone."""

from dataclasses import replace

import pytest
import torch
from oracles import EOS, RELEASED, TINY_SDAR, gradient, relative, tiny_model, updated

from algos import sft
from models.tiny import TINY_CONFIGS, random_model
from rollout.sampling import keyed_uniform

pytestmark = pytest.mark.usefixtures("one_rank")


def examples_of(number=7):
    """[(prompt ids, answer ids)] of 0 to 8 and 1 to 15 tokens; without a prompt the first token is
    scored.
    """
    ids = lambda i, n: [(i + j * j) % 5 for j in range(n)]
    return [(ids(i, i % 3 * 4), [*ids(i + 1, 11 * i % 15), EOS]) for i in range(number)]


def args_of(**changes):
    how = {"micro_batch_size": 2, "eos_tail": 5, "max_length": 2048, "group_by_length": False}
    return sft.Args(**how | changes)


def batch_of(examples, args, model, step=0, rank=0, ranks=1):
    return sft.make_batch(examples, args, model, step, rank, ranks, torch.device("cpu"))


@pytest.mark.parametrize("family", ["sdar", "llada2", "llada", "dream"])
def test_packed_documents_are_the_documents_alone(family):
    """Loss and gradients of a step in fp64, whatever the layout of its examples."""
    model, examples = tiny_model(family), examples_of()

    def step(**layout):
        args = args_of(**layout, edit_rate=0.4 * (family == "llada2"))
        batch = batch_of(examples, args, model)
        batch.noise = sft.sample_masks(batch, args, model.objective)
        return len(batch.input_ids), *updated(sft, model, batch, args)

    _, metrics, gradients = step()
    for layout, rows in (
        ({"pack_length": 40}, 3),
        ({"pack_length": 400}, 1),
        ({"group_by_length": True}, 7),
        ({"micro_batch_size": 7}, 7),
    ):
        number, others, got = step(**layout)
        assert number == rows and relative(got, gradients) < 1e-10
        assert others["loss/total"] == pytest.approx(metrics["loss/total"], rel=1e-10)


@pytest.mark.parametrize("pack_length", [0, 48])
def test_rows_hold_every_document_once_and_are_equally_many_on_every_rank(pack_length):
    documents = [(i, *example) for i, example in enumerate(examples_of(40))]
    rows = sft.lay_out(documents, args_of(pack_length=pack_length), 3)
    own = [row for row in rows if row[0][0] >= 0]
    assert sorted(sum(own, [])) == documents and len(rows) % 3 == 0
    fillers = rows[len(own) :]
    assert len(fillers) < 3 and all(len(row) == 1 and not row[0][2] for row in fillers)
    sizes = [sum(len(prompt) + len(answer) for _, prompt, answer in row) for row in own]
    if pack_length:  # no two rows would fit into one
        assert max(sizes) <= pack_length < sum(sorted(sizes)[:2])


def test_tails_belong_to_the_answer():
    """Block models: end tokens fill the last block. Others: 0 to eos_tail, within max_length, each
    row for itself.
    """
    examples = [([1, 2, 3], [4, EOS]), ([1], [2, 3, 4, 0, 1, 2, EOS])]
    batch = batch_of(examples, args_of(), tiny_model())
    assert batch.input_ids.tolist() == [[1, 2, 3, 4] + [EOS] * 4, [1, 2, 3, 4, 0, 1, 2, EOS]]
    assert batch.answer_mask.sum(1).tolist() == [5, 7] and batch.num_tokens == 12
    model, args = tiny_model("llada"), args_of(max_length=9)
    examples = [([1, 2], [3] * n + [EOS]) for n in (1, 4, 6)] * 64
    lengths = [batch_of(examples, args, model, step).valid_mask.sum(1) for step in (0, 0, 1)]
    assert [{*x.tolist()} for x in lengths[0].view(-1, 3).T] == [{*range(4, 10)}, {7, 8, 9}, {9}]
    assert torch.equal(*lengths[:2]) and not torch.equal(*lengths[1:])


def test_an_answer_does_not_see_what_is_behind_it():
    """With all answers masked, the loss of two turns in a row is that of each alone, without the
    tail of the first.
    """
    model, args = tiny_model(), args_of()
    one, other = ([1, 2, 0], [3, EOS]), ([1, 2, 0, 3, EOS, 2, 4, 0, 3, 1], [2, EOS])

    def loss(tail, *examples):
        batch = batch_of(examples, args, model)
        noisy, weights, _ = sft.sample_masks(batch, args, replace(model.objective, t_min=1))
        weights[0, tail:] = 0
        weights = (weights > 0).float()  # they depend on how many answer tokens a block has
        batch.noise = noisy, weights, 1
        return sft.micro_loss(model, (batch, slice(2)), args)[0].item()

    joined = one[0], one[1] + [~token for token in other[0][5:]] + other[1]
    assert loss(99, joined) == pytest.approx(loss(5, one, other), rel=1e-10)


def test_noise_is_stratified_over_the_step_and_keyed_by_the_example():
    model, rows = tiny_model("dream"), [([1, 2, 3, 4], [4] * 400)] * 8

    def noise(*where, **changes):
        args = args_of(eos_tail=0, **changes)
        batch = batch_of(rows, args, model, *where)
        noisy, weights, _ = sft.sample_masks(batch, args, model.objective)
        return noisy == model.mask_token_id, 1 / weights.amax(1)

    masked, t = noise(3)
    torch.testing.assert_close(
        t.sort().values.diff(), torch.full((7,), 0.999 / 8), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(masked.sum(1) / 400, t, atol=0.12, rtol=0)
    assert torch.equal(noise(3, 1, 2)[0], masked[1::2])  # the second of two ranks
    assert (noise(4)[1] != t).all() and (noise(3, seed=1)[1] != t).all()


def test_edited_tokens():
    """A share of what is not masked, which stays as it is, drawn from all other text tokens; their
    part of the loss, from the blocks before and the noisy one.
    """
    model = tiny_model("llada2")
    mask, rows = model.mask_token_id, [([1, 2, 3, 4], [4] * 396)] * 8

    def noise(rate, *where):
        args = args_of(edit_rate=rate)
        batch = batch_of(rows, args, model, 0, *where)
        return batch, *sft.sample_masks(batch, args, model.objective)

    batch, noisy, weights, divisor = noise(0.25)
    masked, edited = noisy == mask, (noisy != mask) & (noisy != batch.input_ids)
    assert torch.equal(masked, noise(0)[1] == mask) and divisor == (masked | edited).sum()
    assert torch.equal(weights, (masked | edited).float()) and not edited[~batch.answer_mask].any()
    assert abs(edited.sum() / (batch.answer_mask & ~masked).sum() - 0.25) < 0.04
    assert {*noisy[edited].tolist()} == {*range(mask)} - {4}
    assert torch.equal(noise(0.25, 1, 2)[1], noisy[1::2])  # the second of two ranks
    one, loss = edited[0].nonzero()[0, 0], weights * edited / divisor
    loss[1:], loss[0, one + 1 :] = 0, 0
    block = slice(one // 4 * 4, one // 4 * 4 + 4)
    seen = torch.cat([batch.input_ids[:1, : block.start], noisy[:1, block]], 1)
    logits = model.logits(seen)[0, one].index_fill(0, torch.tensor(mask), -torch.inf)
    batch.noise = noisy, loss, 1
    got, _ = sft.micro_loss(model, (batch, slice(8)), args_of())
    assert got.item() * divisor == pytest.approx(-logits.log_softmax(0)[4].item(), rel=1e-6)


# --- objectives ----------------------------------------------------------------------------------


def test_two_packed_documents_give_the_loss_of_the_official_sdar_code():
    """JetAstra/SDAR c2041a8, SDARForCausalLM.forward in training mode (transformers 4.52.4, torch
    2.13, CPU, fp64) on the same weights, documents and masks; FlexAttention replaced by SDPA with
    its mask, the Triton loss and norm by their formulas. The official softmax gives the mask token
    a probability, ours 0: model.mask_token_id = [] lets it in."""
    row, model = RELEASED["sft"], random_model(TINY_SDAR | {"num_hidden_layers": 2}).double()
    ids, weights = (torch.tensor(row[name])[None] for name in ("ids", "weights"))
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
        model.model.embed_tokens.weight.mul_(30)
    model.mask_token_id, masked = [], weights > 0
    documents = torch.arange(2).repeat_interleave(torch.tensor(row["lengths"]))[None]
    noisy = torch.where(masked, 257, ids)[:, None]
    logps = model.logps(ids, noisy, masked[:, None], document_ids=documents)[:, 0]
    loss = sft.sft_loss(logps, weights.double(), row["tokens"])
    assert loss.item() == pytest.approx(row["loss"], abs=1e-6)
    model.lm_head.weight.requires_grad_()
    assert gradient(model, loss).norm().item() == pytest.approx(row["norm"], abs=1e-5)


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_the_mean_loss_is_the_mean_cross_entropy(family):
    """For fixed logits, over the noise: per answer (LLaDA) or per token (the others).

    LLaDA2's loss is a ratio, sum over masked tokens / their number: its bias in steps of 8 answers
    is below half a per cent here.
    """
    model, args, losses = random_model(TINY_CONFIGS[family]), args_of(eos_tail=0), []
    examples = [([1, 2], [3] * n) for n in (6, 10, 14, 18, 22, 38, 46, 62)]
    if model.attention == "block-causal":  # an answer of two turns: what is between them is hidden
        examples[0] = [1, 2], [3, 3, 3, ~4, ~4, ~4, 3, 3]
    batch = batch_of(examples, args, model)
    # A cross-entropy for every token, larger in shorter answers: the two means differ.
    ce = keyed_uniform(99, batch.document_ids, batch.position_ids) + 8 / batch.answer_length
    per_answer = (ce * batch.answer_mask / batch.answer_length).sum() / 8
    per_token = ce[batch.answer_mask].mean()
    is_llada = family in ("tiny-llada", "tiny-llada-moe")
    want = (per_answer if is_llada else per_token).item()
    for batch.step in range(1500):
        _, weights, divisor = sft.sample_masks(batch, args, model.objective)
        losses.append(sft.sft_loss(-ce, weights, divisor))
    losses = torch.stack(losses)
    error = 5 * losses.std().item() / len(losses) ** 0.5 + 0.005 * want * (family == "tiny-llada2")
    assert losses.mean().item() == pytest.approx(want, abs=error)
    assert abs(per_answer - per_token) > 2 * error


@pytest.mark.parametrize("pack_length", [0, 32])
def test_context_adaptive_weights_by_pairs(pack_length):
    """w_i = sum over clean j of its document of p (1 - p)^(|i - j| - 1) / 2."""
    model, p = tiny_model("dream"), 0.3
    args = args_of(cart_p=p, pack_length=pack_length, eos_tail=3)
    examples = [([1, 2, 3, 4], [0, 1, 2, 3, 4, 0, 1, EOS]), ([], [1, 2, EOS]), ([1], [2, 3, EOS])]
    batch = batch_of(examples, args, model, 1)
    noisy, weights, divisor = sft.sample_masks(batch, args, model.objective)
    masked = noisy == model.mask_token_id
    assert divisor == masked.sum() > 3 and len(batch.input_ids) == (1 if pack_length else 3)
    clean, document = batch.valid_mask & ~masked, batch.document_ids
    is_near = clean[:, None] & (document[:, None] == document[..., None])  # [B, i, j]
    column = torch.arange(clean.shape[1])
    want = (is_near * p / 2 * (1 - p) ** ((column - column[:, None]).abs() - 1.0)).sum(2) * masked
    torch.testing.assert_close(weights, want, rtol=1e-6, atol=1e-12)
    assert not sft.context_weights(batch.valid_mask, batch, p).any()  # nothing clean: 0, not NaN
