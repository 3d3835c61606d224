"""The variant of the graph that runs when requests of a batch use adapters."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..passes import pipelines
from ..passes.base import PassContext
from ..passes.manager import run_passes
from .adapter_slots import AdapterSlots
from .frontend.source.gguf.adapters import names_of
from .frontend.source.source import ModelSource
from .graph.graph import Graph


def adapted_graph(graph: Graph, slots: AdapterSlots, source: ModelSource) -> Graph:
    """A copy of `graph` with slots for adapters, ready to be lowered. `graph` is quantized, has passed the attention
    passes, is divided if ranks run it, and is not changed.

    source: the model that the graph was read from. UsageError if a pattern of `slots` matches no linear layer.
    """
    adapted = graph.copy()
    for phase in (pipelines.adapters(slots), pipelines.fuse()):
        run_passes(adapted, phase, PassContext())
    _name_for_llama_cpp(adapted, source)
    return adapted


def _name_for_llama_cpp(graph: Graph, source: ModelSource) -> None:
    """Record for each place for adapters the name that llama.cpp gives it."""
    names = names_of(source, {site.parameter: site.shape for site in graph.sites})
    if names is None:
        return
    orders = {name: torch.from_numpy(order).float() for name, order in names.orders.items()}
    graph.gguf = names.architecture
    graph.sites = tuple(
        replace(site, gguf=names.tensors.get(site.parameter, ()), gguf_rows=orders.get(site.parameter))
        for site in graph.sites
    )
