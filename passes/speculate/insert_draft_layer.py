"""A layer that guesses, as a section with logits of its own (multi-token prediction, EAGLE), and what it reads of a
step, as a section that gives the hidden states of its tokens.

The layer has keys and values of its own, in a KV layer behind the model's. What it shares with the model, such as the
embedding and the LM head, it reads where the model does, in the form that quantization gave it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

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
from ...compiler.ops import traits_of
from ...compiler.weights.handles import Weight
from ...compiler.weights.same import same_weight
from ..base import Pass, PassContext, PassResult
from ..quantize.select import lm_heads

PREFIX = "draft_layer"


@dataclass(frozen=True)
class InsertDraftLayer(Pass):
    """Insert `layer`, a graph (token_ids, positions, DRAFT_HIDDEN) -> logits. UsageError where its logits or those of
    the model are no linear layer's, or of another vocabulary."""

    layer: Graph | None = None
    name: ClassVar[str] = "insert-draft-layer"
    breaks: ClassVar[frozenset[str]] = frozenset({Fact.UNIQUE})

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        if self.layer is None or DRAFT_LAYER in graph.sections:
            return PassResult(False)
        head, own = _head(graph), _head(self.layer)
        if type_of(head).shape[-1] != type_of(own).shape[-1]:
            raise UsageError("--spec: the layer that guesses has another vocabulary than the model")
        copies = self._copied(graph, ctx)
        with graph.fx.inserting_before(graph.end):
            hidden = _again(graph, head.args[0])  # type: ignore[arg-type]
        states = copies[own.args[0]]  # type: ignore[index]
        graph.returns(**{f"{TAP}.{HIDDEN}": hidden})
        graph.returns(**{f"{DRAFT_LAYER}.{LOGITS}": copies[self.layer.output], f"{DRAFT_LAYER}.{HIDDEN}": states})
        return PassResult(True, Counter({"draft-layer": 1}))

    def _copied(self, graph: Graph, ctx: PassContext) -> dict[fx.Node, fx.Node]:
        """The layer's nodes -> their copies in the graph."""
        layer, copies = self.layer, dict[fx.Node, fx.Node]()
        assert layer is not None
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
