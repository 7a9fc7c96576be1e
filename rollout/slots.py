"""Memory of the block engine: the state of every sample of a rollout, and a cache for those at work."""

from functools import partial

import torch


class Slots:
    """Tensors at fixed addresses: N samples of S absolute positions, and R places, each with the cache of one sample.

    A step works on the first places; keys and values of sample[r], k and v [R, K, S, h] of each layer, lie at place r. Samples
    that wait or have ended take no place. `history` steps of each block are kept for Trace.records, 0: none.
    """

    def __init__(self, model, N, R, S, history, device, dtype):
        config, empty = model.config, partial(torch.zeros, device=device)
        self.sizes = N, R, S, history
        self.tokens, self.step_map = (empty(N, S, dtype=torch.long) for _ in range(2))
        self.masked = empty(N, S, dtype=torch.bool)
        self.logps = empty(N, S, dtype=torch.promote_types(dtype, torch.float32))
        self.history = (
            empty(N, S, history, dtype=torch.int32),
            empty(N, S, history, dtype=self.logps.dtype),
        )  # tokens, logps
        self.prompt_length, self.sample_index = (empty(N, dtype=torch.long) for _ in range(2))
        self.step, self.edits, self.num_forwards = (empty(N, dtype=torch.long) for _ in range(3))
        # What the host looks at: start of the block in work and of what lies behind the last block; a fault, or 0; masks left
        # in that block.
        self.progress = empty(4, N, dtype=torch.long)
        self.start, self.end, self.fault, self.left = self.progress
        self.seed, self.sample = empty((), dtype=torch.long), empty(R, dtype=torch.long)
        # Zeros: what is not yet written has weight 0 in the attention, and 0 times NaN would be NaN.
        shape = R, config.num_key_value_heads, S, config.head_dim
        self.cache = [
            tuple(empty(shape, dtype=dtype) for _ in range(2))
            for _ in range(config.num_hidden_layers)
        ]
        self.pinned = (
            [torch.zeros(4, N, dtype=torch.long, pin_memory=True) for _ in range(2)]
            if device.type == "cuda"
            else None
        )

    def fill(self, model, prompt_ids, owner, sample_index, settings):
        """States of the samples before their first step; those behind them have ended."""
        n, N, device = settings["block_length"], len(owner), self.start.device
        P = torch.tensor([len(ids) for ids in prompt_ids], device=device)[owner]
        width = max(map(len, prompt_ids))
        padded = [ids + [model.mask_token_id] * (width - len(ids)) for ids in prompt_ids]
        for values, value in (
            (self.tokens, model.mask_token_id), (self.step_map, -1), (self.logps, 0), (self.history[0], -1), (self.progress, 0),
            (self.step, 0), (self.edits, 0), (self.num_forwards, 0),
        ):  # fmt: skip
            values.fill_(value)
        self.tokens[:N, :width] = torch.tensor(padded, device=device)[owner]
        self.prompt_length[:N], self.sample_index[:N] = P, sample_index
        self.start[:N], self.end[:N] = P // n * n, (P + settings["gen_length"] + n - 1) // n * n
        self.left[:N] = n - P % n
        column = torch.arange(self.tokens.shape[1], device=device)
        self.masked.copy_((column >= self.prompt_length[:, None]) & (column < self.end[:, None]))
        self.seed.fill_((settings["seed"] + 2**63) % 2**64 - 2**63)  # the int64 with the same bits

    def view(self, R, width):
        """The cache of the first R places and `width` positions."""
        return [(k[:R, :, :width], v[:R, :, :width]) for k, v in self.cache]

    def copy(self, source, target, width):
        """Cache of the first positions at some places, a list, to others."""
        source, target = (to_device(places, self.sample.device) for places in (source, target))
        for values in (values for layer in self.cache for values in layer):
            values[target, :, :width] = values[source, :, :width]

    def look(self):
        """Send the progress to the host. -> function that waits for it -> start, end, fault, left: lists of N ints"""
        if self.pinned is None:
            return self.progress.clone().tolist
        self.pinned.reverse()  # the one before may not have been read yet
        there, arrived = self.pinned[0], torch.cuda.Event()
        there.copy_(self.progress, non_blocking=True)
        arrived.record(torch.cuda.current_stream(self.progress.device))
        return lambda: (arrived.synchronize(), there.tolist())[1]


def to_device(values, device):
    """A list of ints as a tensor; on CUDA without waiting for the work that is queued there."""
    values = torch.tensor(values)
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def row_bytes(model, dtype):
    """Bytes of the cache of one row and position."""
    config = model.config
    return (
        2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    )


def other_bytes(model, N, S, history, tokens, dtype):
    """About what a rollout needs beside weights and cache: states, a forward of so many tokens, the logits of 512 rows."""
    config, states = model.config, N * S * (21 + 8 * history)
    return (
        states
        + 4 * tokens * (config.hidden_size + config.intermediate_size) * dtype.itemsize
        + 512 * 12 * config.vocab_size
    )


def free_bytes(device):
    """Bytes that can still be allocated; on CPU they are not counted."""
    if device.type != "cuda":
        return 1 << 62
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
