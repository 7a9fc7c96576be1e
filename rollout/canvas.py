"""Forwards of bidirectional models: of whole canvases, or of a window of them beside kept keys and values.

All tensors of a batch stay at fixed addresses, and a forward reads nothing back. So on CUDA the small ones, whose thousand
kernels take longer to launch than to run, are CUDA graphs; CPUs run the same code.
"""

import math
from functools import partial

import torch

from kernels.decode import attention, window_attention
from kernels.fused import fused_kernels
from kernels.graphs import Graphs

GRAPH_TOKENS = 4096  # a forward of more tokens keeps the GPU busy while the host launches it


def token_bytes(model, keeps):
    """About what a token takes in a forward: the outputs of the matrices of one layer; with keeps, keys and values too."""
    matrices = {
        name: weight for name, weight in model.layers[0].named_parameters() if weight.dim() == 2
    }
    numbers = sum(len(weight) for weight in matrices.values())
    if keeps:
        numbers += (
            2
            * len(model.layers)
            * next(len(weight) for name, weight in matrices.items() if "k_proj" in name)
        )
    return numbers * model.lm_head.weight.element_size()


class Canvas:
    """Room for `capacity` tokens of a batch of R rows of S columns, prompts padded on the left; `lay` says which.

    tokens [R, S]: prompts and canvases, what the forwards read. With `keeps`, per layer keys and values [R, K, S, h] too.
    """

    def __init__(self, model, capacity, keeps, device, dtype, use_graphs):
        self.model, self.capacity, self.keeps, self.device, self.dtype = (
            model,
            capacity,
            keeps,
            device,
            dtype,
        )
        self.graphs = Graphs(device) if use_graphs else None
        self.results = {}  # of the graphs, by their keys
        self.before = int(
            hasattr(model, "align")
        )  # a window takes in the token that its first shifted row comes from
        empty = partial(torch.empty, capacity, device=device)
        self.room = {"tokens": empty(dtype=torch.long), "positions": empty(dtype=torch.long)}
        self.room |= {"valid": empty(dtype=torch.bool), "bias": empty(dtype=dtype)}
        self.start = torch.zeros((), dtype=torch.long, device=device)

    def _view(self, name, *shape):
        return self.room[name][: math.prod(shape)].view(shape)

    def lay(self, tokens, valid, is_padded):
        """Take a batch over: tokens [R, S], valid [R, S] bool, False on padding; is_padded: whether there is any."""
        self.R, self.S = tokens.shape
        self.tokens, self.positions, self.valid = (
            self._view(name, *tokens.shape) for name in ("tokens", "positions", "valid")
        )
        self.tokens.copy_(tokens)
        self.valid.copy_(valid)
        self.positions.copy_(self.model.grid(valid)[0])
        self.bias = None
        if is_padded:  # of keys alone: where padding asks, the answer is finite and means nothing
            self.bias = self._view("bias", self.R, 1, 1, self.S)
            self.bias.zero_().masked_fill_(~valid[:, None, None], float("-inf"))

    def forward(self, start, width, window=None):
        """-> hidden [R, width, D] of the columns from `start`, row i scores token i. The next call may overwrite it.

        window: forward so many columns from `start` alone, beside the kept keys and values, which are renewed there; None:
        forward all, and keep them all.
        """
        self.start.fill_(start)
        key = self.R, self.S, self.bias is None, width, window
        if self.graphs is None or self.R * (window or self.S) > GRAPH_TOKENS:
            return self._forward(width, window)

        def compute():
            hidden = self._forward(width, window)
            if key in self.results:
                self.results[key].copy_(hidden)
            else:
                self.results[key] = hidden

        self.graphs.run(key, compute)
        return self.results[key]

    def _forward(self, width, window):
        columns = lambda size: (
            self.start - self.before + torch.arange(self.before + size, device=self.device)
        )
        if window is None:
            hidden = self._hidden(self.tokens, self.positions, None)
            hidden = hidden.index_select(1, columns(width))
        else:
            here = columns(window)
            tokens, positions = (x.index_select(1, here) for x in (self.tokens, self.positions))
            hidden = self._hidden(tokens, positions, here)[:, : self.before + width]
        if self.before:
            hidden = self.model.align(hidden, self.valid.index_select(1, columns(width)))[:, 1:]
        return hidden

    def _hidden(self, tokens, positions, here):
        with fused_kernels():
            return self.model.hidden(tokens, positions, partial(self._attend, here))

    def _attend(self, here, layer, q, k, v):
        """here [w]: columns of the window, None for all. k, v [R, K, w, h], rotated"""
        if not self.keeps:
            return attention(q, k, v, self.bias)
        shape, kept = (*k.shape[:2], self.S, k.shape[3]), []
        for name in (("k", layer), ("v", layer)):
            if name not in self.room:  # by the first forward, outside of any graph
                self.room[name] = torch.empty(
                    self.capacity * shape[1] * shape[3], dtype=k.dtype, device=k.device
                )
            kept.append(self._view(name, *shape))
        if here is not None:
            return window_attention(q, k, v, *kept, here, self.bias)
        for old, new in zip(kept, (k, v), strict=True):
            old.copy_(new)
        return attention(q, k, v, self.bias)
