"""Cached block-causal decoding for block diffusion models (SDAR): prefill, then per block denoise and commit. Plain and exact.

prefill   the whole blocks of the prompt, once per prompt; keys and values are stored, rotated
denoise   forward the block alone over the cached keys; reveal some of its masked tokens; again until none is masked
commit    one more forward of the now clean block: its keys and values replace those made while it was noisy
"""

import torch
import torch.nn.functional as F

from kernels.attention import Visibility, make_attend
from rollout.engine import Engine
from rollout.traces import Trace, scored


class BlockEngine(Engine):
    """Sampler of a block-causal model. The grid of blocks starts at position 0 of the prompt."""

    def block_length(self, asked):
        n = self.model.block_length
        if asked not in (None, 0, n):
            raise SystemExit(f"--block-length {asked}: this model was trained with blocks of {n}; leave it out or give {n}")
        return n

    def _generate(self, prompt_ids, owner, sample_index, settings, stop_at_eos):
        model, device, n, G = self.model, self.device, settings["block_length"], settings["gen_length"]
        P = torch.tensor([len(ids) for ids in prompt_ids], device=device)[owner]  # [N]
        end = (P + G + n - 1) // n * n  # [N], end of the last block
        N, S = len(P), int(end.max())
        column, width = torch.arange(S, device=device), max(map(len, prompt_ids))
        padded = [ids + [model.mask_token_id] * (width - len(ids)) for ids in prompt_ids]
        prompts = torch.tensor(padded, device=device)  # [U, width]
        tokens = torch.full((N, S), model.mask_token_id, device=device)  # absolute positions
        tokens[:, :width] = prompts[owner]
        masked = (column >= P[:, None]) & (column < end[:, None])
        dtype = torch.promote_types(self.dtype, torch.float32)
        step_map, logps = torch.full_like(tokens, -1), torch.zeros(N, S, dtype=dtype, device=device)
        num_forwards, start = torch.zeros_like(P), P // n * n  # start of the block in work
        eos = torch.tensor(model.eos_token_ids, device=device)

        row = torch.arange(N, device=device)  # rows at work, row r of the cache belongs to row[r]
        cache = self._prefill(prompts, owner, S)
        while len(row):
            at = start[row, None] + torch.arange(n, device=device)  # [R, n] positions of each row's block
            here = row[:, None], at
            forward = lambda block, at=at, cache=cache: self._forward(block, at, cache)
            block, step_map[here], logps[here], forwards = self._denoise(
                forward, tokens[here], masked[here], sample_index[row], at - P[row, None], settings
            )
            tokens[here] = block
            num_forwards[row] += forwards
            start[row] += n
            stopped = (torch.isin(block, eos) & (at >= P[row, None])).any(1) & stop_at_eos
            end[row] = torch.where(stopped, start[row], end[row])
            live = start[row] < end[row]
            if not live.all():
                row, at, block, cache = row[live], at[live], block[live], [(k[live], v[live]) for k, v in cache]
            if len(row):
                self._forward(block, at, cache)  # commit: keys and values of the clean block
                num_forwards[row] += 1
        prompt_ids = [prompt_ids[i] for i in owner.tolist()]
        return self._trace(prompt_ids, tokens, step_map, logps, P, end, sample_index, num_forwards, settings)

    def _prefill(self, prompts, owner, width):
        """Keys and values of the prompts [U, P], which is enough for their whole blocks. -> per layer k, v [N, K, width, h]

        Shorter prompts are padded on the right: padding lies in the last block or later, which no whole block sees, and each
        row's first own block overwrites it.
        """
        config, cache, (U, P) = self.model.config, [], prompts.shape
        position_ids = torch.arange(P, device=self.device).expand(U, P)
        attend_prompt = make_attend(Visibility(position_ids // self.model.block_length))

        def attend(layer, q, k, v):
            shape = (len(owner), config.num_key_value_heads, width, config.head_dim)
            keys, values = k.new_zeros(shape), v.new_zeros(shape)
            keys[:, :, :P], values[:, :, :P] = k[owner], v[owner]
            cache.append((keys, values))
            return attend_prompt(layer, q, k, v)

        self.model.hidden(prompts, position_ids, attend)
        return cache

    def _forward(self, block, at, cache):
        """Forward each row's block [R, n], at positions `at`, over its cached past; writes its keys and values. -> [R, n, D]"""
        width = int(at.max()) + 1
        rows = torch.arange(len(at), device=self.device)[:, None]
        visible = (torch.arange(width, device=self.device) <= at[:, -1:])[:, None, None]  # [R, 1, 1, width]

        def attend(layer, q, k, v):
            keys, values = cache[layer]
            keys[rows, :, at], values[rows, :, at] = k.transpose(1, 2), v.transpose(1, 2)
            return F.scaled_dot_product_attention(
                q, keys[:, :, :width], values[:, :, :width], attn_mask=visible, enable_gqa=q.shape[1] != k.shape[1]
            )

        return self.model.hidden(block, at, attend)

    def _trace(self, prompt_ids, tokens, step_map, logps, P, end, sample_index, num_forwards, settings):
        canvas_length = end - P
        offset = torch.arange(int(canvas_length.max()), device=self.device)  # [L]
        on_canvas = offset < canvas_length[:, None]  # [N, L]
        at = torch.where(on_canvas, P[:, None] + offset, 0)
        cut = lambda values, fill: torch.where(on_canvas, values.gather(1, at), fill)
        completion_ids, step_map = cut(tokens, self.model.pad_token_id), cut(step_map, -1)
        return Trace(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            completion_mask=scored(completion_ids, canvas_length, settings["eos_token_ids"]),
            canvas_length=canvas_length,
            step_map=step_map,
            replay_map=step_map,  # the [noisy | clean] pass replays the same local step of all blocks in one forward
            logps=cut(logps, 0.0),
            sample_index=sample_index,
            num_forwards=num_forwards,
            settings=settings,
        )
