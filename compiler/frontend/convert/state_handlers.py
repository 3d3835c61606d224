"""How ops with a recurrent state become token-major."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from ...graph.graph import type_of
from ...ops import OPS
from .aten_handlers import per_token
from .conversion import Conversion
from .table import Table
from .values import Longer, T, Value, dims_of

aten = torch.ops.aten
HANDLERS = Table()
MAX_SHIFT = 8  # tokens


@HANDLERS.handles("icc_trace.causal_conv")
def causal_conv(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, weight, bias = args
    return _convolve(conv, x, weight, bias, dims_of(node.meta["val"]))


@HANDLERS.handles("aten.convolution")
def convolution(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """One of each channel along the tokens, padded so that the outputs for the tokens see no later ones."""
    x, weight, bias, stride, padding, dilation, transposed, _, groups = args
    if weight.per_token or len(weight.dims) != 3 or weight.dims[1] != 1 or groups != weight.dims[0] or transposed:
        raise ValueError("a convolution that is not of each channel alone along the tokens")
    channels, _, taps = weight.dims
    if list(stride) != [1] or list(dilation) != [1] or list(padding) != [taps - 1] or taps < 2:
        raise ValueError(f"a convolution of {taps} taps with padding {padding}, stride {stride}, dilation {dilation}")
    return Longer(_convolve(conv, x, conv.view(weight, (channels, taps)), bias, (1, channels, T)))


def _convolve(conv: Conversion, x: Value, weight: Value, bias: Value | None, dims: Any) -> Value:
    """x[1, C, T] by weight[C, K], whose taps come first in the op."""
    if weight.per_token:
        raise ValueError("a convolution whose weight is none")
    channels, taps = weight.dims
    rows = _rows(conv, x, 2)
    first = conv.emit(aten.permute.default, weight.node, [1, 0])
    out = conv.emit(OPS["causal_conv"].overload, rows, first, bias.node if bias else None, conv.next_layer())
    assert type_of(out).shape == (channels,) and taps > 1
    return conv.view(Value(out, (channels, T)), dims)


@HANDLERS.handles("icc_trace.gated_scan")
def gated_scan(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    q, k, v, decay, beta, delta = args
    operands = [_rows(conv, value, 1) for value in (q, k, v, decay)]
    rate = None if beta is None else _rows(conv, beta, 1)
    out = conv.emit(OPS["gated_scan"].overload, *operands, rate, delta, conv.next_layer())
    return conv.view(Value(out, (T, *type_of(out).shape)), dims_of(node.meta["val"]))


@HANDLERS.handles("icc_trace.selective_scan")
def selective_scan(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, dt, a, b, c = args
    if a.per_token:
        raise ValueError("a scan whose decay is no weight")
    rows = [_rows(conv, value, 2) for value in (x, dt, b, c)]
    rates = conv.emit(aten.permute.default, a.node, [1, 0])
    out = conv.emit(OPS["selective_scan"].overload, *rows[:2], rates, *rows[2:], conv.next_layer())
    return conv.view(Value(out, (*type_of(out).shape, T)), dims_of(node.meta["val"]))


@HANDLERS.handles("icc_trace.channel_scan")
def channel_scan(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, decay, maximum, start = args
    rows = _rows(conv, x, 1)
    rate = None if decay is None else _rows(conv, decay, 1)
    out = conv.emit(OPS["channel_scan"].overload, rows, rate, maximum, start, conv.next_layer())
    return conv.view(Value(out, (T, *type_of(out).shape)), dims_of(node.meta["val"]))


@HANDLERS.handles("aten.constant_pad_nd")
def pad(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A shift along the tokens: as many zeros before the first as are cut off behind the last."""
    x, pads, fill = args[0], list(args[1]), args[2] if len(args) > 2 else 0
    axis = x.axis
    behind = 2 * (len(x.dims) - 1 - axis) if axis is not None else len(pads)
    by = pads[behind] if behind < len(pads) else 0
    expected = [0] * len(pads)
    if by > 0:
        expected[behind : behind + 2] = [by, -by]
    if axis is None or pads != expected or not 0 < by <= MAX_SHIFT or fill != 0:
        raise ValueError(f"padding by {pads} with {fill}, which is no shift along the tokens")
    rows = _rows(conv, x, axis)
    shape = type_of(rows).shape
    rows = conv.view(Value(rows, (T, *shape)), (T, prod(shape))).node
    for _ in range(by):
        rows = conv.emit(OPS["channel_scan"].overload, rows, None, False, 0.0, conv.next_layer())
    return conv.view(Value(rows, (T, *type_of(rows).shape)), dims_of(node.meta["val"]))


def _rows(conv: Conversion, value: Value, axis: int) -> fx.Node:
    """A value of one sequence whose tokens are at a logical axis, without its axis of sequences; constants are written
    out per token."""
    if len(value.dims) <= axis or value.dims[0] != 1 or value.axis != axis:
        raise ValueError(f"a scan over a tensor of dims {value.dims}")
    value = per_token(conv, value, value.dims)
    return conv.view(value, value.dims[1:]).node
