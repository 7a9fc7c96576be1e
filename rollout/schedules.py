"""Schedules: how many tokens of which block each denoising step reveals."""

import torch

EPS = 1e-3  # the time at which Dream's schedule ends (`eps` in its generation_config.json)


def reveal_quota(block_length, denoising_steps, schedule="uniform"):
    """Tokens of one block to reveal at each step. -> list of denoising_steps ints with sum
    block_length

    uniform (LLaDA, SDAR): evenly; the first steps take the remainder. timesteps (Dream): time falls
    linearly from 1 to EPS; the step from time t to s reveals the share 1 - s / t of the masked
    tokens, rounded down, and the last step reveals the rest.
    """
    if schedule == "timesteps":
        quota, left = [], block_length
        for share in reveal_shares([0] * denoising_steps, schedule):
            quota.append(int(torch.tensor(left) * torch.tensor(share)))  # fp32, as in Dream's code
            left -= quota[-1]
        return quota
    base, remainder = divmod(block_length, denoising_steps)
    return [base + (step < remainder) for step in range(denoising_steps)]


def reveal_shares(quota, schedule):
    """Share of the still masked tokens to reveal at each step; the last is 1. -> list of len(quota)
    floats

    timesteps: Dream's 1 - s / t, in fp32; otherwise the shares that `quota` implies.
    """
    if schedule == "timesteps":
        time = torch.linspace(1, EPS, len(quota) + 1)
        return [*(1 - time[1:] / time[:-1]).tolist()[:-1], 1.0]
    return [tokens / max(sum(quota[step:]), 1) for step, tokens in enumerate(quota)]


def block_quotas(*, gen_length, block_length, denoising_steps, schedule, **_):
    """The blocks of a completion. -> list of reveal_quota lists, one per block

    ascending (ASS, arXiv 2509.23924): S = floor(log2(gen_length)) steps in total reveal 1, 2, 4,
    ... tokens; the last takes the rest. The first block has denoising_steps of these steps and each
    later step is a block of its own, so denoising_steps = S gives a single block. block_length is
    ignored.
    """
    if schedule != "ascending":
        num_blocks = -(-gen_length // block_length)
        return [reveal_quota(block_length, denoising_steps, schedule)] * num_blocks
    num_steps = max(gen_length.bit_length() - 1, 1)  # S
    steps = [2**step for step in range(num_steps - 1)]
    steps.append(gen_length - sum(steps))
    return [steps[:denoising_steps], *([tokens] for tokens in steps[denoising_steps:])]


def eoser_weight(step, num_steps, schedule):
    """EOSER (arXiv 2509.23924): factor on the confidence of an EOS token, so that completions do
    not end too early.

    step, num_steps: number of the current step and of all steps, both counted over the whole
    completion (the released code divides the step inside the block by the steps of all blocks).
    Rises linearly from 0.4 to 1; under the ascending schedule it follows the share of tokens
    revealed, from 0.01.
    """
    if schedule == "ascending":
        return 0.01 + 0.99 * (2 ** (step + 1) - 1) / 2**num_steps
    return 0.4 + 0.6 * step / max(num_steps - 1, 1)
