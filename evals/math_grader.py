r"""Is a mathematical answer right? The last box of a completion, and four judges of what stands in it.

    from evals.math_grader import grade
    grade(r"so $\boxed{\frac{2}{4}}$", r"\frac{1}{2}")                  True, by Math-Verify
    grade(r"so $\boxed{\frac{2}{4}}$", r"\frac{1}{2}", "hendrycks")     False

GRADERS, by name:
    math_verify   the last box against the gold answer with Math-Verify 0.9, as in SDAR's MATH-500
    hendrycks     the last box against the gold answer as normalised strings, as in OpenCompass (DARE's MATH of 5,000 problems)
    deepscaler    the last box against the gold answer as normalised strings, or by sympy with guards, as in DARE's RL reward
    last_number   the last number of the last box, or of the whole completion where it has none, against the gold number

Math-Verify is sympy, which can run for ever, take all memory and (through its parser) Python code: it runs in processes of
its own, which are killed after TIMEOUT seconds. This file is also the program of those processes, so it imports nothing slow.
"""

import atexit
import json
import os
import re
import select
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import lru_cache

MAX_LENGTH = 512  # characters of an answer; longer ones do not count
TIMEOUT = 5.0  # seconds for a pair of answers
START_TIMEOUT = 120.0  # seconds in which a process must have imported sympy
MEMORY = 4 * 2**30  # bytes of address space of a process

BRACES = re.compile(r"(\\boxed\s*\{)|\\?[{}]")
BASE = re.compile(r"[0-9]\s*_\s*\{?\s*([0-9]+)")
# -1,450,000.50 with what may stand around it: $ \$ % \% ^\circ, spaces and a final full stop
NUMBER = re.compile(
    r"([-+]?)(?:\\?\$)?([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(\.[0-9]+)?(?:\s*\\?%)?\.?"
)
LAST_NUMBER = re.compile(
    r"(?<![\w.])(?<!\w-)-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:/0*[1-9][0-9]*)?"
)
FRACTION = re.compile(r"(-?)\\[dt]?frac(?:\{(-?[0-9]+)\}\{([0-9]+)\}|([0-9])([0-9]))")


def boxes(text: str) -> list[str]:
    r"""Contents of complete \boxed{...} up to MAX_LENGTH, in the order in which they open; \{ and \} do not count. Linear."""
    opened, found = (
        [],
        [],
    )  # opened: where the content of each open brace starts, and whether it is that of a box
    for brace in BRACES.finditer(text):
        if brace[1] or brace[0] == "{":
            opened.append((brace.end(), bool(brace[1])))
        elif brace[0] == "}" and opened:
            start, is_box = opened.pop()
            if is_box and brace.start() - start <= MAX_LENGTH:
                found.append((start, brace.start()))
    return [text[start:end] for start, end in sorted(found)]


def last_box(text: str) -> str | None:
    """Stripped content of the last complete box that is not empty; None where there is none. Boxes left open do not count."""
    full = [box.strip() for box in boxes(text) if box.strip()]
    return full[-1] if full else None


def grade(completion: str, gold: str, grader: str = "math_verify") -> bool:
    """Whether the answer of a completion is the gold one. Never raises for any text; an answer that a judge cannot read, or
    not within TIMEOUT, is wrong. SystemExit where there is no such grader, or Math-Verify is not installed."""
    return _grader(grader)(completion, gold)


def grade_batch(
    completions: list[str], golds: list[str], grader: str = "math_verify"
) -> list[bool]:
    """`grade` of many at once, in order: `in_threads`."""
    return in_threads(_grader(grader), completions, golds)


def in_threads(judge: Callable, completions: list[str], golds: list) -> list:
    """judge(completion, gold) of every pair, in order, as many at once as this rank has cores, at most eight."""
    pairs = list(zip(completions, golds, strict=True))
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    threads = max(
        1, min(8, len(completions), cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    )
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda pair: judge(*pair), pairs))


