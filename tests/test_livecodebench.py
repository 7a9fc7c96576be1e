"""LiveCodeBench: rows in the hub's own form, private tests that are packed, releases and dates, prompts, verdicts."""

import base64
import json
import os
import pickle
import sys
import zlib
from pathlib import Path

import pytest
from test_evals import cli, one_line, write

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from evals import contests, load_task, sandbox
from evals import livecodebench as lcb


def packed(value):
    """As the hub packs private tests: a pickle, of the JSON text, in zlib in base64."""
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def cases(kind, *pairs):
    return json.dumps([{"input": given, "output": want, "testtype": kind} for given, want in pairs])


SUM = {  # columns and types of livecodebench/code_generation_lite
    "question_title": "Sum",
    "question_content": "Add two numbers.",
    "platform": "atcoder",
    "question_id": "abc301_a",
    "contest_id": "abc301",
    "contest_date": "2024-08-17T00:00:00",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": cases("stdin", ("1 2\n", "3\n")),
    "private_test_cases": packed(cases("stdin", ("5 6", "11"), ("0.5 1", "1.5\n"))),
    "metadata": "{}",
}
STARTER = (
    "class Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n        "
)
TWO_SUM = SUM | {
    "question_content": "Two of them.",
    "platform": "leetcode",
    "contest_date": "2025-01-04T19:30:00",
    "starter_code": STARTER,
    "public_test_cases": cases("functional", ("[2, 7, 11]\n9", "[0, 1]")),
    "private_test_cases": cases("functional", ("[3, 3]\n6", "[0, 1]"), ("[1, 5, 2]\n7", "[1, 2]")),
    "metadata": '{"func_name": "twoSum"}',
}
# private tests of 1873_A (Codeforces), as they stand in livecodebench/code_generation_lite
REAL = (
    "eJxrYJmaz8gABhEZQEZ0tVJmXkFpiZKVgpJhTF5iUnJMnpKOglJ+aQlUNNI1GCJUklpcUlJZkAoSLC5JycxTqtVRQNJuDNWOILAYhCCIMdI0Ji85MQlo"
    "WjKQSE5KjMlLSgSam5SciG64nz+y2WACJESMJWYY7ibFG8T5KnaKHgAcinnp"
)


def examples(tmp_path, *rows):
    return lcb.load("test", write(tmp_path / "rows.jsonl", list(rows)))


# ---------------------------------------------------------------------------------------------------------------------
# rows


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_rows_and_their_tests(tmp_path, suffix):
    path = write(tmp_path / f"rows.{suffix}", [SUM, TWO_SUM])
    one, two = lcb.load("test", path)
    assert (one["question"], one["starter"], one["name"]) == ("Add two numbers.", "", "")
    assert (two["starter"], two["name"]) == (STARTER, "twoSum")
    assert lcb.tests_of(one) == [["1 2\n", "3\n"], ["5 6", "11"], ["0.5 1", "1.5\n"]]
    assert lcb.tests_of(two) == [
        ["[2, 7, 11]\n9", "[0, 1]"],
        ["[3, 3]\n6", "[0, 1]"],
        ["[1, 5, 2]\n7", "[1, 2]"],
    ]
    # of the form of the hub's files only the place is kept: private tests are gigabytes
    assert isinstance(two["private"], tuple) == (suffix == "jsonl")
    assert lcb.load("train", path, limit=1) == [one] and lcb.tests_of(
        json.loads(json.dumps(two))
    ) == lcb.tests_of(two)


def test_private_tests_of_the_hub():
    found = lcb.tests_of({"public": [], "private": REAL, "source": "x"})
    assert found[0] == ["1\nabc\n", "YES\n"] and [len(given.split()) - 1 for given, _ in found] == [
        1,
        3,
        5,
        6,
    ]
    assert found == [
        [test["input"], test["output"]]
        for test in json.loads(pickle.loads(zlib.decompress(base64.b64decode(REAL))))
    ]


