r"""Is a mathematical answer right? The last box of a completion, and four ways to judge its
content.

    from evals.math_grader import grade
    grade(r"so $\boxed{\frac{2}{4}}$", r"\frac{1}{2}")                  True, by Math-Verify
    grade(r"so $\boxed{\frac{2}{4}}$", r"\frac{1}{2}", "hendrycks")     False

Graders, by name:
    math_verify   the last box against the gold answer with Math-Verify 0.9, as in SDAR's MATH-500
    hendrycks     the last box against the gold answer as normalised strings, as in OpenCompass
                  (DARE's MATH of 5,000 problems)
    deepscaler    the last box against the gold answer as normalised strings, or by sympy with
                  guards, as in DARE's RL reward
    last_number   the last number of the last box, or of the whole completion if it has none,
                  against the gold number

Math-Verify is sympy, which can run forever, take all memory and (through its parser) run Python
code. So it runs in separate processes, which the kernel ends after TIMEOUT seconds, and so does
Python's parser, for evals/programs.py. This file is also the program of these processes and
therefore imports nothing slow.
"""

import json
import os
import re
import signal
import sys
import unicodedata
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from subprocess import DEVNULL, PIPE, Popen

MAX_LENGTH = 512  # characters of an answer; longer ones do not count
MAX_TEXT = 100_000  # characters at the end of a completion that are read
TIMEOUT = 5.0  # seconds for a question: a pair of answers, or some programs
MEMORY = 4 * 2**30  # bytes of address space of a process

BRACES = re.compile(r"(\\boxed\s*\{)|\\?[{}]")
UNCLOSED = re.compile(rf"((?:\\\$|[^\n$<>]){{,{MAX_LENGTH}}})[\n$<>]")
# what Math-Verify 0.9 does not see: the base of 52_8, and words of size
IGNORED = re.compile(r"[0-9]\s*_\s*\{?\s*([0-9]+)|\b(hundred|thousand|million|billion|dozen)\b")
GROUPED = r"[0-9]{1,3}(?:,[0-9]{3})+"  # 1,450,000
NUMBER = re.compile(rf"[-+]?(?:{GROUPED}|[0-9]+|(?=\.))(?:\.[0-9]+)?|-?[0-9]+/0*[1-9][0-9]*")
# thin spaces and degrees anywhere, a dollar in front of a number
NOT_COUNTED = re.compile(r"\\[!,]|\^\{?\\circ\}?|°|(?<![\w.])\\?\$(?=-?[\d.])")
LAST_NUMBER = re.compile(
    rf"(?<![\w.])(?<!\w-)-?(?:{GROUPED}(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:/0*[1-9][0-9]*)?"
)
FRACTION = re.compile(  # in running text - is a sign unless it subtracts
    r"((?<![\w)])-)?\\[dt]?frac(?:\{\s*(-?[0-9]+)\s*\}\{\s*([0-9]+)\s*\}|([0-9])([0-9]))"
)
OVER = r" \1\2\4/\3\5"  # a match of FRACTION as 1/2


def boxes(text, unclosed=False):
    r"""Contents of complete \boxed{...} up to MAX_LENGTH, in the order in which they open; \{ and
    \} do not count. Linear.

    unclosed: also of those that lack their bracket, up to the end of the line, $, < or >, with the
    brackets that lack inside.
    """
    found, opened = [], []  # opened: where each open brace's content starts, and if it is a box
    for brace in BRACES.finditer(text):
        if brace[1] or brace[0] == "{":
            opened.append((brace.end(), bool(brace[1])))
        elif brace[0] == "}" and opened:
            start, is_box = opened.pop()
            if is_box and brace.start() - start <= MAX_LENGTH:
                found.append((start, text[start : brace.start()]))
    for start, is_box in opened if unclosed else ():
        if is_box and (line := UNCLOSED.match(text, start)):
            lacking = line[1].count("{") - line[1].count("}")
            found.append((start, line[1] + "}" * lacking))
    return [content for _, content in sorted(found)]


