"""Work that all ranks would repeat is divided by rows: sums over ranks, and the norms and sums after them (Korthikanti
et al. 2022, Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198).

If a norm or another sum reads a sum over ranks, each rank computes both only for its own rows; before an op that needs
all rows they are gathered. In steps of few rows nothing changes: every rank has all rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ...compiler.graph.graph import Graph
from ...compiler.graph.tensor_types import TOKENS, TensorType, type_of
from ...compiler.ops import OPS, traits_of
from ...compiler.weights.handles import pieces_of
from ...compiler.weights.shards import OnFirst, cut_of
from ..base import Pass, PassContext, PassResult, Refusal

ALL_REDUCE, SCATTER, GATHER = (OPS[name].overload for name in ("all_reduce", "reduce_scatter", "all_gather_rows"))
EMBEDDING, VIEW = OPS["embedding"].overload, torch.ops.aten.view.default
_NORMS = (OPS["rms_norm"].overload, OPS["layer_norm"].overload)
ROWS = 32  # the least number of rows


@dataclass(frozen=True)
class DivideRows(Pass):
    """Divides sums over ranks, and values computed from them row by row, in steps of `rows` rows and more."""

    name: ClassVar[str] = "sequence"
    tolerance: ClassVar[float | None] = 0.0

    rows: int = ROWS

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        if graph.ranks == 1 or graph.stages > 1:
            return PassResult(False)
        alike, own = _alike(graph), set[fx.Node]()
        refused = dict[fx.Node, str]()
        while dear := _gathered_oftener(own := _divided(graph, alike, refused)):
            refused.update(dict.fromkeys(dear, "what is made of it would be gathered oftener than sums are divided"))
        ctx.refusals.extend(Refusal(self.name, node.name, reason) for node, reason in refused.items())
        divided = [node for node in graph.nodes if node in own]
        gathered = sum(self._gather(graph, node, _others(node, own)) for node in divided)
        sums = [node for node in divided if node.target is ALL_REDUCE]
        for node in sums:
            node.target, node.args = SCATTER, (*node.args, self.rows)
        return PassResult(bool(sums), Counter({"sums by rows": len(sums), "gathered": gathered}))

    def _gather(self, graph: Graph, node: fx.Node, readers: list[fx.Node]) -> int:
        """Let `readers` read all rows of a value that is divided by rows; returns the number of gathers, 0 or 1."""
        if not readers:
            return 0
        with graph.fx.inserting_after(node):
            found = graph.call(GATHER, node, self.rows, origin=node)
        for reader in readers:
            reader.replace_input_with(node, found)
        return 1


def _divided(graph: Graph, alike: set[fx.Node], refused: dict[fx.Node, str]) -> set[fx.Node]:
    """The sums that are divided by rows, and the values computed from them row by row. refused: sums that stay whole;
    sums from which nothing is computed row by row are added to it."""
    own = set[fx.Node]()
    for node in graph.nodes:
        if node.op != "call_function" or node in refused:
            continue
        if node.target is ALL_REDUCE and type_of(node).rows == TOKENS:
            if _is_worth(node, own | {node}, alike):
                own.add(node)
            else:
                refused[node] = "no norm and no sum of the ranks' is made of it"
        elif _by_row(node, own, alike):
            own.add(node)
    return own


def _gathered_oftener(own: set[fx.Node]) -> list[fx.Node]:
    """The sums in connected groups of values that have many more gathers than sums: undivided, these sums take less
    time. A sum that is divided and gathered once takes as long as a whole one; rows that products read, at least every
    other gather here, may be gathered in 16 bits."""
    found, seen = list[fx.Node](), set[fx.Node]()
    for start in own:
        part, waiting = set[fx.Node](), [start] if start not in seen else []
        while waiting:
            node = waiting.pop()
            if node not in part:
                part.add(node)
                waiting += own.intersection([*node.users, *node.all_input_nodes])
        seen |= part
        sums = [node for node in part if node.target is ALL_REDUCE]
        if 2 * sum(bool(_others(node, own)) for node in part) > 3 * len(sums):
            found += sums
    return found


def _others(node: fx.Node, own: set[fx.Node]) -> list[fx.Node]:
    """The users that read all rows of a node."""
    return [user for user in node.users if user not in own]


def _alike(graph: Graph) -> set[fx.Node]:
    """The values that are the same on every rank."""
    found = set[fx.Node]()
    for node in graph.nodes:
        if node.op == "placeholder":
            found.add(node)
        elif node.op == "get_attr":
            pieces = pieces_of(graph.weight(node))
            if not any(isinstance(piece, OnFirst) or cut_of(piece) is not None for piece in pieces):
                found.add(node)
        elif node.op == "call_function" and (_collects(node) or found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def _collects(node: fx.Node) -> bool:
    return traits_of(node.target).collective


def _by_row(node: fx.Node, own: set[fx.Node], alike: set[fx.Node]) -> bool:
    """Whether a call computes each row from the same row of its inputs, at least one of which is divided by rows, and
    no other input would prevent that."""
    kind = node.meta.get("type")
    if node.op != "call_function" or node not in alike or not isinstance(kind, TensorType) or kind.rows != TOKENS:
        return False
    keeps = traits_of(node.target).elementwise or node.target in _NORMS or node.target is VIEW
    if not keeps or own.isdisjoint(node.all_input_nodes):
        return False
    return all(_fits(value, own) for value in node.all_input_nodes)


def _is_worth(node: fx.Node, own: set[fx.Node], alike: set[fx.Node]) -> bool:
    """Whether something is computed row by row from a value or a view of it."""
    users = [user for user in node.users if _by_row(user, own, alike)]
    return any(user.target is not VIEW or _is_worth(user, own | {user}, alike) for user in users)


def _fits(value: Any, own: set[fx.Node]) -> bool:
    while value.target is VIEW and value not in own:
        value = value.args[0]
    return value in own or value.op != "call_function" or value.target is EMBEDDING or _collects(value)
