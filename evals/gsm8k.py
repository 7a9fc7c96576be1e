r"""GSM8K: grade-school word problems with a number as answer.

    python evals/gsm8k.py --model sdar-8b --gen-length 256 --denoising-steps 4   openai/gsm8k, test
    python evals/gsm8k.py --completions FILE.jsonl --data test.jsonl

The metric is exact: 1.0 if the number of the completion (`extract`) equals the gold one as a
fraction, else 0.0. So 18.00, \$18 and 18 dollars are 18, and 1,450,000 is one number; OpenCompass
reads its last run of digits, 000. Units are not interpreted: 50\% is 50, and 2 dozen is 2.
"""

import re
import sys

sys.path.insert(0, __file__.rpartition("/evals/")[0])
from fractions import Fraction

from data.planning import stable_hash
from data.rows import read_rows
from evals import main, tagged_answer
from evals.examples import chat_row, held_out, parse_rows, user
from evals.math_grader import MAX_LENGTH, boxes

HUB = "openai/gsm8k"
PRESETS = ("d1",)  # names that `load` takes besides files and hub ids: HUB's rows with d1's prompt
# name of the prompt, by style
VERSION = {"boxed": "OpenCompass gsm8k_0shot_v2_gen_17d799", "tags": "d1, training"}
# as in SDAR's evaluation
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
# some parquet files have verl's instruction
VERL = 'Let\'s think step by step and output the final answer after "####".'
TAGS = """
Respond in the following format:
<reasoning>
...
</reasoning>
<answer>
...
</answer>


"""  # d1's training prompt
COLUMNS = (
    "question and answer (a number, or a solution that ends in #### and a number), "
    "or prompt and reward_model.ground_truth (DARE)"
)

# LaTeX and money as plain text: \text{dollars}, \frac{1}{2} and \frac12, -$18
REPLACED = {
    r"\!": "",
    r"\,": "",
    "{,}": ",",
    "\\ ": " ",
    "~": " ",
    r"\$": "$",
    r"\%": "",
    "%": "",
    "−": "-",
}
WORDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}")
SHORT_FRACTION = re.compile(r"\\[dt]?frac([0-9])([0-9])")
FRACTION = re.compile(r"((?<![\w)])-)?\\[dt]?frac\{\s*(-?[0-9]+)\s*\}\{\s*([0-9]+)\s*\}")
MONEY = re.compile(r"((?<![\w)])-)?[$€£] *")

# ASCII digits only, without exponents. In running text - is a sign unless it subtracts.
UNSIGNED = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+|/0*[1-9][0-9]*)?|\.[0-9]+)"
NUMBER = rf"(?:(?<![\w)])-)?(?<![\w^])(?<!\^\{{)(?<![0-9]\.){UNSIGNED}(?!\d|[eE][-+]?[0-9])"
IN_TEXT = re.compile(NUMBER)
AFTER_HASHES = re.compile(rf"####[\s*]*({NUMBER})(?![.)]\s*\w)")  # not the heading "#### 1. Add up"
ANSWER_IS = re.compile("answer is", re.IGNORECASE)
# a number and nothing else but a unit: dollars, miles per hour, cm^2, /day
WHOLE = re.compile(
    rf"(-?)\s*({UNSIGNED})\s*(?:/?\s*[A-Za-z][^\d=+*,{{}}()\\^]*(?:\^\{{?[23])?)?[\s.]*"
)


def load(split, path=None, limit=None):
    """The first `limit` examples {"question", "gold": number as text, "solution": worked, "" if
    unknown, "style": "boxed" | "tags"}.

    path: empty for the hub's rows; "d1" for the same in style "tags"; a .jsonl, .csv or .parquet
    file; or a hub id. The hub's train split gives "train" and "validation" (512 of 7,473 rows). A
    file gives the same rows for every split.
    """
    path = path or HUB
    if path in (HUB, *PRESETS):
        rows = read_rows(HUB, "test" if split == "test" else "train", PRESETS, config="main")
        if split != "test":
            rows = held_out(rows, split, lambda i: stable_hash("gsm8k", rows[i]["question"]))
    else:
        rows = read_rows(path, split, PRESETS, limit)
    style = {"style": "tags" if path in PRESETS else "boxed"}
    return [row | style for row in parse_rows(_problem, COLUMNS, path, rows[:limit])]