def last_box(text):
    """Stripped content of the last complete box that is not empty, in the last MAX_TEXT characters;
    None if there is none. Unclosed boxes do not count."""
    found = [box.strip() for box in boxes(text[-MAX_TEXT:])]
    return next(filter(None, reversed(found)), None)


def grade(completion, gold, grader="math_verify"):
    """Whether the answer of a completion is the gold one. Never raises for any text; an answer that
    a judge cannot read, or not within TIMEOUT, is wrong. SystemExit if Math-Verify is not
    installed."""
    if grader == "last_number":
        return last_number(completion, gold)
    judge = {"math_verify": math_verify, "hendrycks": hendrycks, "deepscaler": deepscaler}[grader]
    answer = last_box(completion)
    return answer is not None and judge(answer, gold)


def math_verify(answer, gold, tolerance=0.0):
    """Whether Math-Verify finds two answers (LaTeX without \\boxed) equal. Equal strings and
    numbers need no process.

    tolerance: values that differ by at most this much, plus 1 % for rounding of the last digit, are
    equal too."""
    if answer == gold:
        return True
    ours, theirs = number(answer), number(gold)
    if ours is not None and theirs is not None:
        if abs(ours - theirs) <= 1.01 * tolerance:
            return True
        if ours.denominator == theirs.denominator == 1:
            return False
    return IGNORED.findall(answer) == IGNORED.findall(gold) and _judged(answer, gold, tolerance)


def number(answer):
    r"""The value of "1,450,000", "\$18.00", "50\%" (50), "90^\circ" (90), "-\frac{1}{2}", "1/2";
    None for anything else."""
    text = NOT_COUNTED.sub("", answer.replace("{,}", ",")).strip().rstrip(" .%$\\")
    if fraction := FRACTION.fullmatch(text):
        text = fraction.expand(OVER).strip()
    return Fraction(text.replace(",", "")) if NUMBER.fullmatch(text) else None


# rewriting rules of the string matcher, in this order
HENDRYCKS = [
    (r"(?s)^\{(.*)\}$", r"\1"),  # \boxed{{5}}
    (r"\n|\\!|\\ |\.+$", ""),
    (r"\\\\", r"\\"),
    (r"\\[td]frac", r"\\frac"),
    (r"\\left|\\right", ""),
    (r"(?<=.)\\text\{[^{}]*\}$", ""),  # a unit behind something
    (r"\^\{?\\circ\}?|°|\\?[$%]", ""),
    (r"\\(?:text|textbf|mathbf|mathrm|overline)\{([^{}]*)\}", r"\1"),
    (r"\\mbox\{[^{}]*\}|\\text|x\\in|\\cdot|and", ""),
    (r"\\?infinity|(?<!\\)\binf\b", r"\\infty"),
    (r"(\d)\.0+(?!\d)", r"\1"),
    (r"(?<![\d}])\.(?=\d)", "0."),
    (r"^.{0,2}=([^=]*)$", r"\1"),  # k = 5
    (r"\\sqrt\s*(\w+)", r"\\sqrt{\1}"),
    (r"\s", ""),
    (r"\\frac([^{}\\])([^{}\\])", r"\\frac{\1}{\2}"),
    (r"\\frac([^{}\\])\{", r"\\frac{\1}{"),
    (r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}"),
]
# Minerva's: without the words that it takes for units, and commas in numbers
UNITS = (
    r"\b(?:square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|minutes"
    r"|digits|cents|degrees|cm|gm|pounds|meters|meals|edges|students|childrentickets|multiples"
    r"|sec|dollar|miles|yards|ft|units?|squared?)s?\b"
)
MINERVA = [
    (r"\\text\{\(([^{}]*)\)\}", r"\1"),
    (UNITS, ""),
    *HENDRYCKS,
    (r"^-?[\d,]+(\.\d+)?$", lambda number: number[0].replace(",", "")),
]


def rewritten(text, rules):
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text.strip())
    return text


