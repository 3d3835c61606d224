"""Rows of a declared input for some positions of a sequence, in the form of `extras`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class _RowsFrom:
    """Bytes by slice. Bytes before `start` are never requested."""

    start: int
    rows: np.ndarray

    def __getitem__(self, part: slice) -> bytes:
        size = self.rows.shape[1] * self.rows.itemsize
        return self.rows[part.start // size - self.start : part.stop // size - self.start].tobytes()


def rows_from(start: int, rows: np.ndarray) -> bytes:
    """Rows [n, width] for the positions from `start` on, as a value of `Extras` without bytes for the positions before;
    `DeclaredRows` only takes slices of it, and none before `start`."""
    return cast(bytes, _RowsFrom(start, rows))
