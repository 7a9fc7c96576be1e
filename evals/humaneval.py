"""HumanEval: complete a Python function from its signature and docstring; right if the hidden tests
pass.

    python evals/humaneval.py --model llada-8b  DARE's setting
    python evals/humaneval.py --completions FILE.jsonl --data HumanEval.jsonl.gz

pass@1: 1.0 if the tests pass within 5 seconds in evals/sandbox.py, else 0.0. A
completion may be the whole function or only its body, in a fenced block, in an unclosed one, or
without any. OpenCompass, and so DARE, takes the first block and strips the indentation of a body,
which then does not parse.
"""

if __name__ == "__main__":
    import command  # noqa: F401


import re
import textwrap

from evals.examples import chat_row, read_examples, user, worked
from evals.programs import code_of, defines, first_program, passed
from evals.sandbox import Job

HUB = "openai/openai_humaneval"
INSTRUCTION = "Complete the following python code:\n"  # OpenCompass' humaneval_gen_8e312c, DARE
COLUMNS = (
    "prompt, test, entry_point and canonical_solution, or prompt and reward_model.ground_truth "
    "(DARE)"
)
TIMEOUT = 5.0  # seconds of wall time for all tests of a problem; the slowest reference takes 0.1


def load(split, path=None, limit=None, hub=HUB):
    """The first `limit` examples {"prompt", "entry_point", "tests", "solution": "" if unknown},
    those of the plus variants also with "seconds": their limit of time.

    path: empty for the hub's rows, which are "test" only; a .jsonl, .jsonl.gz, .csv or .parquet
    file; or a hub id.
    """
    return read_examples(_problem, COLUMNS, path, split, limit, hub)


def prompt(example):
    """One user message, DARE's to the byte, no examples."""
    return user(INSTRUCTION + example["prompt"])


def extract(completion, example):
    """The code of a completion (evals/programs.py: code_of), a whole function or a body; None if it
    is empty."""
    return code_of(completion, [example["entry_point"]])


def program(completion, example):
    """The prompt, with its imports and helpers, followed by the code of the completion; None if
    there is none.

    Code that defines the function goes after the stub, which it replaces. Other code is the body,
    in the first of these forms that parses: dedented and indented by 4, with only the first line
    indented by 4; then the same for the lines before the first unindented one, where a
    base model goes on with something else.
    """
    code = extract(completion, example)
    if code is None:
        return None
    stub = example["prompt"].rstrip() + "\n"
    if defines(code, [example["entry_point"]]):
        return f"{stub}\n\n{code}"
    code = code.strip("\n")
    indent = lambda text: textwrap.indent(textwrap.dedent(text), "    ")
    indent_first = lambda text: re.sub(r"\A[^\S\n]*", "    ", text)
    cut = re.split(r"\n(?=\S)", code, maxsplit=1)[0]
    forms = indent, indent_first
    programs = [f"{stub}{form(text)}\n" for text in (code, cut) for form in forms]
    return first_program(programs) or programs[0]


def job(completion, example):
    """The program of a completion and its tests; None if it is empty. The prompt's own helpers are
    trusted."""
    code, name = program(completion, example), example["entry_point"]
    seconds = example.get("seconds", TIMEOUT)
    return code and Job(code, example["tests"], (name,), prelude=example["prompt"], timeout=seconds)


def score(completion, example):
    """Whether the program passes its tests."""
    return passed(job(completion, example))


def answer(example, draw=0):
    """The reference solution as a completion. SystemExit if unknown."""
    return f"```python\n{example['prompt']}{worked(example)}```"


def _problem(row):
    if chat := chat_row(row):
        text, tests = chat[0].removeprefix(INSTRUCTION), chat[1]
        # helpers come before the function
        name, solution = re.findall(r"^def (\w+)", text, re.MULTILINE)[-1], ""
    else:
        text, tests, name = row["prompt"], row["test"], row["entry_point"]
        solution = row.get("canonical_solution") or ""
    # HumanEval+ unpacks the result of HumanEval/32 where it means the input: nobody would pass
    tests = tests.replace("_poly(*candidate(*inp), inp)", "abs(_poly(*inp, candidate(*inp)))")
    if not re.search(rf"^check\({re.escape(name)}\)\s*\Z", tests, re.MULTILINE):
        tests += f"\ncheck({name})\n"  # the hub's tests define `check` without calling it
    return {"prompt": text, "entry_point": name, "tests": tests, "solution": solution}
