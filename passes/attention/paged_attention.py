"""Attention becomes attention over the paged KV cache, with rotary embedding and the KV write fused into it.

attention(rope(q, cos[p], sin[p]), rope(k, cos[p], sin[p]), v) -> paged_attention(q, k, v, p, cos, sin, cos, sin)

Layers that read the same keys and values get one cache (cross-layer sharing: Brandon et al. 2024; Gemma 3n).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import Graph, type_of
from ...compiler.ops import OPS
from ..base import Pass, PassContext, PassResult, Refusal

aten = torch.ops.aten
ATTENTION, PAGED, ROPE, EMBEDDING = (OPS[n].overload for n in ("attention", "paged_attention", "rope", "embedding"))
Tables = tuple[fx.Node, fx.Node, str]


@dataclass(frozen=True)
class PagedAttention(Pass):
    """Every attention node is replaced; rotary embedding that cannot be fused stays in front of it."""

    name: ClassVar[str] = "paged-attention"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.POSITION_TABLES, Fact.ROPE})
    ensures: ClassVar[frozenset[str]] = frozenset({Fact.PAGED})

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        counts: Counter[str] = Counter()
        layers: dict[tuple[Any, ...], Any] = {}  # what a cache holds -> its number
        for node in [n for n in graph.nodes if n.target is ATTENTION]:
            with graph.fx.inserting_before(node):
                new, fused = _rewrite(graph, node)
            counts["paged-attention"] += 1
            k, v, k_cos, k_sin, own, style = (new.args[i] for i in (1, 2, 6, 7, 10, 15))
            number = layers.setdefault((k, v, k_cos, k_sin, style if k_cos is not None else None), own)
            if number != own:
                new.args = (*new.args[:10], number, *new.args[11:])
                counts["shared-cache"] += 1
            if fused:
                counts["fused-rope"] += fused
            elif _has_rope(node):
                reason = "q and k are rotated in ways that one kernel cannot do"
                ctx.refusals.append(Refusal(self.name, node.name, reason))
        return PassResult(bool(counts), counts)


def _rewrite(graph: Graph, node: fx.Node) -> tuple[fx.Node, int]:
    """The new node, and how many rotations it takes in."""
    q, k, v, sinks, alibi, layer, scale, window, chunk, softcap, *sight = node.args
    positions = graph.input("positions")
    assert positions is not None and isinstance(q, fx.Node) and isinstance(k, fx.Node)
    q_in, q_tables = _unrope(q, positions)
    k_in, k_tables = _unrope(k, positions)
    if q_tables and k_tables and q_tables[2] != k_tables[2]:
        q_in, q_tables, k_in, k_tables = q, None, k, None
    style = (q_tables or k_tables or (None, None, "half"))[2]
    tables = [t for pair in (q_tables, k_tables) for t in (pair[:2] if pair else (None, None))]
    new = graph.call(
        PAGED, q_in, k_in, v, positions, *tables, sinks, alibi, layer, scale, window, chunk, softcap, style, *sight,
        origin=node,
    )  # fmt: skip
    graph.replace(node, new)
    return new, int(bool(q_tables)) + int(bool(k_tables))


def _unrope(x: fx.Node, positions: fx.Node) -> tuple[fx.Node, Tables | None]:
    """(rope's input, its tables) where x is a rope by rows of tables at `positions`, seen through views."""
    source: Any = x
    while source.target is aten.view.default and type_of(source.args[0]).shape[-1] == type_of(x).shape[-1]:  # type: ignore[arg-type]
        source = source.args[0]  # type: ignore[assignment]
    if source.target is not ROPE or type_of(source).shape != type_of(x).shape:
        return x, None
    inner, cos, sin, style = source.args
    rows = [t for t in (cos, sin) if t.target is EMBEDDING and t.args[0] is positions]  # type: ignore[union-attr]
    if len(rows) < 2 or any(t.args[1].op != "get_attr" or len(type_of(t.args[1]).shape) != 2 for t in rows):  # type: ignore[union-attr]
        return x, None
    return inner, (rows[0].args[1], rows[1].args[1], str(style))  # type: ignore[return-value]


def _has_rope(node: fx.Node) -> bool:
    return any(n.target is ROPE for arg in node.args[:2] for n in (arg, *arg.all_input_nodes))  # type: ignore[union-attr]
