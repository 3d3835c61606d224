"""What comes behind the hidden states of a model that embeds: pooling where tokens see later ones, and dense layers."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.format.manifest import POOLED_ROWS
from ..errors import CheckpointError, UnsupportedModel
from ..graph.graph import HIDDEN, Graph
from ..ops import OPS
from ..weights.handles import Weight
from .convert.picked import mean_of_rows
from .source.checkpoint import open_checkpoint
from .source.pooling import Pooling


@dataclass(frozen=True)
class Dense:
    """A linear layer, weight [N, K] and bias [N], and what is done to its result."""

    weight: Weight
    bias: Weight | None = None
    activation: str = "identity"


@dataclass(frozen=True)
class Ending:
    """mean: of the hidden states of a sequence. dense: layers behind them, or behind their mean."""

    mean: bool = False
    dense: tuple[Dense, ...] = ()


def ending_of(pooling: Pooling) -> Ending:
    """What sentence-transformers would run behind the model, as far as it is part of the graph."""
    layers = []
    for module in pooling.dense:
        tensors = open_checkpoint(module.path)
        if "linear.weight" not in tensors:
            raise CheckpointError(f"{module.path} has no tensor linear.weight")
        layers.append(Dense(tensors["linear.weight"], tensors.get("linear.bias"), module.activation))
    if layers and pooling.kind in _ON_THE_HOST:
        raise UnsupportedModel(f"dense layers behind the pooling {pooling.kind!r} are not supported")
    return Ending(pooling.kind in (None, "mean"), tuple(layers))


_ON_THE_HOST = tuple(kind for kind in POOLED_ROWS if kind != "mean")
ACTIVATIONS = {"identity": "", "tanh": "tanh", "relu": "relu", "gelu": "gelu_erf", "sigmoid": "sigmoid", "silu": "silu"}


def append_ending(graph: Graph, ending: Ending) -> None:
    """Put the ending behind the output of a graph whose output are hidden states.

    A mean is left to the runtime, which has it of any model, unless tokens see later ones: then every row becomes the
    mean, by attention that weighs all tokens alike.
    """
    if ending.dense and ending.mean and not graph.looks_ahead:
        raise UnsupportedModel("dense layers behind the mean of a decoder's hidden states are not supported")
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
