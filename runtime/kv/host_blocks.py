"""HostBlocks: where in host memory the KV of preempted requests is kept."""

from __future__ import annotations

from collections.abc import Iterable

from ..scheduler.request import Request
from .upkeep import Upkeep


class HostBlocks:
    """Slots `0 .. num_slots - 1`, each as large as a KV block, and which waiting request has which.

    A slot is one request's alone: what the prefix cache finds on the device is shared there. The copies themselves are
    due with the next step, outs before ins. A slot that is given up may be given out in the same step, because none is
    read in a step whose scheduling preempts: `Scheduler.schedule` lets nobody in then.
    """

    def __init__(self, num_slots: int, block_size: int, upkeep: Upkeep) -> None:
        self._num_slots, self._block_size, self._upkeep = num_slots, block_size, upkeep
        self._free = list(range(num_slots - 1, -1, -1))  # a stack: neighbours stay together, so that they are one copy

    @property
    def num_free(self) -> int:
        return len(self._free)

    def save(self, request: Request) -> bool:
        """Keep what a request that loses its blocks has computed, from the front as far as there are slots.

        Whether anything is kept. Its blocks may be released then: nothing writes them before the copies are made.
        """
        wanted = -(-request.num_computed_tokens // self._block_size)
        count = min(wanted, len(self._free))
        request.host_slots = [self._free.pop() for _ in range(count)]
        request.num_saved_tokens = min(request.num_computed_tokens, count * self._block_size)
        self._upkeep.swap_outs += zip(request.block_table, request.host_slots, strict=False)
        return count > 0

    def restore(self, request: Request, first: int) -> None:
        """Bring what is kept back into the blocks of its table from number `first` on: those before have it already."""
        self._upkeep.swap_ins += zip(request.host_slots[first:], request.block_table[first:], strict=False)
        request.num_computed_tokens = max(request.num_computed_tokens, request.num_saved_tokens)
        self.drop(request)

    def drop(self, request: Request) -> None:
        """Give up what is kept of a request."""
        self._free += reversed(request.host_slots)
        request.host_slots = []
        request.num_saved_tokens = 0

    def check(self, waiting: Iterable[Request]) -> None:
        """Assert that every slot is free or one waiting request's."""
        held = [slot for request in waiting for slot in request.host_slots]
        assert sorted(held + self._free) == list(range(self._num_slots)), "a host slot is lost, or held twice"
