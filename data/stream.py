"""An endless stream over a finite list: a new order every epoch, known from the seed alone."""

import hashlib
from itertools import chain

import torch

from distributed.disk import is_first_rank, read_json, write_json
from rollout.sampling import keyed_uniform


class ShuffledStream:
    """stream[i] for i = 0, 1, ...: every item once per epoch, in an order keyed by (seed, epoch).

    Position i gives the same item in every process and after a restart: i is the only state.
    """

    def __init__(self, items, seed):
        self.items, self.seed, self.epoch, self.order = items, seed, None, None

    def __getitem__(self, i):
        epoch, position = divmod(i, len(self.items))
        if epoch != self.epoch:
            draws = keyed_uniform("epoch", self.seed, epoch, torch.arange(len(self.items)))
            self.epoch, self.order = epoch, draws.argsort(stable=True)
        return self.items[int(self.order[position])]


def check_items(items, config_file):
    """The first run writes number and hash of the items into its config; a resumed one compares."""
    if not config_file.is_file():
        return
    parts = [repr(items).encode()]
    if hasattr(items, "rows"):  # a data.tokens.TokenRows
        parts = [*chain(*items.rows), items.lengths.flatten().cumsum(0).numpy()]
    digest = hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()
    found = {"count": len(items), "hash": digest}
    config = read_json(config_file)
    had = config.setdefault("rows", found)
    if had != found:
        raise SystemExit(
            f"--resume: the rows to train on are others ({found}) than those that the run began "
            f"with ({had}): give it the data that it had"
        )
    if is_first_rank():
        write_json(config_file, config)
