r"""GSM8K: grade-school word problems with a number as answer.

    python evals/gsm8k.py --model sdar-8b --gen-length 256 --denoising-steps 4   openai/gsm8k, test
    python evals/gsm8k.py --completions FILE.jsonl --data test.jsonl
    python evals/gsm8k.py --model llada-8b --data test.jsonl@d1-eval   d1's prompt for evaluation

The metric is exact: 1.0 if the number of the completion (`extract`) equals the gold one as a
fraction, else 0.0. So 18.00, \$18 and 18 dollars are 18, and 1,450,000 is one number; OpenCompass
reads its last run of digits, 000. Units are not interpreted: 50\% is 50, and 2 dozen is 2. But 2
million is no number.
"""

if __name__ == "__main__":
    import command  # noqa: F401

import re
from fractions import Fraction

from data.rows import is_of, read_rows
from evals import WORDS, final_answer
from evals.examples import (
    STYLES,
    chat_row,
    held_out,
    own_part,
    parse_rows,
    source_and_style,
    user,
    worked,
)
from evals.math_grader import FRACTION, MAX_LENGTH, rewritten, rules

HUB = "openai/gsm8k"
# names that `load` takes besides files and hub ids: HUB's rows with other prompts
PRESETS = STYLES | {"4-shot": "shown"}
# Prompts, by style: boxed is OpenCompass' gsm8k_0shot_v2_gen_17d799, tags that of d1's training,
# boxed-tags of its evaluation, shown OpenCompass' gsm8k_gen_1d7fe4
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
# worked examples of OpenCompass' gsm8k_gen_1d7fe4, to the byte: question, answer, question, ...
SHOWN = """\
Question: Angelo and Melanie want to plan how many hours over the next week they should study \
together for \
their test next week. They have 2 chapters of their textbook to study and 4 worksheets to \
memorize. They figure out that they should dedicate 3 hours to each chapter of their textbook and \
1.5 hours for each worksheet. If they plan to study no more than 4 hours each day, how many days \
should they plan to study total over the next week if they take a 10-minute break every hour, \
include 3 10-minute snack breaks each day, and 30 minutes for lunch each day?
Let's think step by step
Answer:

Angelo and Melanie think they should dedicate 3 hours to each of the 2 chapters, 3 hours x 2 \
chapters = 6 hours total.
For the worksheets they plan to dedicate 1.5 hours for each worksheet, 1.5 hours x 4 worksheets = \
6 hours total.
Angelo and Melanie need to start with planning 12 hours to study, at 4 hours a day, 12 / 4 = 3 \
days.
However, they need to include time for breaks and lunch. Every hour they want to include a \
10-minute break, so 12 total hours x 10 minutes = 120 extra minutes for breaks.
They also want to include 3 10-minute snack breaks, 3 x 10 minutes = 30 minutes.
And they want to include 30 minutes for lunch each day, so 120 minutes for breaks + 30 minutes for \
snack breaks + 30 minutes for lunch = 180 minutes, or 180 / 60 minutes per hour = 3 extra hours.
So Angelo and Melanie want to plan 12 hours to study + 3 hours of breaks = 15 hours total.
They want to study no more than 4 hours each day, 15 hours / 4 hours each day = 3.75
They will need to plan to study 4 days to allow for all the time they need.
The answer is 4

Question: Mark's basketball team scores 25 2 pointers, 8 3 pointers and 10 free throws.  Their \
opponents \
score double the 2 pointers but half the 3 pointers and free throws.  What's the total number of \
points scored by both teams added together?
Let's think step by step
Answer:

Mark's team scores 25 2 pointers, meaning they scored 25*2= 50 points in 2 pointers.
His team also scores 6 3 pointers, meaning they scored 8*3= 24 points in 3 pointers
They scored 10 free throws, and free throws count as one point so they scored 10*1=10 points in \
free throws.
All together his team scored 50+24+10= 84 points
Mark's opponents scored double his team's number of 2 pointers, meaning they scored 50*2=100 \
points in 2 pointers.
His opponents scored half his team's number of 3 pointers, meaning they scored 24/2= 12 points in \
3 pointers.
They also scored half Mark's team's points in free throws, meaning they scored 10/2=5 points in \
free throws.
All together Mark's opponents scored 100+12+5=117 points
The total score for the game is both team's scores added together, so it is 84+117=201 points
The answer is 201

Question: Bella has two times as many marbles as frisbees. She also has 20 more frisbees than \
deck cards. If \
she buys 2/5 times more of each item, what would be the total number of the items she will have if \
she currently has 60 marbles?
Let's think step by step
Answer:

When Bella buys 2/5 times more marbles, she'll have increased the number of marbles by 2/5*60 = 24
The total number of marbles she'll have is 60+24 = 84
If Bella currently has 60 marbles, and she has two times as many marbles as frisbees, she has 60/2 \
= 30 frisbees.
If Bella buys 2/5 times more frisbees, she'll have 2/5*30 = 12 more frisbees.
The total number of frisbees she'll have will increase to 30+12 = 42
Bella also has 20 more frisbees than deck cards, meaning she has 30-20 = 10 deck cards
If she buys 2/5 times more deck cards, she'll have 2/5*10 = 4 more deck cards.
The total number of deck cards she'll have is 10+4 = 14
Together, Bella will have a total of 14+42+84 = 140 items
The answer is 140

Question: A group of 4 fruit baskets contains 9 apples, 15 oranges, and 14 bananas in the first \
three \
baskets and 2 less of each fruit in the fourth basket. How many fruits are there?
Let's think step by step
Answer:

For the first three baskets, the number of apples and oranges in one basket is 9+15=24
In total, together with bananas, the number of fruits in one basket is 24+14=38 for the first \
three baskets.
Since there are three baskets each having 38 fruits, there are 3*38=114 fruits in the first three \
baskets.
The number of apples in the fourth basket is 9-2=7
There are also 15-2=13 oranges in the fourth basket
The combined number of oranges and apples in the fourth basket is 13+7=20
The fourth basket also contains 14-2=12 bananas.
In total, the fourth basket has 20+12=32 fruits.
The four baskets together have 32+114=146 fruits.
The answer is 146
"""
SHOTS = re.findall(r"(.*\n.*\nAnswer:)\n\n((?:.+\n)+)", SHOWN)
PROMPTS = {
    "boxed": f"QUESTION\n{INSTRUCTION}",
    "tags": f"{TAGS}QUESTION",
    "boxed-tags": f"{EVALUATION.format(' ')}\n\nQUESTION",
    "shown": "Question: QUESTION\nLet's think step by step\nAnswer:",
}
COLUMNS = (
    "question and answer (a number, or a solution that ends in #### and a number), "
    "or prompt and reward_model.ground_truth (DARE)"
)

