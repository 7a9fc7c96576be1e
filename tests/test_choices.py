"""The benchmarks of multiple choice and BBH: letters, prompts, loading, and the real files of MMLU and C-Eval.

The files are read from the folder in CLEANDLLM_DATA; without it their tests are skipped. The others have no free copy: their
loaders are tested on rows in the hub's own form.
"""

import json
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from test_evals import FILES, cli, needs_files, one_line, quick_and_silent, write

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from evals import arc_c, bbh, ceval, gpqa, hellaswag, load_task, mmlu, mmlu_pro
from evals.choices import letter

# ---------------------------------------------------------------------------------------------------------------------
# the letter

EXPLICIT = [
    "The answer is B",
    "The answer is B.",
    "the answer is (B)",
    "the answer is (b)",
    "the answer is: B",
    "The correct answer is **B**.",
    "The correct answer is **(B) a dog**.",
    "The correct answer is option B",
    "The correct answer is: \n\n**B. a dog**",
    "the answer is [B]",
    "the answer is \\boxed{B}",
    "the answer is $\\boxed{\\text{B}}$",
    "The best choice would be B",
    "The correct option is B",
    "The correct option: B",
    "ANSWER: B",
    "Answer: B",
    "answer : B",
    "**Answer:** B",
    "**Answer**: B",
    "ANSWER:\nB",
    "ANSWER: 'B'",
    "\\boxed{B}",
    "\\boxed{(B)}",
    "\\boxed{\\text{B}}",
    "答案是B",
    "答案：B",
    "答案: B",
    "答案是 B。因为",
    "答案为B选项",
    "答案应该是B",
    "故选B",
    "因此，选B。",
    "所以选择B",
    "不正确的是B",
]
LETTERS = {  # completion -> letter of ABCD
    **dict.fromkeys(EXPLICIT, "B"),
    # the last statement counts
    "The answer is A. No, the answer is B.": "B",
    "ANSWER: A\nANSWER: B": "B",
    "The answer is B. A is wrong.": "B",
    "The answer is B, because A and C are wrong": "B",
    "The answer is (B) because of (A)": "B",
    "\\boxed{A} The answer is B": "B",
    "The answer is B and it is \\boxed{C": "B",
    "A\nThe answer is B": "B",
    "The answer is B\nA": "B",
    "The answer is B. The answer is 5.": "B",
    "The answer is B. The answer is E.": "B",
    # no statement
    "the answer is not B": None,
    "The answer is Boston": None,
    "The answer is B's": None,
    "the answer is b": None,
    "The answer is B or C": None,
    "The answer is B and C": None,
    "The answer is (E)": None,
    "A dog and a cat, I think": None,
    "Alice is right": None,
    "\\boxed{}": None,
    "\\boxed{AB}": None,
    "\\boxed{A, B}": None,
    # 2. a lone letter
    "B": "B",
    " B\n": "B",
    "B.": "B",
    "(B)": "B",
    "**B**": "B",
    "$B$": "B",
    "A. a cat\nB. a dog\nB": "B",
    "Some prose first.\nB": "B",
    "b": None,
    "Ｂ": None,
    "E": None,
    # 3. one label
    "B. a dog": "B",
    "B) a dog": "B",
    "(B) a dog": "B",
    "B: a dog": "B",
    "B、狗": "B",
    "B, because A is wrong": "B",
    "Well.\nB. a dog\nB. it barks": "B",
    "A. a cat\nB. a dog\nC. a cow\nD. a pig": None,
    "B is what I take": None,
    "": None,
    "  \n ": None,
    "no letter": None,
}


@pytest.mark.parametrize(("completion", "want"), LETTERS.items(), ids=repr)
def test_letters(completion, want):
    assert letter(completion) == want


def test_letters_of_other_sets():
    assert letter("The answer is J", "ABCDEFGHIJ") == "J" and letter("The answer is J") is None
    assert letter("The answer is B. Or the answer is E.", "ABCDE") == "E"
    assert letter("E", "ABCDE") == "E" and letter("E. text", "ABCDE") == "E"


