"""A rollout as terms of a loss: which tokens are masked, which are scored, in which micro-batch."""

from copy import copy

import torch
from torch.utils._pytree import tree_map

from distributed.groups import all_reduce, maximum
from rollout.sampling import keyed_uniform


class Batch:
    """A rollout on this rank: B sequences, the G completions of a prompt together.

    The completion is the last L columns. Collective: token counts are sums over ranks.
    """

    def __init__(self, trace, model):
        self.trace = trace
        # [B, T] prompt (padded on the left) + completion; bool: no padding, reached by the sampler
        self.input_ids, self.valid_mask = trace.sequences(model.pad_token_id)
        self.completion_mask = trace.completion_mask  # [B, L] bool, up to and with the first EOS
        self.P = self.input_ids.shape[1] - self.completion_mask.shape[1]
        # [B, L] likelihood block: its tokens are predicted jointly, given the blocks before it
        self.block_ids = model.grid(self.valid_mask)[1][:, self.P :].contiguous()
        self.mask_token_id = model.mask_token_id
        self.num_tokens, self.num_sequences = all_reduce(  # of this step
            {"tokens": self.completion_mask.sum(), "sequences": len(self.input_ids)}
        ).values()

    @property
    def offset(self):
        """Of each column [T] from the start of the completion"""
        return torch.arange(self.input_ids.shape[1], device=self.input_ids.device) - self.P

    def uniform(self, iteration, draw, offset=None):
        """Keyed by the step's seed, the sample's index over all ranks, iteration, draw, and the
        offset from the start of the completion, so that left padding changes nothing.

        offset: of some columns, 0 of the first; None: of the completion. -> fp64 in [0, 1), [B, L],
        or what draw and offset broadcast to with [B, 1]
        """
        offset = self.offset[self.P :] if offset is None else offset
        seed, sample = self.trace.settings["seed"], self.trace.sample_index[:, None]
        return keyed_uniform(seed, "masks", sample, iteration, draw, offset)


