"""Rewards of whole rollouts: one batch says what single calls say, whatever stands in it; and runs of a script on real tasks.

The files are read from the folder in CLEANDLLM_DATA; without it their tests are skipped.
"""

import json
import multiprocessing
import re
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # noqa: F401, else every child imports it for itself
from test_choices import ROWS as CHOICES
from test_code_evals import ADD, MUL, PRODUCT, WHOLE
from test_evals import BOARD, FILES, SMALL, WORDS, needs_files, one_line, write

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import runlog
from algos import bgpo
from data.stream import ShuffledStream
from evals import TRAIN_TASKS, load_problems, load_task, math_grader, programs, sandbox
from evals.rewards import REWARDS, load_reward
from models import load_tokenizer
from rollout import Trace

pytestmark = pytest.mark.usefixtures("patient")

HALF = {
    "question": "How much?",
    "gold": r"\frac{1}{2}",
    "solution": r"It is $\boxed{\frac{1}{2}}$.",
}
OLYMPIAD = {
    "question": "?",
    "gold": "7.4",
    "error": [0.1],
    "multiple": False,
    "type": "Numerical",
    "unit": False,
}
OLYMPIAD |= {"field": "Math"}
BBH = {"question": "not True is", "gold": "False", "subject": "boolean_expressions", "shots": ""}
CHOICE = {
    "question": "Which?",
    "options": list("wxyz"),
    "gold": "C",
    "subject": "x",
    "style": "direct",
    "shots": [],
}
CONTEST = {"question": "?", "starter": "", "name": "", "public": [["1", "2"]], "source": "x"}
CONTEST |= {"private": '[{"input": "2", "output": "3"}]'}
NUMBERS = {"question": "How many?", "gold": "18", "solution": ""}
TASKS = {  # example, right completions, wrong ones
    "aime24": (NUMBERS, [r"\boxed{018}"], ["18", r"\boxed{19}"]),
    "aime25": (NUMBERS, [r"\boxed{18}"], [r"\boxed{18.5}"]),
    "arc_c": (CHOICES[0][2], ["B", "The answer is B."], ["A"]),
    "bbh": (BBH, ["the answer is False."], ["the answer is True."]),
    "ceval": (CHOICE, ["答案是C"], ["B"]),
    "countdown": (SMALL, ["12-7+3"], ["12+7+3", "12/0"]),
    "gpqa": (CHOICE, ["The correct answer is (C)"], ["The correct answer is (D)"]),
    "gsm8k": (WORDS, ["<answer>18</answer>"], ["<answer>19</answer>", "18"]),
    "hellaswag": (CHOICES[2][2], ["C"], ["A"]),
    "humaneval": (
        ADD,
        [WHOLE, "    return a + b"],
        ["    return a - b", "import os; os._exit(0)", "(" * 5000],
    ),
    "humaneval_plus": (ADD, [WHOLE], ["    pass"]),
    "livecodebench": (CONTEST, ["print(int(input()) + 1)"], ["print(2)", "import os; os._exit(0)"]),
    "math500": (HALF, [r"\boxed{0.5}", r"\boxed{\frac{2}{4}}"], [r"\boxed{\frac{1}{3}}", "0.5"]),
    "mbpp": (
        PRODUCT,
        [MUL, f"[BEGIN]\n'{MUL}'\n[DONE]"],
        ["def mul(a, b): return a", "def mul(a, b): raise SystemExit(0)"],
    ),
    "mmlu": (CHOICE, ["C"], ["D"]),
    "mmlu_pro": (CHOICES[5][2], ["ANSWER: J"], ["ANSWER: A"]),
    "olympiad": (OLYMPIAD, [r"\boxed{7.35}", r"\boxed{\frac{15}{2}}"], [r"\boxed{7.6}"]),
    "sudoku": (BOARD, [BOARD["solution"]], ["1" * 16]),
}
HOSTILE = ["", " \n", "\x00", "\ud800", "\\boxed{" * 3000, "x" * 1_000_001]


