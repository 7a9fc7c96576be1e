"""Tokenised rows: flat arrays, what was left out and why, and a cache on disk under a key of everything that they depend on.

A cache entry is one .safetensors file in $CLEANDLLM_CACHE, by default ~/.cache/cleandllm (of $XDG_CACHE_HOME where that is
set). It appears under its name complete, is checked as it is read, and may be deleted at any time.
"""

import fcntl
import hashlib
import inspect
import json
import os
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import tokenizers
import torch
import torch.distributed as dist
import transformers
from tqdm import tqdm

from data.rows import one_line
from models import checkpoint

CHUNK = (
    1024  # rows tokenised in one call: enough for all cores, and little memory beside the result
)


class Dropped(NamedTuple):
    """What stands for a row that is left out."""

    reason: str  # rows are counted by it
    detail: str  # shown of the first row with this reason


class TokenRows(Sequence):
    """Rows of token ids: rows[i] -> tuple of lists of int, one per part (prompt and answer; or prompt, chosen, rejected).

    The ids lie in one int32 array, mapped from the cache like `ends`: the processes of a machine share one copy of them.
    """

    def __init__(self, tokens, ends, parts, dropped):
        """tokens [total] int32; ends [rows * parts] int64: where each part ends; dropped: {reason: {"rows", "first"}}"""
        self.tokens, self.ends, self.parts, self.dropped = tokens, ends, parts, dropped

    def __len__(self):
        return len(self.ends) // self.parts

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        first = i % len(self) * self.parts
        ends = self.ends[first : first + self.parts].tolist()
        starts = [int(self.ends[first - 1]) if first else 0, *ends[:-1]]
        return tuple(self.tokens[a:b].tolist() for a, b in zip(starts, ends, strict=True))

    @property
    def lengths(self):
        """[rows, parts] int64: tokens of every part"""
        return self.ends.diff(prepend=self.ends.new_zeros(1)).view(-1, self.parts)

    @property
    def num_dropped(self):
        return sum(counted["rows"] for counted in self.dropped.values())

    def report(self, name):
        """Lines that say what is there and, for each reason, how many rows were dropped and which was the first."""
        total, N = len(self) + self.num_dropped, len(self)
        longest = f", the longest has {self.lengths.sum(1).max()}" if N else ""
        what = f"{N:,} {name}, {len(self.tokens):,} tokens{longest}"
        lines = [
            f"  {counted['rows']:,} {reason}; the first: {counted['first']}"
            for reason, counted in self.dropped.items()
        ]
        return "\n".join(
            [
                f"{what}; {f'{self.num_dropped:,} of {total:,} dropped:' if lines else 'none dropped'}",
                *lines,
            ]
        )

    def at_least(self, batch_size):
        """-> self; SystemExit if there is no row, or not enough for one step, with what became of the others."""
        N, few = len(self), f", fewer than --batch-size {batch_size}"
        if N >= max(batch_size, 1):
            return self
        reasons = [
            f"{counted['rows']} {reason} (the first: {counted['first']})"
            for reason, counted in self.dropped.items()
        ]
        what = f"--data holds {N or 'no'} rows to train on{few if N else ''}"
        raise SystemExit(
            f"{what}; {self.num_dropped} were dropped{': ' if reasons else ''}{'; '.join(reasons)}"
        )


def token_rows(
    rows, tokenizer, encode: Callable, parts: int, settings: dict, use_cache: bool = True
) -> TokenRows:
    """Tokenise rows, or take them from the cache.

    rows: gone through twice, by rank 0 for their hash and by the rank that tokenises them; never in memory as a whole where
    they are data.rows.Rows. encode(rows, tokenizer, **settings) -> for every row a tuple of `parts` lists of ids, or Dropped.
    It gets up to CHUNK rows at a time and depends on nothing else. rows and settings: values that JSON can hold.

    The key of the cache is a hash of the rows, of the settings, of the tokenizer's files with its chat template, and of the
    code of `encode` and of the library that tokenises. Ranks and runs that need the same entry wait for the one that makes it;
    whoever gets no lock, or cannot write, tokenises for itself. SystemExit where the rows are not those of the hash.
    """
    is_first = is_first_rank()
    if not use_cache:
        return _build(rows, tokenizer, encode, parts, settings, is_first)
    digest, total = _of_first_rank(lambda: _digest(rows))
    path = cache_directory() / f"{content_key(digest, tokenizer, encode, settings)}.safetensors"
    if (found := _load(path, parts)) is not None:
        return found
    with _locked(path) as problem:
        if (
            not problem and (found := _load(path, parts)) is not None
        ):  # another process made it meanwhile
            return found
        if path.exists():
            print(f"{path} is damaged: its rows are tokenised again", file=sys.stderr)
        check = hashlib.blake2b(digest_size=16)
        made = _build(
            _hashed(rows, check), tokenizer, encode, parts, settings, is_first or not problem, total
        )
        if check.hexdigest() != digest:
            raise SystemExit(
                "--data has other rows than a moment ago, or than on rank 0: start again when it is whole"
            )
        problem = problem or _save(made, path)
        if problem and is_first:
            print(f"tokenised rows are not kept in {path.parent} ({problem})", file=sys.stderr)
    return made if problem else _load(path, parts) or made


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def progress(total, what, is_shown=True):
    """A bar on stderr that goes when it is done; none where that is no terminal, nor where not is_shown."""
    return tqdm(
        total=total, desc=what, unit=" rows", leave=False, disable=None if is_shown else True
    )


