"""The form of adapter slots in a graph. Each of several adapters is an expert: linear(x, W) +
expert_linear(expert_linear(x, A, slot), B, bias, slot), where slot -1 gives zeros. A, B and bias are pools, written at
run time. Layers that read one value share one product with their As.

For an embedding, rows of B are gathered: embedding(t, W) + expert_linear(embedding(slot * tokens + t, B), A, slot). If
the slots have magnitudes (DoRA), y * gain[slot] is added, with y = linear(x, W), see PoolSite.

Ranks divide pools as they divide the weight (S-LoRA): if they divide its rows, also those of B; if its columns, also
those of A. In the second case each rank adds its part of the change to its part of a sum, so the sum over ranks that
follows anyway is the only exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...compiler.adapter_slots import ADAPTER, AdapterSlots
from ...compiler.graph.graph import Graph
from ...compiler.graph.tensor_types import LOGIT_ROWS, TOKENS, type_of
from ...compiler.ops import OPS, traits_of
from ...compiler.weights.handles import SortedColumns, Transposed, Weight
from ...compiler.weights.pool import AdapterPool, PoolCut, PoolSite
from ...compiler.weights.shards import Shard, cut_of, undivided
from ..quantize.fold import COLUMN_FACTORS, ROW_FACTORS
from ..quantize.select import plain_name

aten = torch.ops.aten
EXPERTS, EMBEDDING, SELECT = (OPS[name].overload for name in ("expert_linear", "embedding", "select_rows"))
_EACH, _ROWS, _COLUMNS = range(3)  # axes of the matrices [experts, N, K] of a weight


class Room:
    """Adds adapter slots to a graph, for the layers in `targets`, with the names of their parameters."""

    def __init__(self, graph: Graph, slots: AdapterSlots, targets: Mapping[fx.Node, str]) -> None:
        self._graph, self._slots, self._parameters = graph, slots, targets
        self._pools: dict[str, AdapterPool] = {}
        self._input = graph.declare(ADAPTER)
        self._selected: fx.Node | None = None
        self._columns: dict[fx.Node, fx.Node] = {}

    def of_products(self, members: Sequence[fx.Node]) -> list[PoolSite]:
        """Add slots after products that read one value (and, if they are experts, one routing)."""
        graph, first, rank = self._graph, members[0], self._slots.rank
        x: Any = first.args[0]
        shape = graph.weight(first.args[1]).shape  # type: ignore[arg-type]
        experts = shape[0] if first.target is EXPERTS else 0
        slot = self._column(first)
        sites: list[PoolSite] = []
        changes: list[fx.Node] = []
        behind = first.next if _is_late(first) else first
        with graph.fx.inserting_before(behind):
            index = _expert_index(graph, slot, first, experts) if experts else slot
            if not experts:
                x = self._shaped(x, 1, shape[-1])
            name = "+".join(self._parameters[node] for node in members)
            cut = _kept(_cut_of(graph.weight(first.args[1])), _EACH, _COLUMNS)  # type: ignore[arg-type]
            a = self._matrices(f"{name}.A", max(experts, 1), rank * len(members), shape[-1], cut)
            low = graph.call(EXPERTS, x, a, None, index, origin=first)
            for number, node in enumerate(members):
                own = low
                if len(members) > 1:
                    own = graph.call(aten.slice.Tensor, low, 2, number * rank, (number + 1) * rank, 1, origin=node)
                site, change = self._up(node, own, index, experts)
                sites.append(replace(site, a=str(a.target), row=number * rank))
                changes.append(change)
        gains = [self._gain(node, site, behind) for node, site in zip(members, sites, strict=True)]
        for node, change, gain in zip(members, changes, gains, strict=True):
            self._add(node, change, gain, behind if _is_late(node) else node.next)
        return [s if g is None else replace(s, gain=_source(g)) for s, g in zip(sites, gains, strict=True)]

    def _up(self, node: fx.Node, low: fx.Node, index: fx.Node, experts: int) -> tuple[PoolSite, fx.Node]:
        """The site of one layer, and its product with B, plus the bias."""
        graph, parameter, shape = self._graph, self._parameters[node], type_of(node).shape
        cut = _cut_of(graph.weight(node.args[1]))  # type: ignore[arg-type]
        b = self._matrices(f"{parameter}.B", max(experts, 1), shape[-1], self._slots.rank, _kept(cut, _EACH, _ROWS))
        bias = None if experts else self._vectors(f"{parameter}.bias", shape[-1], cut=_once(cut, shape[-1]))
        change = self._shaped(graph.call(EXPERTS, low, b, bias, index, origin=node), *shape)
        site = self._site(node, experts)
        return replace(site, b=str(b.target), bias="" if bias is None else str(bias.target)), change

    def of_table(self, node: fx.Node) -> PoolSite:
        """Add slots after an embedding."""
        graph, parameter, rank = self._graph, self._parameters[node], self._slots.rank
        ids, result = graph.fixed_input("token_ids"), _of_all_words(graph, node)
        tokens, width = undivided(graph.weight(node.args[1])).shape  # type: ignore[arg-type]
        column = self._column(node)
        with graph.fx.inserting_before(node):
            row = graph.call(aten.add.Tensor, graph.call(aten.mul.Tensor, self._input, tokens), ids)
            b = self._pool(f"{parameter}.B", (self._slots.count * tokens, rank))
            low = self._shaped(graph.call(EMBEDDING, row, b, origin=node), 1, rank)
            a = self._matrices(f"{parameter}.A", 1, width, rank)
            change = graph.call(EXPERTS, low, a, None, column, origin=node)
            change = self._shaped(change, *type_of(node).shape)
        self._add(result, change, None, result.next)
        return replace(self._site(node, 0), a=str(a.target), b=str(b.target), table=True)

    def _site(self, node: fx.Node, experts: int) -> PoolSite:
        """The site of a layer, without its pools."""
        graph, is_table, other = self._graph, node.target is EMBEDDING, _other_reader(self._graph, node)
        tied = "" if other is None else parameter_of(graph, other)
        stored = graph.weight(node.args[1])  # type: ignore[arg-type]
        weight = undivided(stored)
        own = None if is_table or experts else node.args[2]
        few = weight.shape[0] <= self._slots.rank  # as in a scoring head, where a new matrix is a change of that rank
        asked = not experts and (is_table or few or _is_late(node) or self._slots.dora)
        joined = weight is stored or (isinstance(stored, Shard) and not isinstance(weight, (SortedColumns, Transposed)))
        return PoolSite(
            self._parameters[node], tuple(weight.shape), "", "", experts=weight.shape[0] if experts else 0,
            columns=node.meta.get(COLUMN_FACTORS), rows=node.meta.get(ROW_FACTORS), tied=tied,
            base=stored if asked and joined else None, base_cut=cut_of(stored) if asked and joined else None,
            own_bias=None if own is None else undivided(graph.weight(own)),  # type: ignore[arg-type]
        )  # fmt: skip

    def _gain(self, node: fx.Node, site: PoolSite, before: fx.Node) -> fx.Node | None:
        """The magnitude factors minus 1 of each row's adapter, zeros if a row has none; None for experts and the LM
        head, which have no magnitudes."""
        if not self._slots.dora or site.experts or _is_late(node):
            return None
        graph, shape = self._graph, type_of(node).shape
        place = self._place(node)
        with graph.fx.inserting_before(before):
            cut = _kept(_cut_of(graph.weight(node.args[1])), _ROWS)  # type: ignore[arg-type]
            pool = self._vectors(f"{site.parameter}.gain", shape[-1], 1, cut)
            return graph.call(EMBEDDING, graph.call(aten.add.Tensor, place, 1), pool, origin=node)

    def _add(self, node: fx.Node, change: fx.Node, gain: fx.Node | None, before: fx.Node) -> None:
        """Add the change (and gain) of adapters to a layer's result, for all readers of the result."""
        graph, own = self._graph, set[fx.Node]()
        with graph.fx.inserting_before(before):
            if gain is not None:
                factor = self._shaped(gain, *type_of(node).shape)
                more = graph.call(aten.mul.Tensor, node, factor, origin=node)
                change = graph.call(aten.add.Tensor, change, more, origin=node)
                own.add(more)
            both = (change, node) if _is_late(node) else (node, change)
            total = graph.call(aten.add.Tensor, *both, origin=node)
        node.replace_all_uses_with(total, delete_user_cb=lambda user: user not in {total, *own})

    # -- slots and pools ----------------------------------------------------------------------------------------------

    def _place(self, node: fx.Node) -> fx.Node:
        """The adapter slot of each row of a value, per token or per logit row."""
        if type_of(node).rows == TOKENS:
            return self._input
        if self._selected is None:
            with self._graph.fx.inserting_after(self._input):
                self._selected = self._graph.call(SELECT, self._input, self._graph.fixed_input(LOGIT_ROWS))
        return self._selected

    def _column(self, node: fx.Node) -> fx.Node:
        """`_place` as a column [rows, 1], the expert index of a product with experts."""
        place = self._place(node)
        if place not in self._columns:
            with self._graph.fx.inserting_after(place):
                self._columns[place] = self._graph.call(aten.view.default, place, [-1, 1])
        return self._columns[place]

    def _matrices(self, name: str, each: int, n: int, k: int, cut: PoolCut | None = None) -> fx.Node:
        return self._pool(name, (self._slots.count * each, n, k), cut=cut)

    def _vectors(self, name: str, n: int, first: int = 0, cut: PoolCut | None = None) -> fx.Node:
        return self._pool(name, (self._slots.count + first, n), torch.float32, first, cut)

    def _pool(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        first: int = 0,
        cut: PoolCut | None = None,
    ) -> fx.Node:
        """A pool, one for all layers of that name."""
        name = f"adapters.{name}"
        made = AdapterPool(shape, dtype or self._graph.info.dtype, self._slots.count, first, cut)
        return self._graph.add_weight(name, self._pools.setdefault(name, made))

    def _shaped(self, node: fx.Node, *shape: int) -> fx.Node:
        """A value [T, ..] with another shape per token."""
        if type_of(node).shape == shape:
            return node
        return self._graph.call(aten.view.default, node, [-1, *shape], origin=node)


