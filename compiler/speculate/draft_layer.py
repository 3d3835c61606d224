"""Loads a draft layer as a graph that is ready to be inserted."""

from __future__ import annotations

from collections.abc import Callable

from ...passes import pipelines
from ...passes.base import PassContext
from ...passes.drafting import Clusters, Taps
from ...passes.manager import run_passes
from ...passes.speculate.insert_draft_layer import DraftLayer
from ..frontend.assistant import load_assistant
from ..frontend.dflash.load import load_dflash
from ..frontend.eagle.load import load_eagle
from ..frontend.mtp import load_mtp
from ..frontend.source.source import ModelSource
from ..graph.graph import Graph
from .choice import SpecChoice


def load_draft_layer(choice: SpecChoice | None, source: ModelSource, graph: Graph) -> DraftLayer | None:
    """The draft layer of `choice`, in canonical form; None if `choice` is not a layer. UsageError if the checkpoint of
    `graph` has none; for a drafter's directory, see `load_eagle` and similar functions."""
    if choice is None or not choice.is_layer:
        return None
    layer = _LOADERS[choice.drafter](choice, source, graph)
    run_passes(layer.graph, pipelines.canonicalize(), PassContext())
    return layer


def _mtp(choice: SpecChoice, source: ModelSource, graph: Graph) -> DraftLayer:
    return DraftLayer(load_mtp(source, graph.max_seq_len))


def _eagle(choice: SpecChoice, source: ModelSource, graph: Graph) -> DraftLayer:
    assert choice.path is not None
    found = load_eagle(choice.path, source, graph)
    own = found.config
    taps = Taps(own.taps, found.projection, found.norms, found.joined_norm, own.text.rms_norm_eps)
    return DraftLayer(found.graph, taps, found.vocabulary, own.norm_output)


def _assistant(choice: SpecChoice, source: ModelSource, graph: Graph) -> DraftLayer:
    assert choice.path is not None
    found = load_assistant(choice.path, source, graph)
    clusters = None
    if found.centroids is not None and found.cluster_of is not None:
        clusters = Clusters(found.centroids, found.cluster_of, found.kept)
    return DraftLayer(found.graph, projected=found.post_projection, reads=found.reads, clusters=clusters)


def _dflash(choice: SpecChoice, source: ModelSource, graph: Graph) -> DraftLayer:
    assert choice.path is not None
    found = load_dflash(choice.path, source, graph)
    own = found.config
    return DraftLayer(found.graph, Taps(own.taps, found.projection), block=own.block, mask_token=own.mask_token)


_LOADERS: dict[str, Callable[[SpecChoice, ModelSource, Graph], DraftLayer]] = {
    "mtp": _mtp, "eagle": _eagle, "assistant": _assistant, "dflash": _dflash,
}  # fmt: skip
