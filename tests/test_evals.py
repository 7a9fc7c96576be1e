"""Scorers, rewards, prompts and loaders, on a table of verdicts and on the benchmarks' real files.

tests/golden/evals.jsonl has the verdicts of every task and reward on hand-written completions,
one right and one wrong completion of each task, examples read from rows of every layout (null:
refused), and prompts. Real files are read from the folder in CLEANDLLM_DATA; without it their tests
are skipped.
"""

import json
import os
import sys
import time
from collections import Counter
from functools import partial
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from sync_shared import ROOT

from algos import tracerl
from data.planning import stable_hash
from data.rows import read_rows
from evals import (
    load_problems,
    load_splits,
    load_task,
    math_grader,
    programs,
    score_all,
)
from evals.math_grader import number
from evals.rewards import REWARDS, load_reward, sum_of_parts
from evals.samples import scored
from evals.sandbox import in_threads
from models import load_tokenizer
from rollout.traces import Completion

DATA = os.environ.get("CLEANDLLM_DATA")
needs_files = pytest.mark.skipif(not DATA, reason="set CLEANDLLM_DATA to the benchmarks' files")
pytestmark = pytest.mark.usefixtures("patient")
GOLDEN = [json.loads(line) for line in (ROOT / "tests/golden/evals.jsonl").read_text().splitlines()]
TASKS = sorted({case["task"] for case in GOLDEN if "scores" in case})
PRIVATE = {"private": ""}
TRAIN = "arc_c countdown gsm8k math500 mbpp qa sudoku".split()
RECALL = {  # of judged completions, at least: of the forms that scorers were tuned on, of others
    "number": (0.91, 0.99),
    "expression": (0.89, 0.45),
    "latex": (0.76, 0.79),
    "letter": (0.96, 0.77),
    "list": (0.92, 0.62),
    "program": (0.99, 0.99),
    "grid": (0.82, 0.73),
}
HOSTILE = [
    "", " \n\t", "\x00", "\ud800", "{" * 5000, "}" * 5000, r"\boxed{" * 5000, r"\boxed{}",
    "\\boxed{\\}", r"\boxed{\frac{1}{0}}", r"\boxed{" + "(" * 500 + "}", r"\boxed{(,)}",
    r"\boxed{" + r"1\pm" * 100 + "}", "<answer>" + "(" * 10**5 + "</answer>",
    "<answer>" + "[" * 10**5 + "</answer>",
    "[BEGIN]'" + "-" * 50_000 + "1", "```python\n" + "(" * 5000 + "\n```", "x" * 10**5,
    "9" * 10**5, "1 " * 10**4, "answer is " * 10**4, "A\n" * 10**4, "-" * 500 + "1",
    "1" + " " * 10**5, "#### " * 10**4, "$ " * 10**4,
    "<answer>" + "`" * 50_000 + "</answer>", "```python\n" * 10**5, "@\n" * 10**5,
    "<answer>" * 10**5, *("```" + mark * 10**5 + "`" for mark in " a\t"),
    "```python\ndef add(): a0\n```" + "".join(f"\ndef a{n}(): a{n + 1}" for n in range(30_000)),
]  # fmt: skip


def of(kind, task=None):
    return [case for case in GOLDEN if kind in case and task in (None, case.get("task"))]


def one_line(call, *arguments):
    """The message, of one line, of the SystemExit that the call must raise."""
    with pytest.raises(SystemExit) as exit:
        call(*arguments)
    assert str(exit.value) and "\n" not in str(exit.value)
    return str(exit.value)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("task", TASKS)
def test_verdicts(task):
    """Scores, single and in a batch, and extracted answers."""
    module, wrong = load_task(task), []
    for case in of("scores", task):
        texts, example = [text for text, _, _ in case["scores"]], case["example"]
        scores = score_all(module, texts, [example] * len(texts))
        for (text, score, answer), found in zip(case["scores"], scores, strict=True):
            if (found, module.extract(text, example)) != (score, answer):
                wrong.append((text, found, module.extract(text, example)))
        assert module.score(texts[0], example) == scores[0]
    assert not wrong


