r"""The mathematical graders and benchmarks: verdicts, hostile text, processes that are killed, loading, the real files.

The files are read from the folder in CLEANDLLM_DATA; without it their tests are skipped.
"""

import os
import signal
import sys
import threading
from fractions import Fraction
from pathlib import Path

import pytest
from test_evals import FILES, cli, needs_files, one_line, write

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from evals import aime24, aime25, load_task, math500, math_grader
from evals.math_grader import GRADERS, grade, grade_batch, last_box
from evals.rewards import REWARDS, load_reward

# ---------------------------------------------------------------------------------------------------------------------
# the box

BOXES = {
    r"\boxed{18}": "18",
    r"\boxed{\frac{1}{2}} and \boxed{\sqrt{2}}": r"\sqrt{2}",
    r"\boxed{1} then \boxed{2": "1",  # the last complete one
    r"\boxed{1} then \boxed{}": "1",
    r"\boxed{1} then \boxed{ }": "1",
    r"\boxed{\boxed{18}}": "18",
    r"\boxed{\{1, 2\}}": r"\{1, 2\}",
    r"\boxed{\left\{ 1 \right.}": r"\left\{ 1 \right.",
    r"\boxed {x}": "x",
    r"\boxed 18": None,
    r"\boxed{18": None,
    "18": None,
    "": None,
    r"\boxed{" + "1" * 513 + "}": None,
}


@pytest.mark.parametrize(("text", "want"), BOXES.items(), ids=lambda text: repr(text)[:30])
def test_last_box(text, want):
    assert last_box(text) == want


# ---------------------------------------------------------------------------------------------------------------------
# verdicts

VERDICTS = [  # answer, gold, hendrycks, deepscaler, math_verify: what OpenCompass's matcher, DARE's reward and Math-Verify say
    ("50", r"50\%", 1, 1, 1),
    ("0.5", r"\frac{1}{2}", 0, 1, 1),
    ("1/2", r"\frac12", 1, 1, 1),
    (r"\frac{2}{4}", r"\frac{1}{2}", 0, 0, 1),
    ("10080", r"10,\!080", 1, 1, 1),
    ("90", r"90^\circ", 1, 1, 1),
    ("x=5", "5", 1, 1, 1),
    (r"(3, \frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)", 1, 1, 1),
    ("B", r"\text{(B)}", 1, 1, 1),
    ("5.4", r"5.4 \text{ cents}", 1, 1, 1),
    ("52", "52_8", 0, 0, 0),
    ("18.00", "18", 1, 1, 1),
    (r"\$18", "18", 1, 1, 1),
    ("18 dollars", "18", 1, 0, 0),
    ("2125", "2,125", 1, 1, 1),
    ("6+9i", "9i+6", 0, 1, 1),
    (r"3\sqrt{13}", r"\sqrt{117}", 0, 1, 1),
    (r"-\frac{1}{2}", r"\frac{-1}{2}", 0, 1, 1),
    ("x^2+2x+1", "(x+1)^2", 0, 1, 1),
    ("1,2,3", "3,2,1", 0, 0, 1),
]


@pytest.mark.parametrize(
    ("answer", "gold", "strings", "guarded", "judge"),
    VERDICTS,
    ids=[f"{a} for {b}" for a, b, *_ in VERDICTS],
)
def test_verdicts(answer, gold, strings, guarded, judge):
    for prose in ("", "First $x = 3$. So it is 7, no: "):
        completion = prose + rf"$\boxed{{{answer}}}$."
        verdicts = [
            grade(completion, gold, name) for name in ("hendrycks", "deepscaler", "math_verify")
        ]
        assert verdicts == [bool(strings), bool(guarded), bool(judge)]


