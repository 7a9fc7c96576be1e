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

from models.attention import attention, block_causal, make_attend
from rollout.engine import Engine
from rollout.traces import below


def empty_cache(model, rows, width):
    """-> keys and values [rows, K, width, h] of each layer. Zeros: columns that are not yet written
    have weight 0 in the attention, and 0 times NaN would be NaN.
    """
    config, weight = model.config, model.lm_head.weight
    shape = 2, rows, config.num_key_value_heads, width, config.head_dim
    return [weight.new_zeros(shape).unbind() for _ in range(config.num_hidden_layers)]


class BlockEngine(Engine):
    """Sampler of a block-causal model in plain PyTorch; the fast one is in kernels/block.py."""

    def _prefill(self, prompts, pads, owner, width):
        """Forward each of U prompts once and give its keys and values to all its samples.

        prompts [U, prefilled]: the whole blocks, padded on the left by pads [U]; row i of the N
        samples continues prompts[owner[i]] -> the cache: keys, values [N, K, width, h] per layer
        """
        cache = empty_cache(self.model, len(owner), width)
        valid = ~below(pads, prompts.shape[1])
        self._write_prompts(prompts, valid, cache, slice(None), owner)
        return cache

    def _write_prompts(self, prompts, valid, cache, rows, owner):
        """Forward prompts [U, P], whole blocks, valid [U, P] without padding, and write keys and
        values of prompts[owner[i]] into row rows[i] of the cache.
        """
        if not prompts.shape[1]:
            return
        position_ids, block_ids = self.model.grid(valid)
        attend_prompt = make_attend(block_causal(block_ids, valid))

        def attend(layer, q, k, v):
            for kept, new in zip(cache[layer], (k, v), strict=True):
                kept[rows, :, : prompts.shape[1]] = new[owner]
            return attend_prompt(layer, q, k, v)

        self.model.hidden(prompts, position_ids, attend)

    def _forward(self, block, first, width, window):
        """Each layer writes the block's keys and values into the cache, then attends to all columns
        up to the end of the block. So the next forward of the same block overwrites them.
        """
        here, end = slice(first, first + width), first + width

        def attend(layer, q, k, v):
            for kept, new in zip(block.cache[layer], (k, v), strict=True):
                kept[:, :, here] = new
            keys, values = (kept[:, :, :end] for kept in block.cache[layer])
            return attention(q, keys, values, block.bias[..., :end])

        return self.model.hidden(block.tokens[:, here], block.positions[:, here], attend)
