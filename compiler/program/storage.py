"""Which float activations may be stored in 16 bits: those that matrix products and attention read or write.

The products round their operands to 16 bits anyway. All else stays in float32: the residual stream and its sums, what
is normalized, and whatever decides a selection (a router's scores: rounding could swap two experts).
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ..graph.graph import Graph
from ..ops import OPS

aten = torch.ops.aten
_MOVES = {
    aten.view.default, aten.permute.default, aten.expand.default, aten.slice.Tensor, aten.cat.default,
    aten.repeat.default,
}  # fmt: skip
_PRODUCTS = {OPS[name].overload for name in ("linear", "expert_linear", "paged_attention")}
_SELECTS = OPS["topk"].overload


def narrow_values(graph: Graph) -> set[tuple[fx.Node, int]]:
    """(node, output index) of every value that may be stored in the backend's activation type."""
    found: set[tuple[fx.Node, int]] = set()
    reading, selecting = _backward(graph)
    for node in graph.nodes:
        if node.op != "call_function" or node.target in _MOVES or node.target is operator.getitem:
            continue
        many = isinstance(node.meta["type"], tuple)
        for index in range(len(node.meta["type"]) if many else 1):
            parts = [u for u in node.users if u.target is operator.getitem and u.args[1] == index] if many else [node]
            read = any(part in reading for part in parts)
            if (node.target in _PRODUCTS or read) and not any(part in selecting for part in parts):
                found.add((node, index))
    return found


def _backward(graph: Graph) -> tuple[set[fx.Node], set[fx.Node]]:
    """Nodes whose value a product reads as it is, and nodes that reach a selection without a product between."""
    reading: set[fx.Node] = set()
    selecting: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        for user in node.users:
            if user.target in _PRODUCTS:
                if user.args[0] is node or user.target is OPS["paged_attention"].overload:
                    reading.add(node)
                continue
            if user.target in _MOVES and user in reading:
                reading.add(node)
            if user.target is _SELECTS or user in selecting:
                selecting.add(node)
    return reading, selecting
