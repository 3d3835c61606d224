"""Lowering of ops that only move elements: strides where possible, copies where not."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..graph.tensor_types import type_of
from .context import Lowerer
from .placed import Placed

aten = torch.ops.aten


def view(low: Lowerer, node: fx.Node) -> Placed:
    """New strides if the memory allows it, else a copy first."""
    source = low.placed(node.args[0])
    shape = type_of(node).shape
    found = source.view(shape)
    if found is None:
        found = low.dense(source).view(shape)
        assert found is not None
    return found


def permute(low: Lowerer, node: fx.Node) -> Placed:
    """Reordered strides."""
    source = low.placed(node.args[0])
    lead = 1 if source.rows else 0
    order: Any = node.args[1]
    return source.permute([i - lead for i in order[lead:]])


def expand(low: Lowerer, node: fx.Node) -> Placed:
    """Zero strides."""
    return low.placed(node.args[0]).expand(type_of(node).shape)


def slice_(low: Lowerer, node: fx.Node) -> Placed:
    """A moved offset."""
    source = low.placed(node.args[0])
    axis, start, end, step = node.args[1:5]
    return source.slice(axis - (1 if source.rows else 0), start, end, step)  # type: ignore[operator, arg-type]


def cat(low: Lowerer, node: fx.Node) -> Placed:
    """A new buffer, each part copied into its place."""
    parts = [low.placed(n) for n in node.args[0]]  # type: ignore[union-attr]
    kind = type_of(node)
    axis: int = node.args[1] - (1 if kind.rows else 0)  # type: ignore[operator, assignment]
    out = low.new(node)
    start = 0
    for part in parts:
        end = start + part.shape[axis]
        low.copy(part, out.slice(axis, start, end, 1), node)
        start = end
    return out


def repeat(low: Lowerer, node: fx.Node) -> Placed:
    """Expand along new axes, then one copy: [a, b] x (m, n) is [m, a, n, b] seen as [m * a, n * b]."""
    source = low.placed(node.args[0])
    lead = 1 if source.rows else 0
    counts: list[int] = list(node.args[1])[lead:]  # type: ignore[arg-type]
    shape = (1,) * (len(counts) - len(source.shape)) + source.shape
    viewed = source.view(tuple(s for size in shape for s in (1, size)))
    viewed = viewed or low.dense(source).view(tuple(s for size in shape for s in (1, size)))
    assert viewed is not None
    wide = viewed.expand(tuple(s for count, size in zip(counts, shape, strict=True) for s in (count, size)))
    found = low.dense(wide).view(type_of(node).shape)
    assert found is not None
    return found


SHAPE_LOWERING = {
    aten.view.default: view,
    aten.permute.default: permute,
    aten.expand.default: expand,
    aten.slice.Tensor: slice_,
    aten.cat.default: cat,
    aten.repeat.default: repeat,
}
