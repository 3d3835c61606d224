"""Handlers that make exported ops token-major, one small function per op. An op without one is refused by name."""

from __future__ import annotations

import contextlib
from math import prod
from typing import Any

import torch
from torch import fx

from ...graph.graph import type_of
from ...ops import OPS
from ...ops.aten import POINTWISE
from ...ops.body import Argument, BodyWriter
from .conversion import Conversion
from .shifts import behind_a_row
from .table import Table
from .values import Dims, KeyPairs, Longer, Padded, Shorter, T, TracedValue, dims_of, op_name

aten = torch.ops.aten
HANDLERS = Table()


def _val(node: fx.Node) -> Any:
    return node.meta["val"]


def align(conv: Conversion, value: TracedValue, dims: Dims) -> fx.Node:
    """The node of an operand, viewed in such a way that it broadcasts from the right against a result of `dims`."""
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


@HANDLERS.handles(*(name for name in POINTWISE if name != "aten.where"))
def pointwise(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """An op of each element. ValueError for arithmetic with the number of tokens."""
    dims = dims_of(_val(node))
    operands = [align(conv, a, dims) if isinstance(a, TracedValue) else a for a in args]
    if any(isinstance(o, torch.SymInt) for o in operands):
        raise ValueError("arithmetic with the number of tokens")
    emitted = conv.emit(_with_kwargs(node.target, kwargs), *operands)
    return TracedValue(emitted, dims)


@HANDLERS.handles("aten.where")
def where(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A choice between two values. A condition that does not depend on the tokens is decided here."""
    condition: Any = node.args[0]
    if isinstance(args[0], TracedValue) and T not in args[0].dims and condition in conv.static.nodes:
        with contextlib.suppress(ValueError):
            chosen = conv.static.constant(condition)
            picked = args[1] if bool(chosen.all()) else args[2]
            if isinstance(picked, TracedValue) and bool(chosen.all()) == bool(chosen.any()):
                return expand_to(conv, picked, dims_of(_val(node)))
    return pointwise(conv, node, args, kwargs)


def _with_kwargs(target: Any, kwargs: dict[str, Any]) -> Any:
    kept = {k: v for k, v in kwargs.items() if k in ("alpha", "approximate", "rounding_mode") and v not in (None, 1)}
    if kept:
        raise ValueError(f"the option {kept}")
    return target


@HANDLERS.handles("aten.gelu")
def gelu(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """gelu, exact or by tanh."""
    approximate = kwargs.get("approximate", args[1] if len(args) > 1 else "none")
    body = "t0 = gelu_tanh a0" if approximate == "tanh" else "t0 = gelu_erf a0"
    return TracedValue(conv.emit(OPS["pointwise"].overload, [args[0].node], body), args[0].dims)


@HANDLERS.handles("aten.div", "aten.add", "aten.sub")
def arithmetic(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """add and sub, also with a factor, and div, also rounded to an integer."""
    mode = kwargs.pop("rounding_mode", None)
    alpha = kwargs.pop("alpha", 1)
    dims = dims_of(_val(node))
    left, right = (align(conv, a, dims) if isinstance(a, TracedValue) else a for a in args[:2])
    if alpha != 1:
        right = conv.emit(aten.mul.Tensor, right, alpha) if isinstance(right, fx.Node) else right * alpha
    if mode is not None:
        inputs, divisor = ([left, right], Argument(1)) if isinstance(right, fx.Node) else ([left], right)
        write = BodyWriter()
        result = write("floordiv" if mode == "floor" else "div", Argument(0), divisor)
        body = write.finish(result if mode == "floor" else write("trunc", result))
        return TracedValue(conv.emit(OPS["pointwise"].overload, inputs, str(body)), dims)
    base = {"aten.div": aten.div.Tensor, "aten.add": aten.add.Tensor, "aten.sub": aten.sub.Tensor}
    name = op_name(node.target)
    return TracedValue(conv.emit(base[name], left, right), dims)


@HANDLERS.handles(
    "aten.alias",
    "aten.clone",
    "aten.detach",
    "aten.contiguous",
    "aten.dropout",
    "aten.lift_fresh_copy",
    "aten._assert_tensor_metadata",
    "aten._assert_scalar",
    "aten.native_dropout",
)
def identity(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Ops that give their first operand."""
    return args[0]


@HANDLERS.handles("aten.sym_size", "aten.sym_constrain_range_for_size", "aten.sym_constrain_range", "aten.sym_numel")
def size(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A size, symbolic where it is the number of tokens."""
    return node.meta.get("val")


@HANDLERS.handles("aten._to_copy", "prims.convert_element_type", "aten.to")
def convert(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A conversion to another type. Between floats it is left out, as all are float32 in the graph."""
    value: TracedValue = args[0]
    target, source = _val(node).dtype, type_of(value.node).dtype
    if target == source or (target.is_floating_point and source.is_floating_point):
        return value  # all floats compute in float32
    dtype = torch.float32 if target.is_floating_point else target
    return TracedValue(conv.emit(torch.ops.prims.convert_element_type.default, value.node, dtype), value.dims)


@HANDLERS.handles("aten.view", "aten.reshape", "aten._unsafe_view", "aten.unsqueeze", "aten.squeeze", "aten.flatten")
def view(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A reshape that leaves the token axis alone; ValueError otherwise."""
    value: TracedValue = args[0]
    dims = dims_of(_val(node))
    if value.axis is not None and T in dims:
        if prod(value.dims[: value.axis]) != prod(dims[: dims.index(T)]):
            raise ValueError("a reshape across the token axis")
    elif (value.axis is None) != (T not in dims):
        raise ValueError("a reshape that splits or merges the token axis")
    return conv.view(value, dims)


@HANDLERS.handles("aten.permute", "aten.transpose", "aten.t", "aten.movedim", "aten.swapaxes")
def permute(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A permutation of axes. It disappears where only the token axis moves."""
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
    """A repetition along axes of one. Over pairs of tokens it becomes KeyPairs."""
    try:
        return expand_to(conv, args[0], dims_of(_val(node)))
    except ValueError:
        if _val(node).dim() == len(args[0].dims) and T in args[0].dims:
            return KeyPairs(args[0])
        raise


def expand_to(conv: Conversion, value: TracedValue, dims: Dims) -> TracedValue:
    """The value repeated along axes where `dims` is larger; a constant stays one row."""
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
    """A constant with a row for each token, for ops that need one. dims: its logical dims, with T."""
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


@HANDLERS.handles("aten.slice")
def slice_(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A slice of an axis of each token, the first rows of a table, or what a convolution or a shift has too much.
    ValueError for some of the tokens."""
    value: TracedValue = args[0]
    if isinstance(value, TracedValue) and args[1:] == [value.axis, 0, -1]:
        return Shorter(value)
    if isinstance(value, KeyPairs) and args[2:] == [0, 1] and value.value.dims[args[1]] == 1:
        return value.value
    if isinstance(value, Padded) and args[1] % len(value.value.dims) == value.value.axis and _is_whole(value, args[2:]):
        return value
    dims = dims_of(_val(node))
    axis = (args[1] if len(args) > 1 else 0) % len(dims)
    if isinstance(value, Longer):  # of length T now, if nothing else was taken away
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
    """table[:number of tokens]: row p of the table for the token at position p."""
    if dims[axis] is not T or table.per_token or start not in (None, 0) or prod(table.dims[:axis]) != 1:
        raise ValueError("a slice whose end depends on the number of tokens")
    rows = conv.view(table, table.dims[axis:])
    out = conv.emit(OPS["embedding"].overload, conv.graph.input("positions"), rows.node)
    return conv.view(TracedValue(out, (T, *table.dims[axis + 1 :])), dims)


@HANDLERS.handles("aten.select")
def select(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """One place of an axis, which goes. ValueError for one token."""
    value, axis, index = args
    axis %= len(value.dims)
    if value.dims[axis] is T:
        raise ValueError("one token picked out of the sequence")
    at = value.canonical(axis)
    index %= value.dims[axis]
    part = conv.emit(aten.slice.Tensor, value.node, at, index, index + 1, 1)
    dims = dims_of(_val(node))
    return conv.view(TracedValue(part, (*value.dims[:axis], 1, *value.dims[axis + 1 :])), dims)


@HANDLERS.handles("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind")
def split(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A list of the pieces of an axis. ValueError for the token axis."""
    value: TracedValue = args[0]
    unbind = "unbind" in str(node.target)
    axis = args[1 if unbind else 2] if len(args) > (1 if unbind else 2) else kwargs.get("dim", 0)
    axis %= len(value.dims)
    if value.dims[axis] is T:
        raise ValueError("a split of the token axis")
    parts, start = [], 0
    for result in _val(node):
        width = 1 if unbind else int(result.shape[axis])
        piece = conv.emit(aten.slice.Tensor, value.node, value.canonical(axis), start, start + width, 1)
        kept = TracedValue(piece, (*value.dims[:axis], width, *value.dims[axis + 1 :]))
        parts.append(conv.view(kept, dims_of(result)) if unbind else kept)
        start += width
    return parts


@HANDLERS.handles("getitem")
def getitem(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """One of several results."""
    return args[0][args[1]]


@HANDLERS.handles("aten.cat", "aten.stack")
def cat(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Values joined along an axis, a new one for stack. All tokens but the last, behind a row, are a shift."""
    dims = dims_of(_val(node))
    axis = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(dims)
    values: list[TracedValue] = args[0]
    if isinstance(values[-1], Shorter):
        return behind_a_row(conv, values, axis)
    if "stack" in op_name(node.target):
        values = [conv.view(v, (*v.dims[:axis], 1, *v.dims[axis:])) for v in values]
    return cat_parts(conv, values, axis, dims)


def cat_parts(conv: Conversion, values: list[TracedValue], axis: int, dims: Dims) -> TracedValue:
    """Values joined along a logical axis; a constant among values of tokens gets a row for each token."""
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
    dims = dims_of(_val(node))
    padded = (1,) * (len(dims) - len(value.dims)) + value.dims
    if any(c != 1 for c, d in zip(counts, padded, strict=True) if d is T):
        raise ValueError("a repetition along the token axis")
    per_feature = [c for c, d in zip(counts, padded, strict=True) if d is not T]
    value = conv.view(value, padded)
    lead = [1] if value.per_token else []
    return TracedValue(conv.emit(aten.repeat.default, value.node, [*lead, *per_feature]), dims)
