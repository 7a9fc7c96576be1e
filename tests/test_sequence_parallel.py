"""--sequence-parallel N: ranks that share the tokens of their rows compute what one rank does.

Whole scripts are in test_scripts.py.
"""

import pytest
import torch
from oracles import A2D
from test_models import exits_with_one_line, ragged

from distributed import sequence as sequence_parallel
from distributed.groups import all_reduce, maximum, rank_share
from distributed.sequence import (
    check_heads,
    data_rank,
    form_groups,
    total,
)
from models import load_model
from models.tiny import TINY_CONFIGS, random_model

# ranks, of a group; 4 query heads over 2 (LLaDA 4), so that groups of 4 repeat them
GRID = [(2, 2), (4, 4), pytest.param(4, 2, marks=pytest.mark.full)]


def scores(model, batch, documents):
    """-> log-probabilities and entropies, and the gradient of a weighted sum of them"""
    model.zero_grad()
    values = torch.stack(model.logps(*batch, temperature=0.7, entropy=True, document_ids=documents))
    (values * torch.arange(values.numel()).view(values.shape).sin()).sum().backward()
    return values.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("ranks, N", GRID)
def test_groups_score_rows_and_add_up_gradients_as_one_rank(run_ranks, ranks, N):
    """Ragged rows with holes, some draws without a scored token; packed documents under
    checkpointing: 1e-12 in fp64. 25 columns do not divide.
    """

    def body(rank, world_size):
        for config in (TINY_CONFIGS | A2D).values():
            model = random_model(config).double()
            packed = torch.arange(25).expand(4, 25) // 9
            for side, documents in ("scattered", None), ("left", packed):
                batch = ragged([23, 1, 9, 16], side, T=25, seed=rank // N)
                model.activation_checkpointing = documents is not None
                form_groups(1, 1)
                values, gradient = scores(model, batch, documents)
                form_groups(N, ranks)
                own, part = scores(model, batch, documents)
                torch.testing.assert_close(own, values, atol=1e-12, rtol=0)
                torch.distributed.all_reduce(part, group=sequence_parallel.GROUP)
                torch.testing.assert_close(part, gradient, atol=1e-12, rtol=1e-10)

    run_ranks(ranks, body)


def test_ranks_that_share_rows_count_once(run_ranks):
    def body(rank, world_size):
        form_groups(2, 4)
        assert all_reduce({"a": rank // 2 + 1, "b": torch.tensor(0.5)}) == {"a": 3.0, "b": 1.0}
        assert maximum(rank) == 3
        assert rank_share(6, "--batch-size", data_rank()) == range(rank // 2 * 3, rank // 2 * 3 + 3)
        assert rank_share(4, "--prompts-per-step") == range(rank, rank + 1)
        with exits_with_one_line("--prompts-per-step 6 does not divide by 4"):
            rank_share(6, "--prompts-per-step")
        x = torch.zeros(4, requires_grad=True)
        y = total(x + (torch.arange(4) == rank) * 7.0)
        assert y.tolist() == [7.0 * (i // 2 == rank // 2) for i in range(4)]
        (y * torch.arange(4)).sum().backward()
        assert x.grad.tolist() == [0, 1, 2, 3]

    run_ranks(4, body)


def test_numbers_that_do_not_divide_are_refused(monkeypatch):
    monkeypatch.setattr(sequence_parallel, "sequence_rank", lambda: (0, 8))
    with exits_with_one_line("--sequence-parallel 8 .* query heads of the model, 4: use 1, 2, 4"):
        load_model("tiny-sdar")
    monkeypatch.setattr(sequence_parallel, "sequence_rank", lambda: (0, 4))
    check_heads(load_model("tiny-sdar").config)
