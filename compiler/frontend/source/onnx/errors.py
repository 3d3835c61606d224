"""What a handler says of a node that it cannot run."""

from __future__ import annotations


class Refused(Exception):
    """A node has a form that is not supported; the message says which."""


# What handlers raise of a node whose operands or attributes are others than those of its op.
UNEXPECTED = (
    RuntimeError, TypeError, IndexError, KeyError, ValueError, AttributeError, AssertionError, OverflowError,
)  # fmt: skip


def one_line(error: BaseException) -> str:
    """The message of an error in one line, cut where it is long."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
