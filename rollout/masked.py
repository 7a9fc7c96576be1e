"""Decoding of bidirectional masked diffusion models (LLaDA, Dream), block by block: plain and exact, or from a cache.

The canvas of a completion is all masks at first. Its blocks are denoised from left to right, and every step is one forward of
the prompt and the whole canvas: the masks behind the block are attended to, so the length of the canvas is part of the input.

Caches (Fast-dLLM, arXiv 2505.22618): the first step of a block is that same forward and keeps all keys and values. Later steps
forward a window alone and attend to the kept ones elsewhere: approximate from the second layer on, whose keys and values
outside the window do not know what was revealed since.
prefix   the window is the block and all masks behind it
dual     the window is the block
Dream's window begins one token earlier: there the first token of the block is predicted.

All rows of a batch work on the same block, and the host looks at them between blocks alone, where it leaves out those that have
ended; only under rules that decide how many tokens a step reveals (ADAPTIVE) it also asks at every step whether any is left.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels import has_kernels, speed_up_engine
from rollout import engine
from rollout.canvas import GRAPH_TOKENS, Canvas, token_bytes
from rollout.records import Events, States
from rollout.schedules import SCHEDULES, ascending_steps, block_quotas, eoser_weight, reveal_shares
from kernels.graphs import free_bytes
from rollout.traces import Trace, left_padded, scored

ADAPTIVE = ("low_confidence_dynamic", "low_confidence_factor", "entropy_bounded", "origin")
WIDTHS = 32  # on CUDA a canvas has a multiple of so many columns, and small batches as many rows as `bucket` says


def bucket(rows):
    """-> the next power of 2 up to 8, or multiple of 8: how many rows a small batch is forwarded with on CUDA"""
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8


@dataclass
class Work:
    """One block of R rows that are denoised together."""

    canvas: Canvas
    P: int  # columns of the canvas before the completions
    start: int  # column of the completion where the block starts
    quota: list  # tokens to reveal at each step
    first_step: int  # steps of the blocks before
    row: torch.Tensor  # [live] places in the batch; the rows behind them fill a bucket
    sample_index: torch.Tensor  # [R]


class MaskedEngine(engine.Engine):
    """Sampler of a bidirectional model. The grid of blocks starts at the completion, and any block length will do."""

    choices = {
        "remasking": (*engine.RULES, "origin", "rcr"),
        "schedule": SCHEDULES,
        "cache": ("none", "prefix", "dual"),
        "eos_policy": ("none", "suppress", "demote", "eoser"),
    }
    records = (None, "steps", "events", "states")

    def __init__(self, model, max_batch_size):
        super().__init__(model, max_batch_size)
        if has_kernels(model.lm_head.weight):
            speed_up_engine(model)
        self.in_buckets = self.use_graphs = self.device.type == "cuda"
        self.canvas = None

    def release(self):
        self.canvas = None

    def check(self, settings):
        names = "gen_length", "block_length", "denoising_steps", "schedule", "remasking", "alg_temp"
        gen_length, n, steps, schedule, remasking, alg_temp = (settings[name] for name in names)
        if schedule == "ascending":
            most, shape = (
                ascending_steps(gen_length),
                f"--gen-length {gen_length} --denoising-steps {steps}",
            )
            if steps > most:
                raise SystemExit(
                    f"--schedule ascending reveals {gen_length} tokens in {most} steps, not {shape}"
                )
            if n != sum(block_quotas(**settings)[0]):
                raise SystemExit(
                    f"--schedule ascending makes its own blocks: leave --block-length {n} out"
                )
        orders = "low_confidence_static", "entropy", "topk_margin"
        if not 0 <= alg_temp < math.inf or alg_temp and remasking not in orders:
            raise SystemExit(
                f"--alg-temp {alg_temp} must be at least 0 and finite, and 0 unless --remasking is {', '.join(orders)}"
            )
        if settings["records"] == "states" and settings["cache"] == "dual":
            raise SystemExit(
                "--cache dual forwards the block alone: records of kind 'states' predict the whole canvas"
            )

    def _generate(self, prompt_ids, owner, *rest):
        try:
            return self._decode(prompt_ids, owner, *rest)
        except torch.OutOfMemoryError:
            self.release()
            R = len(owner)
            raise SystemExit(
                f"a rollout of {R} rows ran out of memory: try {max(R // 2, 1)}; {engine.LOWER}"
            ) from None

    def _decode(self, prompt_ids, owner, sample_index, settings, stop_at_eos):
        model, device, quotas = self.model, self.device, block_quotas(**settings)
        prompt_ids = [prompt_ids[i] for i in owner.tolist()]
        prompts, valid = left_padded(prompt_ids, model.pad_token_id, device)
        (N, P), L = prompts.shape, sum(map(sum, quotas))
        if self.in_buckets:
            P = -(-(P + L) // WIDTHS) * WIDTHS - L
        is_padded, more = min(map(len, prompt_ids)) < P, P - prompts.shape[1]
        tokens = F.pad(
            F.pad(prompts, (more, 0), value=model.pad_token_id), (0, L), value=model.mask_token_id
        )
        valid = F.pad(F.pad(valid, (more, 0), value=False), (0, L), value=True)
        step_map, replay_map = (torch.full((N, L), -1, device=device) for _ in range(2))
        logps = torch.zeros(
            (N, L), dtype=torch.promote_types(self.dtype, torch.float32), device=device
        )
        num_forwards, row = (
            torch.zeros_like(sample_index),
            torch.arange(N, device=device),
        )  # rows at work
        kind, K = settings["records"], sum(map(len, quotas))
        log = (
            Events()
            if kind == "events"
            else States(N, K, L, model.pad_token_id, device)
            if kind == "states"
            else None
        )
        self.eos = torch.tensor(model.eos_token_ids, device=device)
        start = first_step = 0
        for quota in quotas:
            R, n = len(row), sum(quota)
            fill = bucket(R) - R if self.in_buckets and R * n <= GRAPH_TOKENS else 0
            at, here = torch.cat([row, row[:1].expand(fill)]), (row, slice(start, start + n))
            canvas = self._canvas(R + fill, P + L, settings["cache"] != "none")
            canvas.lay(tokens[at], valid[at], is_padded)
            work = Work(canvas, P, start, quota, first_step, row, sample_index[at])
            block, steps, block_logps, forwards = (
                x[:R] for x in self._denoise(work, settings, log)
            )
            tokens[:, P:][here], step_map[here], logps[here] = block, steps, block_logps
            replay_map[here] = first_step + steps  # a forward replays a step of one block
            num_forwards[row] += forwards
            ended = (
                torch.isin(block, self.eos).any(1) & stop_at_eos
            )  # blocks are final: later ones cannot change the text
            is_broken = ~block_logps.isfinite().all(
                1
            )  # NaN counts as the highest confidence: it is revealed
            ended, is_broken = torch.stack(
                [ended, is_broken]
            ).tolist()  # the one wait for the device
            if any(is_broken):
                bad = sample_index[row[torch.tensor(is_broken, device=device)]].unique().tolist()
                raise SystemExit(
                    f"logits are not finite at samples {bad[:8]}: the weights are damaged or have diverged"
                )
            row = row[~torch.tensor(ended, device=device)]
            if not len(row):
                break
            start, first_step = start + n, first_step + len(quota)
        if not self.use_graphs:
            self.release()
        completion_ids = tokens[:, P:].where(step_map >= 0, model.pad_token_id)
        canvas_length = torch.full_like(sample_index, L)
        return Trace(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            completion_mask=scored(completion_ids, canvas_length, model.eos_token_ids),
            canvas_length=canvas_length,
            step_map=step_map,
            replay_map=replay_map,
            logps=logps,
            sample_index=sample_index,
            num_forwards=num_forwards,
            settings=settings,
            records=log and log.result(),
        )

    def _canvas(self, R, S, keeps):
        """-> room for R rows of S columns: that of the last batch, if it is large enough"""
        if self.canvas is None or R * S > self.canvas.capacity or self.canvas.keeps != keeps:
            self.release()  # the old one makes room
            each, room = S * token_bytes(self.model, keeps), free_bytes(self.device)
            if R * each > room:
                need = f"{R} rows of {S} tokens need about {R * each / 2**30:.1f} GiB, {room / 2**30:.1f} GiB are left"
                raise SystemExit(f"{need}: {room // each} rows fit; {engine.LOWER}")
            self.canvas = Canvas(self.model, R * S, keeps, self.device, self.dtype, self.use_graphs)
        return self.canvas

    def _denoise(self, work, settings, log):
        """Denoise one block of each row: forward, sample the masked tokens, reveal some; again until none is masked.

        What is masked is kept apart from the ids: nothing is inferred from them. Under rcr (running confidence remasking, MDPO,
        arXiv 2508.13148) a step writes every masked token, then masks those of the block again that were least confident when
        they were written, until as many are left as the steps so far reveal. log: of rollout/records.py, or None.
        -> tokens, step_map (-1 where nothing was revealed), logps [R, n]; num_forwards [R]
        """
        canvas, quota, first, live = work.canvas, work.quota, work.P + work.start, len(work.row)
        remasking, n, rest = (
            settings["remasking"],
            sum(quota),
            canvas.S - first,
        )  # rest: columns from the block on
        window = {"none": None, "prefix": rest, "dual": n}[settings["cache"]]
        block = canvas.tokens[
            :, first : first + n
        ]  # a view: what is written here, the next forward reads
        masked = torch.ones_like(block, dtype=torch.bool)
        masked[live:] = False
        step_map, num_forwards = torch.full_like(block, -1), torch.zeros_like(work.sample_index)
        logps = torch.zeros(
            block.shape, dtype=torch.promote_types(self.dtype, torch.float32), device=self.device
        )
        running, owed = (
            torch.zeros_like(logps),
            0,
        )  # rcr: confidence of the last writing; tokens that are to be shown by now
        uniform, order = (
            self._uniform(work, settings, word) for word in ("token", "order")
        )  # of all steps at once
        shares = reveal_shares(quota, settings["schedule"])
        rule = [
            settings[name]
            for name in ("remasking", "confidence_threshold", "factor", "eb_threshold")
        ]
        kept = None  # the window, as soon as there are keys and values beside it
        for step, least in enumerate(quota):
            if remasking in ADAPTIVE:
                left = int(masked.sum(1).max())  # waits for the device
            else:
                left = (n - owed) * bool(least)  # a step that reveals nothing changes nothing
            if not left:
                continue
            owed += least
            hidden = canvas.forward(first, rest if isinstance(log, States) else n, kept)
            kept = window
            num_forwards += masked.any(1)
            place = (
                masked.byte().sort(dim=1, descending=True, stable=True).indices[:, :left]
            )  # the head sees these alone
            pick = lambda values: values.gather(1, place)  # noqa: B023
            rows = hidden.gather(1, place[..., None].expand(-1, -1, hidden.shape[2])).flatten(0, 1)
            drawn = self._sample(rows, pick(uniform[step]).flatten(), settings)
            drawn, drawn_logps, score = (values.view(place.shape) for values in drawn)
            score = self._score(score, drawn, pick(order[step]), work.first_step + step, settings)
            spread = lambda values: torch.zeros_like(logps).scatter(1, place, values)  # noqa: B023
            proposal, proposal_logps, confidence = (
                block.scatter(1, place, drawn),
                spread(drawn_logps),
                spread(score),
            )
            if isinstance(log, States):
                self._record(work, settings, log, step, hidden, masked, proposal, proposal_logps)
            if remasking == "rcr":
                running = torch.where(masked, confidence, running)
                shown = engine.select(running, torch.ones_like(masked), owed, *rule)
            elif remasking == "origin":
                shown = ~masked | (order[step] < shares[step])
            else:
                shown = ~masked | engine.select(confidence, masked, least, *rule)
            chosen, again = masked & shown, ~(masked | shown)
            block.copy_(
                torch.where(chosen, proposal, block).masked_fill(again, self.model.mask_token_id)
            )
            logps = torch.where(chosen, proposal_logps, logps).masked_fill(again, 0.0)
            step_map, masked = step_map.masked_fill(chosen, step), ~shown
            masked[live:] = False
            if isinstance(log, Events):
                log.add(
                    work.sample_index,
                    work.first_step + step,
                    work.start,
                    (chosen | again)[:live],
                    block,
                    logps,
                )
        return block, step_map, logps, num_forwards

    def _uniform(self, work, settings, word):
        """Keyed by sample, column and the step inside the block. -> [steps, R, n]"""
        steps = torch.arange(len(work.quota), device=self.device)[:, None, None]
        columns = torch.arange(work.start, work.start + sum(work.quota), device=self.device)
        values = self.keyed_uniform(
            settings["seed"], work.sample_index[:, None], columns, steps, word
        )
        return values.expand(len(steps), len(work.sample_index), len(columns))

    def _score(self, score, drawn, uniform, step, settings):
        """What decides the order, higher first, of the tokens drawn at step number `step` of the completion. All [R, k]

        score: their confidence; uniform: for orders that are drawn. alg_temp (Dream): positions are drawn without replacement
        from softmax(score / alg_temp), which the largest sums of that and Gumbel numbers do.
        """
        if settings["remasking"] == "random":
            score = uniform.to(score.dtype)
        if settings["eos_policy"] == "eoser":
            quotas = block_quotas(**settings)
            weight = eoser_weight(step, sum(map(len, quotas)), settings["schedule"])
            score = torch.where(torch.isin(drawn, self.eos), weight * score, score)
        if settings["alg_temp"]:
            score = score / settings["alg_temp"] - (-uniform.clamp(min=2**-54).log()).log().to(
                score.dtype
            )
        if settings["eos_policy"] == "demote":
            last = torch.finfo(score.dtype).min  # finite: revealed if nothing else is left
            score = score.masked_fill(torch.isin(drawn, self.eos), last)
        return score

    def _record(self, work, settings, log, step, hidden, masked, proposal, proposal_logps):
        """Predict the masks behind the block too (MDPO), and hand to the log what the forward saw and predicted."""
        live, (R, n), number = len(work.row), masked.shape, work.first_step + step
        behind = hidden[:, n:]
        columns = torch.arange(behind.shape[1], device=self.device) + work.start + n
        uniform = self.keyed_uniform(
            settings["seed"], work.sample_index[:, None], columns, number, "guess"
        )
        guess, guess_logps, _ = self._sample(behind.flatten(0, 1), uniform.flatten(), settings)
        later = masked.any(1, keepdim=True).expand(
            R, len(columns)
        )  # of rows at work, all of them are masked
        join = lambda ours, theirs: torch.cat([ours, theirs.view(later.shape)], 1)[:live]
        log.add(
            work.row, number, work.start, work.canvas.tokens[:live, work.P :], join(masked, later), join(proposal, guess),
            join(proposal_logps, guess_logps),
        )  # fmt: skip
