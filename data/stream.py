"""An endless stream over a finite list: a new order every epoch, known from the seed alone."""

import hashlib
import json

import torch
import torch.distributed as dist

from rollout.sampling import keyed_uniform
from runlog import write_atomically


class ShuffledStream:
    """stream[i] for i = 0, 1, 2, ...: every item once per epoch, each epoch in its own order, keyed by (seed, epoch).

    Position i gives the same item in every process and after a restart: there is no state to save but i.
    """

    def __init__(self, items, seed, run_dir=None):
        """run_dir: its config.json notes what the items are; SystemExit where a resumed run finds others in their place."""
        self.items, self.seed, self.epoch, self.order = items, seed, None, None
        if run_dir:
            check_items(items, run_dir / "config.json")

    def __getitem__(self, i):
        epoch, position = divmod(i, len(self.items))
        if epoch != self.epoch:
            draws = keyed_uniform("epoch", self.seed, epoch, torch.arange(len(self.items)))
            self.epoch, self.order = epoch, draws.argsort(stable=True)
        return self.items[int(self.order[position])]


def check_items(items, config_file):
    """Rank 0 writes number and hash of the items into a config that has none; every rank compares with one that has."""
    if not config_file.is_file():
        return
    digest = hashlib.blake2b(digest_size=8)
    if hasattr(items, "tokens"):  # data.tokens.TokenRows
        digest.update(items.tokens.numpy())
        digest.update(items.ends.numpy())
    else:
        digest.update(repr(items).encode())
    found, config = (
        {"count": len(items), "hash": digest.hexdigest()},
        json.loads(config_file.read_text(encoding="utf-8")),
    )
    had = config.setdefault("rows", found)
    if had != found:
        then, now = (f"{rows['count']} rows of hash {rows['hash']}" for rows in (had, found))
        raise SystemExit(
            f"--resume: the run began with {then} to train on, now there are {now}: give it the data that it had"
        )
    if not dist.is_initialized() or dist.get_rank() == 0:
        write_atomically(config_file, json.dumps(config, indent=2) + "\n")
