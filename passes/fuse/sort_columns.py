"""Products with weights whose columns are stored in another order (GPTQ with act-order) take their input in that order.

linear(x, W) -> linear(columns(x, order), W[:, order]). Where x is made of the results of linear layers by elementwise
ops alone, and nothing else reads those, their rows are put in order instead, and nothing is left to do at run time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from ...compiler.graph.graph import Graph, type_of
from ...compiler.ops import OPS, traits_of
from ...compiler.weights.handles import Constant, GivenRows, QuantizedWeight, SortedColumns, Weight, derive
from ..base import Pass, PassContext, PassResult, Refusal

aten = torch.ops.aten
LINEAR, COLUMNS = OPS["linear"].overload, OPS["columns"].overload


@dataclass(frozen=True)
class SortColumns(Pass):
    """Layers that read one value in one order share the step that orders it."""

    name: ClassVar[str] = "sort-columns"

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        counts: Counter[str] = Counter()
        ordered: dict[tuple[fx.Node, bytes], fx.Node] = {}
        for node in [n for n in graph.nodes if n.target is LINEAR]:
            weight = _weight(graph, node.args[1])
            x: Any = node.args[0]
            if not isinstance(weight, SortedColumns):
                continue
            region = _Region(graph, node)
            reason = region.grow(x)
            if not reason:
                region.sort(weight.order)
                counts["folded"] += 1
            else:
                ctx.refusals.append(Refusal(self.name, node.name, reason))
                key = x, weight.order.numpy().tobytes()
                if key not in ordered:
                    with graph.fx.inserting_before(node):
                        order = graph.add_weight("column_order", Constant(weight.order.to(torch.int32)))
                        ordered[key] = graph.call(COLUMNS, x, order, origin=node)
                node.update_arg(0, ordered[key])
                counts["columns"] += 1
            with graph.fx.inserting_before(node):
                node.update_arg(1, graph.add_weight(str(node.args[1].target), weight.source))  # type: ignore[union-attr]
        return PassResult(bool(counts), counts)


def _weight(graph: Graph, node: Any) -> Weight | None:
    return graph.weight(node) if isinstance(node, fx.Node) and node.op == "get_attr" else None


@dataclass
class _Region:
    """The values between linear layers and `reader`, which alone reads them, and how to put their elements in order.

    blocks: of each linear layer the rows that the region reads, from the first on. vectors: arguments that are weights
    with an entry per element.
    """

    graph: Graph
    reader: fx.Node
    inside: list[fx.Node] = field(default_factory=list)
    blocks: dict[fx.Node, list[int]] = field(default_factory=dict)
    vectors: list[tuple[fx.Node, int]] = field(default_factory=list)

    def grow(self, x: fx.Node) -> str:
        """Find the region behind x; why there is none, or ""."""
        pending, readers = [x], {self.reader}
        while pending:
            value = pending.pop()
            if value in self.inside:
                continue
            reason = self._take(value, type_of(x).shape[-1], pending)
            if reason:
                return reason
            self.inside.append(value)
        readers |= {*self.inside, *self.blocks}
        others = [user for value in (*self.inside, *self.blocks) for user in value.users if user not in readers]
        return f"{others[0].name} reads it in the order that it has" if others else ""

    def _take(self, value: fx.Node, width: int, pending: list[fx.Node]) -> str:
        if prod(type_of(value).shape) != width:
            return f"{value.name} has several vectors per row"
        if value.target is LINEAR:
            return self._rows(value, 0, width)
        if value.target is aten.slice.Tensor and getattr(value.args[0], "target", None) is LINEAR:
            source, axis, start, _, *step = value.args
            if axis == type_of(value).rank - 1 and (step or [1])[0] == 1:
                return self._rows(source, int(start or 0), width)  # type: ignore[arg-type]
        if value.op != "call_function" or not traits_of(value.target).elementwise:
            return f"{value.name} is not made element by element of what linear layers give"
        for number, arg in enumerate(value.args):
            if not isinstance(arg, fx.Node):
                continue
            shape = tuple(type_of(arg).shape)
            if shape == () or shape[-1] == 1:
                continue
            if shape[-1] != width or prod(shape) != width:
                return f"{value.name} reads {arg.name}, which has another shape"
            if arg.op == "get_attr":
                self.vectors.append((value, number))
            else:
                pending.append(arg)
        return ""

    def _rows(self, linear: fx.Node, first: int, width: int) -> str:
        weight = _weight(self.graph, linear.args[1])
        if weight is None or (isinstance(weight, QuantizedWeight) and not _has_free_rows(weight)):
            return f"the rows of {linear.name} are not free to move"
        blocks = self.blocks.setdefault(linear, [])
        if any(0 < abs(first - other) < width for other in blocks):
            return f"parts of {linear.name} overlap"
        if first not in blocks:
            blocks.append(first)
        return ""

    def sort(self, order: Tensor) -> None:
        """Put the elements of the region in order."""
        for linear, firsts in self.blocks.items():
            rows = torch.arange(type_of(linear.args[1]).shape[0])  # type: ignore[arg-type]
            for first in firsts:
                rows[first : first + len(order)] = first + order
            self._replace(linear, 1, rows)
            if linear.args[2] is not None:
                self._replace(linear, 2, rows)
        for node, number in self.vectors:
            self._replace(node, number, order, -1)

    def _replace(self, node: fx.Node, number: int, order: Tensor, axis: int = 0) -> None:
        """Argument `number` in another order along an axis."""
        old: Any = node.args[number]
        weight = self.graph.weight(old)
        quantized = isinstance(weight, QuantizedWeight)
        moved = GivenRows((weight,), order) if quantized else derive(lambda v: v.index_select(axis, order), weight)
        with self.graph.fx.inserting_before(node):
            node.update_arg(number, self.graph.add_weight(str(old.target), moved))


def _has_free_rows(weight: QuantizedWeight) -> bool:
    """Whether its rows can be stored in any order: no block spans several."""
    return weight.given and len(weight.shape) == 2 and weight.format.block[0] == 1
