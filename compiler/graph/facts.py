"""Facts: properties of a graph that passes require and ensure.

A fact with a check is verified on the graph; one without is only a promise about the order of passes. Another package's
passes may name facts of their own, and register their checks in CHECKS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

import torch
from torch import fx

from ..ops import OPS, traits_of
from .graph import Graph
from .tensor_types import LOGIT_ROWS, TensorType, type_of


class Fact(StrEnum):
    """The facts that icc's own passes know."""

    LIVE = "live"  # every call and weight has a reader
    FOLDED = "folded"  # no call has only weights as operands
    UNIQUE = "unique"  # no two equal calls, except calls with a state
    SIMPLE = "simple"  # no view of a view
    POSITION_TABLES = "position-tables"  # values that depend only on positions are rows of a table
    NORMS = "norms"  # norms are ops; has no check
    ROPE = "rope"  # rotary embedding is an op; has no check
    PAGED = "paged"  # attention uses its cache: every op has a kernel, or is fused into one
    LOGIT_ROWS = "logit-rows"  # the output has the rows that the scheduler asks for
    OPTIMIZED = "optimized"  # only ops that code generators know; the verifier's stage of that name


def problem(graph: Graph, fact: str) -> str:
    """Where the graph violates `fact`; "" if the fact is true or has no check."""
    check = CHECKS.get(fact)
    return check(graph) if check is not None else ""


def holding(graph: Graph, facts: Iterable[str]) -> set[str]:
    """Which of `facts` the graph does not contradict."""
    return {fact for fact in facts if not problem(graph, fact)}


def position_values(graph: Graph, positions: fx.Node) -> dict[fx.Node, None]:
    """`positions` and all calls that only it and constants determine, in execution order."""
    found: dict[fx.Node, None] = {positions: None}
    for node in graph.nodes:
        if node.op == "call_function" and not traits_of(node.target).mixes_tokens:
            inputs = [n for n in node.all_input_nodes if n.op != "get_attr"]
            if inputs and all(n in found for n in inputs):
                found[node] = None
    return found


def is_position_row(node: fx.Node, positions: fx.Node) -> bool:
    """Whether the node is a gather of a table's rows at the positions."""
    if node.target is not OPS["embedding"].overload or node.args[0] is not positions:
        return False
    table = node.args[1]
    return isinstance(table, fx.Node) and table.op == "get_attr"


def is_condition(node: fx.Node) -> bool:
    """Whether the node is a condition on its operands: a tensor of booleans."""
    kind = node.meta.get("type")
    return isinstance(kind, TensorType) and kind.dtype == torch.bool


def call_key(node: fx.Node) -> Any:
    """A key that is equal for calls that compute the same."""

    def key(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("get_attr", value.target) if value.op == "get_attr" else value
        if isinstance(value, (list, tuple)):
            return tuple(key(v) for v in value)
        return type(value).__name__, value  # 1 and 1.0 are equal in Python

    return node.target, key(node.args), key(list(node.kwargs.items()))


def folds(node: fx.Node) -> bool:
    """Whether the node is a call whose operands are all weights, so that its result is a weight."""
    inputs = node.all_input_nodes
    if node.op != "call_function" or not inputs or any(n.op != "get_attr" for n in inputs):
        return False
    return isinstance(node.meta["type"], TensorType)


def _calls(graph: Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def _first(nodes: Iterable[fx.Node], what: str) -> str:
    return next((f"{node.name} {what}" for node in nodes), "")


def _live(graph: Graph) -> str:
    return _first((n for n in graph.nodes if n.op in ("call_function", "get_attr") and not n.users), "has no reader")


def _folded(graph: Graph) -> str:
    return _first((n for n in _calls(graph) if folds(n)), "computes with weights alone")


def _unique(graph: Graph) -> str:
    seen: set[Any] = set()
    for node in _calls(graph):
        if not traits_of(node.target).stateful:
            key = call_key(node)
            if key in seen:
                return f"{node.name} computes again what an earlier call does"
            seen.add(key)
    return ""


def _simple(graph: Graph) -> str:
    views = OPS["aten.view"].overload
    twice = (n for n in _calls(graph) if n.target is views and getattr(n.args[0], "target", None) is views)
    return _first(twice, "is a view of a view")


def _position_tables(graph: Graph) -> str:
    positions = graph.input("positions")
    if positions is None:
        return ""
    computed = list(position_values(graph, positions))[1:]
    computed = [n for n in computed if not traits_of(n.target).strided and not is_condition(n)]
    free = (n for n in computed if not is_position_row(n, positions))
    return _first(free, "computes with positions alone")


def _paged(graph: Graph) -> str:
    return _first((n for n in _calls(graph) if traits_of(n.target).abstract), "has no kernel on any back end")


def _logit_rows(graph: Graph) -> str:
    return "" if type_of(graph.output).rows == LOGIT_ROWS else "the output has a row per token"


CHECKS: dict[str, Callable[[Graph], str]] = {
    Fact.LIVE: _live,
    Fact.FOLDED: _folded,
    Fact.UNIQUE: _unique,
    Fact.SIMPLE: _simple,
    Fact.POSITION_TABLES: _position_tables,
    Fact.PAGED: _paged,
    Fact.LOGIT_ROWS: _logit_rows,
}
