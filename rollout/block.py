"""Cached block-causal decoding for block diffusion models (SDAR, LLaDA2): prefill, then per block denoise and commit.

prefill   the whole blocks of the prompt, once per prompt; keys and values are stored, rotated
denoise   forward the block alone over the cached keys; reveal some of its masked tokens; again until none is masked
commit    one more forward of the now clean block: its keys and values replace those made while it was noisy

Every row goes through its blocks at its own pace: one step is one forward of the block that each row works on, to denoise or to
commit it. A step has fixed shapes and reads nothing back, so that on CUDA it is one graph; between some steps the host looks
which rows have ended, and narrows the batch and the cache to what is in use.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention import Visibility, make_attend
from kernels.moe import Experts
from rollout import engine
from rollout.graphs import Graphs
from rollout.traces import Trace, scored

WINDOW = 8  # most steps between two looks at the rows, on CUDA
WIDTHS = 128  # on CUDA the cache is read and kept in multiples of so many positions,
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48)  # and so many rows, or a multiple of 32, are stepped: each pair is a graph

# How fast they read the cache of 64 rows, with a mask, on an H200 in bf16: cuDNN 2.1 to 2.7 TB/s, memory-efficient 1.8 to 2.1.
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Rule:
    """What a step does beside its tensors: a graph serves one of these."""

    denoising_steps: int
    temperature: float
    remasking: str
    confidence_threshold: float
    stop_at_eos: bool
    eos_token_ids: tuple


class Slots:
    """Tensors of a batch, at fixed addresses: N rows of S absolute positions and, per layer, the cache.

    A step works on the first R of row [N]; row r of the cache, k and v [N, K, S, h], belongs to row[r] of all the others.
    """

    def __init__(self, model, N, S, device, dtype):
        config, empty = model.config, partial(torch.zeros, device=device)
        self.tokens, self.step_map = (empty(N, S, dtype=torch.long) for _ in range(2))
        self.masked = empty(N, S, dtype=torch.bool)
        self.logps = empty(N, S, dtype=torch.promote_types(dtype, torch.float32))
        self.row, self.prompt_length, self.sample_index = (empty(N, dtype=torch.long) for _ in range(3))
        self.start, self.end = (empty(N, dtype=torch.long) for _ in range(2))  # of the block in work, and of the last
        self.step, self.num_forwards = (empty(N, dtype=torch.long) for _ in range(2))
        self.is_broken = empty(N, dtype=torch.bool)  # a token had a log-probability that is not finite
        self.seed = empty((), dtype=torch.long)
        # Zeros: what is not yet written has weight 0 in the attention, and 0 times NaN would be NaN.
        shape = N, config.num_key_value_heads, S, config.head_dim
        self.cache = [tuple(empty(shape, dtype=dtype) for _ in range(2)) for _ in range(config.num_hidden_layers)]

    def view(self, R, width):
        """The cache of the first R rows and `width` positions."""
        return [(k[:R, :, :width], v[:R, :, :width]) for k, v in self.cache]

    def keep(self, order):
        """Rows of the batch in work, in their new order: list of places below R."""
        order = torch.tensor(order, device=self.row.device)
        for values in (self.row, *(x for layer in self.cache for x in layer)):
            values[: len(order)] = values[order]


class BlockEngine(engine.Engine):
    """Sampler of a block-causal model. The grid of blocks starts at position 0 of the prompt.

    On CUDA the cache and the graphs stay for the next batch; `release` gives their memory back.
    """

    def __init__(self, model, max_batch_size):
        super().__init__(model, max_batch_size)
        self.in_buckets = self.use_graphs = self.device.type == "cuda"  # in_buckets: batches of few sizes, in lasting slots
        self.slots = self.graphs = None
        experts = next((module for module in model.modules() if isinstance(module, Experts)), None)
        if self.use_graphs and experts is not None and not experts.is_grouped(self.dtype):
            print(
                f"rollout without CUDA graphs: experts in {self.dtype} run one after the other, bf16 ones together", flush=True
            )
            self.use_graphs = False

    def release(self):
        """Free the cache and the graphs; the next batch makes them again."""
        self.slots = self.graphs = None

    def block_length(self, asked):
        n = self.model.block_length
        if asked not in (None, 0, n):
            raise SystemExit(f"--block-length {asked}: this model was trained with blocks of {n}; leave it out or give {n}")
        return n

    def _generate(self, prompt_ids, owner, sample_index, settings, stop_at_eos):
        n = settings["block_length"]
        whole = ("denoising_steps", "temperature", "remasking", "confidence_threshold")
        rule = Rule(*(settings[name] for name in whole), stop_at_eos, tuple(settings["eos_token_ids"]))
        window = min(WINDOW, rule.denoising_steps + 1) if self.in_buckets else 1
        slots = self._open(prompt_ids, owner, sample_index, settings)
        places = range(self._bucket(len(owner)))  # of the rows in work
        while True:
            progress = torch.stack([slots.start, slots.end, slots.is_broken])[:, slots.row[: len(places)]]
            start, end, is_broken = progress.tolist()  # the one wait for the device
            if any(is_broken):
                bad = slots.sample_index[slots.is_broken].unique().tolist()
                self.release()  # its cache may hold NaN
                raise SystemExit(f"logits are not finite at samples {bad[:8]}: the weights are damaged or have diverged")
            live = [r for r in places if start[r] < end[r]]
            if not live:
                break
            R = self._bucket(len(live))
            if R < len(places):
                slots.keep((live + [r for r in places if start[r] >= end[r]])[:R])
                places = range(R)
            # A block takes two steps at least: one that reveals all of it, and its commit.
            furthest = max(start[r] for r in live) + n * (window // 2 + 1)
            seen = min(slots.tokens.shape[1], -(-furthest // WIDTHS) * WIDTHS if self.in_buckets else furthest)
            step = partial(self._step, slots, R, seen, rule)
            for _ in range(window):
                self.graphs.run((R, seen, rule), step) if self.graphs else step()
        if not self.in_buckets:
            self.release()
        N, owners = len(owner), owner.tolist()
        cut = lambda values: values[:N].clone()
        return self._trace(
            [prompt_ids[i] for i in owners], slots.tokens[:N], slots.step_map[:N], slots.logps[:N], cut(slots.prompt_length),
            cut(slots.end), sample_index, cut(slots.num_forwards), settings,
        )  # fmt: skip

    def _bucket(self, rows):
        """How many rows a step takes for so many live ones."""
        if not self.in_buckets:
            return rows
        return next((size for size in ROWS if size >= rows), -(-rows // 32) * 32)

    def _open(self, prompt_ids, owner, sample_index, settings):
        """Lay out a batch: its rows in the first of the slots, the others at their end. -> slots"""
        model, device, n, N = self.model, self.device, settings["block_length"], len(owner)
        lengths = [len(ids) for ids in prompt_ids]
        last = max(-(-(length + settings["gen_length"]) // n) * n for length in lengths)
        capacity, width = self._bucket(N), -(-last // WIDTHS) * WIDTHS if self.in_buckets else last
        if self.slots is None or capacity > len(self.slots.row) or width > self.slots.tokens.shape[1]:
            self.release()  # the old ones make room
            self.slots = Slots(model, capacity, width, device, self.dtype)
        slots = self.slots
        self.graphs = (self.graphs or Graphs(device)) if self.use_graphs else None

        P = torch.tensor(lengths, device=device)[owner]
        padded = [ids + [model.mask_token_id] * (max(lengths) - len(ids)) for ids in prompt_ids]
        prompts = torch.tensor(padded, device=device)  # [U, width of the prompts]
        for values, value in (
            (slots.tokens, model.mask_token_id), (slots.step_map, -1), (slots.logps, 0), (slots.start, 0), (slots.end, 0),
            (slots.step, 0), (slots.num_forwards, 0), (slots.is_broken, False),
        ):  # fmt: skip
            values.fill_(value)
        slots.tokens[:N, : prompts.shape[1]] = prompts[owner]
        slots.prompt_length[:N], slots.sample_index[:N] = P, sample_index
        slots.start[:N], slots.end[:N] = P // n * n, (P + settings["gen_length"] + n - 1) // n * n
        column = torch.arange(slots.tokens.shape[1], device=device)
        slots.masked.copy_((column >= slots.prompt_length[:, None]) & (column < slots.end[:, None]))
        slots.row.copy_(torch.arange(len(slots.row), device=device))
        slots.seed.fill_((settings["seed"] + 2**63) % 2**64 - 2**63)  # the int64 with the same bits
        self._prefill(prompts, owner, slots.cache)
        return slots

    def _prefill(self, prompts, owner, cache):
        """Write keys and values of the prompts [U, P], which is enough for their whole blocks, into the rows of the cache.

        Shorter prompts are padded on the right: padding lies in the last block or later, which no whole block sees, and each
        row's first own block overwrites it.
        """
        U, P = prompts.shape
        position_ids = torch.arange(P, device=self.device).expand(U, P)
        attend_prompt = make_attend(Visibility(position_ids // self.model.block_length))

        def attend(layer, q, k, v):
            for past, new in zip(cache[layer], (k, v), strict=True):
                past[: len(owner), :, :P] = new[owner]
            return attend_prompt(layer, q, k, v)

        self.model.hidden(prompts, position_ids, attend)

    def _step(self, slots, R, width, rule):
        """One forward of the block in work of each of the first R rows, over `width` positions: denoises or commits it.

        A block without masks is committed, but the last one needs no commit. Rows that have ended are carried along and change
        nothing.
        """
        n, row = self.model.block_length, slots.row[:R]
        start, end, step = slots.start[row], slots.end[row], slots.step[row]
        is_live = start < end
        at = start.clamp(max=width - n)[:, None] + torch.arange(n, device=self.device)  # [R, n] positions of each row's block
        here = row[:, None], at
        block, masked = slots.tokens[here], slots.masked[here] & is_live[:, None]
        hidden = self._forward(block, at, slots.view(R, width))

        offset = at - slots.prompt_length[row, None]
        key = slots.seed, slots.sample_index[row, None], offset, step[:, None]
        uniform = engine.keyed_uniform(*key, "token")
        how = {"temperature": rule.temperature, "remasking": rule.remasking, "eos_policy": "none"}
        drawn, logps, confidence = (x.view(R, n) for x in self._sample(hidden.flatten(0, 1), uniform.flatten(), how))
        if rule.remasking == "random":
            confidence = engine.keyed_uniform(*key, "order").to(logps.dtype)
        base, remainder = divmod(n, rule.denoising_steps)
        quota = (base + (step < remainder))[:, None]  # reveal_quota, of each row's own step
        chosen = engine.select(confidence, masked, quota, rule.remasking, rule.confidence_threshold)
        block, rest, was_noisy = torch.where(chosen, drawn, block), masked & ~chosen, masked.any(1)

        slots.tokens[here], slots.masked[here] = block, rest
        slots.logps[here] = torch.where(chosen, logps, slots.logps[here])
        slots.step_map[here] = torch.where(chosen, step[:, None], slots.step_map[here])
        slots.is_broken[row] |= (masked & ~logps.isfinite()).any(1)
        slots.num_forwards[row] += is_live
        is_eos = torch.zeros_like(masked)
        for token in rule.eos_token_ids:
            is_eos |= block == token
        is_whole = was_noisy & ~rest.any(1)
        stops = is_whole & (is_eos & (offset >= 0)).any(1) & rule.stop_at_eos
        end = torch.where(stops, start + n, end)
        is_last = is_whole & (start + n >= end)
        slots.end[row], slots.start[row] = end, start + n * (is_live & (is_last | ~was_noisy))
        slots.step[row] = torch.where(was_noisy, step + 1, 0)

    def _forward(self, block, at, cache):
        """Forward each row's block [R, n], at positions `at`, over its cached past; writes its keys and values. -> [R, n, D]

        cache: per layer k, v [R, K, width, h], no wider than has to be read.
        """
        rows, width = torch.arange(len(at), device=self.device)[:, None], cache[0][0].shape[2]
        visible = torch.arange(width, device=self.device) <= at[:, -1:]
        bias = torch.zeros(visible.shape, dtype=self.dtype, device=self.device).masked_fill(~visible, float("-inf"))
        bias = bias[:, None, None]  # [R, 1, 1, width]; made here, as a bool mask would be turned into it in every layer

        def attend(layer, q, k, v):
            keys, values = cache[layer]
            keys[rows, :, at], values[rows, :, at] = k.transpose(1, 2), v.transpose(1, 2)
            # All queries of a row see the same keys: those of heads that share keys become queries of one head.
            grouped = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [R, K, H / K n, h]
            with sdpa_kernel(BACKENDS, set_priority=True):
                y = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias)
            y = y.unflatten(2, (-1, q.shape[2])).permute(0, 3, 1, 2, 4)  # [R, n, K, H / K, h], the order of o_proj's inputs
            return y.flatten(2, 3).transpose(1, 2)

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
