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

def told():
    """Of nothing."""

def whole():
    """Often told."""

def _hidden():
    """The same."""
'''


def test_faults() -> None:
    expected = [(lint.MISSING, "Base"), (lint.MISSING, "Base.bare"), (lint.OPENS, "told"), (lint.OPENS, "_hidden")]
    assert list(lint.faults(ast.parse(SOURCE))) == expected


def test_a_fault_is_told_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for room in lint.ROOMS:
        (tmp_path / room).mkdir()
    assert lint.main(tmp_path) == 0
    (tmp_path / "passes" / "one.py").write_text(SOURCE)
    assert lint.main(tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[1] == f"passes/one.py: Base.bare: {lint.MISSING}"
