"""Programs in completions: which lines are code, and their score in the sandbox."""

import re
import textwrap

from evals.math_grader import ask
from evals.sandbox import MAX_CODE, run

FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n`]*$", re.MULTILINE)
CODE_LINE = re.compile(r"^(?:async |def |class |import |from |@)", re.MULTILINE)
MAX_CUTS = 50  # lines at which `trimmed` looks for the end of the code


def fenced(text):
    """(rank, code) of the fenced blocks; only the last one may be unclosed. rank: 2 for closed
    blocks of Python, 1 for other closed ones, 0."""
    marks = FENCE.finditer(text)
    for opening in marks:
        closing = next(marks, None)
        is_python = opening[1].lower() in ("python", "py", "python3")
        code = text[opening.end() + 1 : closing.start() if closing else len(text)]
        yield (1 + is_python if closing else 0), code


def defines(code, names):
    """Whether it defines one of the names: a function or class at any indentation, or an
    assignment."""
    name = "|".join(map(re.escape, names))
    definition = rf"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+(?:{name})\b|^(?:{name})[ \t]*="
    return bool(names) and bool(re.search(definition, code, re.M))


def code_of(text, names):
    """The code of a completion, not checked; None if there is no text.

    The first of these that exists: the last closed python block that defines one of `names`; the
    last closed block that does; the last block, closed or not, that does; the text, if it does; the
    last closed python block; the last block; the text. Leading spaces are kept: they may be the
    indentation of a body. Only the last MAX_CODE characters are read.
    """
    text = text[-MAX_CODE:]
    blocks = [*fenced(text)]
    ranked = sorted(blocks, key=lambda block: block[0])
    if defining := [code for _, code in ranked if defines(code, names)]:
        return textwrap.dedent(defining[-1])
    if defines(text, names):
        return trimmed(textwrap.dedent(text))
    _, code = [(0, text), *(ranked if 2 in dict(blocks) else blocks)][-1]
    return code if code.strip() else None


def trimmed(text):
    """Code without the prose around it: all of the text if it parses; else from the first line that
    looks like code to the last one up to which it parses."""
    if first_program([text]):
        return text
    start = CODE_LINE.search(text)
    code = text[start.start() :] if start else text
    lines = code.split("\n")
    ends = [len(lines), *(i for i in range(len(lines) - 1, 0, -1) if lines[i][:1].strip())]
    parts = ("\n".join(lines[:end]) for end in ends[:MAX_CUTS])
    return first_program(parts) or code


def first_program(texts):
    """The first text that Python's parser accepts, of those that the sandbox would run; None if
    there is none. It runs in another process, for five seconds at most: a long chain of dots or
    calls takes it longer, and then there is none, which stderr says."""
    texts = [text for text in texts if len(text) <= MAX_CODE]
    number = ask("python", texts) if texts else None
    return None if number is None else next(iter(texts[number:]), None)


def passed(job):
    """1.0 if the program of a Job passes its tests, 0.0 if it fails or there is none."""
    return float(bool(job) and run(job).passed)
