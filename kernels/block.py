"""Block decoding for GPUs: the tokens of rollout/block.py, several times as fast.

SDAR-8B, bf16, one H200, against lmdeploy 0.18 in the same run (docs/measurements.md): 1.5 times its
tokens/s at 16 rows, 1.4 times at 128.

continuous batching  Each row advances through its blocks at its own pace, so rows need not wait for
                     the slowest. A finished row frees its slot for the next sample of the queue;
                     when the queue is empty, the batch shrinks to the rows that are left. 1.27 x
                     for 384 samples, 128 at a time.
joined commits       One forward of two blocks commits the previous block and makes the first
                     denoising step of the next one. Under a rule with k steps per block, every k-th
                     step is joined. A row that finishes a block at another step commits it
                     separately, and is then in phase. Where the model decides the number of steps,
                     all steps are joined, as long as the batch is small enough to be bound by
                     reading the weights. 1.18 x up to 8 rows.
CUDA graphs          A step has fixed shapes and reads nothing back, so it is captured once per
                     shape and replayed. The host reads the progress of the rows one step late, so
                     the GPU never waits for it.

All of this but the graphs also runs on CPU, for tests.
"""

from collections import namedtuple
from functools import partial

import torch
from torch.nn.utils.rnn import pad_sequence

from distributed.disk import progress
from kernels.decode import cached_attention
from kernels.graphs import Graphs, can_record
from models.experts import experts_of
from models.logps import at_least_fp32
from rollout.block import BlockEngine, empty_cache
from rollout.engine import ADAPTIVE, select
from rollout.sampling import keyed_state, keyed_uniform
from rollout.traces import num_replays

# Shapes are rounded up, so that few graphs serve all: cache widths to multiples of WIDTHS, the
# number of slots to one of SLOTS or a multiple of 32.
WIDTHS = 128
SLOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48)
PREFILL = 1 << 15  # most tokens in one forward of prompts
# Under adaptive rules all steps are joined up to this many tokens. Joined / separate tokens/s of
# SDAR-8B on one H200 with 4 steps a block: 1.18 up to 8 rows, 1.09 with 16, 0.99 with 24, 0.93
# with 32.
RIDGE = 128


# Of each sample: first position of its current block, end of its last one; step in the block,
# post-editing steps, forwards so far; first position of its completion; number of the last step of
# its last block. The host reads the first two.
State = namedtuple("State", "start end step edits forwards first final")


