r"""Is a mathematical answer right? The last box of a completion, and two ways to judge its content.

    math_verify(r"\frac{2}{4}", r"\frac{1}{2}")   True: Math-Verify 0.9, as in SDAR's MATH-500
    hendrycks(r"\frac{2}{4}", r"\frac{1}{2}")     False: normalised strings, as in DARE's MATH of
                                                 5,000 problems (OpenCompass)

Math-Verify is sympy, which can run forever, take all memory and (through its parser) run Python
code. So it runs in separate processes, which the kernel ends after TIMEOUT seconds, and so does
Python's parser, for evals/programs.py. This file is also the program of these processes and
therefore imports nothing slow.
"""

import json
import logging
import os
import re
import resource
import signal
import sys
from collections import Counter, defaultdict
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache, partial
from subprocess import DEVNULL, PIPE, Popen

MAX_LENGTH = 512  # characters of an answer; longer ones do not count
MAX_TEXT = 100_000  # characters at the end of a completion that are read
TIMEOUT = 5.0  # seconds for a question: a pair of answers, or some programs
MEMORY = 4 * 2**30  # bytes of address space of a process

# a box with the minus sign in front of it, unless that subtracts
BRACES = re.compile(r"\\[{}]|(?:((?<![\w)}\]-])-|)\$?(\\boxed\s*))?([{}])")
# up to the next box: what has one inside is no answer
UNCLOSED = re.compile(rf"((?:\\\$|(?!\\boxed)[^\n$<>]){{,{MAX_LENGTH}}})[\n$<>]")
# what Math-Verify 0.9 does not see: the 6 of 5 \approx 6, the base of 52_8, words of size, and what
# a last \text says that is no unit
UNSEEN = re.compile(
    r"^(-?[0-9]+) *(?:\\approx|≈)|[0-9]\s*_\s*\{?\s*([0-9]+)"
    r"|\b(hundred|thousand|million|billion|trillion|dozen)\b"
    r"|\\(?:text\w*|mbox|math\w\w)\{(\s*(?:squared|cubed)|[^{}]*(?:(?<![\w^])[0-9]|\?|n't\b"
    r"|\b(?:no[rt]?|or|wrong|incorrect|false|maybe|perhaps|plus|minus)\b))[^{}]*\}$"
)
# numbers, letters and signs, of which no rearrangement of a formula loses one
ATOM = re.compile(
    r"\\(?:[dt]?frac|sqrt|left|right|cdot|times|div)(?![a-z])|(\\[a-z]+|\d+(?:\.\d+)?|[A-Za-z!|-])"
)
# one name between bounds, and an interval: 0 < x < 1 is (0, 1)
RANGE = r"([^<>=]*([<>]|\\[lgn]\w+))? *\\?[^\W\d][\w()]* *(([<>]|\\[lgn]\w+)[^<>=]*)?\n.*[)\]]"
GROUPED = r"[0-9]{1,3}(?:,[0-9]{3})+"  # 1,450,000
NUMBER = re.compile(
    rf"[-+]?(?:{GROUPED}|[0-9]+|(?=\.))(?:\.[0-9]+)?(?:E-?[0-9]{{1,3}})?|-?[0-9]+/0*[1-9][0-9]*"
)
# \frac{1}{2} as 1/2, a line of `rules`; in running text - is a sign unless it subtracts
FRACTION = r"""
((?<![\w)])-)?\\[dt]?frac(?:\{\s*(-?[0-9]+)\s*\}\{\s*([0-9]+)\s*\}|([0-9])([0-9])) =>  \1\2\4/\3\5
"""


def rules(table):
    """Lines "pattern => replacement" -> [(pattern, replacement)]"""
    return re.findall("(.*?) => ?(.*)", table)


def rewritten(text, rules):
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text.strip())
    return text.strip()


