"""rollout/sampling.py: keyed uniform numbers, categorical sampling."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rollout.sampling import keyed_uniform, sample_categorical

U_MAX = 1 - 2.0**-53  # the largest number that keyed_uniform can return


def chi_square_z(counts, expected):
    """Standardised chi-square statistic: about N(0, 1) if counts follow expected; cells below 5 are pooled."""
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    small = expected < 5
    if small.any():
        counts, expected = (
            np.append(counts[~small], counts[small].sum()),
            np.append(expected[~small], expected[small].sum()),
        )
        if expected[-1] < 1:  # pooled, and still nothing to test
            counts, expected = counts[:-1], expected[:-1]
    degrees = len(expected) - 1
    return (((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees)




# --- keyed_uniform -----------------------------------------------------------------------------------------------------------

BITS = (1 << 64) - 1


def splitmix64(x):
    """Steele, Lea and Flood 2014, with Python's integers: no wrap-around to get wrong."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & BITS
    return x ^ (x >> 31)


def reference_uniform(*key):
    state = 0
    for part in key:
        part = int.from_bytes(part.encode(), "little") if isinstance(part, str) else part
        state = splitmix64(((state ^ (part & BITS)) + 0x9E3779B97F4A7C15) & BITS)
    return (state >> 11) / 2**53


GOLDEN = [
    (
        (0,),
        "0x1.c4415072f63b9p-1",
    ),  # the first output of SplitMix64 from seed 0 is 0xE220A8397B1DCDAF
    ((42, 0, 0, 0, "token"), "0x1.7f23f43a94e98p-3"),
    ((42, 0, 0, 0, "order"), "0x1.226c1506edecep-2"),
    ((42, 1, 0, 0, "token"), "0x1.39852f048a2d8p-2"),
    ((43, 0, 0, 0, "token"), "0x1.324a43f661286p-2"),
    ((7, 123456789, 255, 3, "order"), "0x1.8eed2a0199e9bp-1"),
    ((-1, 2**62, -(2**63), 2**63 - 1), "0x1.959b06249052cp-3"),
]


@pytest.mark.parametrize("key, value", GOLDEN, ids=[str(key) for key, _ in GOLDEN])
def test_keyed_uniform_golden_values(key, value):
    """The stream is a contract: recorded runs repeat only while these numbers stay."""
    assert reference_uniform(*key).hex() == value
    got = keyed_uniform(*(torch.tensor([part]) if i == 0 else part for i, part in enumerate(key)))
    assert got.dtype == torch.float64 and got.item().hex() == value
    assert keyed_uniform(*key).item().hex() == value


def test_keyed_uniform_equals_the_reference_over_a_grid_of_keys():
    seeds, samples, positions = torch.arange(3), torch.arange(5), torch.arange(4)
    got = keyed_uniform(seeds[:, None, None], samples[:, None], positions, 2, "token")
    want = [
        [[reference_uniform(a, b, c, 2, "token") for c in range(4)] for b in range(5)]
        for a in range(3)
    ]
    assert torch.equal(got, torch.tensor(want, dtype=torch.float64))


