"""rollout/sampling.py against fp64: the reference, the chunked algorithm of the Triton kernels, and the kernels where they run.

The kernels need a GPU, or `TRITON_INTERPRET=1 pytest tests/test_sampling.py` where Triton is installed.
"""

import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from rollout.sampling import keyed_uniform, sample_categorical, sample_reference

U_MAX = 1 - 2.0**-53  # the largest number that keyed_uniform can return
INF = float("inf")


def chunked(logits, uniform, temperature=1.0, banned_id=None, chunk=64, group=8):
    """What the kernels do, chunk by chunk: fp32 weights and sums of `group` neighbours, fp64 above."""
    z, scale = logits.float(), 1 / (temperature or 1)
    if banned_id is not None:
        z = torch.where(torch.arange(z.shape[1], device=z.device) == banned_id, -INF, z)
    z = torch.nn.functional.pad(z, (0, -z.shape[1] % chunk), value=-INF).unflatten(
        1, (-1, chunk)
    )  # [N, C, chunk]
    peaks = z.amax(2)
    d = z - peaks.masked_fill(peaks == -INF, 0)[..., None]
    weights = (d * scale).exp()
    groups = weights.unflatten(2, (-1, group)).sum(3).double()
    moments = (weights * d.masked_fill(weights == 0, 0)).sum(2)
    peak = peaks.amax(1)
    offset = (peaks - peak[:, None]).double()
    factor = (offset * scale).exp()
    mass = factor * groups.sum(2)
    total = mass.sum(1)
    moment = (factor * moments + mass * offset.masked_fill(factor == 0, 0)).sum(1)

    def first(hit, mass):
        last = ((mass > 0) * torch.arange(mass.shape[1], device=mass.device)).amax(1)
        return torch.where(hit.any(1), hit.int().argmax(1), last)

    row, prefix, target = torch.arange(len(z), device=z.device), mass.cumsum(1), uniform * total
    hit = peaks == peak[:, None] if temperature == 0 else (mass > 0) & (prefix > target[:, None])
    c = first(hit, mass)
    rest = (target - (prefix - mass)[row, c]) / factor[row, c]
    z, weights, groups = z[row, c], weights[row, c], groups[row, c]
    cdf = (
        (groups.cumsum(1) - groups)[..., None]
        + weights.unflatten(1, (-1, group)).double().cumsum(2)
    ).flatten(1)
    hit = z == peak[:, None] if temperature == 0 else (weights > 0) & (cdf > rest[:, None])
    token = first(hit, weights)
    logps = (z[row, token] - peak).double() * scale - total.log()
    return (
        c * chunk + token,
        logps.float(),
        (1 / total).float(),
        (total.log() - scale * moment / total).float(),
    )


def reference(logits, uniform, temperature=1.0, banned_id=None):
    return sample_reference(logits, uniform, temperature, banned_id, statistics=True)


SAMPLERS, DEVICE = {"reference": reference, "chunked": chunked}, "cpu"
if find_spec("triton") and (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    from kernels.sampling_triton import sample_fused

    SAMPLERS["triton"] = sample_fused
    DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.cuda] if DEVICE == "cuda" else []  # all of them are of `make test-gpu`
each_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)


def interpreted(sampler):
    """It takes 10 ms a row: fewer rows."""
    return DEVICE == "cpu" and sampler is SAMPLERS.get("triton")


def keyed(n, key=0):
    return keyed_uniform(key, torch.arange(n, device=DEVICE))


