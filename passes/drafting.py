"""Nodes of a model's graph that a draft layer reads, and logits for the tokens that it can guess."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from ..compiler.errors import UsageError
from ..compiler.graph.graph import Graph
from ..compiler.graph.tensor_types import type_of
from ..compiler.ops import OPS
from ..compiler.weights.handles import Constant, Weight
from .layer_ends import LayerEnds

aten = torch.ops.aten
LINEAR, NORM, COLUMNS, TOPK = (OPS[name].overload for name in ("linear", "rms_norm", "columns", "topk"))
PREFIX = "draft_layer"


@dataclass(frozen=True)
class Taps:
    """The source of the first hidden states if it is not the model's last norm: the values after some layers,
    concatenated and multiplied with a projection.

    layers: the number of layers after which each value is taken. projection [H, len(layers) * model's H]. norms:
    RMSNorm weights [model's H] for each value, and joined_norm [len(layers) * model's H] for the concatenation, with
    `eps`; empty or None for no norm.
    """

    layers: tuple[int, ...]
    projection: Weight
    norms: tuple[Weight, ...] = ()
    joined_norm: Weight | None = None
    eps: float = 0.0


@dataclass(frozen=True)
class Clusters:
    """Clusters of a vocabulary. A row scores only tokens of the clusters whose centroids have the largest products with
    it.

    centroids [C, H]. of: int64 [vocab], the cluster of each token. kept: how many clusters a row scores.
    """

    centroids: Weight
    of: torch.Tensor
    kept: int


def tapped(graph: Graph, taps: Taps) -> list[fx.Node]:
    """The values [T, H] after the tapped layers. UsageError if there is no such layer or value."""
    ends, found, width = LayerEnds(graph), list[fx.Node](), taps.projection.shape[-1] // len(taps.layers)
    for layers in taps.layers:
        if not 0 < layers <= ends.count:
            raise UsageError(f"--spec: hidden states behind {layers} layers are asked for, the model has {ends.count}")
        value = ends.behind(layers)
        if value is None or type_of(value).shape[-1:] != (width,):
            raise UsageError(f"--spec: where {layers} of the model's layers end does not show as one value of {width}")
        found.append(value)
    return found


def projected(graph: Graph, taps: Taps, values: list[fx.Node]) -> fx.Node:
    """The first hidden states [T, H], from the values [T, model's H] after the layers."""
    inputs = [graph.call(aten.view.default, value, [-1, type_of(value).shape[-1]]) for value in values]
    if taps.norms:
        norms = [graph.add_weight(f"{PREFIX}.fc_norm.{i}", norm) for i, norm in enumerate(taps.norms)]
        inputs = [graph.call(NORM, value, norm, taps.eps) for value, norm in zip(inputs, norms, strict=True)]
    joined = graph.call(aten.cat.default, inputs, 1)
    if taps.joined_norm is not None:
        joined = graph.call(NORM, joined, graph.add_weight(f"{PREFIX}.input_norm", taps.joined_norm), taps.eps)
    return graph.call(LINEAR, joined, graph.add_weight(f"{PREFIX}.fc", taps.projection), None)


def spread(graph: Graph, logits: fx.Node, vocabulary: torch.Tensor, tokens: int) -> fx.Node:
    """Logits for all `tokens`; minus infinity for those outside the layer's vocabulary, [n] token ids."""
    place = torch.zeros(tokens, dtype=torch.int32)
    place[vocabulary] = torch.arange(len(vocabulary), dtype=torch.int32)
    missing = torch.full((tokens,), float("-inf"))
    missing[vocabulary] = 0.0
    places, lowered = (
        graph.add_weight(f"{PREFIX}.{name}", Constant(value))
        for name, value in (("place", place), ("missing", missing))
    )
    return graph.call(aten.add.Tensor, graph.call(COLUMNS, logits, places), lowered)


def among_clusters(graph: Graph, logits: fx.Node, states: fx.Node, clusters: Clusters) -> fx.Node:
    """Logits [T, .., vocab] in which tokens outside the row's clusters have minus infinity. states [T, .., H]: the
    input of the head."""
    states = graph.call(aten.view.default, states, [-1, type_of(states).shape[-1]])  # one axis, like the logits
    weight = graph.add_weight(f"{PREFIX}.centroids", clusters.centroids)
    scores = graph.call(LINEAR, states, weight, None)
    best = graph.call(operator.getitem, graph.call(TOPK, scores, clusters.kept, True), 0)
    axis = type_of(best).rank - 1
    least = graph.call(aten.slice.Tensor, best, axis, clusters.kept - 1, clusters.kept)
    out, kept = (
        graph.add_weight(f"{PREFIX}.{name}", Constant(torch.tensor([value])))
        for name, value in (("out", float("-inf")), ("kept", 0.0))
    )
    lowered = graph.call(aten.where.self, graph.call(aten.lt.Tensor, scores, least), out, kept)
    order = graph.add_weight(f"{PREFIX}.cluster_of", Constant(clusters.of.to(torch.int32)))
    return graph.call(aten.add.Tensor, logits, graph.call(COLUMNS, lowered, order))
