"""evals/run.py and the command line of a benchmark: what a result says, that ranks, batches and
interruptions do not change it, and what is refused.
"""

import json
import math
import re
import statistics
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch.distributed as dist
from golden_runs import rows_of
from test_evals import one_line, row_of, write

from distributed import disk
from evals import countdown, decoding, results, run, samples, sandbox, standard_error
from models.config import architecture
from rollout import make_engine
from rollout.engine import Engine

AIME = [{"problem": f"Is it {i}?", "answer": str(i)} for i in range(4)]
TINY = "tiny-sdar tiny-llada tiny-llada-moe tiny-dream tiny-llada2".split()


@pytest.fixture
def cli(monkeypatch, capsys):
    """cli(*flags, task=""): the command line of evals/run.py or of a task, in this process. -> the
    JSON object of its last line
    """
    monkeypatch.setattr(run, "hold", lambda out: None)  # until the end of a process

    def command(*flags, task="countdown"):
        monkeypatch.setattr(sys, "argv", [f"evals/{task or 'run'}.py", *map(str, flags)])
        run.main(task)
        last = capsys.readouterr().out.splitlines()[-1]
        return json.loads(last) if last.startswith("{") else last

    yield command
    if dist.is_initialized():
        dist.destroy_process_group()


def timeless(directory, name="samples"):
    """Samples without what rounding or the machine changes."""
    lost = ("seconds", "logps")
    return [{k: v for k, v in row.items() if k not in lost} for row in rows_of(directory, name)]


def completions(path, texts):
    return write(path, [{"index": i, "completion": text} for i, text in enumerate(texts)])


@pytest.fixture
def calls(monkeypatch):
    """(sample, indices) of the calls of an engine; after "stop" one beyond example 5 fails"""
    calls = []

    def generated(*arguments):
        calls.append(arguments[-2:])
        if "stop" in calls and arguments[-1][0] > 5:
            raise InterruptedError
        return samples.generated(*arguments)

    monkeypatch.setattr(run, "generated", generated)
    return calls


# --- files of completions -------------------------------------------------------------------------


def test_completions_are_scored_end_to_end(tmp_path, cli):
    """Also the rows of an earlier result, with a reward."""
    assert standard_error(countdown, countdown.load("test", limit=512), [1.0] * 512) == (0, 113)
    out, problems = tmp_path / "out", countdown.load("test", limit=8)
    texts = [countdown.answer(example) for example in problems[:6]] + ["", ""]
    result = cli("--completions", completions(tmp_path / "c.jsonl", texts), "--out", out)
    assert result == json.loads((out / "result.json").read_text())
    want = {"task": "countdown", "n": 8, "accuracy": 0.75, "stderr": math.sqrt(0.75 * 0.25 / 8)}
    assert result.items() >= (want | {"answered": 0.75, "failed": 0, "unused": 0}).items()
    assert [row["score"] for row in rows_of(out, "samples")] == [1.0] * 6 + [0.0] * 2
    reward = "--reward", "countdown_d1", "--out", tmp_path / "again"
    again = cli("--completions", out / "samples.jsonl", *reward)
    assert again["accuracy"] == 0.75 and again["reward"]["mean"] == pytest.approx(0.75)


def test_lines_that_cannot_be_used(tmp_path):
    """Those of other problems are counted; without a completion or twice they are refused."""
    places = (0, 0), (1, 0), (0, 2), (0, 3), (2, 0)
    lines = [{"sample": sample, "index": i, "completion": "1"} for sample, i in places]
    given = lambda lines: samples.given(write(tmp_path / "c.jsonl", lines), 2, 3)
    rows, counts = given(lines)
    assert (*rows,) == places[:3] and counts == {"unused": 2, "missing": 3}
    odd = {"completion": None}, {"index": 0.0}, {"index": [0]}, {"sample": None}
    for bad in lines[:1] * 2, *([lines[0] | one] for one in odd), [{"completion": "1"}], lines[3:]:
        assert "c.jsonl" in one_line(given, bad)


