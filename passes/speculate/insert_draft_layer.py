"""A draft layer, as a section with its own logits (multi-token prediction, EAGLE), and its input, as a section that
gives the hidden states of a step's tokens.

The layer has its own keys and values, in KV layers after the model's, or reads the model's. Weights that it shares with
the model, such as the embedding and the LM head, are the model's, in their quantized form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx

from ...compiler.errors import PassError, UsageError
from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import DRAFT_LAYER, HIDDEN, LOGITS, TAP, Graph, attention_spec, layer_of, set_layer
from ...compiler.graph.tensor_types import TOKENS, type_of
from ...compiler.ops import OPS, named_arguments, traits_of
from ...compiler.weights.handles import Weight
from ...compiler.weights.same import same_weight
from ..base import Pass, PassContext, PassResult
from ..drafting import PREFIX, Clusters, Taps, among_clusters, projected, spread, tapped
from ..quantize.select import lm_heads

ATTENTION, LINEAR, NORM = (OPS[name].overload for name in ("attention", "linear", "rms_norm"))


@dataclass(frozen=True)
class DraftLayer:
    """A draft layer, as a graph (token_ids, positions, DRAFT_HIDDEN[T, H]) -> logits.

    taps: None if its first hidden states are the input of the model's LM head. vocabulary: int64 [logits], the token of
    each of its logits; None if the logits are the model's. normed: whether the next hidden state is the input of its
    own head, else the value before that norm; with `projected` [DRAFT_HIDDEN's H, H] multiplied by it. reads: for
    attentions that read the model's keys and values, the number of the model's attention by that of the graph's; their
    own keys and values are placeholders. clusters: clusters of its vocabulary, of which only some are scored per row.
    block: how many tokens it guesses at once, including the known token before them; 0 if it guesses one token.
    mask_token: the token in place of the unknown ones.
    """

    graph: Graph
    taps: Taps | None = None
    vocabulary: torch.Tensor | None = None
    normed: bool = True
    projected: Weight | None = None
    reads: Mapping[int, int] = field(default_factory=dict)
    clusters: Clusters | None = None
    block: int = 0
    mask_token: int = 0


@dataclass(frozen=True)
class InsertDraftLayer(Pass):
    """Inserts `layer`. UsageError if its logits or the model's do not come from a linear layer or have different
    vocabularies, or if the layers that it taps or reads cannot be found."""

    layer: DraftLayer | None = None
    name: ClassVar[str] = "insert-draft-layer"
    breaks: ClassVar[frozenset[str]] = frozenset({Fact.UNIQUE})

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        if self.layer is None or DRAFT_LAYER in graph.sections:
            return PassResult(False)
        layer = self.layer
        head, own = _head(graph), _head(layer.graph)
        read = {own: _attention(graph, number) for own, number in layer.reads.items()}
        if layer.vocabulary is None and type_of(head).shape[-1] != type_of(own).shape[-1]:
            raise UsageError("--spec: the layer that guesses has another vocabulary than the model")
        values = None if layer.taps is None else tapped(graph, layer.taps)
        copies = self._copied(graph, ctx, layer.graph, read)
        logits, states = copies[layer.graph.output], copies[own.args[0]]  # type: ignore[index]
        if not layer.normed:
            states = _before_norm(states)
        with graph.fx.inserting_before(graph.end):
            if layer.taps is None or values is None:
                hidden = _again(graph, head.args[0])  # type: ignore[arg-type]
            else:
                hidden = projected(graph, layer.taps, values)
            if layer.clusters is not None:
                logits = among_clusters(graph, logits, states, layer.clusters)
            if layer.projected is not None:
                weight = graph.add_weight(f"{PREFIX}.post_projection", layer.projected)
                states = graph.call(LINEAR, states, weight, None)
            if layer.vocabulary is not None:
                logits = spread(graph, logits, layer.vocabulary, type_of(head).shape[-1])
        graph.returns(**{f"{TAP}.{HIDDEN}": hidden})
        graph.returns(**{f"{DRAFT_LAYER}.{LOGITS}": logits, f"{DRAFT_LAYER}.{HIDDEN}": states})
        return PassResult(True, Counter({"draft-layer": 1}))

    def _copied(
        self, graph: Graph, ctx: PassContext, layer: Graph, read: Mapping[int, fx.Node]
    ) -> dict[fx.Node, fx.Node]:
        """The layer's nodes -> their copies in the graph. read: by the number of an attention, the model's attention
        whose keys and values replace its own."""
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
                    if _has_cache(node) and (theirs := read.get(layer_of(node))) is not None:
                        _reads_keys(copies[node], theirs)
                    elif _has_cache(node):
                        set_layer(copies[node], first + layer_of(node))
        return copies

    def _weight(self, graph: Graph, ctx: PassContext, name: str, weight: Weight) -> fx.Node:
        """A weight of the layer; the model's weight if both are the same, quantized or not."""
        sources = {id(record.weight): record.source for record in ctx.quant_records}
        for known, handle in graph.weights.items():
            source = sources.get(id(handle), handle)
            if handle.shape == weight.shape and source is not None and same_weight(source, weight):
                return graph.add_weight(known, handle)
        return graph.add_weight(f"{PREFIX}.{name.removeprefix('model.')}", weight)


def _has_cache(node: fx.Node) -> bool:
    return node.op == "call_function" and traits_of(node.target).stateful


def _attention(graph: Graph, layer: int) -> fx.Node:
    """The model's attention of that number."""
    found = next((n for n in graph.nodes if n.target is ATTENTION and layer_of(n) == layer), None)
    if found is None:
        raise UsageError(f"--spec: the keys and values of the model's layer {layer} do not show")
    return found


def _reads_keys(node: fx.Node, theirs: fx.Node) -> None:
    """Let an attention read the keys and values of another one, for the same tokens."""
    own, given = named_arguments(node), named_arguments(theirs)
    for name in ("k", "v"):
        here, there = type_of(own[name]).shape, type_of(given[name]).shape
        if here != there:
            what = "keys" if name == "k" else "values"
            raise UsageError(
                f"--spec: the layer that guesses reads {what} of {list(here)}, the model's are {list(there)}"
            )
    seen = attention_spec(theirs)
    spec = replace(attention_spec(node), layer=seen.layer, mask=seen.mask, policy=seen.policy)
    named = own | {"k": given["k"], "v": given["v"], "spec": spec}
    node.args = OPS["attention"].ordered(**named)


def _head(graph: Graph) -> fx.Node:
    """The linear layer that gives the logits."""
    found = lm_heads(graph)
    if len(found) != 1:
        raise UsageError(f"--spec: the logits come from {len(found)} linear layers, a layer that guesses needs one")
    return found.pop()


def _again(graph: Graph, node: fx.Node) -> fx.Node:
    """A second computation of a step's value, from the last op that mixes tokens or joins branches: for rows of which
    the step computes no logits."""
    inputs = [n for n in node.all_input_nodes if n.op != "get_attr" and type_of(n).rows == TOKENS]
    if node.op != "call_function" or len(inputs) != 1 or traits_of(node.target).mixes_tokens:
        return node
    source = _again(graph, inputs[0])
    args: Any = fx.map_arg(node.args, lambda n: source if n is inputs[0] else n)
    return graph.call(node.target, *args, origin=node)


def _before_norm(states: fx.Node) -> fx.Node:
    """The input of the norm before the layer's head; UsageError if there is no such norm."""
    if states.target is not NORM:
        raise UsageError("--spec: the last norm of the layer that guesses does not show")
    return states.args[0]  # type: ignore[return-value]
