"""Models that score a whole text end by picking one token of the sequence, or by taking the mean over all tokens.

The ops after that are computed for every token, and the graph says which token's row counts. A mean becomes attention
with equal weights for all tokens, so that every row has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import torch
from torch import fx

from ...graph.graph import Graph
from ...graph.tensor_types import type_of
from ...ops import OPS
from ...ops.attention_spec import ALL_AHEAD, AttentionMask, AttentionSpec
from .conversion import Conversion
from .values import T, TracedValue, dims_of, op_name

_SOME = 7  # tokens of the sequences that are compared
_WIDEST = 64  # largest width of the heads over which a mean is split


@dataclass(frozen=True)
class TokenSum:
    """The sum of a value over all tokens. Models divide it by the number of tokens."""

    value: TracedValue


class PickedTokens:
    """The CallFollower of x[:, 0], x[:, -1], x[arange(1), last], x.mean(1) and x.sum(1) / number over tokens."""

    def follow(self, conv: Conversion, node: fx.Node) -> Any:
        """The TracedValue of a node that picks a token or takes the mean of all; None for any other node. ValueError if
        two nodes pick different tokens."""
        short = op_name(node.target)
        if short not in ("aten.select", "aten.index", "aten.mean", "aten.sum", "aten.div"):
            return None
        value = conv.values.get(node.args[0])  # type: ignore[arg-type]
        if short == "aten.div":
            counts = isinstance(value, TokenSum) and self._is_number_of_tokens(conv, node.args[1])
            return self._mean(conv, node, value.value) if counts else None  # type: ignore[union-attr]
        if short == "aten.index" and isinstance(value, TracedValue) and self._is_all_of_one(conv, node, value):
            return value
        if not isinstance(value, TracedValue) or not value.per_token or value.axis is None:
            return None
        if short in ("aten.mean", "aten.sum"):
            axes: Any = node.args[1] if len(node.args) > 1 else None
            if not isinstance(axes, (list, tuple)) or [axis % len(value.dims) for axis in axes] != [value.axis]:
                return None
            return TokenSum(value) if short == "aten.sum" else self._mean(conv, node, value)
        if short == "aten.select":
            axis, place = node.args[1:]
            index = place if axis % len(value.dims) == value.axis else None  # type: ignore[operator]
        else:
            index = self._index(conv, node, value)
        if index not in (0, -1):
            return None
        picked = "first" if index == 0 else "last"
        if conv.graph.picked not in ("", picked):
            raise ValueError("two different tokens picked out of the sequence")
        conv.graph.picked = picked
        return TracedValue(value.node, dims_of(node.meta["val"]))

    def _is_all_of_one(self, conv: Conversion, node: fx.Node, value: TracedValue) -> bool:
        """Whether a node is x[arange(batch)] for one sequence, which changes nothing."""
        places: Any = node.args[1]
        if conv.graph.picked == "" or len(places) != 1 or value.axis is not None or value.dims[0] != 1:
            return False
        return places[0] in conv.static.nodes and conv.static.evaluate(places[0], _SOME).tolist() == [0]

    def _index(self, conv: Conversion, node: fx.Node, value: TracedValue) -> int | None:
        """The token that x[rows, tokens] picks in a sequence of any length: 0, -1 for the last; None for any other."""
        places: Any = node.args[1]
        if len(places) != 2 or value.axis != 1 or any(place not in conv.static.nodes for place in places):
            return None
        found = [(count, conv.static.evaluate(places[1], count)) for count in (7, 12)]
        for index in (0, -1):
            if all(value.numel() == 1 and int(value) % count == index % count for count, value in found):
                return index
        return None

    def _is_number_of_tokens(self, conv: Conversion, operand: Any) -> bool:
        if not isinstance(operand, fx.Node) or operand not in conv.static.nodes:
            return False
        return all(bool((torch.as_tensor(conv.static.evaluate(operand, n)) == n).all()) for n in (7, 12))

    def _mean(self, conv: Conversion, node: fx.Node, value: TracedValue) -> TracedValue:
        flat = conv.view(value, (T, prod(value.features)))
        mean = mean_of_rows(conv.graph, flat.node, conv.next_layer())
        conv.graph.picked = conv.graph.picked or "last"  # every row has it
        return TracedValue(conv.view(TracedValue(mean, flat.dims), value.dims).node, dims_of(node.meta["val"]))


def mean_of_rows(graph: Graph, node: fx.Node, layer: int) -> fx.Node:
    """[T, N], whose rows are each the mean over its sequence of the rows of `node`, [T, .., N].

    layer: the number of the attention that computes it.
    """
    width = type_of(node).shape[-1]
    head = gcd(width, _WIDEST)
    heads = graph.call(torch.ops.aten.view.default, node, [-1, width // head, head])
    spec = AttentionSpec(layer, 0.0, AttentionMask(ahead=ALL_AHEAD))
    mean = graph.call(OPS["attention"].overload, heads, heads, heads, spec)
    return graph.call(torch.ops.aten.view.default, mean, [-1, width])
