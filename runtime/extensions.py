"""What other packages add to icc, found through their entry points and loaded when it is first asked for.

Groups: icc.ops (modules that declare ops), icc.formats, icc.quantizations, icc.kv_formats, icc.passes (Pass classes),
icc.targets (Target values), icc.drafters (what makes a Drafter), icc.models (modules that register models with
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
    """What `name` of a group stands for, or None where nobody registers it; ExtensionError if it cannot be loaded."""
    found = _found(group).get(name)
    if found is None:
        return None
    try:
        return found.load()
    except Exception as error:  # code of somebody else
        package = found.dist.name if found.dist is not None else "a package"
        raise ExtensionError(f"{package}: {group} {name!r} ({found.value}) cannot be loaded: {error}") from error


def load_all(group: str) -> dict[str, Any]:
    """Everything of a group by name."""
    return {name: load(group, name) for name in names(group)}


def _found(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}
