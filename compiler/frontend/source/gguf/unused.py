"""Refuses metadata of a file's own architecture that nothing reads, because they may change the model."""

from __future__ import annotations

from typing import Any

import numpy as np

from .....runtime.format.gguf import GgufContainer
from ....errors import UnsupportedModel
from .architectures import Architecture
from .fields import ANYTHING, NOTHING, REFUSED, Field


def refuse_unused(container: GgufContainer, own: Architecture, config: Any) -> None:
    """Raise UnsupportedModel for the first key of the file's own architecture that nothing reads and whose value
    matters.

    config: the configuration made from the file. A key in the table may have the value that its field expects; another
    key may be 0, false, "", an empty list or a factor of 1.0.
    """
    arch, facts, fields = container.metadata["general.architecture"], config.to_dict(), own.table
    if facts.get("use_sliding_window") is False:
        container.used.discard(f"{arch}.attention.sliding_window")
    for full, value in container.metadata.items():
        key = full.removeprefix(f"{arch}.")
        if key == full or full in container.used:
            continue
        if not _is(value, fields.get(key, Field(key)).expected(facts)):
            raise UnsupportedModel(
                f"{container.path}: metadata {_short(repr(full))} is {_short(value)}, which the model that icc takes it"
                f" for ({config.model_type}) does not have",
                "compile the checkpoint that the file was made of",
            )


def _is(value: Any, expected: Any) -> bool:
    """Whether the value of a key that nothing reads is as expected."""
    if expected is ANYTHING or expected is REFUSED:
        return expected is ANYTHING
    text = isinstance(value, (str, list))
    if expected is NOTHING:
        return not value if text else not np.any(value) or (isinstance(value, float) and value == 1.0)
    return not text and bool(np.allclose(value, expected, rtol=1e-5, atol=0))


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 90 else f"{text[:87]}..."
