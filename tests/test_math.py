"""The processes of the math grader: killed, replaced, without secrets; and LiveCodeBench's packed
tests."""

import base64
import json
import os
import pickle
import time
import zlib
from pathlib import Path

import huggingface_hub
import pytest
from test_evals import grade, of, one_line, row_of, write

from evals import livecodebench, math_grader, programs, sandbox
from evals.math_grader import math_verify

ENDLESS = r"2^{2^{2^{100}}}"


@pytest.fixture
def started(monkeypatch):
    """The processes of the graders, new ones; an answer has two seconds of computing."""
    processes, start = [], math_grader.start
    monkeypatch.setattr(
        math_grader, "start", lambda kind: processes.append(start(kind)) or processes[-1]
    )
    monkeypatch.setattr(math_grader, "TIMEOUT", 2.0)
    math_grader.IDLE.clear()
    math_grader._verdict.cache_clear()
    yield processes
    math_grader._verdict.cache_clear()


def test_shortcuts_say_what_math_verify_says():
    """Equal strings and numbers are not sent to the processes; only the base of 52_8 is beyond
    Math-Verify."""
    for text, gold, verdict in of("grader")[1]["verdicts"]:
        answer = math_grader.last_box(text)
        if answer and gold != "52_8" and "9" not in gold:
            assert math_grader.ask("math", answer, gold, 0.0) == verdict, (answer, gold)
    near = [math_verify("3.1", r"\pi", error) for error in (0.0, 0.01, 0.05)]
    assert near == [False, False, True]
    assert [math_verify("3", "4", error) for error in (0.0, 0.5, 1.0)] == [False, False, True]
    assert not math_verify("x", r"\pi", 100.0)


def test_an_endless_answer_is_killed_and_the_next_is_judged(started, capsys):
    for _ in range(2):
        assert grade(rf"\boxed{{{ENDLESS}}}", "5") is False
        assert len(started) == 1, "an answer that killed a process is not asked again"
    assert started[0].returncode and f"as wrong: '{ENDLESS}'" in capsys.readouterr().err
    assert grade(r"\boxed{x+x}", "2x") and grade(r"\boxed{y+y}", "2y") and len(started) == 2


