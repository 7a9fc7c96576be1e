"""The README's table of scripts: `python tests/readme_table.py` writes it, a test compares it."""

import difflib
import re

from sync_shared import ALL, BIDIRECTIONAL, BLOCK, METHODS, OFFLINE, ROOT, source

CONVERTED = "[converted](docs/models.md#from-an-autoregressive-model)"
SERVED = {
    ALL: "all",
    BIDIRECTIONAL: f"LLaDA, LLaDA-MoE, Dream, {CONVERTED} bidirectional models",
    BLOCK: f"SDAR, SDAR-MoE, LLaDA2, {CONVERTED} block-causal models",
}


def added_lines(script, reference):
    """Lines that a script adds to its reference, the docstring left out."""
    body = lambda name: source(name).split('"""', 2)[2].splitlines()
    return sum(line.startswith("+ ") for line in difflib.ndiff(body(reference), body(script)))


def table():
    rows = [
        "| script | method and its page | paper | families | lines | lines added to |",
        "|---|---|---|---|---|---|",
    ]
    for script, method in METHODS.items():
        head, what = source(script)[3:].partition(".\n")[0].split(": ", 1)
        reference = "sft" if script in OFFLINE else "d1"
        added = f"{reference}.py: {added_lines(script, reference)}" if script != reference else "-"
        paper = re.search(r"\d{4}\.\d{5}|$", head)[0]
        name, link = head.split(" (")[0], f"[{paper}](https://arxiv.org/abs/{paper})" * bool(paper)
        rows.append(
            f"| [algos/{script}.py](algos/{script}.py) | [{name}](docs/algos/{script}.md): {what} "
            f"| {link} | {SERVED[method.families]} | {len(source(script).splitlines())} | {added} |"
        )
    return "\n".join(rows)


def readme_with_table(text):
    marks = re.compile(r"(<!-- scripts: [^>]*-->\n).*?(<!-- /scripts -->)", re.S)
    return marks.sub(lambda mark: f"{mark[1]}{table()}\n{mark[2]}", text)


if __name__ == "__main__":
    (ROOT / "README.md").write_text(readme_with_table((ROOT / "README.md").read_text()))