# LaTeX around numbers: \$1{,}450 -> 1,450, \text{eggs} -> eggs, \frac{1}{2} -> 1/2; 2:00 pm -> 2 pm
PLAIN = r"""
\{,\} => ,
[–−] => -
\\[!,%;:]|\\q?quad|\\(?=[ $])|\\+$|^~|~(?!\d)|%|\\approx|\^\{?\\circ\}?|° =>
(?<=[0-9]):00\b(?!:) =>
####[\s*]{0,9}[\d,.]*\d! =>
((?<![A-Za-z\d_)])-)?[$€£] * =>  \1"""
PLAIN = [*[(WORDS, r"\1")] * 2, *rules(PLAIN + FRACTION)]
# boxes: those without an answer, such as \boxed{Your Answer}; the sign in front of one
BOXES = rules(r"""
\\boxed\{(?:\s*|[^{}\d]{0,40}(?i:answer)[^{}\d]{0,40})\} =>
""")

# ASCII digits only, without exponents. In running text - is a sign unless it subtracts.
UNSIGNED = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+|/0*[1-9][0-9]*)?|\.[0-9]+)"
# 2 million is not 2, nor are 2K, 2-thousand, 2bn, 2 squared and 2,50
SCALED = (
    r"(?!\d|,\d|[eE][-+]?\d|\s?[kK]\b|(?-i:[MB]\b)|[²³]|\s?[百千万亿]|[-\s]{0,4}(?i:hundred|thousand"
    r"|lakh|crore|grand|(?:[mbz]|(?:t|quad)r|quint)illion|mln|bn|squared|cubed)s?\b)"
)
NUMBER = (
    rf"(?:(?<![A-Za-z\d_)])-)?(?<![A-Za-z\d_^])(?<!\^\{{)(?<!\d[.,])(?<![^#]#){UNSIGNED}{SCALED}"
)
IN_TEXT = re.compile(NUMBER)
RANGE = re.compile(  # 18 or 20, 18-20, 18, 20, 18 1/2, 18 times 4, 18 and a half, 18 divided by x
    r"(?i)\s*(?:(?:(?:or|to|and|over|times)\b|[-+/^x×÷·⋅~,;]|\*{1,2})\s*(?:[0-9]|(?:two|three|ten)\b)"
    r"|(?:plus|minus|(?:divid|multipli)ed by)\b|and (?:a |one )?(?:half|third|quarter)\b)|\s+[0-9]"
)
# behind it is the answer: "the answer is 18", "Answer: 18", "Wait, no: 18", or 20 of "the answer is
# 18. No, it is 20". But not the headings "#### 1. Add up" and "Answer: 1. Add up", nor a comment of
# code
STATEMENT = re.compile(
    r"(?:(?:####(?!\W{0,9}\d+[.)]\s*\w)|(?<!(?<!#)# )answer[*_]{0,2}\s?[:=](?!\W{0,9}1[.)]\s))"
    rf"(?=[\s*]{{0,9}}{NUMBER})"
    r"|answer(?: \([^()\n]{0,40}\)| (?:to|for|of|in) [^.:=\n]{0,60}?)?,?(?: \w{2,12},?)?"
    r" (?:is|(?:would|should|must|will)(?: (?!not)\w{2,12})? be)\b(?! not))"
    r"(?:[^\n]{0,60}[.!?\n]\s{0,4}(?:(?:no|wait|actually|sorry)[,.:!]\s{1,4}){1,3}"
    r"(?:(?:it|that)(?:'s|\s+is)(?! not)|(?=\**[0-9])))?"
    r"|(?:^|[.!?\n]\s{0,4})(?:(?:no|wait|actually|sorry|correction)[,.:!]\s{1,4}){1,3}"
    rf"(?:(?:it|that)(?:'s|\s(?:is|should be))\s)?(?=\W{{0,9}}{NUMBER}\W{{0,9}}(?:\n|$))",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")
RESULT = re.compile(r"=|\bround\w*")  # in front of a result: 50 / 3 = 16.7, rounded to 17
# 20, not 18; 20 or 18; 1, 2, 3
UNDECIDED = re.compile(rf"(?:(?:\bnot|n't|\bor)\W{{0,4}}{NUMBER}\D*|\d,\s{{1,4}}{NUMBER}\W*)$")
# words, nothing to calculate: "Box C is 2 dollars more than A", but not "twice 18" or "not 18"
SENTENCE = re.compile(
    r"(?!.*\b(?:not?|plus|minus|divided|multiplied|negative|twice|half|third|quarter|double|triple|times(?=\s+\S)|square|less|fewer|or|question|wrong|incorrect)\b)"
    r"(?=.*[a-z]{2})[^=+*/^{}()\\<>?]*",
    re.IGNORECASE,
)
# a number and nothing else but a unit and brackets: dollars, cm^2, /day, minutes (2 hours), 个
WHOLE = re.compile(
    rf"(-?)\s*({UNSIGNED}){SCALED}\s*"
    r"(?:/?\s*(?!(?:and|or|plus|minus|times|divided|multiplied|is|x)\b|.*\b(?:not|wrong|incorrect"
    r"|and (?:a|one) (?:half|third|quarter))\b)[A-Za-z一-鿿]"
    r"[^\d=+*,{}()\\^]*(?:\^\{?[23])?(?:\((?!or\b)[^()=]*\)?)?)?[\s.]*"
)
UNEQUAL = re.compile(r"(?:^|=)\s*(\d+)\s*=\s*(?!\1\s*$)\d+\s*$")  # 20 = 18


def load(split, path=None, limit=None):
    """The first `limit` examples {"question", "gold": number as text, "solution": worked, "" if
    unknown, "style": "boxed" | "tags" | "boxed-tags"}, and "written" where the row has commas or
    more in the gold answer.

    path: empty for the hub's rows; "d1" or "d1-eval" for the same in style "tags" or "boxed-tags";
    a .jsonl, .csv or .parquet file; or a hub id; both with @d1 or @d1-eval behind them for these
    styles. The hub's train split gives "train" and "validation" (512 of 7,473 rows). A file gives
    the same rows for every split.
    """
    path, style = source_and_style(path, HUB, PRESETS)
    own = is_of(path, HUB)
    held = own and split != "test"
    part, config = "train" if held else split, "main" if own else None
    rows = read_rows(path, part, PRESETS, config=config)
    if held:
        rows = held_out(rows, split, "gsm8k")
    examples = parse_rows(_problem, COLUMNS, rows[:limit])
    return [{"style": "boxed"} | example | style for example in examples]


def prompt(example):
    """One user message, after four worked examples in the style "shown". "tags" and "boxed-tags"
    are d1's prompts to the byte."""
    style = example["style"]
    content = PROMPTS[style].replace("QUESTION", example["question"])
    return user(content, SHOTS if style == "shown" else ())


def extract(completion, example):
    r"""The answer of a completion, normalised if it is a number (`normalised`); None if there is
    none. Never raises, linear in time.

    It is the final answer (boxes and answer tags), if it is a sentence the number in it. Unless the
    prompt asks for answer tags, a number stated on a later line replaces it, and without one the
    last statement of all counts: the sentence behind "####", "Answer:" or "Wait, no:" (if a
    number follows) or "answer is", else the last sentence with a number. In it the first number
    behind the last "=" counts, without "=" the first of a statement and the last of another
    sentence; but not one that begins or ends a list, or is calculated with: 1, 2, 3. A question
    that the model asks itself, and what follows, are not read.
    """
    completion = rewritten(own_part(completion), BOXES)
    last = final_answer(completion)
    if "tags" not in example["style"]:
        lines = re.split(r"(?:box(?:ed)?\s*\{|</answer>)[^\n]*", completion)
        last = stated(rewritten(completion if last is None else lines[-1], PLAIN), last)
    if last and SENTENCE.fullmatch(sentence := rewritten(last, PLAIN)):
        numbers = {*IN_TEXT.findall(sentence)}
        last = numbers.pop() if len(numbers) == 1 else last
    return last and normalised(last) or last if len(last or "") <= MAX_LENGTH else None


def score(completion, example):
    """Whether the number of the completion is the gold one. Never raises."""
    found = normalised(extract(completion, example) or "")
    return found is not None and Fraction(found) == Fraction(example["gold"])


def answer(example, draw=0):
    """The worked solution as the prompt asks for it, without the calculator's <<48/2=24>>.
    SystemExit if unknown."""
    steps = re.sub(r"<<[^<>\n]*>>", "", worked(example))
    gold = f"\\boxed{{{example['gold']}}}" if "boxed" in example["style"] else example["gold"]
    if "tags" in example["style"]:
        return f"<reasoning>\n{steps}\n</reasoning>\n<answer>\n{gold}\n</answer>"
    return f"{steps}\nThe answer is {gold}."


def normalised(answer):
    r"""A number as text that `Fraction` reads: "\$2{,}125" -> "2125", "x = -1/2 \text{ km}" ->
    "-1/2"; None for anything else."""
    plain = rewritten(answer, PLAIN)
    left, _, text = plain.rpartition("=")
    match = WHOLE.fullmatch(text.strip(" \t\r\n{}()"))
    is_equal = match and not left.endswith(("!", "<", ">")) and not UNEQUAL.search(plain)
    return match[1] + match[2].replace(",", "") if is_equal else None


def stated(text, answer):
    """The number that plain text states, by the rules of `extract`; None if there is none. answer:
    the final answer in front of it, which only a statement that begins with a number replaces."""
    for statement in reversed(STATEMENT.split(text)[1:]):
        behind = statement[:MAX_LENGTH].lstrip(" \t\r\n:*")
        result = RESULT.split(SENTENCE_END.split(behind, maxsplit=1)[0])[-1]
        number = IN_TEXT.search(result)
        if number and (not answer or number.start() < 3):
            return None if RANGE.match(result, number.end()) else number[0]
    sentences = [*filter(IN_TEXT.search, SENTENCE_END.split(text))]
    if answer or not sentences or UNDECIDED.search(sentences[-1]):
        return answer
    *calculated, result = RESULT.split(sentences[-1])
    numbers = IN_TEXT.findall(result) or IN_TEXT.findall(sentences[-1])
    return numbers[0 if calculated else -1]


def _problem(row):
    question, gold = chat_row(row) or (row["question"], row["answer"])
    solution, _, gold = str(gold).rpartition("####")
    for instruction in (INSTRUCTION, VERL):
        question = question.strip().removesuffix(instruction).strip()
    written, gold = gold.strip(), normalised(gold)
    if gold is None:
        raise ValueError("the answer is no number")
    example = {"question": question, "gold": gold, "solution": solution.strip()}
    return example if written == gold else example | {"written": written}
