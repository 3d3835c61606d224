"""Handlers of ops with a recurrent state."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...graph.tensor_types import type_of
from ...ops import OPS
from .broadcasting import per_token
from .conversion import Conversion
from .table import Table
from .values import T, TracedValue, dims_of

aten = torch.ops.aten
HANDLERS = Table()


@HANDLERS.handles("icc_trace.causal_conv")
def causal_conv(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """icc_trace::causal_conv: x[1, C, T], weight[C, K] -> [1, C, T]."""
    x, weight, bias = args
    return convolve(conv, x, weight, bias, dims_of(node.meta["val"]))


def convolve(conv: Conversion, x: TracedValue, weight: TracedValue, bias: TracedValue | None, dims: Any) -> TracedValue:
    """Emit icc::causal_conv of x[1, C, T] by weight[C, K], which the op takes as [K, C]; bias[C] or None. ValueError if
    the weight depends on tokens."""
    if weight.per_token:
        raise ValueError("a convolution whose weight is none")
    channels, taps = weight.dims
    rows = rows_of(conv, x, 2)
    first = conv.emit(aten.permute.default, weight.node, [1, 0])
    out = conv.emit(OPS["causal_conv"].overload, rows, first, bias.node if bias else None, conv.next_layer())
    assert type_of(out).shape == (channels,) and taps > 1
    return conv.view(TracedValue(out, (channels, T)), dims)


@HANDLERS.handles("icc_trace.gated_scan")
def gated_scan(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """icc_trace::gated_scan: q, k[1, T, Hk, K], v[1, T, H, V] -> [1, T, H, V]."""
    q, k, v, decay, beta, delta = args
    operands = [rows_of(conv, value, 1) for value in (q, k, v, decay)]
    rate = None if beta is None else rows_of(conv, beta, 1)
    out = conv.emit(OPS["gated_scan"].overload, *operands, rate, delta, conv.next_layer())
    return conv.view(TracedValue(out, (T, *type_of(out).shape)), dims_of(node.meta["val"]))


@HANDLERS.handles("icc_trace.selective_scan")
def selective_scan(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """icc_trace::selective_scan: x, dt[1, C, T], a[C, N], b, c[1, N, T] -> [1, C, T]. ValueError where `a` depends on
    tokens."""
    x, dt, a, b, c = args
    if a.per_token:
        raise ValueError("a scan whose decay is no weight")
    rows = [rows_of(conv, value, 2) for value in (x, dt, b, c)]
    rates = conv.emit(aten.permute.default, a.node, [1, 0])
    out = conv.emit(OPS["selective_scan"].overload, *rows[:2], rates, *rows[2:], conv.next_layer())
    return conv.view(TracedValue(out, (*type_of(out).shape, T)), dims_of(node.meta["val"]))


@HANDLERS.handles("icc_trace.channel_scan")
def channel_scan(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """icc_trace::channel_scan: x, decay[1, T, C] -> [1, T, C]."""
    x, decay, maximum, start = args
    rows = rows_of(conv, x, 1)
    rate = None if decay is None else rows_of(conv, decay, 1)
    out = conv.emit(OPS["channel_scan"].overload, rows, rate, maximum, start, conv.next_layer())
    return conv.view(TracedValue(out, (T, *type_of(out).shape)), dims_of(node.meta["val"]))


def rows_of(conv: Conversion, value: TracedValue, axis: int) -> fx.Node:
    """The node [T, ..] of a value of one sequence, whose token axis is the logical axis `axis`.

    A constant gets a row for each token. ValueError if the token axis is another, or if there are several sequences.
    """
    if len(value.dims) <= axis or value.dims[0] != 1 or value.axis != axis:
        raise ValueError(f"a scan over a tensor of dims {value.dims}")
    value = per_token(conv, value, value.dims)
    return conv.view(value, value.dims[1:]).node
