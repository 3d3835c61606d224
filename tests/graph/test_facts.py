"""Facts that can be checked in a graph: each check says where a graph contradicts it, and is silent otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from graph_tracing import Value, aten, attention, icc, trace
from icc.compiler.graph.facts import CHECKS, Fact, holding, problem
from icc.compiler.ops import AttentionSpec

Case = Callable[[Value, Value, Value], Value]


def attend(x: Value) -> Value:
    heads = x.view(-1, 2, 4)
    return attention(heads, heads, heads, AttentionSpec(0, 0.5)).view(-1, 8)


# fact -> (a graph that violates it, the message, a graph that satisfies it)
CASES: dict[str, tuple[Case, str, Case]] = {
    Fact.FOLDED: (
        lambda p, x, w: x * (w + 1.0), "add_tensor computes with weights alone", lambda p, x, w: x * w + 1.0,
    ),
    Fact.UNIQUE: (
        lambda p, x, w: aten.exp.default(x) + aten.exp.default(x), "exp_default_1 computes again what an earlier",
        lambda p, x, w: attend(x * 1) + attend(x * 1.0),
    ),
    Fact.SIMPLE: (
        lambda p, x, w: x.view(-1, 2, 4).view(-1, 8) * w, "view_default_1 is a view of a view",
        lambda p, x, w: aten.exp.default(x.view(-1, 2, 4)).view(-1, 8),
    ),
    Fact.POSITION_TABLES: (
        lambda p, x, w: x + aten.cos.default(p.view(-1, 1)), "cos_default computes with positions alone",
        lambda p, x, w: x + icc.embedding.default(p, w).view(-1, 1),
    ),
    Fact.PAGED: (
        lambda p, x, w: attend(x), "attention has no kernel on any back end", lambda p, x, w: x * w,
    ),
}  # fmt: skip


@pytest.mark.parametrize("fact", CASES)
def test_what_shows(fact: str) -> None:
    broken, said, good = CASES[fact]
    found = [trace(fn, positions="", x="f32[T, 8]", w="f32[8]") for fn in (_named(broken), _named(good))]
    assert said in problem(found[0], fact) and holding(found[0], [fact]) == set()
    assert problem(found[1], fact) == "" and holding(found[1], [fact]) == {fact}


def _named(fn: Case) -> Callable[..., Value]:
    return lambda positions, x, w: fn(positions, x, w)


def test_the_rest() -> None:
    graph = trace(lambda x: aten.exp.default(x), x="f32[T, 8]")
    assert problem(graph, Fact.LOGIT_ROWS) == "the output has a row per token"
    dead = trace(lambda x: (aten.exp.default(x), x * 2.0)[1], keep_dead=True, x="f32[T, 8]")
    assert problem(dead, Fact.LIVE) == "exp_default has no reader"
    assert problem(graph, Fact.NORMS) == problem(graph, "acme-fact") == "" and Fact.NORMS not in CHECKS
