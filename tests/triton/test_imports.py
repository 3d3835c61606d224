"""Imports between files of the back ends have no cycles, imports for annotations included."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def imported(path: Path, within: set[str]) -> set[str]:
    """The files of `within` that a file imports, also under TYPE_CHECKING and in functions."""
    package = path.relative_to(ROOT).parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = (*package[: len(package) + 1 - node.level], *(node.module or "").split("."))
        files = ["/".join(part for part in base if part) + ".py"]
        files += ["/".join((*(part for part in base if part), alias.name)) + ".py" for alias in node.names]
        found |= within.intersection(files)
    return found


@pytest.mark.parametrize("room", ["cpu", "triton"])
def test_no_file_imports_one_that_imports_it(room: str) -> None:
    files = sorted((ROOT / "compiler" / "backends" / room).rglob("*.py"))
    names = {str(path.relative_to(ROOT)) for path in files}
    graph = {str(path.relative_to(ROOT)): imported(path, names) for path in files}
    assert sum(map(len, graph.values())) > 20
    TopologicalSorter(graph).prepare()  # CycleError names the files
