"""Peers: the memory of the other ranks' GPUs that a rank sees, and its own that they see (format/exchange.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...format.exchange import EXCHANGE, GONE
from .driver import Cuda
from .nccl import Communicator


class Peers:
    """A rank's area, and those of all ranks once it has met them. communicator: of all ranks, where there is one."""

    def __init__(self, cuda: Cuda, rank: int) -> None:
        self.rank = rank
        self.communicator: Communicator | None = None
        self._cuda, self._own = cuda, cuda.allocate_seen(EXCHANGE.nbytes)
        cuda.zero(self._own, EXCHANGE.nbytes)
        cuda.wait()  # before others count there
        self._side = cuda.side_stream()
        self._gone = cuda.pinned(EXCHANGE.turns_at)
        self._gone.view(np.int64)[:] = GONE
        self._areas: list[int] = []

    @property
    def handle(self) -> bytes:
        """What other processes open the area by."""
        return self._cuda.share(self._own)

    def meet(self, handles: Sequence[bytes]) -> None:
        """Open the areas of all ranks; the handles in the order of ranks."""
        self._areas = [
            self._own if rank == self.rank else self._cuda.open_shared(handle) for rank, handle in enumerate(handles)
        ]

    def address(self, rank: int) -> int:
        """The area of a rank; -1: this one's."""
        return self._own if rank < 0 else self._areas[rank]

    def release(self) -> None:
        """Let kernels go on that wait for others, whatever they compute then: the others are gone, and must have ended.
        From any thread."""
        self._cuda.enter()
        self._cuda.to_device(self._own, self._gone, self._side)
        if self.communicator is not None:
            self.communicator.abort()