def test_every_task_is_here():
    message = one_line(lambda: load_task(""))
    assert sorted(TASKS) == message.partition("use one of ")[2].split(", ")


@pytest.mark.parametrize("name", TASKS)
def test_a_batch_says_what_single_calls_say(name):
    task, (example, right, wrong) = load_task(name), TASKS[name]
    texts = [*right, *HOSTILE[:4], *wrong, *HOSTILE[4:], *right]  # the right ones twice
    want = [
        {"score": float(i < len(right) or i >= len(texts) - len(right))} for i in range(len(texts))
    ]
    assert load_reward("", task)(texts, [example] * len(texts)) == want
    few = texts[:-2]
    assert [task.score(text, example) for text in few] == [parts["score"] for parts in want[:-2]]


def test_equal_completions_of_one_example_are_judged_once(monkeypatch):
    asked = []
    judge = programs.run_batch
    monkeypatch.setattr(programs, "run_batch", lambda jobs: asked.extend(jobs) or judge(jobs))
    other = PRODUCT | {"tests": ["assert mul(1, 3) == 4"]}
    texts, examples = [MUL, MUL, "", MUL, MUL], [PRODUCT, PRODUCT, PRODUCT, other, PRODUCT]
    got = load_reward("", load_task("mbpp"))(texts, examples)
    assert [parts["score"] for parts in got] == [1.0, 1.0, 0.0, 0.0, 1.0] and len(asked) == 2
    got[0]["score"] = 5.0
    assert got[1]["score"] == 1.0, "each has components of its own"
    with pytest.raises(ValueError):
        load_reward("", load_task("mbpp"))([MUL], [])


def test_programs_that_kill_do_not_change_the_others_of_their_batch():
    killers = [
        "import os\ndef mul(a, b):\n  os.kill(-1, 9)",
        "def mul(a, b): return [0] * 10**12",
        "import os; os._exit(0)",
    ]
    texts = [text for killer in killers for text in (MUL, killer)]
    got = load_reward("", load_task("mbpp"))(texts, [dict(PRODUCT) for _ in texts])
    assert [parts["score"] for parts in got] == [1.0, 0.0] * 3


def test_an_answer_that_kills_the_grader_does_not_change_the_others_of_its_batch(
    monkeypatch, capsys
):
    """Its process is ended, it is named on stderr, and every other answer has its verdict."""
    ask, killed = math_grader.Worker.ask, []

    def asked(worker, answer, *rest):
        if answer == "k":  # what an answer does that takes all memory
            worker.process.kill()
            worker.process.wait()
            killed.append(worker)
        return ask(worker, answer, *rest)

    math_grader._verdict.cache_clear()
    monkeypatch.setattr(math_grader, "TIMEOUT", 60.0)
    monkeypatch.setattr(math_grader.Worker, "ask", asked)
    answers = ["x+x", "k", "y+x", "2x+0", "2x+1"]
    example = HALF | {"gold": "2x"}
    got = load_reward("", load_task("math500"))(
        [rf"\boxed{{{answer}}}" for answer in answers], [example] * 5
    )
    assert [parts["score"] for parts in got] == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert len(killed) == 1 and "counted as wrong: 'k'" in capsys.readouterr().err
    math_grader._verdict.cache_clear()


