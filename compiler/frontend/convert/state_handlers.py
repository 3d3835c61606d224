"""How ops with a recurrent state become token-major."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...graph.graph import type_of
from ...ops import OPS
from .conversion import Conversion
from .table import HandlerTable
from .values import T, Value, dims_of

aten = torch.ops.aten
HANDLERS = HandlerTable()


@HANDLERS.handles("icc_trace.causal_conv")
def causal_conv(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, weight, bias = args
    return _convolve(conv, x, weight, bias, dims_of(node.meta["val"]))


def _convolve(conv: Conversion, x: Value, weight: Value, bias: Value | None, dims: Any) -> Value:
    """x[1, C, T] by weight[C, K], whose taps come first in the op."""
    if x.dims[0] != 1 or x.axis != 2 or not x.per_token or weight.per_token:
        raise ValueError(f"a convolution of a tensor of dims {x.dims}")
    channels, taps = weight.dims
    rows = conv.view(x, (x.dims[1], T)).node
    first = conv.emit(aten.permute.default, weight.node, [1, 0])
    out = conv.emit(OPS["causal_conv"].overload, rows, first, bias.node if bias else None, conv.next_layer())
    assert type_of(out).shape == (channels,) and taps > 1
    return conv.view(Value(out, (channels, T)), dims)
