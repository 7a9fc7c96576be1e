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

from functools import partial

import torch
import torch.nn.functional as F

from distributed.disk import progress
from models.attention import block_causal, make_attend
from rollout.engine import BROKEN, Engine, select
from rollout.schedules import reveal_quota
from rollout.traces import Trace, below, most_steps, scored


class BlockEngine(Engine):
    """Sampler of a block-causal model in plain PyTorch; the fast one is in kernels/block.py."""

    records = (None, "steps", "events", "draws")

    def block_length(self, asked):
        n = self.model.block_length
        if asked not in (None, 0, n):
            trained = f"this model was trained with blocks of {n}"
            raise SystemExit(f"--block-length {asked}: {trained}; leave it out or give {n}")
        return n

    def _generate(self, prompt_ids, owner, sample_index, settings, stop_at_eos, canvas):
        """Prefill, then denoise and commit one block after the other; arguments as in Engine."""
        n, N, device = self.model.block_length, len(owner), self.device
        # Rows are padded on the left by whole blocks, so that their blocks share columns:
        #     padding | whole blocks of the prompt | rest of the prompt, masks | masks ... |
        #             pads[i]                      prefilled                               end[i]
        # Position p of row i is column pads[i] + p. Its completion begins at column first[i].
        lengths = torch.tensor([len(ids) for ids in prompt_ids])
        prefilled = int(lengths.max()) // n * n
        pads = prefilled - lengths // n * n
        first = pads + lengths
        end = pads + (lengths + settings["gen_length"] + n - 1) // n * n
        width = int(end.max())
        tokens = torch.full((len(prompt_ids), width), self.model.mask_token_id)
        for i, ids in enumerate(prompt_ids):
            tokens[i, pads[i] : first[i]] = torch.tensor(ids)
        tokens, pads, first, end = (values.to(device) for values in (tokens, pads, first, end))
        cache = self._prefill(tokens[:, :prefilled], pads, owner, width)

        # from a row per prompt to a row per sample
        tokens, pads, first, end = (values[owner] for values in (tokens, pads, first, end))
        column = torch.arange(width, device=device)
        position = column - pads[:, None]  # [N, width] in the text; below 0 on padding
        offset = column - first[:, None]  # [N, width] in the completion; below 0 in the prompt
        step_map, num_forwards = torch.full_like(tokens, -1), torch.zeros_like(sample_index)
        logps = torch.zeros_like(tokens, dtype=torch.promote_types(self.dtype, torch.float32))
        if canvas:  # a part of a rollout
            *held, num_forwards = canvas
            i, j = revealed = (held[1] >= 0).nonzero(as_tuple=True)
            for values, known in zip((tokens, step_map, logps), held, strict=True):
                values[i, first[i] + j] = known[revealed]
        most, history = most_steps(settings), None
        if settings["records"]:
            history = [values.repeat(most, 1, 1) for values in (step_map, logps)]
        eos = torch.tensor(settings["eos_token_ids"], device=device)

        row = torch.arange(N, device=device)  # rows that are still generating
        # the block of columns start to start + n
        for start in progress(range(prefilled, width, n), "blocks"):
            here, done = (row, slice(start, start + n)), (start - prefilled) // n
            first_step = done * settings["denoising_steps"]
            if first_step >= settings["steps"].stop:
                break
            forward = partial(self._forward, cache, start, position[here], position[row] >= 0)
            *results, forwards, changes = self._denoise(
                forward, tokens[here], offset[here], sample_index[row], settings, first_step
            )
            tokens[here], block_steps, block_logps = results
            # a token is revealed in one part only: elsewhere its step is -1 and its logp 0
            step_map[here] = torch.maximum(block_steps, step_map[here])
            logps[here] += block_logps
            num_forwards[row] += forwards
            if settings["records"]:
                for step, change in enumerate(changes[:most]):  # the last forward may be a commit
                    for kept, values in zip(history, change, strict=True):
                        kept[step, *here] = values

            # finish the rows that are complete or hold an EOS
            has_eos = (torch.isin(tokens[here], eos) & (offset[here] >= 0)).any(1)
            goes_on = (end[row] > start + n) & ~(has_eos & stop_at_eos)
            end[row[~goes_on]] = start + n
            if not goes_on.any():
                break
            # commit; with editing, the last forward of _denoise was the commit
            if settings["editing_threshold"] is None:
                forward(tokens[here])
                num_forwards[row] += goes_on
            if not goes_on.all():
                row = row[goes_on]
                cache = [(keys[goes_on], values[goes_on]) for keys, values in cache]
        canvas = tokens, step_map, logps
        return self._finish(
            prompt_ids, owner, canvas, history, first, end, sample_index, num_forwards, settings
        )

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

    def _denoise(self, forward, block, offset, sample_index, settings, first_step):
        """Forward the block, draw a token for every position and reveal some of the masked ones;
        repeat until no row has a mask, or with token editing until a forward changes nothing.

        forward(block) -> hidden states; block [R, n] tokens; offset [R, n]: their places in the
        completions, below 0 in the prompts; first_step: number of steps in earlier blocks
        -> tokens, step_map, logps [R, n]; num_forwards [R]; for each step the new tokens, -1 where
        none, and their log-probabilities [R, n]. For the record "draws" every drawn token is new.
        """
        n, edits = block.shape[1], settings["editing_threshold"] is not None
        quotas = reveal_quota(n, settings["denoising_steps"])  # tokens to reveal at each step
        masked = block == self.model.mask_token_id
        step_map, logps, changes = torch.full_like(block, -1), 0.0, []
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
            if (broken := masked & ~drawn_logps.isfinite()).any():
                raise SystemExit(BROKEN.format(sample_index[broken.any(1)][:8].tolist()))
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
            changes.append((torch.where(kept, drawn, -1), drawn_logps))
            working &= (change if edits else masked).any(1)
        return block, step_map, logps, num_forwards, changes

    def _finish(
        self, prompt_ids, owner, canvas, history, first, end, sample_index, num_forwards, settings
    ):
        """Cut the completions out of the columns, [N, S] -> [N, L]. -> Trace

        canvas: tokens, step_map, logps [N, S]; history: tokens, -1 where none, and their logps
        [steps, N, S], or None; first, end [N]: columns of the completions
        """
        canvas_length = end - first
        on_canvas = below(canvas_length, int(canvas_length.max()))  # [N, L]
        offset = torch.arange(on_canvas.shape[1], device=self.device)
        at = torch.where(on_canvas, first[:, None] + offset, 0)
        fills, eos = (self.model.pad_token_id, -1, 0.0), settings["eos_token_ids"]
        completion_ids, step_map, logps = (
            torch.where(on_canvas, values.gather(1, at), fill)
            for values, fill in zip(canvas, fills, strict=True)
        )
        records = None
        if history:  # behind the canvas those of column 0: none
            drawn, drawn_logps = (
                values[: most_steps(settings)].take_along_dim(at[None], 2).transpose(0, 1)
                for values in history
            )
            records = {"tokens": drawn.int(), "logps": drawn_logps.where(drawn >= 0, 0.0)}
        return Trace(
            [prompt_ids[i] for i in owner.tolist()], completion_ids,
            scored(completion_ids, canvas_length, eos), canvas_length, step_map, logps,
            sample_index, num_forwards, settings, records,
        )  # fmt: skip
