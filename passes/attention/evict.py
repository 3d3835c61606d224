"""Attention that would read all tokens before it reads what a policy keeps of them: `--kv-policy`, which is lossy.

paged_attention(..)  ->  paged_attention(.., policy)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from ...compiler.errors import UsageError
from ...compiler.eviction import read_eviction
from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import Graph, type_of
from ...compiler.ops import OPS
from ..base import Pass, PassContext, PassResult

PAGED = OPS["paged_attention"].overload
_FULL = "leave --kv-policy out"


@dataclass(frozen=True)
class Evict(Pass):
    """Layers that have a window or chunks stay as they are, and so do states; UsageError if nothing is left."""

    policy: str = "all"
    name: ClassVar[str] = "evict"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.PAGED})
    tolerance: ClassVar[float | None] = None

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        if self.policy == "all":
            return PassResult(False, Counter())
        graph.sweep()
        nodes = [n for n in graph.nodes if n.target is PAGED and _reads_all(n)]
        if not nodes:
            raise UsageError(
                f"--kv-policy {self.policy}: no layer of the model keeps all tokens, so there is nothing to give up",
                _FULL,
            )
        reason = self._reason(graph, nodes)
        if reason:
            raise UsageError(f"--kv-policy {self.policy}: {reason}", _FULL)
        changed = 0
        for node in nodes:
            given = _arguments(node)
            if given["policy"] != self.policy:
                node.args = tuple({**given, "policy": self.policy}.values())
                changed += 1
        return PassResult(bool(changed), Counter({"evict": changed} if changed else {}))

    def _reason(self, graph: Graph, nodes: list[fx.Node]) -> str:
        """Why these layers cannot have it; "" if they can."""
        policy = read_eviction(self.policy)
        assert policy is not None
        others = {_arguments(n)["layer"] for n in graph.nodes if n.target is PAGED and n not in nodes}
        layers = {_arguments(node)["layer"] for node in nodes}
        if others & layers:
            return "layers with a window read the same cache"
        if any(_arguments(node)["row_bias"] is not None for node in nodes):
            return "queries add something by distance, which would no longer be that of the positions"
        if policy.chooses:
            if any(_arguments(node)[name] is not None for node in nodes for name in ("alibi", "bias")):
                return "attention adds something by distance, and what was chosen does not tell its positions"
            if len(layers) < len(nodes):
                return "several layers read the same cache, and would choose differently"
            return ""
        positions = graph.input("positions")
        outside = [n for n in (positions.users if positions else ()) if n.target is not PAGED]
        if not outside:
            return ""
        where = outside[0].meta.get("module") or "the model"
        return (
            f"positions are used outside of attention over keys that can be re-based (in {where!r}): learned "
            "positions, latent caches and some rotary embeddings cannot have it"
        )


def _arguments(node: fx.Node) -> dict[str, Any]:
    """What a paged_attention is given, defaults included, by name and in order."""
    schema = PAGED._schema.arguments
    values = (*node.args, *(argument.default_value for argument in schema[len(node.args) :]))
    return {argument.name: value for argument, value in zip(schema, values, strict=True)}


def _reads_all(node: fx.Node) -> bool:
    given = _arguments(node)
    return not (given["window"] or given["chunk"] or given["ahead"]) and type_of(node).rows is not None
