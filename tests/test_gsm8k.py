r"""GSM8K: extraction and scoring on tables of strings, loading, rewards, and the real files.

The files are read from the folder in CLEANDLLM_DATA; without it their tests are skipped.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_evals import FILES, cli, needs_files, one_line, quick_and_silent, write

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data import rows as row_files
from evals import gsm8k, load_task
from evals.rewards import REWARDS

ROW = {
    "question": "How many?",
    "answer": "He has 20 - 2 = <<20-2=18>>18 eggs.\nSo $<<18=18>>18.\n#### 18",
}
BOXED = {
    "question": "How many?",
    "gold": "18",
    "solution": "He has 20 - 2 = <<20-2=18>>18 eggs.\nSo $<<18=18>>18.",
    "style": "boxed",
}
TAGS = BOXED | {"style": "tags"}


def with_gold(gold):
    return BOXED | {"gold": gold}


# ---------------------------------------------------------------------------------------------------------------------
# extraction and score

EXTRACTED = {  # completion -> what is extracted from it
    # 1. the last complete box
    r"\boxed{18}": "18",
    r"so $\boxed{18}$ eggs in 2 days": "18",
    r"\boxed{17} no, \boxed{18}": "18",
    r"\boxed{18} no, \boxed{17": "18",
    r"\boxed{18} \boxed{": "18",
    r"\boxed {18}": "18",
    r"\boxed{\boxed{18}}": "18",
    r"\boxed{17 or \boxed{18}}": "18",
    r"\boxed{17 + \boxed{18}": "18",
    r"{ \boxed{18}": "18",
    r"} \boxed{18}": "18",
    r"\boxed{18}}": "18",
    r"\{ \boxed{18}": "18",
    r"\boxed{18\}} 7": r"18\}",
    r"\boxed{{18}}": "18",
    r"\boxed{(18)}": "18",
    r"\boxed{18}. I put my final answer within \boxed{}.": "18",
    r"#### 17 \boxed{18} The answer is 17.": "18",
    r"\boxed{x} 18": "x",  # a box without a number is an answer, and a wrong one
    r"\boxed{3, 4}": "3, 4",
    r"\boxed{}": None,
    r"\boxed{} 18": "18",
    r"\boxed 18": "18",
    r"\fbox{18}": "18",
    r"\boxed{" + " " * 600 + "}": None,
    r"\boxed{" + "1" * 512 + "}": "1" * 512,
    r"\boxed{" + "1" * 513 + "}": None,
    # 2. ####
    "17 #### 18": "18",
    "#### 17\n#### 18": "18",
    "####18": "18",
    "####\n18": "18",
    "#### $1,450,000 in 2 days": "1450000",
    "#### **18**": "18",
    "#### 18.": "18",
    "#### 18. The answer is 17": "17",  # looks like a heading
    "#### 1. Add up\n5 + 13 = 18": "18",
    "#### 1) Add up\n5 + 13 = 18": "18",
    "#### Step 1\n5 + 13 = 18": "18",
    "#### 18 The answer is 17": "18",
    # 3. answer is
    "The answer is 18 in 2 days": "18",
    "The answer is 17. No, the answer is 18. Check 2.": "18",
    "The answer is: $18.50. Check 2.": "18.50",
    "The answer is\n\n**18**\n5": "18",
    "The answer is $18$\nx = 5": "18",
    "The Answer IS 18, as 2 said": "18",
    "The answer is 2 * 9 = 18 eggs. 5": "18",
    r"the answer is $\frac{1}{2}$ of 3": "1/2",
    r"the answer is -\frac12 of 3": "-1/2",
    "the answer is -$18 now and 3": "-18",
    "the answer is unclear. So 18": "18",
    "answer is": None,
    # 4. the last number
    "first 5, then 18": "18",
    "5 + 13 = 18": "18",
    "it costs $1,450,000": "1450000",
    "it costs $1,450,000.50.": "1450000.50",
    "16-18": "18",
    "16 - 18": "18",
    "20-$18": "18",
    "x = -18": "-18",
    "from 20 to -18 degrees": "-18",
    "0.5": "0.5",
    ".5": ".5",
    "1/2": "1/2",
    "18 eggs.": "18",
    "18%": "18",
    "18 m^2": "18",
    "18 m^{2}": "18",
    "18cm": "18",
    "(3,4)": "4",
    "1,2345": "2345",
    "5 of Q7": "5",
    "1.2.3": "1.2",
    "1/0": "0",
    "1e5": None,
    "1e999999999": None,
    "１８": None,
    "١٨": None,
    "1８": None,
    "no number": None,
    "": None,
    "   \n": None,
}


@pytest.mark.parametrize(
    ("completion", "want"), EXTRACTED.items(), ids=lambda text: repr(text)[:40]
)
def test_extract(completion, want):
    assert gsm8k.extract(completion, BOXED) == want
    assert gsm8k.score(completion, BOXED) == float(want == "18")


EQUAL = [  # answer, gold
    ("18.00", "18"),
    ("18.", "18"),
    (" 18 ", "18"),
    ("018", "18"),
    (r"\$18", "18"),
    ("$18", "18"),
    ("$18$", "18"),
    ("$ 18 $", "18"),
    ("€18", "18"),
    ("18 dollars", "18"),
    ("18 miles per hour.", "18"),
    ("18/day", "18"),
    (r"18\text{ dollars}", "18"),
    (r"18 \text{cm}^2", "18"),
    (r"18\,\mathrm{cm}^{2}", "18"),
    (r"\text{18}", "18"),
    (r"\textbf{18}", "18"),
    (r"18\ \text{eggs}", "18"),
    ("x=18", "18"),
    ("x = 3 + 15 = 18", "18"),
    ("50", "50"),
    (r"50\%", "50"),
    ("50 %", "50"),
    ("50 percent", "50"),
    ("2125", "2125"),
    ("2,125", "2125"),
    (r"2,\!125", "2125"),
    ("2{,}125", "2125"),
    (r"2\,125", "2125"),
    ("1,450,000", "1450000"),
    (r"\$1{,}450{,}000.00", "1450000"),
    ("-3", "-3"),
    ("- 3", "-3"),
    ("−3", "-3"),
    ("-$3", "-3"),
    ("$-3", "-3"),
    ("-3.0", "-3"),
    ("-0", "0"),
    ("36/2", "18"),
    ("1/2", "0.5"),
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac{ 2 }{ 4 }", "1/2"),
    (r"\frac12", "1/2"),
    (r"-\frac{1}{2}", "-1/2"),
    (r"\frac{-1}{2}", "-1/2"),
    ("5.4 \\text{ cents}", "5.4"),
    ("0.1", "1/10"),
    ("." + "3" * 400, "0." + "3" * 400),
]
UNEQUAL = [
    ("17", "18"),
    ("18.01", "18"),
    ("-18", "18"),
    ("0.5", "50"),
    ("50\\%", "0.5"),
    ("000", "1450000"),
    ("450,000", "1450000"),
    ("18,20", "1820"),
    ("1,2,3", "123"),
    ("18, 20", "18"),
    ("18 or 20", "18"),
    ("3 18", "318"),
    ("2 hours 30 minutes", "2"),
    (r"1\frac{1}{2}", "5.5"),
    ("1 1/2", "5.5"),
    ("1/0", "1"),
    ("1/3", "0.3333"),
    ("." + "3" * 400, "1/3"),
    ("2^3", "2"),
    ("5!", "5"),
    (r"\sqrt{16}", "16"),
    (r"18\pi", "18"),
    ("18²", "18"),
    ("½", "1"),
    ("1e1", "10"),
    ("1e999999999", "1"),
    ("Infinity", "18"),
    ("nan", "18"),
    ("1_8", "18"),
    ("0x12", "18"),
    ("eighteen", "18"),
    ("1８", "18"),
    ("+18", "18"),
    ("18" + " eggs" * 200, "18"),  # longer than 512
]


@pytest.mark.parametrize(
    ("text", "gold", "want"), [(*pair, 1.0) for pair in EQUAL] + [(*pair, 0.0) for pair in UNEQUAL]
)
def test_answers_are_compared_exactly(text, gold, want):
    boxed = f"17 so \\boxed{{{text}}} 17"
    assert gsm8k.score(boxed, with_gold(gold)) == want
    assert gsm8k.score(f"<answer>\n{text}\n</answer>", with_gold(gold) | {"style": "tags"}) == want


@pytest.mark.parametrize(
    ("completion", "want"),
    [
        ("<answer>18</answer>", "18"),
        ("<reasoning>\n17\n</reasoning>\n<answer>\n$18\n</answer>\n", "18"),
        (r"<answer>\boxed{18}</answer>", "18"),  # the layout of d1's evaluation
        (r"<answer>17 so \boxed{18}</answer>", "18"),
        ("<answer>17</answer><answer>18</answer><answer>17", "18"),
        ("<answer>He has 18</answer>", "He has 18"),
        ("<answer></answer>", None),
        (r"\boxed{18}", None),
        ("18", None),
        ("", None),
    ],
)
def test_tags(completion, want):
    assert gsm8k.extract(completion, TAGS) == want
    assert gsm8k.score(completion, TAGS) == float(want == "18")


@pytest.mark.parametrize(
    "prose", ["", "Let x = 7. 2 + 2 = 4.\n", "#### Step 2\n", r"\boxed{3} ", "The answer is 3. "]
)
@pytest.mark.parametrize("final", [r"\boxed{18}", r"$\boxed{18}$."])
def test_prose_before_the_answer_changes_nothing(prose, final):
    assert (
        gsm8k.score(prose + final, BOXED) == 1.0
        and gsm8k.score(prose + final.replace("18", "19"), BOXED) == 0.0
    )


N = 30_000  # characters; the calls below would take minutes if one of them were quadratic
HOSTILE = [
    "9" * N,
    "\\boxed{" * (N // 7),
    "\\boxed{" + "{" * N,
    "}" * N,
    "\\boxed{" + "9" * N + "}",
    "\\boxed" + " " * N,
    "\\boxed{}" * (N // 7),
    "\\boxed{" * (N // 7) + "}" * (N // 7),
    "#" * N,
    "#### " * (N // 5),
    "####" + " *" * (N // 2),
    "answer is" * (N // 7),
    "answer is " + "=" * N,
    "1," * (N // 2),
    "111," * (N // 4),
    "1." * (N // 2),
    "1/" * (N // 2),
    "1/" + "0" * N,
    "-" * N,
    "1" * N + "e5",
    "1e999999999",
    "-1E+999999999",
    "\\frac{" * (N // 7),
    "\\frac{1" + " " * N,
    "\\text{" * (N // 7),
    "$" * N,
    "$ " * (N // 2),
    "<answer>" * (N // 7),
    "</reasoning><answer>" * (N // 20),
    "<reasoning>" + "</reasoning> <answer>" * (N // 20),
    "\x00" * N,
    "\ud800",
    "İ" * (N // 7) + "answer is",
    " " * N,
    "\n" * N,
    "()" * (N // 2),
    "1/0",
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:12]))
def test_hostile_text_is_no_answer(text):
    with quick_and_silent(seconds=5.0):
        for completion in (text, f"\\boxed{{{text}}}", f"<answer>{text}</answer>"):
            for example in (BOXED, TAGS):
                answer = gsm8k.extract(completion, example)
                assert answer is None or 0 < len(answer) <= 512
                assert REWARDS["gsm8k_boxed"](completion, example)["correct"] == 0.0
            assert 0.0 <= sum(REWARDS["gsm8k_d1"](completion, TAGS).values()) <= 2.0


@pytest.mark.parametrize("text", ["{", "1 ", "$", "\\boxed{", "answer is", "\x00"])
def test_a_megabyte_is_scored_in_a_second_or_two(text):
    with quick_and_silent(seconds=5.0):
        assert gsm8k.score(text * (10**6 // len(text)), BOXED) == 0.0


# ---------------------------------------------------------------------------------------------------------------------
# prompts, answers, rewards


def test_prompts():
    want = "How many?\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert gsm8k.prompt(BOXED) == [{"role": "user", "content": want}]
    layout = "\nRespond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n"
    assert gsm8k.prompt(TAGS) == [{"role": "user", "content": layout + "\n\n" + "How many?"}]
    for example in (BOXED, TAGS):
        assert gsm8k.prompt(example) == gsm8k.prompt(
            {"question": "How many?", "style": example["style"]}
        )


def test_answers():
    steps = "He has 20 - 2 = 18 eggs.\nSo $18."
    assert gsm8k.answer(BOXED) == gsm8k.answer(BOXED, 3) == steps + "\nThe answer is \\boxed{18}."
    assert gsm8k.answer(TAGS) == f"<reasoning>\n{steps}\n</reasoning>\n<answer>\n18\n</answer>"
    assert gsm8k.score(gsm8k.answer(BOXED), BOXED) == gsm8k.score(gsm8k.answer(TAGS), TAGS) == 1.0
    assert "no worked solutions; train on openai/gsm8k" in one_line(
        lambda: gsm8k.answer(BOXED | {"solution": ""})
    )


@pytest.mark.parametrize(
    ("completion", "correct", "form"),
    [
        (r"so \boxed{18}", 1.0, 0.1),
        (r"so \boxed{17}", 0.0, 0.1),
        (r"\boxed{17} \boxed{18}", 1.0, 0.0),
        (r"\boxed{\boxed{18}}", 1.0, 0.0),
        (r"\boxed{18} \boxed{", 1.0, 0.1),
        (r"\boxed{x} 18", 0.0, 0.0),
        (r"\boxed{}", 0.0, 0.0),
        ("#### 18", 1.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_boxed_reward(completion, correct, form):
    assert REWARDS["gsm8k_boxed"](completion, BOXED) == {"correct": correct, "format": form}


LAYOUT = "<reasoning>\n{}\n</reasoning>\n<answer>\n{}\n</answer>"
D1 = {  # completion -> xmlcount, soft_format, strict_format, integer, correctness
    LAYOUT.format("why", 18): (0.5, 0.5, 0.5, 0.5, 2.0),
    LAYOUT.format("several\nlines", 18) + "\n": (
        0.5,
        0.5,
        0.5,
        0.5,
        2.0,
    ),  # no format part in d1's code
    LAYOUT.format("why", 17): (0.5, 0.5, 0.5, 0.5, 0.0),
    LAYOUT.format("why", "18.0"): (0.5, 0.5, 0.5, 0.0, 2.0),
    LAYOUT.format("why", "-1,018"): (0.5, 0.5, 0.5, 0.5, 0.0),
    LAYOUT.format("why", "１８"): (0.5, 0.5, 0.5, 0.0, 0.0),  # str.isdigit
    LAYOUT.format("why", 18) + "\n" + "x" * 100: (0.4, 0.5, 0.0, 0.5, 2.0),
    LAYOUT.format("why", 18) + "\n" + "x" * 10**4: (0.0, 0.5, 0.0, 0.5, 2.0),  # -19.5 in d1's code
    "<reasoning>why</reasoning> <answer>18</answer>": (0.0, 0.5, 0.0, 0.5, 2.0),
    "First: " + LAYOUT.format("why", 18): (0.5, 0.0, 0.0, 0.5, 2.0),
    LAYOUT.format("why", 18) * 2: (0.0, 0.0, 0.0, 0.5, 2.0),
    "<reasoning>\nwhy\n<answer>\n18\n</answer>": (0.375, 0.0, 0.0, 0.5, 2.0),
    "<reasoning>\n" + "x" * 1000: (0.125, 0.0, 0.0, 0.0, 0.0),
    "\n<answer>\n" + "x" * 1000: (0.125, 0.0, 0.0, 0.0, 0.0),  # -0.885 in d1's code
    "18": (0.0, 0.0, 0.0, 0.0, 0.0),  # 2.5 in d1's code
    "": (0.0, 0.0, 0.0, 0.0, 0.0),
}


@pytest.mark.parametrize(("completion", "want"), D1.items(), ids=lambda text: repr(text)[:40])
def test_d1_reward(completion, want):
    paid = REWARDS["gsm8k_d1"](completion, TAGS)
    assert list(paid) == ["xmlcount", "soft_format", "strict_format", "integer", "correctness"]
    assert tuple(paid.values()) == pytest.approx(want, abs=1e-12)


def test_d1_reward_needs_its_prompt():
    assert "--data d1" in one_line(lambda: REWARDS["gsm8k_d1"]("18", BOXED))


# ---------------------------------------------------------------------------------------------------------------------
# loading


def dare(content, gold):
    messages = [{"role": "user", "content": content}]
    return {
        "data_source": "gsm8k",
        "prompt": messages,
        "reward_model": {"ground_truth": gold, "style": "rule"},
    }


ROWS = [
    (ROW, BOXED),
    (ROW | {"answer": "#### $18.00"}, BOXED | {"gold": "18.00", "solution": ""}),
    (ROW | {"answer": "18"}, BOXED | {"solution": ""}),
    (ROW | {"answer": 18}, BOXED | {"solution": ""}),
    (ROW | {"answer": "so\n#### 2,125"}, BOXED | {"gold": "2125", "solution": "so"}),
    (dare("How many?", "2,125"), BOXED | {"gold": "2125", "solution": ""}),
    (
        dare('How many? Let\'s think step by step and output the final answer after "####".', "18"),
        BOXED | {"solution": ""},
    ),
    (dare(gsm8k.prompt(BOXED)[0]["content"], "18"), BOXED | {"solution": ""}),
]


@pytest.mark.parametrize(("row", "want"), ROWS)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_of_every_format(tmp_path, row, want, suffix):
    path = write(tmp_path / f"rows.{suffix}", [row] * 3)
    assert (
        gsm8k.load("test", path)
        == gsm8k.load("train", path)
        == gsm8k.load("validation", path)
        == [want] * 3
    )
    assert gsm8k.load("test", path, limit=2) == [want] * 2


@pytest.mark.parametrize(
    "bad",
    [
        {"question": "How many?"},
        {"answer": "18"},
        {"question": "", "answer": "18"},
        {"question": None, "answer": "18"},
        {"question": "How many?", "answer": None},
        {"question": "How many?", "answer": True},
        {"question": "How many?", "answer": "it is 18"},
        {"question": "How many?", "answer": "it is 18 ####"},
        {"question": "How many?", "answer": "#### 1e999999999"},
        {"prompt": "How many?", "reward_model": {"ground_truth": "18"}},
        {"prompt": [], "reward_model": {"ground_truth": "18"}},
        {"prompt": ["How many?"], "reward_model": {"ground_truth": "18"}},
        {"prompt": [{"role": "user", "content": "How many?"}], "reward_model": None},
        {"prompt": [{"role": "user", "content": "How many?"}], "reward_model": {"style": "rule"}},
    ],
)
def test_bad_rows_are_named(tmp_path, bad):
    path = write(tmp_path / "rows.jsonl", [ROW, bad])
    message = one_line(lambda: gsm8k.load("test", path))
    assert message.startswith(f"{path} row 2: ") and "needs question and answer" in message
    assert all(name in message for name in bad)
    assert gsm8k.load("test", path, limit=1) == [BOXED]


def test_unknown_data_and_task_names():
    assert one_line(lambda: gsm8k.load("test", "missing.jsonl")).endswith(
        "no such preset or file; presets: d1"
    )
    assert load_task("gsm8k") is gsm8k


# what the card of openai/gsm8k says about its files
CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
  - split: test
    path: socratic/test-*
---
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub is a folder laid out like openai/gsm8k, 1,000 rows of train and 3 of test, which `datasets` itself reads.

    `hub` lists what was asked for.
    """
    import datasets

    folder, asked, load_dataset = tmp_path / "openai/gsm8k", [], datasets.load_dataset
    for config, solution in (("main", "so"), ("socratic", "How? ** so")):
        (folder / config).mkdir(parents=True)
        for split, count in (("train", 1000), ("test", 3)):
            rows = [
                {"question": f"{split} {i}?", "answer": f"{solution}\n#### {i}"}
                for i in range(count)
            ]
            write(folder / config / f"{split}-00000-of-00001.parquet", rows)
    (folder / "README.md").write_text(CARD)

    def load_from_folder(path, *config, **settings):
        asked.append((path, *config, settings))
        return load_dataset(str(tmp_path / path), *config, **settings)

    monkeypatch.setattr(datasets, "load_dataset", load_from_folder)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return asked


