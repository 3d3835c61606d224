"""Extensions of icc in other packages, found through entry points and loaded when first asked for.

Groups: icc.ops (modules that declare ops), icc.formats, icc.quantizations, icc.kv_formats, icc.passes (Pass classes),
icc.targets (Target values), icc.drafters (factories of a Drafter), icc.models (modules that register models with
transformers). See docs/extending.md. This module imports nothing heavy, so that `icc --help` costs nothing.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .errors import ExtensionError


def names(group: str) -> list[str]:
    """The names that packages register in a group, sorted."""
    return sorted(_found(group))


def load(group: str, name: str) -> Any:
    """Load the entry point `name` of a group; None if no package registers it. ExtensionError if it cannot be
    loaded."""
    found = _found(group).get(name)
    if found is None:
        return None
    try:
        return found.load()
    except Exception as error:  # third-party code may raise anything
        package = found.dist.name if found.dist is not None else "a package"
        raise ExtensionError(f"{package}: {group} {name!r} ({found.value}) cannot be loaded: {error}") from error


def load_all(group: str) -> dict[str, Any]:
    """Load all entry points of a group, by name."""
    return {name: load(group, name) for name in names(group)}


def _found(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}