def test_samples_and_subjects(tmp_path, cli):
    """The error is that of the problems' means: answers to one problem are not independent.
    Subjects count alike: 1 of 1 and 1 of 3 is 2/3; of all rows it is 2 of 4.
    """
    rights = {(0, 0), (0, 1), (1, 0)}
    rows = [
        {"index": i, "sample": sample, "completion": f"\\boxed{{{i}{'' if right else 99}}}"}
        for i in range(3)
        for sample in range(2)
        for right in [(sample, i) in rights]
    ]
    flags = "--data", write(tmp_path / "rows.jsonl", AIME), "--limit", 3, "--samples", 2
    given = write(tmp_path / "given.jsonl", rows)
    result = cli(*flags, "--completions", given, "--out", tmp_path / "aime", task="aime24")
    assert (result["n"], result["accuracies"]) == (3, [pytest.approx(2 / 3), pytest.approx(1 / 3)])
    assert result["stderr"] == pytest.approx(statistics.pstdev([1, 0.5, 0]) / 3**0.5)
    wants = {
        "pass@1": [1, 0.5, 0],
        "pass@2": [1, 1, 0],
        "majority": [1, 1, 0],
    }  # of a tie the first
    for name, values in wants.items():
        want = [statistics.mean(values), statistics.pstdev(values) / 3**0.5]
        assert [result[name], result[f"{name}_stderr"]] == pytest.approx(want)

    row = {"question": "?", "choices": ["yes", "no"], "answer": 0}
    path = write(tmp_path / "rows.jsonl", [row | {"subject": subject} for subject in "abbb"])
    given = completions(tmp_path / "c.jsonl", ["ANSWER: A", "ANSWER: B", "(A)", "so?\nso."])
    flags = "--data", f"{path}@cot", "--out", tmp_path / "out"
    result = cli("--completions", given, *flags, task="mmlu")
    assert (result["accuracy"], result["answered"]) == (0.5, 0.75)
    assert result["macro_accuracy"] == pytest.approx(2 / 3)


def test_best_of_k_by_all_subsets():
    """Of partial scores too."""
    for scores in *([1.0] * c + [0.0] * (5 - c) for c in range(6)), [0.3, 0.9, 0.5, 0.1, 0.9]:
        for k in range(1, 6):
            want = statistics.mean(map(max, combinations(scores, k)))
            assert results.best_of(scores, k) == pytest.approx(want)


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


def test_neither_batches_nor_calls_change_completions(tmp_path, monkeypatch, cli, calls):
    flags = "--model tiny-sdar --limit 10 --temperature 0.5 --rollout-backend block".split()
    results = []
    for size in (4, 64):
        result = cli(*flags, "--seed", 5, "--batch-size", size, "--out", tmp_path / f"{size}")
        results.append({key: result[key] for key in result if key != "tokens_per_s"})
    rows = timeless(tmp_path / "4")
    assert results[0] == results[1] and rows == timeless(tmp_path / "64")
    # of the style of the examples, of the flags, of the model
    want = {"gen_length": 12, "denoising_steps": 2, "temperature": 0.5, "block_length": 4}
    assert result["settings"].items() >= want.items() and result["settings"]["weights"]
    tokens, forwards = (sum(row[key] for row in rows) for key in ("tokens", "forwards"))
    assert result["tokens_per_forward"] == pytest.approx(tokens / forwards)
    for row, example in zip(rows, countdown.load("test", limit=10), strict=True):
        assert row["score"] == countdown.score(row["completion"], example)
    monkeypatch.setattr(Engine, "refills", True)
    many = "--seed", 4, "--samples", 2, "--batch-size", 2, "--out", tmp_path / "many"
    cli(*flags, *many)
    sizes = [(sample, len(indices)) for sample, indices in calls]
    assert sizes == [(0, 4), (0, 4), (0, 2), (0, 10), (0, 8), (0, 2), (1, 8), (1, 2)]
    texts = [row["completion"] for row in timeless(tmp_path / "many")]
    assert texts[10:] == [row["completion"] for row in rows] != texts[:10]


def on_ranks(rank, world_size, flags, out):
    sys.argv = ["evals/run.py", *flags, "--batch-size", str(world_size), "--out", str(out)]
    if rank:
        run.main()
    else:
        with pytest.raises(SystemExit, match="not evaluated: aime24"):
            run.main()


def test_many_benchmarks_on_two_ranks_are_those_of_one(tmp_path, run_ranks):
    """The data of one task are missing; batches differ."""
    aime, words = tmp_path / "a.jsonl", tmp_path / "w.jsonl"
    write(aime, AIME), write(words, [row_of("gsm8k")] * 6)
    flags = "--model tiny-sdar --tasks countdown,gsm8k,aime24,aime25 --limit 3 --samples 2 "
    flags += f"--gen-length 16 --temperature 1 --data gsm8k={words} aime24=no.jsonl aime25={aime}"
    one, two = tmp_path / "1", tmp_path / "2"
    for ranks, out in enumerate((one, two), start=1):
        run_ranks(ranks, on_ranks, flags.split(), out)
        assert not list(out.glob("*/samples-*"))
    table = (one / "table.md").read_text()
    assert "\naime24: not evaluated: no.jsonl: no such" in table
    for name in "countdown", "gsm8k", "aime25":
        rows = timeless(one / name)
        assert f"\n{name}|3|2|" in table
        assert len(rows) == 6 and rows == timeless(two / name)
        first, second = (json.loads((out / name / "result.json").read_text()) for out in (one, two))
        assert first["settings"] == second["settings"] and (two / name / "report.html").exists()


