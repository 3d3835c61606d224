"""What draft heads on a GPU are asked and answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .driver import Cuda


class HeadChoices:
    """Both sides of it, `shape` [batch, heads, ranks]. rows_at: the device's logit_rows, which the next step writes
    again."""

    def __init__(self, cuda: Cuda, shape: tuple[int, int, int], rows_at: int) -> None:
        nbytes = 4 * int(np.prod(shape))
        self.address = cuda.allocate(nbytes)
        self._cuda, self._rows_at = cuda, rows_at
        self._rows = cuda.pinned(4 * shape[0]).view(np.int32)
        self._choices = cuda.pinned(nbytes).view(np.int32).reshape(shape)

    def send(self, rows: Sequence[int]) -> None:
        """Ask for rows. Nothing that was sent may be under way."""
        self._rows[: len(rows)] = rows
        self._cuda.to_device(self._rows_at, self._rows[: len(rows)])

    def fetch(self, count: int) -> np.ndarray:
        """Wait for the first answers; a copy."""
        self._cuda.to_host(self._choices[:count], self.address)
        self._cuda.wait()
        return self._choices[:count].copy()