def hendrycks(answer, gold):
    """Whether two answers are the same string after normalisation: the rule of MATH's authors, with
    OpenCompass' additions.

    Mostly stricter than Math-Verify: 0.5 is not \\frac{1}{2}, and 9i+6 is not 6+9i; but 18 dollars
    is 18.
    """
    return any(rewritten(answer, rules) == rewritten(gold, rules) for rules in (HENDRYCKS, MINERVA))


# rewriting rules of MATH's authors, in this order (deepscaler)
MATHD = [
    (r"^\\text\{(.+?)\}$", r"\1"),
    (r"\n|\\!", ""),
    (r"\\\\", r"\\"),
    (r"[td]frac", "frac"),
    (r"\\left|\\right|\^\{\\circ\}|\^\\circ|\\\$|\\text\{ [^\0]*|\\%", ""),
    (r"(?<=[ {])\.|^\.", "0."),
    (r"^([^=]{0,2})=([^=]*)$", r"\2"),
    (r"\\sqrt([^{])", r"\\sqrt{\1}"),
    (r" ", ""),
    (r"\\frac([^{])([^{])", r"\\frac{\1}{\2}"),
    (r"\\frac([^{])(?=\{)", r"\\frac{\1}"),
    (r"^0\.5$", r"\\frac{1}{2}"),
    (r"^(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)$", r"\\frac{\1}{\2}"),
]
# PRM800K's normalisation: units and signs, LaTeX as plain text, mixed numbers
LENGTHS_AND_TIMES = (
    "degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard"
)
PLAIN = [
    (r"^\\text\{(.+?)\}", r"\1"),
    (r"\\?[$%]", ""),
    (r" (?:or|and) ", " , "),
    (r"million", "*10^6"),
    (r"billion", "*10^9"),
    (r"trillion", "*10^12"),
    (rf"(?:{LENGTHS_AND_TIMES})(?:es)?s? *(?:\^[0-9]+)?|\^ *\\circ", ""),
    (r"^\{([^\0]*)\}$", r"\1"),
    (r",\\! *", ""),
]
LATEX_AS_TEXT = [
    (r"\\[td]?frac *(?:([0-9])([0-9])|\{([^{}]*)\} *\{([^{}]*)\})", r" \1\3/\2\4"),
    (r"\\sqrt *(?:\[[^\]]*\])? *(?:\{([^{}]*)\}|(\\?\w))", r"sqrt(\1\2)"),
    (r"\\(?:text|textbf|mathrm|mathbf|mbox) *\{([^{}]*)\}", r"\1"),
    (r"\\((?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|ln|exp|min|max)(?![A-Za-z])", r"\1"),
]
SYMBOLS = "pi=pi infty=inf cup=U cdot=* times=* le=≤ leq=≤ ge=≥ geq=≥"
SYMBOLS = dict(pair.split("=") for pair in SYMBOLS.split())
GUARDS = re.compile(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]")  # powers that can take sympy for ever
COMMAS = re.compile(r"(?<=\d),(?=\d\d\d(?:\D|$))")
OUTER = re.compile(r"[\[(]([^()\[\]]+)[\])]")


def deepscaler(answer, gold):
    """Whether two answers are equal by DeepScaleR's rule, DARE's RL reward.

    They are if they are the same string by the rule of MATH's authors or by PRM800K's, or if sympy
    finds no difference between them (for tuples and intervals in equal brackets: between their
    parts). Fractions must be in lowest terms, and an integer must be written as one; nothing is
    calculated with more than two letters or a power of two digits.
    """
    if rewritten(answer, MATHD) == rewritten(gold, MATHD):
        return True
    ours, theirs = _plain(answer), _plain(gold)
    if ours == theirs or not ours:
        return ours == theirs
    answers, golds = _parts(ours), _parts(theirs)
    brackets = len(golds) == 1 or (ours[0], ours[-1]) == (theirs[0], theirs[-1])
    alike = brackets and len(answers) == len(golds)
    pairs = zip(answers, golds, strict=False)
    return alike and all(_same_part(ours.strip(), theirs.strip()) for ours, theirs in pairs)


