"""Adds adapter slots: y = linear(x, W) becomes y + B (A x), with A and B of the adapter that each row names (Chen et
al. 2023, Punica, arXiv:2310.18547; Sheng et al. 2023, S-LoRA, arXiv:2311.03285). See room.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from torch import fx

from ...compiler.adapter_slots import AdapterSlots
from ...compiler.errors import UsageError
from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import Graph
from ...compiler.graph.tensor_types import LOGIT_ROWS, TOKENS, type_of
from ...compiler.ops import OPS
from ...compiler.weights.pool import PoolSite
from ...compiler.weights.shards import cut_of
from ..base import Pass, PassContext, PassResult
from ..quantize.select import feeds_topk, lm_heads
from .room import Room, parameter_of

LINEAR, EXPERTS, EMBEDDING = (OPS[name].overload for name in ("linear", "expert_linear", "embedding"))


@dataclass(frozen=True)
class InsertAdapters(Pass):
    """Add `slots` to the layers that its patterns match. UsageError for a pattern that matches no layer.

    The pass runs after quantization, so that adapters do not change its result; after logit rows are selected, so that
    the LM head's slots are for these rows; and before linears are merged.
    """

    name: ClassVar[str] = "insert-adapters"
    breaks: ClassVar[frozenset[str]] = frozenset({Fact.UNIQUE})

    slots: AdapterSlots = AdapterSlots(8, 16)

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        if graph.sites:
            return PassResult(False)
        groups: dict[tuple[Any, ...], list[fx.Node]] = defaultdict(list)
        targets = self._targets(graph)
        for node in targets:
            alone = node if type_of(node).rows == LOGIT_ROWS else None
            groups[node.target, node.args[0], node.args[3] if node.target is EXPERTS else None, alone].append(node)
        order = {node: number for number, node in enumerate(graph.nodes)}
        room = Room(graph, self.slots, targets)
        sites: list[PoolSite] = []
        for members in groups.values():
            members.sort(key=lambda node: order[node])
            first = members[0]
            sites += [room.of_table(first)] if first.target is EMBEDDING else room.of_products(members)
        graph.sites = tuple({site.parameter: site for site in sites}.values())
        return PassResult(bool(sites), Counter({"sites": len(sites)}))

    def _targets(self, graph: Graph) -> dict[fx.Node, str]:
        """The layers that get slots, in order, with the checkpoint's names of their parameters."""
        used = set[str]()
        heads, asked = lm_heads(graph), graph.section_nodes()
        found: dict[fx.Node, str] = {}
        names: list[str] = []
        for node in graph.nodes:
            is_table = _is_table(graph, node)
            if node in asked or not (is_table or _is_product(node)) or (not is_table and feeds_topk(node)):
                continue
            parameter = parameter_of(graph, node)
            module = parameter.removesuffix(".weight")
            names.append(module)
            usual = not is_table and node not in heads and node.target is not EXPERTS
            pattern = self.slots.matching(module, usual)
            if pattern is not None:
                used.add(pattern)
                found[node] = parameter
        if unused := [pattern for pattern in self.slots.targets if pattern not in used]:
            hint = f"names look like {names[0]}" if names else "the model has no layers that can change so"
            raise UsageError(f"--adapters: {unused[0]!r} is no layer that can have adapters", hint)
        return found


def _is_table(graph: Graph, node: fx.Node) -> bool:
    """Whether the node gathers rows of an embedding of the model by the tokens, also if ranks divide these rows."""
    if node.target is not EMBEDDING:
        return False
    ids, table = node.args[:2]
    if table.op != "get_attr" or len(type_of(table).shape) != 2:  # type: ignore[union-attr, arg-type]
        return False
    cut = cut_of(graph.weight(table))  # type: ignore[arg-type]
    return (ids.op == "placeholder" and ids.target == "token_ids") or (cut is not None and cut[0] == 0)  # type: ignore[union-attr]


def _is_product(node: fx.Node) -> bool:
    """Whether the node is a product, per token, of one vector, or of routed vectors, with weights of the model."""
    if node.target not in (LINEAR, EXPERTS):
        return False
    weight: Any = node.args[1]
    x: Any = node.args[0]
    if weight.op != "get_attr" or type_of(node).rows not in (TOKENS, LOGIT_ROWS):
        return False
    return node.args[3] is not None if node.target is EXPERTS else prod(type_of(x).shape[:-1]) == 1
