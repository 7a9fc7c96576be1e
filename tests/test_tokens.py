"""The cache of tokenised rows: under a key of everything that they depend on, whole or not at all, made once."""

import io
import os
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data import tokens
from data.rows import Rows
from data.sft import encode
from data.stream import ShuffledStream
from data.tokens import Dropped, TokenRows, cache_directory, token_rows
from models import load_tokenizer
from models.tiny import byte_tokenizer

ROWS = [
    [i, i + 1] if i % 50 else [] for i in range(3000)
]  # three calls of encode; 60 rows are dropped
SETTINGS = {"shift": 0}


def plus(rows, tokenizer, shift):
    """A row of numbers -> two parts; what is called is counted in the folder of the cache."""
    with open(cache_directory() / "calls", "a") as file:
        file.write(f"{os.getpid()}\n")
    pair = lambda a, b: ([a + shift], [a, b + shift, b])
    return [pair(*row) if row else Dropped("are empty", "nothing") for row in rows]


def rows_of(cache, rows=ROWS, settings=SETTINGS, tokenizer=None, **flags):
    return token_rows(rows, tokenizer or byte_tokenizer(), plus, 2, settings, **flags)


def calls(cache):
    return len((cache / "calls").read_text().split()) if (cache / "calls").exists() else 0


def entry(cache):
    (path,) = cache.glob("*.safetensors")
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEANDLLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def test_rows_are_those_of_encode(cache):
    want = [pair for pair in plus(ROWS, None, 0) if not isinstance(pair, Dropped)]
    for rows in (rows_of(cache, use_cache=False), rows_of(cache), rows_of(cache)):
        assert (
            list(rows) == want
            and len(rows) == 2940
            and rows[-1] == want[-1]
            and rows[3:5] == want[3:5]
        )
        assert rows.lengths.tolist() == [[1, 3]] * 2940
        assert (
            rows.dropped == {"are empty": {"rows": 60, "first": "row 1, nothing"}}
            and rows.num_dropped == 60
        )
        assert [ShuffledStream(rows, 1)[i] for i in (0, 5000)] == [
            ShuffledStream(want, 1)[i] for i in (0, 5000)
        ]
        with pytest.raises(IndexError):
            rows[2940]


def test_the_second_time_nothing_is_tokenised(cache):
    rows_of(cache)
    made = calls(cache)
    assert made == 3 and [path.suffix for path in cache.iterdir() if path.name != "calls"] == [
        ".safetensors"
    ]
    rows_of(cache)
    assert calls(cache) == made
    rows_of(cache, use_cache=False)
    assert calls(cache) == made + 3 and len(list(cache.iterdir())) == 2


def test_processes_share_the_mapped_file(cache):
    """The one that makes it too."""
    for _ in range(2):
        rows = rows_of(cache)
        assert str(entry(cache)) in Path("/proc/self/maps").read_text() and len(rows) == 2940
        del rows
        assert str(entry(cache)) not in Path("/proc/self/maps").read_text()


class Row(list):
    __hash__ = object.__hash__


def test_rows_are_never_in_memory_as_a_whole(cache):
    """Of Rows, those of two calls of encode are alive while they are tokenised, and two while they are hashed."""
    alive, most = weakref.WeakSet(), []

    def make():
        most.append(0)
        for values in ROWS:
            row = Row(values)
            alive.add(row)
            most[-1] = max(most[-1], len(alive))
            yield row
            del row

    want = list(rows_of(cache, Rows(make)))
    assert most[0] <= 2 and tokens.CHUNK <= most[1] <= 2 * tokens.CHUNK and len(most) == 2
    assert list(rows_of(cache, Rows(make))) == want and most[2] <= 2 and len(most) == 3
    assert list(rows_of(cache, Rows(make), use_cache=False)) == want and most[3] <= 2 * tokens.CHUNK


def test_rows_that_change_while_they_are_read_are_refused(cache):
    passes = iter([ROWS, [*ROWS[:-1], [7, 7]], ROWS, ROWS])
    rows = Rows(lambda: iter(next(passes)))
    with pytest.raises(SystemExit, match="--data has other rows than a moment ago"):
        rows_of(cache, rows)
    assert not list(cache.glob("*.safetensors")) and not list(cache.glob("*.lock"))
    assert len(rows_of(cache, rows)) == 2940


