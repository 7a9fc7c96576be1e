"""Decoding of bidirectional masked diffusion models (LLaDA, Dream), block by block, without a cache. Plain and exact.

The canvas of a completion is all masks at first. Its blocks are denoised from left to right, and every step is one forward of
the prompt and the whole canvas: the masks behind the block are attended to, so the length of the canvas is part of the input.
"""

from functools import partial

import torch
import torch.nn.functional as F

from kernels.attention import bidirectional, make_attend
from rollout.engine import REMASKING, Engine
from rollout.traces import Trace, left_padded, scored


class MaskedEngine(Engine):
    """Sampler of a bidirectional model. The grid of blocks starts at the completion, and any block length will do."""

    choices = Engine.choices | {"remasking": (*REMASKING, "low_confidence_factor", "entropy", "topk_margin")}

    def _generate(self, prompt_ids, owner, sample_index, settings, stop_at_eos):
        model, n, steps = self.model, settings["block_length"], settings["denoising_steps"]
        prompt_ids = [prompt_ids[i] for i in owner.tolist()]
        prompts, valid = left_padded(prompt_ids, model.pad_token_id, self.device)
        (N, P), L = prompts.shape, -(-settings["gen_length"] // n) * n
        tokens, valid = F.pad(prompts, (0, L), value=model.mask_token_id), F.pad(valid, (0, L), value=True)
        offset = torch.arange(-P, L, device=self.device).expand(N, -1)  # from the start of the completion
        step_map = torch.full_like(tokens, -1)
        logps = torch.zeros(tokens.shape, dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        num_forwards, row = torch.zeros_like(sample_index), torch.arange(N, device=self.device)  # rows at work
        eos = torch.tensor(model.eos_token_ids, device=self.device)
        for start in range(P, P + L, n):
            here = row, slice(start, start + n)
            tokens[here], step_map[here], logps[here], forwards = self._denoise(
                partial(self._forward, tokens[row], valid[row], here[1]),
                tokens[here], torch.ones_like(tokens[here], dtype=torch.bool), sample_index[row], offset[here], settings,
            )  # fmt: skip
            num_forwards[row] += forwards
            ended = torch.isin(tokens[here], eos).any(1)  # blocks are final: later ones cannot change the text
            row = row[~(ended & stop_at_eos)]
        step_map, revealed = step_map[:, P:], step_map[:, P:] >= 0
        completion_ids, canvas_length = tokens[:, P:].where(revealed, model.pad_token_id), torch.full_like(sample_index, L)
        return Trace(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            completion_mask=scored(completion_ids, canvas_length, model.eos_token_ids),
            canvas_length=canvas_length,
            step_map=step_map,
            replay_map=torch.where(revealed, offset[:, P:] // n * steps + step_map, -1),  # one block's step a forward
            logps=logps[:, P:],
            sample_index=sample_index,
            num_forwards=num_forwards,
            settings=settings,
        )

    def _forward(self, tokens, valid, columns, block):
        """Forward tokens [R, T] with the block in its columns; valid [R, T]: no padding. -> hidden [R, n, D] of the block"""
        tokens[:, columns] = block
        position_ids, _ = self.model.grid(valid)
        attend = make_attend(bidirectional(valid), self.model.attention_backend)
        hidden = self.model.hidden(tokens, position_ids, attend)
        align = getattr(self.model, "align", lambda hidden, valid_mask: hidden)  # row i is to score token i
        return align(hidden, valid)[:, columns]
