"""HumanEval: complete a Python function from its signature and docstring; right if the hidden tests pass.

    python evals/humaneval.py --model llada-8b --gen-length 512 --block-length 32 --denoising-steps 32     DARE's setting
    python evals/humaneval.py --completions FILE.jsonl --data HumanEval.jsonl.gz

pass@1: 1.0 if the tests pass within 5 seconds in evals/sandbox.py, mode "proxy", else 0.0. A completion may be the whole
function or its body alone, in a fenced block, in one that is not closed, or without any. OpenCompass, and so DARE, strips
the blanks in front of a body, which then does not parse, and takes the first block.
"""

import ast
import re
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.rows import describe_columns, read_rows
from evals.programs import code_of, defines, parsed, pass_or_fail
from evals.sandbox import Job

HUB = "openai/openai_humaneval"
PRESETS = ()
VERSION = "OpenCompass humaneval_gen_8e312c"  # name of the prompt
INSTRUCTION = "Complete the following python code:\n"  # OpenCompass' humaneval_gen_8e312c, DARE
COLUMNS = "prompt, test, entry_point and canonical_solution, or prompt and reward_model.ground_truth (DARE)"
TIMEOUT = 5.0  # seconds of wall time for all tests of a problem; the slowest reference takes 0.1


def load(
    split: str, path: str | None = None, limit: int | None = None, hub: str = HUB
) -> list[dict]:
    """Examples {"prompt", "entry_point", "tests", "solution": "" if unknown}, at most `limit`, always the first.

    path: empty for the hub's rows; a .jsonl, .jsonl.gz, .csv or .parquet file; or a hub id. There is one split, test:
    SystemExit for another one of the hub, and with one line on an unknown path or a row of another form (COLUMNS).
    """
    path = path or hub
    if path == hub and split != "test":
        raise SystemExit(
            f"--split {split}: {hub} has test alone; train on --task mbpp, or name a file with --data"
        )
    examples = []
    for number, row in enumerate(read_rows(path, split, PRESETS, limit), 1):
        problem = _problem(row)
        if problem is None:
            raise SystemExit(
                f"{path} row {number}: cannot read a problem from {describe_columns(row)}; needs {COLUMNS}"
            )
        examples.append(problem)
    return examples


def prompt(example: dict) -> list[dict]:
    """One user message, DARE's to the byte, no examples."""
    return [{"role": "user", "content": INSTRUCTION + example["prompt"]}]


def extract(completion: str, example: dict) -> str | None:
    """The code of a completion (evals/programs.py: code_of), a whole function or a body; None where it is empty."""
    return code_of(completion, [example["entry_point"]])


def program(completion: str, example: dict) -> str | None:
    """The prompt, with its imports and helpers, and the code of the completion behind it; None where there is none.

    Code that defines the function is put behind the stub, which it replaces. Other code is the body, and the first form that
    makes one counts: as it is, dedented and indented by 4, with the first line indented by 4; then the same up to the first
    line at the margin, where a base model goes on with something else.
    """
    code = extract(completion, example)
    if code is None:
        return None
    stub = example["prompt"].rstrip() + "\n"
    if defines(code, [example["entry_point"]]):
        return f"{stub}\n\n{code}"
    code = code.strip("\n").rstrip()
    cut = re.split(r"\n(?=\S)", code, maxsplit=1)[0]
    forms = [form(text) for text in (code, cut) for form in (str, _indented, _first_line_indented)]
    programs = [f"{stub}{form}\n" for form in forms]
    return next((text for text in programs if _has_body(text, example["entry_point"])), programs[1])


def job(completion: str, example: dict, timeout: float = TIMEOUT) -> Job | None:
    """The program of a completion with its tests, for the sandbox; None where it is empty. The prompt's helpers are trusted."""
    code, name = program(completion, example), example["entry_point"]
    return code and Job(code, example["tests"], (name,), prelude=example["prompt"], timeout=timeout)


def score(completion: str, example: dict) -> float:
    """1.0 if the tests pass, else 0.0."""
    return score_batch([completion], [example])[0]


def score_batch(completions: list[str], examples: list[dict]) -> list[float]:
    """`score` of each, on all cores."""
    return pass_or_fail(
        [
            job(completion, example)
            for completion, example in zip(completions, examples, strict=True)
        ]
    )


def answer(example: dict, draw: int = 0) -> str:
    """The reference solution as a completion, one for every draw. SystemExit where the rows have none."""
    if not example["solution"]:
        raise SystemExit(
            "humaneval: these rows have no solutions; take those of the hub, or HumanEval.jsonl.gz"
        )
    return f"```python\n{example['prompt']}{example['solution']}```"


def _indented(code: str) -> str:
    return textwrap.indent(textwrap.dedent(code), "    ")


def _first_line_indented(code: str) -> str:
    first, newline, rest = code.partition("\n")
    return "    " + first.lstrip() + newline + rest


def _has_body(text: str, name: str) -> bool:
    """It parses, and its last function of this name is more than a docstring."""
    tree = parsed(text)
    bodies = (
        [node.body for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        if tree
        else []
    )
    return bool(bodies) and len(bodies[-1]) > 1


def _problem(row: dict) -> dict | None:
    """The example of a row in one of the formats of COLUMNS; None where it fits none of them."""
    reward_model, text = row.get("reward_model"), row.get("prompt")
    if (
        isinstance(reward_model, dict)
        and isinstance(text, list)
        and text
        and isinstance(text[-1], dict)
    ):
        text, tests = (
            str(text[-1].get("content")).removeprefix(INSTRUCTION),
            reward_model.get("ground_truth"),
        )
        names = re.findall(r"^def (\w+)", text, re.MULTILINE)
        name, solution = names[-1] if names else None, ""  # helpers stand in front of the function
    else:
        tests, name, solution = (
            row.get("test"),
            row.get("entry_point"),
            row.get("canonical_solution") or "",
        )
    if not all(isinstance(field, str) and field.strip() for field in (text, tests, name)):
        return None
    call = f"\ncheck({name})\n"
    tests = (
        tests
        if re.search(rf"^check\({re.escape(name)}\)\s*\Z", tests, re.MULTILINE)
        else tests + call
    )
    return {"prompt": text, "entry_point": name, "tests": tests, "solution": solution}


if __name__ == "__main__":
    from evals.run import main

    main("humaneval")
