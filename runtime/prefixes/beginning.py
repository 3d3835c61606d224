"""The common prefix of several texts or lists of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def common_length(given: Sequence[Sequence[Any]]) -> int:
    """The number of leading items that are equal in all sequences."""
    together = enumerate(zip(*given, strict=False))
    return next((n for n, items in together if any(item != items[0] for item in items)), min(map(len, given)))