def _parts(text):
    """The parts of a tuple or an interval; other answers as one part."""
    text = COMMAS.sub("", text)
    inner = OUTER.fullmatch(text)
    return inner[1].split(",") if inner else [text]


def _plain(text):
    """PRM800K's normal form of an answer."""
    text, before = rewritten(text, PLAIN), None
    while text != before:
        before, text = text, rewritten(text, LATEX_AS_TEXT)
    text = re.sub(r"\\([A-Za-z]+)|\\.", lambda macro: _symbol(macro[1] or ""), text)
    text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", re.sub(r"- *", "-", text))  # 7 3/4
    text = re.sub(r"[ {}]", "", text).lower()
    whole = re.fullmatch(r"([-+]?[0-9]+)(?:\.0*)?", COMMAS.sub("", text))
    return str(int(whole[1])) if whole else text


def _symbol(name):
    """A macro as text: a word, a Greek letter, or nothing."""
    try:
        return SYMBOLS.get(name) or unicodedata.lookup(f"GREEK SMALL LETTER {name}")
    except KeyError:
        return ""


def _same_part(answer, gold):
    """Whether two parts of answers are the same; sympy subtracts those that neither string rule
    decides."""
    fraction, whole = r"-?[0-9]+.?/0*[1-9][0-9]*.?", r"[-+]?[0-9]+(?:\.0*)?"
    if re.fullmatch(fraction, answer) and re.fullmatch(fraction, gold):
        return answer == gold
    if bool(re.fullmatch(whole, answer)) != bool(re.fullmatch(whole, gold)):
        return False
    difference = f"({gold})-({answer})"
    letters = set(filter(str.isalpha, difference.replace("sqrt", "").replace("frac", "")))
    legal = re.fullmatch(r"[\w\s+\-*/^().!]*", difference) and "_" not in difference
    if len(letters) > 2 or GUARDS.search(difference) or not legal:
        return False
    return _judged(answer, gold, judge="difference")


def last_number(completion, gold):
    """Whether the last number of the last box (without one: of the completion) is the gold answer,
    which must be a number."""
    text = last_box(completion) or completion[-MAX_TEXT:]
    text = text.replace("{,}", ",").replace("\\!", "")
    found = ["", *LAST_NUMBER.findall(FRACTION.sub(OVER, text))][-1]
    value = number(found) if len(found) <= MAX_LENGTH else None
    return value is not None and value == number(gold)


# --------------------------------------------------------------------------------------------------
# the processes of Math-Verify and of Python's parser


class Worker:
    """A process that answers one question at a time. kind: "math" or "python"."""

    def __init__(self, kind):
        # no secrets in its environment, a process group of its own, and the same string hashes
        # (order of sympy's sets) in every process
        environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "0"}
        self.process = Popen(
            [sys.executable, os.path.abspath(__file__), kind], stdin=PIPE, stdout=PIPE,
            stderr=DEVNULL, env=environment, start_new_session=True, text=True
        )  # fmt: skip
        if not self.process.stdout.readline():
            self.kill()
            advice = {
                "math": "Math-Verify does not start: pip install -r requirements.txt",
                "python": "Python's parser does not start",
            }
            raise SystemExit(f"{advice[kind]}; python evals/math_grader.py {kind} says why")

    def ask(self, *question):
        """What a function of JUDGES says: question is its name and arguments. None if the process
        died, as it does at TIMEOUT; it is unusable then."""
        with suppress(BrokenPipeError):
            print(json.dumps([TIMEOUT, *question]), file=self.process.stdin, flush=True)
            if said := self.process.stdout.readline():
                return json.loads(said)
        self.kill()

    def kill(self):
        self.process.kill()
        self.process.communicate()  # waits and closes the pipes


