"""Rows of a .jsonl (or .jsonl.gz), .csv or .parquet file, or of a hub data set, as plain dicts."""

import csv
import errno
import gzip
import json
import os
import tempfile
from functools import cache
from itertools import islice
from pathlib import Path

BATCH = 1024  # rows of a parquet file or a hub data set that are Python values at a time


def open_rows(path, split, presets, config=None):
    """-> rows of a .jsonl, .csv or .parquet file, or of `split` of a hub data set: "owner/name", or
    "owner/name@revision".

    A file has no splits: it gives the same rows for every one. csv cells stay text, so that leading
    zeros survive. config: the part of a hub data set that has several.
    SystemExit if `path` is empty or neither, with the names of `presets` that the task knows. While
    rows are read also if the file is cut off, not UTF-8 or damaged, for text with the line number.
    """
    if not path:
        raise SystemExit(
            "the task has no rows of its own: name a file or a hub data set with --data"
        )
    file = Path(path)
    if file.is_file() and file.suffix in READERS:
        return (row for _, row in read_file(file))
    if is_hub_id(path):
        try:
            return _python_rows(_load_hub(path, config, split))
        except Exception as error:  # no such id or split, no network, bad files, a script
            said = f"no file, and the hub says: {one_line(error)} (--data FILE reads a copy)"
            raise SystemExit(f"--data {path}: {said}") from error
    problem = "no such preset or file" if presets else "no such file"
    if file.exists():
        problem = f"a file must end in {', '.join(READERS)}"
    known = f"; presets: {', '.join(presets)}" if presets else ""
    raise SystemExit(f"--data {path}: {problem}{known}")


def read_rows(path, split, presets, limit=None, config=None):
    """`open_rows` as a list: at most `limit` rows, the first."""
    return list(islice(open_rows(path, split, presets, config), limit))


def is_hub_id(path):
    return "/" in path and not Path(path).exists() and Path(path).suffix not in READERS


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
    return (data or "").partition("@")[0] in ("", *task.PRESETS, getattr(task, "HUB", ""))


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


def hub_splits(path):
    """Names of the splits of a hub data set; none for a file, and if the hub does not answer."""
    if not is_hub_id(path):
        return []
    import datasets  # slow to import, and needed only for hub data sets

    reach_hub()
    try:
        return datasets.get_dataset_split_names(**at_revision(path))
    except Exception:  # open_rows says what is wrong
        return []


def hub_split(path, names):
    """The first of `names` that is one of `hub_splits`; if none is, the last.

    Data sets for several trainings name their splits: ultrachat has train_sft.
    """
    found = hub_splits(path)
    return next((name for name in names if name in found), names[-1])


def _load_hub(path, config, split):
    import datasets

    reach_hub()
    chosen = at_revision(path) | {"name": config, "split": split}
    try:
        return datasets.load_dataset(**chosen)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EROFS):
            raise
        # no cache can be written: what `datasets` writes goes to a temporary folder
        with tempfile.TemporaryDirectory() as folder:
            return datasets.load_dataset(**chosen, streaming=True, cache_dir=folder)


def _python_rows(dataset):
    """Rows of a datasets.Dataset or IterableDataset as plain Python values."""
    batches = dataset.with_format("arrow").iter(BATCH)
    return (row for batch in batches for row in batch.to_pylist())


def read_file(path):
    """(line or number from 1, row) of every row of a file; SystemExit names the line that is no
    JSON object or not UTF-8, has surplus cells or an open quote, and where a file is cut off."""
    if not os.path.isfile(path):
        raise SystemExit(f"{path}: no such file")
    line = 0
    try:
        for line, row in READERS.get(Path(path).suffix, read_jsonl)(path):
            yield line, row
    except Exception as error:  # gzip, zlib, csv and pyarrow have errors of their own
        where = f"{path} cannot be read after line {line}, it is cut off or damaged"
        raise SystemExit(f"{where}: {one_line(error)}") from error


def read_jsonl(path):
    """Of every line that is not empty; text is UTF-8, .gz unpacked."""
    with (gzip.open if str(path).endswith(".gz") else open)(path, "rb") as file:
        for line, raw in enumerate(file, 1):
            try:
                if raw.strip():
                    yield line, json_object(raw)
            except ValueError as error:
                raise SystemExit(f"{path} line {line}: {error}") from error


def json_object(raw):
    """One line of a .jsonl file, as bytes -> its object. ValueError says what is wrong with it."""
    cut = "" if raw.endswith(b"\n") else ", and the last line has no line end: is it cut off?"
    try:
        row = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 (byte {error.start + 1} of the line: {error.reason})"
        raise ValueError(f"{problem}{cut}") from error
    except (ValueError, RecursionError) as error:
        problem = getattr(error, "msg", one_line(error))
        raise ValueError(f"not JSON ({problem}){cut}") from error
    if not isinstance(row, dict):
        raise ValueError(f"a JSON object is needed, not {type(row).__name__}")
    return row


def read_json(path):
    """The object that a JSON file holds. SystemExit if it is damaged or missing."""
    try:
        return json_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} is damaged: {error}") from error


def complete_lines(path):
    """The lines of a .jsonl as bytes, one after the other, none without the file. A last line
    without its end is dropped: it is being written, or its process was killed in the middle, even
    of a character."""
    if path.exists():
        with open(path, "rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))


def read_lines(path):
    """Yield (line, its object) of the complete lines of a .jsonl. SystemExit names one that is
    damaged."""
    for number, line in enumerate(complete_lines(path), 1):
        try:
            yield line, json_object(line)
        except ValueError as error:
            raise SystemExit(f"{path} line {number} is damaged: {error}") from error


def read_csv(path):
    """Rows of a csv with a header, as text. SystemExit on surplus cells or an open quote."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        for row in (reader := csv.DictReader(file, strict=True)):
            if None in row:  # otherwise an answer would be cut at its first comma
                more = "the next row has more cells than the header"
                raise csv.Error(f"{more}: text with a comma needs quotes")
            yield reader.line_num, row


def read_parquet(path):
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        batches = file.iter_batches(BATCH)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)


READERS = {
    ".jsonl": read_jsonl,
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".gz": read_jsonl,
}


def describe_columns(row):
    """Column names of a row for an error message, those of a struct column as `outer.inner`."""
    names = []
    for name, value in row.items():
        names += [f"{name}.{inner}" for inner in value] if isinstance(value, dict) else [str(name)]
    return ", ".join(names)


def one_line(error):
    """What an error says, on one line of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__
