"""Keyed randomness and categorical sampling: a draw depends on its key alone, never on its neighbours in the batch."""

from importlib.util import find_spec

import torch


def _wrap(constant):
    """An unsigned 64-bit integer as the int64 with the same bits (torch integers wrap around)."""
    return constant - (1 << 64) if constant >= 1 << 63 else constant


GOLDEN, MIX1, MIX2 = _wrap(0x9E3779B97F4A7C15), _wrap(0xBF58476D1CE4E5B9), _wrap(0x94D049BB133111EB)


def _shift_right(x, n):
    """Logical shift: torch's >> keeps the sign."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _splitmix64(x):
    """The finaliser of SplitMix64 (Steele et al. 2014), a bijection of 64-bit integers."""
    x = (x ^ _shift_right(x, 30)) * MIX1
    x = (x ^ _shift_right(x, 27)) * MIX2
    return x ^ _shift_right(x, 31)


def keyed_uniform(*key):
    """Uniform numbers of a counter-based generator: equal keys give equal numbers on every device, rank and batch layout.

    key: ints, int64 tensors that broadcast together (at least one) and words of up to 7 bytes, which keep the streams of
    different uses apart. -> fp64 in [0, 1), broadcast shape, 53 random bits, on the device of the tensors.
    """
    parts = []
    for part in key:
        if isinstance(part, str):
            if len(part.encode()) > 7:
                raise ValueError(
                    f"{part!r} is longer than 7 bytes: words that begin alike would be one key"
                )
            part = int.from_bytes(part.encode(), "little")
        parts.append(part if isinstance(part, torch.Tensor) else _wrap(part % 2**64))
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if (
        tensors
        and all(part.is_cuda and part.dtype == torch.int64 and part.dim() <= 2 for part in tensors)
        and find_spec("triton")
    ):
        from kernels.sampling_triton import (
            PARTS,
            uniform_fused,
        )  # here: machines without a GPU have no Triton

        if len(parts) <= PARTS:
            return uniform_fused(parts)
    state = 0
    for part in parts:
        state = _splitmix64(
            (state ^ (part if isinstance(part, torch.Tensor) else torch.tensor(part))) + GOLDEN
        )
    return _shift_right(state, 11).double() * 2.0**-53


def sample_categorical(logits, uniform, temperature=1.0, banned_id=None, statistics=False):
    """Draw one token a row by inverting its distribution function.

    logits [N, V] floating, -inf for banned tokens, banned_id for one more; uniform [N] fp64 in [0, 1); temperature 0 takes the
    argmax. -> tokens [N] int64, logps [N] in at least fp32: log-probability under softmax(logits / temperature), the plain
    softmax at temperature 0. statistics: also max_probs [N] and entropies [N] (nats) of that distribution, as logps.

    One 53-bit uniform a row instead of a Gumbel number per entry: low-precision Gumbel noise cuts the upper tail off (24 bits
    cannot exceed 16.6), which lowers the effective temperature at large vocabularies.
    CUDA logits up to fp32 take two Triton kernels. Their token is that of sample_reference unless uniform is within
    1e-6 + 2^-23 max |logits / temperature| of an edge of its bin: the reference rounds logits / temperature to fp32.
    """
    if logits.is_cuda and logits.dtype != torch.float64 and find_spec("triton"):
        from kernels.sampling_triton import (
            sample_fused,
        )  # not at the top: machines without a GPU have no Triton

        draws = sample_fused(logits, uniform, temperature, banned_id)
        return draws if statistics else draws[:2]
    return sample_reference(logits, uniform, temperature, banned_id, statistics)


def sample_reference(logits, uniform, temperature=1.0, banned_id=None, statistics=False):
    """sample_categorical in plain PyTorch, on every device and in fp64 too; holds the distribution functions [N, V] in fp64.

    On CUDA PyTorch's order of summation depends on N, and so do the last bits; those of the kernels do not.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if banned_id is not None:
        logits = logits.masked_fill(
            torch.arange(logits.shape[-1], device=logits.device) == banned_id, float("-inf")
        )
    if temperature == 0:
        logps = logits.log_softmax(-1)
        tokens = logps.argmax(-1)
    else:
        logps = (logits / temperature).log_softmax(-1)
        cdf = logps.double().exp().cumsum(-1)  # [N, V]
        target = (
            uniform[:, None] * cdf[:, -1:]
        )  # below the total: u <= 1 - 2^-53 cannot round up to it
        tokens = torch.searchsorted(cdf, target, right=True)[
            :, 0
        ]  # the first entry above it, so its probability is not 0
        tokens = tokens.clamp(
            max=logits.shape[-1] - 1
        )  # a row with NaN has no such entry; its logp is NaN
    draws = tokens, logps.gather(-1, tokens[:, None])[:, 0]
    return (
        (*draws, logps.amax(-1).exp(), torch.special.entr(logps.exp()).sum(-1))
        if statistics
        else draws
    )
