"""Docstrings: every public class and function has one, and none opens with a word that needs the sentence before it.

    python tests/lint_docstrings.py            a line per room that got worse, exit 1
    python tests/lint_docstrings.py --list     every fault with its place
    python tests/lint_docstrings.py --write    lower the counts of docstrings.txt to what there is; never raise one

docstrings.txt has, for each room (folder) and fault, how many there still are. The counts only shrink. A method without
a docstring says what the method of its base says, so that only methods of classes without a base need one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
COUNTS = Path(__file__).with_name("docstrings.txt")
ROOMS = ("compiler", "passes", "runtime")
OPENING = re.compile(r"(Of|So|Those|The same)\b")
MISSING, OPENS = "missing", "opens"
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


def found(root: Path) -> Iterator[tuple[str, str, str]]:
    """Every fault below `root`: its room, what is wrong, and where."""
    for path in sorted(file for room in ROOMS for file in (root / room).rglob("*.py")):
        room = path.parent.relative_to(root).as_posix()
        for fault, name in faults(ast.parse(path.read_text())):
            yield room, fault, f"{path.relative_to(root)}: {name}"


def read_counts(text: str) -> Counter[tuple[str, str]]:
    """The counts of docstrings.txt: lines `room fault count`."""
    lines = (line.split() for line in text.splitlines() if line and not line.startswith("#"))
    return Counter({(room, fault): int(count) for room, fault, count in lines})


def main(arguments: list[str]) -> int:
    """Run as the module says; the exit code."""
    places = list(found(ROOT))
    now = Counter((room, fault) for room, fault, _ in places)
    if "--list" in arguments:
        print(*(f"{where}: {fault}" for _, fault, where in places), sep="\n")
        return 0
    allowed = read_counts(COUNTS.read_text())
    if "--write" in arguments:
        kept = {key: min(count, allowed[key]) for key, count in now.items() if allowed[key]}
        lines = [f"{room} {fault} {count}" for (room, fault), count in sorted(kept.items())]
        COUNTS.write_text("\n".join(["# How many docstrings are still wrong; see lint_docstrings.py.", *lines, ""]))
        return 0
    worse = {key: count for key, count in now.items() if count > allowed[key]}
    for (room, fault), count in sorted(worse.items()):
        print(f"{room}: {count} docstrings are wrong ({fault}), {allowed[room, fault]} were; one of:")
        print(*(f"    {where}" for at, what, where in places if (at, what) == (room, fault)), sep="\n")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