def test_hub_splits(hub):
    splits = {split: gsm8k.load(split) for split in ("train", "validation", "test")}
    assert hub == [
        ("openai/gsm8k", "main", {"split": split}) for split in ("train", "train", "test")
    ]
    assert {split: len(rows) for split, rows in splits.items()} == {
        "train": 488,
        "validation": 512,
        "test": 3,
    }
    assert splits["test"] == [
        {"question": f"test {i}?", "gold": str(i), "solution": "so", "style": "boxed"}
        for i in range(3)
    ]
    golds = {split: [int(row["gold"]) for row in rows] for split, rows in splits.items()}
    assert sorted(golds["train"] + golds["validation"]) == list(range(1000)), (
        "each row is in one of the two"
    )
    assert all(rows == sorted(rows) for rows in golds.values()), "in the hub's order"
    assert gsm8k.load("validation", "openai/gsm8k", limit=5) == splits["validation"][:5]
    assert gsm8k.load("validation", "d1") == [
        row | {"style": "tags"} for row in splits["validation"]
    ]


def test_hub_errors_are_one_line(monkeypatch):
    import datasets

    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach\n'openai/gsm8k'")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    want = "--data openai/gsm8k: no file, and the hub says: Couldn't reach 'openai/gsm8k' (--data FILE reads a copy)"
    assert one_line(lambda: gsm8k.load("train")) == want