def cache_directory() -> Path:
    own = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(os.environ.get("CLEANDLLM_CACHE") or Path(own) / "cleandllm").expanduser()
    except RuntimeError as error:  # a user without a home
        raise SystemExit(
            f"{one_line(error)} Tokenised rows need a place: set CLEANDLLM_CACHE, or --no-token-cache"
        ) from error


def _of_first_rank(make):
    """make() of rank 0, on every rank; a SystemExit of it too."""
    if not dist.is_initialized():
        return make()
    found = [None, None]
    if is_first_rank():
        try:
            found[0] = make()
        except SystemExit as error:
            found[1] = str(error)
    dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise SystemExit(found[1])
    return found[0]


def _digest(rows) -> tuple[str, int]:
    """-> hash of rows, their number"""
    key, total = hashlib.blake2b(digest_size=16), 0
    with progress(None, "reading") as bar:
        for _ in _hashed(rows, key):
            total += 1
            bar.update()
    return key.hexdigest(), total


def _hashed(rows, key):
    """The rows, each of them put into the hash `key` as it goes by."""
    for row in rows:
        key.update(b"\n" + json.dumps(row, sort_keys=True, default=repr).encode())
        yield row


def content_key(digest, tokenizer, encode, settings) -> str:
    """Hash of all that the tokens depend on, of the rows their `digest`; equal in every process and on every machine."""
    key = hashlib.blake2b(digest_size=16)
    for code in (inspect.getmodule(encode), sys.modules[__name__], checkpoint.prompt_text):
        key.update(inspect.getsource(code).encode())
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # the files, because a tokenizer may have been changed since it was loaded
        tokenizer.save_pretrained(folder)
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            key.update(
                f"\n{path.relative_to(folder)} {path.stat().st_size}\n".encode() + path.read_bytes()
            )
    key.update(
        json.dumps(
            [transformers.__version__, tokenizers.__version__, settings], sort_keys=True
        ).encode()
    )
    key.update(digest.encode())
    return key.hexdigest()


def _build(rows, tokenizer, encode, parts, settings, is_shown, total=None) -> TokenRows:
    tokens, lengths, dropped, seen = array("i"), array("q"), {}, 0
    rows = iter(rows)
    with progress(total, "tokenising", is_shown) as bar:
        while chunk := list(islice(rows, CHUNK)):
            for number, row in enumerate(encode(chunk, tokenizer, **settings), seen + 1):
                if isinstance(row, Dropped):
                    counted = dropped.setdefault(
                        row.reason, {"rows": 0, "first": f"row {number}, {row.detail}"}
                    )
                    counted["rows"] += 1
                    continue
                for part in row:
                    tokens.extend(part)
                lengths.extend(map(len, row))
            seen += len(chunk)
            bar.update(len(chunk))
    tensor = lambda values, dtype: (
        torch.frombuffer(values, dtype=dtype) if values else torch.zeros(0, dtype=dtype)
    )
    return TokenRows(
        tensor(tokens, torch.int32), tensor(lengths, torch.int64).cumsum(0), parts, dropped
    )


def _checksum(tensors: Iterable[torch.Tensor], about: str) -> str:
    check = hashlib.blake2b(about.encode(), digest_size=16)
    for tensor in tensors:
        check.update(tensor.numpy().data)
    return check.hexdigest()


def _load(path, parts) -> TokenRows | None:
    """An entry of the cache; None where there is none, or a damaged one."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            tensors, about = [file.get_tensor(name) for name in ("tokens", "ends")], file.metadata()
        if about["checksum"] == _checksum(tensors, about["dropped"]):
            return TokenRows(*tensors, parts, json.loads(about["dropped"]))
    except (OSError, safetensors.SafetensorError, LookupError, TypeError, ValueError):
        return None


def _save(rows: TokenRows, path) -> str:
    """Write an entry of the cache: the whole file or nothing. -> what went wrong, "" where nothing did"""
    tensors, dropped = {"tokens": rows.tokens, "ends": rows.ends}, json.dumps(rows.dropped)
    try:
        for left in path.parent.glob(
            f".{path.stem}.*.tmp"
        ):  # of a process that was killed, the lock is ours
            left.unlink(missing_ok=True)
        temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
        try:
            about = {"dropped": dropped, "checksum": _checksum(tensors.values(), dropped)}
            safetensors.torch.save_file(tensors, temporary, about)
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o666 & ~umask)  # safetensors writes for its owner alone
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, safetensors.SafetensorError) as error:
        return one_line(error)
    return ""


@contextmanager
def _locked(path):
    """Hold the lock of a cache entry, which the system takes back from a process that dies. -> why there is none, else "" """
    name, lock, problem = path.with_suffix(".lock"), None, ""
    try:
        name.parent.mkdir(parents=True, exist_ok=True)
        while lock is None:
            lock = open(name, "w")
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (
                name.exists() and os.path.samestat(os.fstat(lock.fileno()), name.stat())
            ):  # removed by who had it before
                lock = lock.close()
    except OSError as error:  # a folder that is read-only, a file system without locks
        problem = one_line(error)
    try:
        yield problem
    finally:
        if lock and not problem:
            name.unlink(missing_ok=True)
        if lock:
            lock.close()
