"""ESPO against enumeration, the full law of its masks, numbers by hand and the released code."""

import math

import pytest
import torch
from oracles import (
    OneBlock,
    changed,
    gradient,
    made_batch,
    made_rows,
)
from test_methods import (
    TEXT,
    estimates_of,
    families,
    is_uniform,
    tilted,
)

from algos import espo

pytestmark = pytest.mark.usefixtures("one_rank")


@families
def test_a_pair_has_the_mean_of_the_elbo_and_less_variance(family):
    """All 16 parts of a block with their chances, for 625 completions: the ELBO over all orders."""
    space = OneBlock(family)
    table = torch.cat([torch.zeros(1, 625, 4), space.by_mask()]).double()  # [16, 625, 4], by code
    parts = torch.cat([torch.zeros(1, 4).bool(), space.patterns])
    size = parts.sum(1)
    chances = torch.tensor([1 / (5 * math.comb(4, k)) for k in size.tolist()]).double()
    pairs = torch.stack([parts, ~parts], 1).double()  # [16, 2, 4]
    rows = made_rows(espo, pairs * 5 / pairs.sum(2, keepdim=True).clamp(min=1), [1.0] * 16)
    logps = torch.stack([table, table.flip(0)], 1)  # the complement of part i is part 15 - i
    estimates = torch.stack([espo.estimate_logps(y, rows, None) for y in logps.unbind(2)], 1)
    elbo = space.by_order().mean(0)
    torch.testing.assert_close(chances @ estimates, elbo, atol=1e-6, rtol=0)
    one_sided, spread = (rows.weights[:, :1] * table).sum(2), lambda x: chances @ (x - elbo) ** 2
    assert (spread(estimates) < spread(one_sided)).all()
    # the script's own draws: each size as often, all parts of a size alike, these weights
    c = torch.ones(8000, 4, dtype=torch.bool)
    batch = made_batch(espo, torch.zeros(8000, 4).long(), c)
    drawn = espo.sample_masks(batch, 0, espo.Args(mc_num=2))
    for j in (0, 2):
        code = (drawn.masked[:, j] * torch.tensor([8, 4, 2, 1])).sum(1)
        assert torch.equal(drawn.masked[:, j + 1], ~drawn.masked[:, j])
        assert torch.equal(drawn.weights[:, j : j + 2], rows.weights[code].float())
        inner = code[(size[code] > 0) & (size[code] < 4)]
        assert is_uniform(size[inner], 3) and len(inner) == pytest.approx(4800, abs=150)
        assert is_uniform(code[size[code] == 1].log2().long() + 1, 4)


def test_pairs_are_stratified():
    """t differs by 1 / M of pairs."""
    c = torch.ones(4, 4000, dtype=torch.bool)
    masked = espo.sample_masks(made_batch(espo, c.long(), c), 0, espo.Args()).masked
    apart = (masked[:, 0].double().mean(1) - masked[:, 2].double().mean(1)).abs()
    assert ((apart - 0.5).abs() < 0.06).all()


def test_ratio_per_token_and_k2_of_the_whole_elbo():
    """L = 4 and 2 tokens, both advantages, clip of either side; one term of either is by hand."""
    weights = torch.tensor([[[1.0, 1, 1, 1]], [[1, 1, 0, 0]]])

    def loss(new, A, ref=(0.0, 0.0), **settings):
        rows = changed(made_rows(espo, weights, A), weights=weights)
        new = torch.tensor(new, dtype=torch.float64, requires_grad=True)
        old, ref = torch.zeros(2).double(), torch.tensor(ref).double()
        value, metrics = espo.policy_loss(new, old, ref, rows, espo.Args(**settings))
        return value.item(), torch.autograd.grad(value, new)[0].tolist(), metrics

    value, slope, _ = loss([0.4, -0.4], [1.0, 1.0], epsilon=0.15, beta=0.0)
    assert value == pytest.approx(-(math.exp(0.1) + math.exp(-0.2)) / 2)
    assert slope == pytest.approx([-math.exp(0.1) / 8, -math.exp(-0.2) / 4])
    value, slope, metrics = loss([0.8, -0.8], [1.0, -1.0], epsilon=0.15, beta=0.0)
    assert value == pytest.approx(-(1.15 - 0.85) / 2) and slope == [0, 0]
    assert metrics["policy/clip_frac"] == 1
    value, slope, _ = loss([0.0, 0.0], [0.0, 0.0], (1.0, 3.0), beta=0.5)
    assert value == pytest.approx(0.5 * (1 / 8 + 9 / 4) / 2)
    assert slope == pytest.approx([-0.5 / 8, -0.5 * 3 / 4])
    # at the old policy the gradient is -A / L whatever epsilon is, 0 included
    for epsilon in (0.0, 0.2):
        assert loss([0.0, 0.0], [2.0, -3.0], epsilon=epsilon)[1] == pytest.approx([-0.25, 0.75])


DRAWS = [["010000010000", "000001000000"], ["110100111101", "000011111111"]]


def test_a_tiny_llada_equals_the_released_code():
    """compute_loss and its backward of ML-GSAI/ESPO b5f2dac with two draws of its forward_process
    (seeds 3, 5; DRAWS: their parts), clip and KL active, the mask token left out as in ours."""

    parts = torch.tensor([[[char == "1" for char in draw] for draw in row] for row in DRAWS])
    masked = torch.stack([parts, ~parts], 2).flatten(1, 2)  # [2, 4, 12]
    model = tilted()
    batch = made_batch(espo, TEXT, torch.ones(2, 12).bool(), mask=model.mask_token_id)
    batch.advantages = torch.tensor([-0.5, 1.5])
    weights = masked * 13 / masked.sum(2, keepdim=True)
    rows = espo.Rows(batch, torch.nn.functional.pad(masked, (6, 0)), weights)
    args = espo.Args(epsilon=0.06, beta=0.3)
    values = torch.stack([estimates_of(espo, tilted(x), rows, args) for x in (0, 0.3, -0.2)])
    want = [[-108.6387634, -112.9426041], [-107.3748932, -113.5916519], [-110.254776, -113.2524567]]
    torch.testing.assert_close(values, torch.tensor(want), rtol=2e-6, atol=0)
    _, rows.old, rows.ref = values
    metrics = espo.backward(model, rows, 1.0, args)
    assert metrics["loss/total"].item() == pytest.approx(-0.5397606, abs=1e-5)
    assert metrics["policy/clip_frac"] == 0.5
    assert gradient(model).norm().item() == pytest.approx(53.2208710, rel=1e-5)
