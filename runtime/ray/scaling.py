"""How many replicas there should be: by the queue and by the KV caches. A policy of Ray Serve's autoscaler."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from ..server.engine.messages import Stats

TARGET = 0.75  # share of a replica's capacity that should be used
LOAD = "icc_load"  # the name of the metric that replicas report


def replica_load(stats: Stats, slots: int, blocks: int) -> float:
    """How busy a replica is; 1.0: its batch or its KV cache is full. Waiting sequences count as running ones.

    slots: sequences that run at once. blocks: of its KV cache.
    """
    return max((stats.running + stats.waiting) / max(slots, 1), stats.blocks_used / max(blocks, 1))


def replicas_wanted(loads: Mapping[Any, float], running: int) -> int:
    """The number of replicas that gives each a load of TARGET if they share the work of the `running` ones. A replica
    that has not reported yet counts with the mean."""
    if not loads:
        return running
    mean = sum(loads.values()) / len(loads)
    return max(ceil(round(mean * max(running, 1) / TARGET, 6)), 1)


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    """A policy of Ray Serve's autoscaler: (replicas wanted, {}). context: an AutoscalingContext. Ray applies bounds and
    delays."""
    loads = (context.aggregated_metrics or {}).get(LOAD, {})
    return replicas_wanted(loads, context.current_num_replicas), {}
