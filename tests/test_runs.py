"""evals/run.py and the command line of a benchmark: what a result says, that ranks, batches and
interruptions do not change it, and what is refused.
"""

import json
import math
import re
import statistics
import sys
from pathlib import Path

import pytest
from golden_runs import rows_of
from test_evals import one_line, row_of, write

from evals import countdown, decoding, run, samples, sandbox
from rollout import make_engine

AIME = [{"problem": f"Is it {i}?", "answer": str(i)} for i in range(4)]
TINY = "tiny-sdar tiny-llada tiny-llada-moe tiny-dream tiny-llada2".split()


@pytest.fixture
def cli(monkeypatch, capsys):
    """cli(*flags, task=""): the command line of evals/run.py or of a task, in this process. -> the
    JSON object of its last line
    """

    def command(*flags, task="countdown"):
        monkeypatch.setattr(sys, "argv", [f"evals/{task or 'run'}.py", *map(str, flags)])
        run.main(task)
        last = capsys.readouterr().out.splitlines()[-1]
        return json.loads(last) if last.startswith("{") else last

    return command


def timeless(directory):
    """Samples without what rounding or the machine changes."""
    lost = ("seconds", "logps")
    rows = rows_of(directory, "samples")
    return [{k: v for k, v in row.items() if k not in lost} for row in rows]


def completions(path, texts):
    return write(path, [{"index": i, "completion": text} for i, text in enumerate(texts)])


class Stopped(Exception):
    pass


class Recorder:
    """A sampler that keeps its calls, and stops before the sample `stop`."""

    calls, stop, refills = [], None, False

    def __init__(self, *args, **how):
        self.engine = make_engine(*args, **how)

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def generate(self, prompts, **settings):
        first = settings["sample_offset"]
        self.calls.append((len(prompts), first, settings["seed"]))
        if self.stop is not None and first >= self.stop:
            raise Stopped
        return self.engine.generate(prompts, **settings)


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(run, "make_engine", Recorder)
    monkeypatch.setattr(Recorder, "calls", [])
    return lambda **values: [monkeypatch.setattr(Recorder, *pair) for pair in values.items()]


# --- files of completions -------------------------------------------------------------------------


def test_completions_are_scored_end_to_end(tmp_path, cli):
    """Also the rows of an earlier result, with a reward."""
    out, problems = tmp_path / "out", countdown.load("test", limit=8)
    texts = [countdown.answer(example) for example in problems[:6]] + ["", ""]
    result = cli("--completions", completions(tmp_path / "c.jsonl", texts), "--out", out)
    assert result == json.loads((out / "result.json").read_text())
    want = {"task": "countdown", "n": 8, "accuracy": 0.75, "stderr": math.sqrt(0.75 * 0.25 / 8)}
    want |= {"answered": 0.75, "truncated": None, "failed": 0, "unused": 0}
    assert list(result) == [*want, "missing", "settings"] and result.items() >= want.items()
    rows = rows_of(out, "samples")
    assert [row["score"] for row in rows] == [1.0] * 6 + [0.0] * 2
    reward = "--reward", "countdown_d1", "--out", tmp_path / "again"
    again = cli("--completions", out / "samples.jsonl", *reward)
    assert again["accuracy"] == 0.75 and again["reward"]["name"] == "countdown_d1"


GOOD = [json.dumps({"index": i, "completion": "12"}) for i in range(4)]
USABLE = "needs an index of 0 to 5, once for each repeat of 0 to 0, and a completion; check"
UNUSABLE = {
    '{"index": 0, "completion": "1"}': USABLE,
    '{"index": 6, "completion": "1"}': USABLE,
    '{"index": 4, "completion": "1", "prompt": [{"content": "?"}]}': "answer to another prompt",
    '{"index": true, "completion": "1"}': USABLE,
    '{"index": 5, "completion": "1"': "not JSON (Expecting ',' delimiter)",
    "null": "a JSON object is needed, not NoneType",
}


def test_lines_that_cannot_be_used_are_counted_and_named(tmp_path, capsys):
    path, problems = tmp_path / "c.jsonl", countdown.load("test", limit=6)
    for line, problem in UNUSABLE.items():
        path.write_text("\n".join([GOOD[0], "", line, *GOOD[1:]]))
        rows, counts = samples.given(countdown, problems, path)
        assert (len(rows), counts) == (4, {"unused": 1, "missing": 2}), line[:40]
        said = capsys.readouterr().err
        assert f"{path}: 1 rows not used: line 3: " in said and problem in said
        assert said.endswith("(repeat, index): (0, 4); (0, 5)\n")


