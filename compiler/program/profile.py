"""The properties of a back end that the lowering uses: how it stores values, and what its kernels can fuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..weights.formats.base import StorageFormat
from ..weights.handles import Weight
from .layout import Layout, Role


@dataclass(frozen=True)
class Profile:
    """The properties of one back end.

    layout(format, role): the layout of a weight of a storage format for a role; raises UnsupportedModel. activation:
    element type of what matrix products and attention read or write; everything else is float32. epilogues: whether
    products can end in a pointwise body; adds: whether the only epilogue of products with an expert per row is to add
    to their output (adapters to the logits). adapts: whether products can add the terms of adapters themselves. joins:
    whether attention itself writes a step's keys and values to the cache, and products can end in the norm after them.
    by_alignment: whether kernels are compiled for the alignment of their operands. screened_bytes: the least number of
    values of a head that is worth screening, if its layout for that role can screen. state_chunk: tokens that a
    recurrence with a matrix as the state processes at once. kv_align: the size in bytes of a cached key or value is a
    multiple of this. coding: the 8-bit type of rows that are multiplied with a format, "" if they stay unchanged; see
    `CodeRows`.
    """

    layout: Callable[[StorageFormat, Role], Layout]
    activation: str = "f32"
    epilogues: bool = False
    adds: bool = False
    adapts: bool = False
    by_alignment: bool = False
    joins: bool = False
    screened_bytes: int = 0
    state_chunk: int = 8
    kv_align: int = 1
    coding: Callable[[StorageFormat], str] | None = None

    def streamed_bytes(self, weight: Weight) -> int:
        """Bytes that a product with the whole weight reads of it."""
        return self.layout(weight.storage, "product").nbytes(weight.shape)
