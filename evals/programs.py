"""Programs in completions: which lines are code, and their score in the sandbox."""

import re
import textwrap

from evals import math_grader
from evals.sandbox import MAX_CODE, run_batch

FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n`]*$", re.MULTILINE)
CODE_LINE = re.compile(r"^(?:async |def |class |import |from |@)", re.MULTILINE)
MAX_CUTS = 50  # lines at which `trimmed` looks for the end of the code


def fenced(text):
    """(language, code, closed) of the fenced blocks; only the last one may be unclosed."""
    blocks, marks = [], FENCE.finditer(text)
    for opening in marks:
        closing = next(marks, None)
        code = text[opening.end() + 1 : closing.start() if closing else len(text)]
        blocks.append((opening[1].lower(), code, closing is not None))
    return blocks


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
    blocks = fenced(text)
    closed = [block for block in blocks if block[2]]
    python = [code for language, code, _ in closed if language in ("python", "py", "python3")]
    every = [code for _, code, _ in blocks]
    for group in (python, [code for _, code, _ in closed], every):
        if defining := [code for code in group if defines(code, names)]:
            return textwrap.dedent(defining[-1])
    if defines(text, names):
        return trimmed(textwrap.dedent(text))
    code = (python or every or [text])[-1]
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
    calls takes it longer, and then there is none, which stderr and NO_VERDICT say."""
    texts = [text for text in texts if len(text) <= MAX_CODE]
    number = math_grader.ask("python", texts) if texts else 0
    if number is None:
        math_grader.NO_VERDICT.append(texts[0])
        return None
    return next(iter(texts[number:]), None)


def scorers(job, workers=lambda examples: None):
    """`score` and `score_batch` of a task whose programs run as job(completion, example); None
    scores 0.0. workers(examples): how many at a time, None for one per core."""

    def score_batch(completions, examples):
        """1.0 where a program passes its tests, else 0.0. Uses all cores."""
        pairs = zip(completions, examples, strict=True)
        return pass_or_fail([job(*pair) for pair in pairs], workers(examples))

    def score(completion, example):
        """1.0 if the program passes its tests, else 0.0."""
        return score_batch([completion], [example])[0]

    return score, score_batch


def pass_or_fail(jobs, workers=None):
    """1.0 where a program passes its tests, 0.0 where it fails or is None. Uses all cores, or runs
    at most `workers` programs at a time."""
    results = iter(run_batch([job for job in jobs if job is not None], workers))
    return [0.0 if job is None else float(next(results).passed) for job in jobs]
