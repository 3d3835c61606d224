"""An early exit: the logits that the model's last norm and LM head give after its first layers (self-speculation, Zhang
et al. 2023), as a section of the graph that gives logits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from ...compiler.errors import UsageError
from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import LOGITS, Graph
from ...compiler.ops import traits_of
from ..base import Pass, PassContext, PassResult
from ..layer_ends import LayerEnds, alike

SECTION = "exit"


@dataclass(frozen=True)
class InsertEarlyExit(Pass):
    """Adds an exit after the first `layers` layers. UsageError if the model does not have more layers, or they cannot
    be found."""

    layers: int = 0
    name: ClassVar[str] = "insert-early-exit"
    breaks: ClassVar[frozenset[str]] = frozenset({Fact.UNIQUE})

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        if SECTION in graph.sections or not self.layers:
            return PassResult(False)
        start, end = self._places(graph)
        copies: dict[fx.Node, fx.Node] = {end: start}
        asked = graph.section_nodes()
        tail = [node for node in graph.nodes if node.op == "call_function" and node not in asked]
        with graph.fx.inserting_before(graph.end):
            for node in tail[tail.index(end) + 1 :]:
                args: Any = fx.map_arg(node.args, lambda n: copies.get(n, n))
                copies[node] = graph.call(node.target, *args, origin=node)
        graph.returns(**{f"{SECTION}.{LOGITS}": copies[graph.output]})
        return PassResult(True, Counter({"early-exit": 1}))

    def _places(self, graph: Graph) -> tuple[fx.Node, fx.Node]:
        """The value after the first `layers` layers, and the value after all layers."""
        if any(traits_of(n.target).stateful and not traits_of(n.target).attention for n in graph.nodes):
            raise UsageError("--spec layer-skip: a model with recurrent states cannot take guesses back")
        ends = LayerEnds(graph)
        if not 0 < self.layers < ends.count:
            raise UsageError(f"--spec layer-skip:{self.layers}: the model has {ends.count} layers")
        start, end = ends.behind(self.layers), ends.behind(ends.count)
        if start is None or end is None or not alike(end, start):
            raise UsageError(f"--spec layer-skip:{self.layers}: where the model's layers end does not show")
        return start, end