def math_verify(answer: str, gold: str, tolerance: float = 0.0) -> bool:
    """Whether Math-Verify reads the two answers (LaTeX without \\boxed) as equal. Equal strings and numbers need no process.

    tolerance: values that differ by at most so much are equal too; by 1 % more, for the rounding of their last digit."""
    if answer == gold:
        return True
    if len(answer) > MAX_LENGTH or not answer.strip():
        return False
    ours, theirs = number(answer), number(gold)
    if (
        ours is not None
        and theirs is not None
        and abs(ours - theirs) <= Fraction(tolerance) * Fraction(101, 100)
    ):
        return True
    if (
        ours is not None
        and theirs is not None
        and (ours == theirs or ours.denominator == theirs.denominator == 1)
    ):
        return ours == theirs
    # Math-Verify 0.9 does not look at the base of a number: 52_8 is 52 to it
    return BASE.findall(answer) == BASE.findall(gold) and _judged(answer, gold, tolerance)


def number(answer: str) -> Fraction | None:
    r"""The value of "1,450,000", "\$18.00", "50\%" (50), "90^\circ" (90), "-\frac{1}{2}", "1/2"; None for all else."""
    text = (
        answer.strip().removeprefix("$").removesuffix("$")
        if answer.count("$") == 2
        else answer.strip()
    )
    text = re.sub(
        r"\\[!,]|\{,\}|\^\{?\\circ\}?|°", lambda found: "," if found[0] == "{,}" else "", text
    ).strip()
    if match := FRACTION.fullmatch(text):
        sign, over, under = match[1], match[2] or match[4], match[3] or match[5]
        return Fraction(int(sign + "1") * int(over), int(under)) if int(under) else None
    if re.fullmatch(r"-?[0-9]+/0*[1-9][0-9]*", text, re.ASCII):
        return Fraction(text)
    match = NUMBER.fullmatch(text)
    if not match or not (match[2] or match[3]):
        return None
    return Fraction(match[1] + (match[2] or "0").replace(",", "") + (match[3] or ""))