@pytest.mark.parametrize("family", RECALL)
def test_judged(family):
    """tests/judged: gold answers are right, cheats wrong, and verdicts on what models write are
    those of a reader, as often as docs/evals.md says. Scorers may not be tuned on the forms whose
    hash is divisible by 3."""
    counts = Counter()
    lines = (ROOT / f"tests/judged/{family}.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines[:: 4 if family == "program" else 1]:  # to run programs takes time
        case = json.loads(line)
        task, example, cheats = load_task(case["task"]), case["example"], case["cheats"]
        forms, judged, verdicts = zip(*case["judged"], strict=True)
        texts = [task.answer(example), *cheats, *judged]
        gold, *scores = score_all(task, texts, [example] * len(texts))
        assert gold == 1.0 and not any(scores[: len(cheats)])
        for form, verdict, score in zip(forms, verdicts, scores[len(cheats) :], strict=True):
            held_out = stable_hash(family, form) % 3 == 0
            counts[held_out, verdict, score] += 1
    for held_out, recall in enumerate(RECALL[family]):
        right, missed = counts[held_out, 1, 1.0], counts[held_out, 1, 0.0]
        assert right >= recall * (right + missed)
        assert counts[held_out, 0, 1.0] <= (4 if family == "number" else 0)


@pytest.mark.parametrize("reward", ["", *list(REWARDS)[1:]])
def test_rewards(reward):
    for case in of("reward"):
        if case["reward"] == reward:
            texts, task = [text for text, _ in case["pays"]], load_task(case["task"])
            found = load_reward(reward, task)(texts, [case["example"]] * len(texts))
            assert found == [pytest.approx(parts, abs=1e-12) for _, parts in case["pays"]]
    assert any(case["reward"] == reward for case in of("reward"))


def grade(text, gold, judge=math_grader.math_verify):
    answer = math_grader.last_box(text)
    return answer is not None and judge(answer, gold)


def test_graders():
    for case in of("grader"):
        texts, golds, verdicts = zip(*case["verdicts"], strict=True)
        judge = partial(grade, judge=getattr(math_grader, case["grader"]))
        assert in_threads(judge, texts, golds) == list(verdicts), case["grader"]
    [case] = of("numbers")
    values = [number(text) for text, _ in case["numbers"]]
    assert [value and str(value) for value in values] == [value for _, value in case["numbers"]]


# programs share a reader, as do mathematical answers and letters
SLOW = "humaneval_plus livecodebench mbpp_plus olympiad arc_c ceval hellaswag mmlu mmlu_pro".split()


@pytest.mark.parametrize(
    "task", [pytest.param(t, marks=[pytest.mark.full] * (t in SLOW)) for t in TASKS]
)
def test_hostile_text_scores_zero_quickly(task, monkeypatch):
    monkeypatch.setattr("evals.math_grader.TIMEOUT", 1.0)
    module, example, began = load_task(task), of("scores", task)[0]["example"], time.process_time()
    assert set(score_all(module, HOSTILE, [example] * len(HOSTILE))) == {0.0}
    assert all(isinstance(module.extract(text, example) or "", str) for text in HOSTILE)
    if pay := REWARDS.get(f"{task}_d1"):
        assert all(pay(text, example | {"style": "tags"}) for text in HOSTILE)
    assert time.process_time() - began < 30


@pytest.mark.parametrize("task", TASKS)
def test_rows(task, tmp_path):
    module, good = load_task(task), None
    load = lambda *rows, **limit: module.load("test", write(tmp_path / "rows.jsonl", rows), **limit)
    for case in of("row", task):
        if case["loaded"]:
            good, loaded, want = case["row"], load(case["row"], case["row"]), case["loaded"]
            if task == "livecodebench":  # where private tests are, and the file
                loaded = [{k: v for k, v in e.items() if k in want} | PRIVATE for e in loaded]
                want = want | PRIVATE
            assert loaded == [want] * 2 or task == "gpqa" and loaded[0] == want
            assert len(load(case["row"], case["row"], limit=1)) == 1
        else:
            message = one_line(load, case["row"])
            assert message.startswith(f"{tmp_path}/rows.jsonl row 1: cannot read a problem from ")
            assert "; needs " in message and all(name in message for name in case["row"])
    if good:  # a bad row is counted from 1
        assert "rows.jsonl row 2: cannot" in one_line(load, good, {"other": 1})
    assert "no such" in one_line(module.load, "test", "missing.jsonl")


@pytest.mark.parametrize("task", TASKS)
def test_prompts(task):
    for case in of("prompt", task):
        module, example = load_task(task), case["example"]
        assert module.prompt(example) == case["prompt"]


def test_every_task_has_golden_verdicts():
    message = one_line(load_task, "")
    assert message.partition("use one of ")[2].split(", ") == TASKS


# --------------------------------------------------------------------------------------------------
# hub data sets, splits, archives


@pytest.fixture
def hub(monkeypatch):
    """hub({(id, config or None, split): rows}): what `datasets` finds; other data sets do not
    exist."""
    import datasets

    def install(rows):
        def load_dataset(path, revision, name, split):
            found = f"{path}@{revision}" if revision else path, name, split
            if found not in rows:
                raise ValueError(f"no {name} {split}\nin {path}")
            return datasets.Dataset.from_list(rows[found])

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    return install


def row_of(task, **changed):
    return next(case["row"] for case in of("row", task) if case["loaded"]) | changed


# task, data set, config, hub's name of the test split
HUB = """
arc_c           allenai/ai2_arc                     ARC-Challenge       test
gpqa            Idavidrein/gpqa                     gpqa_diamond        train
gsm8k           openai/gsm8k                        main                test
hellaswag       Rowan/hellaswag                     -                   validation
math500         HuggingFaceH4/MATH-500              -                   test
aime24          HuggingFaceH4/aime_2024             -                   train
aime25          math-ai/aime25                      -                   test
olympiad        Hothan/OlympiadBench                OE_TO_maths_en_COMP train
mmlu_pro        TIGER-Lab/MMLU-Pro                  -                   test
humaneval       openai/openai_humaneval             -                   test
humaneval_plus  evalplus/humanevalplus              -                   test
mbpp_plus       evalplus/mbppplus                   -                   test
mbpp            google-research-datasets/mbpp       full                test
""".strip().splitlines()


@pytest.mark.parametrize("line", HUB)
def test_hub_rows(line, hub):
    task, name, *config, split = line.split()
    module, config = load_task(task), None if config == ["-"] else config[0]
    row = row_of(task, answer="5") if task.startswith("aime") else row_of(task)
    hub({(name, config, split): [row] * 3, (f"{name}@v1.0", config, split): [row] * 2})
    assert len(module.load("test")) == 3 and len(module.load("test", name, 2)) == 2
    assert len(module.load("test", f"{name}@v1.0")) == 2
    hub({})
    message = one_line(module.load, "test")
    assert message.startswith(f"{name}: no file, and the hub says: no {config} {split} in")


def test_held_out_rows_are_fixed(hub):
    """512 train rows are validation; the others are train, in the hub's order."""
    math = "EleutherAI/hendrycks_math"
    rows = {
        ("openai/gsm8k", "main", "train"): [row_of("gsm8k", question=f"{i}?") for i in range(1000)],
    }
    for part in load_task("math500").PARTS:
        some = [{"problem": f"{part} {i}?", "solution": f"\\boxed{{{i}}}"} for i in range(101)]
        rows |= {(math, part, "train"): some[:100], (math, part, "test"): some[100:]}
        rows[f"{math}@v1", part, "train"] = some[:100]
    hub(rows)
    for task, size, held in (
        ("gsm8k", 1000, "198?"),
        ("math500", 700, "counting_and_probability 51?"),
    ):
        load = load_task(task).load
        train, validation = load("train"), load("validation")
        assert (len(train), len(validation)) == (size - 512, 512)
        assert len({row["question"] for row in train + validation}) == size
        assert load("validation", limit=3) == validation[:3]
        assert validation[100]["question"] == held, "the same rows for ever"
    assert load("validation", "full@v1") == validation and len(load("test", "full")) == 7
    assert load("train", "d1") == [row | {"style": "tags"} for row in train]
    ids = [int(row["question"][:-1]) for row in load_task("gsm8k").load("train")]
    assert ids == sorted(ids)


def test_worked_examples_and_subjects(tmp_path, hub):
    """Of the own subject; the rows of a file have the hub's."""
    mmlu, ceval, arc = map(load_task, ("mmlu", "ceval", "arc_c"))
    row = {"question": "?", "subject": "law", "choices": list("wxyz"), "answer": 2}
    dev = [row | {"question": f"dev {i}?"} for i in range(6)]
    other = [row | {"question": "other?", "subject": "art"}] * 5
    hub({("cais/mmlu", "all", "dev"): other + dev, ("cais/mmlu", "all", "test"): [row] * 2})
    first, _ = mmlu.load("test")
    assert [shot["question"] for shot in first["shots"]] == [f"dev {i}?" for i in range(5)]
    path = write(tmp_path / "rows.jsonl", [row])
    assert mmlu.load("test", path) == [first] and first["gold"] == "C"
    [cot] = mmlu.load("test", f"{path}@cot")
    assert cot | {"shots": first["shots"]} == first | {"style": "cot"}
    assert len(mmlu.prompt(first)) == 11 and len(mmlu.prompt(cot)) == 1
    path = write(tmp_path / "rows.jsonl", [row | {"subject": "new"}])
    assert one_line(mmlu.load, "test", path) == f"{path}: fewer than 5 dev rows of 'new'"
    row = {"question": "?", "A": "w", "B": "x", "C": "y", "D": "z", "answer": "C"}
    counts = {"dev": 5, "val": 2}
    hub({("ceval/ceval-exam", s, p): [row] * n for s in ceval.topics for p, n in counts.items()})
    subjects = Counter(example["subject"] for example in ceval.load("test"))
    assert subjects == dict.fromkeys(ceval.topics, 2) and len(subjects) == 52
    three = row_of("arc_c")
    four = three | {"choices": {"text": list("wxyz"), "label": list("ABCD")}}
    hub({("allenai/ai2_arc", "ARC-Challenge", "validation"): [three, four, three, four]})
    assert [len(example["options"]) for example in arc.load("test", "dare")] == [4, 4]


def test_worked_examples_of_gpqa(tmp_path):
    """The five questions come from the user's file; the options are then in DARE's order."""
    gpqa, text = load_task("gpqa"), "\nDo it.\nQuestion: A?\n(A) \\pi\n\nQuestion: B?\n"
    config = tmp_path / "shown.py"
    config.write_text(f'raise SystemExit\nfive_shot_prompt = """{text}"""\nother = """?"""\n')
    options = {"Correct Answer": "r"} | {f"Incorrect Answer {i}": f"w{i}" for i in (1, 2, 3)}
    path = write(tmp_path / "rows.jsonl", [{"Question": f"{i}?"} | options for i in range(6)])
    examples = gpqa.load("test", f"{path}@{config}")
    orders = ["".join(text.replace("w", "") for text in e["options"]) for e in examples]
    assert orders == "2r13 r132 r213 1r32 2r31 312r".split(), "drawn with seed 0"
    assert "".join(example["gold"] for example in examples) == "BAABBD"
    assert {example["worked"] for example in examples} == {text}
    assert [example["gold"] for example in gpqa.load("test", path)[:2]] == ["D", "C"]
    for other in f"{ROOT}/tests/size.py", f"{tmp_path}/no.py":
        assert "no five_shot_prompt" in one_line(gpqa.load, "test", f"{path}@{other}")


@pytest.mark.parametrize("task", ["humaneval_plus", "mbpp_plus"])
def test_tests_of_the_hub_are_mended(task, tmp_path):
    [case] = of("mended", task)
    module, bodies = load_task(task), case["mended"]["bodies"]
    [example] = module.load("test", write(tmp_path / "rows.jsonl", [case["mended"]["row"]]))
    texts = [f"def {example['entry_point']}(*x):\n    return {body}" for body, _ in bodies]
    scores = score_all(module, [module.answer(example), *texts], [example] * (len(texts) + 1))
    assert scores == [1.0, *(score for _, score in bodies)]


def test_bbh_clone(tmp_path):
    bbh, problem = load_task("bbh"), json.dumps({"examples": [{"input": "?", "target": "(A)"}]})
    (tmp_path / "bbh").mkdir()
    (tmp_path / "cot-prompts").mkdir()
    for task in bbh.TASKS:
        (tmp_path / f"bbh/{task}.json").write_text(problem)
        shots = "BENCHMARK DATA\n-----\nDo it.\n\nQ: why\nIt is (A).\n"
        (tmp_path / f"cot-prompts/{task}.txt").write_text(shots)
    examples = bbh.load("test", str(tmp_path))
    assert [example["subject"] for example in examples] == bbh.TASKS
    assert {e["shots"] for e in examples} == {"Do it.\n\nQ: why\nIt is (A)."}
    assert bbh.load("test", str(tmp_path), 3) == examples[:3]
    (tmp_path / "cot-prompts/snarks.txt").unlink()
    assert "cot-prompts/snarks.txt" in one_line(bbh.load, "test", str(tmp_path))


def test_splits(tmp_path):
    """Few tasks have a train split; MBPP's splits are task numbers."""
    for name in TASKS:
        if name not in TRAIN:
            said = one_line(load_problems, load_task(name), "train", "", None, 1024)
            assert said.startswith("--split train: ") and " has only test" in said
    rows = [row_of("mbpp", task_id=number) for number in (1, 10, 11, 510, 511, 600, 601, 974)]
    path, mbpp = write(tmp_path / "rows.jsonl", rows), load_task("mbpp")
    assert [len(mbpp.load(split, path)) for split in ("test", "validation", "train")] == [2, 2, 2]
    rows = [row_of("math500"), {"problem": "?", "solution": "no box"}, row_of("math500", answer="")]
    assert len(load_task("math500").load("test", write(tmp_path / "rows.jsonl", rows))) == 1


# --------------------------------------------------------------------------------------------------
# what scripts use


def test_load_reward(monkeypatch):
    """Equal completions are judged once; a reward of other than named numbers stops the run."""
    mbpp, asked, judge = load_task("mbpp"), [], programs.run
    monkeypatch.setattr(programs, "run", lambda job: asked.append(job) or judge(job))
    case = of("scores", "mbpp")[0]
    right, example = case["scores"][0][0], case["example"]
    other = example | {"tests": ["assert mul(1, 3) == 4"]}
    texts = [right, right, "", right, right]
    found = load_reward("", mbpp)(texts, [example, example, example, other, example])
    assert [parts["score"] for parts in found] == [1.0, 1.0, 0.0, 0.0, 1.0] and len(asked) == 2
    found[0]["score"] = 5.0
    assert found[1]["score"] == 1.0, "each completion has its own components"
    assert load_reward("", mbpp)([], []) == []
    for paid in "1.0", {"mean": 1.0}, {}:
        monkeypatch.setitem(REWARDS, "mbpp_odd", lambda *_, paid=paid: paid)
        assert "none may be called" in one_line(load_reward("mbpp_odd", mbpp), ["x"], [{}])


# score and tokens per forward of four completions, their sum by hand
PARTS = {
    "both": ([1, 0, 1, 0], [2, 4, 4, 2], [0.5, 0.5, 2.5, -1.5]),
    "all right": ([1, 1, 1, 1], [1, 1, 2, 2], [0, 0, 2, 2]),
    "all wrong": ([0, 0, 0, 0], [1, 1, 2, 2], [0, 0, 0, 0]),
    "equally fast": ([1, 0, 1, 0], [1, 1.009, 1, 1], [1.5, -0.5, 1.5, -0.5]),
}


@pytest.mark.parametrize("score, speed, want", PARTS.values(), ids=list(PARTS))
def test_rewards_that_are_normalised_by_themselves(score, speed, want):
    """What no group mean of a script changes; TraceRL's range of accuracies sees the first part."""
    task = SimpleNamespace(NAME="t", score_batch=lambda texts, examples: map(float, texts))
    texts = [
        Completion(str(right), 36, False, 36 / each)
        for right, each in zip(score, speed, strict=True)
    ]
    paid = load_reward("score+tokens_per_forward", task)(texts, [{}] * 4)
    assert [[*parts] for parts in paid] == [["score", "tokens_per_forward"]] * 4
    values = torch.tensor([[*parts.values()] for parts in paid])
    assert values.flatten().tolist() == pytest.approx([*chain(*zip(score, speed, strict=True))])
    got = sum_of_parts(values[None])[0]
    assert got.tolist() == pytest.approx(want, abs=1e-5)
    args = tracerl.Args(num_generations=4, accuracy_range=(0.0, 1.0))
    assert tracerl.compute_advantages(got, args).any() == (len({*want}) > 1)


TASK = """
def load(split, path=None, limit=None):
    return [{"word": word} for word in ("one", "two")][:limit]
def prompt(example):
    return [{"role": "user", "content": example["word"]}]
def extract(completion, example):
    return completion.strip()
def score(completion, example):
    return float(extract(completion, example) == example["word"])
def number(completion, example):
    return len(completion)
def brief(completion, example):
    return -completion.tokens * completion.truncated
def uneven(completion, example):
    return {"same": 1.0, "length": 0.5} if completion else {"empty": 1.0}
"""


def test_files_of_a_user(tmp_path):
    """A task and a reward outside the repository, whose names are those of other modules."""
    path = tmp_path / "json.py"
    path.write_text(TASK)
    task = load_task(str(path))
    assert (task.NAME, task.PRESETS) == ("json", ()) and sys.modules["json"] is json
    example = task.load("train")[0]
    assert score_all(task, ["one", "two"], [example] * 2) == [1.0, 0.0]
    [parts] = load_reward(f"{path}:number", task)(["four"], [example])
    assert parts == {"reward": 4} and type(parts["reward"]) is float
    row = {"index": 0, "completion": "a", "truncated": True}  # of equal texts
    rows = [row | {"tokens": tokens} for tokens in (2, 3)]
    scored(task, rows, [example], load_reward(f"{path}:brief", task))
    assert [row["reward"]["reward"] for row in rows] == [-2, -3]
    pay = load_reward(f"{path}:uneven", task)
    pay(["trial"], [example])  # completions of one call are judged side by side
    said = one_line(pay, ["one", ""], [example] * 2)
    assert "is paid {'empty': 1.0}: not a finite number for each of ['same', 'length']" in said
    given = lambda *scores: SimpleNamespace(NAME="t", score_batch=lambda *_: iter(scores))
    assert score_all(given(1 + 1e-9), ["a"], [{}]) == [1 + 1e-9]
    for scores, said in ((1.5,), "not [1.5]"), ((None,), "not [None]"), ((), "not []"):
        assert said in one_line(score_all, given(*scores), ["a"], [{}])
    path.write_text(TASK.replace('[{"role": "user", "content": example["word"]}]', "7"))
    where = "train", "", load_tokenizer("tiny-sdar"), 99
    assert "gives 7, not a list of" in one_line(load_problems, load_task(str(path)), *where)


def test_a_file_is_divided_by_the_hash_of_prompts(tmp_path):
    """A tenth each is held out, equal questions stay together, and more rows move none."""
    tokenizer, qa = load_tokenizer("tiny-sdar"), load_task("qa")
    rows = [{"question": f"{i % 250}?", "answer": f"{i}"} for i in range(300)]
    paths = [write(tmp_path / f"{n}.jsonl", rows[-n:]) for n in (300, 200)]
    load = lambda limit, path, other="": load_splits(qa, path, other, tokenizer, 999, limit)[0]
    found, fewer = (
        {split: {e["question"] for e, _ in problems} for split, problems in load(99, path).items()}
        for path in paths
    )
    assert all(15 < len(found[split]) < 50 for split in ("validation", "test"))
    assert len(set().union(*found.values())) == 250 == sum(map(len, found.values()))
    assert all(fewer[split] <= found[split] for split in found)
    assert len(load(3, paths[0])["test"]) == 3
    assert len(load(0, paths[0])["train"]) == 300 == len(load(9, *paths)["train"])
    path = write(tmp_path / "long.jsonl", [*rows, {"question": "long" * 99, "answer": "1"}])
    assert load_splits(qa, path, "", tokenizer, 300, 0)[1] == {"train": 1}


# --------------------------------------------------------------------------------------------------
# the real files

# task, file, rows, how many the constant answer gets right, constant answer
REAL = r"""
countdown d1/countdown_cd3_test.jsonl      256    0 <answer></answer>
countdown dream/cd4_test.jsonl            1000    0
sudoku    d1/4x4_test_sudoku.csv           500    0 <answer>1111111111111111</answer>
sudoku    spg/test_sudoku_split_new.csv    256    0
sudoku    dream/sudoku_4x4_8.jsonl         108    0
gsm8k     gsm8k/test.jsonl                1319    0 \boxed{x}
math500   dare/test_math500_1.parquet      500   18 \boxed{2}
math500   dare/train_math_1.parquet       7470    0
aime24    dare/test_aime2024.parquet        30    0
aime25    dare/test_aime2025.parquet        30    0
""".strip().splitlines()


@needs_files
@pytest.mark.parametrize("line", REAL)
def test_gold_and_constant_answers_of_real_files(line):
    task, file, rows, right, *constant = line.split()
    module = load_task(task)
    examples = module.load("test", f"{DATA}/{file}")
    boxed = lambda example: f"No \\boxed{{0}}.\nSo $\\boxed{{{example['gold']}}}$."
    known = lambda example: "solution" not in example or example["solution"]
    gold = [module.answer(e) if known(e) else boxed(e) for e in examples if "cd4" not in file]
    assert len(examples) == int(rows) and {*score_all(module, gold, examples[: len(gold)])} <= {1.0}
    constants = [*constant, ""][:1] * len(examples)
    assert sum(score_all(module, constants, examples)) == int(right)


@needs_files
def test_dares_files_have_our_prompts_and_rows():
    for task, file, ours in (
        ("countdown", "test_countdown_1", "d1/countdown_cd3_test.jsonl"),
        ("sudoku", "test_sudoku_1", "d1/4x4_test_sudoku.csv"),
        ("humaneval", "test_humaneval_1", "human_eval/HumanEval.jsonl.gz"),
        ("mbpp", "test_mbpp_1", ""),
    ):
        module, path = load_task(task), f"{DATA}/dare/{file}.parquet"
        examples, rows = module.load("test", path, 300), read_rows(path, "test", limit=300)
        asked = [row["prompt"][: len(module.prompt(examples[0]))] for row in rows]
        assert [module.prompt(example) for example in examples] == asked
        theirs = module.load("test", f"{DATA}/{ours}", 300) if ours else examples
        blank = {} if task in ("countdown", "sudoku") else {"solution": ""}
        assert [example | blank for example in theirs] == examples
    gsm8k = load_task("gsm8k")
    for split in ("test", "train"):
        theirs = gsm8k.load(split, f"{DATA}/dare/{split}_gsm8k_1.parquet")
        ours = gsm8k.load(split, f"{DATA}/gsm8k/{split}.jsonl")
        assert theirs == [example | {"solution": ""} for example in ours]


@needs_files
def test_reference_programs():
    """Whole functions, bodies, helpers; without their body they fail. Some MBPP tasks have tests
    with objects or modules of the program's."""
    humaneval, mbpp = load_task("humaneval"), load_task("mbpp")
    examples = humaneval.load("test", f"{DATA}/human_eval/HumanEval.jsonl.gz")
    some = [examples[i] for i in (0, 10, 32, 38, 50, 64, 115, 163)]
    texts = [*map(humaneval.answer, some), *(example["solution"] for example in some)]
    scores = score_all(humaneval, [*texts, *["    pass"] * 8], some * 3)
    assert scores == [1.0] * 16 + [0.0] * 8
    loaded = (mbpp.load(s, f"{DATA}/mbpp/mbpp.jsonl") for s in ("test", "validation", "train"))
    examples = sum(loaded, [])
    some = [examples[task - 11] for task in (11, 18, 40, 88, 122, 126, 367, 510, 596, 601, 927)]
    assert score_all(mbpp, [*map(mbpp.answer, some)], some) == [1.0] * 11


@needs_files
@pytest.mark.full
def test_every_reference_program():
    """All of HumanEval and MBPP pass. HumanEval+ is stricter: 16 original solutions fail, some
    others are slow."""
    humaneval, plus, mbpp = map(load_task, ("humaneval", "humaneval_plus", "mbpp"))
    original = humaneval.load("test", f"{DATA}/human_eval/HumanEval.jsonl.gz")
    all_of_mbpp = mbpp.load("test", f"{DATA}/mbpp/mbpp.jsonl")
    for task, examples in (humaneval, original), (mbpp, all_of_mbpp):
        assert set(score_all(task, [*map(task.answer, examples)], examples)) == {1.0}
    del original[32]  # DARE's file lacks it
    texts, more = [*map(humaneval.answer, original)], f"{DATA}/dare/test_humanevalplus_1.parquet"
    scores = dict(zip(texts, score_all(plus, texts, plus.load("test", more)), strict=True))
    wrong = [i for i, text in enumerate(texts) if not scores[text]]
    slow = {38, 54, 62, 95, 126, 138}
    stricter = [22, 43, 48, 63, 75, 90, 94, 96, 110, 121, 122, 123, 124, 131, 139, 149]
    assert [i for i in wrong if i not in slow] == stricter
