"""Docstrings: every public class and function has one, and none opens with a word that needs the sentence before it.

    python tests/lint_docstrings.py            a line per fault, exit 1 if there are any

A method without a docstring says what the method of its base says, so that only methods of classes without a base need
one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOMS = ("compiler", "passes", "runtime")
OPENING = re.compile(r"(Of|So|Those|The same)\b")
MISSING, OPENS = "there is no docstring", "the docstring opens with a word that needs another sentence"
Function = (ast.FunctionDef, ast.AsyncFunctionDef)
Fault = tuple[str, str]  # what is wrong, and of which name


def faults(tree: ast.Module) -> Iterator[Fault]:
    """What is wrong with the docstrings of a module, its classes, functions and methods."""
    yield from _of(tree, "the module", needed=False)
    yield from _inside(tree.body, "", needed=True)


def _inside(body: list[ast.stmt], within: str, needed: bool) -> Iterator[Fault]:
    for item in body:
        if isinstance(item, ast.ClassDef):
            public = not item.name.startswith("_")
            yield from _of(item, within + item.name, needed and public)
            yield from _inside(item.body, f"{within}{item.name}.", needed and public and not item.bases)
        elif isinstance(item, Function):
            yield from _of(item, within + item.name, needed and not item.name.startswith("_") and not _is_stub(item))


def _of(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str, needed: bool
) -> Iterator[Fault]:
    text = ast.get_docstring(node)
    if text is None:
        if needed:
            yield MISSING, name
    elif OPENING.match(text):
        yield OPENS, name


def _is_stub(item: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a decorator says that another function is documented: an overload, a setter of a property."""
    names = {part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "") for part in item.decorator_list}
    return bool(names & {"overload", "setter"})


def found(root: Path) -> Iterator[str]:
    """Every fault below `root`: where, and what is wrong."""
    for path in sorted(file for room in ROOMS for file in (root / room).rglob("*.py")):
        for fault, name in faults(ast.parse(path.read_text())):
            yield f"{path.relative_to(root)}: {name}: {fault}"


def main(root: Path) -> int:
    """Print the faults below `root`; the exit code."""
    faulty = list(found(root))
    print(*faulty, sep="\n", end="\n" if faulty else "")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1]))