def prompt(example):
    """One user message, no examples. "tags" is d1's training prompt to the byte."""
    question = example["question"]
    content = TAGS + question if example["style"] == "tags" else f"{question}\n{INSTRUCTION}"
    return user(content)


def extract(completion, example):
    r"""The answer of a completion, normalised if it is a number (`normalised`); None if there is
    none. Never raises.

    "boxed", the first rule that finds something:
      1. the last complete \boxed{...} that is not empty, even if an unclosed or too long one
         follows;
      2. the number right after the last "####";
      3. the first number of the sentence after the last "answer is", or after the last "=" in that
         sentence;
      4. the last number.
    "tags": the last complete answer tag, or the last complete box in it.
    """
    tags = example["style"] == "tags"
    text = (tagged_answer(completion) or "") if tags else completion
    answers = [box for box in boxes(text) if box.strip()]
    answers = answers or ([text] if tags else final_numbers(plain(text)))
    last = answers[-1].strip() if answers else ""
    return normalised(last) or last if 0 < len(last) <= MAX_LENGTH else None


def score(completion, example):
    """1.0 if the number of the completion is the gold one, else 0.0. Never raises."""
    found = normalised(extract(completion, example) or "")
    return float(found is not None and Fraction(found) == Fraction(example["gold"]))


def answer(example, draw=0):
    """The worked solution as the prompt asks for it, without the calculator's <<48/2=24>>.
    SystemExit if unknown."""
    if not example["solution"]:
        where = f"train on {HUB} or on a file with question and answer"
        raise SystemExit(f"gsm8k: these rows have no worked solutions; {where}")
    steps = re.sub(r"<<[^<>\n]*>>", "", example["solution"])
    if example["style"] == "tags":
        return f"<reasoning>\n{steps}\n</reasoning>\n<answer>\n{example['gold']}\n</answer>"
    return f"{steps}\nThe answer is \\boxed{{{example['gold']}}}."


def plain(text):
    r"""Text without the LaTeX around its numbers: \$1{,}450 -> 1,450, \frac{1}{2} -> 1/2,
    \text{eggs} -> eggs."""
    for latex, replacement in REPLACED.items():
        text = text.replace(latex, replacement)
    text = MONEY.sub(r" \1", WORDS.sub(r"\1", text))
    return FRACTION.sub(r" \1\2/\3", SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text))


def normalised(answer):
    r"""A number as text that `Fraction` reads: "\$2{,}125" -> "2125", "x = -1/2 \text{ km}" ->
    "-1/2"; None for anything else."""
    text = plain(answer[: MAX_LENGTH + 1]).rpartition("=")[2].strip(" \t\r\n{}()")
    match = WHOLE.fullmatch(text) if len(answer) <= MAX_LENGTH else None
    return match[1] + match[2].replace(",", "") if match else None


def final_numbers(text):
    """Numbers of plain text; the last is the one that rule 2, 3 or 4 of `extract` finds."""
    if after_hashes := AFTER_HASHES.findall(text):
        return after_hashes
    *before, after = ANSWER_IS.split(text)
    if before:
        behind = after[:MAX_LENGTH].lstrip(" \t\r\n:*")
        sentence = re.split(r"\n|\.(?=\s|$)", behind, maxsplit=1)[0]
        if number := IN_TEXT.search(sentence.rpartition("=")[2]):
            return [number[0]]
    return IN_TEXT.findall(text)


def _problem(row):
    if chat := chat_row(row):
        question, solution, gold = chat[0], "", str(chat[1])
    else:
        question, (solution, _, gold) = row["question"], str(row["answer"]).rpartition("####")
    for instruction in (INSTRUCTION, VERL):
        question = question.strip().removesuffix(instruction).strip()
    if (gold := normalised(gold)) is None:
        raise ValueError("the answer is no number")
    return {"question": question, "gold": gold, "solution": solution.strip()}


if __name__ == "__main__":
    main("gsm8k")
