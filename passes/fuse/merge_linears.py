"""Linear layers that read the same input become one product: QKV, gate and up.

linear(x, A), linear(x, B) -> slices of linear(x, concat(A, B)). Weights must be stored alike. Terms that are added to
each result, as adapters do, are concatenated and added to the merged product, which can fuse the addition:
linear(x, A) + a, linear(x, B) + b -> slices of linear(x, concat(A, B)) + concat(a, b).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

import torch
from torch import fx

from ...compiler.graph.graph import Graph
from ...compiler.graph.tensor_types import type_of
from ...compiler.ops import OPS, traits_of
from ...compiler.weights.formats.base import StorageFormat
from ...compiler.weights.handles import Constant, RowConcat, Weight, derive
from ..base import Pass, PassContext, PassResult, Refusal

aten = torch.ops.aten
LINEAR = OPS["linear"].overload


@dataclass(frozen=True)
class MergeLinears(Pass):
    """Merges groups of two or more; an absent bias counts as zeros if another layer has one."""

    name: ClassVar[str] = "merge-linears"

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        groups: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            if node.target is LINEAR and node.args[1].op == "get_attr":  # type: ignore[union-attr]
                groups[node.args[0]].append(node)  # type: ignore[index]
        counts: Counter[str] = Counter()
        for members in groups.values():
            by_storage = _stored_alike(graph, members)
            if len(by_storage) > 1:
                names = sorted(_storage(graph, alike[0]).name for alike in by_storage)
                ctx.refusals.append(Refusal(self.name, members[0].name, f"stored differently: {names}"))
            for alike in by_storage:
                if len(alike) > 1:
                    _merge(graph, alike)
                    counts["merged"] += len(alike)
        return PassResult(bool(counts), counts)


def _storage(graph: Graph, node: fx.Node) -> StorageFormat:
    return graph.weight(node.args[1]).storage  # type: ignore[arg-type]


def _stored_alike(graph: Graph, members: list[fx.Node]) -> list[list[fx.Node]]:
    """Groups of linears whose weights can be stored as one, in the order of their first members."""
    found: list[list[fx.Node]] = []
    for node in members:
        here = _storage(graph, node)
        alike = next((group for group in found if _storage(graph, group[0]).merges_with(here)), None)
        if alike is None:
            found.append([node])
        else:
            alike.append(node)
    return found


def _merge(graph: Graph, nodes: list[fx.Node]) -> None:
    weights = [graph.weight(n.args[1]) for n in nodes]  # type: ignore[arg-type]
    name = "+".join(str(n.args[1].target) for n in nodes)  # type: ignore[union-attr]
    with graph.fx.inserting_before(nodes[0]):
        weight = graph.add_weight(name, RowConcat(tuple(weights)))
        bias = _merged_bias(graph, nodes, weights, name)
        whole = graph.call(LINEAR, nodes[0].args[0], weight, bias, origin=nodes[0])
        axis, start = type_of(whole).rank - 1, 0
        totals = _totals(graph, nodes)
        if totals:
            added = graph.call(aten.cat.default, [total.args[1] for total in totals], axis, origin=nodes[0])
            whole = graph.call(aten.add.Tensor, whole, added, origin=nodes[0])
        for node, part in zip(totals or nodes, weights, strict=True):
            end = start + part.shape[0]
            graph.replace(node, graph.call(aten.slice.Tensor, whole, axis, start, end, 1, origin=node))
            start = end


def _totals(graph: Graph, nodes: list[fx.Node]) -> list[fx.Node]:
    """The additions that are the only reader of each of `nodes`; empty if one has none, or if elementwise ops follow,
    which can fuse with the separate additions."""
    totals = [next(iter(node.users)) for node in nodes if len(node.users) == 1]
    if len(totals) < len(nodes):
        return []
    for node, total in zip(nodes, totals, strict=True):
        if total.target is not aten.add.Tensor or total.args[0] is not node:
            return []
        added = total.args[1]
        if not isinstance(added, fx.Node) or type_of(added) != type_of(node):
            return []
    before = set(takewhile(lambda node: node is not nodes[0], graph.nodes))
    further = [user for total in totals for user in total.users]
    fused = all(traits_of(user.target).elementwise for user in further)
    return [] if fused or any(total.args[1] not in before for total in totals) else totals


def _merged_bias(graph: Graph, nodes: list[fx.Node], weights: list[Weight], name: str) -> fx.Node | None:
    if all(n.args[2] is None for n in nodes):
        return None
    found = [None if n.args[2] is None else graph.weight(n.args[2]) for n in nodes]  # type: ignore[arg-type]
    dtypes = {bias.dtype for bias in found if bias is not None}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    parts: list[Weight] = []
    for bias, weight in zip(found, weights, strict=True):
        if bias is None:
            parts.append(Constant(torch.zeros(weight.shape[0], dtype=dtype)))
        else:
            parts.append(bias if bias.dtype == dtype else derive(lambda value: value.to(torch.float32), bias))
    return graph.add_weight(f"{name}.bias", RowConcat(tuple(parts)))