def test_shortcuts_say_what_math_verify_says():
    """Equal strings and numbers are not sent to the processes; those would say the same, but for the base of 52_8."""
    for answer, gold, *_, judge in VERDICTS:
        assert math_grader._judged(answer, gold) == bool(judge) or gold == "52_8"
        assert math_grader._judged(gold, gold)
    for answer, gold in [
        ("1,450,000", "1450000"),
        ("007", "7"),
        ("-3.50", "-3.5"),
        (r"\frac12", "1/2"),
    ]:
        assert math_grader.number(answer) == math_grader.number(gold) and math_grader._judged(
            answer, gold
        )
    for answer, gold in [("1,450,001", "1450000"), ("8", "7"), ("-3", "3"), ("0", "1000000")]:
        assert math_grader.number(answer) != math_grader.number(gold) and not math_grader._judged(
            answer, gold
        )


MORE = [  # answer, gold, verdict of Math-Verify
    ("5 or 7", "5", 0),
    ("5, 7", "5", 0),
    ("5 = 7", "5", 0),
    ("(1, 2)", "(2, 1)", 0),
    ("[1, 2]", "(1, 2)", 0),
    ("52_{8}", "52_8", 1),
    ("52_9", "52_8", 0),
    (r"1.45 \times 10^6", "1450000", 1),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
    (r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 0),
    (r"\{1, 2\}", r"\{2, 1\}", 1),
    ("(-\\infty, 2)", r"(-\infty,2)", 1),
    (r"-\frac12", r"\frac12", 0),
    ("3.14", r"\pi", 0),
    ("x", "y", 0),
    ("", "5", 0),
]


@pytest.mark.parametrize(("answer", "gold", "want"), MORE, ids=[f"{a} for {b}" for a, b, _ in MORE])
def test_more_verdicts_of_math_verify(answer, gold, want):
    assert grade(rf"\boxed{{{answer}}}", gold) == bool(want)


DEEPSCALER = [  # answer, gold, what yjyddq/DARE's verl/utils/reward_score/math_reward.py says
    ("0.50", r"\frac{1}{2}", 1),
    (r"\frac{3}{6}", "0.5", 1),
    (r"\frac{2}{6}", r"\frac{1}{3}", 0),
    ("7 3/4", r"\frac{31}{4}", 1),
    (r"1\frac{1}{2}", r"\frac{3}{2}", 1),
    (r"\frac12x", r"\frac{x}{2}", 1),
    ("2 million", "2000000", 0),
    ("(1,2]", "(1, 2]", 1),
    ("(1,2]", "(1,2)", 0),
    ("[1,2]", "(1,2)", 0),
    ("(2,1)", "(1,2)", 0),
    ("(0.5, 1)", r"\left(\frac{1}{2},1\right)", 1),
    ("x+1", "1+x", 1),
    ("a+b+c", "c+b+a", 0),  # three letters
    ("x^{2}+0", "x^2", 1),
    ("2^2*x", "4x", 1),
    ("2^10", "1024", 0),
    ("1024.0", "1024", 1),
    ("1023+1", "1024", 0),
    ("i^2+1", "0", 0),
    (r"\sqrt{8}", r"2\sqrt{2}", 1),
    ("sqrt(8)", r"2\sqrt2", 1),
    (r"2\pi", "6.28", 0),
    (r"\text{yes}", "Yes", 1),
    ("A and B", "B", 0),
    ("1 or 2", "1,2", 1),
    ("1 or 2", "2 or 1", 0),
    ("5 hours", "5", 1),
    ("5 cm^2", "5", 1),
    (r"\$5", "5", 1),
    (r"50\%", "0.5", 0),
    ("1,000", "1000", 1),
    (r"10,\!000", "10000", 1),
    ("1,00", "100", 0),
    ("1/0", "1", 0),
    ("(1", "1", 0),
    ("xyz=5", "5", 0),
]


@pytest.mark.parametrize(
    ("answer", "gold", "want"), DEEPSCALER, ids=[f"{a} for {b}" for a, b, _ in DEEPSCALER]
)
def test_more_verdicts_of_deepscaler(answer, gold, want):
    assert grade(rf"\boxed{{{answer}}}", gold, "deepscaler") == bool(want)


@pytest.mark.parametrize(
    ("answer", "gold", "want"),
    [("(6)", "6", 0), ("{6}", "6", 1), (r"{\frac{1}{2}}", r"\frac12", 1)],
)
def test_more_verdicts_of_hendrycks(answer, gold, want):
    """As OpenCompass says."""
    assert grade(rf"\boxed{{{answer}}}", gold, "hendrycks") == bool(want)


