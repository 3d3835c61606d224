"""What a device has for the KV cache beside everything else of an engine."""

from __future__ import annotations

from ...runtime.format.footprint import KV_SHARES, sequences_within
from ..targets import Target
from .program import PlannedCompile


def sequences_that_fit(planned: PlannedCompile, target: Target, memory: int, layers: float = 1.0) -> int:
    """How many sequences of full length the KV cache holds at once on a device with `memory` bytes that has so large a
    part of the KV layers."""
    if memory <= planned.memory.fixed:
        return 0
    room = int(room_for_kv(planned, target, memory) / layers)
    return sequences_within(planned.program.kv, planned.limits, room)


def room_for_kv(planned: PlannedCompile, target: Target, memory: int) -> int:
    """Bytes for the KV cache, of `memory` bytes: a GPU's gets a share of what the weights leave; a CPU's, of what is
    free before they are mapped."""
    share, free = KV_SHARES[target.backend], memory - planned.memory.fixed
    return max(int(free * share) if target.backend != "cpu" else min(int(memory * share), free), 0)
