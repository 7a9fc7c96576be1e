"""Programs in completions: which lines are code, and their score in the sandbox."""

import re
import textwrap

from evals.math_grader import ask
from evals.sandbox import run

# the only run of three or more backquotes on its line, what stands before it, and behind it: quotes
# only if it begins its line, otherwise it is in a string
FENCE = re.compile(r"^([^\S\n]*|(?:(?!```)[^\n])*(?=`+[^\n`'\"]*$))`{3,}([^\n`]*)$", re.MULTILINE)
CODE_LINE = re.compile(r"^(?:async |def |class |import |from |@)", re.MULTILINE)
# a statement that is not indented and what it defines: imported names, also under `try:`, a
# function or class with its decorators, or a constant: in capitals, or one whose value is written
# out. Decorators alone match too, so that a long row of them is read once
DEFINITION = re.compile(
    r"^(?:@.*\n)*(?:(?:try:\s+)?(?:from [\w.]+ )?import (.*(?:\n(?:[ \t)]|except\b|else:).*)*)"
    r"|(?:(?:async )?(?:def|class) |(?=[A-Z_\d]+ =|\w+(?:: [^=\n]+)? = (?:lambda\b"
    r"|(?:[^A-Za-z_\n'\"#]|'[^'\n]*'|\"[^\"\n]*\"|\b(?:None|True|False)\b)*(?:#.*)?$)))"
    r"(\w+).*(?:\n(?:[ \t)\]}].*)?)*|)",
    re.MULTILINE,
)
QUOTED = re.compile(r"^>(?!>) ?", re.MULTILINE)  # Markdown's; >>> is Python's
MAX_CODE = 1_000_000  # characters at the end of a completion that are read
MAX_CUTS = 50  # lines at which `trimmed` looks for the end of the code


def fenced(text):
    """(rank, code) of the fenced blocks; only the last one may be unclosed. rank: 2 for closed
    blocks of Python, 1 for other closed ones, 0. A fence may also stand in a list, or right behind
    the code.
    """
    marks = FENCE.finditer(text)
    for opening in marks:
        closing = next(marks, None)
        is_python = opening[2].strip().lower().startswith("py")
        code = text[opening.end() + 1 : closing.end(1) if closing else len(text)]
        yield (1 + is_python if closing else 0), code


def defines(code, names):
    """Whether it defines one of the names: a function or class at any indentation, or an
    assignment."""
    name = "|".join(map(re.escape, names))
    definition = rf"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+(?:{name})\b|^(?:{name})[ \t]*="
    return bool(names and re.search(definition, code, re.M))


def code_of(text, names):
    """The code of a completion, not checked; None if there is no text.

    The first of these that exists: the last closed python block that defines one of `names`; the
    last closed block that does; the last block, closed or not, that does; what the last tag
    <answer> or <code> holds, if it does; the text, if it does; the last closed python block; the
    last block; what the tag holds; the text. It comes with what it uses of the others
    (`with_helpers`). Only the last MAX_CODE characters are read.
    """
    text = QUOTED.sub("", text[-MAX_CODE:])
    begun = re.split("<(?:answer|code)>", text)[-1]
    tagged = re.split("</(?:answer|code)>", begun)[0]
    parts = [*reversed([*fenced(text)]), (-1, tagged), (-2, text)]
    rank, code = max(parts, key=lambda part: (defines(part[1], names), part[0]))
    others, code = text.replace(code, ""), textwrap.dedent(code)
    if rank < 0 and defines(code, names):
        return trimmed(code)
    if code.strip():
        return first_program([with_helpers(code, others, names), code]) or code


def with_helpers(code, others, names):
    """The code behind those definitions of other blocks that it uses: imports, functions."""
    words, parts = {"*", *re.findall(r"\w+", code)}.difference(names), [code]
    for found in reversed([*DEFINITION.finditer(others)]):
        bound = re.findall(r"\w+|\*", found[1] or found[2] or "")
        if not words.isdisjoint(bound):
            words.update(re.findall(r"\w+", found[0]))
            parts.append(found[0])
    return "\n".join(reversed(parts))


def trimmed(text):
    """Code without the prose around it: all of the text if it parses; else from the first line that
    looks like code to the last one up to which it parses."""
    start = CODE_LINE.search(text)
    code = text[start.start() :] if start else text
    ends = [end.start() for end in re.finditer(r"\n(?=\S)|\Z", code)]
    parts = (code[:end] for end in reversed(ends[-MAX_CUTS:]))
    return first_program([text, *parts]) or code


def first_program(texts):
    """The first text that Python's parser accepts; None if there is none. It runs in another
    process, for five seconds at most: a long chain of dots or calls takes it longer, and then there
    is none, which stderr says."""
    return ask("python", texts)


def passed(job):
    """Whether the program of a Job passes its tests, if there is one."""
    return bool(job) and run(job).passed
