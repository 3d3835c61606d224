"""Pools: weights with a layout but without values, which are written at run time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .handles import Weight
from .shards import Cuts


@dataclass(frozen=True)
class PoolCut:
    """The part of every slot of a pool on each rank: ranges of `axis` of [matrices, N, K]; an empty tuple if the rank's
    part stays zeros."""

    axis: int
    cuts: Cuts


@dataclass(eq=False)
class AdapterPool(Weight):
    """Matrices [slots, N, K] of adapters, one slot per adapter in memory. All zeros until the runtime writes one.

    The engine's file of weights holds no bytes of it, and it is not quantized. A slot has one matrix per expert for
    experts, one row for vectors [N], and all rows of a table for gathers [slots * N, K]. first: number of parts, of the
    size of a slot, before the slots. cut: the division between ranks, if `shape` is that of one rank's part; None if
    all ranks have the same.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    slots: int
    first: int = 0
    cut: PoolCut | None = None

    def load(self) -> Tensor:
        """Zeros of `shape`, which take no memory."""
        return torch.zeros((), dtype=self.dtype).expand(self.shape)

    @property
    def part(self) -> tuple[int, int, int]:
        """The (matrices, N, K) of a slot; for vectors K is 1."""
        parts = self.slots + self.first
        if len(self.shape) == 3:
            return self.shape[0] // parts, *self.shape[1:]
        rows = self.shape[0] // parts
        return (1, self.shape[1], 1) if rows == 1 else (1, rows, self.shape[1])


@dataclass(frozen=True)
class PoolSite:
    """One weight of the model to which adapters can be applied: B (A x) is added to the product with it.

    parameter: the weight's name in the checkpoint; shape: its shape, [N, K] or [experts, N, K], not divided between
    ranks. a, b, bias, gain: names of pools among the graph's weights. row: the first of this site's rows in each slot
    of `a`. columns [K], rows [N]: float32 factors that passes multiplied the weight's columns and rows with; None for
    ones. experts: the number of matrices, 0 for a single matrix. base: the weight itself, if its values may be needed
    at run time, else None; with ranks, the first one's part. base_cut: the axis of it that ranks divide, and each one's
    ranges; None if all have the same. own_bias: the layer's own bias, or None. table, tied, gguf, gguf_rows: see
    AdapterSite.
    """

    parameter: str
    shape: tuple[int, ...]
    a: str
    b: str
    row: int = 0
    experts: int = 0
    columns: Tensor | None = None
    rows: Tensor | None = None
    gguf: tuple[str, ...] = ()
    gguf_rows: Tensor | None = None
    table: bool = False
    tied: str = ""
    bias: str = ""
    gain: str = ""
    base: Weight | None = None
    base_cut: tuple[int, Cuts] | None = None
    own_bias: Weight | None = None
