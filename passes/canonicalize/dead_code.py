"""Remove calls whose results nobody uses, and weights that nobody reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import Graph
from ..base import Pass, PassContext, PassResult


@dataclass(frozen=True)
class DeadCode(Pass):
    """Removes nodes without users, from the end to the start."""

    name: ClassVar[str] = "dead-code"
    ensures: ClassVar[frozenset[str]] = frozenset({Fact.LIVE})
    tolerance: ClassVar[float | None] = 0.0

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        removed = graph.sweep()
        return PassResult(removed > 0, Counter({"removed": removed} if removed else {}))
