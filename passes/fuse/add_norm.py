"""The residual addition and the norm after it become one kernel.

s = x + r; y = rms_norm(s, w)  ->  y, s = add_rms_norm(x, r, w); the same for layer_norm.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import Graph
from ...compiler.graph.tensor_types import type_of
from ...compiler.ops import OPS
from ..base import Pass, PassContext, PassResult, Refusal

aten = torch.ops.aten
FUSED = {
    OPS["rms_norm"].overload: OPS["add_rms_norm"].overload,
    OPS["layer_norm"].overload: OPS["add_layer_norm"].overload,
}


@dataclass(frozen=True)
class FuseAddNorm(Pass):
    """Fuses if the sum is of two token values of one shape and the norm is its first reader."""

    name: ClassVar[str] = "fuse-add-norm"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.NORMS})

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        counts: Counter[str] = Counter()
        for node in [n for n in graph.nodes if n.target in FUSED]:
            reason = self._refusal(node)
            if reason:
                ctx.refusals.append(Refusal(self.name, node.name, reason))
                continue
            total: fx.Node = node.args[0]  # type: ignore[assignment]
            with graph.fx.inserting_before(total):
                x, residual = total.args
                rest = [_again(graph, a) for a in node.args[1:]]
                pair = graph.call(FUSED[node.target], x, residual, *rest, origin=node)
                normed = graph.call(operator.getitem, pair, 0)
                added = graph.call(operator.getitem, pair, 1)
            graph.replace(node, normed)
            graph.replace(total, added)
            counts["fused"] += 1
        return PassResult(bool(counts), counts)

    @staticmethod
    def _refusal(node: fx.Node) -> str:
        total = node.args[0]
        if not isinstance(total, fx.Node) or total.target is not aten.add.Tensor or len(total.args) != 2:
            return "the norm does not read a sum"
        if not all(isinstance(a, fx.Node) and a.op != "get_attr" for a in total.args):
            return "the sum is with a constant"
        if any(type_of(a) != type_of(total) for a in total.args):  # type: ignore[arg-type]
            return "the sum broadcasts"
        if any(isinstance(a, fx.Node) and a.op != "get_attr" for a in node.args[1:]):
            return "the scale is not a constant"
        return ""


def _again(graph: Graph, arg: object) -> object:
    """A new read of a weight at the insertion point, which may precede its first read."""
    if isinstance(arg, fx.Node):
        return graph.add_weight(str(arg.target), graph.weight(arg))
    return arg