class Slots:
    """All tensors of a rollout, at fixed addresses, because CUDA graphs record addresses.

    N samples wait or are decoded; R slots hold the KV cache of those being decoded. Slot r decodes
    sample[r], and row r of k, v [R, K, S, h] of each layer holds its keys and values.
    state [7, N]: see `State`. canvas [4, N, S]: tokens, whether masked, step map, `keyed_state` of
    all keys of a position, at absolute positions. history: tokens and logps [history, N, S] of each
    step, for Trace.records; 0: none.
    """

    def __init__(self, model, N, R, S, history):
        weight = model.lm_head.weight
        empty = partial(torch.zeros, device=weight.device)
        self.sizes = N, R, S, history
        self.state = empty(len(State._fields), N, dtype=torch.long)
        self.canvas = empty(4, N, S, dtype=torch.long)
        self.logps = empty(N, S, dtype=at_least_fp32(weight))
        tokens = empty(history, N, S, dtype=torch.int32)
        self.history = tokens, empty(tokens.shape, dtype=self.logps.dtype)
        self.sample = empty(R, dtype=torch.long)
        self.eos = empty(len(model.eos_token_ids), dtype=torch.long)
        self.cache = empty_cache(model, R, S)

    def fill(self, model, prompt_ids, owner, sample_index, settings, known):
        """The state of N samples before their first step; known: as `canvas` of _generate. Entries
        from N on count as finished: free slots point to them.
        """
        n, N, device = settings["block_length"], len(owner), self.state.device
        part, steps = settings["steps"], settings["denoising_steps"]
        P = torch.tensor([*map(len, prompt_ids)], device=device)[owner]
        prompts = pad_sequence([*map(torch.tensor, prompt_ids)], True, model.mask_token_id)
        end, none = (P + settings["gen_length"] + n - 1) // n * n, torch.zeros_like(P)
        self.canvas[0], self.canvas[1], self.canvas[2] = model.mask_token_id, 0, -1
        self.canvas[0, :N, : prompts.shape[1]] = prompts.to(device)[owner]
        self.state.zero_(), self.logps.zero_(), self.history[0].fill_(-1)
        self.eos.copy_(torch.tensor(settings["eos_token_ids"]))
        ids, masked, step_map, key = self.canvas[:, :N]
        forwards = known.write_to((ids, step_map, self.logps), P) if known else none
        column = torch.arange(ids.shape[1], device=device)
        is_new = column >= P[:, None]
        masked.copy_(is_new & (step_map < 0))
        key.copy_(keyed_state(settings["seed"], sample_index[:, None], column - P[:, None]))
        # of the first block with a mask; those before it are in the cache when the sample enters
        start = torch.minimum((masked.cumsum(1) == 0).sum(1) // n * n, end)
        has_eos = torch.isin(ids, self.eos) & is_new & (column < start[:, None])
        end = torch.where(has_eos.any(1) & settings["stop_at_eos"], start, end)
        # steps are counted over all blocks; a part may begin and end within one
        zero = P // n * n
        end = torch.minimum(end, zero + min(-(-part.stop // steps) * n, len(column)))
        step = (part.start - (start - zero) // n * steps).clamp(min=0)
        final = part.stop - 1 - (end - n - zero) // n * steps
        state = start, end, step, none, forwards, P, final
        self.state[:, :N] = torch.stack(state)

    def copy(self, source, target, width):
        """Copy the first positions of the cache from slots to slots, both lists."""
        source, target = (to_device(slots, self.sample.device) for slots in (source, target))
        for layer in self.cache:
            for values in layer:
                values[target, :, :width] = values[source, :, :width]

    def progress(self):
        """Start a copy of the progress to the host. -> function that waits for it -> start, end:
        lists of N ints
        """
        there = self.state[:2].to("cpu", non_blocking=True, copy=True)  # pinned, if from a GPU
        if self.state.is_cpu:
            return there.tolist
        arrived = torch.cuda.current_stream(self.state.device).record_event()
        return lambda: (arrived.synchronize(), there.tolist())[1]


def to_device(values, device):
    """A list of ints as a tensor; on CUDA without waiting for queued work."""
    values = torch.tensor(values)
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def number_of_slots(samples):
    return next((number for number in SLOTS if number >= samples), -(-samples // 32) * 32)


class FastBlockEngine(BlockEngine):
    """Cache and graphs stay for the next call of generate; `release` frees them."""

    refills = True

    def __init__(self, model, max_batch_size):
        super().__init__(model, max_batch_size)
        self.release()
        self.use_graphs = can_record(model)
        self.ridge = 0 if experts_of(model) else RIDGE  # more tokens would activate more experts

    def release(self):
        self.slots = self.graphs = None

    def _generate(self, prompt_ids, owner, sample_index, settings, canvas):
        N, R = len(owner), number_of_slots(min(len(owner), self.max_batch_size))
        n, longest = settings["block_length"], max(map(len, prompt_ids)) + settings["gen_length"]
        width = -(-max(-(-longest // n), 2) * n // WIDTHS) * WIDTHS
        # Behind the N samples are R finished ones: the contents of free slots.
        sizes = N + R, R, width, num_replays(settings) + 1 if settings["records"] else 0
        have = self.slots.sizes if self.slots else (0, 0, 0, 0)
        # also for calls like the last: rollouts and evaluations take turns
        sizes = tuple(map(max, have, sizes))
        if sizes != have:
            self.release()  # the old ones make room
            self.slots = Slots(self.model, *sizes)
        if self.use_graphs and not self.graphs:
            self.graphs = Graphs(self.device)
        slots = self.slots
        slots.fill(self.model, prompt_ids, owner, sample_index, settings, canvas)
        self._decode(slots, R, owner.tolist(), settings)
        state = State(*slots.state[:, :N].clone())
        canvas = slots.canvas[0, :N], slots.canvas[2, :N], slots.logps[:N]
        history = [values[:, :N] for values in slots.history]
        return self._finish(
            prompt_ids, owner, canvas, history, state.first, state.end, sample_index,
            state.forwards, settings,
        )  # fmt: skip

    # --- the host: which sample is in which slot, and the shape of the next step ------------------

    def _decode(self, slots, R, owners, rule):
        """Decode all samples in the order of their numbers, R at a time."""
        n, N = self.model.block_length, len(owners)
        # A step depends on these only through its tensors; all else is part of the graph.
        varying = "seed", "num_samples", "gen_length", "eos_token_ids", "steps"
        key = tuple(value for name, value in rule.items() if name not in varying)
        start, end = slots.progress()()
        places = list(range(N, N + R))  # the sample in each slot; a finished one in a free slot
        self._place(slots, places, ())
        entered = launched = 0  # samples taken from the queue; steps
        unseen = None  # the progress of the last step
        is_live = lambda r: start[places[r]] < end[places[r]]
        bar = progress(None, "completions", total=N)
        while True:
            free = [r for r in range(R) if not is_live(r)]
            # several at a time: a prefill is no part of the graphs
            if entered < N and len(free) > R // 32:
                samples = range(entered, min(entered + len(free), N))
                self._enter(slots, places, free, samples, start, owners)
                entered = samples.stop
            live = list(filter(is_live, range(R)))
            bar.update(entered - len(live) - bar.n)
            if not live and entered == N:
                bar.close()
                return
            joined = self._is_joined(R, rule, launched)
            # How far a row can be: a step ends at most one block, and a joined one begins the next.
            work = (places[r] for r in live)
            furthest = max([2 * n, *(min(start[i] + (2 + joined) * n, end[i]) for i in work)])
            width = min(slots.canvas.shape[2], -(-furthest // WIDTHS) * WIDTHS)
            if entered == N and number_of_slots(len(live)) < R:
                R = number_of_slots(len(live))
                self._move(slots, places, live, R, width)
            step = partial(self._step, slots, R, width, rule, joined)
            self.graphs.run((R, width, joined, key), step) if self.graphs else step()
            before, unseen = unseen, slots.progress()
            launched += 1
            if before:
                start, end = before()

    def _is_joined(self, R, rule, number):
        """Whether step `number` of a rollout is joined. Affects speed only."""
        # With editing, a step that reveals the last mask need not be the last of its block.
        if rule["editing_threshold"] is not None:
            return False
        if rule["remasking"] in ADAPTIVE:
            return 2 * R * self.model.block_length <= self.ridge
        return number > 0 and number % rule["denoising_steps"] == 0

    def _move(self, slots, places, live, R, width):
        """Move the samples in slots from R on to free slots before it."""
        free = [r for r in range(R) if r not in live]
        if source := [r for r in live if r >= R]:
            slots.copy(source, free[: len(source)], width)
            self._place(slots, places, zip(free, [places[r] for r in source], strict=False))

    def _place(self, slots, places, pairs):
        """pairs: (slot, sample)"""
        for r, i in pairs:
            places[r] = i
        slots.sample[: len(places)] = to_device(places, self.device)

    def _enter(self, slots, places, free, samples, start, owners):
        """Put the next samples into free slots. What is before their first block is prefilled once
        for each owner: later samples of it copy its cache.
        """
        first = samples[0]
        # The cache of this owner is still in the slot of the sample before.
        last = owners[first - 1] if first else None
        pairs = list(zip(free, samples, strict=False))
        if siblings := [r for r, i in pairs if owners[i] == last]:
            source = [places.index(first - 1)] * len(siblings)
            slots.copy(source, siblings, start[first])
        self._place(slots, places, pairs)
        whole = {owners[i]: slots.canvas[0, i, : start[i]] for i in samples if owners[i] != last}
        new, longest = list(whole), max(start[i] for i in samples)
        together = max(1, PREFILL // max(1, longest))
        for some in (new[k : k + together] for k in range(0, len(new), together)):
            rows = [(r, some.index(owners[i])) for r, i in pairs if owners[i] in some]
            to_slot = (to_device(values, self.device) for values in zip(*rows, strict=True))
            # Shorter prompts are padded on the right. No block of the prompt sees the padding, and
            # every later block overwrites its own positions before they are read.
            prompts = pad_sequence([whole[owner] for owner in some], True, self.model.mask_token_id)
            valid = torch.ones_like(prompts, dtype=torch.bool)
            self._write_prompts(prompts, valid, slots.cache, *to_slot)

    # --- the device: one step ---------------------------------------------------------------------

    def _step(self, slots, R, width, rule, joined):
        """One forward of the current block of each of the first R slots, over `width` positions.

        A block with masks is denoised, one without is committed, except the last. joined: rows
        whose block has no masks begin the next one, and the forward covers both. Finished rows are
        forwarded too, but nothing of them changes. All state is read in a few gathers and written
        in a few scatters: at small batches every kernel launch counts.
        """
        n, row = self.model.block_length, slots.sample[:R]
        start, end, step, edits, forwards, first, final = slots.state[:, row]
        live = start < end
        arange = torch.arange(2 * n, device=self.device)
        last = (width // n - 1) * n  # a finished row may end behind `width`
        at = seen = start.clamp(max=last)[:, None] + arange[:n]  # [R, n]
        if joined:
            goes_on = live & ~slots.canvas[1, row[:, None], at].any(1)
            ahead = n * goes_on
            start, step, at = start + ahead, step * ~goes_on, at + ahead[:, None]
            # the previous block and this one; the first block has none before it
            seen = (at[:, :1] - n).clamp(min=0) + arange
        cache = [(k[:R, :, :width], v[:R, :, :width]) for k, v in slots.cache]
        attend = lambda layer, q, k, v: cached_attention(q, k, v, *cache[layer], seen[:, 0], n)
        hidden = self.model.hidden(slots.canvas[0, row[:, None], seen], seen, attend)
        if joined:  # only the current block is denoised
            hidden = hidden.take_along_dim((at - seen[:, :1])[..., None], 1)

        here = row[:, None], at
        block, masked, step_map, key = slots.canvas[:, *here]
        masked = masked.bool() & live[:, None]
        offset = at - first[:, None]
        draw = partial(keyed_uniform, step[:, None], state=key)
        # greedy draws read no numbers
        uniform = draw("token") if rule["temperature"] else offset
        drawn, logps, confidence = self._sample(hidden, uniform, rule)
        if rule["remasking"] == "random":
            confidence = draw("order").to(logps.dtype)
        base, remainder = divmod(n, rule["denoising_steps"])
        # `reveal_quota` at each row's own step
        quota = base + (step < remainder)[:, None] if remainder else base
        chosen = select(confidence, masked, quota, **rule)
        rest, was_noisy = masked & ~chosen, masked.any(1)
        is_whole, is_committed = was_noisy & ~rest.any(1), live & ~was_noisy
        if rule["editing_threshold"] is not None:
            may_edit = was_noisy | live & (edits < rule["max_post_steps"])
            sure = (drawn != block) & (logps.exp() > rule["editing_threshold"])
            edited = may_edit[:, None] & ~masked & (offset >= 0) & sure
            chosen, is_committed = chosen | edited, is_committed & ~edited.any(1)
            is_whole = is_committed
            edits = (edits + ~was_noisy) * ~is_committed
        block = torch.where(chosen, drawn, block)
        if rule["records"]:
            when = step[:, None], *here
            kept = masked if rule["records"] == "draws" else chosen
            for values, new in zip(slots.history, (drawn.int(), logps), strict=True):
                values[when] = torch.where(kept, new, values[when])
        following = start + n
        if rule["stop_at_eos"]:
            has_eos = ((block[..., None] == slots.eos).any(-1) & (offset >= 0)).any(1)
            end = torch.where(is_whole & has_eos, following, end)
        is_last = is_whole | was_noisy & (step >= final)
        is_done = is_committed | (is_last & (following >= end))
        step_map = torch.where(chosen, step[:, None], step_map)
        start = torch.where(is_done, following, start)
        step, forwards = (step + live) * ~is_done, forwards + live
        slots.canvas[:, *here] = torch.stack([block, rest, step_map, key])
        slots.logps[here] = torch.where(chosen, logps, slots.logps[here])
        state = start, end, step, edits, forwards, first, final
        slots.state[:, row] = torch.stack(state)
