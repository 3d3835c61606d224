"""The device memory of an executor: weights uploaded through pinned staging, batch arrays, and the KV cache's size."""

from __future__ import annotations

import numpy as np

from ...batch.packed import DTYPES
from ...format.batch import BatchArray, BatchLimits
from ...format.program import Program
from ...format.weights import MappedWeights
from .driver import Cuda

_STAGING = 64 << 20  # bytes per staging buffer; there are two
ALIGN = 256


def round_up(nbytes: int) -> int:
    """The next multiple of the alignment of device buffers."""
    return -(-nbytes // ALIGN) * ALIGN


def upload_nbytes(cuda: Cuda, weights: MappedWeights, program: Program) -> int:
    """Device memory that `upload_weights` takes."""
    return 0 if id(weights) in cuda.uploaded else sum(round_up(w.nbytes) for w in program.weights.values())


def upload_weights(cuda: Cuda, weights: MappedWeights, program: Program) -> dict[str, int]:
    """Copy a program's weights from the mapped file to one device buffer, once per device; the address of each.

    Two pinned buffers take turns: one is filled from the page cache while the other travels.
    """
    if id(weights) in cuda.uploaded:
        return cuda.uploaded[id(weights)][1]
    views = {name: weights.view(name) for name in program.weights}
    addresses, total = {}, 0
    for name, view in views.items():
        addresses[name] = total
        total += round_up(view.nbytes)
    base = cuda.allocate(total)
    staging = [(cuda.pinned(_STAGING), cuda.event()) for _ in range(2)]
    turn = 0
    for name, view in views.items():
        for start in range(0, view.nbytes, _STAGING):
            part = view[start : start + _STAGING]
            buffer, sent = staging[turn % 2]
            cuda.wait_event(sent)  # an event that was never recorded counts as passed
            buffer[: part.nbytes] = part
            cuda.to_device(base + addresses[name] + start, buffer[: part.nbytes])
            cuda.record(sent)
            turn += 1
    cuda.wait()
    found = {name: base + offset for name, offset in addresses.items()}
    cuda.uploaded[id(weights)] = weights, found
    return found


class PinnedArrays:
    """Arrays carved from one pinned buffer that has its twin on the device, so that one copy moves many."""

    def __init__(self, cuda: Cuda, nbytes: int, device: int) -> None:
        self._cuda = cuda
        self._host = cuda.pinned(nbytes)
        self._host[:] = 0
        self._device = device
        self._used = 0

    def allocate(self, array: BatchArray, limits: BatchLimits) -> np.ndarray:
        """The next array; its beginning is aligned."""
        nbytes = limits.nbytes(array)
        start, self._used = self._used, self._used + round_up(nbytes)
        return self._host[start : start + nbytes].view(DTYPES[array.dtype]).reshape(limits.shape(array))

    def address(self, array: np.ndarray) -> int:
        """Where the twin of an array lies on the device."""
        return self._device + self._offset(array)

    def send_until(self, array: np.ndarray) -> None:
        """Copy everything up to the end of an array to the device, in the order of the stream."""
        self._cuda.to_device(self._device, self._host[: self._offset(array) + array.nbytes])

    def fetch(self, array: np.ndarray) -> None:
        """Copy an array from the device, in the order of the stream."""
        self._cuda.to_host(array, self.address(array))

    def _offset(self, array: np.ndarray) -> int:
        return array.ctypes.data - self._host.ctypes.data
