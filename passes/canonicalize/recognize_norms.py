"""RMSNorm and LayerNorm written out in elementwise ops become one op.

w * (x * rsqrt(mean(x * x) + eps)) -> rms_norm(x, w, eps), for any constant vector w (Gemma's 1 + w is folded before).
(x - mean(x)) * rsqrt(mean((x - mean(x))^2) + eps) * w + b -> layer_norm(x, w, b, eps).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import Graph
from ...compiler.graph.tensor_types import type_of
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
    """The pattern of x divided by the root of its mean square."""
    variance = through_views(call(REDUCE, call(aten.mul.Tensor, x, x), "mean", AXIS))
    inverse = _inverse_root(variance)
    root = call(aten.sqrt.default, call(aten.add.Tensor, variance, EPS))
    return either(call(aten.mul.Tensor, x, inverse), call(aten.div.Tensor, x, root))


def _is_last_axis(found: Bindings) -> Fail | None:
    kind = type_of(found["x"])
    return None if found["axis"] == kind.rank - 1 else Fail("the mean is not over the last axis")


def _is_vector(graph: Graph, node: fx.Node, size: int) -> bool:
    return node.op == "get_attr" and type_of(node).shape in ((size,), (1, size), (1, 1, size))


def _as_vector(graph: Graph, node: fx.Node) -> fx.Node:
    return node if type_of(node).rank == 1 else graph.call(aten.view.default, node, [type_of(node).shape[-1]])


class _Norm(Rule):
    def check(self, graph: Graph, root: fx.Node, found: Bindings) -> Fail | None:
        return _is_last_axis(found)


class RmsNormRule(_Norm):
    """The form without a scale."""

    name = "rms-norm"
    pattern = _normalized(X)

    def rewrite(self, graph: Graph, root: fx.Node, found: Bindings) -> fx.Node:
        return graph.call(RMS, found["x"], None, float(found["eps"]), origin=root)


class LayerNormRule(_Norm):
    """The form without scale and shift."""

    name = "layer-norm"
    pattern = _normalized(call(aten.sub.Tensor, X, through_views(call(REDUCE, X, "mean", AXIS))))

    def rewrite(self, graph: Graph, root: fx.Node, found: Bindings) -> fx.Node:
        return graph.call(LAYER, found["x"], None, None, float(found["eps"]), origin=root)


class _Scale(Rule):
    def check(self, graph: Graph, root: fx.Node, found: Bindings) -> Fail | None:
        good = _is_vector(graph, found["w"], type_of(found["x"]).shape[-1])
        return None if good else Fail("the scale is not a constant vector over the last axis")


class ScaleRmsNorm(_Scale):
    """rms_norm(x) * w -> rms_norm(x, w)."""

    name = "scaled-rms-norm"
    pattern = call(aten.mul.Tensor, call(RMS, X, None, EPS), W)

    def rewrite(self, graph: Graph, root: fx.Node, found: Bindings) -> fx.Node:
        return graph.call(RMS, found["x"], _as_vector(graph, found["w"]), float(found["eps"]), origin=root)


class ScaleLayerNorm(_Scale):
    """layer_norm(x) * w -> layer_norm(x, w)."""

    name = "scaled-layer-norm"
    pattern = call(aten.mul.Tensor, call(LAYER, X, None, None, EPS), W)

    def rewrite(self, graph: Graph, root: fx.Node, found: Bindings) -> fx.Node:
        return graph.call(LAYER, found["x"], _as_vector(graph, found["w"]), None, float(found["eps"]), origin=root)


class ShiftLayerNorm(Rule):
    """layer_norm(x, w) + b -> layer_norm(x, w, b)."""

    name = "shifted-layer-norm"
    pattern = call(aten.add.Tensor, call(LAYER, X, W, None, EPS), B)

    def check(self, graph: Graph, root: fx.Node, found: Bindings) -> Fail | None:
        good = _is_vector(graph, found["b"], type_of(found["x"]).shape[-1])
        return None if good else Fail("the shift is not a constant vector over the last axis")

    def rewrite(self, graph: Graph, root: fx.Node, found: Bindings) -> fx.Node:
        bias = _as_vector(graph, found["b"])
        return graph.call(LAYER, found["x"], found["w"], bias, float(found["eps"]), origin=root)


@dataclass(frozen=True)
class RecognizeNorms(Pass):
    """Apply the rules; layer norm first, as it contains the other. Scale and shift are merged in afterwards."""

    name: ClassVar[str] = "recognize-norms"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.FOLDED, Fact.SIMPLE, Fact.UNIQUE})
    ensures: ClassVar[frozenset[str]] = frozenset({Fact.NORMS})
    breaks: ClassVar[frozenset[str]] = frozenset({Fact.FOLDED, Fact.UNIQUE})

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        result = apply_rules(graph, [LayerNormRule(), RmsNormRule()], ctx)
        scaled = apply_rules(graph, [ScaleRmsNorm(), ScaleLayerNorm(), ShiftLayerNorm()], ctx)
        return PassResult(result.modified or scaled.modified, result.counts + scaled.counts)
