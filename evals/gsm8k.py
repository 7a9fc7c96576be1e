r"""GSM8K: grade-school word problems with a number as answer.

    python evals/gsm8k.py --model sdar-8b --gen-length 256 --denoising-steps 4   openai/gsm8k, test
    python evals/gsm8k.py --completions FILE.jsonl --data test.jsonl
    python evals/gsm8k.py --model llada-8b --data test.jsonl@d1-eval   d1's prompt for evaluation

The metric is exact: 1.0 if the number of the completion (`extract`) equals the gold one as a
fraction, else 0.0. So 18.00, \$18 and 18 dollars are 18, and 1,450,000 is one number; OpenCompass
reads its last run of digits, 000. Units are not interpreted: 50\% is 50, and 2 dozen is 2. But 2
million is no number.
"""

import re
import sys

sys.path.insert(0, __file__.rpartition("/evals/")[0])
from fractions import Fraction

from data.planning import stable_hash
from data.rows import read_rows
from evals import WORDS, final_answer, main
from evals.examples import STYLES, chat_row, held_out, parse_rows, source_and_style, user
from evals.math_grader import MAX_LENGTH

HUB = "openai/gsm8k"
PRESETS = STYLES  # names that `load` takes besides files and hub ids: HUB's rows with d1's prompts
VERSION = {  # name of the prompt, by style
    "boxed": "OpenCompass gsm8k_0shot_v2_gen_17d799",
    "tags": "d1, training",
    "boxed-tags": "d1, evaluation",
}
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
# d1's prompts for evaluation, to the byte, around a space in GSM8K's; d1 also begins the answer,
# with <reasoning>
EVALUATION = """You are a math expert. You will be given a question to solve. Solve it step by \
step. Wrap the final answer in a \\boxed{{}}.{0}
Respond in the following format:
<reasoning>
Your reasoning here
</reasoning>
<answer>
\\boxed{{...}}
</answer>"""
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
    r"\approx": "",
    r"^\circ": "",
    r"^{\circ}": "",
    "°": "",
}
SHORT_FRACTION = re.compile(r"\\[dt]?frac([0-9])([0-9])")
FRACTION = re.compile(r"((?<![\w)])-)?\\[dt]?frac\{\s*(-?[0-9]+)\s*\}\{\s*([0-9]+)\s*\}")
FULL_HOUR = re.compile(r"(?<=[0-9]):00\b(?!:)")  # 2:00 pm
MONEY = re.compile(r"((?<![\w)])-)?[$€£] *")

SCALE = r"\s*(?:hundred|thousand|million|billion)\b"  # 2 million is not 2
# ASCII digits only, without exponents. In running text - is a sign unless it subtracts.
UNSIGNED = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+|/0*[1-9][0-9]*)?|\.[0-9]+)"
NUMBER = rf"(?:(?<![\w)])-)?(?<![\w^])(?<!\^\{{)(?<![0-9]\.){UNSIGNED}(?!\d|[eE][-+]?[0-9]|{SCALE})"
IN_TEXT = re.compile(NUMBER)
AFTER_HASHES = re.compile(rf"####[\s*]*({NUMBER})(?![.)]\s*\w)")  # not the heading "#### 1. Add up"
SENTENCE = re.compile(r"(?=.*[A-Za-z]{2})[^=+*/^{}()\\<>]*")  # words, nothing to calculate
LISTED = re.compile(rf"{NUMBER},\s+{NUMBER}\W*$")  # 1, 2, 3: which one?
ANSWER_IS = re.compile("answer is(?! not)", re.IGNORECASE)
# a number and nothing else but a unit and brackets: dollars, cm^2, /day, minutes (2 hours)
WHOLE = re.compile(
    rf"(-?)\s*({UNSIGNED})(?!{SCALE})\s*"
    r"(?:/?\s*[A-Za-z][^\d=+*,{}()\\^]*(?:\^\{?[23])?(?:\((?!or\b)[^()=]*\)?)?)?[\s.]*"
)


