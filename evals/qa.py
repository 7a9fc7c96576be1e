r"""Questions and answers of your own: a file or a hub data set with columns question and answer.

    python evals/qa.py --model sdar-8b --data mine.jsonl --gen-length 64
    python evals/qa.py --completions FILE.jsonl --data mine.csv
    python algos/d1.py --task qa --data mine.jsonl   a tenth each for validation and test

The metric is SQuAD's exact match (evaluate-v1.1.py) with any of the accepted answers: equal without
case, ASCII punctuation, the words a, an and the, and surplus white space. Unlike there, the sign
and the point of a number count. For values take gsm8k, for formulas math500.
"""

if __name__ == "__main__":
    import command  # noqa: F401

import re
import string

from evals import WORDS, final_answer
from evals.examples import as_text, chat_row, read_examples, user

INSTRUCTION = r"Put your final answer, as short as possible, within \boxed{}."
COLUMNS = (
    "question and answer or answers (text, a whole number, or a list of these), or prompt and "
    "reward_model.ground_truth (DARE)"
)
# but for the sign and the point of a number
PUNCTUATION = re.compile(rf"(?!(?<=\d)\.(?=\d)|-(?=\d))[{re.escape(string.punctuation)}]")


def load(split, path=None, limit=None):
    """The first `limit` examples {"question", "answers": list of text}.

    path: a .jsonl, .csv or .parquet file, or a hub id. Rows have COLUMNS. A file gives the same
    rows for every split; algos/ divide it.
    """
    return read_examples(_problem, COLUMNS, path, split, limit)


def prompt(example):
    """One user message, no examples."""
    return user(f"{example['question']}\n{INSTRUCTION}")


def extract(completion, example):
    """The final answer (boxes and answer tags), else the whole text; None if it is empty. Never
    raises."""
    return WORDS.sub(r"\1", final_answer(completion) or completion).strip() or None


def score(completion, example):
    """Whether the answer is one of the accepted ones. Never raises."""
    found = normalised(extract(completion, example) or "")
    return found in map(normalised, example["answers"])


def answer(example, draw=0):
    """One of the accepted answers, as the prompt asks for it."""
    return f"\\boxed{{{example['answers'][draw % len(example['answers'])]}}}"


def normalised(text):
    """As SQuAD's script, but a text that would be empty stays as it is, in lower case: the option A
    is not an article."""
    plain = re.sub(r"\b(a|an|the)\b", " ", PUNCTUATION.sub("", text.lower()))
    return " ".join(plain.split()) or text.lower().strip()


def _problem(row):
    question, gold = chat_row(row) or (row["question"], row.get("answers", row.get("answer")))
    gold = gold if isinstance(gold, list) else [gold]
    gold = [str(one) if type(one) is int else as_text(one) for one in gold]
    if not all(map(normalised, gold)) or not gold:
        raise ValueError("a blank answer")
    return {"question": as_text(question).strip(), "answers": gold}