# ---------------------------------------------------------------------------------------------------------------------
# the real files


@needs_files
@pytest.mark.parametrize(("split", "rows", "commas"), [("test", 1319, 14), ("train", 7473, 79)])
def test_real_rows(split, rows, commas):
    path = FILES / f"gsm8k/{split}.jsonl"
    examples = gsm8k.load(split, str(path))
    assert len(examples) == len({example["question"] for example in examples}) == rows
    raw = [json.loads(line)["answer"].split("#### ")[1] for line in path.read_text().splitlines()]
    assert sum("," in gold for gold in raw) == commas
    assert [example["gold"] for example in examples] == [gold.replace(",", "") for gold in raw]
    for gold, example in zip(raw, examples, strict=True):
        assert (
            gsm8k.score(f"\\boxed{{{gold}}}", example)
            == gsm8k.score(f"so #### {gold}", example)
            == 1.0
        )
        for asked in (example, example | {"style": "tags"}):
            text, shown = gsm8k.answer(asked), gsm8k.prompt(asked)[0]["content"]
            assert gsm8k.score(text, asked) == 1.0 and "<<" not in text and ">>" not in text
            assert (
                example["solution"] not in shown
                and "####" not in shown
                and shown.count(example["question"]) == 1
            )
        assert REWARDS["gsm8k_boxed"](gsm8k.answer(example), example) == {
            "correct": 1.0,
            "format": 0.1,
        }
        assert sum(REWARDS["gsm8k_d1"](text, asked).values()) == 4.0


