"""Errors of handlers about a node that they cannot run."""

from __future__ import annotations


class Refused(Exception):
    """A node has an unsupported form; the message describes it."""


# The errors that handlers raise for a node whose operands or attributes are not those of its op.
UNEXPECTED = (
    RuntimeError, TypeError, IndexError, KeyError, ValueError, AttributeError, AssertionError, OverflowError,
)  # fmt: skip


def one_line(error: BaseException) -> str:
    """The message of an error in one line, shortened if it is long."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