# processes that wait for a question, by kind; they end with this one
IDLE = {"math": [], "python": []}
# answers and programs that killed a process or took longer than TIMEOUT, once for every time they
# were asked
NO_VERDICT = []
# two processes must not share one pipe
os.register_at_fork(after_in_child=lambda: IDLE.update({kind: [] for kind in IDLE}))


def asked(kind, *question):
    """What a process of a kind says to a question of `Worker.ask`."""
    try:
        worker = IDLE[kind].pop()
    except IndexError:
        worker = Worker(kind)
    if worker.process.poll() is not None:  # killed from outside
        worker.kill()
        worker = Worker(kind)
    said = worker.ask(*question)
    if said is not None:
        IDLE[kind].append(worker)
    return said


def lacks_verdict(task, completion, example):
    """Whether the score of a completion, which was just computed, lacks a verdict. Scores it again:
    Math-Verify's verdicts come from the cache. No other thread may grade meanwhile."""
    before = len(NO_VERDICT)
    if before:
        task.score(completion, example)
    return len(NO_VERDICT) > before


def say_no_verdict(grader, text):
    """The line on stderr for a text that killed a grader's process."""
    print(
        f"{grader}: no verdict in {TIMEOUT:g} s, counted as wrong: {text[:80]!a}", file=sys.stderr
    )


def _judged(answer, gold, tolerance=0.0, judge="math_verify"):
    """The verdict of a process; without one the answer is wrong."""
    verdict = _verdict(answer, gold, tolerance, judge)
    if verdict is None:
        NO_VERDICT.append(answer)
    return bool(verdict)


@lru_cache(maxsize=2**16)
def _verdict(answer, gold, tolerance, judge):
    """The verdict of a process; None for a pair that kills it, which is named once on stderr."""
    verdict = asked("math", judge, answer, gold, tolerance)
    if verdict is None:
        say_no_verdict("math grader", answer)
    return verdict


def _by_math_verify(answer, gold, tolerance):
    from math_verify import parse, verify

    read = [parse(text, parsing_timeout=None) for text in (f"${gold}$", f"\\boxed{{{answer}}}")]
    right = verify(*read, timeout_seconds=None)
    if tolerance and not right:  # x = 5 is 5
        theirs, ours = (complex(getattr(side[0], "rhs", side[0]).evalf()) for side in read)
        right = abs(ours - theirs) <= 1.01 * tolerance
    return bool(right)


def _by_difference(answer, gold, tolerance):
    from sympy import simplify
    from sympy.parsing import sympy_parser as parser

    steps = (*parser.standard_transformations, parser.implicit_multiplication_application)
    difference = f"({gold})-({answer})".replace("^", "**")
    return bool(simplify(parser.parse_expr(difference, transformations=steps)) == 0)


def _first_program(texts):
    """Number of the first text that Python's parser accepts, len(texts) if there is none."""
    import ast

    for number, text in enumerate(texts):
        try:
            ast.parse(text)
            return number
        except Exception:  # whatever it is, the text is no program
            pass
    return len(texts)


JUDGES = {
    "math_verify": _by_math_verify,
    "difference": _by_difference,
    "first_program": _first_program,
}


def serve(kind):
    """The program of a Worker: reads JSON lines [seconds, name in JUDGES, arguments ...] from stdin
    and writes what that says to stdout until stdin ends."""
    import resource

    sys.path.pop(0)  # this folder: its modules are not top-level ones
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if kind == "math":
        import logging

        import math_verify  # noqa: F401, slow: before the first question

        # Math-Verify warns that its own timeout is off: it needs SIGALRM, which is used below
        logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    if kind == "math" and not _by_math_verify("0.5", "\\frac{1}{2}", 0.0):
        raise SystemExit("Math-Verify reads no LaTeX: its parser, antlr4, is missing")
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        seconds, judge, *arguments = json.loads(line)
        # without a handler SIGALRM ends this process, whatever sympy does
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            said = JUDGES[judge](*arguments)
        except Exception:  # what sympy cannot read is wrong
            said = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(said), file=replies, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