@needs_files
@pytest.mark.parametrize("split", ["test", "train"])
def test_dare_rows_are_the_same_without_solutions(split):
    examples = gsm8k.load(split, str(FILES / f"dare/{split}_gsm8k_1.parquet"))
    theirs = gsm8k.load(split, str(FILES / f"gsm8k/{split}.jsonl"))
    assert examples == [example | {"solution": ""} for example in theirs]


@needs_files
def test_real_validation_rows_are_fixed(monkeypatch):
    rows = row_files.read_rows(str(FILES / "gsm8k/train.jsonl"), "train", ())
    monkeypatch.setattr(gsm8k, "read_rows", lambda *_, config: list(rows))
    train, validation = gsm8k.load("train"), gsm8k.load("validation")
    assert (len(train), len(validation)) == (6961, 512)
    assert not {row["question"] for row in train} & {row["question"] for row in validation}
    first = [
        [row["question"] for row in rows].index(example["question"]) for example in validation[:4]
    ]
    assert first == [8, 34, 38, 81], "the same rows for everybody, for ever"


@needs_files
@pytest.mark.parametrize("floor", ["", "\\boxed{}", "\\boxed{x}", "####", "The answer is"])
def test_constant_completions_without_a_number_score_zero(floor):
    examples = gsm8k.load("test", str(FILES / "gsm8k/test.jsonl"))
    assert not any(gsm8k.score(floor, example) for example in examples)


