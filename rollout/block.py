"""Cached block-causal decoding of block diffusion models (SDAR, arXiv 2510.06303; LLaDA2).

    prefill   one forward of the prompt's whole blocks; their keys and values go into the KV cache
    denoise   forward the current block over the cache and reveal some of its masked tokens; repeat
              until none is masked
    commit    forward the block once more. The last denoising step still saw masks, so its keys and
              values are those of a noisy block; the commit overwrites them with the final ones
    finish    after the block with an EOS, or when gen_length is reached; no commit is needed

The grid of blocks starts at position 0 of the prompt. If a prompt ends inside a block, its last
tokens open the first block to denoise. They are known, so only the rest of that block is masked.

Token editing (LLaDA2.1, arXiv 2602.08676, `generate` of its modeling file): a step also replaces a
revealed token if it draws another one with a probability above editing_threshold. A block without
masks is forwarded again until a forward changes nothing. That forward is also the commit. At most
max_post_steps of these extra forwards may edit.
"""

from collections import namedtuple
from functools import partial

import torch
import torch.nn.functional as F

from models.attention import block_causal, make_attend
from rollout.engine import Engine, select
from rollout.schedules import reveal_quota
from rollout.traces import num_replays

Block = namedtuple("Block", "forward tokens offset index first_step")


class BlockEngine(Engine):
    """Sampler of a block-causal model in plain PyTorch; the fast one is in kernels/block.py."""

    records = (None, "steps", "events", "draws")

    def _prefill(self, prompts, pads, owner, width):
        """Forward each of U prompts once and give its keys and values to all its samples.

        prompts [U, prefilled]: the whole blocks, padded on the left by pads [U]; row i of the N
        samples continues prompts[owner[i]] -> the cache: keys, values [N, K, width, h] per layer
        """
        config, prefilled = self.model.config, prompts.shape[1]
        # Zeros: columns never written have weight 0 in the attention, and 0 times NaN would be NaN.
        shape = len(owner), config.num_key_value_heads, width, config.head_dim
        empty = lambda: torch.zeros(shape, dtype=self.dtype, device=self.device)
        cache = [(empty(), empty()) for _ in range(config.num_hidden_layers)]
        if prefilled:
            valid = torch.arange(prefilled, device=self.device) >= pads[:, None]
            position_ids, block_ids = self.model.grid(valid)
            attend_prompt = make_attend(block_causal(block_ids, valid))

            def attend(layer, q, k, v):
                for kept, new in zip(cache[layer], (k, v), strict=True):
                    kept[:, :, :prefilled] = new[owner]
                return attend_prompt(layer, q, k, v)

            self.model.hidden(prompts, position_ids, attend)
        return cache

    def _forward(self, cache, start, position, visible, block):
        """Forward a block at columns from `start`. Each layer writes the block's keys and values
        into the cache, then attends to all columns up to the end of the block. So the next forward
        of the same block overwrites them. -> hidden states [R, n, D]

        position, block [R, n]; visible [R, width] bool: False on padding
        """

        def attend(layer, q, k, v):
            end = start + k.shape[2]
            for kept, new in zip(cache[layer], (k, v), strict=True):
                kept[:, :, start:end] = new
            keys, values = (kept[:, :, :end] for kept in cache[layer])
            mask, is_grouped = visible[:, None, None, :end], q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=is_grouped)

        return self.model.hidden(block, position, attend)

    def _open(self, cache, samples, start, quota, first_step, settings):
        here = slice(start, start + self.model.block_length)
        forward = partial(
            self._forward, cache, start, samples.position[:, here], samples.position >= 0
        )
        return Block(
            forward, samples.tokens[:, here], samples.offset[:, here], samples.index, first_step
        )

    def _denoise(self, block, settings):
        """Forward the block, draw a token for every position and reveal some of the masked ones;
        repeat until no row has a mask, or with token editing until a forward changes nothing.

        Results as in Engine. For the record "draws" every drawn token is a change.
        """
        forward, block, offset, sample_index, first_step = block
        n, edits = block.shape[1], settings["editing_threshold"] is not None
        quotas = reveal_quota(n, settings["denoising_steps"])  # tokens to reveal at each step
        masked = block == self.model.mask_token_id
        step_map, changes = torch.full_like(block, -1), []
        logps = torch.zeros_like(block, dtype=torch.float32)
        working = masked.any(1)  # rows that need more forwards
        num_forwards, post_steps = torch.zeros_like(sample_index), torch.zeros_like(sample_index)
        part = settings["steps"]  # of all steps of the rollout
        for step in range(max(part.start - first_step, 0), part.stop - first_step):
            if not working.any():
                break
            key = settings["seed"], sample_index[:, None], offset, step
            uniform = self.keyed_uniform(*key, "token")
            draws = self._sample(forward(block).flatten(0, 1), uniform.flatten(), settings)
            num_forwards += working
            drawn, drawn_logps, confidence = (values.view(block.shape) for values in draws)
            if settings["remasking"] == "random":
                confidence = self.keyed_uniform(*key, "order").to(confidence.dtype)
            was_masked = masked.any(1)
            quota = quotas[step] if step < len(quotas) else 0  # later steps only edit
            change = select(confidence, masked, quota, **settings)
            masked = masked & ~change
            if edits:
                may_edit = working & (was_masked | (post_steps < settings["max_post_steps"]))
                is_sure = drawn_logps.exp() > settings["editing_threshold"]
                # by an earlier step; the prompt's tokens are never edited
                revealed = ~(masked | change) & (offset >= 0)
                change |= may_edit[:, None] & revealed & (drawn != block) & is_sure
                post_steps += ~was_masked
            block = torch.where(change, drawn, block)
            step_map = step_map.masked_fill(change, step)
            logps = torch.where(change, drawn_logps, logps)
            kept = masked | change if settings["records"] == "draws" else change
            changes.append((step, torch.where(kept, drawn, -1).int(), drawn_logps))
            working &= (change if edits else masked).any(1)
        # with editing the last forward is the commit, which changes nothing
        return block, step_map, logps, num_forwards, changes[: num_replays(settings)]
