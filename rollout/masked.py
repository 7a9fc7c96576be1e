"""Sampling from bidirectional masked diffusion models (LLaDA, Dream), block by block.

This is LLaDA's `generate`, Dream's `diffusion_generate` and Fast-dLLM's cached decoding in one
loop, that of rollout/engine.py; here are the forwards of a block. A completion starts as mask
tokens only, and its blocks are denoised from left to right. Each step runs the model on the prompt
and the whole completion, draws a token for every mask of the block and reveals some of them: the
schedule says how many, the remasking rule which ones. The model also sees the masks behind the
block, so gen_length is part of its input.

Caches (Fast-dLLM, arXiv 2505.22618): the first step of a block runs all columns and keeps their
keys and values, in every layer. Later steps run only a window of columns. They update its keys and
values and reuse the kept ones elsewhere: of the prompt, the blocks before and, with dual, the masks
behind. This is approximate: a reveal changes the hidden states of all tokens, and with them their
keys and values from the second layer on. The next block starts afresh.
    prefix   the window is the block and all masks behind it
    dual     the window is the block alone
"""

from functools import partial

import torch

from models.attention import attention
from rollout.engine import ADAPTIVE, ENTROPIES, RULES, Engine
from rollout.schedules import block_quotas

ORDERED = "low_confidence_static", "entropy", "topk_margin"  # whose order alg_temp may draw
UNSCORED = "sequential", "origin"  # rules that look at no confidence


class MaskedEngine(Engine):
    """Sampler of a bidirectional model. Blocks start with the completion and have any length."""

    is_block = False
    choices = {
        "remasking": (*RULES, "origin", "rcr"),
        "schedule": ("uniform", "timesteps", "ascending"),
        "cache": ("none", "prefix", "dual"),
        "eos_policy": ("none", "suppress", "demote", "eoser"),
    }
    records = (*Engine.records, "states")
    adaptive = (*ADAPTIVE, "origin")

    def check(self, settings):
        rule, policy, noise = (settings[k] for k in ("remasking", "eos_policy", "alg_temp"))
        if noise and rule not in ORDERED:
            raise SystemExit(f"--alg-temp {noise} needs --remasking {' or '.join(ORDERED)}")
        # eoser scales confidences, so they must not be negative
        unable = {"demote": UNSCORED, "eoser": UNSCORED + ENTROPIES}
        if rule in unable.get(policy, ()):
            raise SystemExit(
                f"--eos-policy {policy} needs confidences that --remasking {rule} does not have"
            )
        if settings["schedule"] == "ascending":
            first, *later = block_quotas(**settings)
            if (sum(first), len(first)) != (settings["block_length"], settings["denoising_steps"]):
                most = f"{settings['gen_length']} tokens in {len(first + later)} steps"
                raise SystemExit(
                    f"--schedule ascending reveals {most} and sets the blocks: give "
                    "--block-length 0, at most as many --denoising-steps"
                )

    def _prefill(self, *prompts):
        """Nothing: every block runs the prompt anew."""

    def _forward(self, block, first, width, window):
        """Run `window` columns from `first` on, with the kept keys and values elsewhere. window
        None runs all columns.

        first: that of the block, as an argument because CUDA graphs pass a tensor
        -> final hidden states [R, width, D], of which number j predicts the token of column
        first + j
        """
        shift = int(self.model.shift)  # token i is predicted at position i - 1
        every = torch.arange(block.tokens.shape[1], device=self.device)
        columns = every if window is None else first - shift + every[: shift + window]
        tokens, positions = block.tokens[:, columns], block.positions[:, columns]
        hidden = self.model.hidden(tokens, positions, partial(self._attend, block, columns))
        return hidden[:, first - shift - columns[0] + every[:width]]

    def _attend(self, block, columns, layer, q, k, v):
        """q [R, H, w, h], k, v [R, K, w, h] of these columns -> [R, H, w, h]"""
        if block.cache is not None:
            keys, values = block.cache.setdefault(layer, (k, v))  # the first forward runs all
            if keys is not k:  # a later forward, of a window
                keys[:, :, columns], values[:, :, columns] = k, v
            k, v = keys, values
        return attention(q, k, v, block.bias)
