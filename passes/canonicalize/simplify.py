"""Remove operations that do nothing, and write equal things in one way.

view(view(x)) -> view(x); view to the same shape -> x; x * 1, x + 0, x / 1 -> x; x ** 2 -> x * x; x / c -> x * (1 / c)
where exact; cat([x]) -> x; slice of everything -> x; expand to the same shape -> x; slices of slices -> one slice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import Graph
from ...compiler.graph.tensor_types import type_of
from ..base import Pass, PassContext, PassResult
from ..rules import Bindings, Fail, Lit, Rule, Var, apply_rules, call

aten = torch.ops.aten
X = Var("x")


class ViewOfView(Rule):
    """view(view(x)) -> view(x)."""

    name = "view-of-view"
    pattern = call(aten.view.default, call(aten.view.default, X))

    def rewrite(self, graph: Graph, root: fx.Node, found: Bindings) -> fx.Node:
        return graph.call(aten.view.default, found["x"], list(type_of(root).full_shape), origin=root)


class SameType(Rule):
    """A view, expand, slice, cat or conversion that gives its operand back."""

    name = "no-op"
    pattern = X

    def check(self, graph: Graph, root: fx.Node, found: Bindings) -> Fail | None:
        shaped = (aten.view.default, aten.expand.default, aten.slice.Tensor, aten.repeat.default)
        source = root.args[0] if root.args else None
        if root.target is aten.cat.default and len(root.args[0]) == 1:  # type: ignore[arg-type]
            source = root.args[0][0]  # type: ignore[index]
        elif root.target is aten.slice.Tensor and len(root.args) > 4 and root.args[4] != 1:
            return Fail("")
        elif root.target not in (*shaped, torch.ops.prims.convert_element_type.default):
            return Fail("")
        same = isinstance(source, fx.Node) and source.meta["type"] == root.meta["type"]
        return None if same else Fail("")

    def rewrite(self, graph: Graph, root: fx.Node, found: Bindings) -> fx.Node:
        source = root.args[0][0] if root.target is aten.cat.default else root.args[0]  # type: ignore[index]
        return source  # type: ignore[return-value]


class Neutral(Rule):
    """x * 1, x / 1, x + 0, x - 0 -> x, if the type does not change."""

    name = "neutral-element"
    pattern = Var("root")

    def check(self, graph: Graph, root: fx.Node, found: Bindings) -> Fail | None:
        neutral: dict[Any, int] = {aten.mul.Tensor: 1, aten.div.Tensor: 1, aten.add.Tensor: 0, aten.sub.Tensor: 0}
        if root.target not in neutral or len(root.args) != 2:
            return Fail("")
        source, number = root.args
        if isinstance(source, fx.Node) and not isinstance(number, fx.Node) and number == neutral[root.target]:
            return None if source.meta["type"] == root.meta["type"] else Fail("")
        return Fail("")

    def rewrite(self, graph: Graph, root: fx.Node, found: Bindings) -> fx.Node:
        return root.args[0]  # type: ignore[return-value]


class Square(Rule):
    """x ** 2 -> x * x."""

    name = "square"
    pattern = call(aten.pow.Tensor_Scalar, X, 2)

    def rewrite(self, graph: Graph, root: fx.Node, found: Bindings) -> fx.Node:
        return graph.call(aten.mul.Tensor, found["x"], found["x"], origin=root)


class DivideByPowerOfTwo(Rule):
    """x / c -> x * (1 / c) if 1 / c is exact."""

    name = "divide-by-power-of-two"
    pattern = call(aten.div.Tensor, X, Lit("c"))

    def check(self, graph: Graph, root: fx.Node, found: Bindings) -> Fail | None:
        exact = found["c"] and math.frexp(abs(found["c"]))[0] == 0.5
        return None if exact and type_of(found["x"]).dtype.is_floating_point else Fail("")

    def rewrite(self, graph: Graph, root: fx.Node, found: Bindings) -> fx.Node:
        return graph.call(aten.mul.Tensor, found["x"], 1.0 / found["c"], origin=root)


class SliceOfSlice(Rule):
    """slice(slice(x)) along one axis with step 1 -> slice(x)."""

    name = "slice-of-slice"
    pattern = call(aten.slice.Tensor, call(aten.slice.Tensor, X, Lit("axis"), Lit("a"), Lit("b"), 1), Lit("axis"))

    def rewrite(self, graph: Graph, root: fx.Node, found: Bindings) -> fx.Node:
        _, axis, start, end, step = root.args
        first = found["a"]
        return graph.call(aten.slice.Tensor, found["x"], axis, first + start, first + end, step, origin=root)  # type: ignore[operator]


@dataclass(frozen=True)
class Simplify(Pass):
    """Apply the rules above until none fits. Slices of slices are left until rotary embedding has been recognized."""

    merge_slices: bool = False
    name: ClassVar[str] = "simplify"
    ensures: ClassVar[frozenset[str]] = frozenset({Fact.SIMPLE})
    breaks: ClassVar[frozenset[str]] = frozenset({Fact.UNIQUE})
    tolerance: ClassVar[float | None] = 0.0

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        rules: list[Rule] = [ViewOfView(), SameType(), Neutral(), Square(), DivideByPowerOfTwo()]
        rules += [SliceOfSlice()] if self.merge_slices else []
        total = PassResult(False)
        while True:
            result = apply_rules(graph, rules, ctx)
            graph.sweep()
            if not result.modified:
                return total
            total.modified = True
            total.counts += result.counts
