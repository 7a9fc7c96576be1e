"""Files as they come from the world: cut off, in another encoding, damaged. One line each, and no row invented."""

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest

from data.rows import hub_split, read_rows

FILES = os.environ.get("CLEANDLLM_DATA")
ROWS = [{"prompt": f"number {i} é", "response": str(i)} for i in range(2000)]
TEXT = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def refused(path, *parts):
    with pytest.raises(SystemExit) as error:
        read_rows(str(path), "train", ())
    message = str(error.value)
    assert (
        "\n" not in message
        and len(message) < 400
        and all(part in message for part in (str(path), *parts))
    ), message


def parquet(path):
    import pandas

    pandas.DataFrame(ROWS).to_parquet(path)
    return path.read_bytes()


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "rows.jsonl.gz", "bom.jsonl", "windows.jsonl", "rows.parquet"]
)
def test_whole_files_are_read(tmp_path, name):
    path = tmp_path / name
    if name.endswith("parquet"):
        parquet(path)
    else:
        text = {
            "bom.jsonl": b"\xef\xbb\xbf" + TEXT,
            "windows.jsonl": TEXT.replace(b"\n", b"\r\n\r\n"),
        }.get(name, TEXT)
        path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    assert (
        read_rows(str(path), "train", ()) == ROWS
        and read_rows(str(path), "train", (), 3) == ROWS[:3]
    )


@pytest.mark.parametrize(
    "content, parts",
    [
        (TEXT[:-9], ("line 2000: not JSON", "is it cut off?")),
        (TEXT[:20] + b"\xe9" + TEXT[20:], ("line 1: not UTF-8 (byte 21",)),
        (TEXT.decode().encode("utf-16"), ("line 1: not UTF-8",)),
        (TEXT.decode().encode("latin-1"), ("line 1: not UTF-8",)),
        (TEXT + b"\0\0\0\0\n", ("line 2001: not JSON",)),
        (TEXT + b"[" * 100_000, ("line 2001: not JSON", "cut off")),
        (b'{"n": ' + b"1" * 5000 + b"}\n", ("line 1: not JSON",)),
        (TEXT + b"null\n", ("line 2001: a JSON object is needed, not NoneType",)),
    ],
    ids=[
        "cut off",
        "latin-1 byte",
        "utf-16",
        "latin-1",
        "zero bytes",
        "deep",
        "long number",
        "null",
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_damaged_text_is_refused_with_its_line(tmp_path, content, parts, suffix):
    path = tmp_path / f"rows.{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    refused(path, *parts)


@pytest.mark.parametrize("damage", ["cut off", "no gzip", "other bytes", "no end"])
def test_a_damaged_gz_is_refused(tmp_path, damage):
    whole = gzip.compress(TEXT)
    middle = whole[: len(whole) // 2] + bytes(reversed(whole[len(whole) // 2 :]))
    (tmp_path / "r.jsonl.gz").write_bytes(
        {
            "cut off": whole[: len(whole) // 2],
            "no gzip": TEXT,
            "other bytes": middle,
            "no end": whole[:-4],
        }[damage]
    )
    refused(tmp_path / "r.jsonl.gz")


def test_a_damaged_parquet_is_refused(tmp_path):
    """Cut off anywhere; its pages overwritten; a column of text that is no UTF-8."""
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "r.parquet"
    whole = parquet(path)
    pages = whole[:100] + b"\xff" * 2000 + whole[2100:]
    for content in (b"", whole[:8], whole[: len(whole) // 2], whole[:-1], pages, TEXT):
        path.write_bytes(content)
        refused(path, "is no parquet file, or a truncated or damaged one")
    column = pyarrow.Array.from_buffers(
        pyarrow.string(), 1, pyarrow.array([b"caf\xe9"], pyarrow.binary()).buffers()
    )
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column}), path)
    refused(path, "utf-8")


def test_a_damaged_csv_is_refused(tmp_path):
    path = tmp_path / "r.csv"
    path.write_bytes(b"prompt,response\na,b\ncaf\xe9,c\n")
    refused(path, "utf-8")
    path.write_bytes(b"prompt,response\na,b\n" + b"x" * 200_000 + b",c\n")
    refused(path, "behind line 2", "field larger")
    path.write_bytes(b"prompt,response\na,b\nc,2, then 3\n")
    refused(path, "behind line 2", "more cells than the header")
    path.write_bytes(b'prompt,response\na,b\nc,"cut off\n')
    refused(path, "behind line 2", "unexpected end of data")
    path.write_bytes(b'prompt,response\na,"b, ""c"""\nd\n')
    assert read_rows(str(path), "train", ()) == [
        {"prompt": "a", "response": 'b, "c"'},
        {"prompt": "d", "response": None},
    ]


def test_a_folder_or_a_file_without_rights_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").mkdir()
    refused(tmp_path / "rows.jsonl")
    if os.getuid():  # root may read everything
        (tmp_path / "secret.jsonl").write_bytes(TEXT)
        (tmp_path / "secret.jsonl").chmod(0)
        refused(tmp_path / "secret.jsonl", "Permission")


@pytest.mark.parametrize(
    "names, split",
    [
        (["test_sft", "train_sft", "train"], "train_sft"),
        (["train", "test"], "train"),
        ([], "train"),
    ],
)
def test_a_hub_data_set_gives_the_first_split_that_it_has(monkeypatch, names, split):
    import datasets

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: names)
    assert hub_split("owner/name", ("train_sft", "train")) == split
    assert (
        hub_split("owner/name.jsonl", ("train_sft", "train"))
        == "train"
        == hub_split("small", ("train_sft", "train"))
    )


class ReadTimeout(Exception):
    """As httpx has one: neither an OSError nor one of datasets."""


@pytest.mark.parametrize(
    "kind",
    [
        "DatasetNotFoundError",
        "DataFilesNotFoundError",
        "DatasetGenerationError",
        RuntimeError,
        ReadTimeout,
    ],
)
def test_what_the_hub_says_becomes_one_line(monkeypatch, kind):
    """RuntimeError: what datasets 4 and later raise for a set that is a script."""
    import datasets

    def fail(*_, **__):
        raise (getattr(datasets.exceptions, kind) if isinstance(kind, str) else kind)(
            "it is\n\nnot there"
        )

    monkeypatch.setattr(datasets, "load_dataset", fail)
    monkeypatch.setattr(datasets, "get_dataset_split_names", fail)
    refused("owner/name", "the hub says: it is not there (--data FILE reads a copy)")
    assert hub_split("owner/name", ("a", "b")) == "b"


def test_presets_are_named_where_there_are_some(tmp_path):
    for presets, end in (
        ((), "no such file"),
        (("a", "b"), "no such preset or file; presets: a, b"),
    ):
        with pytest.raises(SystemExit) as error:
            read_rows("missing.jsonl", "test", presets)
        assert str(error.value) == f"--data missing.jsonl: {end}"


@pytest.mark.skipif(not FILES, reason="CLEANDLLM_DATA is not set")
def test_real_files_cut_off_anywhere_are_refused(tmp_path):
    """Every kind of real file at eight cuts; a .jsonl that is cut at the end of a line is a whole file of fewer rows."""
    for name in ("gsm8k/test.jsonl", "human_eval/HumanEval.jsonl.gz", "dare/test_gsm8k_1.parquet"):
        whole = (Path(FILES) / name).read_bytes()
        path = tmp_path / Path(name).name
        for part in range(8):
            path.write_bytes(whole[: len(whole) * part // 8 + 3])
            refused(path)
        shutil.copy(Path(FILES) / name, path)
        assert len(read_rows(str(path), "test", ())) in (1319, 164)