# what Math-Verify 0.9 does not read: = 3 and \approx 3, sets {x | 0 < x < 1}, signs that are no
# LaTeX, 0.1\overline{36}, 1 1/4, 1 234, 54 52, \text{14 cm}^2, 14 cm^2, and the dots of a list
READ = rules(r"""
^(?:=|≈|\\approx(?![a-z])) =>
√ *(\d+|\w|\{[^{}]*\}|\([^()]*\)) => \\sqrt{\1}
^(?:\\left)?\\\{ *\w+ *(?:\\in *\\mathbb\{?R\}?)? *(?:\\mid|\||:)(.*?)(?:\\right)?\\\}$ => \1
² => ^2
³ => ^3
∞ => {\\infty}
∪(.) => \\cup \1
±(.) => \\pm \1
≤(.) => \\le \1
≥(.) => \\ge \1
≠(.) => \\ne \1
(\.\d*?)(\d{1,3}?)\2\2+ *(?:\\[lc]?dots(?![a-z])|…|\.{3}) => \1\\overline{\2}
(?<=\d)\.\\(?:overline|bar|dot) *\{?9\}? => \\frac{9}{9}
(\.\d*)\\(?:overline|bar|dot) *(?:\{(\d+)\}|(\d)) => \1\2\3\2\3\2\3\2\3\2\3\2\3\2\3
(?<=\d)\\? +(\d+)/(\d+) => \\frac{\1}{\2}
(?<=\d)(?:\\,| )+(?=\d{3}(?!\d)) =>
(?<=\d)(?<![_^c]\d)(?<!c \d)(?:\\[;: ]|\\q?quad|[ ~])+(?=\d) => ,
\\text\{ *(-?[\d.,]*\d)([A-Za-z ]*)\} => \1\\text{\2}
\bsq\.(?= *[a-z]+$) => sq
(?:(?<=[\d}])|(?<=\\pi)) *((?:square |cubic )?(?:[cdkm]m|(?<= )m|in|ft|yd|mi|feet|inches|miles|yards|units|(?:[cdkm]|centi|milli|kilo)?met(?:er|re)s?))\^\{?[23]\}?$ => \\text{\1}
^(?=[<>]|\\[lg]e?q?(?![a-z])) => x
^\\?\w *(?:<|\\lt) *([^<>=]+?) *(?:\\text\{ *or *\}|\\lor|\bor\b) *\\?\w *(?:>|\\gt) *([^<>=]+)$ => (-\\infty,\1)\\cup(\2,\\infty)
^\\?\w *\\leq? *([^<>=]+?) *(?:\\text\{ *or *\}|\\lor|\bor\b) *\\?\w *\\geq? *([^<>=]+)$ => (-\\infty,\1]\\cup[\2,\\infty)
\\[lc]?dots(?![a-z])|…|\.{3} => \\text{dots}
""")  # noqa: E501
COUNTED = r"""
(?<=\d) +mod(?= +\d) => \\mod
\{,\} => ,
\\[!,]|\^\{?\\circ\}?|°|(?<![\w.])\\?\$(?=-?[\d.]) =>
[ .$\\]+$ =>
^(-?[1-9][^/]*?) *\\?%$ => \1
(?<=\d)[\\ ]*(?:\\times|\\cdot) *10\^\{?(-?\d+)\}?$ => E\1"""
COUNTED = rules(COUNTED + FRACTION)


def boxes(text, unclosed=False):
    r"""Contents of complete \boxed{...} up to MAX_LENGTH, in the order in which they open: -3 of
    -\boxed{3}. \{ and \} do not count. Linear.

    unclosed: also of those that lack their bracket, up to the end of the line, $, < or >, with the
    brackets that lack inside.
    """
    found, opened = [], []  # opened: the braces that are open
    for brace in BRACES.finditer(text):
        if brace[3] == "{":
            opened.append(brace)
        elif brace[3] and opened:
            box = opened.pop()
            content = text[box.end() : brace.start()]
            if box[2] and len(content) <= MAX_LENGTH:
                found.append((box.end(), box[1] + content))
    for box in opened if unclosed else ():
        if box[2] and (line := UNCLOSED.match(text, box.end())):
            lacking = line[1].count("{") - line[1].count("}")
            found.append((box.end(), box[1] + line[1] + "}" * lacking))
    return [content for _, content in sorted(found)]


def last_box(text):
    """Stripped content of the last complete box that is not empty, in the last MAX_TEXT characters;
    None if there is none. Unclosed boxes do not count."""
    found = filter(None, map(str.strip, boxes(text[-MAX_TEXT:])))
    return [None, *found][-1]


