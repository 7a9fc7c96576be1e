"""Size of the Python code in tokens.

Counted is what tokenize yields without comments, layout and docstrings: dense code gains nothing.

    python tests/size.py [FOLDER ...]    totals of every top folder; the files of those named
"""

import ast
import io
import sys
import tokenize

from sync_shared import METHODS, ROOT, shared_blocks, source, without

LAYOUT = {
    getattr(tokenize, name)
    for name in "COMMENT NL NEWLINE INDENT DEDENT ENCODING ENDMARKER".split()
}


def size(source):
    """source: Python text -> tokens without comments, layout and docstrings"""
    tokens = sum(
        token.type not in LAYOUT for token in tokenize.generate_tokens(io.StringIO(source).readline)
    )
    bodies = (getattr(node, "body", None) for node in ast.walk(ast.parse(source)))
    statements = (node for body in bodies if isinstance(body, list) for node in body)
    return tokens - sum(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for node in statements
    )


def sizes(root=ROOT):
    """-> {path below root: tokens} of the Python files outside hidden folders"""
    files = (path.relative_to(root) for path in sorted(root.rglob("*.py")))
    return {
        file: size((root / file).read_text())
        for file in files
        if not any(part.startswith(".") for part in file.parts)
    }


def copied():
    """-> tokens of the scripts' shared blocks beyond the first copy of each"""
    seen, tokens = set(), 0
    for text in map(source, METHODS):
        names = shared_blocks(text).keys()
        tokens += size(text) - size(without(text, seen)) + len(names & seen)
        seen |= names
    return tokens


if __name__ == "__main__":
    by_file, folders = sizes(), {}
    for file, tokens in by_file.items():
        folder = file.parts[0] if len(file.parts) > 1 else "."
        folders[folder] = folders.get(folder, 0) + tokens
        if folder in sys.argv[1:]:
            print(f"{tokens:9,}  {file}")
    for folder, tokens in folders.items():
        print(f"{tokens:9,}  {folder}/")
    product = sum(folders.values()) - folders["tests"]
    unique = f"{product - copied():,} with copied blocks counted once"
    print(f"{product:9,}  product ({unique}), {folders['tests']:,} tests")
