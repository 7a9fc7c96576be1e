"""Every scorer finds the answer behind prose, and takes the last of several."""

from pathlib import Path

import pytest

from evals import load_task, score_all

BOXED = {"question": "How many?", "gold": "18", "solution": "20 - 2 = 18", "style": "boxed"}
OLYMPIAD = BOXED | {"gold": r"2 \pm \sqrt{3}, (1, 2)", "error": [0.0], "multiple": True}
OLYMPIAD |= {"type": "Expression", "unit": False, "field": "Math"}
ASKED = {"question": "Which?", "options": ["w", "x", "y", "z"], "gold": "B", "style": "cot"}
ASKED |= {"subject": "law", "shots": [], "text": "He"}
TRUTH = {"question": "not True is", "gold": "False", "shots": "", "style": "alone"}
TRUTH["subject"] = "boolean_expressions"
WHOLE = "def add(a, b):\n    return a + b"
STUB = {
    "prompt": "def add(a, b):\n    'Sum.'\n",
    "entry_point": "add",
    "solution": "    return a + b\n",
}
STUB["tests"] = "def check(candidate):\n    assert candidate(1, 2) == 3\n\ncheck(add)\n"
MBPP = {"text": "Add.", "tests": ["assert add(1, 2) == 3"], "setup": "", "solution": WHOLE}
NUMBERS = {"numbers": [30, 100, 93], "target": 23, "style": "tags"}
BOARD = {"puzzle": "3102200002100320", "solution": "3142243142131324", "style": "tags"}
LETTERS = "ANSWER: B", "ANSWER: C"
CODE = "```python\n{}\n```".format
# task: an example, a right completion, a wrong one
BOXES = r"It is \boxed{the Hague}.", r"It is \boxed{Hague, Delft}."
CASES = {
    "gsm8k": (BOXED, r"So \boxed{18}.", r"So \boxed{19}."),
    "math500": (BOXED | {"style": ""}, r"So $\boxed{18.0}$.", r"So $\boxed{\frac{1}{3}}$."),
    "aime24": (BOXED, r"So $\boxed{018}$.", r"So $\boxed{19}$."),
    "aime25": (BOXED, r"So $\boxed{18}$.", r"So $\boxed{-18}$."),
    "olympiad": (OLYMPIAD, r"\boxed{(1, 2), 2 \pm \sqrt{3}}.", r"\boxed{(2, 1), 2 \pm \sqrt{3}}."),
    "mmlu_pro": (ASKED | {"options": {"A": "w", "B": "x", "C": "z"}}, *LETTERS),
    "ceval": (ASKED, "答案是B", "答案是A"),
    "bbh": (TRUTH, "So the answer is False.", "So the answer is True."),
    "qa": ({"question": "Which city?", "answers": ["The Hague"]}, *BOXES),
    "countdown": (NUMBERS, "<answer>30+93-100</answer>", "<answer>30+93+100</answer>"),
    "sudoku": (BOARD, "<answer>3142243142131324</answer>", "<answer>3142243142131342</answer>"),
    "mbpp": (MBPP, f"[BEGIN]\n '{WHOLE}' \n[DONE]", "[BEGIN]\n 'def add(a, b): pass' \n[DONE]"),
}
CASES |= {name: (ASKED, *LETTERS) for name in ("mmlu", "arc_c", "hellaswag", "gpqa")}
CASES |= {
    name: (STUB, CODE(WHOLE), CODE(STUB["prompt"]))
    for name in ("humaneval", "humaneval_plus", "mbpp_plus")
}
PROSE = (
    "Let x = 7, so 2 + 2 = 4.\n\n",
    "Step by step: {1, 2} has 2 members.\n",
    "1. read\n2. write\n\n",
)


@pytest.mark.parametrize("name", CASES)
def test_scorer(name):
    task, (example, right, wrong) = load_task(name), CASES[name]
    score = lambda texts: score_all(task, texts, [example] * len(texts))
    texts = [right, *(prose + right for prose in PROSE), f"{wrong}\nNo.\n{right}"]
    assert score(texts) == [1.0] * len(texts) and task.score(right, example) == 1.0
    texts = [wrong, *(prose + wrong for prose in PROSE), f"{right}\nNo.\n{wrong}", *PROSE]
    assert score(texts) == [0.0] * len(texts) and task.score(wrong, example) == 0.0


def test_every_task_is_covered():
    """livecodebench has its own file format and tests."""
    files = Path(__file__).parents[1].glob("evals/*.py")
    tasks = {path.stem for path in files if f'main("{path.stem}")' in path.read_text("utf-8")}
    assert tasks - {"livecodebench"} == set(CASES)
