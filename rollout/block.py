"""Cached block-causal decoding for block diffusion models (SDAR): prefill, then per block denoise and commit. Plain and exact.

prefill   the whole blocks of the prompt, once per prompt; keys and values are stored, rotated
denoise   forward the block alone over the cached keys; reveal some of its masked tokens; again until none is masked
commit    one more forward of the now clean block: its keys and values replace those made while it was noisy
"""

import torch
import torch.nn.functional as F

from kernels.attention import Visibility, make_attend
from kernels.sampling import keyed_uniform, sample_categorical
from models.checkpoint import tensor_names
from models.lora import adapter_tensors
from rollout.traces import Trace, concatenate

REMASKING = ("low_confidence_static", "low_confidence_dynamic", "random")


def reveal_quota(block_length, denoising_steps):
    """Tokens to reveal at each step: evenly, the remainder in the first steps. -> list of denoising_steps ints"""
    base, remainder = divmod(block_length, denoising_steps)
    return [base + (step < remainder) for step in range(denoising_steps)]


def select(confidence, masked, quota, remasking, threshold):
    """Which masked tokens of a block to reveal.

    confidence [N, n] fp32; masked [N, n] bool; quota: at least this many, as far as that many are masked. Ties go to the
    lower position. low_confidence_static and random (whose confidence is noise) reveal the quota; low_confidence_dynamic
    reveals all above the threshold if those are at least the quota. -> [N, n] bool
    """
    quota = masked.sum(1, keepdim=True).clamp(
        max=quota
    )  # a block that began with prompt tokens has fewer masks than the schedule
    score = confidence.masked_fill(~masked, float("-inf"))
    rank = score.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    best = rank < quota
    if remasking != "low_confidence_dynamic":
        return best
    high = (score > threshold) & masked
    return torch.where(high.sum(1, keepdim=True) >= quota, high, best)


