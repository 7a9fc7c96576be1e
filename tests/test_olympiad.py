r"""OlympiadBench: rows as the hub has them, the prompt, what counts as the same answer, the command line."""

import sys
from pathlib import Path

import pytest
from test_evals import cli, one_line, write
from test_math import HOSTILE

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from evals import load_task, olympiad
from evals.math_grader import math_verify

ROW = {
    "id": 1606,
    "question": "How many?",
    "solution": ["It is 2."],
    "final_answer": ["2"],
    "context": None,
    "modality": "Text-only",
    "difficulty": "Competition",
    "is_multiple_answer": False,
    "unit": None,
    "answer_type": "Numerical",
    "error": None,
    "question_type": "Open-ended",
    "subfield": "Combinatorics",
    "subject": "Math",
    "language": "English",
}


def row(final, kind="Numerical", multiple=False, **others):
    return (
        ROW
        | {"final_answer": [final], "answer_type": kind, "is_multiple_answer": multiple}
        | others
    )


ROWS = [  # row, right answers beside the gold one, wrong answers
    (row("2"), ["2.0", "n = 2", r"\frac{4}{2}", "1+1"], ["3", "2, 2", "200", "", "x", "(2, 2)"]),
    (row("$1,000$"), ["1000", "1{,}000"], ["1", "0", "1001"]),
    (row(r"$\frac{1}{2}$"), ["0.5", r"\dfrac12", "1/2", r"50\%"], ["0.6", "50", "0.005"]),
    (row("7.4", error="0.1"),
     ["7.35", "7.501", r"\frac{15}{2}", r"x = 3\sqrt{6}", "7.4"], ["7.502", "7.28", r"3\sqrt{7}", "740"]),
    (row("7.4"), ["7.40"], ["7.35", r"\frac{15}{2}", "7.401"]),
    (row(r"$\sqrt{2}$", error="1e-2"), ["1.41", r"\sqrt{2.001}"], ["1.4", "2", "x"]),
    (row(r"$1.2, 30$", multiple=True, error="1e-1,2"),
     ["30, 1.2", "1.3, 31", "28, 1.1"], ["3, 30", "1.2, 33", "1.2", "1.2, 1.2"]),
    (row(r"$-1, \frac{1}{2}, 3$", multiple=True),
     ["3, -1, 0.5", r"\{0.5, 3, -1\}"], ["3, -1", "3, -1, 0.5, 0.5", "3, 3, -1", "4, -1, 0.5"]),
    (row("$2,2,3$", multiple=True), ["3, 2, 2"], ["2, 3", "2, 3, 3"]),
    (row(r"$2 \pm \sqrt{3}$", multiple=True),
     [r"2-\sqrt{3}, 2+\sqrt{3}", r"\sqrt{3}+2, 2-\sqrt{3}"], [r"2+\sqrt{3}", r"2, \sqrt{3}"]),
    (
        row("$(1,8,19), (2,7,13), (4,5,7)$", "Tuple", True),
        ["(4, 5, 7), (1, 8, 19), (2, 7, 13)", "(a,b,c) = (1,8,19), (2,7,13), (4,5,7)"],
        ["(8,1,19), (2,7,13), (4,5,7)", "(1,8,19), (2,7,13)", "1,8,19,2,7,13,4,5,7", "[1,8,19], (2,7,13), (4,5,7)"],
    ),
    (row(r"$(0,1] \cup[\frac{3}{2}, \infty)$", "Interval"),
     [r"[1.5, \infty) \cup (0, 1]", r"x \in (0,1]\cup\left[\frac{6}{4},\infty\right)"],
     [r"(0,1) \cup [\frac{3}{2}, \infty)", "(0,1]", r"[1.5, 2) \cup (0, 1]"]),
    (row("$x^{2}-1$", "Expression"), ["(x-1)(x+1)", "f(x) = x^2 - 1"], ["x^2+1", "0"]),
    (row("$y=2 x+1$", "Equation"), ["2x - y + 1 = 0", "y = 1 + 2x"], ["y = 2x - 1"]),
    (row("$(1,2)+(3,4)$", "Need_human_evaluate"), ["(1, 2)+(3,4)".replace(" ", "")], ["(1,2)"]),
]  # fmt: skip
GOLDS = [row["final_answer"][0] for row, _, _ in ROWS]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_gold_answers_are_right_and_others_are_not(tmp_path, suffix):
    path = write(tmp_path / f"rows.{suffix}", [row for row, _, _ in ROWS])
    examples = olympiad.load("test", path)
    boxed = [
        f"First $\\boxed{{9}}$.\nSo the final answer is $\\boxed{{{gold}}}$. Or 7?"
        for gold in GOLDS
    ]
    assert olympiad.score_batch(boxed, examples) == [1.0] * len(ROWS)
    assert olympiad.score_batch(boxed[3:] + boxed[:3], examples) == [0.0] * len(ROWS), (
        "the answer of another problem"
    )
    assert olympiad.score_batch(GOLDS, examples) == [0.0] * len(ROWS), "no box"
    assert len(olympiad.load("test", path, limit=4)) == 4


