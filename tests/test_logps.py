"""models/logps.py: log-probabilities from the head in pieces, against all logits at once."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.logps import linear_certainty, linear_logps
from rollout.rows import Rows


def naive(hidden, weight, targets, temperature=1.0, banned_id=None):
    """All logits at once, by autograd: (logps, entropies)."""
    logits = hidden @ weight.T / temperature
    if banned_id is not None:
        logits = logits.masked_fill(torch.arange(len(weight)) == banned_id, -1e30)
    log_p = logits.log_softmax(-1)
    logps = log_p.gather(1, targets.view(len(hidden), -1)).view_as(targets)
    return logps, -(log_p.exp() * log_p).sum(-1)


def problem(N, D, V, dtype=torch.float64, banned_id=None, seed=0, k=()):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (N, *k), generator=generator)
    if banned_id is not None:
        targets[targets == banned_id] = (banned_id + 1) % V
    return hidden, weight, targets


def value_and_grads(function, hidden, weight, targets, seed=1, **options):
    logps, entropies = function(hidden, weight, targets, **options)
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(targets.shape, generator=generator, dtype=torch.float64).to(logps.dtype)
    return logps, entropies, *torch.autograd.grad((a * logps).sum(), (hidden, weight))


@pytest.mark.parametrize("shape", [(1, 1, 2), (23, 8, 31), (64, 17, 101)])
@pytest.mark.parametrize("chunk_rows", [1, 7, 1024])
@pytest.mark.parametrize("banned_id", [None, 1])
@pytest.mark.parametrize("k", [(), (3,)])
def test_linear_logps_is_the_log_softmax_with_exact_gradients(shape, chunk_rows, banned_id, k):
    """'log softmax(hidden @ weight.T / temperature)[targets]', 'the entropy', 'Gradients ... are
    exact': fp64, to 1e-12. The likeliest tokens, with theirs.
    """
    for temperature in (0.3, 1.0, 1.7):
        inputs = problem(*shape, banned_id=banned_id, k=k)
        options = dict(temperature=temperature, banned_id=banned_id)
        want = value_and_grads(naive, *inputs, **options)
        got = value_and_grads(linear_logps, *inputs, entropy=True, chunk_rows=chunk_rows, **options)
        for g, w in zip(got, want, strict=True):
            assert g.dtype == torch.float64
            torch.testing.assert_close(g, w, atol=1e-12, rtol=1e-10)
        hidden, weight, targets = inputs  # LoRA freezes the head
        logps = linear_logps(hidden, weight.detach(), targets, chunk_rows=chunk_rows, **options)
        torch.testing.assert_close(logps.sum(), got[0].sum())
        slopes = torch.autograd.grad(naive(*inputs, **options)[0].sum(), hidden)
        torch.testing.assert_close(torch.autograd.grad(logps.sum(), hidden), slopes)
        n = min(shape[2] - 1, 20)  # not the banned one
        logps, ids = linear_logps(hidden, weight, n, chunk_rows=chunk_rows, **options)
        torch.testing.assert_close(logps, naive(hidden, weight, ids, **options)[0])
        others = naive(hidden, weight, torch.arange(shape[2]).expand(len(ids), -1), **options)[0]
        torch.testing.assert_close(logps, others.sort(descending=True)[0][:, :n])


def certainty(hidden, weight, targets, chunk_rows=7, **_):
    """-> log p and the entropy at temperature 0.5 in one sum, 1 where the target is the best"""
    how = {"temperature": 0.5, "banned_id": 1, "entropy": False, "rows": chunk_rows}
    logps, entropies, right = linear_certainty(hidden, weight, targets, **how)
    return logps + 3 * entropies, right


@pytest.mark.parametrize("rows", [1, 7, 99])
def test_linear_certainty_has_exact_gradients(rows):
    inputs = problem(23, 8, 31, banned_id=1)
    got = value_and_grads(certainty, *inputs, chunk_rows=rows)

    def whole(hidden, weight, targets):
        logps, _ = naive(hidden, weight, targets, banned_id=1)
        best = (hidden @ weight.T).index_fill(1, torch.tensor([1]), -99.0).argmax(1)
        return logps + 3 * naive(hidden, weight, targets, 0.5, 1)[1], (best == targets).double()

    torch.testing.assert_close(got, value_and_grads(whole, *inputs), atol=1e-10, rtol=1e-10)


def test_mismatch_of_draws_is_none():
    """Every token of the vocabulary, weighted with its probability: -log p is the entropy."""
    hidden, weight, _ = problem(1, 4, 11)
    values = linear_logps(hidden.expand(11, 4), weight, torch.arange(11), entropy=True)
    p = values[0].detach().exp()
    mismatch = lambda weights: Rows.mismatch(SimpleNamespace(weights=weights), *values)
    sums = mismatch(p)
    torch.testing.assert_close(sums["mismatch/surprisal"], sums["mismatch/entropy"])
    assert sums["mismatch/improbable"] == p[p < 0.05].sum() > 0
    assert mismatch(1 - p)["mismatch/surprisal"] > 1.1 * sums["mismatch/entropy"]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.15)])
def test_linear_logps_in_fp32_whatever_the_inputs(dtype, tolerance):
    """fp32 to 1e-5 of the fp64 value at logits of scale 4; bf16 rounds logits alone."""
    inputs = problem(50, 16, 300, dtype)
    exact = (x.detach().double().requires_grad_() for x in inputs[:2])
    want = value_and_grads(naive, *exact, inputs[2])
    got = value_and_grads(linear_logps, *inputs, entropy=True, chunk_rows=16)
    assert [x.dtype for x in got] == [torch.float32, torch.float32, dtype, dtype]
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, atol=tolerance, rtol=tolerance)


class LargestTensor(TorchDispatchMode):
    """Records how many elements the largest tensor has that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return out


@pytest.mark.parametrize("function, k", [(linear_logps, ()), (linear_logps, (3,)), (certainty, ())])
def test_no_head_holds_more_than_a_chunk_of_logits(function, k):
    """'memory is chunk_rows x V whatever N is', forward and backward: no operation returns a larger
    tensor.
    """
    with LargestTensor() as largest:
        value_and_grads(function, *problem(100, 2, 120, k=k), entropy=True, chunk_rows=8)
        linear_logps(*problem(100, 2, 120)[:2], 3, chunk_rows=8)
    assert largest.numel == 8 * 120
