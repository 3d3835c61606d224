"""Upkeep: what is done to a group's blocks before the next step runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

Pairs = tuple[tuple[int, int], ...]


class Upkeep(NamedTuple):
    """In this order: the blocks `zeros` are filled with zeros; `moves` are made, (from, to) slots whose KV is copied
    one after the other; the KV of preempted requests is copied to host memory, `swap_outs` (block, host slot); whole
    blocks are copied one after the other, `copies` (from, to), for beams that part there; and the KV of requests which
    go on is copied back, `swap_ins` (host slot, block). A slot is block * block_size + offset.
    """

    zeros: tuple[int, ...] = ()
    moves: Pairs = ()
    swap_outs: Pairs = ()
    swap_ins: Pairs = ()
    copies: Pairs = ()

    @property
    def copies_blocks(self) -> bool:
        """Whether whole blocks are copied: to host memory, back, or to another block."""
        return bool(self.swap_outs or self.swap_ins or self.copies)


@dataclass(slots=True)
class Due:
    """Upkeep as it comes up between two steps."""

    zeros: list[int] = field(default_factory=list[int])
    moves: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    swap_outs: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    swap_ins: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    copies: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    @property
    def any(self) -> bool:
        """Whether anything is due."""
        return bool(self.zeros or self.moves or self.swap_outs or self.swap_ins or self.copies)

    def upkeep(self) -> Upkeep:
        """What is due now."""
        return Upkeep(
            tuple(self.zeros), tuple(self.moves), tuple(self.swap_outs), tuple(self.swap_ins), tuple(self.copies)
        )

    def clear(self) -> None:
        """A step does it."""
        for due in (self.zeros, self.moves, self.swap_outs, self.swap_ins, self.copies):
            due.clear()