def load(split, path=None, limit=None):
    """The first `limit` examples {"question", "gold": number as text, "solution": worked, "" if
    unknown, "style": "boxed" | "tags" | "boxed-tags"}, and "written" where the row has commas or
    more in the gold answer.

    path: empty for the hub's rows; "d1" or "d1-eval" for the same in style "tags" or "boxed-tags";
    a .jsonl, .csv or .parquet file; or a hub id; both with @d1 or @d1-eval behind them for these
    styles. The hub's train split gives "train" and "validation" (512 of 7,473 rows). A file gives
    the same rows for every split.
    """
    path, style = source_and_style(path or HUB)
    path = path or HUB
    if path == HUB:
        rows = read_rows(HUB, "test" if split == "test" else "train", PRESETS, config="main")
        if split != "test":
            rows = held_out(rows, split, lambda i: stable_hash("gsm8k", rows[i]["question"]))
    else:
        rows = read_rows(path, split, PRESETS, limit)
    return [
        {"style": "boxed"} | row | style
        for row in parse_rows(_problem, COLUMNS, path, rows[:limit])
    ]


def prompt(example):
    """One user message, no examples. "tags" and "boxed-tags" are d1's prompts to the byte."""
    question = example["question"]
    content = {
        "boxed": f"{question}\n{INSTRUCTION}",
        "tags": TAGS + question,
        "boxed-tags": f"{EVALUATION.format(' ')}\n\n{question}",
    }
    return user(content[example["style"]])


def extract(completion, example):
    r"""The answer of a completion, normalised if it is a number (`normalised`); None if there is
    none. Never raises.

    It is the final answer (boxes and answer tags), if it is a sentence the number in it. Without
    one, and if the prompt does not ask for answer tags, the first rule that finds something:
      1. the number right after the last "####";
      2. the first number of the sentence after the last "answer is", or after the last "=" in that
         sentence;
      3. the last number, unless it ends a list: 1, 2, 3.
    """
    last = final_answer(completion)
    if last is None and example["style"] == "boxed":
        last = ([None] + final_numbers(plain(completion)))[-1]
    elif last and not normalised(last) and SENTENCE.fullmatch(sentence := plain(last)):
        numbers = {*final_numbers(sentence)}
        last = numbers.pop() if len(numbers) == 1 else last
    return last and normalised(last) or last if len(last or "") <= MAX_LENGTH else None


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
    gold = f"\\boxed{{{example['gold']}}}" if "boxed" in example["style"] else example["gold"]
    if "tags" in example["style"]:
        return f"<reasoning>\n{steps}\n</reasoning>\n<answer>\n{gold}\n</answer>"
    return f"{steps}\nThe answer is {gold}."


def plain(text):
    r"""Text without the LaTeX around its numbers: \$1{,}450 -> 1,450, \frac{1}{2} -> 1/2,
    \text{eggs} -> eggs."""
    for latex, replacement in REPLACED.items():
        text = text.replace(latex, replacement)
    text = MONEY.sub(r" \1", WORDS.sub(r"\1", FULL_HOUR.sub("", text)))
    return FRACTION.sub(r" \1\2/\3", SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text))


def normalised(answer):
    r"""A number as text that `Fraction` reads: "\$2{,}125" -> "2125", "x = -1/2 \text{ km}" ->
    "-1/2"; None for anything else."""
    text = plain(answer[: MAX_LENGTH + 1]).rpartition("=")[2].strip(" \t\r\n{}()")
    match = WHOLE.fullmatch(text) if len(answer) <= MAX_LENGTH else None
    return match[1] + match[2].replace(",", "") if match else None


def final_numbers(text):
    """Numbers of plain text; the last is the one that the rules of `extract` find."""
    if after_hashes := AFTER_HASHES.findall(text):
        return after_hashes
    *before, after = ANSWER_IS.split(text)
    if before:
        behind = after[:MAX_LENGTH].lstrip(" \t\r\n:*")
        sentence = re.split(r"\n|\.(?=\s|$)", behind, maxsplit=1)[0]
        if number := IN_TEXT.search(sentence.rpartition("=")[2]):
            return [number[0]]
    return [] if LISTED.search(text) else IN_TEXT.findall(text)


def _problem(row):
    if chat := chat_row(row):
        question, solution, gold = chat[0], "", str(chat[1])
    else:
        question, (solution, _, gold) = row["question"], str(row["answer"]).rpartition("####")
    for instruction in (INSTRUCTION, VERL):
        question = question.strip().removesuffix(instruction).strip()
    written, gold = gold.strip(), normalised(gold)
    if gold is None:
        raise ValueError("the answer is no number")
    example = {"question": question, "gold": gold, "solution": solution.strip()}
    return example if written == gold else example | {"written": written}


if __name__ == "__main__":
    main("gsm8k")