@pytest.mark.parametrize(
    ("answer", "want"),
    [
        ("1,450,000", 1450000),
        (r"1{,}450{,}000", 1450000),
        (r"\$18.00", 18),
        (r"50\%", 50),
        ("50%.", 50),
        (r"336^\circ", 336),
        (r"336^{\circ}", 336),
        ("$-7$", -7),
        (r"-\dfrac{1}{2}", Fraction(-1, 2)),
        (r"\frac12", Fraction(1, 2)),
        ("3/4", Fraction(3, 4)),
        (".5", Fraction(1, 2)),
        ("033", 33),
        (r"50 \%", 50),
        ("5 5", None),
        ("5\n5", None),
        ("1,45", None),
        ("1,2,3", None),
        ("3/0", None),
        (r"\frac{1}{0}", None),
        ("52_8", None),
        ("2x", None),
        ("1e9", None),
        ("٣", None),
        ("", None),
        (".", None),
        ("-", None),
    ],
)
def test_number(answer, want):
    assert math_grader.number(answer) == want


@pytest.mark.parametrize(
    ("completion", "gold", "want"),
    [
        ("so it is 18", "18", True),
        ("so it is 18 in 2 days", "18", False),
        (r"\boxed{18} in 2 days", "18", True),
        (r"\boxed{x = 18 \text{ eggs}} 5", "18", True),
        ("it costs $1,450,000.", "1450000", True),
        (r"it is \frac{1}{2}", "0.5", True),
        ("20 - 18", "18", True),
        ("it is -18", "-18", True),
        ("it is -18", "18", False),
        ("none", "18", False),
        ("x", "x", False),  # the rule knows numbers alone
        ("3/0", "3", False),
    ],
)
def test_last_number(completion, gold, want):
    assert grade(completion, gold, "last_number") == want


# ---------------------------------------------------------------------------------------------------------------------
# hostile text and processes

HOSTILE = [
    "",
    " \n\t",
    "\x00",
    "\ud800",
    "\\boxed{",
    "{" * 5000,
    "}" * 5000,
    "\\boxed{" * 5000,
    "\\boxed{}",
    "\\boxed{\x00}",
    "\\boxed{\ud800}",
    "\\boxed{\\}",
    "\\boxed{\\frac{1}{0}}",
    "\\boxed{" + "(" * 20 + "}",
    "\\boxed{\\text{}}",
    "\\boxed{\\sqrt}",
    "\\boxed{\\frac}",
    "\\boxed{%\n}",
    "\\boxed{$$}",
    "\\boxed{[5}",
    "\\boxed{5\n5}",
    "\\boxed{" + "9" * 500 + "!}",
    "\\boxed{" + "1," * 200 + "}",
    "x" * 10**6,
    "1 " * 5 * 10**5,
    "\\boxed{" + "1" * 10**6 + "}",
]


@pytest.mark.parametrize("completion", HOSTILE, ids=lambda text: ascii(text)[:24])
def test_hostile_text_is_wrong_and_never_raises(completion):
    for name in GRADERS:
        for gold in ("5x", r"\frac{3}{7}", r"\left( 3, \frac{\pi}{2} \right)"):
            assert grade(completion, gold, name) is False
            assert grade(completion, gold, name) is False, "the same again"


@pytest.mark.parametrize("name", GRADERS)
def test_an_answer_cut_at_any_place_is_no_error(name):
    completion = r"So $x = \frac{1}{2}$, and the answer is $\boxed{\frac{1}{2}}$."
    verdicts = [grade(completion[:end], r"\frac{1}{2}", name) for end in range(len(completion) + 1)]
    assert verdicts[-3:] == [True] * 3
    if name != "last_number":
        assert not any(verdicts[:-3]), "only a complete box counts"


