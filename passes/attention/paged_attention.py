"""Attention becomes attention over the paged KV cache, with rotary embedding and the KV write fused into it.

attention(rope(q, cos[p], sin[p]), rope(k, cos[p], sin[p]), v) -> paged_attention(q, k, v, p, cos, sin, cos, sin)

Layers that read the same keys and values get one cache (cross-layer sharing: Brandon et al. 2024; Gemma 3n).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import Graph, attention_spec, set_layer
from ...compiler.graph.tensor_types import type_of
from ...compiler.ops import OPS, named_arguments
from ..base import Pass, PassContext, PassResult, Refusal

aten = torch.ops.aten
ATTENTION, PAGED, ROPE, EMBEDDING = (OPS[n].overload for n in ("attention", "paged_attention", "rope", "embedding"))
Tables = tuple[fx.Node, fx.Node, str]


@dataclass(frozen=True)
class PagedAttention(Pass):
    """Replaces every attention node; rotary embedding that cannot be fused stays before it."""

    name: ClassVar[str] = "paged-attention"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.POSITION_TABLES, Fact.ROPE})
    ensures: ClassVar[frozenset[str]] = frozenset({Fact.PAGED})

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        counts: Counter[str] = Counter()
        layers: dict[tuple[Any, ...], Any] = {}  # the keys and values of a cache -> its number
        for node in [n for n in graph.nodes if n.target is ATTENTION]:
            with graph.fx.inserting_before(node):
                new, fused = _rewrite(graph, node)
            counts["paged-attention"] += 1
            given, spec = named_arguments(new), attention_spec(new)
            cached = [given[name] for name in ("k", "v", "k_cos", "k_sin")]
            number = layers.setdefault((*cached, spec.rope if given["k_cos"] is not None else None), spec.layer)
            if number != spec.layer:
                set_layer(new, number)
                counts["shared-cache"] += 1
            if fused:
                counts["fused-rope"] += fused
            elif _has_rope(node):
                reason = "q and k are rotated in ways that one kernel cannot do"
                ctx.refusals.append(Refusal(self.name, node.name, reason))
        return PassResult(bool(counts), counts)


def _rewrite(graph: Graph, node: fx.Node) -> tuple[fx.Node, int]:
    """The new node, and how many rotations were fused into it."""
    given = named_arguments(node)
    q, k = given["q"], given["k"]
    positions = graph.input("positions")
    assert positions is not None and isinstance(q, fx.Node) and isinstance(k, fx.Node)
    q_in, q_tables = _unrope(q, positions)
    k_in, k_tables = _unrope(k, positions)
    if q_tables and k_tables and q_tables[2] != k_tables[2]:
        q_in, q_tables, k_in, k_tables = q, None, k, None
    style = (q_tables or k_tables or (None, None, "half"))[2]
    q_cos, q_sin, k_cos, k_sin = (t for pair in (q_tables, k_tables) for t in (pair[:2] if pair else (None, None)))
    named = given | {"q": q_in, "k": k_in, "positions": positions, "spec": replace(given["spec"], rope=style)}
    tables = {"q_cos": q_cos, "q_sin": q_sin, "k_cos": k_cos, "k_sin": k_sin}
    new = graph.call(PAGED, *OPS["paged_attention"].ordered(**named, **tables), origin=node)
    graph.replace(node, new)
    return new, int(bool(q_tables)) + int(bool(k_tables))


def _unrope(x: fx.Node, positions: fx.Node) -> tuple[fx.Node, Tables | None]:
    """(rope's input, its tables) if x, seen through views, is a rope by rows of tables at `positions`; else (x,
    None)."""
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