class Attack:
    def __reduce__(self):
        return os.system, ("touch attacked",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_every_protocol(protocol):
    text = base64.b64encode(zlib.compress(pickle.dumps("[]é\n" * 100, protocol))).decode()
    assert contests.unpacked(text) == "[]é\n" * 100


@pytest.mark.parametrize(
    ("private", "said"),
    [
        (packed(Attack()), "not of a text"),
        (packed(["[]", Attack()]), "not of a text"),
        (packed([]), "not of a text"),
        (packed(b"[]"), "not of a text"),
        (packed("no JSON"), "Expecting value"),
        (packed("[1]"), "no list of tests"),
        (packed('{"input": "x"}'), "no list of tests"),
        (packed('[{"input": "x"}]'), "without input and output"),
        ("[{]", "Expecting"),
        ("not base64", "base64"),
        ("", "cut off"),
        (base64.b64encode(b"no zlib").decode(), "Error"),
        (packed(cases("stdin", ("1", "2")))[:40], "cut off"),
        (base64.b64encode(zlib.compress(b"\x80\x04X\x05\0\0\0ab")).decode(), "expected"),
        (
            base64.b64encode(zlib.compress(pickle.dumps("x" * 2000))).decode(),
            "more than 1000 bytes",
        ),
    ],
)
def test_private_tests_that_are_something_else_name_their_row(tmp_path, monkeypatch, private, said):
    """And a pickle runs nothing, in whichever file it comes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(contests, "MAX_TESTS", 1000)
    (example,) = examples(tmp_path, SUM | {"private_test_cases": private})
    message = one_line(lambda: lcb.score("print(1)", example))
    assert (
        message.startswith(f"{tmp_path}/rows.jsonl row 1: private_test_cases cannot be read (")
        and said in message
    )
    assert not Path("attacked").exists()
    if said == "not of a text" and private == packed(Attack()):
        pickle.loads(zlib.decompress(base64.b64decode(private)))  # the attack is real
        assert Path("attacked").exists()


@pytest.mark.parametrize(
    "bad",
    [
        {"question_content": ""},
        {"question_content": 5},
        {"public_test_cases": "[]"},
        {"public_test_cases": "x"},
        {"public_test_cases": [1]},
        {"public_test_cases": cases("other", ("1", "2"))},
        {"private_test_cases": None},
        {"metadata": '{"func_name": "f"}'},  # but its tests give stdin
        {"metadata": "x"},
        {"contest_date": "yesterday"},
    ],
)
def test_bad_rows_are_named(tmp_path, bad):
    path = write(tmp_path / "rows.jsonl", [SUM, SUM | bad])
    message = one_line(lambda: lcb.load("test", path))
    assert (
        message.startswith(f"{path} row 2: cannot read a problem from question_title, ")
        and lcb.COLUMNS in message
    )
    assert len(lcb.load("test", path, limit=1)) == 1


def test_lines_that_are_no_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(SUM) + "\n\n{\n")
    assert one_line(lambda: lcb.load("test", str(path))).startswith(
        f"{path}: the line at byte {len(json.dumps(SUM)) + 2} is not JSON"
    )
    path.write_text("[1]\n")
    assert "row 1: cannot read a problem" in one_line(lambda: lcb.load("test", str(path)))
    assert "no such preset or file" in one_line(lambda: lcb.load("test", "missing.jsonl"))


def test_releases_and_dates(tmp_path, monkeypatch):
    """Releases have the files of those before them; @FIRST..LAST keeps days, both included."""
    import huggingface_hub

    asked = []

    def download(repository, name, repo_type):
        asked.append(name)
        number = int(name.removeprefix("test").removesuffix(".jsonl") or 1)
        days = [f"202{number}-0{month}-01T00:00:00" for month in (1, 2)]
        rows = [SUM | {"question_content": f"{number}", "contest_date": day} for day in days]
        assert (repository, repo_type) == (lcb.HUB, "dataset")
        return write(tmp_path / name, rows)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    numbers = lambda path, **more: "".join(
        example["question"] for example in lcb.load("test", path, **more)
    )
    assert numbers("release_v2") == "1122" and asked == ["test.jsonl", "test2.jsonl"]
    assert numbers("v3") == "33" and asked[2:] == ["test3.jsonl"]
    assert (
        numbers("")
        == numbers("release_latest")
        == numbers(lcb.HUB)
        == numbers("release_v6")
        == "112233445566"
    )
    assert (
        numbers("release_v6@2022-01-02..2024-01-01") == "2334"
        and numbers("release_v6@..2021-02-01") == "11"
    )
    assert numbers("release_v6@2026-02-01..") == "6" and numbers("@2021-01-01..2021-01-01") == "1"
    assert numbers(f"{tmp_path}/test3.jsonl@2023-01-01..2023-01-31") == "3"
    assert numbers("release_v6@2023-01-01..", limit=3) == "334"
    for split in ("train", "validation"):
        message = one_line(lambda split=split: lcb.load(split, "release_v6@2023-01-01.."))
        assert message.startswith(f"--split {split}: {lcb.HUB} has test alone; train on")
    assert "no contest from 2030-01-01 to the last" in one_line(
        lambda: lcb.load("test", "release_v1@2030-01-01..")
    )
    for wrong in ("release_v7", "release_v6@2023..2024", "release_v6@2023-01-01"):
        assert "no such preset or file" in one_line(lambda wrong=wrong: lcb.load("test", wrong))

    def offline(*arguments, **named):
        raise type("ReadTimeout", (Exception,), {})(
            "We couldn't connect\nto the hub"
        )  # httpx' own is no OSError

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    message = one_line(lambda: lcb.load("test", "v5"))
    assert message.startswith(
        f"--data v5: {lcb.HUB} cannot be had from the hub; with --data FILE.jsonl a copy of its files is read"
    )
    assert message.endswith("(We couldn't connect to the hub)")
    assert one_line(lambda: lcb.load("test")).startswith(
        "--data livecodebench/code_generation_lite: "
    )


def test_prompts(tmp_path):
    one, two = examples(tmp_path, SUM, TWO_SUM)
    system = {
        "role": "system",
        "content": "You are an expert Python programmer. You will be given a question (problem specification) and will "
        "generate a correct Python program that matches the specification and passes all tests.",
    }
    end = "### Answer: (use the provided format with backticks)\n\n"
    stdin = (
        "### Question:\nAdd two numbers.\n\n### Format: Read the inputs from stdin solve the problem and write the answer to "
        "stdout (do not directly test on the sample inputs). Enclose your code within delimiters as follows. Ensure that when "
        "the python program runs, it reads the inputs, runs the algorithm and writes output to STDOUT.\n```python\n# YOUR CODE "
        f"HERE\n```\n\n{end}"
    )
    starter = (
        "### Question:\nTwo of them.\n\n### Format: You will use the following starter code to write the solution to the "
        f"problem and enclose your code within delimiters.\n```python\n{STARTER}\n```\n\n{end}"
    )
    assert lcb.prompt(one) == [system, {"role": "user", "content": stdin}]
    assert lcb.prompt(two) == [system, {"role": "user", "content": starter}]
    assert "no solutions" in one_line(lambda: lcb.answer(one)) and load_task("livecodebench") is lcb


# ---------------------------------------------------------------------------------------------------------------------
# verdicts

READ = "a, b = map(float, input().split())\n"
STDIN = {  # completion: score
    f"```python\n{READ}print(a + b)\n```": 1.0,
    f"```python\nprint(0)\n```\nNo:\n```python\n{READ}print(a + b)\n```\nThis adds.": 1.0,
    f"{READ}print(a + b)": 1.0,
    f"```python\n{READ}print(a + b)": 1.0,  # not closed
    "```python\nimport sys\ndef main():\n    print(sum(map(float, sys.stdin.buffer.read().split())))\n"
    "if __name__ == '__main__':\n    main()\n    sys.exit(1)\n```": 1.0,
    "```python\nprint(sum(map(float, open(0).read().split())))\n```": 1.0,
    "```python\nfor line in stdin: print(sum(map(float, line.split())))\n```": 1.0,  # names of the prefix
    "```python\nimport threading\nthreading.Thread(target=lambda: print(sum(map(float, input().split())))).start()\n```": 1.0,
    f"```python\nimport atexit, sys\natexit.register(lambda: sys.stdout.write(out))\n{READ}out = str(a + b)\n```": 1.0,
    "```python\nfrom __future__ import annotations\nimport os\nout = str(sum(map(float, os.read(0, 99).split())))"
    "\nos.write(1, out.encode())\nos._exit(0)\n```": 1.0,
    f"```python\n{READ}print(f'  {{a + b:.3f}} \\n')\n```": 1.0,  # blanks around a line, a number as a number
    "```python\nseen = globals().setdefault('seen', [])\nseen.append(1)\nassert len(seen) == 1\n"
    f"{READ}print(a + b)\n```": 1.0,  # nothing stays from test to test
    f"```python\n{READ}print(a, b)\n```": 0.0,
    f"```python\n{READ}print(a + b)\nprint()\nprint(1)\n```": 0.0,  # a line more
    f"```python\n{READ}print(a + b, 'x')\n```": 0.0,
    f"```python\n{READ}print(a + b)\n1 / 0\n```": 0.0,
    f"```python\n{READ}print(a + b, flush=True)\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n```": 0.0,
    "```python\nprint(3)\n```": 0.0,  # the public test alone
    "```python\nimport os\nos._exit(0)\n```": 0.0,
    "```python\nimport os\nos.kill(os.getppid(), 9)\n```": 0.0,
    "```python\ninput(); input()\n```": 0.0,
    "```python\nwhile True: print('x' * 1000)\n```": 0.0,
    "```python\ndef f(:\n```": 0.0,
    "```python\n```": 0.0,
    "": 0.0,
    " \n": 0.0,
    "\0": 0.0,
    "x" * 1_000_001: 0.0,
}
FIND = "for i, a in enumerate(nums):\n            for j in range(i):\n                if a + nums[j] == target: return [j, i]\n"
FUNCTIONAL = {
    f"```python\n{STARTER}{FIND}```": 1.0,  # List is not imported
    f"```python\n{STARTER}{FIND.replace('[j, i]', '(j, i)')}```": 1.0,
    f"```python\ndef twoSum(nums, target):\n        {FIND}```": 1.0,
    f"```python\nfrom __future__ import annotations\n{STARTER}{FIND}```": 1.0,
    f"{STARTER}{FIND}": 1.0,
    f"```python\n{STARTER}return [0, 1]\n```": 0.0,  # the last test
    f"```python\n{STARTER}{FIND.replace('[j, i]', '[i, j]')}```": 0.0,
    f"```python\n{STARTER}{FIND.replace('twoSum', 'other')}```".replace(
        "def twoSum", "def other"
    ): 0.0,
    f"```python\n{STARTER}raise SystemExit(0)\n```": 0.0,
    f"```python\nclass E(list):\n    def __eq__(self, other): return True\n{STARTER}return E()\n```": 0.0,
    "```python\nimport os\nos._exit(0)\n```": 0.0,
    "print([0, 1])": 0.0,
    "": 0.0,
}


@pytest.mark.parametrize(
    ("row", "completions"), [(SUM, STDIN), (TWO_SUM, FUNCTIONAL)], ids=["stdin", "functional"]
)
def test_completions(tmp_path, monkeypatch, row, completions):
    monkeypatch.setattr(lcb, "TIMEOUT", 60)  # nothing here may depend on how busy the machine is
    (example,) = examples(tmp_path, row)
    got = lcb.score_batch(list(completions), [example] * len(completions))
    wrong = {
        text[:80]: score
        for (text, want), score in zip(completions.items(), got, strict=True)
        if score != want
    }
    assert not wrong
    assert lcb.extract("", example) is None and lcb.extract("```python\n```", example) is None


def test_each_test_has_its_own_time(tmp_path, monkeypatch):
    monkeypatch.setattr(lcb, "TIMEOUT", 1)
    for row, program in ((SUM, "while True: pass"), (TWO_SUM, f"{STARTER}while True: pass")):
        (example,) = examples(tmp_path, row)
        result = sandbox.run(lcb.job(program, example))
        assert not result.passed and "no answer within 1 seconds" in result.detail
        assert lcb.job(program, example).timeout == 2 * 3 + 5


def test_large_tests(tmp_path):
    """Half a megabyte in, as much out, through pipes that hold 64 KiB; output beyond its bound is an error."""
    numbers = "\n".join(map(str, range(80_000)))
    row = (
        SUM
        | {"private_test_cases": packed(cases("stdin", (numbers, numbers)))}
        | {"public_test_cases": cases("stdin", ("", ""))}
    )
    (example,) = examples(tmp_path, row)
    program = "import sys\nfor line in sys.stdin: print(line, end='')"
    assert sandbox.run(lcb.job(program, example)).passed
    assert not sandbox.run(lcb.job(program.replace("end=''", "end='x'"), example)).passed
    result = sandbox.run(lcb.job(program + "\nprint('x' * (9 << 20))", example))
    assert "more than 8 MiB" in result.detail
    assert not sandbox.run(lcb.job("print(end='')", example)).passed  # it reads nothing


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_problems_with_large_tests_are_judged_one_at_a_time(tmp_path, monkeypatch, patient, suffix):
    """Their tests are packed text in memory, or lie in the file; verdicts keep their places."""
    numbers = "1 2 " * 5000
    large = SUM | {"private_test_cases": cases("stdin", (numbers, "15000"))}
    problems = lcb.load("test", write(tmp_path / f"rows.{suffix}", [large, SUM, large, SUM, large]))
    batches, judge = [], lcb.pass_or_fail
    monkeypatch.setattr(
        lcb,
        "pass_or_fail",
        lambda jobs: batches.append([job is not None for job in jobs]) or judge(jobs),
    )
    right, wrong = "print(sum(map(float, input().split())))", "print(3)"
    texts = [f"```python\n{code}\n```" for code in (right, right, wrong, wrong)] + [""]
    monkeypatch.setattr(lcb, "LARGE", 10_000)
    assert lcb.score_batch(texts, problems) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert batches == [[False, True, False, True, False], [True], [True], [False]]


@pytest.mark.skipif(os.getuid() != 0, reason="reads its own memory, as root")
@pytest.mark.parametrize("known", [False, True])
def test_the_expected_output_is_in_no_memory_of_the_program(tmp_path, known):
    """It has a copy of all that the process had from which it was forked. Known: the search finds what is there."""
    search = """
import os, re
kept = "-".join(["needle", "5", "6"]) if KNOWN else ""
wanted, found = re.compile(b"n[e]edle-5"), False
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in maps:
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if "rw" in line and "[v" not in line and last - first < 1 << 24:
            memory.seek(first)
            found |= bool(wanted.search(memory.read(last - first)))
if found:
    print("-".join(["needle", "5", "6"]))
"""
    row = SUM | {
        "public_test_cases": cases("stdin", ("7", "needle-5-6")),
        "private_test_cases": "[]",
    }
    (example,) = examples(tmp_path, row)
    result = sandbox.run(
        lcb.job(search.replace("KNOWN", str(known)), example), without=["files", "uid"]
    )
    assert result.reason == ("passed" if known else "wrong"), result


def test_command_line(tmp_path, monkeypatch, capsys):
    data = write(tmp_path / "rows.jsonl", [SUM, TWO_SUM, SUM])
    texts = [next(iter(STDIN)), next(iter(FUNCTIONAL)), ""]
    completions = write(
        tmp_path / "c.jsonl", [{"index": i, "completion": text} for i, text in enumerate(texts)]
    )
    flags = ["--completions", completions, "--data", data, "--out", str(tmp_path / "out")]
    result = cli(monkeypatch, capsys, *flags, task="livecodebench")
    assert (result["n"], result["accuracy"], result["answered"]) == (3, 2 / 3, 2 / 3)
    flags = [
        "--completions",
        completions,
        "--data",
        f"{data}@2025-01-01..",
        "--out",
        str(tmp_path / "window"),
    ]
    write(tmp_path / "c.jsonl", [{"index": 0, "completion": texts[1]}])
    result = cli(monkeypatch, capsys, *flags, task="livecodebench")
    assert (result["n"], result["accuracy"]) == (1, 1.0)
