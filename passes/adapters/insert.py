"""Room for adapters: y = linear(x, W) becomes y + B (A x), with A and B of the adapter that each row names (Chen et al.
2023, Punica, arXiv:2310.18547; Sheng et al. 2023, S-LoRA, arXiv:2311.03285).

An adapter among several is an expert: linear(x, W) + expert_linear(expert_linear(x, A, slot), B, slot), where slot -1
gives zeros. A and B are pools, written at run time. Layers that read one value share one product with their As.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import fx

from ...compiler.adapter_slots import ADAPTER, AdapterSlots
from ...compiler.errors import UsageError
from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import TOKENS, Graph, type_of
from ...compiler.ops import OPS
from ...compiler.weights.pool import AdapterPool, PoolSite
from ..base import Pass, PassContext, PassResult
from ..quantize.fold import COLUMN_FACTORS, ROW_FACTORS
from ..quantize.select import feeds_topk, lm_heads, plain_name

aten = torch.ops.aten
LINEAR, EXPERTS = OPS["linear"].overload, OPS["expert_linear"].overload


@dataclass(frozen=True)
class InsertAdapters(Pass):
    """Make room for `slots` in the linear layers that it names. UsageError for a pattern that fits none.

    Comes after quantization, so that what that does is the same without adapters, and before linears are merged.
    """

    name: ClassVar[str] = "insert-adapters"
    breaks: ClassVar[frozenset[str]] = frozenset({Fact.UNIQUE})

    slots: AdapterSlots = AdapterSlots(8, 16)

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        if graph.sites:
            return PassResult(False)
        groups: dict[tuple[Any, ...], list[fx.Node]] = defaultdict(list)
        for node in self._targets(graph):
            groups[node.target, node.args[0], node.args[3] if node.target is EXPERTS else None].append(node)
        slot = graph.declare(ADAPTER)
        order = {node: number for number, node in enumerate(graph.nodes)}
        with graph.fx.inserting_after(slot):
            one = graph.call(aten.view.default, slot, [-1, 1])
        known: dict[str, AdapterPool] = {}
        sites: list[PoolSite] = []
        for members in groups.values():
            members.sort(key=lambda node: order[node])
            sites += _insert(graph, members, one, self.slots, known)
        graph.sites = tuple({site.parameter: site for site in sites}.values())
        return PassResult(bool(sites), Counter({"sites": len(sites)}))

    def _targets(self, graph: Graph) -> list[fx.Node]:
        """The products that get room, in order."""
        chosen, used = self.slots.targets, set[str]()
        heads, asked = lm_heads(graph), graph.section_nodes()
        found: list[fx.Node] = []
        names: list[str] = []
        for node in graph.nodes:
            if node in asked or node in heads or not _is_product(node) or feeds_topk(node):
                continue
            module = plain_name(node.args[1]).removesuffix(".weight")  # type: ignore[arg-type]
            names.append(module)
            pattern = self.slots.matching(module)
            if pattern is not None:
                used.add(pattern)
            if pattern is not None or not (chosen or node.target is EXPERTS):
                found.append(node)
        if unused := [pattern for pattern in chosen if pattern not in used]:
            hint = f"names look like {names[0]}" if names else "the model has no linear layers that can change so"
            raise UsageError(f"--adapters: {unused[0]!r} is no linear layer that can have adapters", hint)
        return found


def _is_product(node: fx.Node) -> bool:
    """Whether it is a product, per token, of one vector, or of routed ones, with weights of the model."""
    if node.target not in (LINEAR, EXPERTS):
        return False
    weight: Any = node.args[1]
    x: Any = node.args[0]
    if weight.op != "get_attr" or type_of(node).rows != TOKENS:
        return False
    return node.args[3] is not None if node.target is EXPERTS else prod(type_of(x).shape[:-1]) == 1


def _insert(
    graph: Graph, members: Sequence[fx.Node], slot: fx.Node, slots: AdapterSlots, known: dict[str, AdapterPool]
) -> list[PoolSite]:
    """Room behind products that read one value (and, of experts, one routing)."""
    first, rank = members[0], slots.rank
    x: Any = first.args[0]
    weight = graph.weight(first.args[1])  # type: ignore[arg-type]
    experts = weight.shape[0] if first.target is EXPERTS else 0
    parameters = [plain_name(node.args[1]) for node in members]  # type: ignore[arg-type]

    def pool(name: str, n: int, k: int) -> AdapterPool:
        shape = (slots.count * max(experts, 1), n, k)
        return known.setdefault(name, AdapterPool(shape, graph.info.dtype))

    sites: list[PoolSite] = []
    name = f"adapters.{'+'.join(parameters)}.A"
    with graph.fx.inserting_before(first):
        index = _expert_index(graph, slot, first, experts) if experts else slot
        if not experts:
            x = _shaped(graph, x, 1, weight.shape[-1])
        a = graph.add_weight(name, pool(name, rank * len(members), weight.shape[-1]))
        low = graph.call(EXPERTS, x, a, None, index, origin=first)
        changes: list[fx.Node] = []
        for number, (node, parameter) in enumerate(zip(members, parameters, strict=True)):
            own = low
            if len(members) > 1:
                own = graph.call(aten.slice.Tensor, low, 2, number * rank, (number + 1) * rank, 1, origin=node)
            shape = type_of(node).shape
            n = shape[-1]
            up = f"adapters.{parameter}.B"
            b = graph.add_weight(up, pool(up, n, rank))
            change = graph.call(EXPERTS, own, b, None, index, origin=node)
            changes.append(_shaped(graph, change, *shape))
            factors = node.meta.get(COLUMN_FACTORS), node.meta.get(ROW_FACTORS)
            sites.append(PoolSite(parameter, str(a.target), str(b.target), number * rank, experts, *factors))
    for node, change in zip(members, changes, strict=True):
        with graph.fx.inserting_after(node):
            total = graph.call(aten.add.Tensor, node, change, origin=node)
        node.replace_all_uses_with(total, delete_user_cb=lambda user, own=total: user is not own)
    return sites


def _shaped(graph: Graph, node: fx.Node, *shape: int) -> fx.Node:
    """A value [T, ..] with another shape behind the tokens."""
    if type_of(node).shape == shape:
        return node
    return graph.call(aten.view.default, node, [-1, *shape], origin=node)


def _expert_index(graph: Graph, slot: fx.Node, node: fx.Node, experts: int) -> fx.Node:
    """The number of the matrix of a slot and an expert, -1 where a row has no adapter or a token no expert."""
    routed: Any = node.args[3]
    both = graph.call(aten.add.Tensor, graph.call(aten.mul.Tensor, slot, experts), routed)
    absent = graph.call(aten.lt.Scalar, slot, 0)
    below, above = graph.call(aten.lt.Scalar, routed, 0), graph.call(aten.ge.Scalar, routed, experts)
    none = graph.call(aten.logical_or.default, absent, graph.call(aten.logical_or.default, below, above))
    return graph.call(aten.where.ScalarSelf, none, -1, both)
