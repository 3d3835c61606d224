"""A CPU device with pools of any size, and host memory for preempted requests, which only engines for GPUs have."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from unittest import mock

from icc.runtime.executor.cpu import device
from icc.runtime.executor.cpu.memory import AnonymousMemory
from icc.runtime.format.kv import KVMemory
from icc.runtime.format.load import Engine


class SwappingCpu(device.CpuDevice):
    """blocks: the number of blocks per KV group; host: the same for host memory, into which preempted requests are
    swapped."""

    def __init__(self, engine: Engine, threads: int, blocks: Sequence[int], host: Sequence[int]) -> None:
        layout = engine.program.kv
        with mock.patch.object(device, "choose_blocks", lambda *_: KVMemory(layout, tuple(blocks))):
            super().__init__(engine, threads)
        self.host = KVMemory(layout, tuple(host))
        self._kept = AnonymousMemory(self.host.nbytes)

    def swap_out(self, cache: int, host: int, nbytes: int) -> None:
        assert cache + nbytes <= self.cache.nbytes and host + nbytes <= self.host.nbytes
        ctypes.memmove(self._kept.address + host, self._kv.address + cache, nbytes)

    def swap_in(self, cache: int, host: int, nbytes: int) -> None:
        assert cache + nbytes <= self.cache.nbytes and host + nbytes <= self.host.nbytes
        ctypes.memmove(self._kv.address + cache, self._kept.address + host, nbytes)

    def poison(self, group: int, block: int) -> None:
        """Fill a block with NaN, so that reads before it is written show."""
        for offset, nbytes in self.cache.block_places(group, block):
            ctypes.memset(self._kv.address + offset, 0xFF, nbytes)

    def close(self) -> None:
        super().close()
        self._kept.close()
