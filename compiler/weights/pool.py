"""Pools: weights that have a layout and no values yet, because they are written at run time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .handles import Weight


@dataclass(eq=False)
class AdapterPool(Weight):
    """Matrices [slots, N, K] of adapters, one slot for each that is in memory. All zeros until the runtime writes one.

    The engine's file of weights holds no bytes of it. Quantization leaves it alone.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def load(self) -> Tensor:
        """Zeros, which take no memory."""
        return torch.zeros((), dtype=self.dtype).expand(self.shape)


@dataclass(frozen=True)
class PoolSite:
    """Where the low-rank change of one weight of the model goes: B (A x) is added to the product with it.

    parameter: the weight's name in the checkpoint. a, b: names of pools among the graph's weights. row: the first of
    the rows of each slot of `a` that are this site's. columns [K], rows [N]: float32 factors that the weight's columns
    and rows were multiplied with since; None for ones. experts: the weight's matrices, 0 where it is one. gguf,
    gguf_rows: see AdapterSite.
    """

    parameter: str
    a: str
    b: str
    row: int = 0
    experts: int = 0
    columns: Tensor | None = None
    rows: Tensor | None = None
    gguf: tuple[str, ...] = ()
    gguf_rows: Tensor | None = None
