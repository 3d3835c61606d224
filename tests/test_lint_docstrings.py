"""The checker of docstrings finds what is wrong."""

from __future__ import annotations

import ast
from pathlib import Path

import lint_docstrings as lint
import pytest

SOURCE = '''
class Base:
    def bare(self): ...

    def _own(self): ...

class Derived(Base):
    """A class."""

    def bare(self): ...

    def own(self): ...

class Further(Derived["Base"], Protocol[T]):
    """A class."""

    def bare(self): ...

    def own(self): ...

    def further(self): ...

class Foreign(Derived, elsewhere.Other):
    """A class."""

    def unknown(self): ...

def told():
    """Of nothing."""

def whole():
    """Often told."""

def _hidden():
    """The same."""
'''


def test_faults() -> None:
    missing = ["Base", "Base.bare", "Derived.own", "Further.further"]
    expected = [*((lint.MISSING, name) for name in missing), (lint.OPENS, "told"), (lint.OPENS, "_hidden")]
    tree = ast.parse(SOURCE)
    assert list(lint.faults(tree, lint.classes_of([tree]))) == expected


def test_a_fault_is_told_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for room in lint.ROOMS:
        (tmp_path / room).mkdir()
    assert lint.main(tmp_path) == 0
    (tmp_path / "passes" / "one.py").write_text(SOURCE)
    assert lint.main(tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[1] == f"passes/one.py: Base.bare: {lint.MISSING}"
