"""The choice of whole rows: of a table, or of the rows whose logits are wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....program.steps.embedding import Embedding, SelectRows
from ..layouts.affine import quant_tile_bytes
from ..layouts.elements import C_TYPES, PLAIN
from ..layouts.split import high_tile_bytes
from .base import KernelParams, ctype

QUANT_BITS = {"q4": 4, "q8": 8, "q8s": 8}
SPLIT = "q8s"


@dataclass(frozen=True)
class EmbeddingParams(KernelParams[Embedding]):
    """Rows of a table that is plain, tiled, q4, q8 or q8s."""

    template: ClassVar[str] = "cpp/embedding/embedding.cpp.jinja"

    @classmethod
    def refusal(cls, step: Embedding) -> str:
        if step.format not in QUANT_BITS and step.format.removeprefix("tile_") not in PLAIN:
            return f"unknown table format {step.format!r}"
        return super().refusal(step)

    @property
    def bits(self) -> int:
        return QUANT_BITS.get(self.step.format, 0)

    @property
    def split(self) -> bool:
        return self.step.format == SPLIT

    @property
    def tiled(self) -> bool:
        return self.step.format.startswith(("tile_", "q"))

    @property
    def ctype(self) -> str:
        return C_TYPES[self.step.format.removeprefix("tile_")]

    @property
    def nibbles(self) -> bool:
        return self.bits == 4 or self.split

    @property
    def tile_bytes(self) -> int:
        n, group = self.step.n, self.step.group
        return high_tile_bytes(n, group) if self.nibbles else quant_tile_bytes(n, self.bits, group)

    @property
    def low_plane(self) -> int:
        """Where the second plane begins."""
        return (self.step.table_rows + 15) // 16 * self.tile_bytes


@dataclass(frozen=True)
class SelectRowsParams(KernelParams[SelectRows]):
    """The rows `batch.logit_rows` of x."""

    template: ClassVar[str] = "cpp/embedding/select_rows.cpp.jinja"

    @property
    def ctype(self) -> str:
        return ctype(self.step.x)