def _of_all_words(graph: Graph, node: fx.Node) -> fx.Node:
    """The result of an embedding; if ranks divide its vocabulary, the sum over ranks."""
    if cut_of(graph.weight(node.args[1])) is not None:  # type: ignore[arg-type]
        while not traits_of(node.target).collective:
            [node] = node.users
    return node


def _is_late(node: fx.Node) -> bool:
    """Whether a layer gives logit rows. The layer is then computed first, directly into its result, and the change of
    adapters is added in place, so that no second buffer as wide as the logits is needed."""
    return type_of(node).rows == LOGIT_ROWS and node.target is not EMBEDDING


def parameter_of(graph: Graph, node: fx.Node) -> str:
    """The checkpoint's name of a layer's weight; for a matrix that an embedding shares with the LM head, the name that
    each of them would have if they did not share it."""
    return plain_name(node.args[1]) if _other_reader(graph, node) is None else f"{node.meta['module']}.weight"  # type: ignore[arg-type]


def _other_reader(graph: Graph, node: fx.Node) -> fx.Node | None:
    """A product with the matrix of an embedding, or an embedding with that of a product; None if the matrix is not
    shared."""
    name, is_table = plain_name(node.args[1]), node.target is EMBEDDING  # type: ignore[arg-type]
    readers = [user for n in graph.nodes if n.op == "get_attr" and plain_name(n) == name for user in n.users]
    others = (one for one in readers if (one.target is EMBEDDING) is not is_table and one.meta.get("module"))
    return next(others, None) if node.meta.get("module") else None