class BlockEngine:
    """Sampler of a block-causal model; `model` is its own copy of the weights."""

    def __init__(self, model, max_batch_size):
        self.model, self.max_batch_size = model, max_batch_size
        self.device, self.dtype = model.lm_head.weight.device, model.lm_head.weight.dtype

    @torch.no_grad()
    def load_weights(self, weights):
        """weights: pairs (name, full tensor), copied in place, all of them: those of export_weights, or those of export_adapter
        for an engine whose model has the same adapters. ValueError names what does not fit or did not come.
        """
        own = None
        for name, value in weights:
            if own is None:
                own = adapter_tensors(self.model) if ".lora_" in name else tensor_names(self.model)
            if name not in own or own[name].shape != value.shape:
                raise ValueError(f"{name} {list(value.shape)} is no tensor of this model, or came twice")
            own.pop(name).copy_(value)
        if own or own is None:
            raise ValueError(f"weights did not come for {', '.join(list(own or ['any tensor'])[:5])}")

    def plan(self, *, gen_length, denoising_steps, remasking, **settings):
        """One line on what a rollout costs, for the log."""
        n = self.model.block_length
        blocks, steps = -(-gen_length // n), min(denoising_steps, n)
        at_least = "at least " if remasking == "low_confidence_dynamic" else ""
        return (
            f"{blocks} blocks of {n} tokens, {steps} steps each: {blocks * steps} steps, {at_least}{n / steps:g} tokens a step"
        )

    @torch.no_grad()
    def generate(
        self, prompt_ids, *, num_samples=1, gen_length=256, block_length=None, denoising_steps=4, temperature=1.0,
        remasking="low_confidence_dynamic", confidence_threshold=0.9, seed=0, sample_offset=0, stop_at_eos=True, records=None,
    ):  # fmt: skip
        """Sample num_samples completions of each prompt (list of token ids, ragged, not empty). -> Trace

        gen_length tokens each, rounded up so that the last block is whole; generation ends at the block that holds an EOS
        unless stop_at_eos is False. denoising_steps: per block. block_length: None, or the model's own. temperature 0: greedy.
        Sample i of prompt p is number sample_offset + p * num_samples + i, and every draw is keyed by
        (seed, that number, position, step): batch size, other prompts and ranks do not change it.
        """
        n = self.model.block_length
        if block_length not in (None, 0, n):
            raise SystemExit(
                f"--block-length {block_length}: this model was trained with blocks of {n}; leave it out or give {n}"
            )
        if remasking not in REMASKING:
            raise SystemExit(f"--remasking {remasking}: block models have {', '.join(REMASKING)}")
        if min(denoising_steps, gen_length, num_samples) < 1 or temperature < 0:
            wrong = f"{denoising_steps=}, {gen_length=}, {num_samples=} must be at least 1, {temperature=} at least 0"
            raise SystemExit(wrong)
        if records is not None:
            raise SystemExit(f"the block engine keeps no records of kind {records!r}")
        prompt_ids = [ids.tolist() if isinstance(ids, torch.Tensor) else list(ids) for ids in prompt_ids]
        if not prompt_ids or not all(prompt_ids):
            raise SystemExit("there are no prompts, or one has no tokens: every prompt needs at least one")
        settings = {
            "num_samples": num_samples,
            "gen_length": gen_length,
            "block_length": n,
            "denoising_steps": denoising_steps,
            "temperature": temperature,
            "remasking": remasking,
            "confidence_threshold": confidence_threshold,
            "seed": seed,
            "eos_token_ids": self.model.eos_token_ids,
            "logps": "softmax(logits / temperature)" if temperature else "softmax(logits)",
        }
        parts, total = [], len(prompt_ids) * num_samples
        for first in range(0, total, self.max_batch_size):
            samples = torch.arange(first, min(first + self.max_batch_size, total), device=self.device)
            owner = samples // num_samples
            prompts = prompt_ids[int(owner[0]) : int(owner[-1]) + 1]
            parts.append(self._generate(prompts, owner - owner[0], sample_offset + samples, settings, stop_at_eos))
        return concatenate(parts, self.model.pad_token_id)

    def _generate(self, prompt_ids, owner, sample_index, settings, stop_at_eos):
        """One batch: row i continues prompt_ids[owner[i]]. owner, sample_index [N] -> Trace"""
        model, device, n = self.model, self.device, self.model.block_length
        G, temperature = settings["gen_length"], settings["temperature"]
        quota = reveal_quota(n, settings["denoising_steps"])
        P = torch.tensor([len(ids) for ids in prompt_ids], device=device)[owner]  # [N]
        end = (P + G + n - 1) // n * n  # [N], end of the last block
        N, S = len(P), int(end.max())
        column, width = torch.arange(S, device=device), max(map(len, prompt_ids))
        padded = [ids + [model.mask_token_id] * (width - len(ids)) for ids in prompt_ids]
        prompts = torch.tensor(padded, device=device)  # [U, width]
        tokens = torch.full((N, S), model.mask_token_id, device=device)  # absolute positions
        tokens[:, :width] = prompts[owner]
        masked = (column >= P[:, None]) & (column < end[:, None])  # kept apart from the ids: nothing is inferred from them
        dtype = torch.promote_types(model.lm_head.weight.dtype, torch.float32)
        step_map, logps = torch.full_like(tokens, -1), torch.zeros(N, S, dtype=dtype, device=device)
        num_forwards, start = torch.zeros_like(P), P // n * n  # start of the block in work
        eos = torch.tensor(model.eos_token_ids, device=device)

        row = torch.arange(N, device=device)  # rows at work, row r of the cache belongs to row[r]
        cache = self._prefill(prompts, owner, S)
        while len(row):
            at = start[row, None] + torch.arange(n, device=device)  # [R, n] positions of each row's block
            block, open_ = tokens[row[:, None], at], masked[row[:, None], at]
            for step, least in enumerate(quota):
                if not open_.any():
                    break
                hidden = self._forward(block, at, cache)
                num_forwards[row] += open_.any(1)
                r, j = open_.nonzero(as_tuple=True)  # the head sees masked positions alone
                key = (settings["seed"], sample_index[row[r]], at[r, j] - P[row[r]], step)
                drawn, drawn_logps = self._sample(hidden[r, j], keyed_uniform(*key, "token"), temperature)
                if not drawn_logps.isfinite().all():
                    bad = sample_index[row[r[~drawn_logps.isfinite()]]].unique().tolist()
                    raise SystemExit(f"logits are not finite at samples {bad[:8]}: the weights are damaged or have diverged")
                proposal, proposal_logps = block.clone(), torch.zeros(block.shape, dtype=dtype, device=device)
                proposal[r, j], proposal_logps[r, j] = drawn, drawn_logps
                confidence = proposal_logps.exp()
                if settings["remasking"] == "random":
                    confidence[r, j] = keyed_uniform(*key, "order").to(dtype)
                chosen = select(confidence, open_, least, settings["remasking"], settings["confidence_threshold"])
                block, open_ = torch.where(chosen, proposal, block), open_ & ~chosen
                r, j = chosen.nonzero(as_tuple=True)
                step_map[row[r], at[r, j]], logps[row[r], at[r, j]] = step, proposal_logps[r, j]
            tokens[row[:, None], at] = block
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

    def _sample(self, hidden, uniform, temperature, chunk_rows=512):
        """hidden [M, D], uniform [M] -> tokens [M], logps [M], chunk_rows rows at a time. The mask token is never drawn."""
        parts = []
        for rows in torch.arange(len(hidden), device=self.device).split(chunk_rows):
            logits = self.model.head(hidden[rows])
            logits[:, self.model.mask_token_id] = float("-inf")
            parts.append(sample_categorical(logits, uniform[rows], temperature))
        return tuple(torch.cat(values) for values in zip(*parts, strict=True))

    def _trace(self, prompt_ids, tokens, step_map, logps, P, end, sample_index, num_forwards, settings):
        canvas_length = end - P
        offset = torch.arange(int(canvas_length.max()), device=self.device)  # [L]
        on_canvas = offset < canvas_length[:, None]  # [N, L]
        at = torch.where(on_canvas, P[:, None] + offset, 0)
        cut = lambda values, fill: torch.where(on_canvas, values.gather(1, at), fill)
        completion_ids, step_map = cut(tokens, self.model.pad_token_id), cut(step_map, -1)
        is_eos = torch.isin(completion_ids, torch.tensor(self.model.eos_token_ids, device=self.device)) & on_canvas
        return Trace(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            completion_mask=on_canvas & (is_eos.long().cumsum(1) - is_eos.long() == 0),
            canvas_length=canvas_length,
            step_map=step_map,
            replay_map=step_map,  # the [noisy | clean] pass replays the same local step of all blocks in one forward
            logps=cut(logps, 0.0),
            sample_index=sample_index,
            num_forwards=num_forwards,
            settings=settings,
        )