def math_verify(answer, gold, tolerance=0.0):
    """Whether Math-Verify finds two answers (LaTeX without \\boxed) equal. Equal strings and
    numbers need no process. Decimals are equal to six places, but to no less than two digits.

    tolerance: values that differ by at most this much, plus 1 % for rounding of the last digit, are
    equal too."""
    answer, gold = (rewritten(text, READ) for text in (answer, gold))
    if answer == gold:
        return True
    ours, theirs = number(answer), number(gold)
    if None not in (ours, theirs):
        gap = abs(ours - theirs)
        if gap <= 1.01 * tolerance:
            return True
        if gap > abs(theirs) / 500 and "%" not in answer + gold:
            return False
    same = UNSEEN.findall(answer) == UNSEEN.findall(gold)
    return same and _verdict(answer, gold, tolerance) is True


def number(answer):
    r"""The value of "1,450,000", "\$18.00", "50\%" (50), "90^\circ" (90), "-\frac{1}{2}", "1/2",
    "1.6 \times 10^{-19}"; None for anything else."""
    text = rewritten(answer, COUNTED)
    return Fraction(text.replace(",", "")) if NUMBER.fullmatch(text) else None


# rewriting rules of the string matcher, in this order: {5} is 5, \text behind something is a unit,
# k = 5 is 5
HENDRYCKS = rules(r"""
(?s)^\{(.*)\}$ => \1
\n|\\!|\\[ ]|\.+$ =>
\\\\ => \\
\\[td]frac => \\frac
\\left|\\right =>
(?<=.)\\text\{[^{}]*\}$ =>
\^\{?\\circ\}?|°|\\?[$%] =>
\\(?:text|textbf|mathbf|mathrm|overline)\{([^{}]*)\} => \1
\\mbox\{[^{}]*\}|\\text|x\\in|\\cdot|and =>
\\?infinity|(?<!\\)\binf\b => \\infty
(\d)\.0+(?!\d) => \1
(?<![\d}])\.(?=\d) => 0.
^[^=\d]{0,2}=([^=]*)$ => \1
\\sqrt\s*(\w+) => \\sqrt{\1}
\s =>
\\frac([^{}\\])([^{}\\]) => \\frac{\1}{\2}
\\frac([^{}\\])\{ => \\frac{\1}{
^(-?\d+)/(-?\d+)$ => \\frac{\1}{\2}
""")
# Minerva's: without the words that it takes for units, and commas in numbers
MINERVA = rules(r"""
\\text\{\(([^{}]*)\)\} => \1
\b(?:square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|minutes|digits|cents|degrees|cm|gm|pounds|meters|meals|edges|students|childrentickets|multiples|sec|dollar|miles|yards|ft|units?|squared?)s?\b =>
""")  # noqa: E501
MINERVA += [*HENDRYCKS, (r"(?<=\d),(?=[\d,]*(?:\.\d+)?$)", "")]


def hendrycks(answer, gold):
    """Whether two answers are the same string after normalisation: the rule of MATH's authors, with
    OpenCompass' additions.

    Mostly stricter than Math-Verify: 0.5 is not \\frac{1}{2}, and 9i+6 is not 6+9i; but 18 dollars
    is 18.
    """
    return any(rewritten(answer, rules) == rewritten(gold, rules) for rules in (HENDRYCKS, MINERVA))


# --------------------------------------------------------------------------------------------------
# the processes of Math-Verify and of Python's parser


IDLE = defaultdict(list)  # processes that wait for a question; they end with this one


def start(kind):
    """A process that answers one question at a time. kind: a key of JUDGES."""
    # no secrets in its environment, a process group of its own, and the same string hashes (order
    # of sympy's sets) in every process
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "0"}
    process = Popen(
        [sys.executable, os.path.abspath(__file__), kind], stdin=PIPE, stdout=PIPE, stderr=DEVNULL,
        env=environment, start_new_session=True, text=True
    )  # fmt: skip
    if not process.stdout.readline():
        advice = f"pip install -r requirements.txt; python evals/math_grader.py {kind} says why"
        raise SystemExit(f"The {kind} grader does not start: {advice}")
    return process