@needs_files
def test_completions_of_the_real_test_file_end_to_end(tmp_path, monkeypatch, capsys):
    path = str(FILES / "gsm8k/test.jsonl")
    examples = gsm8k.load("test", path)

    def flags(name, completions):
        given = write(
            tmp_path / f"{name}.jsonl",
            [{"index": i, "completion": text} for i, text in enumerate(completions)],
        )
        return ["--completions", given, "--data", path, "--out", str(tmp_path / name)]

    oracle = ["evals/gsm8k.py", *flags("oracle", map(gsm8k.answer, examples))]
    done = subprocess.run([sys.executable, *oracle], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["task"], result["n"], result["accuracy"], result["answered"]) == (
        "gsm8k",
        1319,
        1.0,
        1.0,
    )
    samples = [
        json.loads(line) for line in (tmp_path / "oracle/samples.jsonl").read_text().splitlines()
    ]
    assert [row["answer"] for row in samples] == [example["gold"] for example in examples]

    constant = flags("constant", [r"\boxed{2}"] * 1319)
    result = cli(monkeypatch, capsys, *constant, "--reward", "gsm8k_boxed", task="gsm8k")
    twos = sum(example["gold"] == "2" for example in examples)
    assert result["accuracy"] == twos / 1319 and 0 < twos < 66
    assert result["reward"]["components"] == pytest.approx({"correct": twos / 1319, "format": 0.1})
