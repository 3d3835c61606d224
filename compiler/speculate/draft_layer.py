"""A layer that guesses, as a graph that is ready to be inserted."""

from __future__ import annotations

from ...passes import pipelines
from ...passes.base import PassContext
from ...passes.manager import run_passes
from ...passes.speculate.insert_draft_layer import DraftLayer, Taps
from ..frontend.eagle.load import load_eagle
from ..frontend.mtp import load_mtp
from ..frontend.source.source import ModelSource
from ..graph.graph import Graph
from .choice import SpecChoice


def load_draft_layer(choice: SpecChoice | None, source: ModelSource, graph: Graph) -> DraftLayer | None:
    """The layer that `choice` asks for, in the canonical form; None where it asks for none. UsageError where the
    checkpoint that `graph` was read from has none; for a drafter's directory, see `load_eagle`."""
    if choice is None or not choice.is_layer:
        return None
    layer = (
        _eagle(choice, source, graph) if choice.path is not None else DraftLayer(load_mtp(source, graph.max_seq_len))
    )
    run_passes(layer.graph, pipelines.canonicalize(), PassContext())
    return layer


def _eagle(choice: SpecChoice, source: ModelSource, graph: Graph) -> DraftLayer:
    assert choice.path is not None
    found = load_eagle(choice.path, source, graph)
    own = found.config
    taps = Taps(own.taps, found.projection, found.norms, found.joined_norm, own.text.rms_norm_eps)
    return DraftLayer(found.graph, taps, found.vocabulary, own.norm_output)
