"""Rows of a .jsonl (or .jsonl.gz), .csv or .parquet file, or of a hub data set, as plain dicts."""

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

BATCH = 1024  # rows of a parquet file or a hub data set that are Python values at a time


class Rows:
    """Rows that are made anew whenever they are gone through, so that a large data set is never in memory as a whole."""

    def __init__(self, make: Callable[[], Iterator[dict]]):
        self.make = make

    def __iter__(self) -> Iterator[dict]:
        return self.make()


def open_rows(path: str, split: str, presets: Iterable[str], config: str | None = None) -> Rows:
    """Rows of a .jsonl, .csv or .parquet file, or of `split` of a hub data set ("owner/name").

    A file has no splits: it gives the same rows for every one. csv cells stay text, so leading zeros live. config: the part
    of a hub data set that has several.
    SystemExit where `path` is neither, with the names of `presets` that the task knows; and, when they are gone through, where
    the file is cut off, not UTF-8 or damaged in another way, with the line for text.
    """
    file = Path(path)
    if file.is_file() and file.suffix in READERS:
        return Rows(lambda: READERS[file.suffix](file))
    if is_hub_id(path):
        import datasets  # seconds to import, and only needed here

        try:
            dataset = datasets.load_dataset(
                path, *([config] if config else []), split=split
            ).with_format("arrow")
        except (
            Exception
        ) as error:  # no such id or split, no network, bad files, a set with a script
            said = f"no file, and the hub says: {one_line(error)} (--data FILE reads a copy)"
            raise SystemExit(f"--data {path}: {said}") from error
        return Rows(lambda: (row for batch in dataset.iter(BATCH) for row in batch.to_pylist()))
    problem = "no such preset or file" if presets else "no such file"
    if file.exists():
        problem = f"a file must end in {', '.join(READERS)}"
    raise SystemExit(
        f"--data {path}: {problem}" + (f"; presets: {', '.join(presets)}" if presets else "")
    )


def read_rows(
    path: str,
    split: str,
    presets: Iterable[str],
    limit: int | None = None,
    config: str | None = None,
) -> list[dict]:
    """`open_rows` as a list: at most `limit` rows, the first."""
    return list(islice(open_rows(path, split, presets, config), limit))


def is_hub_id(path: str) -> bool:
    return "/" in path and not Path(path).exists() and Path(path).suffix not in READERS


def hub_splits(path: str) -> list[str]:
    """Names of the splits of a hub data set; none for a file, and where the hub does not tell."""
    if not is_hub_id(path):
        return []
    import datasets  # seconds to import, and only needed here

    try:
        return datasets.get_dataset_split_names(path)
    except Exception:  # open_rows says what is wrong
        return []


def hub_split(path: str, names: Sequence[str]) -> str:
    """The first of `names` that is one of `hub_splits`; where none is, the last.

    Data sets with several trainings name their splits: train_sft and train_prefs of ultrachat and ultrafeedback.
    """
    found = hub_splits(path)
    return next((name for name in names if name in found), names[-1])


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict]]:
    """(line number from 1, object) of every line that is not empty, from UTF-8 text, gzipped if the name ends in .gz.

    SystemExit names the line that is no JSON object or no UTF-8, and a file that is cut off or cannot be read.
    """
    if not Path(path).is_file():
        raise SystemExit(f"{path}: no such file")
    line = 0
    try:
        with (gzip.open if str(path).endswith(".gz") else open)(path, "rb") as file:
            for line, raw in enumerate(file, 1):
                if raw.strip():
                    yield line, _json_object(raw, f"{path} line {line}")
    except (OSError, EOFError, zlib.error) as error:  # gzip's own errors among them
        raise SystemExit(
            f"{path} cannot be read behind line {line}, it is cut off or damaged: {one_line(error)}"
        ) from error


def _json_object(raw: bytes, where: str) -> dict:
    """One line of a .jsonl file -> its object."""
    cut = (
        ""
        if raw.endswith(b"\n")
        else ", and the file ends there without a line end: is it cut off?"
    )
    try:
        row = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise SystemExit(
            f"{where}: not UTF-8 (byte {error.start + 1} of the line: {error.reason}){cut}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise SystemExit(
            f"{where}: not JSON ({getattr(error, 'msg', one_line(error))}){cut}"
        ) from error
    if not isinstance(row, dict):
        raise SystemExit(f"{where}: a JSON object is needed, not {type(row).__name__}")
    return row


def read_csv(path: Path) -> Iterator[dict]:
    """Rows of a csv with a header; every value is text. SystemExit on more cells than the header has, or an open quote."""
    line = 0
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            for row in (reader := csv.DictReader(file, strict=True)):
                if None in row:  # else an answer would be cut at its first comma
                    raise csv.Error(
                        "the next row has more cells than the header: text with a comma needs quotes"
                    )
                yield row
                line = reader.line_num
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SystemExit(f"{path} cannot be read behind line {line}: {one_line(error)}") from error


def read_parquet(path: Path) -> Iterator[dict]:
    """Rows of a parquet file as plain Python values."""
    import pyarrow.parquet  # a second to import, and only needed here

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SystemExit(
            f"{path} is no parquet file, or a truncated or damaged one: {one_line(error)}"
        ) from error


def _jsonl_rows(path: Path) -> Iterator[dict]:
    return (row for _, row in read_jsonl(path))


READERS = {".jsonl": _jsonl_rows, ".csv": read_csv, ".parquet": read_parquet, ".gz": _jsonl_rows}


def describe_columns(row: dict) -> str:
    """Column names of a row for an error message, those of a struct column as `outer.inner`."""
    names = []
    for name, value in row.items():
        names += [f"{name}.{inner}" for inner in value] if isinstance(value, dict) else [str(name)]
    return ", ".join(names)


def one_line(error: Exception) -> str:
    """What an error says, on one line of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__
