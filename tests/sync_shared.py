"""Copy the marked shared blocks of a reference script to its siblings: `python tests/sync_shared.py d1`."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# reference -> {sibling: blocks that are shared, None for all}
SIBLINGS = {
    "d1": {
        "coupled_grpo": None,
        "spg": None,
        "bgpo": None,
        "cj_grpo": None,
        "mdpo": None,
        "sft": ["setup"],
        "vrpo": ["setup"],
    },
    "sft": {"vrpo": ["args", "setup"]},
}
# (sibling, block) -> one sentence why this block may differ
EXCEPTIONS = {}
MARK = re.compile(r"^\s*# (>>>|<<<) shared: (\w+)\s*$")


def shared_blocks(text, name):
    """Text of a script -> {block name: (first line, end line)}, the markers left out. ValueError on unpaired markers."""
    blocks, opened = {}, None
    for number, line in enumerate(text.splitlines()):
        if not (mark := MARK.match(line)):
            continue
        side, title = mark.groups()
        if side == ">>>" and (opened or title in blocks):
            raise ValueError(
                f"{name}:{number + 1} opens {title!r}"
                + (f" inside {opened[0]!r}" if opened else " again")
            )
        if side == "<<<" and (not opened or opened[0] != title):
            raise ValueError(
                f"{name}:{number + 1} closes {title!r}, open is {opened[0] if opened else None!r}"
            )
        if side == "<<<":
            blocks[title] = (opened[1], number)
        opened = (title, number + 1) if side == ">>>" else None
    if opened:
        raise ValueError(f"{name}: {opened[0]!r} is never closed")
    return blocks


def sync(reference_text, sibling_text, names=None, skip=()):
    """-> sibling_text with the shared blocks `names` (None: all) replaced by those of the reference."""
    source, target = (
        shared_blocks(reference_text, "reference"),
        shared_blocks(sibling_text, "sibling"),
    )
    lines, reference = sibling_text.splitlines(), reference_text.splitlines()
    for title, (start, end) in sorted(
        target.items(), key=lambda item: -item[1][0]
    ):  # from the end, so that numbers stay right
        if title in source and title not in skip and (names is None or title in names):
            lines[start:end] = reference[slice(*source[title])]
    return "\n".join(lines) + "\n"


def main():
    reference = sys.argv[1] if len(sys.argv) == 2 else ""
    if reference not in SIBLINGS:
        raise SystemExit(f"usage: python tests/sync_shared.py {{{','.join(SIBLINGS)}}}")
    text = (ROOT / f"algos/{reference}.py").read_text()
    for sibling, names in SIBLINGS[reference].items():
        path = ROOT / f"algos/{sibling}.py"
        skip = [block for name, block in EXCEPTIONS if name == sibling]
        path.write_text(sync(text, path.read_text(), names, skip))


if __name__ == "__main__":
    main()
