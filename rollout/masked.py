"""Sampling from bidirectional masked diffusion models (LLaDA, Dream), block by block.

This is LLaDA's `generate`, Dream's `diffusion_generate` and Fast-dLLM's cached decoding in one
loop. A completion starts as mask tokens only, and its blocks are denoised from left to right. Each
step runs the model on the prompt and the whole completion, draws a token for every mask of the
block and reveals some of them: the schedule says how many, the remasking rule which ones. The model
also sees the masks behind the block, so gen_length is part of its input.

Caches (Fast-dLLM, arXiv 2505.22618): the first step of a block runs all columns and keeps their
keys and values, in every layer. Later steps run only a window of columns. They update its keys and
values and reuse the kept ones elsewhere: of the prompt, the blocks before and, with dual, the masks
behind. This is approximate: a reveal changes the hidden states of all tokens, and with them their
keys and values from the second layer on. The next block starts afresh.
    prefix   the window is the block and all masks behind it
    dual     the window is the block alone
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from distributed.disk import progress
from rollout.engine import ADAPTIVE, BROKEN, ENTROPIES, RULES, Engine, select
from rollout.schedules import block_quotas, eoser_weight, reveal_shares
from rollout.traces import Trace, among, left_padded, scored

ORDERED = "low_confidence_static", "entropy", "topk_margin"  # whose order alg_temp may draw
UNSCORED = "sequential", "origin"  # rules that look at no confidence


@dataclass
class CurrentBlock:
    """One block in each of R rows that are denoised together, and the forwards of these rows."""

    model: object
    tokens: torch.Tensor  # [R, S] int64, prompts padded on the left and completions
    positions: torch.Tensor  # [R, S] int64
    bias: torch.Tensor  # [R, 1, 1, S], added to attention scores: -inf on padding, else 0
    sample_index: torch.Tensor  # [R] int64
    prompt_length: int  # columns before the completions
    first: int  # first column of the block
    quota: list  # tokens to reveal at each step
    first_step: int  # number of steps in earlier blocks
    kept: dict | None  # the cache, {layer: keys and values [R, K, S, h]}; None: no cache

    def forward(self, first, width, window):
        """Run `window` columns from `first` on, with the kept keys and values elsewhere. window
        None runs all columns.

        first: that of the block, as an argument because CUDA graphs pass a tensor
        -> final hidden states [R, width, D], of which number j predicts the token of column
        first + j
        """
        shift = int(hasattr(self.model, "align"))  # Dream predicts token i at position i - 1
        every = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        columns = every if window is None else first - shift + every[: shift + window]
        tokens, positions = self.tokens[:, columns], self.positions[:, columns]
        hidden = self.model.hidden(tokens, positions, partial(self.attend, columns))
        return hidden[:, first - shift - columns[0] + every[:width]]

    def attend(self, columns, layer, q, k, v):
        """q [R, H, w, h], k, v [R, K, w, h] of these columns -> [R, H, w, h]"""
        if self.kept is not None:
            keys, values = self.kept.setdefault(layer, (k, v))  # the first forward, of all columns
            if keys is not k:  # a later forward, of a window
                keys[:, :, columns], values[:, :, columns] = k, v
            k, v = keys, values
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias, enable_gqa=gqa)


def marked(where, tokens, logps):
    """-> for a record: tokens, -1 elsewhere; logps, 0 elsewhere"""
    return torch.where(where, tokens, -1).int(), logps.where(where, 0.0)


class MaskedEngine(Engine):
    """Sampler of a bidirectional model. Blocks start with the completion and have any length."""

    choices = {
        "remasking": (*RULES, "origin", "rcr"),
        "schedule": ("uniform", "timesteps", "ascending"),
        "cache": ("none", "prefix", "dual"),
        "eos_policy": ("none", "suppress", "demote", "eoser"),
    }
    records = (None, "steps", "events", "states", "draws")
    adaptive = (*ADAPTIVE, "origin")  # rules that decide how many tokens a step reveals

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

    def _generate(self, prompt_ids, owner, sample_index, settings, stop_at_eos, canvas):
        """Denoise one block after the other; arguments as in Engine."""
        model, quotas = self.model, block_quotas(**settings)
        prompt_ids = [prompt_ids[i] for i in owner.tolist()]
        L, K, pad = sum(map(sum, quotas)), sum(map(len, quotas)), model.pad_token_id
        whole = [ids + [model.mask_token_id] * L for ids in prompt_ids]
        tokens, valid = left_padded(whole, pad, self.device)
        positions, bias = model.grid(valid)[0], valid[:, None, None].to(self.dtype).log()
        P, completion_ids = tokens.shape[1] - L, tokens[:, -L:]  # a view: later blocks read it
        step_map = torch.full_like(completion_ids, -1)
        dtype = torch.promote_types(self.dtype, torch.float32)
        logps = torch.zeros_like(step_map, dtype=dtype)
        num_forwards = torch.zeros_like(sample_index)
        if canvas:
            known, step_map, logps, num_forwards = canvas
            completion_ids.copy_(known.masked_fill(step_map < 0, model.mask_token_id))
        records = None
        if settings["records"]:
            drawn = step_map.new_full((len(tokens), K, L), -1, dtype=torch.int32)
            records = {"tokens": drawn, "logps": torch.zeros_like(drawn, dtype=dtype)}
        row = torch.arange(len(tokens), device=self.device)  # rows that are not finished
        start = first_step = 0
        for quota in progress(quotas, "blocks"):
            end = start + sum(quota)
            rows = tokens[row], positions[row], bias[row], sample_index[row]
            kept = None if settings["cache"] == "none" else {}  # a new cache for each block
            block = CurrentBlock(model, *rows, P, P + start, quota, first_step, kept)
            ids, steps, block_logps, forwards, history = self._denoise(block, settings)
            here = row, slice(start, end)
            # a token is revealed in one part only: elsewhere its step is -1 and its logp 0
            steps = torch.maximum(steps, step_map[here])
            completion_ids[here], step_map[here] = ids, steps
            logps[here] += block_logps
            num_forwards[row] += forwards
            for number, *made in history:
                for record, values in zip(records.values(), made, strict=True):
                    record[row, number, start : start + values.shape[1]] = values
            # NaN counts as the highest confidence, so it has been revealed and is found here.
            if (broken := ~block_logps.isfinite().all(1)).any():
                bad = sample_index[row[broken]].unique().tolist()
                raise SystemExit(BROKEN.format(bad[:8]))
            if stop_at_eos:  # earlier blocks are final: the rest cannot change the text
                row = row[~among(ids, model.eos_token_ids).any(1)]
            if not len(row):
                break
            start = end
            first_step += len(quota)
        canvas_length = torch.full_like(sample_index, L)
        # before masks become padding, which may be an EOS
        completion_mask = scored(completion_ids, canvas_length, model.eos_token_ids)
        completion_ids = completion_ids.where(step_map >= 0, pad)
        return Trace(
            prompt_ids, completion_ids, completion_mask, canvas_length, step_map, logps,
            sample_index, num_forwards, settings, records,
        )  # fmt: skip

    def _denoise(self, block, settings):
        """Denoise one block: run the model, draw a token for every mask, reveal some; repeat.

        rcr (running confidence remasking, MDPO, arXiv 2508.13148): a step draws a token for every
        mask of the block. The most confident tokens of the block stay, as many as the schedule has
        revealed up to this step; all others are masked again, earlier reveals too. A token keeps
        the confidence of its own draw.
        -> tokens, step_map, logps [R, n]; num_forwards [R]; for each step its number and what it
        adds to the records
        """
        remasking, kind, n = settings["remasking"], settings["records"], sum(block.quota)
        ids = block.tokens[:, block.first : block.first + n]  # a view, which the forwards read
        step_map, num_forwards = torch.full_like(ids, -1), torch.zeros_like(block.sample_index)
        masked, logps, history = ids == self.model.mask_token_id, 0.0 * ids, []
        # rcr: confidences of the block's tokens, and how many of them stay after this step
        running, due = logps, 0
        uniform = partial(self.keyed_uniform, settings["seed"], block.sample_index[:, None])
        columns = torch.arange(block.first, block.tokens.shape[1], device=self.device)
        # places in the completion: of the block, and of the masks behind it
        inside, behind = (columns - block.prompt_length).tensor_split([n])
        window = None  # the first forward of a block runs all columns
        for number, quota in enumerate(block.quota, block.first_step):
            step = number - block.first_step
            if not (masked.any() if remasking in self.adaptive else quota):
                continue  # no mask is left, or this step of the schedule reveals nothing
            if number not in settings["steps"]:
                continue  # another part of the rollout
            drawing, draws = masked, uniform(inside, step, "token")
            if kind == "states":  # also predict the masks behind the block, for the record alone
                more = uniform(behind, number, "guess")
                drawing = torch.cat([masked, masked.any(1, keepdim=True).expand(more.shape)], 1)
                draws = torch.cat([draws, more], 1)
            hidden = block.forward(block.first, draws.shape[1], window)
            window = {"none": None, "prefix": len(columns), "dual": n}[settings["cache"]]
            drawn = self._sample(hidden.flatten(0, 1), draws.flatten(), settings)
            drawn = [values.view(draws.shape) for values in drawn]
            if kind in ("draws", "states"):
                history.append((number, *marked(drawing, *drawn[:2])))
            token, token_logps, confidence = (values[:, :n] for values in drawn)
            order = partial(uniform, inside, step, "order")
            score = self._score(confidence, token, number, order, settings)
            due += quota
            num_forwards += masked.any(1)
            if remasking == "rcr":
                running = torch.where(masked, score, running)
                stays = select(running, torch.ones_like(masked), due, **settings)
            elif remasking == "origin":  # Dream: reveal each mask with the probability `share`
                share = reveal_shares(block.quota, settings["schedule"])[step]
                stays = ~masked | (order() < share)
            else:  # the most confident masks, `quota` of them or more
                stays = ~masked | select(score, masked, quota, **settings)
            new, again = masked & stays, ~(masked | stays)  # revealed, and masked again (rcr)
            ids.copy_(torch.where(new, token, ids).masked_fill(again, self.model.mask_token_id))
            logps = torch.where(new, token_logps, logps).masked_fill(again, 0.0)
            step_map, masked = step_map.masked_fill(new, step), ~stays
            if kind == "events":
                history.append((number, *marked(new | again, ids, logps)))
        return ids, step_map, logps, num_forwards, history

    def _score(self, score, token, step, order, settings):
        """Confidences of drawn tokens -> scores; the highest are revealed first. All [R, n]

        step: counted over the whole completion. order() -> uniform numbers [R, n]. alg_temp (Dream)
        adds Gumbel noise, so that the positions to reveal are drawn without replacement from
        softmax(score / alg_temp).
        """
        if settings["remasking"] == "random":
            score = order().to(score.dtype)
        is_eos = lambda: among(token, self.model.eos_token_ids)
        if settings["eos_policy"] == "eoser":
            num_steps = sum(map(len, block_quotas(**settings)))
            weight = eoser_weight(step, num_steps, settings["schedule"])
            score = torch.where(is_eos(), weight * score, score)
        if settings["alg_temp"]:
            gumbel = -(-order().clamp(min=2**-54).log()).log()
            score = score / settings["alg_temp"] + gumbel.to(score.dtype)
        if settings["eos_policy"] == "demote":  # finite: revealed when nothing else is left
            score = score.masked_fill(is_eos(), torch.finfo(score.dtype).min)
        return score
