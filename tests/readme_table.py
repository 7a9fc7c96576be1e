"""The README's table of scripts, generated: `python tests/readme_table.py` writes it, a test holds it."""

import difflib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
METHODS = {
    "d1": ("diffu-GRPO: one-pass mean-field log-probabilities, clipped ratio, KL", "2504.12216"),
    "coupled_grpo": (
        "Coupled-GRPO (DiffuCoder): scores from complementary masks, clipped ratio, KL",
        "2506.20639",
    ),
    "spg": (
        "SPG: policy gradient on a lower and an upper bound of the log-likelihood",
        "2510.09541",
    ),
    "bgpo": ("BGPO: bounds of the ELBO objective that are sums over mask draws", "2510.11683"),
    "cj_grpo": (
        "CJ-GRPO: each token in the state that revealed it, replayed from the rollout",
        "2509.23924",
    ),
    "mdpo": (
        "MDPO: every denoising step graded by its prediction, with its own advantage",
        "2508.13148",
    ),
    "sft": ("supervised fine-tuning: each family's own masked cross-entropy", "2510.06303"),
    "vrpo": (
        "VRPO (LLaDA 1.5): DPO on ELBO estimates, variance reduced by shared draws",
        "2505.19223",
    ),
}


FAMILIES = {
    "mdpo": "LLaDA, Dream"
}  # of methods that not every family can carry; tests/test_families.py runs others on all


def body(script):
    """Lines of a script behind its header docstring."""
    return (ROOT / f"algos/{script}.py").read_text().split('"""', 2)[2].splitlines()


def added_lines(script, reference="d1"):
    """Lines that a script adds to its reference, header docstring left out."""
    return sum(line.startswith("+ ") for line in difflib.ndiff(body(reference), body(script)))


def table():
    rows = [
        "| script | method and its page | paper | families | lines | added to d1.py |",
        "|---|---|---|---|---|---|",
    ]
    for script, (method, paper) in METHODS.items():
        name, what = method.split(": ", 1)
        families = FAMILIES.get(script, "all")
        added = {
            "d1": "reference",
            "sft": "own family",
            "vrpo": f"{added_lines('vrpo', 'sft')} to sft.py",
        }.get(script)
        added = added or str(added_lines(script))
        link = f"[{paper}](https://arxiv.org/abs/{paper})"
        length = len((ROOT / f"algos/{script}.py").read_text().splitlines())
        rows.append(
            f"| [algos/{script}.py](algos/{script}.py) | [{name}](docs/algos/{script}.md): {what} | {link} | {families} "
            f"| {length} | {added} |"
        )
    return "\n".join(rows)


def readme_with_table(text):
    marks = re.compile(r"(<!-- scripts: [^>]*-->\n).*?(<!-- /scripts -->)", re.S)
    return marks.sub(lambda mark: f"{mark[1]}{table()}\n{mark[2]}", text)


if __name__ == "__main__":
    (ROOT / "README.md").write_text(readme_with_table((ROOT / "README.md").read_text()))
