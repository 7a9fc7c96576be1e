"""An endless stream over a finite list: a new order every epoch, known from the seed alone."""

import torch

from kernels.sampling import keyed_uniform


class ShuffledStream:
    """stream[i] for i = 0, 1, 2, ...: every item once per epoch, each epoch in its own order, keyed by (seed, epoch).

    Position i gives the same item in every process and after a restart: there is no state to save but i.
    """

    def __init__(self, items, seed):
        self.items, self.seed, self.epoch, self.order = items, seed, None, None

    def __getitem__(self, i):
        epoch, position = divmod(i, len(self.items))
        if epoch != self.epoch:
            draws = keyed_uniform("epoch", self.seed, epoch, torch.arange(len(self.items)))
            self.epoch, self.order = epoch, draws.argsort(stable=True).tolist()
        return self.items[self.order[position]]