@pytest.mark.parametrize(
    "what",
    [
        "a row",
        "order",
        "one row less",
        "settings",
        "template",
        "special token",
        "vocabulary",
        "code",
    ],
)
def test_another_key_for_everything_that_counts(cache, monkeypatch, what):
    rows_of(cache)
    rows, settings, tokenizer = list(ROWS), dict(SETTINGS), byte_tokenizer()
    if what == "a row":
        rows[7] = [7, 7]
    elif what == "order":
        rows[7], rows[8] = rows[8], rows[7]
    elif what == "one row less":
        rows.pop()
    elif what == "settings":
        settings["shift"] = 1
    elif what == "template":
        tokenizer.chat_template += " "
    elif what == "special token":
        tokenizer.pad_token = "<|MASK|>"
    elif what == "vocabulary":
        tokenizer.add_tokens(["three"])
    elif what == "code":
        source = tokens.inspect.getsource
        monkeypatch.setattr(tokens.inspect, "getsource", lambda code: source(code) + "#")
    rows_of(cache, rows, settings, tokenizer)
    assert calls(cache) == 6 and len(list(cache.glob("*.safetensors"))) == 2


def test_the_same_tokenizer_in_another_place_has_the_same_key(cache, tmp_path):
    """That of a checkpoint is its base model's."""
    for name in ("one", "two"):
        byte_tokenizer().save_pretrained(tmp_path / name)
        (tmp_path / name / "config.json").write_text("{}")
        rows_of(cache, tokenizer=load_tokenizer(tmp_path / name))
    assert calls(cache) == 3


@pytest.mark.parametrize(
    "damage", ["cut off", "a token", "the report", "empty", "other file", "folder"]
)
def test_a_damaged_entry_is_made_anew(cache, damage, capsys):
    want = list(rows_of(cache))
    path = entry(cache)
    whole = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        at = -200 if damage == "a token" else whole.index(b"are empty")
        flipped = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 or len(whole) :]
        path.write_bytes(
            {"cut off": whole[:-100], "empty": b"", "other file": b"x" * 5000}.get(damage, flipped)
        )
    capsys.readouterr()
    again = rows_of(cache)
    assert list(again) == want and again.dropped["are empty"]["rows"] == 60 and calls(cache) == 6
    assert f"{path} is damaged: its rows are tokenised again\n" in capsys.readouterr().err
    if damage != "folder":
        assert list(rows_of(cache)) == want and calls(cache) == 6


def test_rows_that_are_all_dropped_are_remembered_too(cache):
    for _ in range(2):
        with pytest.raises(
            SystemExit,
            match="no rows to train on; 2 were dropped: 2 are empty .the first: row 1, nothing",
        ):
            rows_of(cache, [[], []]).at_least(1)
    assert calls(cache) == 1


def test_without_a_place_for_the_cache_the_run_goes_on(tmp_path, monkeypatch, capsys):
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("CLEANDLLM_CACHE", str(tmp_path / "cache"))
    rows = token_rows(ROWS, byte_tokenizer(), lambda rows, tokenizer: [([1],) for _ in rows], 1, {})
    assert len(rows) == 3000 and rows.tokens.sum() == 3000
    assert f"tokenised rows are not kept in {tmp_path}/cache (" in capsys.readouterr().err


def test_a_full_disk_costs_the_cache_not_the_run(cache, monkeypatch, capsys):
    def fail(tensors, path, about):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokens.safetensors.torch, "save_file", fail)
    assert len(rows_of(cache)) == 2940 and "No space left on device" in capsys.readouterr().err
    assert [path.name for path in cache.iterdir()] == ["calls"]


