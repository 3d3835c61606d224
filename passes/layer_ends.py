"""Finds the ends of layers from the data flow: between two attentions there is a point where a single value carries
everything that depends on the tokens; after the last attention such a point begins the model's tail."""

from __future__ import annotations

import re

from torch import fx

from ..compiler.graph.graph import Graph, layer_of
from ..compiler.graph.tensor_types import type_of
from ..compiler.ops import traits_of


class LayerEnds:
    """The values after the layers of a graph. A layer is recognized by its attention, or by the states that it owns."""

    def __init__(self, graph: Graph) -> None:
        self._order = {node: index for index, node in enumerate(graph.nodes)}
        self._spans: list[tuple[int, int]] = []  # by layer, the first and the last position of its attention or states
        before: fx.Node | None = None
        for node in (n for n in graph.nodes if n.op == "call_function" and traits_of(n.target).stateful):
            again = before is not None and traits_of(node.target).attention and traits_of(before.target).attention
            if before is None or again or layer_of(node) != layer_of(before):
                self._spans.append((self._order[node], self._order[node]))
            self._spans[-1] = self._spans[-1][0], self._order[node]
            before = node
        self._cuts = _cuts(graph, self._order)

    @property
    def count(self) -> int:
        """How many layers there are."""
        return len(self._spans)

    def behind(self, layers: int) -> fx.Node | None:
        """The value after the first `layers` layers, 1 to `count`; None if it cannot be determined."""
        begins = self._spans[layers - 1][1]
        if layers < self.count:
            between = [n for n in self._cuts if begins < self._order[n] < self._spans[layers][0]]
            return between[-1] if between else None
        before = self.behind(layers - 1) if layers > 1 else None
        found = [n for n in self._cuts if self._order[n] > begins and before is not None and alike(n, before)]
        return found[-1] if found else None


def _cuts(graph: Graph, order: dict[fx.Node, int]) -> list[fx.Node]:
    """Values that, at their place in the order, are the only carriers of everything that depends on the tokens."""
    tokens = graph.input("token_ids")
    carrying: set[fx.Node] = {node for node in [tokens] if node is not None}
    live: dict[fx.Node, int] = {}
    cuts: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "call_function" and any(n in carrying for n in node.all_input_nodes):
            carrying.add(node)
            live = {n: last for n, last in live.items() if last > order[node]}
            live[node] = max((order[user] for user in node.users), default=-1)
            if len(live) == 1:
                cuts.append(node)
    return cuts


def alike(node: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes have the same type and, except for the layer's number, the same module, so that they are the
    same value of two layers."""
    names = [re.sub(r"\d+", "#", str(n.meta.get("module") or "")) for n in (node, other)]
    return names[0] == names[1] and type_of(node) == type_of(other)
