"""Imports models and activations of other packages: modules that register them with transformers, found as entry points
icc.models.

An entry point's name is a value in config.json: a model type, or the name of an activation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....runtime import extensions

GROUP = "icc.models"


def is_offered(model_type: str) -> bool:
    """Whether an installed package has a module for a model type."""
    return model_type in extensions.names(GROUP)


def import_named(config: dict[str, Any]) -> None:
    """Import the modules whose names are values of a config.json; ExtensionError if one cannot be."""
    if offered := extensions.names(GROUP):
        said = set(_texts(config))
        for name in filter(said.__contains__, offered):
            extensions.load(GROUP, name)


def _texts(fields: Any) -> Iterator[str]:
    if isinstance(fields, str):
        yield fields
    elif isinstance(fields, dict):
        for value in fields.values():
            yield from _texts(value)
