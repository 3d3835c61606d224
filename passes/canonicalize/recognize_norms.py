"""RMSNorm and LayerNorm written out in elementwise ops become one op.

w * (x * rsqrt(mean(x * x) + eps)) -> rms_norm(x, w, eps), whatever constant vector w is (Gemma's 1 + w is folded before).
(x - mean(x)) * rsqrt(mean((x - mean(x))^2) + eps) * w + b -> layer_norm(x, w, b, eps).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ...compiler.graph.graph import Graph, type_of
from ...compiler.ops import OPS
from ..base import Pass, PassContext, PassResult
from ..rules import Bindings, Fail, Lit, Rule, Var, apply_rules, call, either, through_views

aten = torch.ops.aten
REDUCE, RMS, LAYER = (OPS[n].overload for n in ("reduce", "rms_norm", "layer_norm"))
X, W, B, EPS, AXIS = Var("x"), Var("w"), Var("b"), Lit("eps"), Lit("axis")


def _inverse_root(variance: object) -> object:
    inner = call(aten.add.Tensor, variance, EPS)
    return either(call(aten.rsqrt.default, inner), call(aten.pow.Tensor_Scalar, inner, -0.5))


def _normalized(x: object) -> object:
    """x divided by the root of its mean square."""
    variance = through_views(call(REDUCE, call(aten.mul.Tensor, x, x), "mean", AXIS))
    inverse = _inverse_root(variance)
    root = call(aten.sqrt.default, call(aten.add.Tensor, variance, EPS))
    return either(call(aten.mul.Tensor, x, inverse), call(aten.div.Tensor, x, root))


def _is_last_axis(found: Bindings) -> Fail | None:
    kind = type_of(found["x"])
    return None if found["axis"] == kind.rank - 1 else Fail("the mean is not over the last axis")


def _is_vector(graph: Graph, node: fx.Node, size: int) -> bool:
    return node.op == "get_attr" and type_of(node).shape in ((size,), (1, size), (1, 1, size))


class _Norm(Rule):
    def check(self, graph: Graph, root: fx.Node, found: Bindings) -> Fail | None:
        wrong_axis = _is_last_axis(found)
        if wrong_axis:
            return wrong_axis
        size = type_of(found["x"]).shape[-1]
        for name in ("w", "b"):
            if name in found and not _is_vector(graph, found[name], size):
                return Fail(f"the {'scale' if name == 'w' else 'shift'} is not a constant vector over the last axis")
        return None

    def _vector(self, graph: Graph, found: Bindings, name: str) -> fx.Node | None:
        node = found.get(name)
        if node is None or type_of(node).rank == 1:
            return node
        return graph.call(aten.view.default, node, [type_of(node).shape[-1]])


class RmsNorm(_Norm):
    """The form without a scale."""

    name = "rms-norm"
    pattern = _normalized(X)

    def rewrite(self, graph: Graph, root: fx.Node, found: Bindings) -> fx.Node:
        return graph.call(RMS, found["x"], None, float(found["eps"]), origin=root)


class ScaleRmsNorm(Rule):
    """rms_norm(x) * w -> rms_norm(x, w)."""

    name = "scaled-rms-norm"
    pattern = call(aten.mul.Tensor, call(RMS, X, None, EPS), W)

    def check(self, graph: Graph, root: fx.Node, found: Bindings) -> Fail | None:
        if not _is_vector(graph, found["w"], type_of(found["x"]).shape[-1]):
            return Fail("the scale is not a constant vector over the last axis")
        return None

    def rewrite(self, graph: Graph, root: fx.Node, found: Bindings) -> fx.Node:
        weight = found["w"]
        if type_of(weight).rank > 1:
            weight = graph.call(aten.view.default, weight, [type_of(weight).shape[-1]])
        return graph.call(RMS, found["x"], weight, float(found["eps"]), origin=root)


_CENTRED = call(aten.sub.Tensor, X, through_views(call(REDUCE, X, "mean", AXIS)))


class LayerNorm(_Norm):
    """The form with scale and shift, or with neither."""

    name = "layer-norm"
    pattern = either(
        call(aten.add.Tensor, call(aten.mul.Tensor, _normalized(_CENTRED), W), B),
        _normalized(_CENTRED),
    )

    def rewrite(self, graph: Graph, root: fx.Node, found: Bindings) -> fx.Node:
        weight, bias = self._vector(graph, found, "w"), self._vector(graph, found, "b")
        return graph.call(LAYER, found["x"], weight, bias, float(found["eps"]), origin=root)


@dataclass(frozen=True)
class RecognizeNorms(Pass):
    """Apply the rules; layer norm first, as it contains the other."""

    name: ClassVar[str] = "recognize-norms"
    ensures: ClassVar[frozenset[str]] = frozenset({"norms"})

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        result = apply_rules(graph, [LayerNorm(), RmsNorm()], ctx)
        scaled = apply_rules(graph, [ScaleRmsNorm()], ctx)
        return PassResult(result.modified or scaled.modified, result.counts + scaled.counts)
