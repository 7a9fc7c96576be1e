"""Cached block-causal decoding of block diffusion models (SDAR, arXiv 2510.06303; LLaDA2).

    prefill   one forward of the prompt's whole blocks; their keys and values go into the KV cache
    denoise   forward the current block over the cache and reveal some of its masked tokens, until
              none is masked
    commit    one more forward of the finished block: its keys and values replace those of the noisy
              block, and the next block begins; the last block needs no commit

The grid of blocks starts at position 0 of the prompt. Where a prompt ends inside a block, its last
tokens open the first block that is denoised. Prompts are padded on the left by whole blocks, so
that all rows of a batch work on the same columns.

Token editing (LLaDA2.1, arXiv 2602.08676, `generate` of its modeling file): a step also replaces
revealed tokens for which it draws another token with a probability above editing_threshold. A block
without masks is forwarded again until a step changes nothing, which is then the commit, or until
max_post_steps steps have edited it.
"""

from itertools import count

import torch
import torch.nn.functional as F

from models.attention import block_causal, make_attend
from rollout.engine import BROKEN, Engine, select
from rollout.schedules import reveal_quota
from rollout.traces import Trace, below, scored


class BlockEngine(Engine):
    """Sampler of a block-causal model in plain PyTorch; the fast one is in kernels/block.py."""

    records = (None, "steps", "events")

    def block_length(self, asked):
        n = self.model.block_length
        if asked not in (None, 0, n):
            trained = f"this model was trained with blocks of {n}"
            raise SystemExit(f"--block-length {asked}: {trained}; leave it out or give {n}")
        return n

    def _generate(self, prompt_ids, owner, sample_index, settings, stop_at_eos):
        model, n, N, device = self.model, self.model.block_length, len(owner), self.device
        # Columns: `past` for the whole blocks of prompts, then the blocks to denoise. Position p of
        # row i is column pads[i] + p; its completion stands in columns first[i] to end[i].
        lengths = torch.tensor([len(ids) for ids in prompt_ids], device=device)
        past = max(len(ids) // n * n for ids in prompt_ids)
        pads = past - lengths // n * n
        first, end = pads + lengths, past - (-(lengths % n + settings["gen_length"]) // n * n)
        width = int(end.max())
        prompts = torch.full((len(prompt_ids), width), model.mask_token_id, device=device)
        for i, ids in enumerate(prompt_ids):
            prompts[i, pads[i] : first[i]] = torch.tensor(ids, device=device)
        cache = self._prefill(prompts[:, :past], pads, owner, width)

        tokens, pads, first, end = (values[owner] for values in (prompts, pads, first, end))
        column = torch.arange(width, device=device)
        position, offset = column - pads[:, None], column - first[:, None]  # [N, width]
        to_fill, visible = (offset >= 0) & (column < end[:, None]), position >= 0
        step_map, num_forwards = torch.full_like(tokens, -1), torch.zeros_like(sample_index)
        logps = torch.zeros_like(tokens, dtype=torch.promote_types(self.dtype, torch.float32))
        events, edits = [], settings["editing_threshold"] is not None
        quotas = reveal_quota(n, settings["denoising_steps"])
        eos = torch.tensor(settings["eos_token_ids"], device=device)

        row = torch.arange(N, device=device)  # rows that are still generating
        for start in range(past, width, n):  # the block of columns start to start + n
            here = row, slice(start, start + n)
            block, masked, at = tokens[here], to_fill[here], offset[here]
            attend = cached(cache, start, visible[row])
            # working: rows that still need forwards of this block, the commit included
            working, post_steps = torch.ones_like(row, dtype=torch.bool), torch.zeros_like(row)
            is_last = end[row] == start + n
            for step in count():  # each step is a forward of the block
                hidden = model.hidden(block, position[here], attend)
                num_forwards[row] += working
                was_masked, change = masked.any(1), torch.zeros_like(masked)
                if edits or was_masked.any():
                    key = settings["seed"], sample_index[row, None], at, step
                    uniform = self.keyed_uniform(*key, "token")
                    draws = self._sample(hidden.flatten(0, 1), uniform.flatten(), settings)
                    drawn, drawn_logps, confidence = (values.view(block.shape) for values in draws)
                    if not drawn_logps[masked].isfinite().all():
                        bad = sample_index[row[(masked & ~drawn_logps.isfinite()).any(1)]]
                        raise SystemExit(BROKEN.format(bad[:8].tolist()))
                    if settings["remasking"] == "random":
                        confidence = self.keyed_uniform(*key, "order").to(confidence.dtype)
                    quota = quotas[step] if step < len(quotas) else 0
                    names = "remasking", "confidence_threshold", "factor", "eb_threshold"
                    change = select(confidence, masked, quota, *(settings[name] for name in names))
                    masked = masked & ~change
                    if edits:
                        may_edit = working & (
                            was_masked | (post_steps < settings["max_post_steps"])
                        )
                        is_sure = drawn_logps.exp() > settings["editing_threshold"]
                        # not the tokens masked before this step, and not the prompt's
                        revealed = ~(masked | change) & (at >= 0)
                        edited = may_edit[:, None] & revealed & (drawn != block) & is_sure
                        change, post_steps = change | edited, post_steps + ~was_masked
                    block = torch.where(change, drawn, block)
                    step_map[here] = torch.where(change, step, step_map[here])
                    logps[here] = torch.where(change, drawn_logps, logps[here])
                    if settings["records"]:
                        r, j = change.nonzero(as_tuple=True)
                        event = torch.stack([row[r], 0 * r + step, at[r, j], block[r, j]], 1)
                        events.append((event, drawn_logps[r, j]))
                # A forward that changed nothing saw the final block: it was the commit. A finished
                # row needs no commit, but with editing only such a forward shows that the block has
                # settled.
                has_eos = (torch.isin(block, eos) & (at >= 0)).any(1)
                finished = is_last | (has_eos & stop_at_eos)
                working &= change.any(1)
                if not edits:
                    working &= ~finished | masked.any(1)
                if not working.any():
                    break
            tokens[here] = block
            end[row[finished]] = start + n
            row, cache = row[~finished], keep_rows(cache, ~finished)
            if not len(row):
                break
        records = sort_events(events, sample_index) if settings["records"] else None
        prompt_ids, canvas = [prompt_ids[i] for i in owner.tolist()], (tokens, step_map, logps)
        return self._trace(
            prompt_ids, canvas, first, end, sample_index, num_forwards, records, settings
        )

    def _prefill(self, prompts, pads, owner, width):
        """prompts [U, past]: whole blocks of the prompts, padded on the left by pads [U].

        -> the cache: keys and values [N, K, width, h] of each layer; row i has prompts[owner[i]]
        """
        config, past = self.model.config, prompts.shape[1]
        # Zeros: columns never written have weight 0 in the attention, and 0 times NaN would be NaN.
        shape = len(owner), config.num_key_value_heads, width, config.head_dim
        empty = lambda: torch.zeros(shape, dtype=self.dtype, device=self.device)
        cache = [(empty(), empty()) for _ in range(config.num_hidden_layers)]
        if past:
            valid = torch.arange(past, device=self.device) >= pads[:, None]
            position_ids, block_ids = self.model.grid(valid)
            attend_prompt = make_attend(block_causal(block_ids, valid))

            def attend(layer, q, k, v):
                for kept, new in zip(cache[layer], (k, v), strict=True):
                    kept[:, :, :past] = new[owner]
                return attend_prompt(layer, q, k, v)

            self.model.hidden(prompts, position_ids, attend)
        return cache

    def _trace(self, prompt_ids, canvas, first, end, sample_index, num_forwards, records, settings):
        """canvas: tokens, step_map, logps [N, S]; first, end [N]: columns of the completions"""
        canvas_length = end - first
        on_canvas = below(canvas_length, int(canvas_length.max()))  # [N, L]
        offset = torch.arange(on_canvas.shape[1], device=self.device)
        at = torch.where(on_canvas, first[:, None] + offset, 0)
        fills, eos = (self.model.pad_token_id, -1, 0.0), settings["eos_token_ids"]
        completion_ids, step_map, logps = (
            torch.where(on_canvas, values.gather(1, at), fill)
            for values, fill in zip(canvas, fills, strict=True)
        )
        return Trace(
            prompt_ids, completion_ids, scored(completion_ids, canvas_length, eos), canvas_length,
            step_map,
            step_map,  # as replay_map: one forward of [noisy | clean] replays a step of all blocks
            logps, sample_index, num_forwards, settings, records,
        )  # fmt: skip


def cached(cache, start, visible):
    """-> attend(layer, q, k, v) of a block at columns from `start`: writes its keys and values,
    then attends to all columns up to its end. visible [R, width] bool: False on padding.
    """

    def attend(layer, q, k, v):
        end = start + k.shape[2]
        for kept, new in zip(cache[layer], (k, v), strict=True):
            kept[:, :, start:end] = new
        keys, values = (kept[:, :, :end] for kept in cache[layer])
        mask, is_grouped = visible[:, None, None, :end], q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=is_grouped)

    return attend


def keep_rows(cache, keep):
    return cache if keep.all() else [(keys[keep], values[keep]) for keys, values in cache]


def sort_events(events, sample_index):
    """events: pairs (row, step, position, token [E, 4]; logps [E]) -> Trace.records, ordered by
    step, row and position
    """
    events, logps = (torch.cat(parts) for parts in zip(*events, strict=True))
    for key in (2, 0, 1):  # stable: the last key counts most
        order = events[:, key].argsort(stable=True)
        events, logps = events[order], logps[order]
    return {"events": torch.cat([sample_index[events[:, :1]], events[:, 1:]], 1), "logps": logps}
