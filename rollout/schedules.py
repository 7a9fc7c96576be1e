"""How many tokens of which block each step reveals."""

import torch

SCHEDULES = ("uniform", "timesteps", "ascending")
EPS = 1e-3  # where Dream's time ends, `eps` of its generation_config.json


def reveal_quota(block_length, denoising_steps, schedule="uniform"):
    """Tokens of one block to reveal at each step. -> list of denoising_steps ints, their sum is block_length

    uniform: evenly, the remainder in the first steps (LLaDA, SDAR). timesteps: Dream's, whose time falls evenly from 1 to EPS:
    of what is masked at time t the whole part of the share 1 - s / t, s the next time, and the rest at last.
    """
    if schedule == "timesteps":
        quota, left = [], block_length
        for share in reveal_shares([0] * denoising_steps, schedule):
            quota.append(
                int(torch.tensor(left) * torch.tensor(share))
            )  # in fp32, as the official code
            left -= quota[-1]
        return quota
    base, remainder = divmod(block_length, denoising_steps)
    return [base + (step < remainder) for step in range(denoising_steps)]


def reveal_shares(quota, schedule):
    """Of the tokens of a block that are masked at each step, the share to reveal, the last one 1. -> list of len(quota) floats

    timesteps: Dream's, 1 - s / t from time t to time s, in fp32; else those of reveal_quota.
    """
    if schedule == "timesteps":
        time = torch.linspace(1, EPS, len(quota) + 1)
        return [*(1 - time[1:] / time[:-1]).tolist()[:-1], 1.0]
    return [tokens / max(sum(quota[step:]), 1) for step, tokens in enumerate(quota)]


def block_quotas(*, gen_length, block_length, denoising_steps, schedule="uniform", **_):
    """The blocks of a completion. -> for each block its reveal_quota: a list of lists of ints

    ascending (ASS, arXiv 2509.23924): S = floor(log2 gen_length) steps in all reveal 1, 2, 4, ... and the rest at last. The
    first block takes denoising_steps of them, each later step is a block of its own. So S of them make one block, and
    block_length has no say.
    """
    if schedule != "ascending":
        return [reveal_quota(block_length, denoising_steps, schedule)] * -(
            -gen_length // block_length
        )
    steps = [2**step for step in range(ascending_steps(gen_length) - 1)]
    steps.append(gen_length - sum(steps))
    return [steps[:denoising_steps], *([tokens] for tokens in steps[denoising_steps:])]


def ascending_steps(gen_length):
    """-> S of `block_quotas`"""
    return max(gen_length.bit_length() - 1, 1)


def eoser_weight(step, num_steps, schedule):
    """What the confidence of an EOS is multiplied by under eos_policy="eoser" (arXiv 2509.23924), so that answers do not end
    early: at step number `step` of num_steps, both of the whole completion. Linear from 0.4 to 1; with the ascending schedule
    as the share of tokens revealed, from 0.01. The released code sets the step inside a block against the steps of all blocks.
    """
    if schedule == "ascending":
        return 0.01 + 0.99 * (2 ** (step + 1) - 1) / 2**num_steps
    return 0.4 + 0.6 * step / max(num_steps - 1, 1)
