"""Common subexpression elimination: the same call on the same operands is made once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from ...compiler.graph.facts import Fact, call_key
from ...compiler.graph.graph import Graph
from ...compiler.ops import traits_of
from ..base import Pass, PassContext, PassResult


@dataclass(frozen=True)
class EliminateCommon(Pass):
    """Later duplicates use the first. Stateful calls are left alone: each attention owns a KV cache."""

    name: ClassVar[str] = "eliminate-common"
    ensures: ClassVar[frozenset[str]] = frozenset({Fact.UNIQUE})
    tolerance: ClassVar[float | None] = 0.0

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        seen: dict[Any, fx.Node] = {}
        counts: Counter[str] = Counter()
        for node in list(graph.nodes):
            if node.op == "get_attr":
                key: Any = ("get_attr", node.target)
            elif node.op == "call_function" and not traits_of(node.target).stateful:
                key = call_key(node)
            else:
                continue
            first = seen.setdefault(key, node)
            if first is not node:
                graph.replace(node, first)
                counts["merged"] += 1
        return PassResult(bool(counts), counts)
