"""Cached block-causal decoding for block diffusion models (SDAR, LLaDA2): prefill, then per block denoise and commit.

prefill   the whole blocks of the prompt, once per prompt; keys and values are stored, rotated
denoise   forward the block alone over the cached keys; reveal some of its masked tokens; again until none is masked
commit    one more forward of the now clean block: its keys and values replace those made while it was noisy

Every row goes through its blocks at its own pace: one step is one forward of the block that each row works on, to denoise or to
commit it. A row that has ended leaves its place to the next sample that waits; when none waits, batch and cache narrow to what
is in use. A step has fixed shapes and reads nothing back, so that on CUDA it is one graph, and the host looks at the rows as
they were one step before: the device has a step to do meanwhile.

On CUDA a commit is joined with the next block's first step: a joined step is a forward of two blocks, the one before and the
one in work, and what it writes of the former is its commit, again or at last. Under a rule of k steps a block every k-th one is
joined; a row that finishes a block in between commits it by itself and so falls into step. Where the number of steps depends on
the model, all steps are joined, as long as a forward costs what reading the weights costs.

Token editing (LLaDA2.1, arXiv 2602.08676, its modeling file's generate): a step also replaces revealed tokens of the block for
which it draws another one with a probability above editing_threshold. A clean block goes on until a step, the commit, finds
nothing to replace, or max_post_steps have.
"""

from collections import deque
from dataclasses import dataclass
from functools import partial

import torch

from kernels import has_kernels, speed_up_engine
from kernels.decode import decode_attend
from models.attention import Visibility, make_attend
from models.experts import Experts
from rollout import engine
from rollout.graphs import Graphs
from rollout.slots import Slots, free_bytes, other_bytes, row_bytes, to_device
from rollout.traces import Trace, most_steps, scored

WIDTHS = 128  # on CUDA the cache is read and kept in multiples of so many positions,
ROWS = (
    1,
    2,
    4,
    8,
    12,
    16,
    24,
    32,
    48,
)  # and so many rows, or a multiple of 32, are stepped: each pair is a graph
PREFILL = 1 << 15  # most tokens in a forward of prompts
# On CUDA, most tokens of steps that are all joined, for dense models. Joined over separate commits, tokens/s of SDAR-8B on one
# H200 (bench/refill.py --ridge) with 4 steps a block: to 8 rows 1.18, 16 1.09, 24 0.99, 32 0.93; with 2 1.38, 1.27, 1.13, 1.05.
RIDGE = 128
ADAPTIVE = (
    "low_confidence_dynamic",
    "low_confidence_factor",
    "entropy_bounded",
)  # rules that may end a block early
NOT_FINITE, LATE, MANY = 1, 2, 3  # faults of a row


@dataclass(frozen=True)
class Rule:
    """What a step does beside its tensors: a graph serves one of these. The names are those of Trace.settings."""

    denoising_steps: int
    temperature: float
    top_k: int
    top_p: float
    remasking: str
    confidence_threshold: float
    factor: float
    eb_threshold: float
    editing_threshold: float | None
    max_post_steps: int
    records: str | None
    eos_policy: str
    eos_token_ids: tuple
    stop_at_eos: bool


