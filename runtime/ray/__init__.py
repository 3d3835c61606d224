"""icc.ray: engines on Ray clusters. Importing it loads nothing of Ray; see docs/clusters.md.

`deployment` makes a Ray Serve application of an engine, `map_batches` answers the prompts of a Ray Dataset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .app import deployment
    from .dataset import map_batches

__all__ = ["deployment", "map_batches"]

_LAZY = {"deployment": ".app", "map_batches": ".dataset"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
