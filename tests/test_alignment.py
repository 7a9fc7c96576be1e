"""bench/alignment.py: the cosine of two expectations, from noisy draws of them."""

import torch

from bench.alignment import cosine, noise_scale

N, P, REPEATS = 16, 200, 200


def draws(mean, noise, seed):
    """`noise`: its length over that of the mean. -> [REPEATS, N, P]"""
    generator = torch.Generator().manual_seed(seed)
    return mean + noise * mean.norm() / P**0.5 * torch.randn(REPEATS, N, P, generator=generator)


def test_the_cosine_of_noisy_gradients_is_that_of_their_means():
    """Also where a block is half noise and both share it. The means' own cosine would be lower."""
    a, b = torch.zeros(2, P)
    a[0], b[0], b[1] = 1.0, 1.8, 2.4  # cosine 0.6
    x, y, same = draws(a, 1.0, 0), draws(b, 1.0, 1), draws(a, 1.0, 2)
    y += 2 * (x - a)  # the same rollouts
    for other, want in ((y, 0.6), (same, 1.0), (-same, -1.0)):
        found, errors = torch.tensor([cosine(*pair) for pair in zip(x, other, strict=True)]).T
        spread = found.std()
        assert abs(found.mean() - want) < 3 * spread / REPEATS**0.5 + 0.01
        assert 0.8 < errors.mean() / spread < 1.5
    scales = [noise_scale(a) for a in draws(b, 3.0, 3)]
    assert abs(sum(scales) / REPEATS - 9) < 1
