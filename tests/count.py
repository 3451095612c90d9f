"""Size of a checkout as a Markdown table: ``python -m tests.count [FOLDER]``.

A line of code has something on it beside comments and docstrings; words are those of docstrings and comments.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


class Size(NamedTuple):
    files: int
    code: int
    words: int

    def plus(self, other: Size) -> Size:
        return Size(*(a + b for a, b in zip(self, other, strict=True)))


def size(source: str) -> Size:
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    # A string that is a statement: a docstring, also of a constant.
    texts = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    begins = {(text.lineno, text.col_offset) for text in texts}
    code = {
        line
        for token in tokens
        if token.type not in _NO_CODE and token.start not in begins
        for line in range(token.start[0], token.end[0] + 1)
    }
    comments = [token.string.lstrip("#") for token in tokens if token.type == tokenize.COMMENT]
    words = sum(len(text.split()) for text in [*comments, *(text.value for text in texts)])
    return Size(1, len(code), words)


def count(checkout: Path) -> dict[str, Size]:
    """Return the sizes by folder, two levels deep, and the sums of mpiddp and of tests."""
    folders: defaultdict[str, Size] = defaultdict(lambda: Size(0, 0, 0))
    for top in ("mpiddp", "tests"):
        for file in (checkout / top).rglob("*.py"):
            found = size(file.read_text())
            parts = file.relative_to(checkout).parts[:-1]
            for folder in {"/".join(parts[:2]), f"{top}, all"}:
                folders[folder] = folders[folder].plus(found)
    return dict(sorted(folders.items()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.count", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), help="a checkout of mpiddp")
    print("| folder | files | code lines | words |\n|---|---:|---:|---:|")
    for folder, (files, code, words) in count(parser.parse_args().folder).items():
        print(f"| {folder} | {files} | {code:,} | {words:,} |")


if __name__ == "__main__":
    main()
