"""Subgraphs that depend only on positions and constants become tables with one row per position.

Everything that the model computes only from position ids (rotary tables of every kind, learned positions with an
offset, ALiBi) is evaluated here for all positions below `max_seq_len`, and the graph keeps a gather.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from ...compiler.errors import SequenceLengthError
from ...compiler.graph.facts import Fact, is_condition, is_position_row, position_values
from ...compiler.graph.graph import Graph
from ...compiler.graph.interpret import as_compute, eager
from ...compiler.graph.tensor_types import type_of
from ...compiler.ops import OPS, traits_of
from ...compiler.weights.handles import Constant
from ..base import Pass, PassContext, PassResult

EMBEDDING = OPS["embedding"].overload


@dataclass(frozen=True)
class PositionTables(Pass):
    """Replace each value that only positions determine by a row of a table."""

    name: ClassVar[str] = "position-tables"
    ensures: ClassVar[frozenset[str]] = frozenset({Fact.POSITION_TABLES})

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        positions = graph.input("positions")
        if positions is None:
            return PassResult(False)
        computed = position_values(graph, positions)
        counts: Counter[str] = Counter()
        for node in [n for n in computed if _is_frontier(n, computed, positions)]:
            table = _evaluate(graph, node, positions)
            with graph.fx.inserting_before(node):
                weight = graph.add_weight("position_table", Constant(table))
                graph.replace(node, graph.call(EMBEDDING, positions, weight, origin=node))
            counts["tables"] += 1
        return PassResult(bool(counts), counts)


def _is_frontier(node: fx.Node, computed: dict[fx.Node, None], positions: fx.Node) -> bool:
    """Whether a value becomes a table: other nodes need it. Views of a table are free, so the table is made before
    them. A condition on a position costs no more than reading it, so it gets no table."""
    if node is positions or traits_of(node.target).strided or is_position_row(node, positions):
        return False
    if _through_moves(node) is positions or is_condition(node):
        return False
    return _is_needed(node, computed)


def _is_needed(node: fx.Node, computed: dict[fx.Node, None]) -> bool:
    """Whether something that is not position-only reads the value, perhaps through moves, or tests it."""

    def passes_on(user: fx.Node) -> bool:
        return traits_of(user.target).strided or is_condition(user)

    return any(u not in computed or (passes_on(u) and _is_needed(u, computed)) for u in node.users)


def _through_moves(node: fx.Node) -> fx.Node:
    while traits_of(node.target).strided:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _evaluate(graph: Graph, root: fx.Node, positions: fx.Node) -> Tensor:
    values: dict[fx.Node, Any] = {positions: torch.arange(graph.max_seq_len)}

    def value(node: fx.Node) -> Any:
        if node not in values:
            if node.op == "get_attr":
                values[node] = as_compute(graph.weight(node).load())
            else:
                args = fx.map_arg(node.args, value)
                values[node] = eager(node.target)(*args, **node.kwargs)
        return values[node]

    try:
        table = value(root)
    except (IndexError, RuntimeError) as error:
        if "index" not in str(error):
            raise
        raise SequenceLengthError(
            f"--max-seq-len {graph.max_seq_len} is above the positions that the model has an embedding for",
            "give a smaller --max-seq-len",
        ) from error
    return table.to(torch.int32 if type_of(root).dtype == torch.int64 else type_of(root).dtype).contiguous()
