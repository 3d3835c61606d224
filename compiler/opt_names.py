"""The names that `icc opt -p` takes: passes of the graph, followed by rewrites of its steps. Imports no torch."""

from __future__ import annotations

import re

from .errors import UsageError

# a test compares them with program/rewrites.py
STEP_NAMES = ("lower", "fuse-epilogues", "join-adapters", "add-changes", "join-norms", "code-rows")


def split(passes: str) -> tuple[str, tuple[str, ...]]:
    """Split a list into the graph's passes and the step rewrites that follow. UsageError if a pass follows a
    rewrite."""
    names = [name.strip() for name in re.split(r",(?![^{]*})", passes)]
    first = next((at for at, name in enumerate(names) if name in STEP_NAMES), len(names))
    late = [name for name in names[first:] if name not in STEP_NAMES]
    if late:
        raise UsageError(
            f"{late[0]} is a pass of the graph, which {names[first]} has turned into steps", "give it first"
        )
    return ",".join(names[:first]), tuple(names[first:])
