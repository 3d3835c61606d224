"""Pools: weights that have a layout and no values yet, because they are written at run time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .handles import Weight
from .shards import Cuts


@dataclass(frozen=True)
class PoolCut:
    """What each rank has of every slot of a pool: its ranges of `axis` of [matrices, N, K]; none where a rank's part
    stays zeros."""

    axis: int
    cuts: Cuts


@dataclass(eq=False)
class AdapterPool(Weight):
    """Matrices [slots, N, K] of adapters, one slot for each that is in memory. All zeros until the runtime writes one.

    The engine's file of weights holds no bytes of it, and it is not quantized. A slot has one matrix per expert for
    experts, one row for vectors [N], and all rows of a table that rows are gathered from [slots * N, K]. first: parts
    of the size of a slot's that lie before them. cut: where the shape is that of a rank's part; None where all have
    the same.
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
        """(matrices, N, K) of a slot; vectors have a K of 1."""
        parts = self.slots + self.first
        if len(self.shape) == 3:
            return self.shape[0] // parts, *self.shape[1:]
        rows = self.shape[0] // parts
        return (1, self.shape[1], 1) if rows == 1 else (1, rows, self.shape[1])


@dataclass(frozen=True)
class PoolSite:
    """Where the low-rank change of one weight of the model goes: B (A x) is added to the product with it.

    parameter: the weight's name in the checkpoint, of this shape, [N, K], or [experts, N, K], undivided. a, b, bias,
    gain: names of pools among the graph's weights. row: the first of the rows of each slot of `a` that are this site's.
    columns [K], rows [N]: float32 factors that the weight's columns and rows were multiplied with since; None for ones.
    experts: the weight's matrices, 0 where it is one. base: the weight itself, where its values may be asked for at run
    time, of ranks the first one's part; base_cut: the axis of it that ranks divide and what each has, None where all
    have the same. own_bias: what the layer adds. table, tied, gguf, gguf_rows: see AdapterSite.
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
