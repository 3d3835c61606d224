"""Attention that would read all tokens before it reads what a policy keeps of them: `--kv-policy`, which is lossy.

paged_attention(..)  ->  paged_attention(.., policy)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ...compiler.errors import UsageError
from ...compiler.eviction import read_eviction
from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import Graph, type_of
from ...compiler.ops import OPS
from ..base import Pass, PassContext, PassResult

PAGED = OPS["paged_attention"].overload
_GIVEN, _DEFAULTS = 16, (0, None, "all")  # arguments of paged_attention that are always there, and the others
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
            given = (*node.args, *_DEFAULTS[len(node.args) - _GIVEN :])
            if given[-1] != self.policy:
                node.args = (*given[:-1], self.policy)
                changed += 1
        return PassResult(bool(changed), Counter({"evict": changed} if changed else {}))

    def _reason(self, graph: Graph, nodes: list[fx.Node]) -> str:
        """Why these layers cannot have it; "" if they can."""
        policy = read_eviction(self.policy)
        assert policy is not None
        others = {str(n.args[10]) for n in graph.nodes if n.target is PAGED and n not in nodes}
        layers = {str(node.args[10]) for node in nodes}
        if others & layers:
            return "layers with a window read the same cache"
        if policy.chooses:
            if any(node.args[9] is not None or (len(node.args) > 17 and node.args[17] is not None) for node in nodes):
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


def _reads_all(node: fx.Node) -> bool:
    window, chunk, ahead = node.args[12], node.args[13], node.args[16] if len(node.args) > 16 else 0
    return not (window or chunk or ahead) and type_of(node).rows is not None
