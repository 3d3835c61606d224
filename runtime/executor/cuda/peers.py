"""Peers: memory on the ranks' GPUs that all ranks can access, one area per rank (format/exchange.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...format.exchange import EXCHANGE, GONE
from .driver import Cuda
from .nccl import Communicator


class Peers:
    """A rank's area, and after `meet` the areas of all ranks. communicator: None if NCCL is not used."""

    def __init__(self, cuda: Cuda, rank: int) -> None:
        self.rank = rank
        self.communicator: Communicator | None = None
        self._cuda, self._own = cuda, cuda.allocate_seen(EXCHANGE.nbytes)
        cuda.zero(self._own, EXCHANGE.nbytes)
        cuda.wait()  # before other ranks write counters there
        self._side = cuda.side_stream()
        self._gone = cuda.pinned(EXCHANGE.turns_at)
        self._gone.view(np.int64)[:] = GONE
        self._areas: list[int] = []

    @property
    def handle(self) -> bytes:
        """A handle by which other processes can open the area."""
        return self._cuda.share(self._own)

    def meet(self, handles: Sequence[bytes]) -> None:
        """Open the areas of all ranks; `handles` are in the order of ranks."""
        self._areas = [
            self._own if rank == self.rank else self._cuda.open_shared(handle) for rank, handle in enumerate(handles)
        ]

    def address(self, rank: int) -> int:
        """The address of a rank's area; -1: this rank's."""
        return self._own if rank < 0 else self._areas[rank]

    def release(self) -> None:
        """Release kernels that wait for other ranks; their results are then invalid. The other ranks' processes must
        have ended. Any thread may call this."""
        self._cuda.enter()
        self._cuda.to_device(self._own, self._gone, self._side)
        if self.communicator is not None:
            self.communicator.abort()