def test_an_interrupted_run_continues(tmp_path, cli, calls):
    """Samples that are finished stay, of other ranks too; half a row does not, and a call that was
    written in part is made again; other settings and weights are refused.
    """
    flags = "--model tiny-sdar --limit 10 --batch-size 2 --seed 5 --out".split()
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    result, rows = cli(*flags, whole), timeless(whole)
    calls.append("stop")
    with pytest.raises(InterruptedError):
        cli(*flags, cut)
    assert timeless(cut, "samples-0") == rows[:6], "what was generated is scored and kept"
    assert "exists: name another one" in one_line(cli, *flags, cut)
    with open(cut / "samples-0.jsonl", "a") as file:
        file.write(f"{json.dumps(rows[6])}\n{json.dumps(rows[7])[:-20]}")
    others = (whole / "samples.jsonl").read_text().splitlines(keepends=True)
    (cut / "samples-1.jsonl").write_text("".join(others[8:]))
    calls.clear()
    for flag, words in CHANGED.items():
        assert words in one_line(cli, "--resume", cut, *flag.split())
    begun = (cut / "result.json").read_text()
    resumed = cli("--resume", cut)
    assert calls == [(0, range(6, 8))] and not list(cut.glob("samples-*"))
    assert timeless(cut) == rows and resumed["accuracy"] == result["accuracy"]
    (cut / "result.json").write_text(begun.replace('"weights": [', '"weights": [1.0, '))
    assert "was begun with weights [1.0, " in one_line(cli, "--resume", cut)


CHANGED = {
    "--temperature 0.5": "was begun with temperature 0.0, now 0.5; take the old value",
    "--seed 1": "seed 5, now 1",
    "--limit 5": "limit 10, now 5",
    "--data cd3": "data '', now 'cd3'",
}


REFUSED = {  # by model and sampler; others: test_refusals.py
    "--model nothing": "unknown model 'nothing'",
    "--model tiny-sdar --gen-length 10": "no multiple of the block",
    "--model tiny-sdar --samples 2": "--samples 2 would be equal: add --temp",
    "--model tiny-sdar --factor 2": "--factor 2.0 needs --remasking low_con",
}


def test_directories(tmp_path, monkeypatch, cli):
    """A new directory for each; what is refused leaves none; one evaluation at a time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run.time, "strftime", lambda form: "20260102-030405")
    path = completions(tmp_path / "c.jsonl", ["12"])
    for _ in range(2):
        cli("--completions", path, "--limit", 1)
    for flags, words in REFUSED.items():
        assert words in one_line(cli, *flags.split())
    names = sorted(file.name for file in Path("runs").iterdir())
    assert names == [f"eval-countdown-c.jsonl-20260102-030405{number}" for number in ("", "-2")]
    Path("m").mkdir()
    monkeypatch.setattr(sys, "argv", ["evals/run.py", "--model", "m"])
    assert run.Args.parse("countdown").model == f"{tmp_path}/m"  # for --resume from elsewhere
    disk.hold(f"runs/{names[0]}")
    monkeypatch.setattr(run, "hold", disk.hold)
    assert "another process works there" in one_line(cli, "--resume", f"runs/{names[0]}")


# --- settings of published numbers ----------------------------------------------------------------


KEYS = "gen_length block_length denoising_steps cache temperature samples remasking eos_policy"
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
sdar-8b sdar gsm8k                  4096 None None none 0.0 1 low_confidence_static none
sdar-8b sdar countdown compact      12 None 2 none 0.0 1 low_confidence_static none
m lladamoe aime24                   2048 64 2 none 1.0 8 low_confidence_static none
m a2d-masked humaneval              256 256 256 none 0.0 1 low_confidence_static none
m llada2_moe gpqa                   128 None 32 none 0.0 1 low_confidence_dynamic none
"""


def test_settings_of_published_numbers():
    """The lengths, blocks, steps and rules of docs/evals.md."""
    for line in PUBLISHED.strip().splitlines():
        names, values = re.split(" {2,}", line)
        found = decoding.settings(*names.split())
        assert [str(found[key]) for key in KEYS.split()] == values.split(), line


@pytest.mark.parametrize("model", TINY)
def test_every_setting_is_one_that_its_engine_accepts(model):
    engine = make_engine(model)
    model_type = architecture(engine.model.checkpoint_config)
    own_blocks = engine.model.attention == "block-causal"
    for name in [model_type, *(["llada-1.5", "llada-8b-base"] if model_type == "llada" else [])]:
        for task in decoding.SETTINGS[name]:
            sampling = decoding.settings(name, model_type, task)
            assert sampling.pop("samples") and own_blocks == (sampling["block_length"] is None)
            sampling["denoising_steps"] = sampling["denoising_steps"] or engine.model.block_length
            engine.validate(**sampling)
