"""How many replicas there should be: by the queue and by the KV caches. A policy of Ray Serve's autoscaler."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from ..server.engine.messages import Stats

TARGET = 0.75  # of what a replica can do at a time
LOAD = "icc_load"  # the name of what replicas report


def replica_load(stats: Stats, slots: int, blocks: int) -> float:
    """How busy a replica is; 1.0: its batch or its KV cache is full. Waiting sequences count as running ones.

    slots: sequences that run at once. blocks: of its KV cache.
    """
    return max((stats.running + stats.waiting) / max(slots, 1), stats.blocks_used / max(blocks, 1))


def replicas_wanted(loads: Mapping[Any, float], running: int) -> int:
    """How many replicas have TARGET of their work each, if they share what the `running` ones have; the mean
    stands for one that has not said anything yet."""
    if not loads:
        return running
    mean = sum(loads.values()) / len(loads)
    return max(ceil(round(mean * max(running, 1) / TARGET, 6)), 1)


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    """What Ray Serve asks about a deployment (an AutoscalingContext); bounds and delays are Ray's."""
    loads = (context.aggregated_metrics or {}).get(LOAD, {})
    return replicas_wanted(loads, context.current_num_replicas), {}