@pytest.mark.parametrize(("row", "right", "wrong"), ROWS, ids=GOLDS)
def test_verdicts(tmp_path, row, right, wrong):
    [example] = olympiad.load("test", write(tmp_path / "rows.jsonl", [row]))
    found = {
        text: olympiad.score(rf"So the final answer is $\boxed{{{text}}}$.", example)
        for text in right + wrong
    }
    assert found == dict.fromkeys(right, 1.0) | dict.fromkeys(wrong, 0.0)


@pytest.mark.parametrize(("row", "right", "wrong"), [ROWS[3], ROWS[6]], ids=["one", "each"])
def test_without_its_tolerance_a_row_is_strict(tmp_path, row, right, wrong):
    """The verdicts above come from `error`: without it, or with a large one, others come out."""
    strict, loose = (
        olympiad.load("test", write(tmp_path / "rows.jsonl", [row | {"error": error}]))[0]
        for error in (None, "9")
    )
    assert 0.0 in [olympiad.score(rf"\boxed{{{text}}}", strict) for text in right]
    assert 1.0 in [olympiad.score(rf"\boxed{{{text}}}", loose) for text in wrong]


def test_pairs_are_found_where_the_first_choice_is_wrong(tmp_path):
    """1.5 fits both golds, 1.1 only the first: taking 1.5 for the first leaves none for the second."""
    [example] = olympiad.load(
        "test", write(tmp_path / "rows.jsonl", [row("$1,2$", multiple=True, error="0.6")])
    )
    assert [
        olympiad.score(rf"\boxed{{{text}}}", example)
        for text in ("1.5, 1.1", "1.1, 1.5", "1.1, 1.2")
    ] == [1.0, 1.0, 0.0]


def test_tolerance_of_the_grader():
    assert [math_verify("3.1", r"\pi", tolerance) for tolerance in (0.0, 0.01, 0.05)] == [
        False,
        False,
        True,
    ]
    assert [math_verify("3", "4", tolerance) for tolerance in (0.0, 0.5, 1.0)] == [
        False,
        False,
        True,
    ]
    assert not math_verify("x", r"\pi", 100.0) and not math_verify("10^{10^{10^{10}}}", "5", 1.0)


def test_hostile_text(tmp_path):
    examples = olympiad.load("test", write(tmp_path / "rows.jsonl", [row for row, _, _ in ROWS]))
    shapes = ["(,)", ")(", "(,", "(", ",,,", r"\cup", r"\pm", r"\in ", r"\{\}", "$", ".", "()"]
    texts = [*HOSTILE, *(rf"\boxed{{{shape}}}" for shape in shapes)]
    texts += [
        r"\boxed{" + "(" * 500 + "}",
        r"\boxed{" + "(1," * 100 + ")" * 100 + "}",
        r"\boxed{" + r"1\pm" * 100 + "}",
    ]
    assert not any(
        olympiad.score(text, example)
        for text in texts
        for example in (examples[0], examples[6], examples[10])
    )
    assert (
        olympiad.extract("", examples[0]) is None
        and olympiad.extract(r"\boxed{1} \boxed{2", examples[0]) == "1"
    )


