"""EBPO against enumeration, block by block, and counts of the released code; its clip:
test_methods.py.
"""

import itertools

import pytest
import torch
from oracles import exact_elbo, made_batch, tiny_model

from algos import ebpo

pytestmark = pytest.mark.usefixtures("one_rank")

PROMPT, COMPLETION = [4, 1, 2, 3, 0, 1], [2, 0, 3, 1, 4, 0, 2, 2, 5]
BLOCKS = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3])  # the EOS ends the third one early


def batch_of(u, noise):
    """One completion for each u [n], with noise [n, 4] in every block; the sampler went on."""
    n = len(u)
    ids = torch.tensor(PROMPT + COMPLETION + [0] * 3).expand(n, -1)
    c = (torch.arange(12) < 9).expand(n, -1)
    batch = made_batch(ebpo, ids, c, BLOCKS.expand(n, -1))
    level, column = torch.where(torch.arange(18) == 6, u[:, None], 0.99), torch.arange(18) % 4
    draws = {"level": level, 0: noise[:, column], 1: noise.flip(1)[:, column]}
    batch.uniform = lambda iteration, key: draws[key]
    return batch


def test_each_block_is_unbiased():
    """All levels and orders of noise, for each block of each draw: prompt tokens in the first, a
    last one cut by the EOS. The mean is the ELBO over all orders.
    """
    model, args = tiny_model(), ebpo.Args(mc_num=2)
    orders = torch.tensor(list(itertools.permutations([0.1, 0.3, 0.5, 0.7])))
    u = ((torch.arange(12) + 0.5) / 12).double().repeat_interleave(24)  # counts change at 1/12
    rows = ebpo.sample_masks(batch_of(u, orders.repeat(12, 1)), 0, args)
    assert not rows.masked[..., :6].any() and rows.masked[..., 15:].all()
    with torch.no_grad():
        logps = ebpo.draw_logps(model, rows)
    terms = rows.weights.double() * logps  # [288, 2, 12]
    ends = [0.0] + [exact_elbo(model, PROMPT, COMPLETION[:end]) for end in (2, 6, 9)]
    for block, want in enumerate(torch.tensor(ends).double().diff()):
        got = terms[..., BLOCKS == block].sum(2)
        assert (got.std(0) > 0.01).all()
        torch.testing.assert_close(got.mean(0), want.expand(2), atol=1e-6, rtol=0)
    whole = ebpo.estimate_logps(logps, rows, args)
    assert whole.mean().item() == pytest.approx(ends[-1], abs=1e-5)


def test_counts_of_the_released_code():
    """_forward_process_ebpo of yjyddq/DARE 83ae8a3 for 6 + 9 tokens, two draws, offset 0.35."""
    batch = batch_of(torch.tensor([0.35]).double(), torch.tensor([[0.4, 0.1, 0.3, 0.2]]))
    chosen = ebpo.sample_masks(batch, 0, ebpo.Args(mc_num=2)).weights[0] != 0
    counts = [[int(draw[BLOCKS == b].sum()) for b in range(3)] for draw in chosen]
    assert counts == [[1, 3, 3], [2, 1, 1]]
    # tokens of least noise: of .4 .1 .3 .2 three, then of .2 .3 .1 .4 one
    assert chosen[:, 2:6].tolist() == [[False, True, True, True], [False, False, True, False]]
