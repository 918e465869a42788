"""Lines of the package: `python scripts/count_lines.py [FOLDER]` prints those of Python code and those of C++.

Docstrings, comments and blank lines of Python are not counted, nor what a build writes.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

BUILT = "_build.py"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def count_code(text: str) -> int:
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and number not in docstrings for number, line in lines)


def main(folder: Path) -> None:
    python = sum(count_code(path.read_text()) for path in folder.rglob("*.py") if path.name != BUILT)
    cpp = sum(path.read_text().count("\n") for path in folder.rglob("*") if path.suffix in (".h", ".cpp"))
    print(f"Python {python}\nC++ {cpp}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parents[1] / "portakv")
