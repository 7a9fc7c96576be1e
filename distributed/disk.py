"""Files and directories that appear only when complete, JSON, work that rank 0 does for all ranks,
and progress bars.
"""

import fcntl
import json
import os
import shutil
import sys
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path

import torch.distributed as dist
from tqdm import tqdm


def is_first_rank():
    return not dist.is_initialized() or dist.get_rank() == 0


def progress(items, name, **options):
    """items (None with total=) -> tqdm of them: a bar on the terminal of rank 0, after 10 s."""
    disable = None if is_first_rank() else True  # None: unless it is a terminal
    return tqdm(items, name, delay=10, leave=False, disable=disable, **options)


def from_first_rank(make):
    """-> make() of rank 0, on every rank; a SystemExit of rank 0 ends them all. Collective."""
    if not dist.is_initialized():
        return make()
    found = [None, None]
    if is_first_rank():
        try:
            found[0] = make()
        except SystemExit as error:
            found[1] = error.code
    dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise SystemExit(found[1])
    return found[0]


@contextmanager
def writing(path):
    """SystemExit where the disk of `path` is full, read-only or gone."""
    try:
        yield
    except OSError as error:
        raise SystemExit(f"could not write {path}: {error.strerror or error}") from error


def write_atomically(path, text):
    """A process killed at any moment leaves the old file or the new one. SystemExit if it cannot be
    written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


def one_line(error):
    """What an error says, on one line of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def json_object(raw):
    """JSON as bytes -> its object. ValueError says what is wrong with it."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {one_line(error)}") from error
    if not isinstance(found, dict):
        raise ValueError(f"a JSON object is needed, not {type(found).__name__}")
    return found


def read_json(path):
    """The object that a JSON file holds. SystemExit if it is missing or damaged."""
    try:
        return json_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} is missing or damaged: {error}") from error


def write_json(path, content):
    """`write_atomically` of what `read_json` reads."""
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def hold(directory):
    """Keep other processes out of a run directory until this one ends, however it ends. SystemExit
    if one works there; a line on stderr where the file system has no locks.
    """
    with writing(directory):  # the descriptor stays open: closing it would free the lock
        descriptor = os.open(Path(directory) / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        problem = "another process works there; wait for its end, or take a new --out"
        raise SystemExit(f"{directory}: {problem}") from error
    except OSError as error:
        said = f"{directory}: no lock ({error.strerror}): start no second process there"
        print(said, file=sys.stderr)


def new_directory(path):
    """Make directory `path`, or path-2, path-3, ... if it exists. -> Path"""
    for number in count(1):
        directory = Path(path if number == 1 else f"{path}-{number}")
        # mkdir itself is the test: two runs never share a name
        with writing(path), suppress(FileExistsError):
            directory.mkdir(parents=True)
            return directory


@contextmanager
def whole_directory(directory):
    """Build a directory under a hidden name, then rename it. All ranks enter; rank 0 writes.

        with whole_directory(directory) as folder:
            tensors = gather()                  # collectives first: rank 0 may leave the block
            if is_first_rank():
                write(tensors, folder / "file")

    SystemExit on all ranks if it exists already, or if rank 0 fails inside. A killed process or a
    full disk leaves what was there before.
    """
    directory, error = Path(directory), None
    folder = directory.with_name(f".{directory.name}.tmp")

    def prepare():
        if directory.exists():
            raise SystemExit(f"could not save {directory}: it exists already")
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed while saving
        with writing(directory):
            folder.mkdir(parents=True)

    from_first_rank(prepare)
    try:
        yield folder
    except Exception as found:  # tokenizers raises a plain one on a full disk
        error = found
    from_first_rank(partial(publish, folder, directory, error))
    if error:
        raise error  # of another rank


def publish(folder, directory, error):
    """Rename the folder. SystemExit if that fails, or if there was an error."""
    try:
        if error:
            raise error
        # by the umask; safetensors writes for the owner alone
        mode = folder.stat().st_mode & 0o666
        for path in [*folder.rglob("*"), folder]:
            if path.is_file():
                path.chmod(mode)
            sync_to_disk(path)
        folder.rename(directory)
        sync_to_disk(directory.parent)
    except Exception as error:
        # torch and safetensors do not always say that the disk is full
        free = shutil.disk_usage(directory.parent).free / 1e9
        shutil.rmtree(folder, ignore_errors=True)
        raise SystemExit(
            f"could not save {directory} ({free:.3g} GB free on its disk): {error}; "
            "earlier saves are untouched"
        ) from error


def sync_to_disk(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