def test_diffucoder_pays_for_each_test_that_passes():
    """And for nothing but a whole block; an early exit, by which every test passes there, earns the format alone."""
    example = PRODUCT | {
        "tests": ["assert mul(2, 3) == 6", "assert mul(0, 1) == 0", "assert mul(1, 2) == 3"]
    }
    whole = {"block": 0.25, "syntax": 0.25}
    texts = {
        f"```python\n{MUL}\n```": whole | {"passed": pytest.approx(4 / 3)},
        "```python\nmul = lambda a, b: a + b\n```": whole | {"passed": pytest.approx(2 / 3)},
        "```python\nimport sys\nsys.exit(0)\n```": whole | {"passed": 0.0},
        f"```python\n{MUL} +\n```": {"block": 0.25, "syntax": 0.0, "passed": 0.0},
        MUL: {"block": 0.0, "syntax": 0.0, "passed": 0.0},
    }
    assert load_reward("mbpp_diffucoder", load_task("mbpp"))(
        list(texts), [example] * len(texts)
    ) == list(texts.values())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_is_refused_with_its_place(value, monkeypatch):
    odd = lambda completion, example: {"a": 1.0, "b": value if completion == "x" else 0.0}
    monkeypatch.setitem(REWARDS, "odd", odd)
    reward = load_reward("odd", load_task("countdown"))
    assert reward(["y"], [SMALL]) == [{"a": 1.0, "b": 0.0}]
    message = one_line(lambda: reward(["y", "y", "x"], [SMALL] * 3))
    assert (
        message
        == f"--task countdown: b of completion 2 of 3 is {value}, not finite; --reward odd, completion 'x'"
    )


def test_tasks_without_a_train_split_say_what_to_train_on(monkeypatch):
    """At the start of a script, before anything is fetched or a model is built."""

    def fetch(*arguments, **named):
        raise AssertionError("fetched")

    for name in TASKS:
        task = load_task(name)
        if name not in TRAIN_TASKS:
            for module in {task, load_task("humaneval"), load_task("aime24")}:
                if hasattr(module, "read_rows"):
                    monkeypatch.setattr(module, "read_rows", fetch)
            assert "train on" in one_line(
                lambda task=task: load_problems(task, "train", "", None, 1024)
            ), name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bgpo, "meta_model", fetch)
        message = exit_of(lambda: bgpo.main(bgpo.Args(task="humaneval")))
    assert (
        message
        == "--split train: openai/openai_humaneval has test alone; train on --task mbpp, or name a file with --data"
    )


def test_a_prompt_with_the_mask_token_ends_a_run_before_its_first_step(tmp_path):
    """Samplers refuse it: else the run would end at the step that draws this problem."""
    file, tokenizer = tmp_path / "train.jsonl", load_tokenizer("tiny-sdar")
    rows = [{"question": f"How {word}?", "answer": "#### 1"} for word in ("many", "<|MASK|>")]
    load = lambda: load_problems(load_task("gsm8k"), "train", str(file), tokenizer, 9999)
    write(file, rows)
    assert (
        one_line(load) == f"--data {file}: train prompt 1 holds the mask token <|MASK|>: remove it"
    )
    write(file, rows[:1])
    assert len(load()[0]) == 1


# ---------------------------------------------------------------------------------------------------------------------
# runs of a script


def exit_of(run):
    """The message of the SystemExit of `run`, "" where it ends without one; in a process of its own."""

    def child(pipe):
        torch.set_num_threads(1)
        runlog.RunLog.plot = lambda self: None
        try:
            run()
            pipe.send("")
        except SystemExit as error:
            pipe.send(str(error))

    receive, send = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=child, args=(send,))
    process.start()
    send.close()
    try:
        return receive.recv()
    finally:
        process.join()


def arguments(task, data, out, **changed):
    small = dict(
        prompts_per_step=2,
        num_generations=4,
        max_steps=2,
        eval_limit=2,
        eval_every=1,
        mc_num=1,
        gen_length=4,
    )
    small |= dict(max_prompt_length=400, eval_data=data, out=str(out))
    return bgpo.Args(task=task, data=data, **small | changed)


