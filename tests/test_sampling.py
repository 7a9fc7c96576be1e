"""rollout/sampling.py: keyed numbers against Python integers and golden values, draws against the
softmax; on CUDA the Triton kernels against both."""

import itertools
import math

import pytest
import torch
from test_samplers import uniform

from rollout.sampling import keyed_uniform, sample_categorical

U_MAX, INF = 1 - 2.0**-53, math.inf
# The stream is a contract: recorded runs repeat only while these numbers stay.
GOLDEN = [
    ((0,), "0x1.c4415072f63b9p-1"),  # SplitMix64 from seed 0 starts with 0xE220A8397B1DCDAF
    ((42, 0, 0, 0, "token"), "0x1.7f23f43a94e98p-3"),
    ((42, 0, 0, 0, "order"), "0x1.226c1506edecep-2"),
    ((43, 0, 0, 0, "token"), "0x1.324a43f661286p-2"),
    ((7, 123456789, 255, 3, "order"), "0x1.8eed2a0199e9bp-1"),
    ((-1, 2**62, -(2**63), 2**63 - 1), "0x1.959b06249052cp-3"),
]


def test_keyed_uniform():
    """Against Python's integers: golden values, a grid of keys, any layout."""
    for key, value in GOLDEN:
        first = torch.tensor([key[0]])
        assert uniform(*key).hex() == value == keyed_uniform(first, *key[1:]).item().hex()
    a, b = torch.arange(-1, 2), torch.arange(5)
    got = keyed_uniform(a[:, None], b, 2, "token")
    assert got.dtype == torch.float64
    assert got.tolist() == [[uniform(x, y, 2, "token") for y in range(5)] for x in range(-1, 2)]
    assert torch.equal(keyed_uniform(-1, b, 2, "token"), got[0])
    with pytest.raises(AssertionError, match="would share a key"):
        keyed_uniform(b, "sequence")


def edges(draw, device="cpu"):
    """What must hold of draws on any logits, for the plain code and the kernels."""
    u = lambda *values: torch.tensor(values, dtype=torch.float64, device=device)
    rows = torch.tensor([
        [-INF, -INF, 0.0, 1.0, -INF, 2.0, -INF, -INF],
        [1e30, -1e30, 0.0, -INF, -INF, -INF, -INF, -1e30],
    ], device=device)  # fmt: skip
    for number, temperature in itertools.product((0.0, 2.0**-53, 0.5, U_MAX), (0.05, 1.5)):
        tokens, logps = draw(rows, u(number, number), temperature)[:2]
        assert rows.gather(1, tokens[:, None]).min() > -1e3 and logps.min() > -100
    # u * total may round up to the total; the draw must not
    wide = 5 * torch.randn(2000, 60, generator=torch.Generator().manual_seed(1)).to(device)
    wide[:, 50:] = -INF
    assert draw(wide, u(*[U_MAX] * 2000), 1.0)[0].max() < 50
    # mass 1e-9 behind a peak is reached, which an fp32 distribution function or Gumbel noise misses
    tail = torch.full((2, 1001), -math.log(1e12), device=device)
    tail[:, 0] = 0.0
    tokens, _ = draw(tail, u(1 - 0.75e-9, 1 - 0.25e-9), 1.0)[:2]
    assert abs(tokens[0] - 250) < 3 and abs(tokens[1] - 750) < 3
    # broken logits come back as a log-probability that is not finite, other rows as they are
    for bad, temperature in itertools.product((math.nan, INF), (0, 0.7)):
        broken = torch.zeros(2, 5, device=device)
        broken[1, 3] = bad
        tokens, logps = draw(broken, u(0.5, 0.5), temperature)[:2]
        assert logps[0].isfinite() and not logps[1].isfinite() and (tokens < 5).all()
    tokens, _ = draw(torch.tensor([[1.0, 3.0, 3.0]], device=device), u(0.9), 0)[:2]
    assert tokens.tolist() == [1]  # of equals the first


def test_draws_stay_inside_the_support():
    edges(sample_categorical)
    half = sample_categorical(torch.zeros(1, 7).bfloat16(), torch.tensor([0.5]).double())[1]
    assert half.dtype == torch.float32


@pytest.mark.cuda
def test_the_kernels_draw_the_same():
    """Keyed numbers bit for bit; tokens unless u is within rounding of an edge of its bin."""
    from kernels.sampling_triton import sample_fused

    to = lambda x: x.cuda() if isinstance(x, torch.Tensor) else x
    key = (9, "masks", torch.arange(5)[:, None], 2**63 + 5, torch.arange(-4, 300))
    assert torch.equal(keyed_uniform(*map(to, key)).cpu(), keyed_uniform(*key))
    edges(sample_fused, "cuda")
    generator = torch.Generator().manual_seed(0)
    for V, dtype in ((151936, torch.bfloat16), (5000, torch.float32), (7, torch.float16)):
        logits = (4 * torch.randn(64, V, generator=generator)).to(dtype)
        u = keyed_uniform(9, torch.arange(64))
        for temperature in (0, 0.3, 1.0):
            tokens, logps, entropy = (
                x.cpu() for x in sample_fused(logits.cuda(), u.cuda(), temperature)
            )
            p = (logits.double() / (temperature or 1)).softmax(-1)
            torch.testing.assert_close(
                logps.double(), p.log().gather(1, tokens[:, None])[:, 0], atol=2e-5, rtol=1e-5
            )
            torch.testing.assert_close(
                entropy.double(), torch.special.entr(p).sum(-1), atol=1e-4, rtol=1e-5
            )
            if temperature == 0:
                assert torch.equal(tokens, logits.float().argmax(-1))
                continue
            cdf, slack = p.cumsum(-1), 1e-6 + 2**-23 * logits.abs().max().item() / temperature
            high = cdf.gather(1, tokens[:, None])[:, 0]
            low = high - p.gather(1, tokens[:, None])[:, 0]
            assert (low - slack <= u).all() and (u <= high + slack).all()
