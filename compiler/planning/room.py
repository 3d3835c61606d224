"""The memory of a device that is left for the KV cache."""

from __future__ import annotations

from ...runtime.format.footprint import KV_SHARES, sequences_within
from ..targets import Target
from .program import PlannedCompile


def sequences_that_fit(planned: PlannedCompile, target: Target, memory: int, layers: float = 1.0) -> int:
    """The number of full-length sequences whose KV fits at once on a device with `memory` bytes. layers: the share of
    the KV layers that the device has."""
    if memory <= planned.memory.fixed:
        return 0
    room = int(room_for_kv(planned, target, memory) / layers)
    return sequences_within(planned.program.kv, planned.limits, room)


def room_for_kv(planned: PlannedCompile, target: Target, memory: int) -> int:
    """Bytes for the KV cache on a device with `memory` bytes: on a GPU a share of what the weights leave; on a CPU a
    share of the memory that is free before the weights are mapped."""
    share, free = KV_SHARES[target.backend], memory - planned.memory.fixed
    return max(int(free * share) if target.backend != "cpu" else min(int(memory * share), free), 0)