# What the string matcher takes out or rewrites, in this order
HENDRYCKS = [
    (r"\n|\\!|\\ |\.+$", ""),
    (r"\\\\", r"\\"),
    (r"\\[td]frac", r"\\frac"),
    (r"\\left|\\right", ""),
    (r"(?<=.)\\text\{[^{}]*\}$", ""),  # a unit behind something
    (r"\^\{?\\circ\}?|°", ""),
    (r"\\?\$|\\?%", ""),
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
HENDRYCKS = [(re.compile(pattern), replacement) for pattern, replacement in HENDRYCKS]
# The words of Minerva's rule that are taken out as units
UNITS = re.compile(
    r"\b(?:square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|minutes|digits|cents|degrees|cm|gm|pounds|meters"
    r"|meals|edges|students|childrentickets|multiples|sec|dollar|miles|yards|ft|units?|squared?)s?\b"
)


def hendrycks(answer: str, gold: str) -> bool:
    """Whether two answers are the same string once normalised: the rule of MATH's authors, with what OpenCompass adds to it.

    Mostly stricter than Math-Verify: 0.5 is not \\frac{1}{2}, and 9i+6 is not 6+9i; but 18 dollars is 18.
    """

    def stripped(text: str) -> str:
        layer = re.fullmatch(r"\{(.*)\}", text.strip(), re.DOTALL)  # \boxed{{5}}
        text = layer[1] if layer else text
        for pattern, replacement in HENDRYCKS:
            text = pattern.sub(replacement, text.strip())
        return text

    def bare(text: str) -> str:
        plain = stripped(UNITS.sub("", re.sub(r"\\text\{\(([^{}]*)\)\}", r"\1", text)).strip())
        return plain.replace(",", "") if re.fullmatch(r"-?[\d,]+(\.\d+)?", plain) else plain

    return len(answer) <= MAX_LENGTH and (
        stripped(answer) == stripped(gold) or bare(answer) == bare(gold)
    )


# What MATH's authors take out or rewrite, in this order (deepscaler)
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
# PRM800K's normalisation: units and signs, what LaTeX is as plain text, mixed numbers
DEEPSCALER_UNITS = (
    "degree cm centimeter meter mile second minute hour day week month year foot feet inch yard"
)
PLAIN = [
    (r"^\\text\{(.+?)\}", r"\1"),
    (r"\\?[$%]", ""),
    (r" (?:or|and) ", " , "),
    (r"million", "*10^6"),
    (r"billion", "*10^9"),
    (r"trillion", "*10^12"),
    (rf"(?:{'|'.join(DEEPSCALER_UNITS.split())})(?:es)?s? *(?:\^[0-9]+)?|\^ *\\circ", ""),
    (r"^\{([^\0]*)\}$", r"\1"),
    (r",\\! *", ""),
]
LATEX_AS_TEXT = [
    (r"\\[td]?frac *([0-9])([0-9])", r" \1/\2"),
    (r"\\[td]?frac *\{([^{}]*)\} *\{([^{}]*)\}", r" \1/\2"),
    (r"\\sqrt *(?:\[[^\]]*\])? *(?:\{([^{}]*)\}|(\\?\w))", r"sqrt(\1\2)"),
    (r"\\(?:text|textbf|mathrm|mathbf|mbox) *\{([^{}]*)\}", r"\1"),
]
SYMBOLS = {
    "pi": "pi",
    "infty": "inf",
    "cup": "U",
    "cdot": "*",
    "times": "*",
    "le": "≤",
    "leq": "≤",
    "ge": "≥",
    "geq": "≥",
}
SYMBOLS |= {
    name: name for name in "sin cos tan cot sec csc log ln exp min max arcsin arccos arctan".split()
}
GUARDS = re.compile(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]")  # powers that can take sympy for ever
COMMAS = re.compile(r"(?<=\d),(?=\d\d\d(?:\D|$))")
OUTER = re.compile(r"([\[(])([^()\[\]]+)([\])])")


def deepscaler(answer: str, gold: str) -> bool:
    """Whether two answers are equal by DeepScaleR's rule, DARE's RL reward.

    They are if they are the same string by the rule of MATH's authors, or by that of PRM800K, or if sympy finds no difference
    between them (of tuples and intervals in equal brackets: between their parts). Fractions must be in lowest terms, an
    integer must be written as one; with more than two letters or a power of two digits nothing is calculated.
    """
    if len(answer) > MAX_LENGTH:
        return False
    ours, theirs = (_rewritten(text.strip(), MATHD) for text in (answer, gold))
    if ours == theirs:
        return True
    ours, theirs = _plain(answer), _plain(gold)
    if ours == theirs or not ours:
        return ours == theirs
    left, right = OUTER.fullmatch(COMMAS.sub("", ours)), OUTER.fullmatch(COMMAS.sub("", theirs))
    answers = left[2].split(",") if left else [COMMAS.sub("", ours)]
    golds = right[2].split(",") if right else [COMMAS.sub("", theirs)]
    if (
        len(golds) > 1
        and (ours[0], ours[-1]) != (theirs[0], theirs[-1])
        or len(answers) != len(golds)
    ):
        return False
    return all(_same_part(a.strip(), b.strip()) for a, b in zip(answers, golds, strict=True))


def _rewritten(text: str, rules: list[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


def _plain(text: str) -> str:
    """PRM800K's normal form of an answer."""
    text = _rewritten(text, PLAIN)
    if re.fullmatch(r"[-+]?[0-9]+\.0*", text):
        text = text.partition(".")[0]
    if "\\" in text:
        before = None
        while text != before:
            before, text = text, _rewritten(text, LATEX_AS_TEXT)
        text = re.sub(
            r"\\([A-Za-z]+)|\\.", lambda found: _symbol(found[1]) if found[1] else "", text
        ).strip()
    text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", re.sub(r"- *", "-", text))  # 7 3/4
    text = re.sub(r"[ {}]", "", text).lower()
    whole = re.fullmatch(r"([-+]?[0-9]+)(?:\.0*)?", COMMAS.sub("", text))
    return str(int(whole[1])) if whole else text


def _symbol(name: str) -> str:
    """A macro as text: a word, a Greek letter, or nothing."""
    try:
        return SYMBOLS.get(name) or unicodedata.lookup(f"GREEK SMALL LETTER {name}")
    except KeyError:
        return ""


def _same_part(answer: str, gold: str) -> bool:
    """Whether two parts of answers are the same; those that neither rule decides are subtracted by sympy."""
    fraction, whole = r"-?[0-9]+.?/0*[1-9][0-9]*.?", r"[-+]?[0-9]+(?:\.0*)?"
    if re.fullmatch(fraction, answer) and re.fullmatch(fraction, gold):
        return answer == gold
    if bool(re.fullmatch(whole, answer)) != bool(re.fullmatch(whole, gold)):
        return False
    difference = f"({gold})-({answer})"
    letters = {
        letter for letter in difference.replace("sqrt", "").replace("frac", "") if letter.isalpha()
    }
    if (
        len(letters) > 2
        or GUARDS.search(difference)
        or not re.fullmatch(r"[\w\s+\-*/^().!]*", difference)
        or "_" in difference
    ):
        return False
    return _judged(answer, gold, judge="difference")


def last_number(completion: str, gold: str) -> bool:
    """Whether the last number of the last box (without one: of the completion) is the gold answer, which must be a number."""
    wanted = number(gold)
    text = last_box(completion) or completion[-100_000:]
    text = re.sub(r"\{,\}|\\!", lambda found: "," if found[0] == "{,}" else "", text)
    text = FRACTION.sub(
        lambda found: f" {found[1]}{found[2] or found[4]}/{found[3] or found[5]}", text
    )
    found = LAST_NUMBER.findall(text)
    return (
        wanted is not None
        and bool(found)
        and len(found[-1]) <= MAX_LENGTH
        and number(found[-1]) == wanted
    )


def _boxed(judge: Callable[[str, str], bool]) -> Callable[[str, str], bool]:
    """A judge of answers as a judge of completions: no box is wrong."""

    def judged(completion: str, gold: str) -> bool:
        answer = last_box(completion)
        return answer is not None and judge(answer, gold)

    return judged


GRADERS = {
    "math_verify": _boxed(math_verify),
    "hendrycks": _boxed(hendrycks),
    "deepscaler": _boxed(deepscaler),
}
GRADERS["last_number"] = last_number


def _grader(name: str) -> Callable[[str, str], bool]:
    if name not in GRADERS:
        raise SystemExit(f"grader {name!r}: use one of {', '.join(GRADERS)}")
    return GRADERS[name]


# ---------------------------------------------------------------------------------------------------------------------
# the processes of Math-Verify


class Worker:
    """A process that judges one pair of answers at a time."""

    def __init__(self):
        # no secrets in its environment, its own process group, and the same hashes (order of sympy's sets) in every process
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONHASHSEED": "0",
        }
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        if self._line(START_TIMEOUT) != "ready":
            self.kill()
            raise SystemExit(
                "Math-Verify does not start: pip install -r requirements.txt; python evals/math_grader.py says what is wrong"
            )

    def ask(
        self, answer: str, gold: str, tolerance: float = 0.0, judge: str = "math_verify"
    ) -> bool | None:
        """The verdict by a key of JUDGES; None where the process was killed at TIMEOUT or died of the question. It cannot be
        used again then."""
        try:
            self.process.stdin.write(json.dumps([answer, gold, tolerance, judge]).encode() + b"\n")
            self.process.stdin.flush()
            reply = self._line(TIMEOUT)
        except OSError:
            reply = None
        if reply in ("right", "wrong"):
            return reply == "right"
        self.kill()
        return None

    def _line(self, seconds: float) -> str | None:
        """The next line that the process writes within so many seconds. Replies are shorter than a pipe's atomic write."""
        ready = select.poll()
        ready.register(self.process.stdout, select.POLLIN | select.POLLHUP)
        return (
            os.read(self.process.stdout.fileno(), 64).decode().strip()
            if ready.poll(1000 * seconds)
            else None
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        try:
            self.process.stdin.close()
        except BrokenPipeError:  # a question that it did not live to read
            pass
        self.process.stdout.close()


IDLE: list[Worker] = []  # processes that wait for a question
NO_VERDICT: set[str] = (
    set()
)  # answers, or parts of them, that killed a process, or took it longer than TIMEOUT
LACKING = threading.local()  # found: whether this thread met one of them, since lacks_verdict began
os.register_at_fork(after_in_child=IDLE.clear)  # two processes must not share one pipe


@atexit.register
def close() -> None:
    """End the processes that are idle. They also end with this one."""
    while IDLE:
        IDLE.pop().kill()


def lacks_verdict(score: Callable[[], object]) -> bool:
    """Whether score(), which was called before and finds its answers in the cache, met a question without a verdict."""
    LACKING.found = False
    score()
    return LACKING.found


def _judged(answer: str, gold: str, tolerance: float = 0.0, judge: str = "math_verify") -> bool:
    """The verdict of a process; without one the answer is wrong."""
    verdict = _verdict(answer, gold, tolerance, judge)
    LACKING.found = verdict is None or getattr(LACKING, "found", False)
    return bool(verdict)


@lru_cache(maxsize=2**16)
def _verdict(answer: str, gold: str, tolerance: float, judge: str) -> bool | None:
    """The verdict of a process; None of a pair that kills it, which is named once on stderr."""
    try:
        worker = IDLE.pop()
    except IndexError:
        worker = Worker()
    if worker.process.poll() is not None:  # somebody else killed it
        worker.kill()
        worker = Worker()
    verdict = worker.ask(answer, gold, tolerance, judge)
    if verdict is None:
        NO_VERDICT.add(answer)
        print(
            f"math grader: no verdict in {TIMEOUT:g} s, counted as wrong: {answer[:80]!a}",
            file=sys.stderr,
        )
        return None
    IDLE.append(worker)
    return verdict


def _by_math_verify(answer: str, gold: str, tolerance: float) -> bool:
    from math_verify import parse, verify

    read = (
        parse(f"${gold}$", parsing_timeout=None),
        parse(f"\\boxed{{{answer}}}", parsing_timeout=None),
    )
    right = verify(*read, timeout_seconds=None)
    if tolerance and not right:  # x = 5 is 5
        theirs, ours = (complex(getattr(side[0], "rhs", side[0]).evalf()) for side in read)
        right = abs(ours - theirs) <= 1.01 * tolerance
    return right


def _by_difference(answer: str, gold: str, tolerance: float) -> bool:
    from sympy import simplify
    from sympy.parsing import sympy_parser

    steps = (
        *sympy_parser.standard_transformations,
        sympy_parser.implicit_multiplication_application,
    )
    difference = sympy_parser.parse_expr(
        f"({gold})-({answer})".replace("^", "**"), transformations=steps
    )
    return bool(simplify(difference) == 0)


JUDGES = {"math_verify": _by_math_verify, "difference": _by_difference}


def serve() -> None:
    """The program of a Worker: JSON lines [answer, gold, tolerance, judge] on stdin, "right" or "wrong" on stdout, until it
    ends."""
    import logging
    import resource
    import signal

    sys.path.pop(0)  # this folder: its modules are not top-level ones
    import math_verify  # noqa: F401, slow: before the first question

    logging.disable(
        logging.CRITICAL
    )  # Math-Verify warns that its own timeout is off: it needs an alarm, which is ours
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not _by_math_verify("0.5", "\\frac{1}{2}", 0.0):
        raise SystemExit("Math-Verify reads no LaTeX: its parser, antlr4, is missing")
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        answer, gold, tolerance, judge = json.loads(line)
        signal.setitimer(
            signal.ITIMER_REAL, 2 * TIMEOUT
        )  # ends this process if there is nobody left to kill it
        try:
            right = JUDGES[judge](answer, gold, tolerance)
        except Exception:  # what sympy cannot read is wrong
            right = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("right" if right else "wrong", file=replies, flush=True)


if __name__ == "__main__":
    serve()