def test_an_entry_appears_whole(cache, monkeypatch):
    replace, seen = os.replace, []

    def watch(old, new):
        seen.append((new.exists(), len(tokens._load(old, 2))))
        replace(old, new)

    monkeypatch.setattr(os, "replace", watch)
    rows_of(cache)
    assert seen == [(False, 2940)] and entry(cache).stat().st_mode & 0o044 == 0o044 & ~umask()


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_the_place_of_the_cache(monkeypatch):
    monkeypatch.delenv("CLEANDLLM_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory() == Path.home() / ".cache/cleandllm"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_directory() == Path("/x/cleandllm")
    monkeypatch.setenv("CLEANDLLM_CACHE", "~/y")
    assert cache_directory() == Path.home() / "y"
    monkeypatch.setenv("CLEANDLLM_CACHE", "~nobody-of-that-name/y")
    with pytest.raises(SystemExit, match="set CLEANDLLM_CACHE, or --no-token-cache"):
        cache_directory()


def rank_reads(rank, world_size, cache):
    rows = rows_of(Path(cache))
    assert len(rows) == 2940 and rows[0] == ([1], [1, 2, 2])


def test_several_ranks_tokenise_once(cache, run_ranks):
    run_ranks(3, rank_reads, str(cache))
    assert calls(cache) == 3 and not list(cache.glob("*.lock")) and not list(cache.glob(".*"))


def first_rank_reads(rank, world_size, cache):
    def make():
        assert rank == 0, "rank 1 needs no rows"
        return iter(ROWS)

    assert rows_of(Path(cache), Rows(make))[0] == ([1], [1, 2, 2])


def test_of_a_cached_data_set_one_rank_reads_the_rows(cache, run_ranks):
    rows_of(cache)
    run_ranks(2, first_rank_reads, str(cache))
    assert calls(cache) == 3


def first_rank_refuses(rank, world_size, cache):
    def make():
        yield ROWS[0]
        raise SystemExit(f"rows.jsonl line 2: not JSON, on rank {rank}")

    with pytest.raises(SystemExit, match="line 2: not JSON, on rank 0"):
        rows_of(Path(cache), Rows(make))


def test_all_ranks_end_where_the_first_finds_a_damaged_row(cache, run_ranks):
    run_ranks(2, first_rank_refuses, str(cache))


def slow(rows, tokenizer):
    with open(cache_directory() / "calls", "a") as file:
        file.write(f"{os.getpid()}\n")
    while (cache_directory() / "wait").exists():
        time.sleep(0.01)
    return [([row],) for row in rows]


def read_slowly(output):
    torch.set_num_threads(1)
    rows = token_rows(list(range(500)), byte_tokenizer(), slow, 1, {})
    output.write_text(f"{len(rows)} {rows.tokens.sum()}")


def test_runs_at_once_wait_for_one_and_a_killed_one_blocks_nobody(cache, tmp_path):
    """The first run is killed while it tokenises, two others wait for the lock: one takes over, the other reads its entry."""
    (cache / "wait").touch()
    runs = [
        torch.multiprocessing.get_context("fork").Process(
            target=read_slowly, args=(tmp_path / str(i),)
        )
        for i in range(3)
    ]

    def wait_until(condition):
        while not condition():
            assert all(run.is_alive() for run in runs if run.pid and run is not runs[0])
            time.sleep(0.01)

    try:
        runs[0].start()
        wait_until(lambda: calls(cache) == 1)
        (lock,) = cache.glob("*.lock")
        (cache / f".{lock.stem}.1.tmp").write_bytes(b"left by a run that was killed while it wrote")
        for run in runs[1:]:
            run.start()
        wait_until(lambda: all(str(lock) in files_of(run) for run in runs[1:]))
        assert calls(cache) == 1  # they wait
        runs[0].kill()
        wait_until(lambda: calls(cache) == 2)
        (cache / "wait").unlink()
        for run in runs:
            run.join()
    finally:
        for run in filter(lambda run: run.pid, runs):
            run.kill()
    assert [(tmp_path / str(i)).exists() for i in range(3)] == [False, True, True]
    assert (tmp_path / "1").read_text() == (tmp_path / "2").read_text() == f"500 {sum(range(500))}"
    assert calls(cache) == 2 and sorted(path.suffix for path in cache.iterdir()) == [
        "",
        ".safetensors",
    ]


def files_of(run):
    """Files that a process has open; they may close while one looks."""
    found = []
    for path in Path(f"/proc/{run.pid}/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(path))
    return found


def test_ids_of_supervised_rows_come_from_the_cache(cache):
    """encode itself: --max-length and the model's ids are part of the key."""
    rows = [
        {"prompt": [{"role": "user", "content": "a"}], "response": "b" * n} for n in range(1, 9)
    ]
    model = SimpleNamespace(eos_token_ids=[256], mask_token_id=257)
    for max_length, kept in ((20, 8), (8, 4), (20, 8)):
        assert len(encode(rows, byte_tokenizer(), model, max_length)) == kept
    assert len(list(cache.glob("*.safetensors"))) == 2
    encode(rows, byte_tokenizer(), SimpleNamespace(eos_token_ids=[258], mask_token_id=257), 20)
    assert len(list(cache.glob("*.safetensors"))) == 3


@pytest.mark.parametrize(
    "terminal, rank, shown", [(True, 0, True), (False, 0, False), (True, 1, False)]
)
def test_a_bar_is_drawn_on_a_terminal_by_one_rank(cache, monkeypatch, terminal, rank, shown):
    screen = io.StringIO()
    screen.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    assert len(rows_of(cache, use_cache=False)) == 2940
    assert (
        ("tokenising:" in screen.getvalue()) == shown == bool(screen.getvalue())
    )  # too quick for more than its start


def test_rows_without_parts_are_empty():
    rows = TokenRows(torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int64), 2, {})
    assert list(rows) == [] and rows.lengths.shape == (0, 2)
    assert rows.report("training rows") == "0 training rows, 0 tokens; none dropped"
