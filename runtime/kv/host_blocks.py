"""HostBlocks: the slots of host memory that hold the KV of preempted sequences."""

from __future__ import annotations

from collections.abc import Iterable

from .sequence import BlockTable
from .upkeep import Due


class HostBlocks:
    """Slots `0 .. num_slots - 1`, each as large as a group's block, and their assignment to preempted sequences.

    A slot belongs to one sequence; only blocks on the device are shared. The copies are made by the next step, those to
    the host first. A slot that is freed may be assigned again in the same step, because no slot is read in a step whose
    scheduling preempts: `Scheduler.schedule` admits no sequence then.
    """

    def __init__(self, num_slots: int, due: Due) -> None:
        self._num_slots, self._due = num_slots, due
        self._free = list(range(num_slots - 1, -1, -1))  # a stack: consecutive slots stay together, for one copy

    @property
    def num_free(self) -> int:
        """The number of slots that no sequence has."""
        return len(self._free)

    def save(self, table: BlockTable, indices: Iterable[int]) -> None:
        """Save the blocks at these indices of the table. Requires free slots.

        The blocks may be released at once, because nothing writes them before the copies are made.
        """
        table.host_slots = {index: self._free.pop() for index in indices}
        self._due.swap_outs += [(table.blocks[index], slot) for index, slot in table.host_slots.items()]

    def restore(self, table: BlockTable, indices: Iterable[int]) -> None:
        """Copy the blocks at these indices back to the table's blocks, and free all other slots of the sequence."""
        self._due.swap_ins += [(table.host_slots[index], table.blocks[index]) for index in indices]
        self.drop(table)

    def drop(self, table: BlockTable) -> None:
        """Free all slots of a sequence."""
        self._free += reversed(table.host_slots.values())
        table.host_slots = {}

    def check(self, waiting: Iterable[BlockTable]) -> None:
        """Assert that every slot is free or one waiting sequence's."""
        held = [slot for table in waiting for slot in table.host_slots.values()]
        assert sorted(held + self._free) == list(range(self._num_slots)), "a host slot is lost, or held twice"
