"""Attention that would read all tokens before it reads what a policy keeps of them: `--kv-policy`, which is lossy.

paged_attention(..)  ->  paged_attention(.., policy)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ...compiler.errors import UsageError
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
        positions = graph.input("positions")
        outside = [n for n in (positions.users if positions else ()) if n.target is not PAGED]
        if outside:
            where = outside[0].meta.get("module") or "the model"
            raise UsageError(
                f"--kv-policy {self.policy}: positions are used outside of attention over keys that can be re-based "
                f"(in {where!r}): learned positions, latent caches and some rotary embeddings cannot have it",
                _FULL,
            )
        changed = 0
        for node in nodes:
            given = (*node.args, *_DEFAULTS[len(node.args) - _GIVEN :])
            if given[-1] != self.policy:
                node.args = (*given[:-1], self.policy)
                changed += 1
        return PassResult(bool(changed), Counter({"evict": changed} if changed else {}))


def _reads_all(node: fx.Node) -> bool:
    window, chunk, ahead = node.args[12], node.args[13], node.args[16] if len(node.args) > 16 else 0
    return not (window or chunk or ahead) and type_of(node).rows is not None
