"""Rotary embedding written out in elementwise ops becomes `rope`.

x * cos + cat(-x[D/2:], x[:D/2]) * sin                    -> rope(x, cos, sin, "half")
cat(a * cos - b * sin, b * cos + a * sin), x = cat(a, b)  -> rope(x, cat(cos, cos), cat(sin, sin), "half")
x * cos + stack(-x[1::2], x[0::2]) * sin                  -> rope(x, cos, sin, "interleaved")
cat(rope(x[:R]), x[R:])                                   -> rope(x), which does not change dims above R
cos and sin must be rows of position tables, seen through ops that only move elements, which are moved into the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, fx

from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import Graph
from ...compiler.graph.interpret import eager
from ...compiler.graph.tensor_types import type_of
from ...compiler.ops import OPS, traits_of
from ...compiler.weights.handles import Weight, derive
from ..base import Pass, PassContext, PassResult
from ..rules import Bindings, Fail, Lit, Rule, Var, apply_rules, call, either, through_views

aten = torch.ops.aten
ROPE, EMBEDDING = OPS["rope"].overload, OPS["embedding"].overload
X, AXIS, HALF = Var("x"), Lit("axis"), Lit("half")
COS, SIN = Var("cos"), Var("sin")
FIRST = call(aten.slice.Tensor, X, AXIS, 0, HALF, 1)
SECOND = call(aten.slice.Tensor, X, AXIS, HALF, Lit("dim"), 1)


def _table_moves(graph: Graph, node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """(table, moves in execution order) if `node` is the table's rows at the positions with moved elements; else
    None."""
    moves: list[fx.Node] = []
    while traits_of(node.target).strided:
        moves.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]
    if node.target is not EMBEDDING or node.args[0] is not graph.input("positions"):
        return None
    table: fx.Node = node.args[1]  # type: ignore[assignment]
    return (table, moves) if table.op == "get_attr" else None


class _RopeRule(Rule):
    style: ClassVar[str] = "half"
    doubled: ClassVar[bool] = False

    def __init__(self) -> None:
        self._tables: dict[str, tuple[str, Weight]] = {}  # every layer shares the rewritten tables

    def check(self, graph: Graph, root: fx.Node, found: Bindings) -> Fail | None:
        shape = type_of(found["x"]).shape
        width = shape[-1] // 2 if self.doubled else shape[-1]
        tables = [found["cos"], found["sin"]]
        if any(_table_moves(graph, table) is None for table in tables):
            return Fail("cos and sin are not rows of a position table")
        if any(type_of(table).shape[-1] != width for table in tables):
            return Fail("the table's width is not the rotated width")
        if any(size != 1 for table in tables for size in type_of(table).shape[:-1]):
            return Fail("the table differs between heads")
        if len(shape) < 2:
            return Fail("there is no head axis")
        if found.get("axis", len(shape)) != len(shape) or found.get("half", shape[-1] // 2) * 2 != shape[-1]:
            return Fail("the halves are not those of the last axis")
        return None

    def rewrite(self, graph: Graph, root: fx.Node, found: Bindings) -> fx.Node:
        x = found["x"]
        *lead, dim = type_of(x).shape
        heads = graph.call(aten.view.default, x, [-1, prod(lead), dim], origin=root)
        cos, sin = (self._row(graph, found[name], dim) for name in ("cos", "sin"))
        turned = graph.call(ROPE, heads, cos, sin, self.style, origin=root)
        return graph.call(aten.view.default, turned, [-1, *type_of(root).shape], origin=root)

    def _row(self, graph: Graph, node: fx.Node, dim: int) -> fx.Node:
        """The gather from a table [positions, dim] that holds the values of `node`."""
        source = _table_moves(graph, node)
        assert source is not None
        table, moves = source
        steps = [(eager(move.target), move.args[1:]) for move in moves]
        double = self.doubled

        def flatten(values: Tensor) -> Tensor:
            for target, args in steps:  # the table has all positions, the graph's value only those of the step's tokens
                values = target(values, *args)
            flat = values.reshape(len(values), -1)
            return torch.cat([flat, flat], dim=-1) if double else flat

        key = f"{table.target} {[(str(move.target), move.args[1:]) for move in moves]}"
        if key not in self._tables:
            self._tables[key] = (f"{table.target}.rope", derive(flatten, graph.weight(table)))
        weight = graph.add_weight(*self._tables[key])
        assert type_of(weight).shape[-1] == dim
        return graph.call(EMBEDDING, graph.input("positions"), weight)


class HalfRope(_RopeRule):
    """The GPT-NeoX form with full-width tables."""

    name = "rope-half"
    pattern = call(
        aten.add.Tensor,
        call(aten.mul.Tensor, X, COS),
        call(aten.mul.Tensor, call(aten.cat.default, [call(aten.neg.default, SECOND), FIRST], AXIS), SIN),
    )


class SplitHalfRope(_RopeRule):
    """The form that rotates the two halves apart, with half-width tables."""

    name = "rope-split-half"
    doubled = True
    pattern = call(
        aten.cat.default,
        [
            call(aten.sub.Tensor, call(aten.mul.Tensor, FIRST, COS), call(aten.mul.Tensor, SECOND, SIN)),
            call(aten.add.Tensor, call(aten.mul.Tensor, SECOND, COS), call(aten.mul.Tensor, FIRST, SIN)),
        ],
        AXIS,
    )


_EVEN = call(aten.slice.Tensor, X, AXIS, 0, Lit("dim"), 2)
_ODD = call(aten.slice.Tensor, X, AXIS, 1, Lit("dim"), 2)
_STACKED = call(
    aten.cat.default, [through_views(call(aten.neg.default, _ODD)), through_views(_EVEN)], Lit("stack_axis")
)


class InterleavedRope(_RopeRule):
    """The GPT-J form: neighbours are pairs."""

    name = "rope-interleaved"
    style = "interleaved"
    pattern = call(aten.add.Tensor, call(aten.mul.Tensor, X, COS), call(aten.mul.Tensor, through_views(_STACKED), SIN))

    def check(self, graph: Graph, root: fx.Node, found: Bindings) -> Fail | None:
        if found["stack_axis"] != found["axis"] + 1:
            return Fail("the pairs are not stacked next to each other")
        return super().check(graph, root, found)


class PartialRope(Rule):
    """cat(rope(x[..., :R]), x[..., R:]) -> rope(x)."""

    name = "rope-partial"
    pattern = call(
        aten.cat.default,
        [
            through_views(
                call(
                    ROPE,
                    through_views(call(aten.slice.Tensor, X, AXIS, 0, Lit("r"), 1)),
                    Var("cos"),
                    Var("sin"),
                    either("half", "interleaved"),
                )
            ),
            call(aten.slice.Tensor, X, AXIS, Lit("r"), Lit("dim"), 1),
        ],
        AXIS,
    )

    def check(self, graph: Graph, root: fx.Node, found: Bindings) -> Fail | None:
        shape = type_of(found["x"]).shape
        if found["axis"] != len(shape) or found["dim"] != shape[-1] or type_of(root).shape != shape:
            return Fail("the parts are not those of the last axis")
        return None

    def rewrite(self, graph: Graph, root: fx.Node, found: Bindings) -> fx.Node:
        *lead, dim = type_of(found["x"]).shape
        rope = root.args[0][0]  # type: ignore[index]
        while rope.target is not ROPE:  # type: ignore[union-attr]
            rope = rope.args[0]  # type: ignore[union-attr]
        heads = graph.call(aten.view.default, found["x"], [-1, prod(lead), dim], origin=root)
        turned = graph.call(ROPE, heads, found["cos"], found["sin"], rope.args[3], origin=root)  # type: ignore[union-attr]
        return graph.call(aten.view.default, turned, [-1, *type_of(root).shape], origin=root)


@dataclass(frozen=True)
class RecognizeRope(Pass):
    """Applies the rules; partial rotation last, as it contains the others."""

    name: ClassVar[str] = "recognize-rope"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.POSITION_TABLES})
    ensures: ClassVar[frozenset[str]] = frozenset({Fact.ROPE})
    breaks: ClassVar[frozenset[str]] = frozenset({Fact.SIMPLE, Fact.UNIQUE})

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        first = apply_rules(graph, [HalfRope(), SplitHalfRope(), InterleavedRope()], ctx)
        second = apply_rules(graph, [PartialRope()], ctx)
        return PassResult(first.modified or second.modified, first.counts + second.counts)
