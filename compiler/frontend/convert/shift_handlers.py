"""Handlers that turn padding and convolutions along the tokens into ops with a state: a token sees some earlier
tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...graph.tensor_types import type_of
from .axis_handlers import cat_parts
from .conversion import Conversion
from .reduce_handlers import icc
from .shifts import shifted
from .state_handlers import convolve
from .table import Table
from .values import Longer, Padded, T, TracedValue

aten = torch.ops.aten
HANDLERS = Table()
MAX_SHIFT = 8  # tokens


@HANDLERS.handles("aten.constant_pad_nd")
def pad(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Zeros before the first token. A shift if as many tokens are cut off at the end. ValueError for other padding."""
    x, pads, fill = args[0], list(args[1]), args[2] if len(args) > 2 else 0
    axis = x.axis
    behind = 2 * (len(x.dims) - 1 - axis) if axis is not None else len(pads)
    by, cut = pads[behind : behind + 2] if behind < len(pads) else (0, 0)
    others = [*pads[:behind], *pads[behind + 2 :]]
    if axis is None or any(others) or cut not in (0, -by) or not 0 < by <= MAX_SHIFT or fill != 0:
        raise ValueError(f"padding by {pads} with {fill}, which is no shift along the tokens")
    if cut == 0:
        return Padded(x, by)
    return shifted(conv, x, by)


@HANDLERS.handles("aten.unfold")
def windows(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Sliding windows over tokens padded at the front: the window of a token ends with it. ValueError for other
    windows."""
    x, axis, size, step = args
    if not isinstance(x, Padded) or axis % len(x.value.dims) != x.value.axis or size != x.before + 1 or step != 1:
        raise ValueError("windows of tokens that do not end with each of them")
    rows = [shifted(conv, x.value, size - 1 - place, x.fill) for place in range(size)]
    dims = (*x.value.dims, 1)
    return cat_parts(conv, [conv.view(row, dims) for row in rows], len(dims) - 1, (*x.value.dims, size))


@HANDLERS.handles("aten.flip")
def flip(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Up to MAX_SHIFT elements of each token in reverse order. ValueError for more, and for the token axis."""
    value, (axis,) = args[0], args[1]
    axis %= len(value.dims)
    count = value.dims[axis]
    if count is T or count > MAX_SHIFT:
        raise ValueError("a longer axis in the other order")
    one = (*value.dims[:axis], 1, *value.dims[axis + 1 :])
    at = value.canonical(axis)
    parts = [
        TracedValue(conv.emit(aten.slice.Tensor, value.node, at, i, i + 1, 1), one) for i in reversed(range(count))
    ]
    return cat_parts(conv, parts, axis, value.dims)


@HANDLERS.handles("aten.convolution")
def convolution(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A causal convolution along the tokens, or one of each token alone (one tap).

    Either its own padding is cut off at the end, or its tokens were padded before. ValueError for other convolutions.
    """
    x, weight, bias, stride, padding, dilation, transposed, _, groups = args
    if weight.per_token or len(weight.dims) != 3 or transposed or list(stride) != [1] or list(dilation) != [1]:
        raise ValueError("a convolution with steps, or with a weight that is none")
    _, each, taps = weight.dims
    lone = each == 1 and groups == weight.dims[0] and taps > 1
    if isinstance(x, Padded):
        if list(padding) != [0] or x.before < taps - 1:
            raise ValueError(f"a convolution of {taps} taps behind padding by {x.before}")
        lone = lone and x.fill is None
        out = _of_each(conv, x.value, weight, bias) if lone else _of_groups(conv, x, weight, bias, groups)
        return _still_padded(x, taps, bias, out)
    if taps == 1 and list(padding) == [0]:
        return _of_groups(conv, Padded(x, 0), weight, bias, groups)
    if not lone or list(padding) != [taps - 1]:
        raise ValueError(f"a convolution of {taps} taps with padding {padding} in {groups} groups")
    return Longer(_of_each(conv, x, weight, bias))


def _still_padded(x: Padded, taps: int, bias: TracedValue | None, out: TracedValue) -> TracedValue | Padded:
    """The result of a convolution, with the rows that it leaves of the padding: zeros become the bias. ValueError if
    the padding is no zeros."""
    before = x.before - (taps - 1)
    if before and x.fill is not None:
        raise ValueError("padding for more than two convolutions")
    return Padded(out, before, bias) if before else out


def _of_each(conv: Conversion, x: TracedValue, weight: TracedValue, bias: TracedValue | None) -> TracedValue:
    """A depthwise convolution, weight[C, 1, taps]."""
    channels, _, taps = weight.dims
    return convolve(conv, x, conv.view(weight, (channels, taps)), bias, (1, channels, T))


def _of_groups(conv: Conversion, x: Padded, weight: TracedValue, bias: TracedValue | None, groups: int) -> TracedValue:
    """A convolution of groups of channels, weight[O, C / groups, taps]: the sum over taps of a product with the tokens
    shifted by the tap."""
    outputs, each, taps = weight.dims
    total: fx.Node | None = None
    for tap in range(taps):
        value = shifted(conv, x.value, taps - 1 - tap, x.fill)
        rows = conv.view(value, (T, groups, 1, each)).node
        matrix = conv.emit(aten.slice.Tensor, weight.node, 2, tap, tap + 1, 1)
        matrix = conv.emit(aten.view.default, matrix, [groups, outputs // groups, each])
        matrix = conv.emit(
            aten.view.default, conv.emit(aten.permute.default, matrix, [0, 2, 1]), [1, groups, each, outputs // groups]
        )
        product = conv.emit(icc("bmm"), rows, matrix)
        total = product if total is None else conv.emit(aten.add.Tensor, total, product)
    assert total is not None and type_of(total).shape == (groups, 1, outputs // groups)
    out = conv.view(TracedValue(total, (T, *type_of(total).shape)), (T, outputs)).node
    if bias is not None:
        out = conv.emit(aten.add.Tensor, out, bias.node)
    return conv.view(TracedValue(out, (T, outputs)), (1, outputs, T))
