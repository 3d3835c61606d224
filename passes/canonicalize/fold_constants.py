"""Operations whose operands are all weights become weights: `1 + w`, transposes, reshaped tables.

The values are not computed here: the new weight is a lazy handle over the old ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from ...compiler.graph.facts import Fact, folds
from ...compiler.graph.graph import Graph
from ...compiler.graph.interpret import eager
from ...compiler.ops import traits_of
from ...compiler.weights.handles import QuantizedWeight, Transposed, Weight, derive
from ..base import Pass, PassContext, PassResult


@dataclass(frozen=True)
class FoldConstants(Pass):
    """A call whose operands are all weights is replaced by a derived weight."""

    name: ClassVar[str] = "fold-constants"
    ensures: ClassVar[frozenset[str]] = frozenset({Fact.FOLDED})
    # values do not change, but a product with a formerly transposed weight may sum in another order
    tolerance: ClassVar[float | None] = 1e-6

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        counts: Counter[str] = Counter()
        for node in list(graph.nodes):
            if not folds(node):
                continue
            with graph.fx.inserting_before(node):
                graph.replace(node, graph.add_weight(_name(node), _fold(graph, node)))
            counts["folded"] += 1
        return PassResult(bool(counts), counts)


def _name(node: fx.Node) -> str:
    return str(node.all_input_nodes[0].target).split("#")[0]


def _fold(graph: Graph, node: fx.Node) -> Weight:
    sources = node.all_input_nodes
    target = eager(node.target)
    args = node.args

    def compute(*values: Tensor) -> Tensor:
        env = dict(zip(sources, (_compute_dtype(v) for v in values), strict=True))
        return target(*fx.map_arg(args, lambda n: env[n]))

    def moved(*values: Tensor) -> Any:
        env = dict(zip(sources, values, strict=True))
        return target(*fx.map_arg(args, lambda n: env[n]))

    first = graph.weight(sources[0])
    if isinstance(first, Transposed) and len(sources) == 1 and _transposes(moved, first):
        return first.source
    if isinstance(first, QuantizedWeight) and first.given and len(sources) == 1 and _transposes(moved, first):
        return Transposed(first)  # as in x @ w.T, where the product transposes it back

    if not traits_of(node.target).moves_only:
        return derive(compute, *(graph.weight(n) for n in sources))

    def move(*values: Tensor) -> Tensor:  # keep the storage dtype, so that a transposed bf16 weight is still bf16
        return moved(*values).contiguous()

    return derive(move, *(graph.weight(n) for n in sources))


def _transposes(move: Callable[..., Tensor], weight: Weight) -> bool:
    """Whether an operation on matrices swaps their last two axes and does nothing else."""
    matrix = torch.empty(weight.shape, device="meta")
    moved = move(matrix)
    return moved.shape == matrix.mT.shape and moved.stride() == matrix.mT.stride()


def _compute_dtype(value: Tensor) -> Tensor:
    return value.to(torch.float32) if value.is_floating_point() else value
