"""Programs in completions: which lines are code, and their score in the sandbox. For HumanEval, HumanEval+ and MBPP."""

import ast
import builtins
import re
import textwrap
import threading
import warnings
from collections.abc import Callable, Sequence

from evals.sandbox import Job, run_batch

FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n`]*$", re.MULTILINE)
CODE_LINE = re.compile(r"^(?:async |def |class |import |from |@)", re.MULTILINE)
WARNINGS = threading.Lock()  # what is done with warnings is one setting for all threads
MAX_CUTS = 50  # lines at which text behind the code is looked for


def fenced(text: str) -> list[tuple[str, str, bool]]:
    """(language, code, closed) of the fenced blocks of a text; only the last one may not be closed."""
    blocks, marks = [], FENCE.finditer(text)
    for opening in marks:
        closing = next(marks, None)
        code = text[opening.end() + 1 : closing.start() if closing else len(text)]
        blocks.append((opening[1].lower(), code, closing is not None))
    return blocks


def defines(code: str, names: Sequence[str]) -> bool:
    """One of the names is defined in it, at the margin of the text or not: a function, class, or assignment."""
    alternatives = "|".join(map(re.escape, names))
    return bool(names) and bool(
        re.search(
            rf"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+(?:{alternatives})\b|^(?:{alternatives})[ \t]*=",
            code,
            re.M,
        )
    )


def code_of(text: str, names: Sequence[str]) -> str | None:
    """The code of a completion, not checked; None where there is no text.

    The first of these that there is: the last closed python block that defines one of `names`; the last closed block that
    does; the last block, not closed, that does; the text, if it does; the last closed python block; the last block; the text.
    Leading blanks stay: they may be the indentation of a body.
    """
    blocks = fenced(text)
    python = [
        code
        for language, code, closed in blocks
        if closed and language in ("python", "py", "python3")
    ]
    closed = [code for _, code, closed in blocks if closed]
    every = [code for _, code, _ in blocks]
    for group in (python, closed, every, [text]):
        if defining := [code for code in group if defines(code, names)]:
            return (
                trimmed(textwrap.dedent(defining[-1]))
                if group[-1] is text
                else textwrap.dedent(defining[-1])
            )
    code = (python or every or [text])[-1]
    return code if code.strip() else None


def trimmed(text: str) -> str:
    """Code without the prose around it: all that parses; else from the first line that starts like code, to the last with
    which it parses."""
    if parsed(text):
        return text
    start = CODE_LINE.search(text)
    code = text[start.start() :] if start else text
    lines = code.split("\n")
    ends = [len(lines), *(i for i in range(len(lines) - 1, 0, -1) if lines[i][:1].strip())][
        :MAX_CUTS
    ]
    return next((part for end in ends if parsed(part := "\n".join(lines[:end]))), code)


def parsed(code: str) -> ast.Module | None:
    """The tree of a program; None where Python's parser does not take it, for whatever reason."""
    with WARNINGS, warnings.catch_warnings(action="ignore"):
        try:
            return ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def unquoted(text: str) -> str:
    """Without one pair of single quotes around it, or the first of a pair that is not closed."""
    inner = text.strip()
    return (
        inner[1:].removesuffix("'")
        if inner.startswith("'") and not inner.startswith("''")
        else text
    )


def names_of(example: dict) -> list[str]:
    """What a program must define for {"setup": code, "tests": list}: names that neither these nor Python define."""
    tree = parsed("\n".join([example["setup"], *example["tests"]])) or ast.Module([], [])
    used, own = set(), set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else own).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.alias):
            own.add((node.asname or node.name).partition(".")[0])
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return sorted(used - own) or sorted(called)  # task 126 asks for a function called sum


def pass_or_fail(jobs: Sequence[Job | Callable[[], Job] | None]) -> list[float]:
    """1.0 where a program passes its tests, 0.0 where not or where there is none. All cores at once."""
    results = iter(run_batch([job for job in jobs if job is not None]))
    return [0.0 if job is None else float(next(results).passed) for job in jobs]