@pytest.fixture
def quick_timeout(monkeypatch):
    math_grader.close()
    math_grader._verdict.cache_clear()
    ask = math_grader.Worker.ask

    def asked(worker, answer, *rest):  # what has an end reaches it on a busy machine too
        monkeypatch.setattr(math_grader, "TIMEOUT", 0.5 if answer == ENDLESS else 60.0)
        return ask(worker, answer, *rest)

    monkeypatch.setattr(math_grader.Worker, "ask", asked)
    yield
    math_grader._verdict.cache_clear()
    math_grader.close()


ENDLESS = r"2^{2^{2^{100}}}"


def test_an_endless_answer_is_killed_and_the_next_is_judged(quick_timeout, capsys):
    workers, start = [], math_grader.Worker.__init__

    def recorded(self):
        start(self)
        workers.append(self.process)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math_grader.Worker, "__init__", recorded)
        assert grade(rf"\boxed{{{ENDLESS}}}", "5") is False
        assert workers[0].returncode == -signal.SIGKILL
        assert "counted as wrong: '2^{2^{2^{100}}}'" in capsys.readouterr().err
        assert grade(r"\boxed{x+x}", "2x") is True
        assert grade(rf"\boxed{{{ENDLESS}}}", "5") is False
        assert len(workers) == 2, "an answer that killed a process is not asked again"
        # a process that somebody else kills is replaced
        workers[1].kill()
        workers[1].wait()
        assert grade(r"\boxed{y+y}", "2y") is True
        assert len(workers) == 3 and len(math_grader.IDLE) == 1


def test_model_text_is_not_run(tmp_path, quick_timeout):
    for code in (
        f"__import__('os').system('touch {tmp_path}/x')",
        f"open('{tmp_path}/x','w')",
        "exit()",
        "quit(0)",
    ):
        assert (
            grade(rf"\boxed{{{code}}}", "5") is False
            and grade(rf"\boxed{{{code}}}", "5", "deepscaler") is False
        )
    assert not list(tmp_path.iterdir())


def test_the_processes_know_no_secret(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    worker = math_grader.Worker()
    try:
        environment = Path(f"/proc/{worker.process.pid}/environ")
        assert not environment.exists() or b"secret" not in environment.read_bytes()
        assert worker.ask("1+1", "2") is True and worker.ask("1+1", "3") is False
    finally:
        worker.kill()


def test_batches_threads_and_forks():
    completions = [rf"\boxed{{{i}+x}}" for i in range(30)]
    golds = [f"x+{i - i % 3 // 2}" for i in range(30)]
    want = [i % 3 != 2 for i in range(30)]
    assert (
        grade_batch(completions, golds)
        == want
        == [grade(*pair) for pair in zip(completions, golds, strict=True)]
    )
    assert grade_batch([], []) == []
    found = []
    thread = threading.Thread(
        target=lambda: found.append(grade(r"\boxed{y+y}", "2y"))
    )  # no alarm in a thread
    thread.start()
    thread.join()
    assert found == [True]
    assert math_grader.IDLE
    if not (child := os.fork()):
        os._exit(bool(math_grader.IDLE))  # a child does not ask the parent's processes
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(ValueError):
        grade_batch(["5"], [])


def test_unknown_grader():
    assert (
        one_line(lambda: grade("5", "5", "sympy"))
        == "grader 'sympy': use one of math_verify, hendrycks, deepscaler, last_number"
    )


# ---------------------------------------------------------------------------------------------------------------------
# benchmarks: rows, prompts

PROBLEM = {
    "problem": "How much?",
    "answer": r"\frac{1}{2}",
    "solution": r"It is $\boxed{\frac{1}{2}}$.",
}
EXAMPLE = {
    "question": "How much?",
    "gold": r"\frac{1}{2}",
    "solution": r"It is $\boxed{\frac{1}{2}}$.",
}


def dare(content, gold):
    return {
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"ground_truth": gold, "style": "rule"},
    }


