"""Which float activations may be stored in 16 bits: those that matrix products and attention read or write.

The products round their operands to 16 bits anyway. All else stays in float32: the residual stream and its sums, what
is normalized, whatever decides a selection (a router's scores: rounding could swap two experts), and what ranks give
each other (parts of sums, and logits).
"""

from __future__ import annotations

import operator

from torch import fx

from ..graph.graph import Graph
from ..ops import traits_of


def narrow_values(graph: Graph) -> set[tuple[fx.Node, int]]:
    """(node, output index) of every value that may be stored in the backend's activation type."""
    found: set[tuple[fx.Node, int]] = set()
    reading, selecting, exchanged = _backward(graph)
    for node in graph.nodes:
        if node.op != "call_function" or traits_of(node.target).moves_only or node.target is operator.getitem:
            continue
        many = isinstance(node.meta["type"], tuple)
        for index in range(len(node.meta["type"]) if many else 1):
            parts = [u for u in node.users if u.target is operator.getitem and u.args[1] == index] if many else [node]
            read = any(part in reading for part in parts)
            kept = traits_of(node.target).collective or any(part in selecting or part in exchanged for part in parts)
            if (traits_of(node.target).product or read) and not kept:
                found.add((node, index))
    return found


def _backward(graph: Graph) -> tuple[set[fx.Node], set[fx.Node], set[fx.Node]]:
    """Nodes whose value a product reads as it is, nodes that reach a selection without a product between, and nodes
    whose value ranks give each other as it is."""
    reading: set[fx.Node] = set()
    selecting: set[fx.Node] = set()
    exchanged: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        for user in node.users:
            asked = traits_of(user.target)
            if asked.product:
                if any(user.args[i] is node for i in asked.product):
                    reading.add(node)
                continue
            if asked.collective or (asked.moves_only and user in exchanged):
                exchanged.add(node)
            if asked.moves_only and user in reading:
                reading.add(node)
            if asked.selects or user in selecting:
                selecting.add(node)
    return reading, selecting, exchanged
