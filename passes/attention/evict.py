"""Attention that would read all earlier tokens reads only those that a policy keeps: `--kv-policy`, which is lossy.

paged_attention(..)  ->  paged_attention(.., policy)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from ...compiler.errors import UsageError
from ...compiler.eviction import Eviction
from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import Graph, attention_spec, set_attention_spec
from ...compiler.graph.tensor_types import type_of
from ...compiler.ops import OPS, named_arguments
from ..base import Pass, PassContext, PassResult

PAGED = OPS["paged_attention"].overload
_FULL = "leave --kv-policy out"


@dataclass(frozen=True)
class Evict(Pass):
    """Applies the policy to attention without windows or chunks; other layers and states do not change. UsageError if
    no layer is left."""

    policy: Eviction | None = None
    name: ClassVar[str] = "evict"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.PAGED})
    tolerance: ClassVar[float | None] = None

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        if self.policy is None:
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
            spec = attention_spec(node)
            if spec.policy != self.policy:
                set_attention_spec(node, replace(spec, policy=self.policy))
                changed += 1
        return PassResult(bool(changed), Counter({"evict": changed} if changed else {}))

    def _reason(self, graph: Graph, nodes: list[fx.Node]) -> str:
        """Why these layers cannot have the policy; "" if they can."""
        policy = self.policy
        assert policy is not None
        others = {attention_spec(n).layer for n in graph.nodes if n.target is PAGED and n not in nodes}
        layers = {attention_spec(node).layer for node in nodes}
        if others & layers:
            return "layers with a window read the same cache"
        if any(named_arguments(node)["row_bias"] is not None for node in nodes):
            return "queries add something by distance, which would no longer be that of the positions"
        if policy.chooses:
            if any(named_arguments(node)[name] is not None for node in nodes for name in ("alibi", "bias")):
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
    return attention_spec(node).mask.keeps_all and type_of(node).rows is not None
