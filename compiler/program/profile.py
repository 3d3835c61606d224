"""What the lowering must know of a backend: how it stores values, and what its kernels can do beside their op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..weights.formats.base import StorageFormat
from ..weights.handles import Weight
from .layout import Layout, Role


@dataclass(frozen=True)
class Profile:
    """One backend's storage.

    layout(format, role): how a weight of a storage format lies in memory for what reads it; raises UnsupportedModel.
    activation: element type of what matrix products and attention read or write; everything else is float32.
    epilogues: whether products can end in a pointwise body; adds: whether those with an expert per row can add to what
    is there (adapters to the logits), where that is all that they can end in. adapts: whether products can add what
    adapters change themselves. joins: whether attention itself writes
    what a step adds to the cache, and products end in the norm behind them. by_alignment: whether kernels are made for
    the alignment of their operands. screened_bytes: a head of so many values or more is worth screening, where its
    layout for that role can. state_chunk: tokens that a recurrence with a matrix as the state takes at once. kv_align:
    of how many bytes a cached key or value takes a multiple. coding: what rows become that are multiplied with a
    format, "" if they stay; see `CodeRows`.
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
        """Bytes that a product with all of a weight reads of it."""
        return self.layout(weight.storage, "product").nbytes(weight.shape)
