"""An endless stream over a finite list: a new order every epoch, known from the seed alone."""

import torch


class ShuffledStream:
    """stream[i] for i = 0, 1, 2, ...: every item once per epoch, each epoch in its own order, keyed by (seed, epoch).

    Position i gives the same item in every process and after a restart: there is no state to save but i.
    """

    def __init__(self, items, seed):
        self.items, self.seed, self.epoch, self.order = items, seed, None, None

    def __getitem__(self, i):
        epoch, position = divmod(i, len(self.items))
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
            self.epoch, self.order = epoch, torch.randperm(len(self.items), generator=generator).tolist()
        return self.items[self.order[position]]
