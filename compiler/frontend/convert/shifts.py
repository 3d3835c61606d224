"""Shifts along the tokens, emitted as ops whose state holds one row."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ...ops import OPS
from .conversion import Conversion
from .values import T, TracedValue

aten = torch.ops.aten


def behind_a_row(conv: Conversion, values: list[Any], axis: int) -> TracedValue:
    """A row that all sequences share, followed by all tokens but the last. ValueError for other concatenations."""
    value = values[-1].value
    if len(values) != 2 or axis != value.axis or values[0].per_token or values[0].dims[axis] != 1:
        raise ValueError("a concatenation along the token axis")
    return shifted(conv, value, 1, values[0])


def shifted(conv: Conversion, value: TracedValue, by: int, fill: TracedValue | None = None) -> TracedValue:
    """The value of the token `by` tokens before; `fill`, or zeros if it is None, for the first tokens.

    value: of one sequence, with its tokens along any axis. ValueError if it has no token axis.
    """
    if not value.per_token:
        raise ValueError(f"a shift of a tensor of dims {value.dims}")
    flat = conv.view(value, (T, prod(value.features)))
    start = None if fill is None else conv.view(fill, (prod(fill.dims),)).node
    rows = flat.node if start is None else conv.emit(aten.sub.Tensor, flat.node, start)
    for _ in range(by):
        rows = conv.emit(OPS["channel_scan"].overload, rows, None, False, 0.0, conv.next_layer())
    if start is not None:
        rows = conv.emit(aten.add.Tensor, rows, start)
    return conv.view(TracedValue(rows, flat.dims), value.dims)
