"""The graph that runs where a batch has adapters."""

from __future__ import annotations

from ..passes import pipelines
from ..passes.base import PassContext
from ..passes.manager import run_passes
from .adapter_slots import AdapterSlots
from .eviction import Eviction
from .graph.graph import Graph


def adapted_graph(graph: Graph, slots: AdapterSlots, policy: Eviction | None) -> Graph:
    """A copy of a quantized graph with room for adapters, ready to be lowered; `graph` stays as it is.

    policy: --kv-policy. UsageError where a pattern of `slots` fits no linear layer.
    """
    adapted = graph.copy()
    for phase in (pipelines.adapters(slots), pipelines.attention(policy), pipelines.fuse()):
        run_passes(adapted, phase, PassContext())
    return adapted