class Rows:
    """The masks of an inner iteration. A row is a term of the loss, with K noisy copies."""

    temperature = 1.0  # of the scored distribution
    # [R, K, L] tokens to score; None: those of input_ids; in opsd.py [R, K, L, k], or a number k
    targets = None
    old = None  # estimates before the first update; None: the current ones
    ref = None  # estimates of the reference; None: no KL
    has_gradient = True  # any of them, on this rank

    def __init__(self, batch, masked, weights, index=slice(None)):
        """masked [R, K, L] of the completion, or with the prompt [R, K, T]; index [R]: the sequence
        of each row; default: row r is sequence r
        """
        self.batch = batch
        prompt = batch.input_ids.shape[1] - masked.shape[2]
        # [R, K, T] bool: shown to the model as [MASK]
        self.masked = torch.nn.functional.pad(masked, (prompt, 0))
        self.weights = weights.float()  # [R, K, L] in the estimate or the loss; 0: not scored
        sequences = torch.arange(len(batch.input_ids), device=batch.input_ids.device)
        self.sequence = sequences[index]  # [R]: number in the batch
        self.input_ids = batch.input_ids[index]  # [R, T] clean
        self.valid_mask = batch.valid_mask[index]  # [R, T] bool
        self.completion_mask = batch.completion_mask[index]  # [R, L] bool
        self.advantages = batch.advantages[index]  # [R]

    @property
    def noisy_ids(self):
        """[R, K, T] what the model is shown"""
        return torch.where(self.masked, self.batch.mask_token_id, self.input_ids[:, None])

    def select(self, index):
        """rows[index] for a slice, bool or long index"""
        rows = copy(self)
        for name, value in vars(self).items():
            setattr(rows, name, value[index] if torch.is_tensor(value) else value)
        return rows

    def draws(self):
        """-> {name: tensor} of what has a dimension K"""
        return {k: x for k, x in vars(self).items() if torch.is_tensor(x) and x.dim() == 3}

    def subsample(self, n, iteration):
        """n draws of each row, random ones of those that score something, their weights divided by
        the probability to be chosen: a loss that is a sum over draws, and its gradient, stay the
        same in expectation. Row r is sequence r. n: 0, or at least K, is all, as they are.
        """
        made = self.weights.any(2)  # [R, K]
        if not 0 < n < made.shape[1]:
            return self
        draw = torch.arange(made.shape[1], device=made.device)
        # those made come first
        chosen = (self.batch.uniform(iteration, draw, 0) + ~made).argsort(1)[:, :n, None]
        rows = copy(self)
        vars(rows).update({k: x.take_along_dim(chosen, 1) for k, x in self.draws().items()})
        rows.weights *= (made.sum(1).clamp(min=n) / n)[:, None, None]
        return rows

    def for_update(self, size, together, keep_all=False):
        """Without rows that have no gradient, sorted by length, so that a micro-batch has little
        padding. Draws are split into rows of at most `size`, unless the loss needs them `together`.

        keep_all: rows with advantage 0 have a gradient too. One row always stays: every rank must
        run.
        """
        R, K, _ = self.masked.shape
        assert K <= size or not together  # the plan refuses such a size, if num_draws is right
        parts = next(n for n in range(1, K + 1) if K % n == 0 and K // n <= size)
        rows = self.select(self.valid_mask.sum(1).argsort(stable=True))
        split = {k: x.reshape(R * parts, K // parts, -1) for k, x in rows.draws().items()}
        rows = rows.select(torch.arange(R).repeat_interleave(parts))
        vars(rows).update(split)
        live = rows.weights.any((1, 2)) & (keep_all | (rows.advantages != 0))
        live[0] |= ~live.any()
        rows = rows.select(live)
        rows.has_gradient = bool(keep_all or rows.advantages.any())
        return rows

    def micro_batches(self, size):
        """Yield (micro-batch of at most `size` draws, is it the last, does it count), equally many
        on every rank, because FSDP's collectives must match: a rank that has run out repeats its
        last one without effect.
        """
        size = size // self.masked.shape[1]
        starts = range(0, len(self.input_ids), size)
        count = maximum(len(starts))
        for i in range(count):
            first = starts[min(i, len(starts) - 1)]
            micro = self.select(slice(first, first + size))
            yield micro, i + 1 == count, i < len(starts) and self.has_gradient

    @torch.no_grad()
    def evaluate(self, size, values):
        """values(micro-batch of at most `size` draws) -> tensor, or several, [its rows, ...]

        -> the same of all rows, without a graph
        """
        parts = [values(micro) for micro, *_ in self.micro_batches(size)]
        return tree_map(lambda *found: torch.cat(found)[: len(self.masked)], *parts)

    @torch.no_grad()
    def mismatch(self, logps, entropies):
        """How far the scored tokens are from draws of the scored distributions: draws have a mean
        -log p equal to the mean entropy. [R, K, L] each, nats -> sums; `StepMetrics` makes means
        """
        return {
            "mismatch/surprisal": -(self.weights * logps).sum(),
            "mismatch/entropy": (self.weights * entropies).sum(),
            "mismatch/improbable": (self.weights * (logps.exp() < 0.05)).sum(),
            "mismatch/weight": self.weights.sum(),
        }


def block_counts(tokens, block):
    """Marked tokens in the likelihood block of each token, and in all blocks before it.

    tokens [B, L] or [B, K, L], block [B, L] or [B, 1, L] -> two like tokens
    """
    ends, block = tokens.long().cumsum(-1), block.expand_as(tokens).contiguous()
    before = (ends - tokens.long()).gather(-1, torch.searchsorted(block, block))
    return ends.gather(-1, torch.searchsorted(block, block, right=True) - 1) - before, before


def choose_in_blocks(tokens, block, u, noise):
    """Choose m of the n marked tokens of each likelihood block, m = floor(u n) + 1, in the random
    order of their noise. tokens, block, u, noise [B, L]; u is equal within a block

    -> chosen [B, L] bool, n and m [B, L]
    """
    n, before = block_counts(tokens, block)
    m = (u * n).floor() + 1
    rank = torch.where(tokens, block + noise, torch.inf).argsort(1).argsort(1) - before
    return tokens & (rank < m), n, m