KEYS = {  # which part of the key runs
    "seed": lambda i: (i, 5, 3, 1, "token"),
    "sample": lambda i: (42, i, 3, 1, "token"),
    "position": lambda i: (42, 5, i, 1, "token"),
    "step": lambda i: (42, 5, 3, i, "token"),
    "sample and position": lambda i: (42, i // 64, i % 64, 0, "order"),
    "multiples of 2^20": lambda i: (42, i * 2**20, 0, 0, "token"),
    "seed, negative": lambda i: (-i, 0, 0, 0, "token"),
}


@pytest.mark.parametrize("part", KEYS)
def test_keyed_uniform_is_uniform_along_every_part_of_the_key(part):
    """Mean, variance, chi-square in 256 cells, low bits, serial correlation and pairs, each within 4.5 standard errors."""
    n = 1 << 16
    u = keyed_uniform(*KEYS[part](torch.arange(n)))
    assert u.min() >= 0 and u.max() < 1 and len(u.unique()) == n
    x, root = u - 0.5, math.sqrt(n)
    assert abs(x.mean()) * math.sqrt(12) * root < 4.5
    assert abs(x.square().mean() - 1 / 12) * math.sqrt(180) * root < 4.5
    for lag in (1, 2, 64):
        assert abs((x[lag:] * x[:-lag]).mean()) * 12 * root < 4.5, lag
    cells = lambda values, k: np.bincount((values * k).long().numpy(), minlength=k)
    assert abs(chi_square_z(cells(u, 256), np.full(256, n / 256))) < 4.5
    assert (
        abs(chi_square_z(cells((u * 2**40) % 1, 256), np.full(256, n / 256))) < 4.5
    )  # bits 41..48
    pairs = (u[::2] * 16).long() * 16 + (u[1::2] * 16).long()
    assert abs(chi_square_z(np.bincount(pairs.numpy(), minlength=256), np.full(256, n / 512))) < 4.5


def test_these_statistics_see_a_bad_generator():
    """Negative control: a counter without mixing, and one that ignores the key, fail them."""
    n = 1 << 16
    weyl = (torch.arange(n).double() * 0.6180339887498949) % 1
    assert abs(((weyl - 0.5)[1:] * (weyl - 0.5)[:-1]).mean()) * 12 * math.sqrt(n) > 4.5
    assert len(keyed_uniform(torch.zeros(n, dtype=torch.long)).unique()) == 1


@pytest.mark.parametrize("other", [(43, "token"), (42, "order"), (42 + 2**32, "token")])
def test_keyed_uniform_streams_are_independent(other):
    """'short words, which keep the streams of different uses apart', consecutive seeds: no correlation between streams."""
    i = torch.arange(1 << 16)
    a, b = (
        keyed_uniform(42, i, 0, 0, "token") - 0.5,
        keyed_uniform(other[0], i, 0, 0, other[1]) - 0.5,
    )
    assert abs((a * b).mean()) * 12 * math.sqrt(len(i)) < 4.5
    assert not (a == b).any()


def test_keyed_uniform_the_order_of_the_parts_counts():
    """(sample 1, position 2) is not (sample 2, position 1), nor do shifted parts meet: 32^4 keys, no equal numbers."""
    k = torch.arange(32)
    u = keyed_uniform(k[:, None, None, None], k[:, None, None], k[:, None], k)
    assert len(u.unique()) == 32**4


def test_keyed_uniform_does_not_depend_on_the_layout():
    """'equal keys give equal numbers on every ... batch layout'."""
    sample, position = torch.arange(6), torch.arange(9)
    grid = keyed_uniform(1, sample[:, None], position, 0, "token")
    flat = keyed_uniform(
        1,
        sample.repeat_interleave(9),
        position.repeat(6),
        torch.zeros(54, dtype=torch.long),
        "token",
    )
    order = torch.randperm(54, generator=torch.Generator().manual_seed(0))
    shuffled = keyed_uniform(
        torch.tensor(1), sample.repeat_interleave(9)[order], position.repeat(6)[order], 0, "token"
    )
    assert torch.equal(grid.flatten(), flat) and torch.equal(flat[order], shuffled)
    assert keyed_uniform(1, 4, 7, 0, "token") == grid[4, 7]
    assert keyed_uniform(1, torch.empty(0, dtype=torch.long)).shape == (0,)


# --- sample_categorical ------------------------------------------------------------------------------------------------------

ROWS = {
    "peaked": [9.0, 0.0, 2.0, -3.0, 0.5, 8.0, -20.0],
    "flat": [0.0] * 7,
    "usual": [1.0, -1.0, 0.3, 2.0, 0.0, -2.0, 1.4],
    "banned": [float("-inf"), 1.0, float("-inf"), 0.0, 2.0, 0.3, float("-inf")],
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_samples_follow_the_tempered_softmax(row, temperature):
    """Tokens are drawn from softmax(logits / temperature): chi-square with keyed numbers, and within 1 on an even grid."""
    n, logits = 20000, torch.tensor(ROWS[row])
    p = (logits.double() / temperature).softmax(-1).numpy()
    tokens, logps = sample_categorical(
        logits.expand(n, -1), keyed_uniform(3, torch.arange(n)), temperature
    )
    counts = np.bincount(tokens.numpy(), minlength=len(p))
    assert tokens.dtype == torch.int64 and (counts[p == 0] == 0).all()
    assert abs(chi_square_z(counts[p > 0], n * p[p > 0])) < 4.5
    torch.testing.assert_close(
        logps, (logits / temperature).log_softmax(-1)[tokens], atol=1e-6, rtol=1e-6
    )
    grid = (torch.arange(n).double() + 0.5) / n
    tokens, _ = sample_categorical(logits.expand(n, -1), grid, temperature)
    assert np.abs(np.bincount(tokens.numpy(), minlength=len(p)) - n * p).max() <= 1.01


def test_the_chi_square_sees_a_wrong_temperature():
    """Negative control: draws at temperature 1.1 are not draws at temperature 1."""
    n, logits = 20000, torch.tensor(ROWS["usual"])
    tokens, _ = sample_categorical(logits.expand(n, -1), keyed_uniform(3, torch.arange(n)), 1.1)
    assert (
        abs(chi_square_z(np.bincount(tokens.numpy(), minlength=7), n * logits.softmax(-1).numpy()))
        > 4.5
    )


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_a_large_vocabulary(temperature):
    """V = 50,000, flat and peaked rows: every draw is the one of an fp64 distribution function, up to fp32 rounding of it."""
    V, n = 50_000, 40
    generator = torch.Generator().manual_seed(0)
    usual = 3 * torch.randn(V, generator=generator)
    peaked = usual.clone()
    peaked[17] = 60.0
    u = keyed_uniform(9, torch.arange(n))
    for logits in (torch.zeros(V), usual, peaked):
        tokens, logps = sample_categorical(logits.expand(n, -1), u, temperature)
        cdf = (logits.double() / temperature).softmax(-1).cumsum(-1)
        low = torch.where(tokens > 0, cdf[(tokens - 1).clamp(min=0)], 0)
        assert (low - 2e-6 <= u).all() and (u <= cdf[tokens] + 2e-6).all()
        torch.testing.assert_close(
            logps, (logits / temperature).log_softmax(-1)[tokens], atol=2e-6, rtol=1e-6
        )
    assert (
        len(sample_categorical(torch.zeros(V).expand(n, -1), u, temperature)[0].unique()) > 0.95 * n
    )


def test_the_upper_tail_is_not_cut_off():
    """'low-precision Gumbel noise cuts the upper tail off': mass 1e-9 behind a peak is reached, as an fp32 cdf could not."""
    logits = torch.full((1, 1001), -math.log(1e12))
    logits[0, 0] = 0.0  # the tail of 1000 tokens has mass 1e-9 together
    for fraction in (0.25, 0.75):
        token, logp = sample_categorical(
            logits, torch.tensor([1 - 1e-9 * (1 - fraction)], dtype=torch.float64)
        )
        assert abs(token.item() - 1000 * fraction) < 3 and abs(logp.item() + math.log(1e12)) < 1e-4


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, U_MAX])
@pytest.mark.parametrize("temperature", [0.05, 0.3, 1.0, 1.5])
def test_the_ends_of_the_unit_interval_never_draw_a_token_of_probability_zero(u, temperature):
    """u = 0 and u = 1 - 2^-53 at rows that begin and end with banned tokens, and with tokens whose probability underflows."""
    inf = float("inf")
    rows = torch.tensor([
        [-inf, -inf, 0.0, 1.0, -inf, 2.0, -inf, -inf],
        [-inf, -inf, 0.0, -inf, -inf, -inf, -inf, -inf],
        [-9e4, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -9e4],
        [1e30, -1e30, 0.0, -inf, -inf, -inf, -inf, -1e30],
    ])  # fmt: skip
    tokens, logps = sample_categorical(
        rows, torch.full((len(rows),), u, dtype=torch.float64), temperature
    )
    assert rows.gather(1, tokens[:, None]).min() > -1e3 and logps.min() > -100
    p = (rows.double() / temperature).softmax(-1)
    first, last = (
        [int((row > 0).int().argmax()) for row in p],
        [int((row > 1e-15).nonzero().max()) for row in p],
    )
    if u in (0.0, U_MAX):
        assert tokens.tolist() == (first if u == 0 else last)