def test_prompts(tmp_path):
    rows = [
        row("2"),
        row("$1, 2$", "Numerical", True, unit="km"),
        row("$1, x$", "Numerical,Expression", True),
        row("$(1, 2)$", "Tuple", subject="Physics"),
        row("$1, 2$", "Equation,Equation", True),
    ]
    contents = []
    for example in olympiad.load("test", write(tmp_path / "rows.jsonl", rows)):
        [message] = olympiad.prompt(example)
        assert message["role"] == "user" and message["content"].count("How many?") == 1
        contents.append(message["content"])
    assert contents[0] == (
        "The following is an open-ended problem from an International Math competition. The answer of The problem should be a "
        "numerical value. Please calculate the answer according to the given requirements and the information provided. Please "
        "use LaTeX format to represent the variables and formulas used in the solution process and results. Please end your "
        'solution with "So the final answer is \\boxed{answer}." and give the result explicitly.\nHow many?\n\nPlease reason '
        "step by step, and put your final answer within \\boxed{}."
    )
    each = "The problem has multiple answers, each of them should be "
    assert (
        each + "a numerical value. Please" in contents[1]
        and each + "an equation. Please" in contents[4]
    )
    ending = '(unit)." and give the result explicitly, note that the unit of the answer should not be included in \\boxed{}.'
    assert "\\boxed{multiple answers connected with commas}" + ending in contents[1]
    assert not any("unit" in content for content in contents[:1] + contents[2:])
    assert (
        "multiple answers, with the answers in order being a numerical value, an expression. Please"
        in contents[2]
    )
    assert "International Physics competition. Please calculate" in contents[3]


def test_bad_rows_are_named(tmp_path, monkeypatch):
    bad = [
        {"final_answer": None},
        {"final_answer": []},
        {"final_answer": "2"},
        {"final_answer": [""]},
        {"question": None},
        {"answer_type": None},
        {"answer_type": "Colour"},
        {"is_multiple_answer": None},
        {"error": "some"},
        {"error": "-1"},
        {"error": "nan"},
        {"language": "Chinese"},
    ]
    for change in bad:
        path = write(tmp_path / "rows.jsonl", [ROW, ROW | change])
        message = one_line(lambda path=path: olympiad.load("test", path))
        assert (
            message.startswith(f"{path} row 2: cannot read a problem from id, question")
            and "needs question" in message
        ), change
    assert "no such file" in one_line(lambda: olympiad.load("test", "missing.jsonl"))
    for split in ("train", "validation"):
        assert "has test alone" in one_line(lambda split=split: olympiad.load(split))
    asked = []
    monkeypatch.setattr(olympiad, "read_rows", lambda *args: asked.append(args) or [ROW])
    assert [example["gold"] for example in olympiad.load("test", limit=5)] == ["2"]
    assert asked == [("Hothan/OlympiadBench", "train", (), 5, "OE_TO_maths_en_COMP")]


def test_command_line(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "rows.jsonl", [row for row, _, _ in ROWS])
    given = [
        {"index": i, "completion": rf"\boxed{{{gold}}}" if i % 3 else "none"}
        for i, gold in enumerate(GOLDS)
    ]
    flags = [
        "--completions",
        write(tmp_path / "given.jsonl", given),
        "--data",
        path,
        "--out",
        str(tmp_path / "a"),
    ]
    result = cli(monkeypatch, capsys, *flags, task="olympiad")
    assert (result["n"], result["accuracy"], result["answered"]) == (
        15,
        pytest.approx(2 / 3),
        pytest.approx(2 / 3),
    )
    flags = [
        "--model",
        "tiny-sdar",
        "--data",
        path,
        "--limit",
        "2",
        "--gen-length",
        "8",
        "--out",
        str(tmp_path / "b"),
    ]
    result = cli(monkeypatch, capsys, *flags, task="olympiad")
    assert (result["task"], result["n"], result["accuracy"]) == ("olympiad", 2, 0.0)
    assert load_task("olympiad") is olympiad
