"""MMLU: 57 subjects, four options, 14,042 questions (validation 1,531).

    python evals/mmlu.py --model llada-8b --gen-length 3 --block-length 3 --denoising-steps 3      cais/mmlu, test
    python evals/mmlu.py --model sdar-8b --data cot --gen-length 4096 --denoising-steps 4
    python evals/mmlu.py --completions FILE.jsonl --data mmlu.zip                    the zip of the original csv files

Two prompts. "direct", the default, is five examples of the subject (the dev rows 0-4) as turns of the chat, and a letter for
an answer: OpenCompass' mmlu_gen_a484b3, in which DARE asks LLaDA, Dream (128 tokens) and LLaDA2 (256); its last question
says Q and A where the examples say Question and Answer. "cot" (--data cot) is simple-evals' prompt without examples, in
which SDAR's lmdeploy runs ask (4,096 tokens; its transformers runs ask as "direct" does, with Question and Answer all
through). result.json has the mean over all questions, as lm-eval weights them, and macro_accuracy, the plain mean of the 57
subjects, which is what OpenCompass and DARE's table print.
DARE's table: LLaDA-8B-Instruct 65.24, Dream-7B-Instruct 66.83, SDAR-8B-Chat 77.23, LLaDA2.0-mini 72.54.
Answering always A scores 22.95 %, always D 26.89 %.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.rows import describe_columns, read_rows
from evals.choices import letter, lettered, one_split, read_zip

HUB = "cais/mmlu"
PRESETS = (
    "cot",
)  # names that `load` takes besides zips and hub ids: the rows of HUB in simple-evals' prompt
VERSION = {
    "direct": "OpenCompass mmlu_gen_a484b3",
    "cot": "simple-evals",
}  # name of the prompt, by style
SPLITS = {"test": "test", "validation": "validation"}
SHOTS = 5
HINT = "There is a single choice question about {}. Answer the question by replying A, B, C or D."
COT = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'ANSWER: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering."
)


def load(split: str, path: str | None = None, limit: int | None = None) -> list[dict]:
    """Examples {"question", "options": 4, "gold": letter, "subject", "style": "direct" | "cot", "shots": dev rows}.

    path: empty for the hub's rows, "cot", a hub id with the columns of HUB, or a zip of csv files. At most `limit` rows,
    always the first; subjects stand one behind the other. SystemExit with one line on all else.
    """
    path, name = path or HUB, one_split("mmlu", split, SPLITS)
    style, hub = ("cot", HUB) if path in PRESETS else ("direct", path)
    if path.endswith(".zip"):
        columns, name = ["question", *"ABCD", "answer"], {"validation": "val"}.get(name, name)
        dev, rows = (
            [_problem(row, path) for row in read_zip(path, part, columns)] for part in ("dev", name)
        )
    elif Path(path).exists():
        raise SystemExit(
            f"--data {path}: mmlu takes a .zip or a hub id, because its examples are those of a second split"
        )
    else:
        dev, rows = (
            [_problem(row, path) for row in read_rows(hub, part, PRESETS, config="all")]
            for part in ("dev", name)
        )
    shots = {}
    for row in dev:
        shots.setdefault(row["subject"], []).append(row)
    examples = []
    for row in rows[:limit]:
        if len(shots.get(row["subject"], [])) < SHOTS:
            raise SystemExit(f"{path}: fewer than {SHOTS} dev rows of {row['subject']!r}")
        examples.append(row | {"style": style, "shots": shots[row["subject"]][:SHOTS]})
    return examples


def prompt(example: dict) -> list[dict]:
    """direct: five pairs of question and letter, then the question. cot: one message."""
    if example["style"] == "cot":
        options = lettered(example["options"], "{}) {}")
        return [{"role": "user", "content": f"{COT}\n\n{example['question']}\n\n{options}"}]
    hint = HINT.format(example["subject"].replace("_", " "))
    ask = lambda row, q, a: f"{hint}\n{q}: {row['question']}\n{lettered(row['options'])}\n{a}: "
    messages = []
    for shot in example["shots"]:
        messages.append({"role": "user", "content": ask(shot, "Question", "Answer")})
        messages.append({"role": "assistant", "content": f"{shot['gold']}\n"})
    return [*messages, {"role": "user", "content": ask(example, "Q", "A")}]


def extract(completion: str, example: dict) -> str | None:
    """The letter of the completion (`choices.letter`), or None."""
    return letter(completion)


def score(completion: str, example: dict) -> float:
    """1.0 if the letter is the gold one, else 0.0. Never raises."""
    return float(extract(completion, example) == example["gold"])


def answer(example: dict, draw: int = 0) -> str:
    """The gold letter as the prompt asks for it."""
    return f"ANSWER: {example['gold']}" if example["style"] == "cot" else example["gold"]


def _problem(row: dict, path: str) -> dict:
    """A row of a csv file (A-D, letter) or of the hub (choices, index of the answer). SystemExit names what it lacks."""
    options = row["choices"] if "choices" in row else [row.get(label) for label in "ABCD"]
    gold = row.get("answer")
    gold = "ABCD"[gold] if type(gold) is int and 0 <= gold < 4 else gold
    texts = [
        row.get("question"),
        row.get("subject"),
        *(options if isinstance(options, list) else [None]),
    ]
    if (
        len(texts) != 6
        or not all(isinstance(text, str) for text in texts)
        or gold not in tuple("ABCD")
    ):
        needs = "question, subject, four choices (or A-D) and answer (index or letter)"
        raise SystemExit(
            f"{path}: cannot read a question from {describe_columns(row)}; needs {needs}"
        )
    return {
        "question": row["question"],
        "options": options,
        "gold": gold,
        "subject": row["subject"],
    }


if __name__ == "__main__":
    from evals.run import main

    main("mmlu")
