"""A layer that guesses, as a graph that is ready to be inserted."""

from __future__ import annotations

from ...passes import pipelines
from ...passes.base import PassContext
from ...passes.manager import run_passes
from ..frontend.mtp import load_mtp
from ..frontend.source.source import ModelSource
from ..graph.graph import Graph
from .choice import SpecChoice


def load_draft_layer(choice: SpecChoice | None, source: ModelSource, graph: Graph) -> Graph | None:
    """The layer that `choice` asks for, in the canonical form; None where it asks for none. UsageError where the
    checkpoint that `graph` was read from has none."""
    if choice is None or choice.drafter != "mtp":
        return None
    layer = load_mtp(source, graph.max_seq_len)
    run_passes(layer, pipelines.canonicalize(), PassContext())
    return layer
