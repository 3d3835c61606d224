"""Brings operands of exported ops into one shape: broadcast, repeated, or given a row for each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...graph.tensor_types import type_of
from .conversion import Conversion
from .values import Dims, T, TracedValue

aten = torch.ops.aten


def val_of(node: fx.Node) -> Any:
    """The exported value of a node's result: a fake tensor, several of them, or a size."""
    return node.meta["val"]


def align(conv: Conversion, value: TracedValue, dims: Dims) -> fx.Node:
    """The node of an operand, viewed so that it broadcasts from the right to a result of `dims`. ValueError if its
    token axis is another one, or if it is a constant with a value per token."""
    rank = len(dims)
    axis = dims.index(T) if T in dims else None
    padded: Dims = (1,) * (rank - len(value.dims)) + value.dims
    if value.axis is not None:
        if padded.index(T) != axis:
            raise ValueError("an elementwise op over two different token axes")
        return conv.view(value, padded).node
    if axis is None:
        return value.node
    if padded[axis] != 1:
        raise ValueError("a constant with one value per token")
    kept = list(padded[:axis] + padded[axis + 1 :])
    while kept and kept[0] == 1 and len(kept) > 1:
        kept.pop(0)
    return conv.view(value, tuple(kept)).node


def expand_to(conv: Conversion, value: TracedValue, dims: Dims) -> TracedValue:
    """The value repeated along the axes that are larger in `dims`; a constant stays one row."""
    aligned = align(conv, value, dims)
    if T in dims and value.axis is None:
        value = TracedValue(aligned, (T, *(1,) * (len(dims) - 1 - type_of(aligned).rank), *type_of(aligned).shape))
        aligned = value.node
    shape = tuple(d for d in dims if d is not T)
    found = type_of(aligned)
    if found.shape == shape:
        return TracedValue(aligned, dims)
    lead = [-1] if found.rows is not None else []
    return TracedValue(conv.emit(aten.expand.default, aligned, [*lead, *shape]), dims)


def per_token(conv: Conversion, value: TracedValue, dims: Dims) -> TracedValue:
    """A constant with a row for each token, for ops that need one. dims: its logical dims, with T. ValueError for
    booleans."""
    value = expand_to(conv, value, dims)
    if value.per_token:
        return value
    if type_of(value.node).dtype == torch.bool:
        raise ValueError("a boolean constant per token")
    positions = conv.graph.input("positions")
    is_float = type_of(value.node).dtype.is_floating_point
    zero = conv.emit(aten.mul.Tensor, positions, 0.0 if is_float else 0)
    zero = conv.emit(aten.view.default, zero, [-1, *(1,) * len(value.features)])
    return TracedValue(conv.emit(aten.add.Tensor, zero, value.node), dims)