class BlockEngine(engine.Engine):
    """Sampler of a block-causal model. The grid of blocks starts at position 0 of the prompt.

    On CUDA the cache and the graphs stay for the next batch; `release` gives their memory back.
    """

    refills = True
    records = (None, "steps", "events")

    def __init__(self, model, max_batch_size):
        super().__init__(model, max_batch_size)
        if has_kernels(model.lm_head.weight):
            speed_up_engine(model)
        self.in_buckets = self.use_graphs = (
            self.device.type == "cuda"
        )  # in_buckets: batches of few sizes, in lasting slots
        self.slots, self.graphs, self.eos = (
            None,
            None,
            {},
        )  # eos: ids on the device, at addresses that graphs know
        experts = next((module for module in model.modules() if isinstance(module, Experts)), None)
        self.fuses = has_kernels(
            model.lm_head.weight
        )  # whether a step's bookkeeping is two kernels
        self.joins = self.in_buckets  # whether a commit may be part of the next block's first step
        self.ridge = RIDGE if experts is None else 0  # more tokens would wake more experts
        if self.use_graphs and experts is not None and not experts.is_grouped(self.dtype):
            print(
                f"rollout without CUDA graphs: experts in {self.dtype} run one after the other, bf16 ones together",
                flush=True,
            )
            self.use_graphs = False

    def release(self):
        """Free cache and graphs: for those who need the memory between rollouts more than the seconds of making them again."""
        self.slots = self.graphs = None

    def block_length(self, asked):
        n = self.model.block_length
        if asked not in (None, 0, n):
            raise SystemExit(
                f"--block-length {asked}: this model was trained with blocks of {n}; leave it out or give {n}"
            )
        return n

    def _generate(self, prompt_ids, owner, sample_index, settings, stop_at_eos):
        rule = Rule(
            **{
                name: settings[name]
                for name in Rule.__annotations__
                if name not in ("eos_token_ids", "stop_at_eos")
            },
            eos_token_ids=tuple(settings["eos_token_ids"]),
            stop_at_eos=stop_at_eos,
        )
        N, P, R = (
            len(owner),
            [len(ids) for ids in prompt_ids],
            self._bucket(min(len(owner), self.max_batch_size)),
        )
        try:
            slots = self._open(N, R, max(P), settings)
            slots.fill(self.model, prompt_ids, owner, sample_index, settings)
            self._decode(slots, R, prompt_ids, owner.tolist(), rule)
        except torch.OutOfMemoryError:
            self.release()
            raise SystemExit(
                f"a rollout of {R} rows ran out of memory: try {max(R // 2, 1)}; {engine.LOWER}"
            ) from None
        if not self.in_buckets:
            self.release()
        return self._trace([prompt_ids[i] for i in owner.tolist()], slots, N, settings)

    def _bucket(self, rows):
        """How many rows a step takes for so many live ones."""
        if not self.in_buckets:
            return rows
        return next((size for size in ROWS if size >= rows), -(-rows // 32) * 32)

    def _open(self, N, R, longest, settings):
        """-> slots for N samples, R at a time, of prompts up to `longest`: those of the last batch, if they are large enough"""
        n = settings["block_length"]
        last = max(-(-(longest + settings["gen_length"]) // n), 2) * n
        width = -(-last // WIDTHS) * WIDTHS if self.in_buckets else last
        history = most_steps(settings) if settings["records"] else 0
        sizes = (
            N + R,
            R,
            width,
            history,
        )  # behind the samples R ended ones, for places that are free
        have = self.slots.sizes if self.slots else sizes
        if not self.slots or any(x < y for x, y in zip(have, sizes, strict=True)):
            self.release()  # the old ones make room
            each = row_bytes(self.model, self.dtype)
            room = free_bytes(self.device) - other_bytes(
                self.model, N + R, width, history, PREFILL, self.dtype
            )
            if R * width * each > room:
                need, left = R * width * each / 2**30, max(room, 0)
                raise SystemExit(
                    f"{R} rows of {width} tokens need {need:.1f} GiB for keys and values, {left / 2**30:.1f} GiB are left: "
                    f"{left // (width * each)} rows fit; {engine.LOWER}"
                )
            both = [
                max(pair) for pair in zip(have, sizes, strict=True)
            ]  # batches of two kinds in turn share slots and graphs
            self.slots = Slots(
                self.model,
                *(both if 2 * both[1] * both[2] * each < room else sizes),
                self.device,
                self.dtype,
            )
        self.graphs = (self.graphs or Graphs(self.device)) if self.use_graphs else None
        return self.slots

    def _decode(self, slots, R, prompt_ids, owners, rule):
        """Step all samples to their ends, R at a time, in the order of their numbers."""
        n, N = self.model.block_length, len(owners)
        behind = int(
            self.in_buckets
        )  # steps between the one that the host has seen and the one that it launches
        start, end, _, left = slots.look()()
        places, entered, looks = (
            list(range(N, N + R)),
            0,
            deque(),
        )  # places: the sample at each, an ended one where it is free
        slots.sample[:R] = torch.arange(N, N + R, device=self.device)
        clock = 0  # steps launched
        while True:
            free = [r for r in range(R) if start[places[r]] >= end[places[r]]]
            if entered < N and free:
                samples = range(entered, min(entered + len(free), N))
                self._enter(slots, places, free, samples, prompt_ids, owners)
                entered = samples.stop
            live = [r for r in range(R) if start[places[r]] < end[places[r]]]
            if not live:
                break
            unseen = [(stepped, was_joined) for stepped, was_joined, _ in looks]
            if all(
                end[i] - start[i] <= n and self._is_done(i, left[i], unseen, rule)
                for i in (places[r] for r in live)
            ):
                start, end, left = self._seen(looks, slots, rule)
                continue
            joined = self._is_joined(R, rule, clock)
            # The furthest that a row can be: each step ends a block at most, and a joined one begins the next.
            furthest = max(
                2 * n,
                *(
                    min(start[i] + (behind + 1 + joined) * n, end[i])
                    for i in (places[r] for r in live)
                ),
            )
            width = min(
                slots.tokens.shape[1],
                -(-furthest // WIDTHS) * WIDTHS if self.in_buckets else furthest,
            )
            fewer = self._bucket(len(live))
            if entered == N and fewer < R:
                R, free = fewer, [r for r in range(fewer) if r not in live]
                far = [r for r in live if r >= R]
                self._move(slots, places, far, free, width)
            most = self._most_masks([places[r] for r in live], left, unseen, rule, joined)
            step = partial(self._step, slots, R, width, rule, joined, most)
            self.graphs.run((R, width, rule, joined, most), step) if self.graphs else step()
            looks.append((set(places[:R]), joined, slots.look()))
            clock += 1
            if len(looks) > behind:
                start, end, left = self._seen(looks, slots, rule)

    def _seen(self, looks, slots, rule):
        """Wait for the oldest look. -> start, end and left of all samples"""
        start, end, fault, left = looks.popleft()[2]()
        if any(fault):
            self._fail(slots, fault, rule)
        return start, end, left

    def _is_done(self, sample, left, unseen, rule):
        """Whether a sample's last block, in which the host has seen `left` masks, is whole after the unseen steps for sure"""
        if rule.editing_threshold is not None:
            return False
        steps = sum(sample in some for some, _ in unseen)
        return left <= steps * (self.model.block_length // rule.denoising_steps)

    def _is_joined(self, R, rule, clock):
        """Whether step number `clock` of a rollout is joined. Only its speed depends on the answer."""
        if (
            not self.joins or rule.editing_threshold is not None
        ):  # an edit may follow the last reveal
            return False
        if rule.remasking in ADAPTIVE:
            return 2 * R * self.model.block_length <= self.ridge
        return clock > 0 and clock % rule.denoising_steps == 0

    def _most_masks(self, samples, left, unseen, rule, joined):
        """-> at most so many tokens of a block are masked in the next step: they alone pass through the head

        left: masks that the host has seen in the block of each sample; unseen: (samples, joined) of each step since then. What
        follows from it under rules of a fixed number of tokens a step is rounded up to quarters of a block: each is a graph.
        """
        n = self.model.block_length
        if rule.remasking in ADAPTIVE or rule.editing_threshold is not None:
            return n
        base, remainder = divmod(n, rule.denoising_steps)
        quotas = {base, base + (remainder > 0)}
        enter = lambda number, joined: (
            n if joined and not number else number
        )  # a whole block goes on to the next one, or
        leave = lambda number: (
            {max(number - quota, 0) for quota in quotas} if number else {n}
        )  # is committed
        most = 1
        for steps, number in {
            (tuple(joined for some, joined in unseen if i in some), left[i]) for i in samples
        }:
            numbers = {number}
            for was_joined in steps:
                numbers = set().union(*(leave(enter(number, was_joined)) for number in numbers))
            most = max(most, *(enter(number, joined) for number in numbers))
        share = -(-n // 4)
        return min(-(-most // share) * share, n)

    def _fail(self, slots, fault, rule):
        bad = [
            i
            for i, code in zip(slots.sample_index.tolist(), fault, strict=True)
            if code == NOT_FINITE
        ]
        self.release()  # its cache may hold NaN
        if bad:
            raise SystemExit(
                f"logits are not finite at samples {bad[:8]}: the weights are damaged or have diverged"
            )
        if MANY in fault:
            raise RuntimeError("a block had more masks than its step was launched for")
        raise RuntimeError(
            f"{rule.remasking} left tokens masked after {rule.denoising_steps} steps"
        )

    def _move(self, slots, places, source, target, width):
        """Samples go from some places to others."""
        pairs = list(zip(source, target, strict=False))
        if not pairs:
            return
        source, target = zip(*pairs, strict=True)
        slots.copy(source, target, width)
        for r, other in pairs:
            places[other] = places[r]
        slots.sample[to_device(target, self.device)] = to_device(
            [places[r] for r in target], self.device
        )

    def _enter(self, slots, places, free, samples, prompt_ids, owners):
        """Samples, the next in order, take free places. Each prompt is prefilled once: later samples of it copy its cache."""
        n, first = self.model.block_length, samples[0]
        before = (
            owners[first - 1] if first else None
        )  # its cache still lies where the sample before was put
        pairs = list(zip(free, samples, strict=False))
        siblings = [r for r, i in pairs if owners[i] == before]
        if siblings:
            slots.copy(
                [places.index(first - 1)] * len(siblings),
                siblings,
                len(prompt_ids[before]) // n * n,
            )
        for r, i in pairs:
            places[r] = i
        taken = [r for r, _ in pairs]
        slots.sample[to_device(taken, self.device)] = to_device(
            [places[r] for r in taken], self.device
        )
        new = [owner for owner in dict.fromkeys(owners[i] for i in samples) if owner != before]
        if not new:
            return
        whole = {owner: prompt_ids[owner][: len(prompt_ids[owner]) // n * n] for owner in new}
        together = max(1, PREFILL // max(1, max(map(len, whole.values()))))
        for some in (new[k : k + together] for k in range(0, len(new), together)):
            rows = [(r, some.index(owners[i])) for r, i in pairs if owners[i] in some]
            self._prefill(
                [whole[owner] for owner in some], *map(list, zip(*rows, strict=True)), slots.cache
            )

    def _prefill(self, prompts, places, owner, cache):
        """Write keys and values of the whole blocks of prompts (lists) into the cache, of prompts[owner[i]] at places[i].

        Shorter prompts are padded on the right: padding lies in the first block that a row denoises or later, which no block of
        the prompt sees, and each block's own keys overwrite it.
        """
        P = max(map(len, prompts))
        if P == 0:
            return
        ids = to_device(
            [ids + [self.model.mask_token_id] * (P - len(ids)) for ids in prompts], self.device
        )  # [U, P]
        places, owner = to_device(places, self.device), to_device(owner, self.device)
        position_ids = torch.arange(P, device=self.device).expand(len(prompts), P)
        attend_prompt = make_attend(Visibility(position_ids // self.model.block_length))

        def attend(layer, q, k, v):
            for past, new in zip(cache[layer], (k, v), strict=True):
                past[places, :, :P] = new[owner]
            return attend_prompt(layer, q, k, v)

        self.model.hidden(ids, position_ids, attend)

    def _step(self, slots, R, width, rule, joined, most):
        """One forward of the block in work of each of the first R rows, over `width` positions: denoises or commits it.

        A block without masks is committed, but the last one needs no commit; joined: together with a step of the next one.
        Rows that have ended are carried along and change nothing. most: tokens of a block that the head sees, masks first.
        """
        n, row = self.model.block_length, slots.sample[:R]
        if self.fuses and rule.editing_threshold is None and not rule.records:
            return self._fused_step(slots, R, width, rule, joined, most)
        start, end, step = slots.start[row], slots.end[row], slots.step[row]
        is_live = start < end
        last = (
            (width // n - 1) * n
        )  # rows that have ended are carried along in a whole block, of which none is read again
        place = lambda: (
            start.clamp(max=last)[:, None] + torch.arange(n, device=self.device)
        )  # [R, n] of each row's block
        at = place()
        if joined:
            goes_on = is_live & ~slots.masked[row[:, None], at].any(1)
            start, step = start + n * goes_on, torch.where(goes_on, 0, step)
            at = place()
        here = row[:, None], at
        block, masked = slots.tokens[here], slots.masked[here] & is_live[:, None]
        if joined:
            two = (at[:, :1] - n).clamp(min=0) + torch.arange(
                2 * n, device=self.device
            )  # the first block has none before it
            hidden = self._forward(slots.tokens[row[:, None], two], two, slots.view(R, width))
            hidden = hidden.gather(1, (at - two[:, :1])[..., None].expand(-1, -1, hidden.shape[2]))
        else:
            hidden = self._forward(block, at, slots.view(R, width))

        offset = at - slots.prompt_length[row, None]
        key = slots.seed, slots.sample_index[row, None], offset, step[:, None]
        uniform = engine.keyed_uniform(*key, "token")
        place = masked.byte().sort(dim=1, descending=True, stable=True).indices[:, :most]
        hidden = hidden.gather(1, place[..., None].expand(-1, -1, hidden.shape[2]))
        of_masks = self._sample(
            hidden.flatten(0, 1), uniform.gather(1, place).flatten(), vars(rule)
        )
        spread = lambda values: torch.zeros_like(block, dtype=values.dtype).scatter(
            1, place, values.view(place.shape)
        )
        drawn, logps, confidence = map(spread, of_masks)
        if rule.remasking == "random":
            confidence = engine.keyed_uniform(*key, "order").to(logps.dtype)
        base, remainder = divmod(n, rule.denoising_steps)
        quota = (base + (step < remainder))[:, None]  # reveal_quota, of each row's own step
        chosen = engine.select(
            confidence,
            masked,
            quota,
            rule.remasking,
            rule.confidence_threshold,
            rule.factor,
            rule.eb_threshold,
        )
        rest, was_noisy = masked & ~chosen, masked.any(1)
        is_whole, is_committed = was_noisy & ~rest.any(1), is_live & ~was_noisy
        if rule.editing_threshold is not None:
            may_edit = was_noisy | is_live & (slots.edits[row] < rule.max_post_steps)
            edited = (
                may_edit[:, None]
                & ~masked
                & (offset >= 0)
                & (drawn != block)
                & (logps.exp() > rule.editing_threshold)
            )
            chosen, is_committed = chosen | edited, is_committed & ~edited.any(1)
            is_whole = is_committed
            slots.edits[row] = (slots.edits[row] + ~was_noisy) * ~is_committed
        block = torch.where(chosen, drawn, block)

        slots.tokens[here], slots.masked[here] = block, rest
        slots.logps[here] = torch.where(chosen, logps, slots.logps[here])
        slots.step_map[here] = torch.where(chosen, step[:, None], slots.step_map[here])
        if rule.records:
            for values, new in zip(slots.history, (drawn.int(), logps), strict=True):
                when = *here, step[:, None].clamp(max=values.shape[2] - 1)
                values[when] = torch.where(chosen, new, values[when])
        broken, late = (
            (masked & ~logps.isfinite()).any(1),
            was_noisy & (step >= rule.denoising_steps),
        )
        fault = torch.where(late, LATE, torch.where(masked.sum(1) > most, MANY, slots.fault[row]))
        slots.fault[row] = torch.where(broken, NOT_FINITE, fault)
        slots.num_forwards[row] += is_live
        is_eos = torch.zeros_like(masked)
        for token in rule.eos_token_ids:
            is_eos |= block == token
        stops = is_whole & (is_eos & (offset >= 0)).any(1) & rule.stop_at_eos
        end = torch.where(stops, start + n, end)
        is_last = is_whole & (start + n >= end)
        is_done = is_committed | is_last
        slots.end[row], slots.start[row] = end, start + n * is_done
        slots.step[row] = torch.where(is_done, 0, step + is_live)
        slots.left[row] = torch.where(is_committed, n, rest.sum(1))

    def _fused_step(self, slots, R, width, rule, joined, most):
        """The same by two kernels around the forward: what it does beside takes as long as a tenth of the layers."""
        from kernels import block_triton  # machines without a GPU have no Triton

        n = self.model.block_length
        begun = block_triton.begin(
            slots, R, width, n, joined, most, order=rule.remasking == "random"
        )
        ids, at, places, uniform, order, state = begun
        hidden = self._forward(ids, at, slots.view(R, width)).flatten(0, 1)
        hidden = hidden if places is None else hidden.index_select(0, places)  # [R most, D]
        drawn, logps, confidence = self._sample(hidden, uniform, vars(rule))
        if rule.eos_token_ids not in self.eos:
            self.eos[rule.eos_token_ids] = torch.tensor(
                rule.eos_token_ids, dtype=torch.long, device=self.device
            )
        confidence, eos = (
            confidence if order is None else order.to(logps.dtype),
            self.eos[rule.eos_token_ids],
        )
        block_triton.finish(
            slots,
            R,
            width,
            n,
            most,
            rule,
            state,
            drawn,
            logps,
            confidence,
            eos,
            (NOT_FINITE, LATE, MANY),
        )

    def _forward(self, block, at, cache):
        """Forward one or two whole blocks of each row [R, T], at positions `at` on end, over its cached past; writes their keys
        and values. -> [R, T, D]

        cache: per layer k, v [R, K, width, h], no wider than has to be read.
        """
        attend = decode_attend(cache, at[:, 0], self.model.block_length)
        return self.model.hidden(block, at, attend)

    def _trace(self, prompt_ids, slots, N, settings):
        P, canvas_length = slots.prompt_length[:N].clone(), slots.end[:N] - slots.prompt_length[:N]
        offset = torch.arange(int(canvas_length.max()), device=self.device)  # [L]
        on_canvas = offset < canvas_length[:, None]  # [N, L]
        at = torch.where(on_canvas, P[:, None] + offset, 0)
        cut = lambda values, fill: torch.where(on_canvas, values[:N].gather(1, at), fill)
        completion_ids, step_map = (
            cut(slots.tokens, self.model.pad_token_id),
            cut(slots.step_map, -1),
        )
        sample_index, records = slots.sample_index[:N].clone(), None
        if settings["records"]:
            tokens, logps = (
                values[:N].permute(2, 0, 1) for values in slots.history
            )  # [steps, N, S]
            step, i, position = when = (tokens >= 0).nonzero(as_tuple=True)
            records = {
                "events": torch.stack(
                    [sample_index[i], step, position - P[i], tokens[when].long()], 1
                )
            }
            records["logps"] = logps[when]
        return Trace(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            completion_mask=scored(completion_ids, canvas_length, settings["eos_token_ids"]),
            canvas_length=canvas_length,
            step_map=step_map,
            replay_map=step_map,  # the [noisy | clean] pass replays the same local step of all blocks in one forward
            logps=cut(slots.logps, 0.0),
            sample_index=sample_index,
            num_forwards=slots.num_forwards[:N].clone(),
            settings=settings,
            records=records,
        )
