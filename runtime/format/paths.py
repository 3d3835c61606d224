"""Checks that the paths in a manifest stay inside the engine."""

from __future__ import annotations

from ..errors import EngineFormatError
from .decoding import COPY_AGAIN
from .present import MANIFEST_FILE

_NO_PARTS = frozenset(("", ".", ".."))  # segments that a path inside the engine must not have


def check_relative(path: str) -> None:
    """Raise EngineFormatError for a path that leads out of the engine."""
    if not _NO_PARTS.isdisjoint(path.split("/")) or "\0" in path or "\\" in path:
        raise EngineFormatError(f"{MANIFEST_FILE}: path {path!r} does not stay inside the engine directory", COPY_AGAIN)
