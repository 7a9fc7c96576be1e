"""bench/runs.py: what a table leaves that was stopped in the middle and called again."""

import io
import signal

import pandas as pd
import pytest
from golden_runs import rows_of

from bench import runs

# stops the caller of its script in step 2, and later one whose script is over; ends with status 6
PAY = """
import atexit
import os
from itertools import count
from pathlib import Path

calls, here = count(), Path(__file__).parent
moment = "over" if (here / "step").exists() else "step"

def stop(now):
    if next(calls) > 9 and now == moment and not (here / now).exists():
        (here / now).touch()
        os.kill(os.getppid(), 15)

def end():
    stop("over")
    os._exit(6)

def pay(completion, example):
    stop("step")
    return len(completion)

atexit.register(end)
"""
TABLE = """
flags = "--prompts-per-step 2 --num-generations 4 --eval-limit 4 --eval-every 1 --max-steps 3"
rows = [2]

[runs]
"test-{rows}" = "1 evals/run.py --tasks countdown --limit {rows} --model @first"
first = "1 algos/bgpo.py --reward HERE/pay.py:pay {flags}"
whole = "1 algos/bgpo.py {flags} --reward HERE/pay.py:pay"
file = "1 HERE/make.py"
bad = "1 HERE/fail.py @file"
"""


def curves(row):
    return pd.read_csv(io.StringIO(row["curves"])).filter(regex="^(?!time|memory)")


def test_a_stopped_table_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "hold", lambda out: None)  # until the end of a process
    (tmp_path / "pay.py").write_text(PAY)
    (tmp_path / "make.py").write_text("import sys\nopen(sys.argv[-1], 'w')")
    (tmp_path / "fail.py").write_text("import sys\nopen(sys.argv[1])\nsys.exit('no luck')")
    (tmp_path / "table").write_text(TABLE.replace("HERE", str(tmp_path)))
    call = lambda *gpus: runs.main(tmp_path / "table", tmp_path / "out", [*gpus])
    with pytest.raises(KeyboardInterrupt):
        call("0")
    assert "step 2: stopped" in (tmp_path / "out/first.log").read_text()
    with pytest.raises(KeyboardInterrupt):
        call("0")
    names = [row["name"] for row in rows_of(tmp_path / "out", "rows")]
    assert names == ["first", "test-2", "whole"]
    for made in 1, 2:
        with pytest.raises(SystemExit, match="^not done with 2 GPUs: bad$"):
            call("0", "1")
        rows = rows_of(tmp_path / "out", "rows")
        found = {row["name"]: row for row in rows}
        assert len(rows) == 3 + made and found.keys() == {"first", "whole", "file", "test-2"}
        assert (tmp_path / "out/bad.log").read_text() == "no luck\n"
        left = {path.name for path in (tmp_path / "out").glob("[!.]*[!g]")}
        assert left == {"file", "rows.jsonl"}
        (tmp_path / "out/file").unlink()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert found["test-2"]["scores"][0]["n"] == len(found["test-2"]["scores"][0]["each"]) == 2
    assert found["first"]["config"]["resumed"].keys() == {"2"}
    assert curves(found["first"]).equals(curves(found["whole"]))
