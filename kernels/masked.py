"""Masked decoding for GPUs: the tokens of rollout/masked.py, several times as fast.

LLaDA-8B, bf16, dual cache, 16 rows, one H200: 2.6 to 2.9 times the tokens/s of Fast-dLLM's code in
the same run (docs/rollout.md).

CUDA graphs       Launching the kernels of a small forward takes longer than running them, so the
                  forward is captured once per shape: 2 x for one row. Tokens and cache stay at
                  fixed addresses and the start of the block is read from the device, so one graph
                  serves all blocks.
few shapes        Rows are rounded up to a few numbers, columns to multiples of WIDTHS.
window attention  One Triton kernel stores the window's keys and values and attends to the cache.

All of this but the graphs and the Triton kernels also runs on CPU, for tests.
"""

import math
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from kernels.decode import cached_attention
from kernels.graphs import Graphs, can_record
from models.attention import fast_attention
from rollout.masked import MaskedEngine

GRAPH_TOKENS = 4096  # larger forwards keep the GPU busy while the host launches them
WIDTHS = 32


def rounded_rows(rows):
    """-> rows rounded up to a power of 2 (up to 8) or a multiple of 8"""
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8


class Memory:
    """Buffers for `capacity` tokens of a batch, and the graphs that use them with their results."""

    def __init__(self, capacity, device, use_graphs):
        self.capacity, self.buffers, self.results = capacity, {}, {}
        self.first = torch.zeros((), dtype=torch.long, device=device)
        self.graphs = Graphs(device) if use_graphs else None

    def view(self, name, like, shape, size=1):
        """-> tensor of this shape, at the same address in every call; size: numbers per token"""
        if name not in self.buffers:
            self.buffers[name] = like.new_empty(self.capacity * size)
        return self.buffers[name][: math.prod(shape)].view(shape)


class FastMaskedEngine(MaskedEngine):
    """MaskedEngine with fixed shapes and addresses."""

    def __init__(self, model, max_batch_size):
        super().__init__(model, max_batch_size)
        self.memory, self.use_graphs = None, can_record(model)

    def release(self):
        self.memory = None

    def _denoise(self, block, settings):
        (R, S), n = block.tokens.shape, sum(block.quota)
        rows, more = rounded_rows(R) if R * n <= GRAPH_TOKENS else R, -S % WIDTHS
        tokens, memory = rows * (S + more), self.memory
        if memory is None or tokens > memory.capacity:
            memory = self.memory = Memory(tokens, self.device, self.use_graphs)
        row = F.pad(torch.arange(R, device=self.device), (0, rows - R))  # repeats the first row
        fixed = {"sample_index": block.sample_index[row], "first": block.first + more}
        for name, fill in ("tokens", 0), ("positions", 0), ("offset", 0), ("bias", -math.inf):
            values = F.pad(getattr(block, name)[row], (more, 0), value=fill)
            fixed[name] = memory.view(name, values, values.shape).copy_(values)
        if not fixed["bias"].any():  # no padding: SDPA is faster without
            fixed["bias"] = None
        *results, history = super()._denoise(replace(block, **fixed), settings)
        cut = lambda values: [value[:R] for value in values]
        return *cut(results), [(step, *cut(values)) for step, *values in history]

    def _forward(self, block, first, width, window):
        """-> hidden states, overwritten by the next call"""
        memory, (R, S) = self.memory, block.tokens.shape
        memory.first.fill_(first)
        compute = partial(super()._forward, block, memory.first, width, window)
        if memory.graphs is None or R * (window or S) > GRAPH_TOKENS:
            return compute()
        key = R, S, block.bias is None, width, window, block.cache is None

        def step():
            hidden = compute()
            memory.results.setdefault(key, hidden).copy_(hidden)

        memory.graphs.run(key, step)
        return memory.results[key]

    def _attend(self, block, columns, layer, q, k, v):
        if block.cache is None:
            return fast_attention(q, k, v, block.bias)
        R, K, _, h = k.shape
        shape = R, K, block.tokens.shape[1], h
        kept = (self.memory.view((name, layer), k, shape, K * h) for name in "kv")
        return cached_attention(q, k, v, *kept, columns[:1].expand(R), bias=block.bias)
