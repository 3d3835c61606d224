"""Upkeep: the work on a group's blocks that must be done before the next step runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

Pairs = tuple[tuple[int, int], ...]


class Upkeep(NamedTuple):
    """Done in this order: the blocks `zeros` are filled with zeros; the KV of slots is copied in sequence, `moves`
    (from, to); the KV of preempted requests is copied to host memory, `swap_outs` (block, host slot); whole blocks are
    copied in sequence for beams that diverge, `copies` (from, to); the KV of resumed requests is copied back,
    `swap_ins` (host slot, block). A slot is block * block_size + offset.
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
    """Collects the upkeep that becomes due between two steps."""

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
        """The upkeep that is due now."""
        return Upkeep(
            tuple(self.zeros), tuple(self.moves), tuple(self.swap_outs), tuple(self.swap_ins), tuple(self.copies)
        )

    def clear(self) -> None:
        """Clear it, because a step carries it out."""
        for due in (self.zeros, self.moves, self.swap_outs, self.swap_ins, self.copies):
            due.clear()
