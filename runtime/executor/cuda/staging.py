"""Pinned host memory for what sections are given and give."""

from __future__ import annotations

import numpy as np

from .driver import Cuda


class Staging:
    """One buffer for each place, which grows as more travels at once. Freed when the device is closed."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._buffers: dict[str, np.ndarray] = {}

    def of(self, place: str, nbytes: int) -> np.ndarray:
        """uint8 `[nbytes]`. What was there before is lost."""
        if len(self._buffers.get(place, ())) < nbytes:
            self._buffers[place] = self._cuda.pinned(2 * nbytes)
        return self._buffers[place][:nbytes]