def test_repeats_and_subjects(tmp_path, cli):
    """The error is that of the problems' means: answers to one problem are not independent.
    Subjects count alike: 1 of 1 and 1 of 3 is 2/3; of all rows it is 2 of 4.
    """
    table = [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 1]]
    rows = [
        {"index": i, "repeat": repeat, "completion": rf"\boxed{{{i if right else 999}}}"}
        for repeat, rights in enumerate(table)
        for i, right in enumerate(rights)
    ]
    flags = "--data", write(tmp_path / "rows.jsonl", AIME), "--repeats", 3, "--completions"
    given = write(tmp_path / "given.jsonl", rows[::-1])
    result = cli(*flags, given, "--out", tmp_path / "aime", task="aime24")
    assert (result["n"], result["repeats"], result["accuracies"]) == (4, 3, [0.5, 0.25, 0.75])
    means = [statistics.mean(column) for column in zip(*table, strict=True)]
    assert result["stderr"] == pytest.approx(statistics.pstdev(means) / 2)
    row = {"question": "?", "choices": ["yes", "no"], "answer": 0}
    path = write(tmp_path / "rows.jsonl", [row | {"subject": subject} for subject in "abbb"])
    given = completions(tmp_path / "c.jsonl", ["ANSWER: A", "ANSWER: B", "(A)", "so?\nso."])
    flags = "--data", f"{path}@cot", "--out", tmp_path / "out"
    result = cli("--completions", given, *flags, task="mmlu")
    assert (result["accuracy"], result["answered"]) == (0.5, 0.75)
    assert result["macro_accuracy"] == pytest.approx(2 / 3)


def test_scorers_that_give_no_verdict(tmp_path, monkeypatch, cli):
    """Such a completion scores 0 and is named; a sandbox that does not work stops everything."""

    def score_batch(completions, examples):
        if "kill" in completions:
            raise error
        return [float(text == "1") for text in completions]

    error = RecursionError("too deep")
    monkeypatch.setattr(countdown, "score_batch", score_batch, raising=False)
    texts = completions(tmp_path / "c.jsonl", ["1", "kill", "2"])
    result = cli("--completions", texts, "--out", tmp_path / "b")
    assert (result["accuracy"], result["failed"]) == (1 / 3, 1)
    why = [row.get("failed") for row in rows_of(tmp_path / "b", "samples")]
    assert why == [None, "RecursionError: too deep", None]
    error = sandbox.SandboxError("sandbox: no answer")
    assert one_line(cli, "--completions", texts, "--out", tmp_path / "c") == "sandbox: no answer"
    assert "n" not in json.loads((tmp_path / "c/result.json").read_text())


# --- models ---------------------------------------------------------------------------------------


def test_neither_batches_nor_calls_change_completions(tmp_path, cli, recorder):
    flags = "--model tiny-sdar --limit 10 --seed 5 --temperature 0.5 --rollout-backend block"
    results = []
    for size in (4, 64):
        result = cli(*flags.split(), "--batch-size", size, "--out", tmp_path / f"{size}")
        assert result.pop("tokens_per_s") and result["settings"].pop("batch_size") == size
        results.append(result)
    result, how = results[0], results[0]["settings"]
    rows = timeless(tmp_path / "4")
    assert result == results[1] and rows == timeless(tmp_path / "64")
    assert Recorder.calls == [(4, 0, 5), (4, 4, 5), (2, 8, 5), (10, 0, 5)]
    # of the style of the examples, of the flags, of the model
    want = {"gen_length": 12, "denoising_steps": 2, "temperature": 0.5, "block_length": 4}
    assert how.items() >= want.items() and how["seed"] == 5 and how["weights"]
    tokens, forwards = (sum(row[key] for row in rows) for key in ("tokens", "forwards"))
    assert result["tokens_per_forward"] == tokens / forwards
    for row, example in zip(rows, countdown.load("test", limit=10), strict=True):
        assert row["score"] == countdown.score(row["completion"], example)
    recorder(refills=True)
    flags = flags.replace("10", "19").split()
    cli(*flags, "--batch-size", 4, "--repeats", 2, "--out", tmp_path / "refills")
    assert Recorder.calls[4:] == [(16, 0, 5), (3, 16, 5), (16, 0, 6), (3, 16, 6)]


