"""A layer that guesses, as a section with logits of its own (multi-token prediction, EAGLE), and what it reads of a
step, as a section that gives the hidden states of its tokens.

The layer has keys and values of its own, in KV layers behind the model's. What it shares with the model, such as the
embedding and the LM head, it reads where the model does, in the form that quantization gave it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ...compiler.errors import PassError, UsageError
from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import (
    DRAFT_LAYER,
    HIDDEN,
    LOGITS,
    TAP,
    TOKENS,
    Graph,
    layer_of,
    set_layer,
    type_of,
)
from ...compiler.ops import OPS, traits_of
from ...compiler.weights.handles import Constant, Weight
from ...compiler.weights.same import same_weight
from ..base import Pass, PassContext, PassResult
from ..layer_ends import LayerEnds
from ..quantize.select import lm_heads

aten = torch.ops.aten
LINEAR, NORM, COLUMNS = (OPS[name].overload for name in ("linear", "rms_norm", "columns"))
PREFIX = "draft_layer"


@dataclass(frozen=True)
class Taps:
    """Where the first hidden states come from, other than from the model's last norm: from the values behind so many
    layers, joined, through a product.

    layers: behind how many layers each value is taken. projection [H, len(layers) * model's H]. norms: RMSNorm weights
    [model's H], of each value, and joined_norm [len(layers) * model's H], of all together, with `eps`; none for none.
    """

    layers: tuple[int, ...]
    projection: Weight
    norms: tuple[Weight, ...] = ()
    joined_norm: Weight | None = None
    eps: float = 0.0


@dataclass(frozen=True)
class DraftLayer:
    """A layer that guesses, as a graph (token_ids, positions, DRAFT_HIDDEN[T, H]) -> logits.

    taps: None where its first hidden states are what the model's LM head reads. vocabulary: int64 [logits], the token
    that each of its logits is for; None where these are the model's. normed: whether it goes on from what its own head
    reads, else from the value before that norm.
    """

    graph: Graph
    taps: Taps | None = None
    vocabulary: torch.Tensor | None = None
    normed: bool = True


@dataclass(frozen=True)
class InsertDraftLayer(Pass):
    """Insert `layer`. UsageError where its logits or those of the model are no linear layer's, or of another
    vocabulary, or where the layers that it taps do not show."""

    layer: DraftLayer | None = None
    name: ClassVar[str] = "insert-draft-layer"
    breaks: ClassVar[frozenset[str]] = frozenset({Fact.UNIQUE})

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        if self.layer is None or DRAFT_LAYER in graph.sections:
            return PassResult(False)
        layer = self.layer
        head, own = _head(graph), _head(layer.graph)
        if layer.vocabulary is None and type_of(head).shape[-1] != type_of(own).shape[-1]:
            raise UsageError("--spec: the layer that guesses has another vocabulary than the model")
        tapped = None if layer.taps is None else _tapped(graph, layer.taps)
        copies = self._copied(graph, ctx, layer.graph)
        logits, states = copies[layer.graph.output], copies[own.args[0]]  # type: ignore[index]
        if not layer.normed:
            states = _before_norm(states)
        with graph.fx.inserting_before(graph.end):
            if layer.taps is None or tapped is None:
                hidden = _again(graph, head.args[0])  # type: ignore[arg-type]
            else:
                hidden = _projected(graph, layer.taps, tapped)
            if layer.vocabulary is not None:
                logits = _spread(graph, logits, layer.vocabulary, type_of(head).shape[-1])
        graph.returns(**{f"{TAP}.{HIDDEN}": hidden})
        graph.returns(**{f"{DRAFT_LAYER}.{LOGITS}": logits, f"{DRAFT_LAYER}.{HIDDEN}": states})
        return PassResult(True, Counter({"draft-layer": 1}))

    def _copied(self, graph: Graph, ctx: PassContext, layer: Graph) -> dict[fx.Node, fx.Node]:
        """The layer's nodes -> their copies in the graph."""
        copies = dict[fx.Node, fx.Node]()
        first = 1 + max((layer_of(n) for n in graph.nodes if _has_cache(n)), default=-1)
        for array in layer.declared:
            graph.declare(array)
        for node in layer.nodes:
            if node.op == "placeholder":
                found = graph.input(str(node.target))
                if found is None:
                    raise PassError(f"pass {self.name!r}: the model has no input {node.target}")
                copies[node] = found
        with graph.fx.inserting_before(graph.end):
            for node in layer.nodes:
                if node.op == "get_attr":
                    copies[node] = self._weight(graph, ctx, str(node.target), layer.weight(node))
                elif node.op == "call_function":
                    args: Any = fx.map_arg(node.args, lambda n: copies[n])
                    copies[node] = graph.call(node.target, *args, origin=node)
                    if _has_cache(node):
                        set_layer(copies[node], first + layer_of(node))
        return copies

    def _weight(self, graph: Graph, ctx: PassContext, name: str, weight: Weight) -> fx.Node:
        """A weight of the layer: the model's own where that is the same one, quantized or not."""
        sources = {id(record.weight): record.source for record in ctx.quant_records}
        for known, handle in graph.weights.items():
            source = sources.get(id(handle), handle)
            if handle.shape == weight.shape and source is not None and same_weight(source, weight):
                return graph.add_weight(known, handle)
        return graph.add_weight(f"{PREFIX}.{name.removeprefix('model.')}", weight)


def _has_cache(node: fx.Node) -> bool:
    return node.op == "call_function" and traits_of(node.target).stateful


def _head(graph: Graph) -> fx.Node:
    """The linear layer that gives the logits."""
    found = lm_heads(graph)
    if len(found) != 1:
        raise UsageError(f"--spec: the logits come from {len(found)} linear layers, a layer that guesses needs one")
    return found.pop()


def _again(graph: Graph, node: fx.Node) -> fx.Node:
    """A value of the step once more, computed from where tokens or branches last meet: for rows of which the step
    computes no logits."""
    inputs = [n for n in node.all_input_nodes if n.op != "get_attr" and type_of(n).rows == TOKENS]
    if node.op != "call_function" or len(inputs) != 1 or traits_of(node.target).mixes_tokens:
        return node
    source = _again(graph, inputs[0])
    args: Any = fx.map_arg(node.args, lambda n: source if n is inputs[0] else n)
    return graph.call(node.target, *args, origin=node)


def _before_norm(states: fx.Node) -> fx.Node:
    """What the norm in front of the layer's head reads."""
    if states.target is not NORM:
        raise UsageError("--spec: the last norm of the layer that guesses does not show")
    return states.args[0]  # type: ignore[return-value]


def _tapped(graph: Graph, taps: Taps) -> list[fx.Node]:
    """The values [T, H] behind the layers that are tapped."""
    ends, found, width = LayerEnds(graph), list[fx.Node](), taps.projection.shape[-1] // len(taps.layers)
    for layers in taps.layers:
        if not 0 < layers <= ends.count:
            raise UsageError(f"--spec: hidden states behind {layers} layers are asked for, the model has {ends.count}")
        value = ends.behind(layers)
        if value is None or type_of(value).shape[-1:] != (width,):
            raise UsageError(f"--spec: where {layers} of the model's layers end does not show as one value of {width}")
        found.append(value)
    return found


def _projected(graph: Graph, taps: Taps, values: list[fx.Node]) -> fx.Node:
    """The first hidden states [T, H], of the values [T, model's H] behind the layers."""
    inputs = [graph.call(aten.view.default, value, [-1, type_of(value).shape[-1]]) for value in values]
    if taps.norms:
        norms = [graph.add_weight(f"{PREFIX}.fc_norm.{i}", norm) for i, norm in enumerate(taps.norms)]
        inputs = [graph.call(NORM, value, norm, taps.eps) for value, norm in zip(inputs, norms, strict=True)]
    joined = graph.call(aten.cat.default, inputs, 1)
    if taps.joined_norm is not None:
        joined = graph.call(NORM, joined, graph.add_weight(f"{PREFIX}.input_norm", taps.joined_norm), taps.eps)
    return graph.call(LINEAR, joined, graph.add_weight(f"{PREFIX}.fc", taps.projection), None)


def _spread(graph: Graph, logits: fx.Node, vocabulary: torch.Tensor, tokens: int) -> fx.Node:
    """Logits for all tokens: those of tokens that the layer does not know are minus infinity."""
    place = torch.zeros(tokens, dtype=torch.int32)
    place[vocabulary] = torch.arange(len(vocabulary), dtype=torch.int32)
    missing = torch.full((tokens,), float("-inf"))
    missing[vocabulary] = 0.0
    places, lowered = (
        graph.add_weight(f"{PREFIX}.{name}", Constant(value))
        for name, value in (("place", place), ("missing", missing))
    )
    return graph.call(aten.add.Tensor, graph.call(COLUMNS, logits, places), lowered)
