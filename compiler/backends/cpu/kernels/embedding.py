"""Gathers of whole rows: from a table, or of the rows whose logits are wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ....program.layout import Layout
from ....program.steps.embedding import Embedding, SelectRows
from ..layouts.elements import C_TYPES
from ..layouts.registry import LAYOUTS
from .base import KernelParams, ctype


@dataclass(frozen=True)
class EmbeddingParams(KernelParams[Embedding]):
    """Rows of a table in any layout."""

    template: ClassVar[str] = "cpp/embedding/embedding.cpp.jinja"

    @classmethod
    def refusal(cls, step: Embedding) -> str:
        return LAYOUTS.refusal(step.stored, Layout) or super().refusal(step)

    @property
    def layout(self) -> Any:
        """The layout of the table."""
        return LAYOUTS.of(self.step.stored)

    @property
    def ctype(self) -> str:
        """The C++ type of dense values."""
        return C_TYPES[self.layout.format.name]


@dataclass(frozen=True)
class SelectRowsParams(KernelParams[SelectRows]):
    """The rows `batch.logit_rows` of x."""

    template: ClassVar[str] = "cpp/embedding/select_rows.cpp.jinja"

    @property
    def ctype(self) -> str:
        """The C++ element type of x and y."""
        return ctype(self.step.x)