def test_many_extreme_uniforms_stay_inside_the_support():
    """Random rows whose last tokens are banned: u * total may round up to total, the draw must not."""
    generator = torch.Generator().manual_seed(1)
    logits = 5 * torch.randn(2000, 60, generator=generator)
    logits[:, 50:] = float("-inf")
    tokens, logps = sample_categorical(logits, torch.full((2000,), U_MAX, dtype=torch.float64))
    assert tokens.max() < 50 and logps.isfinite().all()


def test_temperature_zero_takes_the_argmax():
    """'temperature 0 takes the argmax', with the 'plain softmax' as its log-probability, whatever u is."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(30, 11, generator=generator)
    logits[:, 4] = float("-inf")
    for u in (0.0, 0.37, U_MAX):
        tokens, logps = sample_categorical(logits, torch.full((30,), u, dtype=torch.float64), 0)
        assert torch.equal(tokens, logits.argmax(-1))
        torch.testing.assert_close(logps, logits.log_softmax(-1).amax(-1), atol=1e-7, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_precision_of_the_draws(dtype):
    """'logps [N] in at least fp32': half precision logits are raised before the softmax, fp64 stays fp64; no rows, no draws."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 9, generator=generator, dtype=torch.float64).to(dtype)
    tokens, logps = sample_categorical(logits, keyed_uniform(1, torch.arange(40)), 0.8)
    exact = (logits.double() / 0.8).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert logps.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(
        logps.double(), exact, atol=1e-12 if dtype == torch.float64 else 1e-6, rtol=0
    )
    tokens, logps = sample_categorical(logits[:0], torch.empty(0, dtype=torch.float64), 0.8)
    assert tokens.shape == logps.shape == (0,)


@pytest.mark.parametrize("temperature", [0, 0.7, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_come_back_as_a_log_probability_that_is_not_finite(temperature, bad):
    """The engine reports non-finite log-probabilities: a draw must not fail before that, nor leave the vocabulary."""
    logits = torch.zeros(2, 5)
    logits[1, 3] = bad
    tokens, logps = sample_categorical(
        logits, torch.tensor([0.5, 0.5], dtype=torch.float64), temperature
    )
    assert logps[0].isfinite() and not logps[1].isfinite() and ((tokens >= 0) & (tokens < 5)).all()
