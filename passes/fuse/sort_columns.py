"""Products with weights whose columns are stored in another order (GPTQ with act-order) get their input in that order.

linear(x, W) -> linear(columns(x, order), W[:, order]), and the same for products with experts, each of which has an
order of its own: expert_linear(x, W, index) -> expert_linear(expert_columns(x, order, index), W', index). If x is
computed from the results of such layers only by elementwise ops, and nothing else reads the results, the rows of those
layers' weights are sorted instead, and nothing is left to do at run time. A weight whose parts have their own orders
(gate and up) is first split.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from ...compiler.graph.graph import Graph
from ...compiler.graph.tensor_types import type_of
from ...compiler.ops import OPS, traits_of
from ...compiler.weights.handles import Constant, GivenRows, QuantizedWeight, SortedColumns, Weight, derive
from ..base import Pass, PassContext, PassResult, Refusal

aten = torch.ops.aten
LINEAR, COLUMNS = OPS["linear"].overload, OPS["columns"].overload
EXPERTS, EXPERT_COLUMNS = OPS["expert_linear"].overload, OPS["expert_columns"].overload


@dataclass(frozen=True)
class SortColumns(Pass):
    """Sorts the inputs of such layers; layers that read one value in one order share the step that sorts it."""

    name: ClassVar[str] = "sort-columns"

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        counts: Counter[str] = Counter()
        ordered: dict[tuple[Any, ...], fx.Node] = {}
        products = [n for n in graph.nodes if n.target is LINEAR or (n.target is EXPERTS and n.args[3] is not None)]
        for node in [part for product in products for part in _apart(graph, product)]:
            weight = _weight(graph, node.args[1])
            x: Any = node.args[0]
            if not isinstance(weight, SortedColumns):
                continue
            order = weight.order if weight.order.dim() == 1 else weight.order.squeeze(-2)
            region = _SortedRegion(graph, node)
            reason = region.grow(x)
            if not reason:
                region.sort(order)
                counts["folded"] += 1
            else:
                ctx.refusals.append(Refusal(self.name, node.name, reason))
                index = node.args[3:4] if order.dim() == 2 else ()
                key = x, *index, order.numpy().tobytes()
                if key not in ordered:
                    with graph.fx.inserting_before(node):
                        stored = graph.add_weight("column_order", Constant(order.to(torch.int32).contiguous()))
                        kind = EXPERT_COLUMNS if index else COLUMNS
                        ordered[key] = graph.call(kind, x, stored, *index, origin=node)
                node.update_arg(0, ordered[key])
                counts["columns"] += 1
            with graph.fx.inserting_before(node):
                node.update_arg(1, graph.add_weight(str(node.args[1].target), weight.source))  # type: ignore[union-attr]
        return PassResult(bool(counts), counts)


def _weight(graph: Graph, node: Any) -> Weight | None:
    return graph.weight(node) if isinstance(node, fx.Node) and node.op == "get_attr" else None


def _apart(graph: Graph, node: fx.Node) -> list[fx.Node]:
    """The products with the parts of a weight that have their own orders, whose results are concatenated again; else
    the node itself."""
    weight, name = _weight(graph, node.args[1]), str(node.args[1].target)  # type: ignore[union-attr]
    if not isinstance(weight, SortedColumns) or weight.order.dim() == 1 or weight.order.shape[-2] == 1:
        return [node]
    size = weight.shape[-2] // weight.order.shape[-2]
    x, _, bias, *index = node.args
    found: list[fx.Node] = []
    with graph.fx.inserting_before(node):
        for part in range(weight.order.shape[-2]):
            rows, order = torch.arange(part * size, (part + 1) * size), weight.order[..., part : part + 1, :]
            order = order if index else order.squeeze(-2)
            own = graph.add_weight(name, SortedColumns(GivenRows((weight.source,), rows), order))
            added = bias if bias is None else _taken(graph, bias, rows)  # type: ignore[arg-type]
            found.append(graph.call(node.target, x, own, added, *index, origin=node))
        axis = type_of(node).rank - 1
        for user in [user for user in node.users if user.target is aten.slice.Tensor and user.args[1] == axis]:
            start, end, step = (*user.args[2:], 1)[:3]
            if step == 1 and start % size == 0 and end == start + size:  # type: ignore[operator]
                graph.replace(user, found[start // size])  # type: ignore[operator]
                graph.fx.erase_node(user)
        if node.users:
            graph.replace(node, graph.call(aten.cat.default, found, axis, origin=node))
    graph.fx.erase_node(node)
    return found


def _taken(graph: Graph, old: fx.Node, order: Tensor, axis: int = -1) -> fx.Node:
    """A weight with its entries in another order along an axis: one order for all, or order[E, ...] per expert."""
    weight = graph.weight(old)
    if isinstance(weight, QuantizedWeight):
        return graph.add_weight(str(old.target), GivenRows((weight,), order))
    if order.dim() == 1:
        return graph.add_weight(str(old.target), derive(lambda v: v.index_select(axis, order), weight))

    def each(value: Tensor) -> Tensor:
        return torch.stack(
            [own.index_select(axis, rows.to(own.device)) for own, rows in zip(value, order, strict=True)]
        )

    return graph.add_weight(str(old.target), derive(each, weight))


@dataclass
class _SortedRegion:
    """The values between products and their only reader, `reader`, and how to sort their elements.

    The products are linear layers or, if `reader` is a product with experts, products with the same experts. blocks:
    for each product the rows of W at which the region's blocks begin. vectors: arguments that are weights with an entry
    per element.
    """

    graph: Graph
    reader: fx.Node
    inside: list[fx.Node] = field(default_factory=list)
    blocks: dict[fx.Node, list[int]] = field(default_factory=dict)
    vectors: list[tuple[fx.Node, int]] = field(default_factory=list)

    def grow(self, x: fx.Node) -> str:
        """Find the region that computes x; returns why there is none, or ""."""
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
        lines = 1 if self.reader.target is LINEAR else type_of(self.reader.args[3]).shape[-1]  # type: ignore[arg-type]
        if prod(type_of(value).shape) != lines * width:
            return f"{value.name} has more vectors per row than products read, or fewer"
        if self._is_alike(value):
            return self._rows(value, 0, width)
        if value.target is aten.slice.Tensor and self._is_alike(value.args[0]):
            source, axis, start, _, *step = value.args
            if axis == type_of(value).rank - 1 and (step or [1])[0] == 1:
                return self._rows(source, int(start or 0), width)  # type: ignore[arg-type]
        if value.op != "call_function" or not traits_of(value.target).elementwise:
            return f"{value.name} is not made element by element of what such products give"
        for number, arg in enumerate(value.args):
            if not isinstance(arg, fx.Node):
                continue
            shape = tuple(type_of(arg).shape)
            if shape == () or shape[-1] == 1:
                continue
            if shape[-1] != width or prod(shape) not in (width, lines * width):
                return f"{value.name} reads {arg.name}, which has another shape"
            if arg.op == "get_attr":
                if self.reader.target is EXPERTS:
                    return f"{value.name} reads {arg.name}, which is the same for all experts"
                self.vectors.append((value, number))
            else:
                pending.append(arg)
        return ""

    def _is_alike(self, value: Any) -> bool:
        """Whether the value is a product like the reader: a linear layer, or a product with the same experts."""
        same = isinstance(value, fx.Node) and value.target is self.reader.target
        return same and value.args[3:4] == self.reader.args[3:4]

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
        """Sort the elements of the region."""
        for linear, firsts in self.blocks.items():
            *experts, n, _ = type_of(linear.args[1]).shape  # type: ignore[arg-type]
            rows = torch.arange(n) if order.dim() == 1 else torch.arange(n).repeat(*experts, 1)
            for first in firsts:
                rows[..., first : first + order.shape[-1]] = first + order
            self._replace(linear, 1, rows, -2)
            if linear.args[2] is not None:
                self._replace(linear, 2, rows)
        for node, number in self.vectors:
            self._replace(node, number, order)

    def _replace(self, node: fx.Node, number: int, order: Tensor, axis: int = -1) -> None:
        """Replace argument `number` of a node by one in another order along an axis."""
        with self.graph.fx.inserting_before(node):
            node.update_arg(number, _taken(self.graph, node.args[number], order, axis))  # type: ignore[arg-type]


def _has_free_rows(weight: QuantizedWeight) -> bool:
    """Whether the weight's rows can be stored in any order, because no block spans several rows."""
    return weight.given and weight.format.block[0] == 1
