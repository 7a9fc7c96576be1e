"""Rows of a .jsonl (or .jsonl.gz), .csv or .parquet file, or of a hub data set, as plain dicts."""

import csv
import gzip
import os
import re
from functools import cache
from itertools import islice
from pathlib import Path

from distributed.disk import json_object, one_line

BATCH = 1024  # rows of a parquet file that are Python values at a time


def open_rows(path, split, presets, config=None):
    """Rows of a .jsonl, .csv or .parquet file; of the file named as `split` in a folder of them, or
    of SPLIT/samples.jsonl there; or of `split` of a hub data set: "owner/name", or
    "owner/name@revision". A generator.

    A file has no splits: it gives the same rows for every one. csv cells stay text, so that leading
    zeros survive. config: the part of a hub data set that has several.
    SystemExit if `path` is empty or none of these, with the names of `presets` that the task knows;
    also if the file is cut off, not UTF-8 or damaged, for text with the line number.
    """
    if not path:
        raise SystemExit(
            "the task has no rows of its own: name a file or a hub data set with --data"
        )
    if os.path.isdir(path):
        path = files_of(path).get(split, f"{path}/{split}.jsonl")
    if os.path.isfile(path) and Path(path).suffix in READERS:
        yield from read_file(path)
    elif is_hub_id(path):
        import datasets  # slow to import, and needed only for hub data sets

        reach_hub()
        try:
            yield from datasets.load_dataset(**at_revision(path), name=config, split=split)
        except Exception as error:  # no such id or split, no network, bad files, a script
            said = f"no file, and the hub says: {one_line(error)} (--data FILE reads a copy)"
            raise SystemExit(f"{path}: {said}") from error
    else:
        known = f"; presets: {', '.join(presets)}" if presets else ""
        raise SystemExit(f"{path}: no such file that ends in {', '.join(READERS)}{known}")


def read_rows(path, split, presets=(), limit=None, config=None):
    """`open_rows` as a list of Row: at most `limit` rows, the first."""
    rows = islice(open_rows(path, split, presets, config), limit)
    return [Row(f"{path} row {number}", row) for number, row in enumerate(rows, 1)]


class Row(dict):
    """Says where it is when it lacks a column."""

    def __init__(self, place, row):
        super().__init__(row)
        self.place = place

    def __missing__(self, column):
        raise Missing(f"{self.place} has no column {column!r}, only {', '.join(self)}")


class Missing(SystemExit, KeyError):
    """Ends a command in one line, unless it is caught as what it is in a dict."""


def whole_path(text):
    """A word of a command line, with the whole path of every file and folder in it that has a . or
    a /: rows.jsonl@d1, pay.py:pay, gsm8k=a.jsonl. So --resume works from any directory.
    """

    def whole(found):
        is_path = re.search("[./]", found[0]) and os.path.exists(found[0])
        return os.path.abspath(found[0]) if is_path else found[0]

    return re.sub("[^=,@:]+", whole, text)


def is_hub_id(path):
    name = Path(path.partition("@")[0])
    return "/" in path and not name.exists() and name.suffix not in READERS


def at_revision(path):
    """ "owner/name@revision" -> {"path": "owner/name", "revision": revision}; None: the newest"""
    name, _, revision = path.partition("@")
    return {"path": name, "revision": revision or None}


def is_of(path, hub):
    """Whether `path` is this hub data set, at any revision."""
    return path.partition("@")[0] == hub


def is_own(task, data):
    """Whether data (--data) names problems of the task: none, a preset, or its hub data set, at any
    revision.
    """
    return data.partition("@")[0] in ("", *task.PRESETS, getattr(task, "HUB", ""))


@cache
def reach_hub():
    """Asks the hub once. If it does not answer within 5 s, only its cache is read from then on: its
    client would retry for half a minute."""
    import datasets
    import huggingface_hub

    try:
        huggingface_hub.utils.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=5)
    except Exception:  # httpx and requests have errors of their own
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def files_of(folder):
    """-> {split: its file}: train.jsonl, or another file of rows, or train/samples.jsonl"""
    found = {file.parent.name: file for file in Path(folder).glob("*/samples.jsonl")}
    for file in sorted(Path(folder).iterdir()):
        if file.suffix in READERS:
            found[file.name.partition(".")[0]] = file
    return found


def splits_of(path):
    """Names of the splits of a folder of files or of a hub data set; none for a file, and if the
    hub does not answer.
    """
    if os.path.isdir(path):
        return files_of(path)
    if not is_hub_id(path):
        return []
    import datasets

    reach_hub()
    try:
        return datasets.get_dataset_split_names(**at_revision(path))
    except Exception:  # open_rows says what is wrong
        return []


def split_name(path, names):
    """The first of `names` that is one of `splits_of`; if none is, the last.

    Data sets for several trainings name their splits: ultrachat has train_sft.
    """
    found = splits_of(path)
    return next((name for name in names if name in found), names[-1])


def read_file(path):
    """Rows of a file. SystemExit names the line that is no JSON object or not UTF-8, has surplus
    cells or an open quote, and where a file is cut off.
    """
    count = 0
    try:
        for row in READERS[Path(path).suffix](path):
            count += 1
            yield row
    except Exception as error:  # gzip, zlib, csv and pyarrow have errors of their own
        where = f"{path} cannot be read after row {count}, it is cut off or damaged"
        raise SystemExit(f"{where}: {one_line(error)}") from error


def read_jsonl(path):
    """Of every line that is not empty; text is UTF-8, .gz unpacked."""
    with (gzip.open if str(path).endswith(".gz") else open)(path, "rb") as file:
        yield from (row for _, row in objects(path, file))


def objects(path, lines):
    """(line, its object) of the lines that are not empty. SystemExit names one that has none."""
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                yield line, json_object(line)
        except ValueError as error:
            raise SystemExit(f"{path} line {number}: {error}") from error


def complete_lines(path):
    """The lines of a .jsonl as bytes, one after the other, none without the file. A last line
    without its end is dropped: it is being written, or its process was killed in the middle, even
    of a character."""
    if path.exists():
        with open(path, "rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))


def read_lines(path):
    """`objects` of the complete lines of a .jsonl."""
    return objects(path, complete_lines(path))


def read_csv(path):
    """Rows of a csv with a header, as text. SystemExit on surplus cells or an open quote."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file, strict=True):
            if None in row:  # otherwise an answer would be cut at its first comma
                more = "the next row has more cells than the header"
                raise csv.Error(f"{more}: text with a comma needs quotes")
            yield row


def read_parquet(path):
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(BATCH):
            yield from batch.to_pylist()


READERS = {".jsonl": read_jsonl, ".csv": read_csv, ".parquet": read_parquet, ".gz": read_jsonl}
