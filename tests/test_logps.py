"""models/logps.py: log-probabilities from the head in pieces, against all logits at once."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.logps import linear_certainty, linear_logps
from rollout.rows import Rows

BANNED = 1  # the mask token


def naive(hidden, weight, targets, temperature=1.0):
    """All logits at once, by autograd: (logps, entropies)."""
    logits = hidden @ weight.T / temperature
    log_p = logits.masked_fill(torch.arange(len(weight)) == BANNED, -1e30).log_softmax(-1)
    logps = log_p.gather(1, targets.view(len(hidden), -1)).view_as(targets)
    return logps, -(log_p.exp() * log_p).sum(-1)


def problem(N, D, V, dtype=torch.float64, k=()):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (N, *k), generator=generator)
    targets[targets == BANNED] = 0
    return hidden, weight, targets


def value_and_grads(function, hidden, weight, targets, *how):
    logps, entropies = function(hidden, weight, targets, *how)
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(targets.shape, generator=generator, dtype=torch.float64).to(logps.dtype)
    return logps, entropies, *torch.autograd.grad((a * logps).sum(), (hidden, weight))


@pytest.fixture
def chunk(monkeypatch, request):
    """So many rows of logits are made at once."""
    monkeypatch.setattr("models.logps.ROWS", request.param)
    monkeypatch.setattr("models.logps.PART", 0)


@pytest.mark.parametrize("shape", [(1, 1, 2), (23, 8, 31), (64, 17, 101)])
@pytest.mark.parametrize("chunk", [1, 7, 1024], indirect=True)
@pytest.mark.parametrize("k", [(), (3,)])
def test_linear_logps_is_the_log_softmax_with_exact_gradients(shape, chunk, k):
    """'log softmax(hidden @ weight.T / temperature)[targets]', 'the entropy', 'Gradients ... are
    exact': fp64, to 1e-12. The likeliest tokens, with theirs.
    """
    for temperature in (0.3, 1.0, 1.7):
        inputs, how = problem(*shape, k=k), (temperature, BANNED)
        want = value_and_grads(naive, *inputs, temperature)
        got = value_and_grads(linear_logps, *inputs, *how, True)
        for g, w in zip(got, want, strict=True):
            assert g.dtype == torch.float64
            torch.testing.assert_close(g, w, atol=1e-12, rtol=1e-10)
        hidden, weight, targets = inputs  # LoRA freezes the head
        logps = linear_logps(hidden, weight.detach(), targets, *how)
        torch.testing.assert_close(logps.sum(), got[0].sum())
        slopes = torch.autograd.grad(naive(*inputs, temperature)[0].sum(), hidden)
        torch.testing.assert_close(torch.autograd.grad(logps.sum(), hidden), slopes)
        n = min(shape[2] - 1, 20)  # not the banned one
        logps, ids = linear_logps(hidden, weight, n, *how)
        torch.testing.assert_close(logps, naive(hidden, weight, ids, temperature)[0])
        others = naive(hidden, weight, torch.arange(shape[2]).expand(len(ids), -1), temperature)[0]
        torch.testing.assert_close(logps, others.sort(descending=True)[0][:, :n])


def certainty(hidden, weight, targets, *_):
    """-> log p and the entropy at temperature 0.5 in one sum, 1 where the target is the best"""
    logps, entropies, right = linear_certainty(hidden, weight, targets, 0.5, BANNED, True)
    return logps + 3 * entropies, right


@pytest.mark.parametrize("chunk", [2, 14, 198], indirect=True)  # and half as many here
def test_linear_certainty_has_exact_gradients(chunk):
    def whole(hidden, weight, targets):
        logps, _ = naive(hidden, weight, targets)
        best = (hidden @ weight.T).index_fill(1, torch.tensor([BANNED]), -99.0).argmax(1)
        return logps + 3 * naive(hidden, weight, targets, 0.5)[1], (best == targets).double()

    got, want = (value_and_grads(function, *problem(23, 8, 31)) for function in (certainty, whole))
    torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-10)


def test_mismatch_of_draws_is_none():
    """Every token of the vocabulary, weighted with its probability: -log p is the entropy."""
    hidden, weight, _ = problem(1, 4, 11)
    others = torch.arange(11)[torch.arange(11) != BANNED]
    values = linear_logps(hidden.expand(10, 4), weight, others, 1.0, BANNED, True)
    p = values[0].detach().exp()
    mismatch = lambda weights: Rows.mismatch(SimpleNamespace(weights=weights), *values)
    sums = mismatch(p)
    torch.testing.assert_close(sums["mismatch/surprisal"], sums["mismatch/entropy"])
    torch.testing.assert_close(sums["mismatch/improbable"], p[p < 0.05].sum())
    assert 0 < sums["mismatch/improbable"] < 1
    assert mismatch(1 - p)["mismatch/surprisal"] > 1.1 * sums["mismatch/entropy"]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.15)])
@pytest.mark.parametrize("chunk", [16], indirect=True)
def test_linear_logps_in_fp32_whatever_the_inputs(dtype, tolerance, chunk):
    """fp32 to 1e-5 of the fp64 value at logits of scale 4; bf16 rounds logits alone."""
    inputs = problem(50, 16, 300, dtype)
    exact = (x.detach().double().requires_grad_() for x in inputs[:2])
    want = value_and_grads(naive, *exact, inputs[2])
    got = value_and_grads(linear_logps, *inputs, 1.0, BANNED, True)
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
@pytest.mark.parametrize("chunk", [8], indirect=True)
def test_no_head_holds_more_than_a_chunk_of_logits(function, k, chunk):
    """'memory is ROWS x V whatever N is', forward and backward: no operation returns a larger
    tensor.
    """
    with LargestTensor() as largest:
        value_and_grads(function, *problem(100, 2, 120, k=k), 1.0, BANNED, True)
        linear_logps(*problem(100, 2, 120)[:2], 3, 1.0, BANNED)
    assert largest.numel == 8 * 120
