"""Handlers for indexed moves: table lookups, gathers, top-k, scatters and writes into slices."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from ...graph.tensor_types import type_of
from .axis_handlers import cat_parts
from .broadcasting import expand_to, per_token, val_of
from .conversion import Conversion
from .reduce_handlers import icc, last_axis
from .table import Table
from .values import Dims, T, TracedValue, dims_of, op_name

aten = torch.ops.aten
HANDLERS = Table()

# ops of the new graph through which a handler traces a value back
LOOKED_THROUGH = (aten.expand.default, aten.repeat.default)


@HANDLERS.handles("aten.embedding", "aten.index_select")
def embedding(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Rows of a table: one index per token, one index for all tokens, or several indices per token. ValueError along an
    inner axis, and for a gather of tokens."""
    if "index_select" in op_name(node.target):
        table, axis, index = args
        if axis != 0:
            raise ValueError("index_select along an inner axis")
    else:
        table, index = args[0], args[1]
    if table.per_token:
        raise ValueError("a gather of tokens")
    if math.prod(index.features) != 1:
        flat = index.node
        return TracedValue(conv.emit(icc("embedding"), flat, table.node), dims_of(val_of(node)))
    if not index.per_token:  # every token takes the same row
        row = conv.emit(icc("embedding"), conv.view(TracedValue(index.node, index.features), (1,)).node, table.node)
        return conv.view(TracedValue(row, (1, *table.dims[1:])), dims_of(val_of(node)))
    index = conv.view(index, (T,))
    out = conv.emit(icc("embedding"), index.node, table.node)
    return conv.view(TracedValue(out, (T, *table.dims[1:])), dims_of(val_of(node)))


