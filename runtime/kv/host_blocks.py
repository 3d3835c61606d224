"""HostBlocks: where in host memory the KV of preempted sequences is kept."""

from __future__ import annotations

from collections.abc import Iterable

from .sequence import BlockTable
from .upkeep import Due


class HostBlocks:
    """Slots `0 .. num_slots - 1`, each as large as a group's block, and which preempted sequence has which.

    A slot is one sequence's alone: what the prefix cache finds on the device is shared there. The copies themselves are
    due with the next step, outs before ins. A slot that is given up may be given out in the same step, because none is
    read in a step whose scheduling preempts: `Scheduler.schedule` lets nobody in then.
    """

    def __init__(self, num_slots: int, due: Due) -> None:
        self._num_slots, self._due = num_slots, due
        self._free = list(range(num_slots - 1, -1, -1))  # a stack: neighbours stay together, so that they are one copy

    @property
    def num_free(self) -> int:
        """Slots that no sequence has."""
        return len(self._free)

    def save(self, table: BlockTable, indices: Iterable[int]) -> None:
        """Keep the blocks with these numbers. Requires room for them.

        They may be released then: nothing writes them before the copies are made.
        """
        table.host_slots = {index: self._free.pop() for index in indices}
        self._due.swap_outs += [(table.blocks[index], slot) for index, slot in table.host_slots.items()]

    def restore(self, table: BlockTable, indices: Iterable[int]) -> None:
        """Bring these back into the blocks of the table, and give up what else is kept."""
        self._due.swap_ins += [(table.host_slots[index], table.blocks[index]) for index in indices]
        self.drop(table)

    def drop(self, table: BlockTable) -> None:
        """Give up what is kept of a sequence."""
        self._free += reversed(table.host_slots.values())
        table.host_slots = {}

    def check(self, waiting: Iterable[BlockTable]) -> None:
        """Assert that every slot is free or one waiting sequence's."""
        held = [slot for table in waiting for slot in table.host_slots.values()]
        assert sorted(held + self._free) == list(range(self._num_slots)), "a host slot is lost, or held twice"
