"""The device memory of an executor: weights uploaded through pinned staging, batch arrays, and the KV cache's size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...batch.packed import CODES
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
    """How many bytes of device memory `upload_weights` takes."""
    return 0 if id(weights) in cuda.uploaded else sum(round_up(w.nbytes) for w in program.weights.values())


def upload_weights(cuda: Cuda, weights: MappedWeights, program: Program) -> dict[str, int]:
    """Copy a program's weights from the mapped file to one device buffer, once per device; the address of each weight
    by name.

    Two pinned buffers alternate: one is filled from the page cache while the other is copied.
    """
    if id(weights) in cuda.uploaded:
        return cuda.uploaded[id(weights)][1]
    views = {name: weights.view(name) for name in program.stored}
    addresses, total = dict[str, int](), 0
    for name, weight in program.weights.items():
        addresses[name] = total
        total += round_up(weight.nbytes)
    base = cuda.allocate(total)
    for name in program.weights.keys() - views.keys():  # skip pools, which are written later
        cuda.zero(base + addresses[name], program.weights[name].nbytes)
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
    """Arrays of a step in one pinned buffer with a counterpart on the device, so that one copy moves all of them.

    arrays: on the host, by name. addresses: on the device, by the name that a launch plan uses.
    """

    def __init__(self, cuda: Cuda, arrays: Sequence[BatchArray], limits: BatchLimits, device: int) -> None:
        self._cuda, self._device = cuda, device
        self._host = cuda.pinned(nbytes_of(arrays, limits))
        self._host[:] = 0
        self.arrays: dict[str, np.ndarray] = {}
        self.addresses: dict[str, int] = {}
        start = 0
        for array in arrays:
            nbytes = limits.nbytes(array)
            here = self._host[start : start + nbytes].view(CODES[array.dtype])
            self.arrays[array.name] = here.reshape(limits.shape(array))
            self.addresses[array.plan_name] = device + start
            self._last_at, self._row_bytes = start, nbytes // len(self.arrays[array.name])
            start += round_up(nbytes)

    def send(self, rows: int) -> None:
        """Copy the buffer to the device, on the stream, up to the first `rows` rows of the last array."""
        self._cuda.to_device(self._device, self.first(rows))

    def fetch(self, rows: int) -> None:
        """Copy the same part from the device. Unneeded bytes cost less than a second copy would."""
        self._cuda.to_host(self.first(rows), self._device)

    def first(self, rows: int) -> np.ndarray:
        """The buffer, uint8 `[bytes]`, up to the first `rows` rows of the last array."""
        return self._host[: self._last_at + rows * self._row_bytes]


def nbytes_of(arrays: Sequence[BatchArray], limits: BatchLimits) -> int:
    """The size in bytes of such a buffer."""
    return sum(round_up(limits.nbytes(array)) for array in arrays)