@HANDLERS.handles("aten.index")
def index(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """table[indices] of a table without tokens, along its first axis; ValueError for others."""
    table, indices = args
    if table.per_token or len(indices) != 1:
        raise ValueError("advanced indexing")
    return TracedValue(conv.emit(icc("embedding"), indices[0].node, table.node), dims_of(val_of(node)))


@HANDLERS.handles("aten.index_put")
def index_put(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """value[mask] = number. ValueError for other writes whose indices depend on values."""
    value, indices, source = args[:3]
    mask = indices[0]
    if (
        len(indices) != 1
        or type_of(mask.node).dtype != torch.bool
        or math.prod(source.features) != 1
        or source.per_token
    ):
        raise ValueError("a write to places that depend on values")
    if mask.dims != value.dims or (len(args) > 3 and args[3]):
        raise ValueError("a masked write of this form")
    scalar = conv.view(source, ()).node
    return TracedValue(conv.emit(aten.where.self, mask.node, scalar, value.node), value.dims)


@HANDLERS.handles("aten.topk", "aten.sort")
def topk(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """topk and sort over the last axis: (values, indices)."""
    value: TracedValue = args[0]
    is_sort = "sort" in str(node.target)
    rest = list(args[1:])
    k = value.dims[-1] if is_sort else rest.pop(0)
    axis = rest[0] if rest else kwargs.get("dim", -1)
    if is_sort:
        largest = rest[1] if len(rest) > 1 else kwargs.get("descending", False)
    else:
        largest = rest[1] if len(rest) > 1 else kwargs.get("largest", True)
    value = last_axis(conv, value, axis)
    pair = conv.emit(icc("topk"), value.node, k, bool(largest))
    dims = (*value.dims[:-1], k)
    return [TracedValue(_item(conv, pair, i), dims) for i in range(2)]


def _item(conv: Conversion, pair: fx.Node, index: int) -> fx.Node:
    return conv.graph.call(operator.getitem, pair, index)


@HANDLERS.handles("aten.gather")
def gather(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Elements along the last axis by indices per token, or rows of a table by position."""
    value, axis, index_ = args
    axis %= len(value.dims)
    if index_.dims[axis] is T and not value.per_token:
        return _table_rows(conv, value, axis, index_, dims_of(val_of(node)))
    value = last_axis(conv, value, axis)
    return TracedValue(conv.emit(icc("gather"), value.node, index_.node), dims_of(val_of(node)))


def _table_rows(conv: Conversion, table: TracedValue, axis: int, index_: TracedValue, dims: Dims) -> TracedValue:
    """A gather that takes row index[t] of a constant for each token t, whatever its other axes are."""
    if math.prod(table.dims[:axis]) != 1:
        raise ValueError("a gather from several tables")
    row = _same_along_features(index_)
    if row is None:
        raise ValueError("a gather of single elements of a table")
    rows = conv.view(table, table.dims[axis:])
    out = conv.emit(icc("embedding"), conv.view(row, (T,)).node, rows.node)
    width = tuple(d for d in dims[axis + 1 :])
    if width != table.dims[axis + 1 :]:
        raise ValueError("a gather of parts of rows")
    return conv.view(TracedValue(out, (T, *width)), dims)


def _same_along_features(value: TracedValue) -> TracedValue | None:
    """The number per token that `value` repeats over its other axes; None if it is not such a repetition."""
    if math.prod(value.features) == 1:
        return value
    source = value.node.args[0]
    if value.node.target not in LOOKED_THROUGH or not isinstance(source, fx.Node):
        return None
    return TracedValue(source, (T, *type_of(source).shape)) if math.prod(type_of(source).shape) == 1 else None


@HANDLERS.handles("aten.copy", "aten.copy_")
def copy(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """copy: `source`, expanded to the shape of the destination."""
    return expand_to(conv, args[1], dims_of(val_of(node)))


@HANDLERS.handles("aten.slice_scatter")
def slice_scatter(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A write to a slice of an axis, or to all tokens. ValueError for some tokens, or for a step other than 1."""
    value, source = args[0], args[1]
    rest = list(args[2:])
    axis = (rest[0] if rest else kwargs.get("dim", 0)) % len(value.dims)
    start = rest[1] if len(rest) > 1 else kwargs.get("start")
    end = rest[2] if len(rest) > 2 else kwargs.get("end")
    step = rest[3] if len(rest) > 3 else kwargs.get("step", 1)
    if value.dims[axis] is T:
        if start not in (None, 0) or (isinstance(end, int) and end < 2**31) or step != 1:
            raise ValueError("a write to some of the tokens")
        return expand_to(conv, source, value.dims)
    if step != 1:
        raise ValueError("a write to every other element")
    start, end, _ = slice(start, end).indices(value.dims[axis])
    return _written(conv, value, source, axis, start, end)


@HANDLERS.handles("aten.select_scatter")
def select_scatter(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A write to one index of an axis. ValueError if that is one token."""
    value, source, axis, place = args
    axis %= len(value.dims)
    if value.dims[axis] is T:
        raise ValueError("a write to one token")
    place %= value.dims[axis]
    source = conv.view(source, (*source.dims[:axis], 1, *source.dims[axis:]))
    return _written(conv, value, source, axis, place, place + 1)


def _written(conv: Conversion, value: TracedValue, source: TracedValue, axis: int, start: int, end: int) -> TracedValue:
    """`value` with [start, end) of an axis replaced by `source`."""

    def part(first: int, last: int) -> list[TracedValue]:
        if first >= last:
            return []
        dims = (*value.dims[:axis], last - first, *value.dims[axis + 1 :])
        return [TracedValue(conv.emit(aten.slice.Tensor, value.node, value.canonical(axis), first, last, 1), dims)]

    middle = (*value.dims[:axis], end - start, *value.dims[axis + 1 :])
    parts = [*part(0, start), expand_to(conv, source, middle), *part(end, value.dims[axis])]
    return cat_parts(conv, parts, axis, value.dims)


@HANDLERS.handles("aten.scatter", "aten.scatter_add", "aten.scatter_reduce")
def scatter(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A write or an addition along the last axis, at indices per token. ValueError for scatter_reduce."""
    name = str(node.target)
    if "reduce" in name:
        raise ValueError("scatter_reduce")
    value = last_axis(conv, args[0], args[1])
    index_, source = args[2], args[3]
    base = value.node
    if not value.per_token:
        base = per_token(conv, value, (T, *value.features)).node
    tensor = isinstance(source, TracedValue)
    if tensor and not source.per_token:
        source = per_token(conv, source, (T, *source.features))
    src, number = (source.node, 0.0) if isinstance(source, TracedValue) else (None, float(source))
    out = conv.emit(icc("scatter"), base, index_.node, src, number, "add" in name)
    return TracedValue(out, dims_of(val_of(node)))