def rows(V, dtype=torch.float32, seed=0):
    """Flat, usual, peaked at the start, in the middle and at the end, with -inf in whole chunks, one token left."""
    z = 3 * torch.randn(7, V, generator=torch.Generator().manual_seed(seed))
    z[0] = 0
    for n, peak in ((2, 0), (3, V // 2), (4, V - 1)):
        z[n, peak] = 25.0
    z[5, : V // 2], z[5, -V // 5 :] = -INF, -INF
    z[6], z[6, V // 3] = -INF, 1.5
    return z.to(dtype).to(DEVICE)


def exact(logits, temperature, banned_id=None):
    """-> log-probabilities in fp64"""
    z = logits.double()
    if banned_id is not None:
        z[:, banned_id] = -INF
    return (z / (temperature or 1)).log_softmax(-1)


def outside(tokens, uniform, log_p):
    """How far `uniform` is from the bin of the token drawn with it, in probability: 0 inside."""
    p = log_p.exp()
    high = p.cumsum(-1).gather(1, tokens[:, None])[:, 0]
    return torch.maximum(high - p.gather(1, tokens[:, None])[:, 0] - uniform, uniform - high).clamp(
        min=0
    )


@each_sampler
@pytest.mark.parametrize("temperature", [0, 0.3, 1.0, 1.7])
@pytest.mark.parametrize("V", [2, 63, 64, 65, 1000, 9001])
def test_draws_are_those_of_the_exact_distribution(sampler, temperature, V):
    """Each row at many uniform numbers: token by enumeration, log-probability, max-prob, entropy; the banned token never."""
    per_row = 2 if interpreted(sampler) else 12 if V == 9001 else 40
    for dtype in (torch.float32, torch.bfloat16):
        for banned_id in (None, 0, V - 1):
            logits = rows(V, dtype)
            if banned_id is not None:
                logits[6, V // 3 if banned_id else -1] = 1.5  # a token that is left
            logits = logits.repeat_interleave(per_row, 0)
            u = keyed(len(logits), V)
            u[::per_row], u[1::per_row] = 0.0, U_MAX
            log_p = exact(logits, temperature, banned_id)
            allowed = log_p.isfinite().any(1)
            tokens, *values = sampler(logits, u, temperature, banned_id)
            assert tokens.dtype == torch.int64 and [x.dtype for x in values] == [torch.float32] * 3
            tokens, u, log_p, values = (
                tokens[allowed],
                u[allowed],
                log_p[allowed],
                [x[allowed].double() for x in values],
            )
            assert banned_id is None or not (tokens == banned_id).any()
            if temperature == 0:
                assert torch.equal(tokens, log_p.argmax(-1))
            else:
                rounding = 2.0**-23 * logits[logits.isfinite()].abs().max() / temperature
                assert outside(tokens, u, log_p).max() < 1e-6 + (sampler is reference) * rounding
            want = (
                log_p.gather(1, tokens[:, None])[:, 0],
                log_p.amax(-1).exp(),
                torch.special.entr(log_p.exp()).sum(-1),
            )
            for got, value in zip(values, want, strict=True):
                torch.testing.assert_close(
                    got, value, atol=2e-5 if sampler is reference else 3e-6, rtol=1e-6
                )


@each_sampler
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_frequencies_follow_the_tempered_softmax(sampler, temperature):
    """Chi-square of keyed draws, on a peaked, a flat and a partly banned row of several chunks."""
    n = 100 if interpreted(sampler) else 5000
    for logits in rows(150)[[0, 1, 5]]:
        p = exact(logits[None], temperature)[0].exp().cpu().numpy()
        tokens = sampler(logits.expand(n, -1), keyed(n, 3), temperature)[0].cpu().numpy()
        counts, expected = np.bincount(tokens, minlength=150), n * p
        assert (counts[p == 0] == 0).all()
        small = expected < 5
        counts, expected = [np.append(x[~small], x[small].sum()) for x in (counts, expected)]
        z = (((counts - expected) ** 2)[expected > 0] / expected[expected > 0]).sum() - (
            len(counts) - 1
        )
        assert abs(z) / math.sqrt(2 * max(len(counts) - 1, 1)) < 4.5


@pytest.mark.parametrize(
    "sampler", [f for f in SAMPLERS.values() if DEVICE == "cpu" or f is SAMPLERS["triton"]]
)
def test_a_draw_does_not_depend_on_its_neighbours(sampler):
    """Alone, in another order, with another stride: bit-equal. PyTorch's own sums on CUDA are not."""
    logits = torch.cat([rows(1000, seed=seed) for seed in range(3)])
    u = keyed(len(logits), 5)
    whole = sampler(logits, u, 0.8, 7)
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    wide = torch.full((len(logits), 1100), 9.0, device=DEVICE)
    wide[:, :1000] = logits
    assert all(
        torch.equal(a, b) for a, b in zip(sampler(wide[:, :1000], u, 0.8, 7), whole, strict=True)
    )
    again = sampler(logits[order], u[order], 0.8, 7)
    assert all(torch.equal(a, b[order]) for a, b in zip(again, whole, strict=True))
    for n in (0, 9, 20):
        alone = sampler(logits[n : n + 1], u[n : n + 1], 0.8, 7)
        assert all(torch.equal(a[0], b[n]) for a, b in zip(alone, whole, strict=True))
    assert [x.shape for x in sampler(logits[:0], u[:0], 0.8, 7)] == [(0,)] * 4


@each_sampler
def test_the_tail_behind_a_peak_is_reached(sampler):
    """1000 tokens of mass 1e-12 each behind a peak: an fp32 distribution function would end at the peak."""
    logits = torch.full((1, 1001), -math.log(1e12), device=DEVICE)
    logits[0, 0] = 0.0
    for fraction in (0.25, 0.75):
        u = torch.tensor([1 - 1e-9 * (1 - fraction)], dtype=torch.float64, device=DEVICE)
        token, logp, max_prob, entropy = sampler(logits, u)
        assert abs(token.item() - 1000 * fraction) < 40 and abs(logp.item() + math.log(1e12)) < 1e-4
        assert max_prob.item() == 1 and 0 <= entropy.item() < 1e-6


@each_sampler
@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, U_MAX])
@pytest.mark.parametrize("temperature", [0.05, 0.3, 1.0, 1.5])
def test_a_token_without_mass_is_never_drawn(sampler, u, temperature):
    """Rows that begin and end with banned tokens, with weights that underflow, and chunks in between without mass."""
    z = torch.full((5, 400), -INF)
    z[0, [2, 3, 5]] = torch.tensor([0.0, 1.0, 2.0])
    z[1, 399] = 0.0
    z[2] = 0.0
    z[2, [0, 399]] = -9e4
    z[3, :3], z[3, -1] = torch.tensor([1e30, -1e30, 0.0]), -1e30
    z[4, ::129] = torch.tensor([0.0, 0.3, -0.2, 0.1])
    z = z.to(DEVICE)
    tokens, logps, max_probs, entropies = sampler(
        z, torch.full((5,), u, dtype=torch.float64, device=DEVICE), temperature
    )
    assert z.gather(1, tokens[:, None]).min() > -1e3 and logps.min() > -130
    assert entropies.isfinite().all() and (max_probs > 0).all()
    if u == 0:
        assert tokens.tolist() == [2, 399, 1, 0, 0]
    if u == U_MAX:
        assert tokens.tolist() == [5, 399, 398, 0, 387]


@each_sampler
def test_many_extreme_uniforms_stay_inside_the_support(sampler):
    """Random rows whose last tokens are banned: u * total may round up to total, the draw must not."""
    n = 20 if interpreted(sampler) else 200
    logits = 5 * torch.randn(n, 600, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    logits[:, 500:] = -INF
    for u in (0.0, U_MAX):
        tokens, logps, *_ = sampler(
            logits, torch.full((n,), u, dtype=torch.float64, device=DEVICE), 1.0, 499
        )
        assert tokens.max() < 499 and logps.isfinite().all()


@each_sampler
@pytest.mark.parametrize("temperature", [0, 0.7, 1.0])
def test_broken_rows_come_back_with_a_log_probability_that_is_not_finite(sampler, temperature):
    """NaN, +inf, nothing allowed: no error, a token inside the vocabulary, and other rows as they were."""
    logits = rows(300)[1].repeat(5, 1)
    logits[1, 131], logits[2, 7], logits[3], logits[4] = float("nan"), INF, -INF, float("nan")
    tokens, logps, *_ = sampler(
        logits, torch.full((5,), 0.5, dtype=torch.float64, device=DEVICE), temperature
    )
    assert logps.isfinite().tolist() == [True, False, False, False, False]
    assert ((tokens >= 0) & (tokens < 300)).all()


def test_ties_at_temperature_zero_go_to_the_lowest_token():
    logits = torch.zeros(2, 200, device=DEVICE)
    logits[1, [70, 199]] = 1.0
    for sampler in SAMPLERS.values():
        assert sampler(logits, keyed(2), 0)[0].tolist() == [0, 70]


@pytest.mark.parametrize("temperature", [0, 0.6, 1.0])
def test_reference_in_fp64_by_enumeration(temperature):
    """fp64 logits stay fp64: all values to 1e-12 of a loop over the vocabulary."""
    logits, u = rows(40, torch.float64).cpu(), keyed_uniform(2, torch.arange(7))
    tokens, logps, max_probs, entropies = sample_reference(
        logits, u, temperature, 3, statistics=True
    )
    for n, row in enumerate(logits.tolist()):
        weights = [0.0 if v == 3 else math.exp(z / (temperature or 1)) for v, z in enumerate(row)]
        p, token, passed = [w / sum(weights) for w in weights], 0, weights[0] / sum(weights)
        while passed <= u[n]:
            token += 1
            passed += p[token]
        token = p.index(max(p)) if temperature == 0 else token
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        assert tokens[n] == token
        got = torch.stack([logps[n], max_probs[n], entropies[n]]).tolist()
        assert got == pytest.approx([math.log(p[token]), max(p), entropy], rel=1e-12, abs=1e-12)


def test_statistics_do_not_change_the_draw():
    logits, u = rows(500), keyed(7)
    plain, full = (
        sample_categorical(logits, u, 0.9),
        sample_categorical(logits, u, 0.9, statistics=True),
    )
    assert (
        len(plain) == 2
        and len(full) == 4
        and all(torch.equal(a, b) for a, b in zip(plain, full, strict=False))
    )
    logits[:, 11] = -INF
    banned = sample_categorical(rows(500), u, 0.9, banned_id=11)
    assert all(
        torch.equal(a, b) for a, b in zip(banned, sample_categorical(logits, u, 0.9), strict=True)
    )


@pytest.mark.parametrize("fault", ["one group dropped", "the ban forgotten", "fp32 uniform"])
def test_the_comparison_sees_faults(fault):
    """Negative controls of `outside` and of the ban."""
    logits = rows(1000)[1].expand(200, -1)
    u, log_p = keyed(200), exact(rows(1000)[1:2], 1.0, 5).expand(200, -1)
    if fault == "one group dropped":
        damaged = logits.clone()
        damaged[:, 512:520] = -INF
        tokens = chunked(damaged, u, 1.0, 5)[0]
    elif fault == "the ban forgotten":
        logits = logits.clone()
        logits[:, 5] = 8.0
        tokens = chunked(logits, u)[0]
        assert (tokens == 5).any()
    else:
        tokens = chunked(logits, (u * 2**12).floor() / 2**12, 1.0, 5)[0]
    assert outside(tokens, u, log_p).max() > 1e-5


@(lambda test: test if "triton" in SAMPLERS else pytest.mark.cuda(test))
def test_uniform_numbers_of_the_kernel_are_the_plain_ones():
    """Bit for bit: ints and tensors that broadcast, in any place, of either sign."""
    from kernels.sampling_triton import uniform_fused

    g = torch.Generator().manual_seed(0)
    wide = lambda *shape: torch.randint(-(2**63), 2**63 - 1, shape, generator=g)
    for parts in (
        [wide(), wide(5, 1), wide(5, 7), wide(1, 7), 123456789],
        [-(2**63), wide(300), 0],
        [wide(4, 6).t(), 2**63 - 1, wide(6, 1), -1, 3, wide(4)],
        [wide()],
        [wide(0, 3), 1],
    ):
        got = uniform_fused(
            [part.to(DEVICE) if isinstance(part, torch.Tensor) else part for part in parts]
        ).cpu()
        want = keyed_uniform(*parts)
        assert got.dtype == torch.float64 and torch.equal(got, want.expand(got.shape))
        if got.numel() > 1:  # negative control
            assert not torch.equal(got, keyed_uniform(*parts[::-1], 1).expand(got.shape))


def test_triton_is_not_imported_on_cpu():
    """A machine where it cannot be imported samples all the same."""
    code = (
        "import sys, torch; sys.modules['triton'] = None;"
        "import rollout.engine; from rollout.sampling import sample_categorical;"
        "print(*sample_categorical(torch.zeros(1, 4), torch.tensor([0.6]).double(), banned_id=3, statistics=True)[0].tolist());"
        "assert 'kernels.sampling_triton' not in sys.modules"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert out.stdout.strip() == "1", out.stderr
