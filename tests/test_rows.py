"""Files as users have them: whole, cut off, in another encoding, damaged. One line each."""

import gzip
import json
from pathlib import Path

import datasets
import huggingface_hub
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from data.rows import reach_hub, read_rows, split_name

ROWS = [{"prompt": f"number {i} é", "response": str(i)} for i in range(2000)]
TEXT = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
PACKED = gzip.compress(TEXT)
HALF = len(PACKED) // 2


def refused(path, *parts):
    with pytest.raises(SystemExit) as error:
        read_rows(str(path), "train", ())
    message = str(error.value)
    assert "\n" not in message and len(message) < 400, message
    assert all(part in message for part in (str(path), *parts)), message


def parquet(path):
    pandas.DataFrame(ROWS).to_parquet(path)
    return path.read_bytes()


WHOLE = {
    "rows.jsonl": TEXT,
    "rows.jsonl.gz": PACKED,
    "bom.jsonl": b"\xef\xbb\xbf" + TEXT,
    "windows.jsonl": TEXT.replace(b"\n", b"\r\n\r\n"),
    "rows.csv": b"prompt,response\n"
    + b"".join(f"number {i} é,{i}\n".encode() for i in range(2000)),
}


@pytest.mark.parametrize("name", [*WHOLE, "rows.parquet"])
def test_whole_files_are_read(tmp_path, monkeypatch, name):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", Path("/proc/no/home"))
    path = tmp_path / name
    path.write_bytes(WHOLE.get(name) or parquet(path))
    assert read_rows(str(path), "train", ()) == ROWS
    assert read_rows(str(path), "train", (), 3) == ROWS[:3]


DAMAGED = [
    ("r.jsonl", TEXT[:-9], "line 2000: not JSON"),
    ("r.jsonl", TEXT[:20] + b"\xe9" + TEXT[20:], "line 1: not JSON: 'utf-8' codec"),
    ("r.jsonl", TEXT + b"[" * 100_000, "line 2001: not JSON"),
    ("r.jsonl", b'{"n": ' + b"1" * 5000 + b"}\n", "line 1: not JSON"),
    ("r.jsonl", TEXT + b"null\n", "line 2001: a JSON object is needed, not NoneType"),
    ("r.jsonl.gz", gzip.compress(TEXT[:-9]), "line 2000: not JSON"),
    ("r.jsonl.gz", PACKED[:HALF], "cut off or damaged"),
    ("r.jsonl.gz", TEXT, "cut off or damaged"),
    ("r.jsonl.gz", PACKED[:-4], "cut off or damaged"),
    ("r.csv", b"prompt,response\na,b\ncaf\xe9,c\n", "utf-8"),
    ("r.csv", b"a,b\nc,d\n" + b"x" * 200_000 + b",c\n", "after row 1", "field larger"),
    ("r.csv", b"a,b\nc,d\nc,2, then 3\n", "after row 1", "more cells than the header"),
    ("r.csv", b'a,b\nc,d\nc,"cut off\n', "after row 1", "unexpected end of data"),
    ("r.txt", TEXT, "no such file that ends in .jsonl, .csv, .parquet, .gz"),
]


@pytest.mark.parametrize("case", range(len(DAMAGED)))
def test_damaged_text_is_refused_with_its_line(tmp_path, case):
    name, content, *words = DAMAGED[case]
    (tmp_path / name).write_bytes(content)
    refused(tmp_path / name, *words)


def test_csv_cells_stay_text(tmp_path):
    (tmp_path / "r.csv").write_bytes(b'prompt,response\n007,"b, ""c"""\nd\n')
    want = [{"prompt": "007", "response": 'b, "c"'}, {"prompt": "d", "response": None}]
    assert read_rows(str(tmp_path / "r.csv"), "train", ()) == want


def test_a_damaged_parquet_is_refused(tmp_path):
    """Cut off anywhere; its pages overwritten; a column of text that is not UTF-8."""
    path = tmp_path / "r.parquet"
    whole = parquet(path)
    pages = whole[:100] + b"\xff" * 2000 + whole[2100:]
    for content in (b"", whole[:8], whole[: len(whole) // 2], whole[:-1], pages, TEXT):
        path.write_bytes(content)
        refused(path, "cut off or damaged")
    latin = pyarrow.array([b"caf\xe9"], pyarrow.binary()).buffers()
    column = pyarrow.Array.from_buffers(pyarrow.string(), 1, latin)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column}), path)
    refused(path, "utf-8")
    pandas.DataFrame({"prompt": []}).to_parquet(path)
    assert read_rows(str(path), "train", ()) == []


def test_what_the_hub_says_becomes_one_line(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("it is\n\nnot there")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    monkeypatch.setattr(datasets, "get_dataset_split_names", fail)
    refused("owner/name", "the hub says: it is not there (--data FILE reads a copy)")
    assert split_name("owner/name", ("a", "b")) == "b"


def test_without_a_network_the_hub_is_asked_once(monkeypatch):
    asked = []

    class Session:
        def head(self, url, timeout):
            asked.append(url)
            raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub.utils, "get_session", Session)
    for settings in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(settings, "HF_HUB_OFFLINE", False)
    reach_hub.cache_clear()
    for _ in range(2):
        refused("owner/nothing", "the hub says: Couldn't reach 'owner/nothing' on the Hub")
    assert asked == [huggingface_hub.constants.ENDPOINT]


def test_presets_are_named_where_there_are_some():
    for presets, end in ((), ".gz"), (("a", "b"), ".gz; presets: a, b"):
        refused_with = f"^--data no/missing.jsonl: no such file that ends in .*{end}$"
        with pytest.raises(SystemExit, match=refused_with):
            read_rows("no/missing.jsonl", "test", presets)
