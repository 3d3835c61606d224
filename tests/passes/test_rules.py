"""The rule language: what patterns match, and how refusals are reported."""

from __future__ import annotations

from typing import Any

import pytest
from graph_tracing import Value, aten, cat, trace
from icc.compiler.graph.graph import Graph
from icc.passes.base import PassContext, Refusal
from icc.passes.rules import Bindings, Fail, Lit, Rule, Var, apply_rules, call, either, match, through_views
from torch import fx

X, Y, C = Var("x"), Var("y"), Lit("c")


def matches(pattern: Any, fn: Any, **inputs: str) -> list[Bindings]:
    """All bindings of the pattern at the last call."""
    graph = trace(fn, **{"x": "f32[T, 8]", **inputs})
    return list(match(pattern, graph.output, {}))


def test_a_variable_is_one_node() -> None:
    square = call(aten.mul.Tensor, X, X)
    assert matches(square, lambda x: x * x)
    assert not matches(square, lambda x, y: x * y, y="f32[8]")


def test_commutative_calls_match_both_ways() -> None:
    pattern = call(aten.mul.Tensor, call(aten.exp.default, X), Y)
    assert matches(pattern, lambda x, y: aten.exp.default(x) * y, y="f32[8]")
    assert matches(pattern, lambda x, y: y * aten.exp.default(x), y="f32[8]")
    assert not matches(
        call(aten.sub.Tensor, call(aten.exp.default, X), Y), lambda x, y: y - aten.exp.default(x), y="f32[8]"
    )


def test_all_ways_are_found() -> None:
    assert len(matches(call(aten.add.Tensor, X, Y), lambda x, y: x + y, y="f32[8]")) == 2


def test_numbers() -> None:
    assert matches(call(aten.mul.Tensor, X, 2.0), lambda x: x * 2.0)
    assert not matches(call(aten.mul.Tensor, X, 2.0), lambda x: x * 3.0)
    assert matches(call(aten.mul.Tensor, X, C), lambda x: x * 3.0)[0]["c"] == 3.0
    assert not matches(call(aten.mul.Tensor, X, C), lambda x, y: x * y, y="f32[8]")
    twice = call(aten.add.Tensor, call(aten.mul.Tensor, X, C), C)
    assert matches(twice, lambda x: x * 3.0 + 3.0) and not matches(twice, lambda x: x * 3.0 + 4.0)


def test_lists_and_alternatives() -> None:
    joined = call(aten.cat.default, [call(aten.neg.default, X), X], 1)
    assert matches(joined, lambda x: cat([-x, x], 1))
    assert not matches(joined, lambda x: cat([-x, x, x], 1)) and not matches(joined, lambda x: cat([x, -x], 1))
    assert matches(either(call(aten.exp.default, X), call(aten.neg.default, X)), lambda x: -x)


def test_views_are_looked_through() -> None:
    pattern = call(aten.neg.default, through_views(call(aten.exp.default, X)))
    assert matches(pattern, lambda x: -aten.exp.default(x).view(-1, 2, 4).view(-1, 8))
    assert matches(pattern, lambda x: -aten.exp.default(x))
    assert not matches(pattern, lambda x: -(aten.exp.default(x) * 1.0))


class Small(Rule):
    """A rule that drops a product with a small number and refuses others."""

    name = "small"
    pattern = call(aten.mul.Tensor, X, C)

    def check(self, graph: Graph, root: fx.Node, found: Bindings) -> Fail | None:
        return None if found["c"] < 1 else Fail(f"{found['c']} is too large")

    def rewrite(self, graph: Graph, root: fx.Node, found: Bindings) -> fx.Node:
        return found["x"]


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_refusal_names_rule_node_and_reason(factor: float) -> None:
    graph, ctx = trace(lambda x: x * factor, x="f32[T, 8]"), PassContext()
    root = graph.output
    result = apply_rules(graph, [Small()], ctx)
    assert result.modified == (factor < 1) and result.counts == ({"small": 1} if factor < 1 else {})
    assert ctx.refusals == ([] if factor < 1 else [Refusal("small", root.name, "2.0 is too large")])


def test_a_rewrite_is_seen_by_later_nodes() -> None:
    graph = trace(lambda x: (x * 0.5) * 0.25, x="f32[T, 8]")
    assert apply_rules(graph, [Small()], PassContext()).counts == {"small": 2}
    assert graph.output.target is not aten.mul.Tensor


def test_new_nodes_keep_their_module() -> None:
    class Swap(Rule):
        name = "swap"
        pattern = call(aten.exp.default, X)

        def rewrite(self, graph: Graph, root: fx.Node, found: Bindings) -> fx.Node:
            return graph.call(aten.neg.default, found["x"], origin=root)

    def fn(x: Value) -> Value:
        y = aten.exp.default(x)
        y.node.meta["module"] = "model.layers.0"
        return y

    graph = trace(fn, x="f32[T, 8]")
    apply_rules(graph, [Swap()], PassContext())
    assert graph.output.meta["module"] == "model.layers.0"
