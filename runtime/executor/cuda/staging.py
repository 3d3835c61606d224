"""Pinned host memory for the inputs and outputs of sections."""

from __future__ import annotations

import numpy as np

from .driver import Cuda


class Staging:
    """One buffer per place, which grows when more bytes are copied at once. Freed when the device is closed."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._buffers: dict[str, np.ndarray] = {}

    def of(self, place: str, nbytes: int) -> np.ndarray:
        """The buffer of a place, uint8 `[nbytes]`; its former content may be lost."""
        if len(self._buffers.get(place, ())) < nbytes:
            self._buffers[place] = self._cuda.pinned(2 * nbytes)
        return self._buffers[place][:nbytes]
