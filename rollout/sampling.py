"""Keyed random numbers and categorical sampling: a draw depends on its own key only, never on the
rest of the batch.
"""

import torch

from models.logps import at_least_fp32


def int64(number):
    """The int64 with the same low 64 bits: torch integers wrap around."""
    return (number + 2**63) % 2**64 - 2**63


GOLDEN, MIX1, MIX2 = map(int64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift_right(x, n):
    """Logical shift: torch's >> keeps the sign."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _splitmix64(x):
    """The finaliser of SplitMix64 (Steele et al. 2014), a bijection of 64-bit integers."""
    x = (x ^ _shift_right(x, 30)) * MIX1
    x = (x ^ _shift_right(x, 27)) * MIX2
    return x ^ _shift_right(x, 31)


def keyed_state(*key, state=0):
    """The state of the generator below after the parts of a key, from `state` on. -> int64"""
    for part in key:
        if isinstance(part, str):
            assert len(part.encode()) <= 7, f"{part}: words with a common start would share a key"
            part = int.from_bytes(part.encode(), "little")
        if not isinstance(part, torch.Tensor):
            part = torch.tensor(int64(part))
        state = _splitmix64((state ^ part) + GOLDEN)
    return state


def keyed_uniform(*key, state=0):
    """Uniform numbers of a counter-based generator: equal keys give equal numbers on every device,
    rank and batch layout.

    key: ints, int64 tensors that broadcast together, and words of up to 7 bytes, which keep the
    streams of different uses apart. state: the `keyed_state` of parts before them. -> fp64 in
    [0, 1) with 53 random bits, of the broadcast shape, on the device of the tensors.
    """
    return _shift_right(keyed_state(*key, state=state), 11).double() * 2.0**-53


def sample_categorical(logits, uniform, temperature=1.0):
    """Draw one token per row by inverting its cumulative distribution.

    logits [N, V] floating, -inf for banned tokens; uniform [N] fp64 in [0, 1); temperature 0 takes
    the argmax. -> tokens [N] int64, logps [N] in at least fp32: log-probability under
    softmax(logits / temperature), the plain softmax at temperature 0; entropies [N] of that
    distribution in nats.

    One 53-bit uniform per row instead of a Gumbel number per entry: low-precision Gumbel noise cuts
    the upper tail off (24 bits cannot exceed 16.6), which lowers the effective temperature of large
    vocabularies.
    """
    logits = logits.to(at_least_fp32(logits))
    if temperature == 0:
        logps = logits.log_softmax(-1)
        tokens = logps.argmax(-1)
    else:
        logps = (logits / temperature).log_softmax(-1)
        cdf = logps.double().exp().cumsum(-1)  # [N, V]
        # less than the total: u <= 1 - 2^-53 cannot round up to it
        target = uniform[:, None] * cdf[:, -1:]
        # the first entry above it has probability > 0
        tokens = torch.searchsorted(cdf, target, right=True)[:, 0]
        # a row with NaN has no such entry; its logp is NaN
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
    entropies = torch.special.entr(logps.exp()).sum(-1)
    return tokens, logps.gather(-1, tokens[:, None])[:, 0], entropies