def on_ranks(rank, world_size, flags, out):
    sys.argv = ["evals/run.py", *flags, "--batch-size", str(world_size), "--out", str(out)]
    with pytest.raises(SystemExit, match="1 of 4 tasks not evaluated: aime24"):
        run.main()


def test_many_benchmarks_on_two_ranks_are_those_of_one(tmp_path, run_ranks):
    """The data of one task are missing; AIME is repeated; batches differ."""
    aime, words = tmp_path / "a.jsonl", tmp_path / "w.jsonl"
    write(aime, AIME), write(words, [row_of("gsm8k")] * 6)
    flags = "--model tiny-sdar --tasks countdown,gsm8k,aime24,aime25 --limit 3 --repeats 2 "
    flags += f"--gen-length 16 --temperature 1 --data gsm8k={words} aime24=no.jsonl aime25={aime}"
    one, two = tmp_path / "1", tmp_path / "2"
    for ranks, out in enumerate((one, two), start=1):
        run_ranks(ranks, on_ranks, flags.split(), out)
        assert not list(out.glob("*/samples-*"))
    table = (one / "table.md").read_text()
    assert len({len(row) for row in table.splitlines()[:5]}) == 1 and "| 3 | 2 " in table
    assert "\naime24: not evaluated: --data no.jsonl: no such" in table
    for name, repeats in {"countdown": 1, "gsm8k": 1, "aime25": 2}.items():
        rows = timeless(one / name)
        assert len(rows) == 3 * repeats and rows == timeless(two / name)
        first, second = (json.loads((out / name / "result.json").read_text()) for out in (one, two))
        assert first["accuracy"] == second["accuracy"] and first["n"] == 3
        assert (first["settings"]["ranks"], second["settings"]["ranks"]) == (1, 2)


def test_an_interrupted_run_continues(tmp_path, monkeypatch, cli, recorder):
    """Samples that are finished stay, of other ranks too; half a row does not; other settings are
    refused.
    """
    flags = "--model tiny-sdar --limit 10 --batch-size 3 --seed 5 --out".split()
    cut = tmp_path / "cut"
    whole = cli(*flags, tmp_path / "whole")
    rows, path = timeless(tmp_path / "whole"), cut / "samples.jsonl"
    recorder(stop=6)
    with pytest.raises(Stopped):
        cli(*flags, cut)
    assert timeless(cut) == rows[:6], "what was generated is scored and kept"
    assert "is not empty" in one_line(cli, *flags, cut)
    with open(path, "a") as file:
        file.write(json.dumps(rows[6])[:-20])
    other = rows_of(tmp_path / "whole", "samples")[8]
    (cut / "samples-1.jsonl").write_text(json.dumps(other) + "\n")
    recorder(stop=None, calls=[])
    for flag, words in CHANGED.items():
        assert words in one_line(cli, "--resume", cut, *flag.split())
    assert Recorder.calls == []
    resumed = cli("--resume", cut, "--batch-size", 2)
    assert Recorder.calls == [(2, 6, 5), (1, 9, 5)] and not list(cut.glob("samples-*"))
    assert timeless(cut) == rows and resumed["accuracy"] == whole["accuracy"]
    with monkeypatch.context() as patch:
        patch.setattr(run, "hash_of_evals", lambda task: "other")
        assert "evals_hash" in one_line(cli, "--resume", cut)


CHANGED = {
    "--temperature 0.5": "was begun with temperature 0.0, now 0.5; take the old value",
    "--model tiny-llada": "model 'tiny-sdar', now 'tiny-llada', weights",
    "--seed 1": "seed 5, now 1",
    "--limit 5": "limit 10, now 5",
    "--data cd3": "prompts_hash",
    "--reward countdown_d1": "reward '', now 'countdown_d1'",
}


