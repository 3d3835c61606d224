"""The checker of docstrings finds faults."""

from __future__ import annotations

import ast
from pathlib import Path

import docstring_rules as rules
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
    assert list(lint.faults(tree, lint.classes_of([tree]), SOURCE.splitlines())) == expected


def test_a_fault_is_told_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for room in lint.ROOMS:
        (tmp_path / room).mkdir()
    assert lint.main(tmp_path) == 0
    (tmp_path / "passes" / "one.py").write_text(SOURCE)
    assert lint.main(tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[1] == f"passes/one.py: Base.bare: {lint.MISSING}"


RULES = '''
"""A module."""

class Refused(errors.IccError):
    """An error."""

class Base:
    """A class. Its own limit is in bytes."""

    def given(self, rows: Tensor) -> None:
        """Rows [n, width]."""

class Thing(Base):
    """A thing, None where there is none.

    interval: in seconds.
    """

    interval: float
    delay: float  # seconds
    started: float  # by time.monotonic
    shift: np.ndarray = field(help="of shape (3,)")
    spread: np.ndarray
    host_memory: int
    block_tokens_limit: int

    def given(self, rows: Tensor) -> None:
        """Rows."""

    def taken(self) -> Thing | None:
        """The thing."""

def arrays(rows: "np.ndarray | None") -> int:
    """How many."""

def several() -> tuple[list[torch.Tensor], int]:
    """The tensors."""

def by_name() -> dict[str, np.ndarray]:
    """The arrays."""

def vector(values: NDArray[np.float32]) -> None:
    """A vector; see Base."""

def unnamed():
    """A function."""
    if 1:
        raise errors.Refused("no")
    raise Other("no")

def named():
    """IccErrors where it must not be."""
    raise Refused("no")

def told():
    """It refuses what it must."""
    raise ValueError

def _refused() -> Refused: ...

def helped():
    """A function."""
    raise _refused()

def elsewhere():
    """As `named`."""
    raise ValueError

def caught():
    """A function."""
    try:
        raise ValueError
    except (KeyError, ValueError):
        pass
    def inner():
        raise TypeError
    return lambda: inner

def again():
    """A function."""
    try:
        raise TypeError
    except Exception:
        print()
        raise

@click.command("x")
def command():
    """A command."""
    raise ValueError

def nothing(one: int | None, two: "str | None" = None):
    """A function: one of them."""

def something(one: int | None):
    """A function of a number, 1 by default."""

def quantities(timeout: float | None, rate: float, page: int, delay_s: float, size: str):
    """Some tokens."""

def maybe() -> int | None:
    """A number, if there is one."""
'''


def test_rules() -> None:
    tree = ast.parse(RULES)
    found = list(lint.faults(tree, lint.classes_of([tree]), RULES.splitlines()))
    assert found == [
        (f"{rules.SHAPE} of spread", "Thing"),
        (f"{rules.UNIT} host_memory", "Thing"),
        (rules.SHAPE, "arrays"),
        (f"{rules.ARGUMENT} rows", "arrays"),
        (rules.SHAPE, "several"),
        (f"{rules.ERROR} Refused", "unnamed"),
        (f"{rules.ERROR} _refused", "helped"),
        (f"{rules.ERROR} TypeError", "again"),
        (f"{rules.ARGUMENT} one", "nothing"),
        (f"{rules.ARGUMENT} two", "nothing"),
        (f"{rules.UNIT} timeout", "quantities"),
        (f"{rules.ARGUMENT} timeout", "quantities"),
        (f"{rules.UNIT} rate", "quantities"),
        (rules.NONE, "maybe"),
    ]
