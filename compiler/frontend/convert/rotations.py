"""Recognises rotary embedding written with complex numbers: pairs of elements times cos + i sin of the position.

view_as_real(view_as_complex(x) * table[position]) -> rope(x, cos, sin, "interleaved")
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from torch import fx

from ...ops import OPS
from .conversion import Conversion
from .values import T, TracedValue, dims_of, op_name

EMBEDDING, ROPE = (OPS[name].overload for name in ("embedding", "rope"))
_SAME = ("_to_copy", "to", "alias", "clone", "contiguous", "detach")


@dataclass(frozen=True)
class ComplexPairs:
    """A complex value [..], held as a real value [.., 2] of its real and imaginary parts."""

    value: TracedValue


class ComplexRotation:
    """The CallFollower of products of complex numbers, one of which depends on the position alone."""

    def __init__(self) -> None:
        self._tables: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}  # cos and sin, which all layers share

    def follow(self, conv: Conversion, node: fx.Node) -> Any:
        """The ComplexPairs or the TracedValue that a node of such a product becomes; None for any other node.
        ValueError for other operations on complex numbers."""
        short = op_name(node.target).split(".")[-1]
        values = [conv.values.get(arg) for arg in node.all_input_nodes]
        if short == "view_as_complex" and isinstance(values[0], TracedValue) and values[0].per_token:
            return ComplexPairs(values[0])
        if not any(isinstance(value, ComplexPairs) for value in values):
            return None
        if short == "view_as_real":
            return values[0].value  # type: ignore[union-attr]
        if short in _SAME:
            return values[0]
        if short != "mul" or len(node.all_input_nodes) != 2:
            raise ValueError(f"{short} of complex numbers")
        at = 0 if isinstance(values[0], ComplexPairs) else 1
        pairs, angles = values[at], node.all_input_nodes[1 - at]
        if angles not in conv.static.nodes:
            raise ValueError("a product of complex numbers that both depend on the tokens")
        return self._rotated(conv, pairs.value, angles)  # type: ignore[union-attr]

    def _rotated(self, conv: Conversion, x: TracedValue, angles: fx.Node) -> ComplexPairs:
        dims = x.dims
        width = 2 * dims[-2]
        heads = prod(x.features) // width
        place = dims_of(angles.meta["val"])
        if T not in place or prod(d for d in place if d is not T) * 2 != width or dims.index(T) > len(dims) - 3:
            raise ValueError("complex numbers that are rotated in different ways by head")
        if angles not in self._tables:
            self._tables[angles] = self._parts(conv, angles, place.index(T))
        positions = conv.graph.input("positions")
        cos, sin = (conv.emit(EMBEDDING, positions, table) for table in self._tables[angles])
        flat = conv.view(x, (heads, T, width))
        turned = conv.emit(ROPE, flat.node, cos, sin, "interleaved")
        return ComplexPairs(conv.view(TracedValue(turned, flat.dims), dims))

    def _parts(self, conv: Conversion, angles: fx.Node, axis: int) -> tuple[fx.Node, fx.Node]:
        table = conv.static.table(angles, axis, conv.max_tokens)
        flat = table.reshape(len(table), -1)
        parts = [part.float().repeat_interleave(2, dim=1).contiguous() for part in (flat.real, flat.imag)]
        positions = conv.graph.input("positions")
        assert positions is not None
        with conv.graph.fx.inserting_after(positions):  # before all layers, so that repeated layers share it
            cos, sin = (conv.constant(name, part).node for name, part in zip(("cos", "sin"), parts, strict=True))
        return cos, sin