def test_a_reward_that_is_not_finite_stops_a_run_before_its_update(tmp_path, monkeypatch):
    data = write(tmp_path / "rows.jsonl", [{"input": "12,7,3", "output": "8"}] * 4)
    calls = []  # the first is the trial that a script makes at its start
    monkeypatch.setitem(
        REWARDS, "odd", lambda *given: {"b": float("nan") if calls else calls.append(0) or 0.0}
    )

    def forward(*arguments):
        raise AssertionError("an update began")

    monkeypatch.setattr(bgpo, "make_batch", forward)
    monkeypatch.setattr(bgpo, "draw_logps", forward)
    message = exit_of(
        lambda: bgpo.main(
            arguments("countdown", data, tmp_path / "out", reward="odd", max_prompt_length=600)
        )
    )
    assert re.match(
        r"--task countdown: b of completion \d of 8 is nan, not finite; --reward odd", message
    ), message
    monkeypatch.setitem(REWARDS, "odd", lambda completion, example: {"b": float("nan")})
    message = exit_of(
        lambda: bgpo.main(
            arguments("countdown", data, tmp_path / "out", reward="odd", max_prompt_length=600)
        )
    )
    assert re.match(
        r"--task countdown: b of completion 0 of 1 is nan, not finite; --reward odd", message
    ), message


@pytest.mark.parametrize("reward", ["", "mbpp_diffucoder"])
def test_a_broken_sandbox_ends_a_run_in_one_line_before_anything_is_loaded(
    reward, tmp_path, monkeypatch
):
    row = {
        "text": "Double it.",
        "code": "def f(x): return 2 * x",
        "test_list": ["assert f(2) == 4"],
    }
    data = write(tmp_path / "rows.jsonl", [row] * 4)
    monkeypatch.setattr(load_task("mbpp"), "SHOTS", [])

    def meta_model(*given):
        raise SystemExit("the model is next")

    monkeypatch.setattr(bgpo, "meta_model", meta_model)
    run = lambda: bgpo.main(arguments("mbpp", data, tmp_path / "out", reward=reward))
    assert exit_of(run) == "the model is next"
    monkeypatch.setattr(sandbox, "CHILD", tmp_path / "no_such_file.py")
    message = exit_of(run)
    assert message.startswith("sandbox: no answer from its supervisor") and "\n" not in message


@needs_files
@pytest.mark.parametrize(
    ("task", "file"), [("mbpp", "mbpp/mbpp.jsonl"), ("math500", "dare/train_math_1.parquet")]
)
def test_a_run_has_the_rewards_of_its_completions(task, file, tmp_path, monkeypatch):
    """Two steps of BGPO on real rows. The tiny model solves nothing, so its texts are replaced by right and wrong answers to
    the problems of that step, in an order that the log must show."""
    module, tokenizer = load_task(task), load_tokenizer("tiny-sdar")
    load = module.load
    monkeypatch.setattr(module, "load", lambda split, path=None, limit=None: load(split, path, 12))
    monkeypatch.setattr(
        load_task("mbpp"), "SHOTS", []
    )  # the shown tasks are 1,500 tokens of the tiny model
    args = arguments(task, str(FILES / file), tmp_path / "out")
    stream = ShuffledStream(
        load_problems(module, "train", args.data, tokenizer, args.max_prompt_length)[0], args.seed
    )
    right, traces = [[1, 0, 0, 1, 0, 0, 0, 1], [0, 1, 1, 1, 1, 1, 0, 0]], []

    def text(trace, i, tokenizer):
        if len(trace.completion_ids) != 8:
            return ""  # of an evaluation
        if not any(trace is seen for seen in traces):
            traces.append(trace)
        step = len(traces) - 1
        example = stream[2 * step + i // 4][0]
        gold = (
            module.answer(example)
            if task == "mbpp"
            else rf"So it is $\boxed{{{example['gold']}}}$."
        )
        return gold if right[step][i] else "I do not know."

    monkeypatch.setattr(Trace, "text", text)
    assert exit_of(lambda: bgpo.main(args)) == ""
    (directory,) = (tmp_path / "out").iterdir()
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "reward/mean" in row]
    assert [row["reward/mean"] for row in rows] == [3 / 8, 5 / 8] and not any(
        row["reward/zero_std_frac"] for row in rows
    )
    assert all(f"eval/{task}" in row for row in rows)
    samples = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in samples] == [*right[0][:4], *right[1][:4]]
