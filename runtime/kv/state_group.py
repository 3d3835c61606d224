"""StateGroup: the blocks of a KV group whose layers keep one recurrent state per sequence, whatever its length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from .group import Group, TableOpening
from .places import UNLIMITED
from .sequence import NO_BLOCK, BlockTable, CachedSequence

_NEW = 2  # blocks that a chunk gets: for the state after its last full block, and for that after its end


class StateGroup(Group):
    """Block n of a sequence holds the state after the last computed token among tokens n * size .. (n + 1) * size - 1.

    The state of a full block is a checkpoint: this sequence, and any other that begins alike, can continue after these
    tokens. A step reads the state before its first token and stores one in each block that the table has for its
    tokens: the state after the block's last token or after the step's last. Only the last two blocks of a chunk are
    allocated, so that states are kept where steps end: at a prompt's end, every few hundred tokens of a long prompt,
    and at the end of an answer, whose older states are dropped as it grows. If there is room, states are also kept at
    the end of a conversation's first turn (the system message), and where a prompt diverges from an earlier one,
    because others may diverge there too (Marconi: Pan et al. 2024, arXiv 2411.19379). The pool evicts the least
    recently used states.
    """

    holds_states: ClassVar[bool] = True

    def missing(self, table: BlockTable, num_tokens: int) -> int:
        return max(min(self.blocks_for(num_tokens) - len(table), _NEW), 0)

    def grow(self, table: BlockTable, num_tokens: int, answering: bool = False) -> None:
        if missing := self.missing(table, num_tokens):
            passed = self.blocks_for(num_tokens) - len(table) - missing
            if answering:
                table.stepped.add(len(table))
            first, blocks = len(table), [NO_BLOCK] * passed + self.pool.allocate(missing)
            for number in sorted(table.marked):
                if 0 <= number - first < passed and self.pool.can_allocate(1):
                    [blocks[number - first]] = self.pool.allocate(1)
            table.extend(blocks)

    def release_unread(self, table: BlockTable, position: int) -> None:
        latest = (position - 1) // self.block_size
        for number in [number for number in table.stepped if number < latest and number + 1 in table.stepped]:
            self.pool.discard(table.blocks[number])
            table.stepped.remove(number)
        super().release_unread(table, position)

    def span(self, table: BlockTable, num_tokens: int) -> int:
        return num_tokens

    def room(self, table: BlockTable) -> int:
        return UNLIMITED if self.pool.num_available >= _NEW else super().room(table)

    def cached_length(self, sequence: CachedSequence, longest: int, multiple: int) -> int:
        found = super().cached_length(sequence, longest, multiple)
        if found < longest:
            sequence.branch = max(sequence.branch, longest)
        return found

    def opening(self, sequence: CachedSequence, table: BlockTable, cached: int) -> TableOpening:
        found = super().opening(sequence, table, cached)
        reserve = min(self.blocks_for(sequence.num_tokens) - found.begin, _NEW)
        ends = (sequence.first_turn // self.block_size, sequence.branch // self.block_size)
        return found._replace(size=found.begin, reserve=reserve, marked=frozenset(end - 1 for end in ends if end))


def state_places(table: tuple[int, ...], start: int, end: int, block_size: int) -> Iterator[tuple[int, int]]:
    """(position, block) for every token of start .. end - 1 after which a state is kept."""
    for number in range(start // block_size, (end - 1) // block_size + 1):
        if table[number] != NO_BLOCK:
            yield min((number + 1) * block_size, end) - 1, table[number]
