"""What holds for the scorer of every benchmark: it never raises, says 0 to 1 and twice the same, finds the answer behind prose.

Beside it the oracle of the papers' countdown files; every other file has its own in the tests of its benchmark.
"""

import ast
import json
from pathlib import Path

import pytest
from test_choices import ASKED, FREE
from test_code_evals import ADD, WHOLE
from test_evals import FILES, needs_files

from evals import countdown, load_task, score_all

ROOT = Path(__file__).resolve().parents[1]
BOXED = {"question": "How many?", "gold": "18", "solution": "20 - 2 = 18"}
LETTERED = {"question": "Which?", "options": ["w", "x", "y", "z"], "gold": "B"}
OLYMPIAD = {
    "question": "?",
    "gold": r"2 \pm \sqrt{3}, (1, 2)",
    "error": [0.0],
    "multiple": True,
    "type": "Expression",
}
ADD = ADD | {"solution": "    return a + b\n"}

# task: an example, a right completion, a wrong one
CASES = {
    "gsm8k": (BOXED | {"style": "boxed"}, r"So \boxed{18}.", r"So \boxed{19}."),
    "math500": (
        BOXED | {"gold": r"\frac{1}{2}"},
        r"So $\boxed{0.5}$.",
        r"So $\boxed{\frac{1}{3}}$.",
    ),
    "aime24": (BOXED, r"So $\boxed{018}$.", r"So $\boxed{19}$."),
    "aime25": (BOXED, r"So $\boxed{18}$.", r"So $\boxed{-18}$."),
    "olympiad": (
        OLYMPIAD | {"unit": False, "field": "Math"},
        r"So the final answer is \boxed{(1, 2), 2 \pm \sqrt{3}}.",
        r"So the final answer is \boxed{(2, 1), 2 \pm \sqrt{3}}.",
    ),
    "mmlu": (ASKED | {"gold": "B", "style": "cot", "shots": []}, "ANSWER: B", "ANSWER: C"),
    "mmlu_pro": (
        LETTERED | {"options": dict(zip("ABD", "wxz", strict=True))},
        "ANSWER: B",
        "ANSWER: D",
    ),
    "arc_c": (LETTERED, "The answer is B.", "The answer is A."),
    "hellaswag": (LETTERED | {"text": "He"}, "Answer: (B)", "Answer: (C)"),
    "gpqa": (LETTERED, "The correct answer is (B)", "The correct answer is (D)"),
    "ceval": (LETTERED | {"subject": "law", "shots": []}, "答案是B", "答案是A"),
    "bbh": (FREE, "So the answer is False.", "So the answer is True."),
    "countdown": (
        {"numbers": [30, 100, 93], "target": 23, "style": "tags"},
        "<answer>30+93-100</answer>",
        "<answer>30+93+100</answer>",
    ),
    "sudoku": (
        {"puzzle": "3102200002100320", "solution": "3142243142131324", "style": "tags"},
        "<answer>3142243142131324</answer>",
        "<answer>3142243142131342</answer>",
    ),
    "humaneval": (ADD, f"```python\n{WHOLE}```", "```python\ndef add(a, b):\n    return a\n```"),
    "humaneval_plus": (
        ADD,
        f"```python\n{WHOLE}```",
        "```python\ndef add(a, b):\n    return a\n```",
    ),
    "mbpp": (
        {"text": "Add.", "tests": ["assert add(1, 2) == 3"], "setup": "", "solution": WHOLE},
        f"[BEGIN]\n '{WHOLE}' \n[DONE]",
        "[BEGIN]\n 'def add(a, b):\n    return a' \n[DONE]",
    ),
}
ELSEWHERE = {"livecodebench"}  # has these tests in tests/test_livecodebench.py
PROSE = [
    "Let x = 7, so 2 + 2 = 4.\n\n",
    "I think, step by step: a set {1, 2} has 2 members.\n",
    "First,\n\n1. read\n2. write\n\n",
]
HOSTILE = [
    "",
    " \n\t ",
    "\0",
    "\ud800",
    "{" * 1000,
    "}" * 1000,
    r"\boxed{" * 1000,
    r"\boxed{" + "(" * 50 + "}",
    "<answer>" + "[" * 100_000 + "</answer>",
    "```python\n" + "(" * 5000 + "\n```",
    "[BEGIN]'" + "-" * 50_000 + "1",
    "x" * 10**6,
    "9" * 10**5,
]


def test_every_benchmark_is_here_and_names_its_prompt():
    files = [
        path
        for path in (ROOT / "evals").glob("*.py")
        if "\ndef score(" in path.read_text(encoding="utf-8")
    ]
    assert {path.stem for path in files} - ELSEWHERE == CASES.keys()
    for path in files:
        names = {
            target.id
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if hasattr(target, "id")
        }
        assert "VERSION" in names or path.stem in ELSEWHERE, path


@pytest.mark.parametrize("name", CASES)
def test_right_is_one_and_wrong_is_zero_whatever_stands_before(name):
    task, (example, right, wrong) = load_task(name), CASES[name]
    completions = [right, *(prose + right for prose in PROSE), f"{wrong}\nNo.\n{right}"]
    assert score_all(task, completions, [example] * len(completions)) == [1.0] * len(completions)
    completions = [wrong, *(prose + wrong for prose in PROSE), f"{right}\nNo.\n{wrong}", *PROSE]
    assert score_all(task, completions, [example] * len(completions)) == [0.0] * len(completions)
    assert task.score(right, example) == 1.0 and task.score(wrong, example) == 0.0, "one at a time"
    assert task.extract(right, example) and task.extract("", example) is None


@pytest.mark.parametrize("name", CASES)
def test_no_text_raises_and_each_has_one_score(name):
    task, (example, right, _) = load_task(name), CASES[name]
    assert score_all(task, HOSTILE, [example] * len(HOSTILE)) == [0.0] * len(HOSTILE)
    places = range(0, len(right) + 1, max(1, len(right) // 8))
    cut = [right[:end] for end in places] + [right[end:] for end in places]
    scores = score_all(task, cut, [example] * len(cut))
    assert set(scores) <= {0.0, 1.0} and scores == score_all(task, cut, [example] * len(cut))
    for text in [*HOSTILE, *cut]:
        found = task.extract(text, example)
        assert found is None or isinstance(found, str)
        json.dumps(found)


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_does_not_depend_on_the_answer(name):
    task, (example, *_) = load_task(name), CASES[name]
    hidden = {key: "?" for key in ("gold", "solution") if key in example}
    messages = task.prompt(example)
    assert messages == task.prompt(example | hidden) and messages[-1]["role"] == "user"


@needs_files
@pytest.mark.parametrize("file", ["d1/countdown_cd3_test.jsonl", "dare/test_countdown_1.parquet"])
def test_every_gold_answer_of_countdown(file):
    examples = countdown.load("test", str(FILES / file))
    assert len(examples) == 256
    assert [countdown.score(countdown.answer(example), example) for example in examples] == [
        1.0
    ] * 256
