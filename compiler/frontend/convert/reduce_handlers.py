"""Handlers of ops over a whole axis of each token, matrix products, norms, and ops without tensor operands."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ...graph.tensor_types import TOKENS, type_of
from ...ops import OPS
from .broadcasting import align, expand_to, val_of
from .conversion import Conversion
from .table import Table
from .values import T, TracedValue, dims_of, op_name

aten = torch.ops.aten
HANDLERS = Table()


def icc(name: str) -> Any:
    """The overload of an op of the dialect, by the op's name."""
    return OPS[name].overload


@HANDLERS.handles("aten.linear")
def linear(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The product of x [.., K] and a weight [N, K], plus a bias. ValueError if the weight depends on tokens."""
    x, weight = args[0], args[1]
    bias = args[2] if len(args) > 2 else None
    if weight.per_token:
        raise ValueError("a product whose right side depends on tokens")
    if weight.dims[1] == 0:  # the configuration gives this module width 0: its product is 0
        return expand_to(conv, bias or conv.constant("nothing", torch.zeros(weight.dims[0])), dims_of(val_of(node)))
    out = conv.emit(icc("linear"), x.node, weight.node, bias.node if bias is not None else None)
    return TracedValue(out, dims_of(val_of(node)))


@HANDLERS.handles("aten.addmm", "aten.mm", "aten.matmul", "aten.bmm", "aten.baddbmm")
def matmul(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A product of two values of each token, or of a value of each token and a weight. ValueError for alpha or beta
    other than 1."""
    name = str(node.target)
    bias, (a, b) = (args[0], args[1:3]) if "addmm" in name or "baddbmm" in name else (None, args[:2])
    if bias is not None and (kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1):
        raise ValueError("a scaled product")
    dims = dims_of(val_of(node))
    if a.per_token and not b.per_token and len(b.dims) == 2:
        turned = conv.emit(aten.permute.default, b.node, [1, 0])
        fused = bias is not None and not bias.per_token and len(bias.dims) == 1
        value = TracedValue(
            conv.emit(icc("linear"), a.node, turned, bias.node if bias is not None and fused else None), dims
        )
        return value if fused or bias is None else _add(conv, value, bias)
    value = _batched(conv, a, b, dims)
    return value if bias is None else _add(conv, value, bias)


def _add(conv: Conversion, value: TracedValue, bias: TracedValue) -> TracedValue:
    return TracedValue(conv.emit(aten.add.Tensor, value.node, align(conv, bias, value.dims)), value.dims)


def _batched(conv: Conversion, a: TracedValue, b: TracedValue, dims: tuple[Any, ...]) -> TracedValue:
    """A product with the token axis among the batch axes, or an outer product over constants."""
    rank = len(dims)
    for operand in (a, b):
        if operand.axis is not None and len(operand.dims) - operand.axis <= 2 and operand.per_token:
            return _token_in_matrix(conv, a, b, dims)
    left = a.node if a.per_token else align(conv, a, (*dims[:-2], *a.dims[-2:]))
    right = b.node if b.per_token else align(conv, b, (*dims[:-2], *b.dims[-2:]))
    if T in dims and len(a.dims) == len(b.dims) == rank:
        right_type = type_of(right)
        if right_type.rows is None and right_type.rank < rank:
            right = conv.emit(aten.view.default, right, [*(1,) * (rank - right_type.rank), *right_type.shape])
        return TracedValue(conv.emit(icc("bmm"), left, right), dims)
    raise ValueError("a matrix product of this form")


def _token_in_matrix(conv: Conversion, a: TracedValue, b: TracedValue, dims: tuple[Any, ...]) -> TracedValue:
    """Rotary frequencies [.., D, 1] @ [.., 1, T] are an outer product; [.., T, K] @ [.., K, N] and [.., N, K] @
    [.., K, T] are one row per token."""
    if a.dims[-1] == 1 and b.dims[-2] == 1:
        return TracedValue(conv.emit(aten.mul.Tensor, align(conv, a, dims), align(conv, b, dims)), dims)
    if a.dims[-2:][0] is T and not b.per_token:
        # [batch, T, K] @ [batch, K, N]: per token, each batch entry is a row vector times a matrix
        row = conv.view(a, (*a.dims[:-2], T, 1, a.dims[-1]))
        lead = type_of(b.node).shape
        matrix = conv.emit(aten.view.default, b.node, [1, *lead])
        out = TracedValue(conv.emit(icc("bmm"), row.node, matrix), (*dims[:-2], T, 1, dims[-1]))
        return conv.view(out, dims)
    if b.dims[-1] is T and not a.per_token:
        rank = type_of(a.node).rank
        turned = conv.emit(aten.permute.default, a.node, [*range(rank - 2), rank - 1, rank - 2])
        matrix = conv.emit(aten.view.default, turned, [*(1,) * (len(b.dims) - rank), 1, *type_of(turned).shape])
        row = conv.view(b, (*b.dims[:-2], 1, b.dims[-2], T))
        out = TracedValue(conv.emit(icc("bmm"), row.node, matrix), (*dims[:-2], 1, dims[-2], T))
        return conv.view(out, dims)
    raise ValueError("a matrix product that mixes tokens")


_REDUCTIONS = {"sum": "sum", "mean": "mean", "amax": "amax", "amin": "amin", "prod": "prod", "argmax": "argmax"}


@HANDLERS.handles(*(f"aten.{n}" for n in _REDUCTIONS), "aten.max", "aten.min")
def reduce(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A reduction over axes of each token. ValueError over the tokens."""
    value: TracedValue = args[0]
    name = op_name(node.target).split(".")[1]
    result = val_of(node)
    if name in ("max", "min"):
        if not isinstance(result, (tuple, list)):
            raise ValueError("a maximum over all tokens")
        values = _reduce_axes(conv, value, "a" + name, [args[1]])
        places = _reduce_axes(conv, value, "argmax", [args[1]]) if name == "max" else values
        return [conv.view(v, dims_of(r)) for v, r in zip((values, places), result, strict=True)]
    dims = args[1] if len(args) > 1 and args[1] is not None else list(range(len(value.dims)))
    axes = [dims] if isinstance(dims, int) else list(dims)
    source = value
    if name in ("sum", "mean") and not type_of(value.node).dtype.is_floating_point and result.dtype.is_floating_point:
        source = TracedValue(
            conv.emit(torch.ops.prims.convert_element_type.default, value.node, torch.float32), value.dims
        )
    return conv.view(_reduce_axes(conv, source, _REDUCTIONS[name], axes), dims_of(result))


@HANDLERS.handles("aten.linalg_vector_norm")
def vector_norm(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The sum of absolute values (p = 1), or the root of the sum of squares (p = 2). ValueError for other norms, and
    for those over all axes."""
    value, order, axes = args[0], args[1] if len(args) > 1 else 2, args[2] if len(args) > 2 else None
    if order not in (1, 2) or not axes:
        raise ValueError(f"a norm of order {order}")
    terms = (
        conv.emit(aten.abs.default, value.node) if order == 1 else conv.emit(aten.mul.Tensor, value.node, value.node)
    )
    total = _reduce_axes(conv, TracedValue(terms, value.dims), "sum", list(axes))
    if order == 2:
        total = TracedValue(conv.emit(aten.sqrt.default, total.node), total.dims)
    return conv.view(total, dims_of(val_of(node)))


def _reduce_axes(conv: Conversion, value: TracedValue, kind: str, axes: list[int]) -> TracedValue:
    for axis in sorted((a % len(value.dims) for a in axes), reverse=True):
        if value.dims[axis] is T:
            raise ValueError("a reduction over the tokens")
        out = conv.emit(icc("reduce"), value.node, kind, value.canonical(axis))
        value = TracedValue(out, value.dims[:axis] + value.dims[axis + 1 :])
    return value


@HANDLERS.handles("aten.var", "aten.var_mean")
def var(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The variance over axes of each token; for var_mean, (variance, mean)."""
    value: TracedValue = args[0]
    axes = [a % len(value.dims) for a in (args[1] if len(args) > 1 and args[1] is not None else [-1])]
    correction = kwargs.get("correction", 1)
    kept = tuple(1 if i in axes else d for i, d in enumerate(value.dims))
    mean = conv.view(_reduce_axes(conv, value, "mean", axes), kept)
    centred = conv.emit(aten.sub.Tensor, value.node, mean.node)
    squares = TracedValue(conv.emit(aten.mul.Tensor, centred, centred), value.dims)
    total = _reduce_axes(conv, squares, "sum", axes)
    count = math.prod(value.dims[a] for a in axes) - (1 if correction is None else correction)
    variance = TracedValue(conv.emit(aten.div.Tensor, total.node, float(count)), total.dims)
    result = val_of(node)
    if isinstance(result, (tuple, list)):
        return [conv.view(variance, dims_of(result[0])), conv.view(mean, dims_of(result[1]))]
    return conv.view(variance, dims_of(result))


def last_axis(conv: Conversion, value: TracedValue, axis: int) -> TracedValue:
    """`value`, if `axis` is its last axis and not the token axis; else ValueError. For ops that only work on the last
    axis."""
    if value.dims[axis] is T:
        raise ValueError("an op along the token axis")
    if axis % len(value.dims) != len(value.dims) - 1:
        raise ValueError("an op along an inner axis")
    return value


@HANDLERS.handles("aten._softmax", "aten.softmax", "aten._log_softmax", "aten.log_softmax")
def softmax(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """softmax and log_softmax over the last axis."""
    value = last_axis(conv, args[0], args[1])
    out = conv.emit(icc("softmax"), value.node)
    if "log" in op_name(node.target):
        out = conv.emit(aten.log.default, out)
    return TracedValue(out, value.dims)


@HANDLERS.handles("aten.cumsum")
def cumsum(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A running sum over the last axis. Over the tokens only for a constant: the result is the constant times (position
    + 1). ValueError for other sums over tokens."""
    value, axis = args[0], args[1] % len(args[0].dims)
    if value.dims[axis] is T:
        if value.per_token:
            raise ValueError("a running sum over the tokens")
        # the same number at every token: its running sum counts the tokens
        count = conv.emit(aten.add.Tensor, positions_of(conv), 1)
        feature = type_of(value.node).shape
        shaped = conv.emit(aten.view.default, count, [-1, *(1,) * len(feature)])
        return TracedValue(conv.emit(aten.mul.Tensor, shaped, value.node), value.dims)
    return TracedValue(conv.emit(icc("cumsum"), last_axis(conv, value, axis).node), value.dims)


def positions_of(conv: Conversion) -> fx.Node:
    """The graph's input of positions [T]."""
    found = conv.graph.input("positions")
    assert found is not None
    return found


@HANDLERS.handles("aten.arange")
def arange(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A range of numbers: the positions if its length is the number of tokens, else a constant. ValueError for a range
    over tokens that does not start at 0."""
    dims = dims_of(val_of(node))
    numbers = [a for a in args if not isinstance(a, torch.dtype)]
    if T not in dims:
        name = str(node.target)
        start = numbers[0] if "start" in name else 0
        step = numbers[2] if "step" in name and len(numbers) > 2 else 1
        value = torch.arange(start, start + step * dims[0], step, dtype=val_of(node).dtype)[: dims[0]]
        return conv.constant("arange", value)
    start = numbers[0] if len(numbers) > 1 else 0
    if start != 0 or (len(numbers) > 2 and numbers[2] != 1):
        raise ValueError("a range over tokens that does not count from 0")
    positions = TracedValue(positions_of(conv), (T,))
    if val_of(node).dtype.is_floating_point:
        out = conv.emit(torch.ops.prims.convert_element_type.default, positions.node, torch.float32)
        return TracedValue(out, (T,))
    return positions


@HANDLERS.handles(
    "aten.full",
    "aten.full_like",
    "aten.zeros",
    "aten.zeros_like",
    "aten.ones",
    "aten.ones_like",
    "aten.new_zeros",
    "aten.new_ones",
    "aten.new_full",
    "aten.scalar_tensor",
    "aten.empty",
    "aten.empty_like",
    "aten.new_empty",
)
def full(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A tensor filled with one number: a constant, which all tokens share. ValueError if it is filled with the number
    of tokens."""
    name = op_name(node.target).split(".")[1]
    fill: Any = 1 if "ones" in name else 0
    if name in ("full", "full_like"):
        fill = args[1]
    elif name == "new_full":
        fill = args[2]
    elif name == "scalar_tensor":
        fill = args[0]
    if isinstance(fill, torch.SymInt):
        raise ValueError("a tensor filled with the number of tokens")
    dims = dims_of(val_of(node))
    dtype = torch.float32 if val_of(node).dtype.is_floating_point else val_of(node).dtype
    value = torch.full([d for d in dims if d is not T], fill, dtype=dtype)
    return TracedValue(conv.constant(name, value).node, dims)


@HANDLERS.handles("aten.native_layer_norm", "aten.layer_norm")
def layer_norm(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A norm over the last axis; (norm, None, None) for the native op. ValueError over several axes."""
    value, shape = args[0], args[1]
    weight, bias = ([*args[2:4], None, None])[:2]
    eps = args[4] if len(args) > 4 else 1e-5
    if len(shape) != 1:
        raise ValueError("layer_norm over several axes")
    out = conv.emit(
        icc("layer_norm"), value.node, weight.node if weight else None, bias.node if bias else None, float(eps)
    )
    result = TracedValue(out, value.dims)
    return [result, None, None] if "native" in op_name(node.target) else result


@HANDLERS.handles("aten.rms_norm", "aten._fused_rms_norm")
def rms_norm(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A root-mean-square norm over the last axis; (norm, None) for the fused op."""
    value, weight = args[0], args[2] if len(args) > 2 else None
    eps = args[3] if len(args) > 3 and args[3] is not None else torch.finfo(torch.float32).eps
    out = TracedValue(conv.emit(icc("rms_norm"), value.node, weight.node if weight else None, float(eps)), value.dims)
    return [out, None] if "fused" in op_name(node.target) else out


@HANDLERS.handles("icc_trace.expert_linear")
def expert_linear(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """icc_trace::expert_linear: x[T, K] or [T, S, K], weight[E, N, K], index[T, S] -> [T, S, N]."""
    x, weight, bias, index_ = args
    out = conv.emit(icc("expert_linear"), x.node, weight.node, bias.node if bias else None, index_.node)
    assert type_of(out).rows == TOKENS
    return TracedValue(out, dims_of(val_of(node)))
