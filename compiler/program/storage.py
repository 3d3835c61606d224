"""Which float activations may be stored in 16 bits: those that matrix products and attention read or write.

The products round their operands to 16 bits anyway. Everything else stays in float32: the residual stream and its sums,
inputs of norms, values that decide a selection (a router's scores: rounding could swap two experts), and values that
ranks exchange to add up, or as logits. Rows that they gather are moved unchanged: two elements of 16 bits to a word.
"""

from __future__ import annotations

import operator
from math import prod

from torch import fx

from ..graph.graph import Graph
from ..graph.tensor_types import TensorType
from ..ops import OPS, traits_of

_GATHER = OPS["all_gather_rows"].overload


def narrow_values(graph: Graph) -> set[tuple[fx.Node, int]]:
    """(node, output index) of every value that may be stored in the backend's activation type."""
    found: set[tuple[fx.Node, int]] = set()
    reading, selecting, exchanged = _backward(graph)
    for node in graph.nodes:
        if node.op != "call_function" or _moves(node) or node.target is operator.getitem:
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
    """Nodes whose value a product reads unchanged, nodes that reach a selection with no product in between, and nodes
    whose value ranks exchange unchanged."""
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
            if (asked.collective and not _moves(user)) or (_moves(user) and user in exchanged):
                exchanged.add(node)
            if _moves(user) and user in reading:
                reading.add(node)
            if asked.selects or user in selecting:
                selecting.add(node)
    return reading, selecting, exchanged


def _moves(node: fx.Node) -> bool:
    """Whether a call only moves elements, so that its result is stored like its operand."""
    kind = node.meta.get("type")
    if node.target is _GATHER and isinstance(kind, TensorType):
        return prod(kind.shape) % 2 == 0
    return node.op == "call_function" and traits_of(node.target).moves_only
