"""bench/runs.py: what a table leaves that was stopped in the middle and called again."""

import signal

import pytest
from golden_runs import rows_of
from test_evals import one_line

from bench import runs
from run.compare import recorded

# stops the caller of its script in step 2, and later one whose script is over, by many signals
# (`timeout` sends two); ends with status 6
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
        for _ in range(99):
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
rows = ["two"]
limit = {two = "--limit 2"}

[runs]
"test-{rows}" = "1 evals/run.py --tasks countdown {{limit[{rows}]}} --model @first"
first = "1 algos/bgpo.py --reward HERE/pay.py:pay {flags}"
whole = "1 algos/bgpo.py {flags} --reward HERE/pay.py:pay"
file = "1 HERE/make.py"
bad = "1 HERE/fail.py @file"
"""


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
    assert len(rows_of(tmp_path / "out", "rows")) == 3
    for made in 1, 2:
        with pytest.raises(SystemExit, match="^not done with 2 GPUs: bad$"):
            call("0", "1")
        rows = rows_of(tmp_path / "out", "rows")
        found = {row["name"]: row for row in rows}
        assert len(rows) == 3 + made and found.keys() == {"first", "whole", "file", "test-two"}
        assert (tmp_path / "out/bad.log").read_text() == "no luck\n"
        left = {path.name for path in (tmp_path / "out").glob("[!.]*[!g]")}
        assert left == {"file", "rows.jsonl"}
        (tmp_path / "out/file").unlink()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert found["test-two"]["scores"][0]["n"] == len(found["test-two"]["scores"][0]["each"]) == 2
    (_, stopped, first), (_, _, whole) = recorded(tmp_path / "out/rows.jsonl")
    assert stopped["resumed"].keys() == {"2"}
    assert first["optim/grad_norm"].equals(whole["optim/grad_norm"])


@pytest.mark.parametrize(
    "text, message",
    [
        ('[runs]\na = "1 x.py @b"', "no run b"),
        ('[runs]\na = "x.py"', "ValueError"),
        ('[runs]\n"{rate}" = "1 x.py"', "KeyError('rate')"),
        ("[final]", "KeyError('runs')"),
    ],
)
def test_a_faulty_table_is_one_line(tmp_path, text, message):
    (tmp_path / "table").write_text(text)
    assert message in one_line(runs.read_table, tmp_path / "table", "runs")
