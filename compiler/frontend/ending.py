"""Adds the layers after the hidden states of an embedding model to its graph: pooling if tokens see later ones, and
dense layers."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import CheckpointError
from ..graph.graph import HIDDEN, Graph
from ..ops import OPS
from ..weights.handles import Weight
from .convert.picked import mean_of_rows
from .source.checkpoint import open_checkpoint
from .source.pooling import LayerBehind, Pooling


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer: weight [N, K], bias [N] or None, and the name of its activation function."""

    weight: Weight
    bias: Weight | None = None
    activation: str = "identity"


@dataclass(frozen=True)
class Ending:
    """mean: hidden states become their mean over the sequence. dense: layers after the hidden states, or after their
    mean."""

    mean: bool = False
    dense: tuple[DenseLayer, ...] = ()


def ending_of(pooling: Pooling) -> Ending:
    """The part of a checkpoint's pooling that the graph computes. CheckpointError if weights of a layer are missing."""
    weights = [
        layer_weights(layer) for layer in pooling.layers if layer.kind != "normalize"
    ]  # raises if one is missing
    dense = pooling.dense(looks_ahead=True)
    layers = (DenseLayer(weight, bias, layer.activation) for layer, (weight, bias) in zip(dense, weights, strict=False))
    return Ending(pooling.settled(looks_ahead=True) == ("mean",) and pooling.prompted, tuple(layers))


def layer_weights(layer: LayerBehind, name: str = "") -> tuple[Weight, Weight | None]:
    """Weight and bias of a layer after the pooling; None for no bias.

    name: of a matrix within the layer; "": the layer's only one. CheckpointError if the weight is missing.
    """
    tensors = open_checkpoint(layer.path)
    name = name or ("norm" if layer.kind == "layer_norm" else "linear")
    if f"{name}.weight" not in tensors:
        raise CheckpointError(f"{layer.path} has no tensor {name}.weight")
    return tensors[f"{name}.weight"], tensors.get(f"{name}.bias")


ACTIVATIONS = {"identity": "", "tanh": "tanh", "relu": "relu", "gelu": "gelu_erf", "sigmoid": "sigmoid", "silu": "silu"}


def append_ending(graph: Graph, ending: Ending) -> None:
    """Append the ending to a graph whose output is hidden states [T, H].

    For models whose tokens see no later ones, the runtime computes the mean and the layers after it. For other models
    every row becomes the mean here, by attention with equal weights for all tokens.
    """
    if ending.mean and not graph.looks_ahead:
        return
    node = graph.output
    with graph.fx.inserting_before(graph.end):
        if ending.mean and graph.looks_ahead:
            node = mean_of_rows(graph, node, len(graph.attention_nodes))
        for number, dense in enumerate(ending.dense):
            weight = graph.add_weight(f"dense.{number}.weight", dense.weight)
            bias = None if dense.bias is None else graph.add_weight(f"dense.{number}.bias", dense.bias)
            node = graph.call(OPS["linear"].overload, node, weight, bias)
            if function := ACTIVATIONS[dense.activation]:
                node = graph.call(OPS["pointwise"].overload, [node], f"t0 = {function} a0")
    graph.returns(**{HIDDEN: node})