def test_directories(tmp_path, monkeypatch, cli, recorder):
    """A new one for each evaluation; a wrong --model leaves none. Results of tasks that are done
    stay in the table.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run.time, "strftime", lambda form: "20260102-030405")
    path = completions(tmp_path / "c.jsonl", ["12"])
    for _ in range(2):
        cli("--completions", path, "--limit", 1)
    names = [f"eval-countdown-c-20260102-030405{number}" for number in ("", "-2")]
    assert "File exists" in one_line(cli, "--completions", path, "--out", path)
    assert "nothing" in one_line(cli, "--model", "nothing")
    assert sorted(file.name for file in Path("runs").iterdir()) == names
    cli(*"--model tiny-sdar --tasks countdown,sudoku --limit 2 --out two".split(), task="")
    (tmp_path / "two/countdown/samples.jsonl").unlink()
    Recorder.calls.clear()
    cli("--resume", "two", task="")
    table = Path("two/table.md").read_text()
    assert len(Recorder.calls) == 1 and "| countdown |" in table and "| sudoku " in table


REFUSED = {  # flags of evals/run.py
    "--model m": "give --tasks, such as",
    "--model m --tasks countdown,nothing": "unknown task 'nothing': use one of aime24",
    "--model m --tasks countdown,sudoku --data cd3": "--data cd3: give TASK=SOURCE",
    "--model tiny-sdar --tasks qa,countdown --data qa=no.csv countdown=no.csv": "no.csv: no such",
    "--model tiny-sdar --tasks countdown,sudoku --gen-length 10": "no multiple of the block",
    "--tasks countdown": "either --model (generate and score) or --completions (only score)",
    "--tasks countdown --model m --completions c": "either --model",
    "--tasks countdown --model tiny-sdar --reward gsm8k_d1": "does not fit countdown",
    "--tasks countdown --model tiny-sdar --data cd9": "presets: small, cd3, cd4",
    "--tasks countdown --model tiny-sdar --data empty.jsonl": "empty.jsonl: no problems",
    "--tasks gsm8k --model tiny-sdar --reward gsm8k_d1 --data w.jsonl": "--data d1 asks for",
    "--tasks countdown --model m --repeats 0": "--repeats 0 must be",
    "--tasks countdown --completions none.jsonl": "none.jsonl: no such file",
    "--tasks countdown --model tiny-sdar --repeats 2": "all repeats are the same without random",
    "--tasks countdown --model tiny-llada --confidence-threshold 1.5": "--confidence-threshold 1.5",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_refusals(tmp_path, monkeypatch, cli, flags):
    monkeypatch.chdir(tmp_path)
    write(Path("empty.jsonl"), [])
    write(Path("w.jsonl"), [row_of("gsm8k")])
    assert REFUSED[flags] in one_line(lambda: cli(*flags.split(), task=""))
    assert not Path("runs").exists()


# --- settings of published numbers ----------------------------------------------------------------


KEYS = "gen_length block_length denoising_steps cache temperature repeats remasking eos_policy"
PUBLISHED = """
llada-8b llada mmlu                 3 3 3 dual 0.0 1 low_confidence_static none
dir llada gsm8k                     256 8 8 prefix 0.0 1 low_confidence_static none
llada-8b llada aime24               2048 64 64 dual 1.0 8 low_confidence_static none
llada-8b llada other                512 32 32 none 0.0 1 low_confidence_static none
llada-8b llada sudoku               256 32 16 none 0.0 1 low_confidence_static none
llada-1.5 llada gsm8k               256 16 16 none 0.0 1 low_confidence_static demote
llada-1.5 llada gpqa                256 16 16 none 0.0 1 low_confidence_static none
x/llada-8b-base llada humaneval     256 256 256 none 0.0 1 low_confidence_static none
dream-7b Dream mbpp                 512 512 512 none 0.2 1 entropy none
sdar-8b sdar gsm8k                  4096 None 4 none 0.0 1 low_confidence_static none
sdar-8b sdar countdown compact      12 None 2 none 0.0 1 low_confidence_static none
m lladamoe aime24                   2048 64 2 none 1.0 8 low_confidence_static none
m llada2_moe gpqa                   128 None 32 none 0.0 1 low_confidence_dynamic none
"""


def test_settings_of_published_numbers():
    """The lengths, blocks, steps and rules of docs/evals.md."""
    for line in PUBLISHED.strip().splitlines():
        names, values = re.split(" {2,}", line)
        found = decoding.settings(*names.split())
        assert [str(found[key]) for key in KEYS.split()] == values.split(), line
    dream = decoding.settings("dream-7b", "Dream", "mbpp")
    assert (dream["schedule"], dream["top_p"]) == ("timesteps", 0.95)
    assert "no settings of a 'new' model" in one_line(decoding.settings, "m", "new", "gsm8k")
