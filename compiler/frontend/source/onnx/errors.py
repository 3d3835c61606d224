"""What a handler says of a node that it cannot run."""

from __future__ import annotations


class Refused(Exception):
    """A node has a form that is not supported; the message says which."""