@pytest.mark.parametrize(
    "prose",
    [
        "",
        "A dog? ",
        "Option A is wrong.\n",
        "A. a cat\nB. a dog\n",
        "The answer is A? ",
        "答案是A？",
    ],
)
@pytest.mark.parametrize(
    "final", [text for text in EXPLICIT if not text.startswith("\\boxed{\\text")]
)
def test_prose_before_the_answer_changes_nothing(prose, final):
    assert (
        letter(prose + final) == "B"
        and letter(prose + final.replace("B", "C").replace("(b)", "(c)")) == "C"
    )


N = 30_000
PIECES = [
    "answer is ",
    "answer is (",
    "answer:",
    "answer" + " " * 99,
    "\\boxed{",
    "\\boxed ",
    " ",
    "\n",
    "(",
    "*",
    "A",
    "A ",
    "A\n",
]
PIECES += [
    "A. x\nB. x\n",
    "答案",
    "选",
    "正确",
    "answer is B or ",
    "\x00",
    "\ud800",
    "İ",
    "{",
    "}",
    "answer is **",
    "**",
    "9",
]


@pytest.mark.parametrize("piece", PIECES, ids=repr)
def test_hostile_text(piece):
    """A megabyte is read in a second or two; nothing raises, and every call says the same."""
    megabyte = 10**6 if piece in ("answer is ", "A\n", "{") else 10**5
    with quick_and_silent(seconds=10.0):
        for text in (
            piece * (megabyte // len(piece)),
            f"{piece}The answer is{' ' * N}{piece}",
            "answer" + " " * N + piece,
        ):
            assert letter(text) in (None, *"ABCD")
            for example in (FREE, FREE | {"gold": "(A)"}):
                found = bbh.extract(text, example)
                assert bbh.score(text, example) in (0.0, 1.0) and (
                    found is None or 0 < len(found) <= 512
                )
                assert found == bbh.extract(text, example)


# ---------------------------------------------------------------------------------------------------------------------
# rows in the hub's form, prompts, answers

ARC = {
    "id": "x",
    "question": "Hot?",
    "choices": {"text": ["ice", "fire", "snow"], "label": ["A", "B", "C"]},
    "answerKey": "B",
}
NUMBERED = ARC | {
    "choices": {"text": ["ice", "fire", "snow", "rain", "fog"], "label": list("12345")},
    "answerKey": "5",
}
SWAG = {
    "ind": 4,
    "activity_label": "Roof: work",
    "ctx_a": "[header] How to roof [title] Climb. [step] A man sits.",
    "ctx_b": "he",
    "ctx": "A man sits. he",
    "endings": ["falls. [substeps] Gets up.", "eats", "sings", "flies"],
    "label": "2",
}
SWAG_TEXT = " How to roof. Climb. A man sits. He"
DERIVED = {"query": "Roof: A man: he", "choices": ["a", "b", "c", "d"], "gold": 3}
PRO = {
    "question_id": 1,
    "question": "Which?",
    "options": ["w", "x", "N/A", "y", *"ghijkl"],
    "answer": "J",
    "answer_index": 9,
    "cot_content": "",
    "category": "law",
    "src": "",
}
PRO_OPTIONS = dict(zip("ABDEFGHIJ", ["w", "x", "y", *"ghijkl"], strict=True))
GPQA = {
    "Question": "Why?",
    "Correct Answer": "r",
    **{f"Incorrect Answer {i}": f"w{i}" for i in (1, 2, 3)},
    "Writer": "x",
}
FREE = {
    "question": "not True is",
    "gold": "False",
    "subject": "boolean_expressions",
    "shots": "",
    "style": "alone",
}
SUBJECT = "high_school_physics"
MMLU = {"question": "Which?", "subject": SUBJECT, "choices": ["w", "x", "y", "z"], "answer": 2}
CEVAL = {
    "id": 0,
    "question": "哪?",
    "A": "w",
    "B": "x",
    "C": "y",
    "D": "z",
    "answer": "C",
    "explanation": "",
    "subject": SUBJECT,
}

ROWS = [
    (arc_c, ARC, {"question": "Hot?", "options": ["ice", "fire", "snow"], "gold": "B"}),
    (
        arc_c,
        NUMBERED,
        {"question": "Hot?", "options": ["ice", "fire", "snow", "rain", "fog"], "gold": "E"},
    ),
    (
        hellaswag,
        SWAG,
        {"text": SWAG_TEXT, "options": ["falls. Gets up.", "eats", "sings", "flies"], "gold": "C"},
    ),
    (
        hellaswag,
        SWAG | {"label": 2},
        {"text": SWAG_TEXT, "options": ["falls. Gets up.", "eats", "sings", "flies"], "gold": "C"},
    ),
    (hellaswag, DERIVED, {"text": "A man: he", "options": ["a", "b", "c", "d"], "gold": "D"}),
    (mmlu_pro, PRO, {"question": "Which?", "options": PRO_OPTIONS, "gold": "J", "subject": "law"}),
    (gpqa, GPQA, {"question": "Why?", "options": ["w1", "w2", "w3", "r"], "gold": "D"}),
    (bbh, {"input": "not True is", "target": "False"}, FREE | {"subject": "bbh"}),
    (bbh, {"input": "not True is", "target": "False", "task": "boolean_expressions"}, FREE),
]


@pytest.mark.parametrize(("task", "row", "want"), ROWS)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_of_files(tmp_path, task, row, want, suffix):
    path = write(tmp_path / f"rows.{suffix}", [row] * 3)
    examples = task.load("test", path)
    assert (
        examples[0] == want
        and len(examples) == 3
        and task.load("test", path, limit=2) == examples[:2]
    )
    assert load_task(task.__name__.removeprefix("evals.")) is task
    for example in examples:
        assert (
            task.score(task.answer(example), example)
            == task.score("First.\n" + task.answer(example), example)
            == 1.0
        )
        assert task.score("", example) == 0.0 and task.extract("", example) is None


def test_gpqa_options_go_round(tmp_path):
    """The rows of OpenCompass' loader: patterns BCDA, CDAB, DABC, ABCD, of which A is the right one."""
    examples = gpqa.load("test", write(tmp_path / "rows.csv", [GPQA] * 5))
    assert [example["gold"] for example in examples] == list("DCBAD")
    patterns = ["BCDA", "CDAB", "DABC", "ABCD", "BCDA"]
    for example, pattern in zip(examples, patterns, strict=True):
        assert example["options"] == [
            ["r", "w1", "w2", "w3"]["ABCD".index(label)] for label in pattern
        ]
        assert example["options"]["ABCD".index(example["gold"])] == "r"


INSTRUCTED = "Answer the following multiple choice question. The last line of your response should be of the following format: "
INSTRUCTED += "'ANSWER: $LETTER' (without quotes) where LETTER is one of {}. Think step by step before answering.\n\n"
PRO_LIST = "A. w\nB. x\nD. y\nE. g\nF. h\nG. i\nH. j\nI. k\nJ. l"
MMLU_HINT = "There is a single choice question about high school physics. Answer the question by replying A, B, C or D.\n"
CEVAL_HINT = "以下是中国关于高中物理考试的单项选择题，请选出其中的正确答案。\n"
BBH_END = '\n\nThink step by step, and end with the sentence "So the answer is X.", where X is the answer alone.'
ENDINGS = "A. a\nB. b\nC. c\nD. d\nYou may choose from 'A', 'B', 'C', 'D'.\nAnswer:"
GPQA_END = 'Choices:\n(A)w1\n(B)w2\n(C)w3\n(D)r\nFormat your response as follows: "The correct answer is (insert answer here)"'
PROMPTS = [
    (arc_c, ROWS[0][2], "Question: Hot?\nA. ice\nB. fire\nC. snow\nAnswer:"),
    (hellaswag, ROWS[4][2], f"A man: he\nQuestion: Which ending makes the most sense?\n{ENDINGS}"),
    (
        mmlu_pro,
        ROWS[5][2],
        INSTRUCTED.format("Options(e.g. one of ABCDEFGHIJKLMNOP)")
        + f"Question:\n\nWhich?\n\nOptions:\n\n{PRO_LIST}",
    ),
    (gpqa, ROWS[6][2], f"What is the correct answer to this question: Why?\n{GPQA_END}"),
    (bbh, FREE, f"not True is{BBH_END}"),
]
SHOWN = "Follow the given examples and answer the question.\nSHOTS\n\nQ: not True is\nA: Let's think step by step."
PROMPTS.append((bbh, FREE | {"shots": "SHOTS"}, SHOWN))
ASKED = {"question": "Which?", "options": ["w", "x", "y", "z"], "gold": "C", "subject": SUBJECT}
COT = INSTRUCTED.format("ABCD") + "Which?\n\nA) w\nB) x\nC) y\nD) z"
PROMPTS.append((mmlu, ASKED | {"style": "cot", "shots": []}, COT))


@pytest.mark.parametrize(("task", "example", "want"), PROMPTS)
def test_prompts(task, example, want):
    assert task.prompt(example) == [{"role": "user", "content": want}]
    hidden = {key: value for key, value in example.items() if key != "gold"}
    assert task.prompt(hidden) == task.prompt(example), "a prompt does not look at the gold answer"


def test_prompts_with_examples():
    lines = "A. w\nB. x\nC. y\nD. z\n"
    asked = ASKED | {"style": "direct", "shots": [ASKED | {"question": f"{i}?"} for i in range(5)]}
    messages = mmlu.prompt(asked)
    assert messages[2:4] == [
        {"role": "user", "content": f"{MMLU_HINT}Question: 1?\n{lines}Answer: "},
        {"role": "assistant", "content": "C\n"},
    ]
    assert len(messages) == 11 and messages[-1] == {
        "role": "user",
        "content": f"{MMLU_HINT}Q: Which?\n{lines}A: ",
    }
    messages = ceval.prompt(asked)
    assert messages[2:4] == [
        {"role": "user", "content": f"{CEVAL_HINT}1?\n{lines}答案: "},
        {"role": "assistant", "content": "C"},
    ]
    assert len(messages) == 11 and messages[-1] == {
        "role": "user",
        "content": f"{CEVAL_HINT}Which?\n{lines}答案: ",
    }


BBH_ANSWERS = [  # completion, gold, score
    ("So the answer is False.", "False", 1.0),
    ("the answer is true. No, the answer is false", "False", 1.0),
    ("The answer is: **False**. As said.", "False", 1.0),
    ("So the answer is \\boxed{False}.", "False", 1.0),
    ("\\boxed{False}\nThat is all.", "False", 1.0),
    ("False", "False", 1.0),
    ("false.", "False", 1.0),
    ("True or\nFalse", "False", 0.0),
    ("The answer is True, not False", "False", 0.0),
    ("So the answer is } ] >.", "} ] >", 1.0),
    ("So the answer is }  ] >", "} ] >", 1.0),
    ("So the answer is ] } >.", "} ] >", 0.0),
    ("So the answer is -50.", "-50", 1.0),
    ("So the answer is 50.", "-50", 0.0),
    ("So the answer is barn it&t zoo.\n\nQ: next", "barn it&t zoo", 1.0),
    ("So the answer is " + "x" * 513, "x" * 513, 0.0),
    ("So the answer is (B).", "(B)", 1.0),
    ("So the answer is B.", "(B)", 1.0),
    ("(A) is wrong. So the answer is (B).", "(B)", 1.0),
    ("So the answer is (A).", "(B)", 0.0),
    ("So the answer is (D).", "(D)", 0.0),  # the question has three options
]


@pytest.mark.parametrize(("completion", "gold", "want"), BBH_ANSWERS)
def test_bbh_answers(completion, gold, want):
    example = FREE | {"gold": gold, "question": "Which?\nOptions:\n(A) w\n(B) x\n(C) y"}
    assert bbh.score(completion, example) == want


# ---------------------------------------------------------------------------------------------------------------------
# bad rows, hub, zip, clone

BAD = [
    (arc_c, {"question": "Hot?", "answerKey": "A"}, "choices.text"),
    (arc_c, ARC | {"answerKey": "E"}, "answerKey"),
    (arc_c, ARC | {"answerKey": ""}, "answerKey"),
    (arc_c, ARC | {"question": None}, "question"),
    (hellaswag, SWAG | {"label": ""}, "label (0 to 3)"),
    (hellaswag, SWAG | {"endings": ["a", "b"]}, "endings"),
    (hellaswag, {key: value for key, value in SWAG.items() if key != "ctx_b"}, "ctx_b"),
    (hellaswag, DERIVED | {"gold": 4}, "gold"),
    (mmlu_pro, PRO | {"answer": "C"}, "letter of one of them"),  # N/A
    (mmlu_pro, PRO | {"answer": "K"}, "letter of one of them"),
    (mmlu_pro, PRO | {"options": "w"}, "options"),
    (mmlu_pro, PRO | {"category": None}, "category"),
    (gpqa, GPQA | {"Correct Answer": ""}, "Correct Answer"),
    (gpqa, {"Question": "Why?"}, "Incorrect Answer 3"),
    (bbh, {"input": "x"}, "input and target"),
    (bbh, {"input": "x", "target": " "}, "input and target"),
]


@pytest.mark.parametrize(("task", "bad", "want"), BAD)
def test_bad_rows_are_named(tmp_path, task, bad, want):
    path = write(tmp_path / "rows.jsonl", [bad])
    message = one_line(lambda: task.load("test", path))
    assert (
        message.startswith(path)
        and want in message
        and all(name in message for name in bad if name != "choices")
    )


TASKS = [mmlu, mmlu_pro, arc_c, hellaswag, gpqa, ceval, bbh]


@pytest.fixture
def hub(monkeypatch):
    """hub(rows): data sets of {(id, config or None, split): rows}, through the `datasets` package; asking for others fails."""
    import datasets

    def install(rows):
        def load_dataset(path, config=None, *, split):
            if (path, config, split) not in rows:
                raise ValueError(f"no {config} {split}\nin {path}")
            return datasets.Dataset.from_list(rows[path, config, split])

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    return install


@pytest.mark.parametrize(
    ("task", "row", "key"),
    [
        (mmlu_pro, PRO, ("TIGER-Lab/MMLU-Pro", None, "test")),
        (arc_c, ARC, ("allenai/ai2_arc", "ARC-Challenge", "test")),
        (hellaswag, SWAG, ("Rowan/hellaswag", None, "validation")),
        (gpqa, GPQA, ("Idavidrein/gpqa", "gpqa_diamond", "train")),
    ],
)
def test_hub_rows(hub, task, row, key):
    hub({key: [row] * 3})
    examples = task.load("test")
    assert len(examples) == 3 and task.load("test", key[0], limit=2) == examples[:2]
    assert all(task.score(task.answer(example), example) == 1.0 for example in examples)


def test_hellaswag_holds_rows_of_its_train_split_out(hub):
    hub({("Rowan/hellaswag", None, "train"): [SWAG | {"ctx_a": f"Text {i}."} for i in range(600)]})
    train, validation = hellaswag.load("train"), hellaswag.load("validation")
    assert (len(train), len(validation)) == (88, 512) and len(
        {row["text"] for row in train + validation}
    ) == 600
    assert hellaswag.load("validation", limit=3) == validation[:3]


def test_arc_dare_has_the_questions_with_four_options(hub):
    four = ARC | {"choices": {"text": ["ice", "fire", "snow", "fog"], "label": list("ABCD")}}
    hub({("allenai/ai2_arc", "ARC-Challenge", "validation"): [ARC, four, NUMBERED, four]})
    assert [len(example["options"]) for example in arc_c.load("test", "dare")] == [4, 4]
    assert [len(example["options"]) for example in arc_c.load("validation")] == [3, 4, 5, 4]


def test_mmlu_hub_rows(hub):
    rows = {
        part: [MMLU | {"question": f"{part} {i}?"} for i in range(n)]
        for part, n in (("dev", 6), ("test", 2), ("validation", 1))
    }
    hub({("cais/mmlu", "all", part): value for part, value in rows.items()})
    examples = mmlu.load("test")
    assert [example["question"] for example in examples] == ["test 0?", "test 1?"] and examples[0][
        "gold"
    ] == "C"
    assert [shot["question"] for shot in examples[0]["shots"]] == [f"dev {i}?" for i in range(5)]
    assert mmlu.load("test", "cot", limit=1) == [examples[0] | {"style": "cot"}]
    assert mmlu.load("validation", "cais/mmlu")[0]["question"] == "validation 0?"
    hub({("cais/mmlu", "all", part): value[:4] for part, value in rows.items()})
    assert one_line(lambda: mmlu.load("test")) == f"cais/mmlu: fewer than 5 dev rows of '{SUBJECT}'"


def test_ceval_and_bbh_ask_for_every_part(hub):
    row = {key: value for key, value in CEVAL.items() if key != "subject"}
    parts = {
        ("ceval/ceval-exam", s, part): [row] * n
        for s in ceval.SUBJECTS
        for part, n in (("dev", 5), ("val", 2))
    }
    hub(parts)
    examples = ceval.load("test")
    assert (
        Counter(example["subject"] for example in examples) == dict.fromkeys(ceval.SUBJECTS, 2)
        and len(ceval.SUBJECTS) == 52
    )
    assert ceval.prompt(examples[0]) and len(ceval.load("test", limit=3)) == 3
    hub({("lukaemon/bbh", task, "test"): [{"input": "x", "target": "y"}] * 2 for task in bbh.TASKS})
    assert (
        Counter(example["subject"] for example in bbh.load("test")) == dict.fromkeys(bbh.TASKS, 2)
        and len(bbh.TASKS) == 27
    )


@pytest.mark.parametrize("task", TASKS)
def test_missing_sets_and_splits_are_one_line(hub, tmp_path, task):
    hub({})
    assert one_line(lambda: task.load("test")).startswith(
        f"--data {task.HUB}: no file, and the hub says: no "
    )
    assert "no such" in one_line(lambda: task.load("test", "missing.jsonl"))
    assert str(tmp_path) in one_line(lambda: task.load("test", str(tmp_path)))
    if task not in (arc_c, hellaswag):
        message = one_line(lambda: task.load("train"))
        assert (
            "has no such labelled split; use test" in message
            and "train on another task: arc_c, countdown" in message
        )


def zipped(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return str(path)


@pytest.mark.parametrize("task", [mmlu, ceval])
def test_zips(tmp_path, task):
    """Five dev rows and a question, in the csv of each: MMLU's has no header, C-Eval's has one and a number in front."""
    if task is mmlu:
        row, folder, test = 'Which?,"w, or so",x,y,z,C\n', "data/", "test"
        head = dev_head = ""
    else:
        row, folder, test = '0,Which?,"w, or so",x,y,z,C\n', "", "val"
        head, dev_head = "id,question,A,B,C,D,answer\n", "\ufeffid,question,A,B,C,D,answer\n"
    files = {
        f"{folder}dev/{SUBJECT}_dev.csv": dev_head + row * 5,
        f"{folder}{test}/{SUBJECT}_{test}.csv": head + row * 2,
    }
    examples = task.load("test", zipped(tmp_path / "a.zip", files))
    assert len(examples) == 2 and len(examples[0]["shots"]) == 5
    assert examples[0]["options"] == ["w, or so", "x", "y", "z"] and examples[0]["gold"] == "C"
    for name in files:
        loads = lambda name, files: lambda: task.load("test", zipped(tmp_path / name, files))
        short = {
            key: value.replace(",C\n", ",E\n") if key == name else value
            for key, value in files.items()
        }
        assert "cannot read a question" in one_line(loads("b.zip", short))
        gone = {key: value for key, value in files.items() if key != name}
        assert "csv in it" in one_line(loads("c.zip", gone))
    (tmp_path / "d.zip").write_text("no zip")
    assert "no such zip file" in one_line(lambda: task.load("test", str(tmp_path / "d.zip")))
    assert "takes a .zip or a hub id" in one_line(
        lambda: task.load("test", write(tmp_path / "rows.jsonl", [MMLU]))
    )


def test_bbh_clone(tmp_path):
    """The form of the authors' repository; a missing file is named."""
    for folder in ("bbh", "cot-prompts"):
        (tmp_path / folder).mkdir()
    for task in bbh.TASKS:
        rows = {"canary": "c", "examples": [{"input": f"{task}?", "target": "(A)"}]}
        (tmp_path / f"bbh/{task}.json").write_text(json.dumps(rows))
        (tmp_path / f"cot-prompts/{task}.txt").write_text(
            "BENCHMARK DATA canary\n-----\nDo it.\n\nQ: why\nSo the answer is (A).\n"
        )
    examples = bbh.load("test", str(tmp_path))
    assert [example["subject"] for example in examples] == bbh.TASKS and len(
        bbh.load("test", str(tmp_path), limit=3)
    ) == 3
    assert {example["shots"] for example in examples} == {"Do it.\n\nQ: why\nSo the answer is (A)."}
    (tmp_path / "cot-prompts/snarks.txt").unlink()
    assert "cot-prompts/snarks.txt" in one_line(lambda: bbh.load("test", str(tmp_path)))


def test_macro_accuracy(tmp_path, monkeypatch, capsys):
    """Subjects count alike: 1 of 1 and 1 of 3 is 2/3, and 2 of 4 rows."""
    rows = [{"input": "x", "target": "yes", "task": task} for task in ("a", "b", "b", "b")]
    texts = ["So the answer is yes.", "no", "Yes", "so?\nso."]
    given = write(
        tmp_path / "c.jsonl", [{"index": i, "completion": text} for i, text in enumerate(texts)]
    )
    flags = [
        "--completions",
        given,
        "--data",
        write(tmp_path / "rows.jsonl", rows),
        "--out",
        str(tmp_path / "out"),
    ]
    result = cli(monkeypatch, capsys, *flags, task="bbh")
    assert (result["accuracy"], result["answered"]) == (0.5, 0.75) and result[
        "macro_accuracy"
    ] == pytest.approx(2 / 3)


# ---------------------------------------------------------------------------------------------------------------------
# the real files

REAL = [  # task, file, split, rows, subjects, share of A B C D
    (mmlu, "mmlu/mmlu.zip", "test", 14042, 57, [3222, 3462, 3582, 3776]),
    (mmlu, "mmlu/mmlu.zip", "validation", 1531, 57, None),
    (ceval, "ceval/ceval.zip", "test", 1346, 52, [310, 338, 344, 354]),
]


@needs_files
@pytest.mark.parametrize(("task", "file", "split", "rows", "subjects", "floors"), REAL)
def test_gold_and_constant_answers_of_the_real_files(task, file, split, rows, subjects, floors):
    examples = task.load(split, str(FILES / file))
    assert len(examples) == rows and len({example["subject"] for example in examples}) == subjects
    for form in (
        "{}",
        "It is A, I think.\nThe answer is ({}).",
        "Let us see.\nANSWER: {}",
        "{}. as above",
    ):
        assert (
            sum(task.score(form.format(example["gold"]), example) for example in examples) == rows
        )
    counts = [sum(task.score(label, example) for example in examples) for label in "ABCD"]
    assert sum(counts) == rows and (floors is None or counts == floors)
    assert not any(task.score("", example) for example in examples)
    for example in examples[:: rows // 50]:
        messages = task.prompt(example)
        assert len(messages) == 11 and example["question"] in messages[-1]["content"]
        assert all(shot["subject"] == example["subject"] for shot in example["shots"])
        assert messages == task.prompt(example | {"gold": "?"})


@needs_files
def test_gold_answers_of_mmlu_through_the_command_line(tmp_path, monkeypatch, capsys):
    path = str(FILES / "mmlu/mmlu.zip")
    examples = mmlu.load("test", path)
    rows = [{"index": i, "completion": mmlu.answer(example)} for i, example in enumerate(examples)]
    flags = [
        "--data",
        path,
        "--out",
        str(tmp_path / "out"),
        "--completions",
        write(tmp_path / "c.jsonl", rows),
    ]
    result = cli(monkeypatch, capsys, *flags, task="mmlu")
    assert (result["n"], result["accuracy"], result["macro_accuracy"], result["answered"]) == (
        14042,
        1.0,
        1.0,
        1.0,
    )