def ask(kind, *question):
    """What the function of JUDGES says to the arguments `question`. None if its process dies, as it
    does at TIMEOUT: then the question is named on stderr."""
    idle = IDLE[kind, os.getpid()]  # a fork must not share its parent's pipes
    try:
        process = idle.pop()
    except IndexError:
        process = start(kind)
    with suppress(BrokenPipeError):
        print(json.dumps([TIMEOUT, question]), file=process.stdin, flush=True)
        if said := process.stdout.readline():
            idle.append(process)
            return json.loads(said)
    process.kill()
    process.communicate()  # waits and closes the pipes
    wrong = f"no verdict in {TIMEOUT:g} s, counted as wrong: {str(question[0])[:80]!a}"
    print(f"{kind} grader: {wrong}", file=sys.stderr)


_verdict = lru_cache(2**16)(partial(ask, "math"))


def _read(text):
    """As one formula, or nothing: by default Math-Verify reads "\\leq 12" as 12."""
    from math_verify import LatexExtractionConfig, parse

    return parse(text, [LatexExtractionConfig()], parsing_timeout=None)


def _by_math_verify(answer, gold, tolerance):
    from math_verify import verify
    from sympy import Eq, false, posify

    read = [_read(f"${gold}$"), _read(f"\\boxed{{{answer}}}")]
    options = {  # differences below 1e-15 are some
        "numeric_precision": 300,
        "allow_set_relation_comp": re.fullmatch(RANGE, f"{answer}\n{gold}"),
        "timeout_seconds": None,
    }
    right = verify(*read, **options)
    if not right and r"\sqrt" in answer and "|" not in gold:  # of letters above 0
        right = verify(*posify([side[0] for side in read])[0], **options)
    if any(  # 7 = 5 is not 5
        equation.lhs.is_number and equation.doit() == false
        for side in read[1][:-1]
        for equation in side.atoms(Eq)
    ):
        return False
    if tolerance and not right:  # x = 5 is 5
        theirs, ours = (complex(getattr(side[0], "rhs", side[0]).evalf()) for side in read)
        right = abs(ours - theirs) <= 1.01 * tolerance
    return right


def _is_copy(answer, gold, formulas):
    """Whether the answer equals one of the formulas up to what sympy does unasked: it reorders,
    calculates and collects terms, but neither factors nor expands. Where that alone gives the gold
    answer, all atoms of the formula must be in the answer, as they are not in the gold one. Of an
    equation the last side counts, unless the formula is one."""
    from sympy import false, true

    value = lambda text: _read(f"${text}$")[0].doit()
    atoms = lambda text: Counter(filter(None, ATOM.findall(text)))
    texts = answer, gold, *formulas
    answer, gold, *formulas = (rewritten(text, COUNTED + READ) for text in texts)
    for formula in formulas:
        ours = answer if "=" in formula else answer.rpartition("=")[2]
        is_whole = atoms(formula) <= atoms(ours) and not atoms(formula) <= atoms(gold)
        with suppress(Exception):  # what sympy cannot read is no copy
            same = value(formula)
            if same not in (true, false) and same == value(ours):  # false: two other equations
                if is_whole or same != value(gold):
                    return True
    return False


def _first_program(texts):
    """The first text that Python's parser accepts; None if there is none."""
    import ast

    for text in texts:
        with suppress(Exception):  # whatever it is, the text is no program
            ast.parse(text)
            return text


def _is_zero(formula):
    from sympy import parse_expr, simplify

    return simplify(parse_expr(formula.replace("^", "**"), transformations="implicit")) == 0


JUDGES = {"math": _by_math_verify, "python": _first_program, "copy": _is_copy, "zero": _is_zero}


def serve(kind):
    """The program of these processes: reads JSON lines [seconds, arguments of JUDGES[kind]] from
    stdin and writes what that says to stdout until stdin ends."""
    sys.path.pop(0)  # this folder: its modules are not top-level ones
    replies, sys.stdout = sys.stdout, sys.stderr
    # Math-Verify warns that its own timeout is off: it could not end sympy
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    if kind == "math" and not _by_math_verify("0.5", "\\frac{1}{2}", 0.0):
        raise SystemExit("Math-Verify reads no LaTeX: its parser, antlr4, is missing")
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        seconds, question = json.loads(line)
        # of computing, however busy the machine is: then the signal ends this process
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            said = JUDGES[kind](*question)
        except Exception:  # what sympy cannot read is wrong
            said = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(said), file=replies, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
