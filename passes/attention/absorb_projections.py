"""Keys and values that are products of one small row are not computed: attention reads the row (DeepSeek-AI 2024, MLA).

k[h] = [Wk[h] c, r], v[h] = Wv[h] c, with c and r the same for all heads:
attention(q, k, v) -> Wv[h] attention([Wk[h]^T q[h], r's part of q[h]], [c, r], c)

The cache then holds [c, r] once, and its values are the beginning of its keys. The pass follows each element of keys
and values to its source through ops that only move elements, so that their order and arrangement do not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import Graph
from ...compiler.graph.tensor_types import type_of
from ...compiler.ops import OPS, named_arguments, traits_of
from ...compiler.weights.handles import GatheredRows, QuantizedWeight, Weight, derive, is_quantized
from ..base import Pass, PassContext, PassResult, Refusal

aten = torch.ops.aten
ATTENTION, LINEAR, EXPERT = (OPS[n].overload for n in ("attention", "linear", "expert_linear"))
F16_MAX = torch.finfo(torch.float16).max
SAVES = 3  # least factor by which bytes per token must shrink: arithmetic grows too


@dataclass(frozen=True)
class Origins:
    """For every element of a value the node that computes it, and its number in that node's row; both in the value's
    shape."""

    nodes: tuple[fx.Node, ...]
    node: Tensor  # numbers of `nodes`
    element: Tensor


@dataclass(frozen=True)
class Latent:
    """The sources of keys and values. row: c. keys: the dims of a key that are products; shared: the other dims, with
    their sources. key_rows, value_rows: the row of the linear layer that computes each dim, [H, dims]."""

    row: fx.Node
    layers: tuple[fx.Node, ...]
    keys: list[int]
    shared: list[int]
    shared_from: Origins
    key_rows: Tensor
    value_rows: Tensor


@dataclass(frozen=True)
class AbsorbProjections(Pass):
    """Rewrites every attention whose cache becomes smaller at least by the factor SAVES."""

    name: ClassVar[str] = "absorb-projections"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.POSITION_TABLES})
    breaks: ClassVar[frozenset[str]] = frozenset({Fact.SIMPLE, Fact.UNIQUE})
    tolerance: ClassVar[float | None] = 5e-4  # with codes; else 1e-5

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        counts: Counter[str] = Counter()
        for node in [n for n in graph.nodes if n.target is ATTENTION]:
            found = _recognize(node)
            if isinstance(found, Latent):
                with graph.fx.inserting_before(node):
                    _rewrite(graph, node, found)
                counts["absorbed"] += 1
            elif found:
                ctx.refusals.append(Refusal(self.name, node.name, found))
        graph.sweep()
        return PassResult(bool(counts), counts)


# -- recognizing ------------------------------------------------------------------------------------------------------


def _recognize(node: fx.Node) -> Latent | str:
    """The sources of the keys and values, or the reason to leave them; "" if they are not products of one row at
    all."""
    q, k, v = (type_of(x).shape for x in node.args[:3])  # type: ignore[arg-type]
    values = _origins(node.args[2])  # type: ignore[arg-type]
    row = _common_row(values)
    if row is None or k[0] == 1:
        return ""
    keys = _origins(node.args[1])  # type: ignore[arg-type]
    source, element = keys.node.view(k), keys.element.view(k)
    alike = ((source == source[:1]) & (element == element[:1])).all(0)
    shared, own = ([d for d in range(k[1]) if bool(alike[d]) == wanted] for wanted in (True, False))
    made = {keys.nodes[int(number)] for number in source[:, own].unique()}
    if not own or any(not _is_product(n) or _behind_views(n.args[0]) is not row for n in made):
        return ""
    rank = type_of(row).shape[-1]
    before, after = k[0] * (k[1] + v[1]), rank + len(shared)
    if after * SAVES > before:
        return f"the cache would hold {after} numbers per token instead of {before}: not worth the arithmetic"
    if q[0] != k[0]:
        return "query heads share keys that are products of one row"
    layers = tuple(dict.fromkeys([*made, *(values.nodes[int(n)] for n in values.node.unique())]))
    if any(layer.args[2] is not None for layer in layers):
        return "the products have a bias"
    starts = [0]
    for layer in layers:
        starts.append(starts[-1] + type_of(layer.args[1]).shape[0])  # type: ignore[arg-type]

    def rows(origins: Origins) -> Tensor:
        place = torch.tensor([starts[layers.index(n)] if n in layers else 0 for n in origins.nodes])
        return place[origins.node] + origins.element

    sharing = Origins(keys.nodes, source[0, shared], element[0, shared])
    return Latent(row, layers, own, shared, sharing, rows(keys).view(k)[:, own], rows(values).view(v))


def _origins(node: fx.Node) -> Origins:
    """The origins of a node's elements, followed through ops that only move elements."""
    shape = _one_row(node)
    if node.op == "call_function" and node.target is aten.cat.default:
        parts = [_origins(part) for part in node.args[0]]  # type: ignore[union-attr, arg-type]
        nodes = tuple(dict.fromkeys(n for part in parts for n in part.nodes))
        renumbered = [torch.tensor([nodes.index(n) for n in part.nodes])[part.node] for part in parts]
        shapes = [_one_row(part) for part in node.args[0]]  # type: ignore[union-attr, arg-type]
        joined = [
            torch.cat([value.view(size) for value, size in zip(pieces, shapes, strict=True)], *node.args[1:])  # type: ignore[arg-type]
            for pieces in (renumbered, [part.element for part in parts])
        ]
        return Origins(nodes, *(value.reshape(-1) for value in joined))
    if node.op == "call_function" and traits_of(node.target).moves_only and isinstance(node.args[0], fx.Node):
        inner = _origins(node.args[0])
        source = _one_row(node.args[0])
        index = node.target(torch.arange(prod(source)).view(source), *node.args[1:]).reshape(-1)  # type: ignore[operator]
        return Origins(inner.nodes, inner.node[index], inner.element[index])
    count = prod(shape)
    return Origins((node,), torch.zeros(count, dtype=torch.int64), torch.arange(count))