def _cut_of(weight: Weight) -> PoolCut | None:
    """The division of a weight's matrices among ranks; None if every rank has all."""
    found = cut_of(weight)
    return None if found is None else PoolCut(found[0] + 3 - len(weight.shape), found[1])


def _kept(cut: PoolCut | None, *axes: int) -> PoolCut | None:
    """The cut, if it is along one of these axes, which are the pool's; else None."""
    return cut if cut is not None and cut.axis in axes else None


def _once(cut: PoolCut | None, n: int) -> PoolCut | None:
    """The cut of a vector that is added to the result [n] of a product: by W's rows, or only on the first rank if the
    results are summed over ranks."""
    if cut is None or cut.axis != _COLUMNS:
        return _kept(cut, _ROWS)
    return PoolCut(_ROWS, (((0, n),), *(() for _ in cut.cuts[1:])))


def _source(gain: fx.Node) -> str:
    return str(gain.args[1].target)  # type: ignore[union-attr]


def _expert_index(graph: Graph, slot: fx.Node, node: fx.Node, experts: int) -> fx.Node:
    """The index of the matrix of a slot and an expert, -1 if a row has no adapter or a token no expert."""
    routed: Any = node.args[3]
    both = graph.call(aten.add.Tensor, graph.call(aten.mul.Tensor, slot, experts), routed)
    absent = graph.call(aten.lt.Scalar, slot, 0)
    below, above = graph.call(aten.lt.Scalar, routed, 0), graph.call(aten.ge.Scalar, routed, experts)
    none = graph.call(aten.logical_or.default, absent, graph.call(aten.logical_or.default, below, above))
    return graph.call(aten.where.ScalarSelf, none, -1, both)
