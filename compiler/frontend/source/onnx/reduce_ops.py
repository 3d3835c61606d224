"""Handlers of reductions, running sums and softmax."""

from __future__ import annotations

from typing import Any

import torch

from .errors import Refused
from .experts import one_hot
from .known import Known, elementwise
from .table import OnnxCall, Table

HANDLERS = Table()

_REDUCED = {"ReduceMean": "mean", "ReduceSum": "sum", "ReduceMax": "amax", "ReduceMin": "amin", "ReduceProd": "prod"}


@HANDLERS.handles(*_REDUCED)
def reduce(c: OnnxCall) -> Any:
    """ReduceSum, ReduceMean and similar ops, of a tensor or of a known value."""
    axes = c.axes(1)
    keep = bool(c.attribute("keepdims", 1))
    value = c.inputs[0]
    if isinstance(value, Known):
        return _known_reduction(c, value, axes, keep)
    if axes is None or not axes:
        if c.attribute("noop_with_empty_axes", 0):
            return value
        axes = list(range(value.dim()))
    kind = _REDUCED[c.node.op_type]
    if kind == "prod":
        for axis in sorted((a % value.dim() for a in axes), reverse=True):
            value = value.prod(axis, keepdim=keep)
        return value
    return getattr(value, kind)(axes, keepdim=keep)


def _known_reduction(c: OnnxCall, value: Known, axes: list[int] | None, keep: bool) -> Known:
    if axes is not None and len(axes) != value.array.ndim:
        raise Refused("a reduction of constants along some axes")
    items = value.items()
    combine = {"ReduceSum": "Add", "ReduceProd": "Mul", "ReduceMax": "Max", "ReduceMin": "Min"}.get(c.node.op_type)
    if combine is None or not items:
        raise Refused("the mean of constants")
    total = Known.of(items[0], value.dtype)
    for item in items[1:]:
        total = elementwise(combine, total, Known.of(item, value.dtype))
    return Known(total.array.reshape([1] * value.array.ndim), value.dtype) if keep else total


@HANDLERS.handles("ReduceL2")
def reduce_l2(c: OnnxCall) -> Any:
    """ReduceL2: the root of the sum of squares."""
    value, axes = c.tensor(0), c.axes(1)
    squares = (value * value).sum(axes, keepdim=bool(c.attribute("keepdims", 1)))
    return squares.sqrt()


@HANDLERS.handles("ArgMax")
def argmax(c: OnnxCall) -> Any:
    """ArgMax."""
    return c.tensor(0).argmax(c.attribute("axis", 0), keepdim=bool(c.attribute("keepdims", 1)))


@HANDLERS.handles("TopK")
def topk(c: OnnxCall) -> Any:
    """TopK, whose k must be known while tracing."""
    value, k = c.tensor(0), int(c.known(1).item())
    return list(torch.topk(value, k, c.attribute("axis", -1), bool(c.attribute("largest", 1))))


HANDLERS.handles("OneHot")(one_hot)


@HANDLERS.handles("CumSum")
def cumsum(c: OnnxCall) -> Any:
    """CumSum, inclusive and not reversed. For a padding mask of ones the result is the positions, counted from 1."""
    if c.attribute("exclusive", 0) or c.attribute("reverse", 0):
        raise Refused("a running sum of this kind")
    value, axis = c.tensor(0), int(c.known(1).item())
    if value.dim() == 2 and axis % 2 == 1 and _marks_no_padding(c):
        return torch.arange(1, value.shape[1] + 1, dtype=value.dtype, device=c.device)[None]
    return torch.cumsum(value, axis, dtype=value.dtype)


def _marks_no_padding(c: OnnxCall) -> bool:
    """Whether the operand marks the tokens that are not padding, which RoBERTa counts. There is no padding here."""
    found: OnnxCall | None = c
    while found is not None and (before := found.maker(0, "Cast")) is not None:
        found = before
    found = found and found.maker(0, "Not")
    found = found and found.maker(0, "Equal")
    return found is not None and found.is_input(0) and isinstance(found.inputs[1], Known)


@HANDLERS.handles("Softmax", "LogSoftmax")
def softmax(c: OnnxCall) -> Any:
    """Softmax and LogSoftmax."""
    value, axis = c.tensor(0), c.attribute("axis", -1)
    return torch.log_softmax(value, axis) if c.node.op_type == "LogSoftmax" else torch.softmax(value, axis)