def _one_row(node: fx.Node) -> tuple[int, ...]:
    """Shape of the value with one row."""
    kind = type_of(node)
    return kind.shape if kind.rows is None else (1, *kind.shape)


def _common_row(origins: Origins) -> fx.Node | None:
    """The one row that a value's elements are all products of."""
    rows: set[Any] = set()
    for number in origins.node.unique():
        node = origins.nodes[int(number)]
        rows.add(_behind_views(node.args[0]) if _is_product(node) else None)
    return rows.pop() if len(rows) == 1 else None


def _is_product(node: fx.Node) -> bool:
    """Whether the node is a linear layer's product of one row per token."""
    if node.target is not LINEAR or node.args[1].op != "get_attr":  # type: ignore[union-attr]
        return False
    kind = type_of(node.args[0])  # type: ignore[arg-type]
    return kind.rows is not None and prod(kind.shape[:-1]) == 1


def _behind_views(node: Any) -> fx.Node:
    while node.target is aten.view.default and type_of(node.args[0]).shape[-1:] == type_of(node).shape[-1:]:
        node = node.args[0]
    return node


# -- rewriting --------------------------------------------------------------------------------------------------------


def _rewrite(graph: Graph, node: fx.Node, latent: Latent) -> None:
    rank, heads = type_of(latent.row).shape[-1], len(latent.value_rows)
    q: Any = node.args[0]
    weights = [graph.weight(layer.args[1]) for layer in latent.layers]  # type: ignore[arg-type]
    name = str(latent.layers[0].args[1].target)  # type: ignore[union-attr]

    def call(target: Any, *args: Any) -> fx.Node:
        return graph.call(target, *args, origin=node)

    def picked(x: fx.Node, axis: int, places: Sequence[int]) -> fx.Node:
        parts = [call(aten.slice.Tensor, x, axis, first, last + 1, 1) for first, last in _runs(places)]
        return parts[0] if len(parts) == 1 else call(aten.cat.default, parts, axis)

    def joined(parts: list[fx.Node]) -> fx.Node:
        return parts[0] if len(parts) == 1 else call(aten.cat.default, parts, 2)

    up = graph.add_weight(f"{name}.keys", _transposed(weights, latent.key_rows))
    own = call(EXPERT, picked(q, 2, latent.keys), up, None, None)
    queries = joined([own, *([picked(q, 2, latent.shared)] if latent.shared else [])])
    key = joined([call(aten.view.default, latent.row, [-1, 1, rank]), *_shared_parts(call, latent.shared_from)])
    value = call(aten.slice.Tensor, key, 2, 0, rank, 1)
    given = named_arguments(node) | {"q": queries, "k": key, "v": value}
    mean = call(ATTENTION, *OPS["attention"].ordered(**given))
    down = graph.add_weight(f"{name}.values", _gathered(weights, latent.value_rows))
    assert type_of(mean).shape == (heads, rank)
    graph.replace(node, call(EXPERT, mean, down, None, None))


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last) of each run of neighbours."""
    cuts = [0, *(i for i, (a, b) in enumerate(pairwise(places), 1) if b != a + 1), len(places)]
    return [(places[a], places[b - 1]) for a, b in pairwise(cuts)]


def _shared_parts(call: Any, origins: Origins) -> list[fx.Node]:
    """The part of keys that all heads share, as [1, dims] for each source node."""
    parts: list[fx.Node] = []
    at, numbers = 0, origins.node.tolist()
    while at < len(numbers):
        end = at
        while end < len(numbers) and numbers[end] == numbers[at]:
            end += 1
        source = origins.nodes[numbers[at]]
        flat = call(aten.view.default, source, [-1, 1, prod(type_of(source).shape)])
        for first, last in _runs(origins.element[at:end].tolist()):
            parts.append(call(aten.slice.Tensor, flat, 2, first, last + 1, 1))
        at = end
    return parts


def _gathered(weights: Sequence[Weight], rows: Tensor) -> Weight:
    """Rows [H, N] of the weights, concatenated; in their stored format if all have the same."""
    if all(isinstance(weight, QuantizedWeight) for weight in weights):
        first = weights[0].storage
        if all(first.merges_with(weight.storage) for weight in weights):
            return GatheredRows(tuple(weights), rows)  # type: ignore[arg-type]
    return derive(lambda *values: torch.cat(values)[rows], *weights)


def _transposed(weights: Sequence[Weight], rows: Tensor) -> Weight:
    """`rows` of the weights, [H, N, K], as their transposes [H, K, N]. No format with codes along K can hold that:
    codes of a few bits become float16, exact if scales are powers of two (MXFP4), else within a relative error of
    2^-11, like keys in a cache."""

    def moved(*values: Tensor) -> Tensor:
        found = torch.cat(values)[rows].mT.contiguous()
        return found.clamp(-F16_MAX, F16_MAX).to(torch.float16) if coded else found

    coded = all(map(is_quantized, weights))
    return derive(moved, *weights)
