"""An early exit: the logits that the model's last norm and LM head give behind its first layers (self-speculation,
Zhang et al. 2023), as a section of the graph that gives logits.

What a layer is shows in the data flow: between two attentions there is a place where one value carries all that
depends on the tokens, and the same place behind the last attention is where the model's tail begins.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from ...compiler.errors import UsageError
from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import LOGITS, Graph, type_of
from ...compiler.ops import traits_of
from ..base import Pass, PassContext, PassResult

SECTION = "exit"


@dataclass(frozen=True)
class InsertEarlyExit(Pass):
    """Exit behind the first `layers` layers. UsageError where the model has not more, or its layers do not show."""

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
        """The value behind the first `layers` layers, and the one behind all of them."""
        order = {node: index for index, node in enumerate(graph.nodes)}
        if any(traits_of(n.target).stateful and not traits_of(n.target).attention for n in graph.nodes):
            raise UsageError("--spec layer-skip: a model with recurrent states cannot take guesses back")
        attentions = [order[node] for node in graph.nodes if traits_of(node.target).stateful]
        if not 0 < self.layers < len(attentions):
            raise UsageError(f"--spec layer-skip:{self.layers}: the model has {len(attentions)} layers")
        cuts = _cuts(graph)
        between = [n for n in cuts if attentions[self.layers - 1] < order[n] < attentions[self.layers]]
        start = between[-1] if between else None
        behind = [n for n in cuts if order[n] > attentions[-1] and start is not None and _alike(n, start)]
        if start is None or not behind:
            raise UsageError(f"--spec layer-skip:{self.layers}: where the model's layers end does not show")
        return start, behind[-1]


def _cuts(graph: Graph) -> list[fx.Node]:
    """Values that alone carry, at their place in the order, what depends on the tokens."""
    tokens = graph.input("token_ids")
    order = {node: index for index, node in enumerate(graph.nodes)}
    carrying: set[fx.Node] = {node for node in [tokens] if node is not None}
    live: dict[fx.Node, int] = {}
    cuts: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "call_function" and any(n in carrying for n in node.all_input_nodes):
            carrying.add(node)
            live = {n: last for n, last in live.items() if last > order[node]}
            live[node] = max((order[user] for user in node.users), default=-1)
            if len(live) == 1:
                cuts.append(node)
    return cuts


def _alike(node: fx.Node, other: fx.Node) -> bool:
    """Whether a node has the type and, but for the layer's number, the module of another: it is the value of another
    layer."""
    names = [re.sub(r"\d+", "#", str(n.meta.get("module") or "")) for n in (node, other)]
    return names[0] == names[1] and type_of(node) == type_of(other)