def test_model_text_is_not_run_and_no_secret_is_there(tmp_path, started, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    for code in (
        f"__import__('os').system('touch {tmp_path}/x')",
        f"open('{tmp_path}/x','w')",
        "exit()",
    ):
        assert grade(rf"\boxed{{{code}}}", "5") is False
    assert not list(tmp_path.iterdir())
    assert b"secret" not in Path(f"/proc/{started[0].pid}/environ").read_bytes()


def test_a_fork_does_not_use_the_processes_of_its_parent(started):
    assert math_grader.ask("math", "y+y", "2y", 0.0)
    if not (child := os.fork()):
        before = len(started)
        os._exit(math_grader.ask("math", "x+x", "2x", 0.0) is not True or len(started) == before)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_programs_are_read_in_a_process_that_is_killed(monkeypatch):
    """As long as it takes, within a limit; what then has no answer is no program."""
    first = programs.first_program
    assert first(["x x", "x = 1", "y"]) == "x = 1"
    assert first(["(", "\ud800", "\0", "-" * 10**5 + "1"]) is first([]) is None
    monkeypatch.setattr(math_grader, "TIMEOUT", 0.01)
    chain = "f" + "()" * 200_000
    began = time.process_time()
    assert programs.trimmed(chain + "\na b" * 60) == chain + "\na b" * 60
    assert time.process_time() - began < 0.5
    monkeypatch.setattr(math_grader, "TIMEOUT", 60.0)
    assert first(["x = 1"]) == "x = 1", "the next process answers"


# --------------------------------------------------------------------------------------------------
# LiveCodeBench


def packed(value, protocol=None):
    """As the hub packs private tests: JSON text in a pickle, in zlib, in base64."""
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


def cases(*pairs):
    return json.dumps([{"input": a, "output": b, "testtype": "stdin"} for a, b in pairs])


def examples(tmp_path, *private, **changed):
    rows = [row_of("livecodebench", private_test_cases=text, **changed) for text in private]
    return livecodebench.load("test", write(tmp_path / "rows.jsonl", rows))


class Attack:
    def __reduce__(self):
        return os.system, ("touch attacked",)


def test_private_tests(tmp_path, monkeypatch):
    """Pickles of every protocol are read without running anything."""
    monkeypatch.chdir(tmp_path)
    text = "[]é\n" * 100
    protocols = range(pickle.HIGHEST_PROTOCOL + 1)
    assert {livecodebench.unpacked(packed(text, n)) for n in protocols} == {text}
    # private tests of Codeforces 1873_A as livecodebench/code_generation_lite stores them
    real = (
        "eJxrYJmaz8gABhEZQEZ0tVJmXkFpiZKVgpJhTF5iUnJMnpKOglJ+aQlUNNI1GCJUklpcUlJZkAoSLC5JycxTqtVR"
        "QNJuDNWOILAYhCCIMdI0Ji85MQloWjKQSE5KjMlLSgSam5SciG64nz+y2WACJESMJWYY7ibFG8T5KnaKHgAcinnp"
    )
    found = livecodebench.tests_of({"public": [], "private": real})
    assert found[0] == ["1\nabc\n", "YES\n"] and len(found) == 4
    read = examples(tmp_path, packed(cases(("5 6", "11"))), packed(Attack()))
    assert livecodebench.score("print(sum(map(int, input().split())))", read[0]) == 1.0
    assert livecodebench.score("print(3)", read[0]) == 0.0
    with pytest.raises(ValueError, match="too many values"):
        livecodebench.score("print(1)", read[1])
    assert not Path("attacked").exists()


def test_releases_and_dates(tmp_path, monkeypatch):
    """A release has the files of those before it; @FIRST..LAST keeps days, both included."""

    def download(repository, name, repo_type):
        number = name.removeprefix("test").removesuffix(".jsonl") or "1"
        days = [f"202{number}-0{month}-01T00:00:00" for month in (1, 2)]
        new = lambda day: row_of("livecodebench", question_content=number, contest_date=day)
        return write(tmp_path / name, map(new, days))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    load = lambda path, limit=None: livecodebench.load("test", path, limit)
    for path, want in {
        "release_v2": "1122", "v3": "33", "": "112233445566", livecodebench.HUB: "112233445566",
        "release_v6@2022-01-02..2024-01-01": "2334", "release_v6@..2021-02-01": "11",
        "@2021-01-01..2021-01-01": "1", f"{tmp_path}/test3.jsonl@2023-01-01..2023-01-31": "3",
    }.items():  # fmt: skip
        assert "".join(example["question"] for example in load(path)) == want, path
    assert len(load("release_v6@2023-01-01..", 3)) == 3
    for wrong in ("release_v7", "release_v6@2023..2024"):
        assert "; presets: " in one_line(load, wrong)
    path = write(tmp_path / "rows.jsonl", [row_of("livecodebench"), {}])
    assert "row 2: cannot read a problem" in one_line(load, path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda: None)  # any error of the hub
    assert "--data FILE.jsonl reads a copy" in one_line(load, "v5")


def test_each_test_has_its_own_time_and_output_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(livecodebench, "TIMEOUT", 1)
    [example] = examples(tmp_path, "[]")
    result = sandbox.run(livecodebench.job("while True: pass", example))
    assert not result.passed and "within 1 seconds" in result.detail
    monkeypatch.setattr(livecodebench, "TIMEOUT", 60)
    numbers = "1 2\n" * 50_000
    [example] = examples(tmp_path, cases((numbers, numbers)), public_test_cases=cases(("", "")))
    program = "import sys\nfor line in sys.stdin: print(line, end='')"
    assert sandbox.run(livecodebench.job(program, example)).passed
    result = sandbox.run(livecodebench.job(program + "\nprint('x' * (9 << 20))", example))
    assert "more than 8 MiB" in result.detail
