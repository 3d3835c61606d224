"""Limits the nesting of JSON values that are passed to recursive code."""

from __future__ import annotations

import sys

JSON_DEPTH = 100


def depth(value: object) -> int:
    """How deep lists and objects are nested in a decoded JSON value; 0 for a scalar."""
    deepest, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        deepest += 1
        if deepest > sys.getrecursionlimit():
            break
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return deepest
