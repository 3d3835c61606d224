"""The graph that runs where a batch has adapters."""

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
    """A copy of a quantized graph behind attention, and divided if ranks run it, with room for adapters, ready to be
    lowered; `graph` stays as it is.

    source: what the graph was read from. UsageError where a pattern of `slots` fits no linear layer.
    """
    adapted = graph.copy()
    for phase in (pipelines.adapters(slots), pipelines.fuse()):
        run_passes(adapted, phase, PassContext())
    _name_for_llama_cpp(adapted, source)
    return adapted


def _name_for_llama_cpp(graph: Graph, source: ModelSource) -> None:
    """Say of each place for adapters what llama.cpp calls it."""
    names = names_of(source, {site.parameter: site.shape for site in graph.sites})
    if names is None:
        return
    orders = {name: torch.from_numpy(order).float() for name, order in names.orders.items()}
    graph.gguf = names.architecture
    graph.sites = tuple(
        replace(site, gguf=names.tensors.get(site.parameter, ()), gguf_rows=orders.get(site.parameter))
        for site in graph.sites
    )
