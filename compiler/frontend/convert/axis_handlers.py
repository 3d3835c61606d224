"""Handlers of ops that permute, select, join and repeat axes of a token's values; the token axis is unchanged."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from ...ops import OPS
from .broadcasting import expand_to, per_token, val_of
from .conversion import Conversion
from .shifts import behind_a_row
from .table import Table
from .values import Dims, KeyPairs, Longer, Padded, Shorter, T, TracedValue, dims_of, op_name

aten = torch.ops.aten
HANDLERS = Table()


@HANDLERS.handles("aten.view", "aten.reshape", "aten._unsafe_view", "aten.unsqueeze", "aten.squeeze", "aten.flatten")
def view(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A reshape that leaves the token axis alone; ValueError otherwise."""
    value: TracedValue = args[0]
    dims = dims_of(val_of(node))
    if value.axis is not None and T in dims:
        if prod(value.dims[: value.axis]) != prod(dims[: dims.index(T)]):
            raise ValueError("a reshape across the token axis")
    elif (value.axis is None) != (T not in dims):
        raise ValueError("a reshape that splits or merges the token axis")
    return conv.view(value, dims)


@HANDLERS.handles("aten.permute", "aten.transpose", "aten.t", "aten.movedim", "aten.swapaxes")
def permute(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A permutation of axes. It emits nothing if only the token axis moves."""
    value: TracedValue = args[0]
    rank = len(value.dims)
    if "permute" in op_name(node.target):
        order = [d % rank for d in args[1]]
    else:
        first, second = (args[1] % rank, args[2] % rank) if len(args) > 2 else (0, rank - 1)
        order = list(range(rank))
        order[first], order[second] = order[second], order[first]
    dims = tuple(value.dims[d] for d in order)
    moved = [value.canonical(d) for d in order if value.dims[d] is not T]
    if moved == sorted(moved):
        return TracedValue(value.node, dims)
    lead = [0] if value.per_token else []
    return TracedValue(conv.emit(aten.permute.default, value.node, [*lead, *moved]), dims)


@HANDLERS.handles("aten.expand", "aten.broadcast_to")
def expand(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A repetition along axes of size 1. Over pairs of tokens it becomes KeyPairs."""
    try:
        return expand_to(conv, args[0], dims_of(val_of(node)))
    except ValueError:
        if val_of(node).dim() == len(args[0].dims) and T in args[0].dims:
            return KeyPairs(args[0])
        raise


@HANDLERS.handles("aten.slice")
def slice_(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A slice of an axis of each token, the first rows of a table, or the removal of surplus rows of a convolution or a
    shift. ValueError for a slice of the tokens."""
    value: TracedValue = args[0]
    if isinstance(value, TracedValue) and args[1:] == [value.axis, 0, -1]:
        return Shorter(value)
    if isinstance(value, KeyPairs) and args[2:] == [0, 1] and value.value.dims[args[1]] == 1:
        return value.value
    if isinstance(value, Padded) and args[1] % len(value.value.dims) == value.value.axis and _is_whole(value, args[2:]):
        return value
    dims = dims_of(val_of(node))
    axis = (args[1] if len(args) > 1 else 0) % len(dims)
    if isinstance(value, Longer):  # its length is T now, if nothing else was cut off
        if dims != value.value.dims or args[2] not in (None, 0):
            raise ValueError("another slice of a convolution than its first outputs")
        return value.value
    start, end, step = (list(args[2:]) + [None, None, 1][len(args) - 2 :])[:3] if len(args) > 2 else (None, None, 1)
    if value.dims[axis] is T:
        whole = start in (None, 0) or (isinstance(start, torch.SymInt) and _is_minus_tokens(start))
        if not whole or (isinstance(end, int) and end < 2**31) or step not in (None, 1):
            raise ValueError("a slice of the token axis")
        return value
    if dims == value.dims:
        return value
    length = value.dims[axis]
    if isinstance(end, torch.SymInt):
        return first_rows(conv, value, axis, start, dims)
    if isinstance(start, torch.SymInt):
        raise ValueError("a slice whose start depends on the number of tokens")
    start, end, _ = slice(start, end).indices(length)
    return TracedValue(conv.emit(aten.slice.Tensor, value.node, value.canonical(axis), start, end, step or 1), dims)


def _is_whole(value: Padded, part: list[Any]) -> bool:
    """Whether [start, end) are all tokens and the padding before them, counted from the end or the beginning."""
    start, end = (*part, None, None)[:2]
    open_end = end is None or (isinstance(end, int) and end >= 2**31)
    if isinstance(start, torch.SymInt):
        tokens = next(iter(start.node.expr.free_symbols))
        return open_end and bool(start.node.expr + tokens + value.before == 0)
    return open_end and start in (None, 0)


def _is_minus_tokens(size: torch.SymInt) -> bool:
    """Whether a size is the number of tokens, counted from the end."""
    return bool((-size.node.expr).is_Symbol)


def first_rows(conv: Conversion, table: TracedValue, axis: int, start: Any, dims: Dims) -> TracedValue:
    """table[:number of tokens]: row p of the table for the token at position p. ValueError for another slice."""
    if dims[axis] is not T or table.per_token or start not in (None, 0) or prod(table.dims[:axis]) != 1:
        raise ValueError("a slice whose end depends on the number of tokens")
    rows = conv.view(table, table.dims[axis:])
    out = conv.emit(OPS["embedding"].overload, conv.graph.input("positions"), rows.node)
    return conv.view(TracedValue(out, (T, *table.dims[axis + 1 :])), dims)


@HANDLERS.handles("aten.select")
def select(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """One index of an axis, which is removed. ValueError if it selects one token."""
    value, axis, index = args
    axis %= len(value.dims)
    if value.dims[axis] is T:
        raise ValueError("one token picked out of the sequence")
    at = value.canonical(axis)
    index %= value.dims[axis]
    part = conv.emit(aten.slice.Tensor, value.node, at, index, index + 1, 1)
    dims = dims_of(val_of(node))
    return conv.view(TracedValue(part, (*value.dims[:axis], 1, *value.dims[axis + 1 :])), dims)


@HANDLERS.handles("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind")
def split(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A list of chunks along an axis. ValueError for the token axis."""
    value: TracedValue = args[0]
    unbind = "unbind" in str(node.target)
    axis = args[1 if unbind else 2] if len(args) > (1 if unbind else 2) else kwargs.get("dim", 0)
    axis %= len(value.dims)
    if value.dims[axis] is T:
        raise ValueError("a split of the token axis")
    parts, start = [], 0
    for result in val_of(node):
        width = 1 if unbind else int(result.shape[axis])
        piece = conv.emit(aten.slice.Tensor, value.node, value.canonical(axis), start, start + width, 1)
        kept = TracedValue(piece, (*value.dims[:axis], width, *value.dims[axis + 1 :]))
        parts.append(conv.view(kept, dims_of(result)) if unbind else kept)
        start += width
    return parts


@HANDLERS.handles("aten.cat", "aten.stack")
def cat(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Values joined along an axis, a new one for stack. One row followed by all tokens but the last is a shift."""
    dims = dims_of(val_of(node))
    axis = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(dims)
    values: list[TracedValue] = args[0]
    if isinstance(values[-1], Shorter):
        return behind_a_row(conv, values, axis)
    if "stack" in op_name(node.target):
        values = [conv.view(v, (*v.dims[:axis], 1, *v.dims[axis:])) for v in values]
    return cat_parts(conv, values, axis, dims)


def cat_parts(conv: Conversion, values: list[TracedValue], axis: int, dims: Dims) -> TracedValue:
    """Values joined along a logical axis; a constant among values of tokens gets a row for each token. ValueError along
    the token axis."""
    values = [v for v in values if prod(v.features) > 0]
    if dims[axis] is T and len(values) > 1:
        raise ValueError("a concatenation along the token axis")
    if any(v.per_token for v in values):
        values = [per_token(conv, v, (*dims[:axis], v.dims[axis], *dims[axis + 1 :])) for v in values]
    if len(values) == 1:
        return TracedValue(values[0].node, dims)
    return TracedValue(conv.emit(aten.cat.default, [v.node for v in values], values[0].canonical(axis)), dims)


@HANDLERS.handles("aten.repeat")
def repeat(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A value repeated along axes of each token. ValueError along the tokens."""
    value, counts = args
    dims = dims_of(val_of(node))
    padded = (1,) * (len(dims) - len(value.dims)) + value.dims
    if any(c != 1 for c, d in zip(counts, padded, strict=True) if d is T):
        raise ValueError("a repetition along the token axis")
    per_feature = [c for c, d in zip(counts, padded, strict=True) if d is not T]
    value = conv.view(value, padded)
    lead = [1] if value.per_token else []
    return TracedValue(conv.emit(aten.repeat.default, value.node, [*lead, *per_feature]), dims)
