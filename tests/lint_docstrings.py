"""Docstrings: every public class and function has one, and it has the facts that a caller needs.

    python tests/lint_docstrings.py                  a line per fault, exit 1 if there are any
    python tests/lint_docstrings.py FOLDER ..        the faults in these folders
    python tests/lint_docstrings.py --count          the number of faults by rule and package

None opens with a word that needs the sentence before it; docstring_rules.py has the other rules. A method without a
docstring inherits that of its base's method, and needs none if a base below ROOMS has the method. Bases are found by
their names; methods of a class with a base from elsewhere need none.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import docstring_rules as rules
from docstring_rules import AnyFunction, Classes, name_of

Function = (ast.FunctionDef, ast.AsyncFunctionDef)
ROOMS = ("compiler", "passes", "runtime")
OPENING = re.compile(r"(Of|So|Those|The same)\b")
MISSING, OPENS = "there is no docstring", "the docstring opens with a word that needs another sentence"
Fault = tuple[str, str]  # message, name
NO_CODE = {"ABC", "Enum", "Generic", "IntEnum", "NamedTuple", "Protocol", "StrEnum", "Struct", "TypedDict"}


def classes_of(trees: Iterable[ast.Module]) -> Classes:
    """All classes in the trees, by their names; several files may have one of a name. A function that returns an error
    counts as a class that derives from it, so that `raise refused(..)` is understood; a function that returns
    IccError may return several, and does not count."""
    found: Classes = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
            elif isinstance(node, Function) and isinstance(node.returns, ast.Name) and node.returns.id != "IccError":
                made = ast.ClassDef(name=node.name, bases=[node.returns], keywords=[], body=[], decorator_list=[])
                found.setdefault(node.name, []).append(made)
    return found


def faults(tree: ast.Module, classes: Classes, lines: Sequence[str]) -> Iterator[Fault]:
    """What is wrong with the docstrings of a module, its classes, functions and methods.

    classes: where bases are. lines: of the file."""
    yield from _of(tree, "the module", needed=False)
    yield from _inside(tree, "", {}, classes, lines)


def _inside(
    node: ast.Module | ast.ClassDef,
    within: str,
    told: dict[str, str] | None,
    classes: Classes,
    lines: Sequence[str],
) -> Iterator[Fault]:
    """told: functions that need no docstring, with their base's docstring; None: no function needs one."""
    above = ast.get_docstring(node) or "" if isinstance(node, ast.ClassDef) else ""
    for item in node.body:
        if isinstance(item, ast.ClassDef):
            needed = told is not None and not item.name.startswith("_")
            yield from _of(item, within + item.name, needed)
            if needed:
                found = rules.of_fields(item, ast.get_docstring(item) or "", lines)
                yield from ((fault, within + item.name) for fault in found)
            inherited = _inherited(item, classes, {item.name}) if needed else None
            yield from _inside(item, f"{within}{item.name}.", inherited, classes, lines)
        elif isinstance(item, Function):
            public = not item.name.startswith("_") and not _is_stub(item) and told is not None
            yield from _of(item, within + item.name, public and item.name not in (told or ()))
            text = ast.get_docstring(item)
            if public and text is not None:
                found = rules.of_function(item, f"{text} {(told or {}).get(item.name, '')}", above, classes)
                yield from ((fault, within + item.name) for fault in found)


def _inherited(item: ast.ClassDef, classes: Classes, seen: set[str]) -> dict[str, str] | None:
    """The names that the bases of a class define, except bases in `seen`, and their docstrings; None if a base is from
    elsewhere."""
    names: dict[str, str] = {}
    for base in item.bases:
        name = name_of(base)
        if name in seen or name in NO_CODE:
            continue
        seen.add(name)
        if name not in classes:
            return None
        for found in classes[name]:
            above = _inherited(found, classes, seen)
            if above is None:
                return None
            for method, text in [*above.items(), *_defined(found)]:
                names[method] = f"{names.get(method, '')} {text}"
    return names


def _defined(item: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for part in item.body:
        if isinstance(part, Function):
            yield part.name, ast.get_docstring(part) or ""
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id, ""


def _of(node: ast.Module | ast.ClassDef | AnyFunction, name: str, needed: bool) -> Iterator[Fault]:
    text = ast.get_docstring(node)
    if text is None:
        if needed:
            yield MISSING, name
    elif OPENING.match(text):
        yield OPENS, name


def _is_stub(item: AnyFunction) -> bool:
    """Whether a decorator says that another function is documented: an overload, a setter of a property."""
    return not {"overload", "setter"}.isdisjoint(map(name_of, item.decorator_list))


def found(root: Path, folders: Iterable[str] = ()) -> Iterator[tuple[Path, str, str]]:
    """Every fault below `root` as file, name and message; only those in `folders`, if any are given."""
    paths = sorted([*root.glob("*.py"), *(path for room in ROOMS for path in (root / room).rglob("*.py"))])
    texts = {path.relative_to(root): path.read_text() for path in paths}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    classes = classes_of(trees.values())
    for path, tree in trees.items():
        if not folders or any(path.is_relative_to(folder) for folder in folders):
            for fault, name in faults(tree, classes, texts[path].splitlines()):
                yield path, name, fault


def main(root: Path, folders: Iterable[str] = ()) -> int:
    """Print the faults below `root`; returns the exit code, 1 if there are any."""
    faulty = [f"{path}: {name}: {fault}" for path, name, fault in found(root, folders)]
    print(*faulty, sep="\n", end="\n" if faulty else "")
    return 1 if faulty else 0


def count(root: Path) -> None:
    """Print the number of faults by rule and package."""
    kinds = (MISSING, OPENS, rules.SHAPE, rules.ERROR, rules.UNIT, rules.NONE, rules.ARGUMENT)
    counts = Counter(
        ("/".join(path.parts[:2]), next(kind for kind in kinds if fault.startswith(kind)))
        for path, _, fault in found(root)
    )
    for (folder, kind), number in sorted(counts.items()):
        print(f"{number:5} {folder}: {kind}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--count"]:
        sys.exit(count(Path()))
    sys.exit(main(Path(), sys.argv[1:]))
