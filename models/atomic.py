"""Directories that appear under their name only when they are complete and on disk."""

import os
import shutil
from pathlib import Path

import torch.distributed as dist


class AtomicDirectory:
    """Build `directory` in a hidden neighbour, then rename it. All ranks construct it, rank 0
    writes.

        save = AtomicDirectory(directory)
        save.attempt(write_something, save.folder / "file")   # rank 0; does nothing after a failure
        save.finish()                                         # all ranks: rename, or SystemExit

    `finish` reports a failure, and not the place where it happens, because ranks may have
    collectives left in between: a rank that left early would hang the others. A killed process or a
    full disk leaves earlier directories untouched.
    """

    def __init__(self, directory):
        self.directory = Path(directory)
        self.folder = self.directory.with_name(f".{self.directory.name}.tmp")
        self.is_writer = not dist.is_initialized() or dist.get_rank() == 0
        self.error = None
        self.attempt(self._prepare)

    @property
    def is_active(self):
        """This rank writes, and nothing has failed yet."""
        return self.is_writer and self.error is None

    def attempt(self, action, *args):
        if self.is_active:
            try:
                action(*args)
            except Exception as error:  # any: tokenizers raises plain Exception for a full disk
                self.error = error

    def finish(self):
        self.attempt(self._publish)
        if self.error and self.is_writer:
            shutil.rmtree(self.folder, ignore_errors=True)
        problem = f"could not save {self.directory}: {self.error}; earlier saves are untouched"
        message = [problem if self.error else None]
        if dist.is_initialized():
            dist.broadcast_object_list(message, src=0)
        if message[0]:
            raise SystemExit(message[0])

    def _prepare(self):
        if self.directory.exists():
            raise FileExistsError("it exists already")
        shutil.rmtree(self.folder, ignore_errors=True)  # of a run that was killed while saving
        self.folder.mkdir(parents=True)

    def _publish(self):
        umask = os.umask(0)
        os.umask(umask)
        for path in [*self.folder.rglob("*"), self.folder]:
            if path.is_file():
                path.chmod(
                    0o666 & ~umask
                )  # safetensors writes files that only their owner can read
            sync_to_disk(path)
        os.rename(self.folder, self.directory)
        sync_to_disk(self.directory.parent)


def sync_to_disk(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
