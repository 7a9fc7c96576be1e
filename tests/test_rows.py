"""Files as users have them: whole, cut off, in another encoding. One line says what is wrong."""

import gzip
import json
from pathlib import Path

import datasets
import pandas
import pytest
from test_evals import one_line

from data.rows import read_rows

ROWS = [{"prompt": f"number {i} é", "response": str(i)} for i in range(2000)]
TEXT = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
PACKED, TABLE = gzip.compress(TEXT), pandas.DataFrame(ROWS)
WHOLE = {
    "rows.jsonl": TEXT,
    "rows.jsonl.gz": PACKED,
    "windows.jsonl": b"\xef\xbb\xbf" + TEXT.replace(b"\n", b"\r\n\r\n"),
    "rows.csv": TABLE.to_csv(index=False).encode(),
    "rows.parquet": TABLE.to_parquet(),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_files_are_read(tmp_path, monkeypatch, name):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", Path("/proc/no/home"))
    path = tmp_path / name
    path.write_bytes(WHOLE[name])
    assert read_rows(str(path), "train") == ROWS
    assert read_rows(str(path), "train", limit=3) == ROWS[:3]


DAMAGED = [
    ("r.jsonl", TEXT[:-9], "line 2000: not JSON"),
    ("r.jsonl", TEXT[:20] + b"\xe9" + TEXT[20:], "line 1: not JSON"),
    ("r.jsonl.gz", PACKED[: len(PACKED) // 2], "cut off or damaged"),
    ("r.csv", b"a,b\nc,d\nc,2, then 3\n", "after row 1", "more cells than the header"),
    ("r.csv", b'a,b\nc,d\nc,"cut off\n', "after row 1", "unexpected end of data"),
    ("r.parquet", WHOLE["rows.parquet"][:-1], "cut off or damaged"),
    ("r.txt", TEXT, "no such file that ends in .jsonl, .csv, .parquet, .gz"),
]


@pytest.mark.parametrize("name, content, words", [(*case[:2], case[2:]) for case in DAMAGED])
def test_damaged_files_are_refused_with_their_line(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    message = one_line(read_rows, str(tmp_path / name), "train", ("a", "b"))
    assert len(message) < 400 and all(part in message for part in (str(tmp_path / name), *words))


def test_csv_cells_stay_text(tmp_path):
    (tmp_path / "r.csv").write_bytes(b'prompt,response\n007,"b, ""c"""\nd\n')
    want = [{"prompt": "007", "response": 'b, "c"'}, {"prompt": "d", "response": None}]
    assert read_rows(str(tmp_path / "r.csv"), "train") == want
