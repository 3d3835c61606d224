"""Writes norms, reductions and softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..graph.tensor_types import type_of
from .writer import Table, Writer

HANDLERS = Table()


def _ones(w: Writer, width: int) -> str:
    def made() -> str:
        return w.b.store(w.b.unique(f"constant/ones[{width}]"), torch.ones(width))

    return w.b.once(("ones", width), made)


@HANDLERS.handles("rms_norm")
def _rms_norm(w: Writer, node: fx.Node) -> str:
    x, weight, eps = node.args
    return _rms(w, w.value(x), weight, eps, type_of(x).shape[-1])  # type: ignore[arg-type]


@HANDLERS.handles("add_rms_norm")
def _add_rms_norm(w: Writer, node: fx.Node) -> list[str]:
    x, residual, weight, eps = node.args
    total = w.b.add("Add", w.value(x), w.value(residual))
    return [_rms(w, total, weight, eps, type_of(x).shape[-1]), total]  # type: ignore[arg-type]


def _rms(w: Writer, x: str, weight: Any, eps: Any, width: int) -> str:
    scale = _ones(w, width) if weight is None else w.value(weight)
    return w.b.add("RMSNormalization", x, scale, axis=-1, epsilon=float(eps))


@HANDLERS.handles("layer_norm")
def _layer_norm(w: Writer, node: fx.Node) -> str:
    x, weight, bias, eps = node.args
    return _layer(w, w.value(x), weight, bias, eps, type_of(x).shape[-1])  # type: ignore[arg-type]


@HANDLERS.handles("add_layer_norm")
def _add_layer_norm(w: Writer, node: fx.Node) -> list[str]:
    x, residual, weight, bias, eps = node.args
    total = w.b.add("Add", w.value(x), w.value(residual))
    return [_layer(w, total, weight, bias, eps, type_of(x).shape[-1]), total]  # type: ignore[arg-type]


def _layer(w: Writer, x: str, weight: Any, bias: Any, eps: Any, width: int) -> str:
    scale = _ones(w, width) if weight is None else w.value(weight)
    return w.b.add("LayerNormalization", x, scale, w.value(bias), axis=-1, epsilon=float(eps))


_REDUCTIONS = {"sum": "ReduceSum", "mean": "ReduceMean", "amax": "ReduceMax", "amin": "ReduceMin", "prod": "ReduceProd"}


@HANDLERS.handles("reduce")
def _reduce(w: Writer, node: fx.Node) -> str:
    x, kind, dim = node.args
    if kind == "argmax":
        return w.b.add("ArgMax", w.value(x), axis=dim, keepdims=0)
    found = w.b.add(_REDUCTIONS[str(kind)], w.value(x), w.b.ints(int(dim)), keepdims=0)  # type: ignore[arg-type]
    return found


@HANDLERS.handles("softmax")
def _softmax(w: Writer, node: fx.Node) -> str:
    return w.b.add("Softmax", w.value(node.args[0]), axis=-1)


@HANDLERS.handles("topk")
def _topk(w: Writer, node: fx.Node) -> list[str]:
    x, k, largest = node.args
    return w.b.add("TopK", w.value(x), w.b.ints(int(k)), outputs=2, axis=-1, largest=int(bool(largest)), sorted=1)  # type: ignore[arg-type]


@HANDLERS.handles("cumsum")
def _cumsum(w: Writer, node: fx.Node) -> str:
    rank = type_of(node).rank
    return w.b.add("CumSum", w.value(node.args[0]), w.b.constant(rank - 1, torch.int64))
