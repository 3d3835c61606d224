"""The checker of docstrings finds what is wrong, and its counts only shrink."""

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
    expected = [("missing", "Base"), ("missing", "Base.bare"), ("opens", "told"), ("opens", "_hidden")]
    assert list(lint.faults(ast.parse(SOURCE))) == expected


def test_more_is_refused_and_counts_only_shrink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for room in lint.ROOMS:
        (tmp_path / room).mkdir()
    (tmp_path / "passes" / "one.py").write_text(SOURCE)
    counts = tmp_path / "docstrings.txt"
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    monkeypatch.setattr(lint, "COUNTS", counts)
    counts.write_text("passes missing 2\npasses opens 1\n")
    assert lint.main([]) == 1
    assert lint.main(["--write"]) == 0
    assert lint.main([]) == 1  # writing does not raise a count
    counts.write_text("passes missing 5\npasses opens 2\nruntime opens 1\n")
    assert lint.main(["--write"]) == 0
    assert lint.read_counts(counts.read_text()) == {("passes", "missing"): 2, ("passes", "opens"): 2}
