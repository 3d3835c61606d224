"""Upkeep: what is done to the KV cache before the next step runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..batch.scheduled import ScheduledBatch, ScheduledSequence

Pairs = list[tuple[int, int]]


@dataclass(slots=True)
class Upkeep:
    """Collected between two steps; the lists are the fields of ScheduledBatch."""

    zeros: list[int] = field(default_factory=list)
    moves: Pairs = field(default_factory=list)
    swap_outs: Pairs = field(default_factory=list)
    swap_ins: Pairs = field(default_factory=list)

    def batch(self, sequences: Sequence[ScheduledSequence]) -> ScheduledBatch:
        """The step of these sequences, with all that is due. Without any it is not run, and all stays due."""
        batch = ScheduledBatch(
            tuple(sequences), tuple(self.moves), tuple(self.zeros), tuple(self.swap_outs), tuple(self.swap_ins)
        )
        if sequences:
            for due in (self.zeros, self.moves, self.swap_outs, self.swap_ins):
                due.clear()
        return batch
