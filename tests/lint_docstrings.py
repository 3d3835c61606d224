"""Docstrings: every public class and function has one, and none opens with a word that needs the sentence before it.

    python tests/lint_docstrings.py            a line per fault, exit 1 if there are any

A method without a docstring says what the method of its base says: one that a base below ROOMS has needs none. Bases
are found by their names; of a class with a base from elsewhere no method is asked for one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOMS = ("compiler", "passes", "runtime")
OPENING = re.compile(r"(Of|So|Those|The same)\b")
MISSING, OPENS = "there is no docstring", "the docstring opens with a word that needs another sentence"
Function = (ast.FunctionDef, ast.AsyncFunctionDef)
Fault = tuple[str, str]  # what is wrong, and of which name
Classes = dict[str, list[ast.ClassDef]]  # by their names; several files may have one of a name
NO_CODE = {"ABC", "Enum", "Generic", "IntEnum", "NamedTuple", "Protocol", "StrEnum", "Struct", "TypedDict"}


def classes_of(trees: Iterable[ast.Module]) -> Classes:
    """All classes in the trees."""
    found: Classes = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def faults(tree: ast.Module, classes: Classes) -> Iterator[Fault]:
    """What is wrong with the docstrings of a module, its classes, functions and methods. classes: where bases are."""
    yield from _of(tree, "the module", needed=False)
    yield from _inside(tree.body, "", frozenset(), classes)


def _inside(body: list[ast.stmt], within: str, told: frozenset[str] | None, classes: Classes) -> Iterator[Fault]:
    """told: functions that need no docstring; None: none does."""
    for item in body:
        if isinstance(item, ast.ClassDef):
            needed = told is not None and not item.name.startswith("_")
            yield from _of(item, within + item.name, needed)
            inherited = _inherited(item, classes, {item.name}) if needed else None
            yield from _inside(item.body, f"{within}{item.name}.", inherited, classes)
        elif isinstance(item, Function):
            public = not item.name.startswith("_") and not _is_stub(item)
            yield from _of(item, within + item.name, public and told is not None and item.name not in told)


def _inherited(item: ast.ClassDef, classes: Classes, seen: set[str]) -> frozenset[str] | None:
    """The names that the bases of a class define, but for those in `seen`; None if a base is from elsewhere."""
    names: set[str] = set()
    for base in item.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        if name in seen or name in NO_CODE:
            continue
        seen.add(name)
        if name not in classes:
            return None
        for found in classes[name]:
            above = _inherited(found, classes, seen)
            if above is None:
                return None
            names |= above | set(_defined(found))
    return frozenset(names)


def _defined(item: ast.ClassDef) -> Iterator[str]:
    for part in item.body:
        if isinstance(part, Function):
            yield part.name
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id


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
    files = sorted(file for room in ROOMS for file in (root / room).rglob("*.py"))
    trees = {path: ast.parse(path.read_text()) for path in files}
    classes = classes_of(trees.values())
    for path, tree in trees.items():
        for fault, name in faults(tree, classes):
            yield f"{path.relative_to(root)}: {name}: {fault}"


def main(root: Path) -> int:
    """Print the faults below `root`; the exit code."""
    faulty = list(found(root))
    print(*faulty, sep="\n", end="\n" if faulty else "")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1]))
