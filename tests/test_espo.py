"""ESPO against enumeration; the law of its masks and released values: test_methods.py."""

import math

import pytest
import torch
from oracles import OneBlock, made_batch, made_rows
from test_methods import families

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


def test_pairs_are_stratified():
    """t differs by 1 / M of pairs."""
    c = torch.ones(4, 4000, dtype=torch.bool)
    masked = espo.sample_masks(made_batch(espo, c.long(), c), 0, espo.Args()).masked
    apart = (masked[:, 0].double().mean(1) - masked[:, 2].double().mean(1)).abs()
    assert ((apart - 0.5).abs() < 0.06).all()
