"""HostCache: pinned host memory that keeps KV blocks of preempted requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...errors import CapacityError, DeviceError
from ...format.program import KVLayout
from ...kv.upkeep import Upkeep
from ..cpu.memory import available_bytes
from .driver import Cuda

_DEFAULT_BYTES = 4 << 30
_SHARE = 0.25  # of the available host memory, at most, unless told otherwise: pinned memory cannot be paged out


def choose_host_blocks(layout: KVLayout, num_blocks: int, most_blocks: int, nbytes: int | None) -> int:
    """How many blocks to keep in at most `nbytes` of host memory; by default in a share of it.

    most_blocks: what a full batch of full sequences needs. Where the device has that many, nobody is ever preempted.
    """
    if num_blocks >= most_blocks:
        return 0
    budget = min(_DEFAULT_BYTES, int(available_bytes() * _SHARE)) if nbytes is None else nbytes
    return min(budget // max(layout.total_block_bytes(), 1), most_blocks)


class HostCache:
    """Slots of host memory in the layout of the device's cache, so that neighbouring blocks are copied as one."""

    def __init__(self, cuda: Cuda, layout: KVLayout, num_blocks: int, host_blocks: int, kv: int) -> None:
        """kv: the address of the cache on the device."""
        self._cuda, self._layout, self._kv = cuda, layout, kv
        self._num_blocks, self._host_blocks = num_blocks, host_blocks
        nbytes = host_blocks * layout.total_block_bytes()
        try:
            self._host = cuda.pinned(nbytes)
        except DeviceError as error:
            raise CapacityError(
                f"cannot pin {nbytes / 2**30:.2f} GiB of host memory for preempted requests: {error.message}",
                "give it less with --swap-gib; with 0 their KV is computed again",
            ) from error

    def swap(self, upkeep: Upkeep) -> None:
        """Put a step's copies on the stream."""
        for block, slot, count in _runs(upkeep.swap_outs):
            for device, host, nbytes in self._places(block, slot):
                self._cuda.to_host(self._host[host : host + nbytes * count], device)
        for slot, block, count in _runs(upkeep.swap_ins):
            for device, host, nbytes in self._places(block, slot):
                self._cuda.to_device(device, self._host[host : host + nbytes * count])

    def _places(self, block: int, slot: int) -> Iterator[tuple[int, int, int]]:
        """(device address, host offset, bytes) of a block and a slot in every layer."""
        there = self._layout.block_places(slot, self._host_blocks)
        for (device, nbytes), (host, _) in zip(self._layout.block_places(block, self._num_blocks), there, strict=True):
            yield self._kv + device, host, nbytes


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(source, target, count) of pairs that follow one another on both sides."""
    start = 0
    for index in range(1, len(pairs) + 1):
        (source, target), length = pairs[start], index - start
        if index == len(pairs) or pairs[index] != (source + length, target + length):
            yield source, target, length
            start = index