@pytest.mark.parametrize(
    ("row", "want"),
    [
        (PROBLEM, EXAMPLE),
        (PROBLEM | {"answer": None}, EXAMPLE),
        (PROBLEM | {"solution": None}, EXAMPLE | {"solution": ""}),
        (PROBLEM | {"answer": 18}, EXAMPLE | {"gold": "18"}),
        (dare("How much?", r"\frac{1}{2}"), EXAMPLE | {"solution": ""}),
        (
            dare(math500.prompt(EXAMPLE)[0]["content"], r"\boxed{\frac{1}{2}}"),
            EXAMPLE | {"solution": ""},
        ),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_of_every_format(tmp_path, row, want, suffix):
    path = write(tmp_path / f"rows.{suffix}", [row] * 3)
    assert math500.load("test", path) == math500.load("train", path) == [want] * 3
    assert math500.load("test", path, limit=2) == [want] * 2


@pytest.mark.parametrize("task", [math500, aime24, aime25], ids=lambda task: task.__name__)
def test_bad_rows_are_named(tmp_path, task):
    good = PROBLEM | {"answer": "033"}
    for bad in (
        {"problem": "How much?"},
        good | {"answer": True},
        good | {"problem": 5},
        {"prompt": [], "reward_model": {}},
    ):
        path = write(tmp_path / "rows.jsonl", [good, bad])
        message = one_line(lambda path=path: task.load("test", path))
        assert (
            message.startswith(f"{path} row 2: cannot read a problem from ")
            and "needs problem and answer" in message
        )
        assert len(task.load("test", path, limit=1)) == 1
    assert "--data missing.jsonl: no such" in one_line(lambda: task.load("test", "missing.jsonl"))


@pytest.mark.parametrize("task", [aime24, aime25], ids=lambda task: task.__name__)
def test_aime_golds_are_integers(tmp_path, task):
    for gold, want in (("033", "33"), (r"336^\circ", "336"), (7, "7"), ("0", "0")):
        assert (
            task.load("test", write(tmp_path / "rows.jsonl", [PROBLEM | {"answer": gold}]))[0][
                "gold"
            ]
            == want
        )
    for gold in (r"\frac{1}{2}", "1000", "-1", "x"):
        path = write(tmp_path / "rows.jsonl", [PROBLEM | {"answer": gold}])
        assert "integer from 0 to 999" in one_line(lambda path=path: task.load("test", path))
    for split in ("train", "validation"):
        assert "has test alone" in one_line(lambda split=split: task.load(split))
    example = {"question": "?", "gold": "33", "solution": ""}
    right = [
        r"\boxed{33}",
        r"\boxed{033}",
        r"1 \boxed{x = 33} 2",
        r"\boxed{33^\circ}",
        r"\boxed{33} \boxed{",
        r"\boxed{33.0}",
    ]
    wrong = [
        "33",
        r"\boxed{34}",
        r"\boxed{3 3}",
        r"\boxed{33} \boxed{34}",
        r"\boxed{33, 34}",
        r"\boxed{-33}",
        "",
        "\\boxed{",
    ]
    assert [task.score(text, example) for text in right + wrong] == [1.0] * len(right) + [
        0.0
    ] * len(wrong)
    assert all(task.score(text, example) == 0.0 for text in HOSTILE)


def test_prompts():
    ask = lambda task: task.prompt({"question": "How much?"})
    boxed = "How much?\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert ask(math500) == ask(aime24) == [{"role": "user", "content": boxed}]
    d1 = math500.prompt({"question": "How much?", "style": "tags"})[0]["content"].split("\n")
    assert d1[:-2] == ["", "Respond in the following format:", "<reasoning>", "...", "</reasoning>", "<answer>", "...",
                       "</answer>", "", "", "You are a math expert. You will be given a question to solve. Solve it step by "
                       "step. Wrap the final answer in a \\boxed{}. "]  # fmt: skip
    assert d1[-2:] == ["", "How much?"]
    assert ask(aime25) == [
        {
            "role": "user",
            "content": "How much?\nRemember to put your final answer within \\boxed{}.",
        }
    ]


def test_answers_and_rewards():
    assert math500.score(math500.answer(EXAMPLE), EXAMPLE) == 1.0
    other = EXAMPLE | {"gold": "0.5"}
    assert (
        math500.answer(other).endswith("The answer is $\\boxed{0.5}$.")
        and math500.answer(EXAMPLE) == EXAMPLE["solution"]
    )
    assert "no worked solutions" in one_line(lambda: math500.answer(EXAMPLE | {"solution": ""}))
    half = [r"\boxed{0.5}", r"\boxed{\frac12}", "0.5", r"\boxed{1}"]
    assert math500.score_batch(half, [EXAMPLE] * 4) == [1.0, 1.0, 0.0, 0.0]
    reward = lambda name: [
        parts["correct"] for parts in load_reward(name, math500)(half, [EXAMPLE] * 4)
    ]
    assert reward("math500_hendrycks") == [0.0, 1.0, 0.0, 0.0]
    assert reward("math500_deepscaler") == [1.0, 1.0, 0.0, 0.0]
    assert reward("math500_last_number") == [1.0, 1.0, 1.0, 0.0]
    assert "--data d1" in one_line(lambda: REWARDS["math500_d1"]("0.5", EXAMPLE))


D1 = {  # completion -> correctness, layout: the paper's 1, 0.75, 0.5, 0.25; its code pays 0.75 or 0.25
    r"<reasoning>\nwhy\n</reasoning>\n<answer>\n\boxed{\frac12}\n</answer>": (2.0, 1.0),
    r"<answer>\boxed{1}</answer>": (0.0, 1.0),
    r"\boxed{\frac{1}{2}} <answer>a half</answer>": (2.0, 0.75),
    r"<answer>\frac12</answer>": (0.0, 0.75),  # 2.0 in d1's code where nothing else is said
    r"so \boxed{\frac12}": (2.0, 0.5),
    r"<answer>\boxed{\frac12}": (2.0, 0.5),  # a tag in d1's code
    r"\frac12": (0.0, 0.25),
    "": (0.0, 0.25),
}


@pytest.mark.parametrize(("completion", "want"), D1.items(), ids=lambda text: repr(text)[:40])
def test_d1_reward(completion, want):
    assert tuple(REWARDS["math500_d1"](completion, EXAMPLE | {"style": "tags"}).values()) == want
    assert load_task("math500") is math500


def test_hub_rows(monkeypatch):
    """The parts of the train split are one; MATH-500 is the test set, or all parts with --data full."""
    asked = []

    def rows(path, split, presets, limit=None, config=None):
        asked.append((path, split, config))
        problem = lambda i: {
            "problem": f"{config} {split} {i}?",
            "level": "Level 1",
            "type": "A",
            "solution": f"\\boxed{{{i}}}",
        }
        return (
            [problem(i) for i in range(100)] + [problem(0) | {"solution": "none"}]
            if config
            else [PROBLEM] * 3
        )

    monkeypatch.setattr(math500, "read_rows", rows)
    assert math500.load("test") == [EXAMPLE] * 3 and asked == [
        ("HuggingFaceH4/MATH-500", "test", None)
    ]
    train, validation = math500.load("train"), math500.load("validation")
    assert len(train) == 188 and len(validation) == 512, "700 rows with a box"
    assert len({row["question"] for row in train + validation}) == 700
    assert math500.load("validation", limit=3) == validation[:3]
    full = math500.load("test", "full")
    assert len(full) == 700 and full[1] == {
        "question": "algebra test 1?",
        "gold": "1",
        "solution": "\\boxed{1}",
    }
    assert math500.load("train", "full") == train
    assert math500.load("train", "d1") == [row | {"style": "tags"} for row in train]
    assert {path for path, *_ in asked[1:]} == {"EleutherAI/hendrycks_math"} and len(
        {config for *_, config in asked[1:]}
    ) == 7
    assert math500.load("test", "d1") == [EXAMPLE | {"style": "tags"}] * 3


def test_rows_without_an_answer_are_left_out_and_counted(tmp_path, capsys):
    empty = [
        dare("?", None),
        dare("?", ""),
        PROBLEM | {"answer": ""},
        {"problem": "?", "solution": "no box"},
    ]
    assert (
        math500.load("test", path := write(tmp_path / "rows.jsonl", [PROBLEM, *empty, PROBLEM]))
        == [EXAMPLE] * 2
    )
    assert capsys.readouterr().err == f"{path}: 4 of 6 rows left out: they have no answer\n"
    for task in (aime24, aime25):
        assert "row 1: cannot read" in one_line(
            lambda task=task: task.load("test", write(tmp_path / "rows.jsonl", empty))
        )


# ---------------------------------------------------------------------------------------------------------------------
# the real files


@needs_files
@pytest.mark.parametrize("grader", ["math_verify", "hendrycks", "deepscaler"])
def test_gold_answers_of_math_500_are_right_and_a_constant_is_not(grader):
    examples = math500.load("test", str(FILES / "dare/test_math500_1.parquet"))
    golds = [example["gold"] for example in examples]
    assert len(golds) == 500
    boxed = [
        f"First 7, then $\\boxed{{0}}$ no.\nSo $\\boxed{{{gold}}}$ in 2 days." for gold in golds
    ]
    assert (
        all(grade_batch(boxed, golds, grader))
        and math500.score_batch(boxed, examples) == [1.0] * 500
    )
    assert not any(grade_batch(golds, golds, grader)), "no box"
    twos = grade_batch([r"\boxed{2}"] * 500, golds, grader)
    assert sum(twos) == sum(gold == "2" for gold in golds) > 0
    # the answer of the next problem: right only where the two are the same
    shifted = grade_batch(boxed[1:] + boxed[:1], golds, grader)
    same = [gold == other for gold, other in zip(golds, golds[1:] + golds[:1], strict=True)]
    equal = [i for i in range(500) if shifted[i] != same[i]]
    assert [(golds[i], golds[(i + 1) % 500]) for i in equal] == [("5", "x=5")]


@needs_files
def test_math_verify_itself_reads_the_golds():
    """Without the shortcuts for equal strings, every seventh of MATH-500 and every hundredth of the train split."""
    for name, step in (("test_math500_1", 7), ("train_math_1", 100)):
        golds = [
            example["gold"] for example in math500.load("test", str(FILES / f"dare/{name}.parquet"))
        ][::step]
        assert [gold for gold in golds if not math_grader._judged(f"{gold} ", gold)] == []


@needs_files
def test_train_rows():
    train = math500.load("train", str(FILES / "dare/train_math_1.parquet"))
    test = math500.load("test", str(FILES / "dare/test_math500_1.parquet"))
    assert len(train) == 7470 and not {row["question"] for row in train} & {
        row["question"] for row in test
    }
    assert all(math500.score(rf"\boxed{{{row['gold']}}}", row) == 1.0 for row in train)


@needs_files
@pytest.mark.parametrize(("task", "name"), [(aime24, "test_aime2024"), (aime25, "test_aime2025")])
def test_aime(task, name):
    examples = task.load("test", str(FILES / f"dare/{name}.parquet"))
    assert len(examples) == 30 and all(example["gold"].isdecimal() for example in examples)
    assert [task.score(f"\\boxed{{{int(row['gold']):03}}}", row) for row in examples] == [1.0] * 30
    assert not any(task.score(f"\\boxed{{{int(row['gold']) + 1}}}", row) for row in examples)
    assert not any(task.score("", row) or task.score(row["gold"], row) for row in examples)


@needs_files
def test_completions_end_to_end(tmp_path, monkeypatch, capsys):
    path = str(FILES / "dare/test_math500_1.parquet")
    examples = math500.load("test", path)
    rows = [
        {"index": i, "completion": rf"\boxed{{{row['gold']}}}" if i % 5 else "none"}
        for i, row in enumerate(examples)
    ]
    flags = [
        "--completions",
        write(tmp_path / "given.jsonl", rows),
        "--data",
        path,
        "--out",
        str(tmp_path / "out"),
    ]
    result = cli(monkeypatch, capsys, *flags, "--reward", "math500_hendrycks", task="math500")
    assert (result["n"], result["accuracy"], result["answered"]) == (500, 0.8, 0.8)
    assert result["reward"]["components"] == {"correct": 0.8}
