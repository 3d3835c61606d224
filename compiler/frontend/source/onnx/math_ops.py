"""Handlers of arithmetic, products, norms and reductions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .errors import Refused
from .known import Known, computes, elementwise, where
from .table import Call, Table

HANDLERS = Table()


@dataclass(frozen=True)
class NanTest:
    """Whether elements are NaN: of attention probabilities, which are where no key is seen; some key always is."""

    value: Any


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Pow": torch.pow,
    "And": torch.logical_and,
    "Or": torch.logical_or,
    "Equal": torch.eq,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
}
_UNARY: dict[str, Callable[..., Any]] = {
    "Neg": torch.neg,
    "Abs": torch.abs,
    "Sign": torch.sign,
    "Exp": torch.exp,
    "Log": torch.log,
    "Sin": torch.sin,
    "Cos": torch.cos,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
    "Erf": torch.erf,
    "Sigmoid": torch.sigmoid,
    "Relu": torch.relu,
    "Softplus": functional.softplus,
    "Sqrt": torch.sqrt,
    "Reciprocal": torch.reciprocal,
    "Floor": torch.floor,
    "Ceil": torch.ceil,
    "Round": torch.round,
    "Not": torch.logical_not,
    "Mish": functional.mish,
    "HardSwish": functional.hardswish,
}


def operand(c: Call, value: Any) -> Any:
    """A tensor, or the number that a known value of one element is."""
    if isinstance(value, Known) and value.is_one and value.array.ndim == 0:
        return value.item()
    return c.as_tensor(value)


def _elementwise(c: Call) -> Any:
    op = c.node.op_type
    if c.all_known and computes(op):
        return elementwise(op, *c.inputs)
    if op == "Reciprocal" and (root := c.maker(0, "Sqrt")):
        return torch.rsqrt(root.tensor(0))
    if op in _UNARY:
        return _UNARY[op](c.tensor(0))
    if op in ("And", "Or"):
        return _BINARY[op](*(c.as_tensor(v) for v in c.inputs))
    a, b = (operand(c, v) for v in c.inputs)
    if op == "Sub" and not isinstance(a, Tensor):
        return torch.rsub(b, a)
    if op == "Div":
        return _divided(c, a, b)
    if not isinstance(a, Tensor):
        if op in ("Pow", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"):
            a = torch.full((), a, dtype=c.inputs[0].dtype, device=c.device)
        else:
            a, b = b, a  # the rest are the same either way
    return _BINARY[op](a, b)


def _divided(c: Call, a: Any, b: Any) -> Any:
    """Whole numbers are rounded towards zero."""
    if not isinstance(a, Tensor) and a == 1 and (root := c.maker(1, "Sqrt")):
        return torch.rsqrt(root.tensor(0))
    floats = any(isinstance(v, float) or (isinstance(v, Tensor) and v.is_floating_point()) for v in (a, b))
    if not isinstance(a, Tensor):
        a = torch.full((), a, dtype=c.inputs[0].dtype, device=c.device)
    return torch.div(a, b) if floats else torch.div(a, b, rounding_mode="trunc")


for _name in (*_BINARY, *_UNARY, "Div"):
    HANDLERS.handles(_name)(_elementwise)


@HANDLERS.handles("Max", "Min", "Sum")
def extremum(c: Call) -> Any:
    op = c.node.op_type
    if c.all_known and computes(op):
        return elementwise(op, *c.inputs)
    values = [c.as_tensor(v) for v in c.inputs]
    combine = {"Max": torch.maximum, "Min": torch.minimum, "Sum": torch.add}[op]
    result = values[0]
    for other in values[1:]:
        result = combine(result, other)
    return result


@HANDLERS.handles("Clip")
def clip(c: Call) -> Any:
    bounds = [c.attributes.get("min"), c.attributes.get("max")]
    for index in (1, 2):
        if c.given(index) is not None:
            bounds[index - 1] = c.known(index).item()
    return torch.clamp(c.tensor(0), *bounds)


@HANDLERS.handles("Mod")
def mod(c: Call) -> Any:
    if c.all_known:
        return elementwise("Mod", *c.inputs)
    if c.attribute("fmod", 0):
        raise Refused("a remainder with the sign of the dividend")
    return torch.remainder(c.tensor(0), operand(c, c.inputs[1]))


@HANDLERS.handles("IsNaN")
def is_nan(c: Call) -> NanTest:
    return NanTest(c.inputs[0])


@HANDLERS.handles("Where")
def where_(c: Call) -> Any:
    condition, a, b = c.inputs
    if isinstance(condition, NanTest):
        if condition.value is not b:
            raise Refused("a test for NaN")
        return b
    if c.all_known:
        return where(condition, a, b)
    if isinstance(condition, Known) and condition.is_one and condition.array.ndim == 0:
        chosen = a if condition.item() else b
        shape = torch.broadcast_shapes(*(tuple(c.as_tensor(v).shape) for v in (a, b)))
        return c.as_tensor(chosen).expand(shape)
    return torch.where(c.as_tensor(condition), operand(c, a), operand(c, b))


@HANDLERS.handles("MatMul", "com.microsoft.FusedMatMul")
def matmul(c: Call) -> Any:
    a, b = c.tensor(0), c.tensor(1)
    if c.attribute("transA", 0):
        a = a.transpose(-1, -2)
    if c.attribute("transB", 0):
        b = b.transpose(-1, -2)
    if c.weights[1] and b.dim() == 2:
        result = functional.linear(a, b.t())
    else:
        result = torch.matmul(a, b)
    alpha = c.attribute("alpha", 1.0)
    return result if alpha == 1.0 else result * alpha


@HANDLERS.handles("Gemm")
def gemm(c: Call) -> Any:
    a, b, bias = c.tensor(0), c.tensor(1), c.given(2)
    alpha, beta = c.attribute("alpha", 1.0), c.attribute("beta", 1.0)
    a = a.t() if c.attribute("transA", 0) else a
    b = b if c.attribute("transB", 0) else b.t()
    plain = bias is None or (alpha == 1.0 and beta == 1.0 and c.as_tensor(bias).dim() == 1)
    if plain:
        result = functional.linear(a, b, None if bias is None else c.as_tensor(bias))
        return result if alpha == 1.0 else result * alpha
    result = functional.linear(a, b)
    result = result if alpha == 1.0 else result * alpha
    return result + (c.as_tensor(bias) if beta == 1.0 else c.as_tensor(bias) * beta)


@HANDLERS.handles("com.microsoft.MatMulNBits")
def matmul_nbits(c: Call) -> Any:
    weight = c.given(1)
    if not c.weights[1] or not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise Refused("packed weights that are no constants")
    bias = c.given(5)
    return functional.linear(c.tensor(0), weight, None if bias is None else c.as_tensor(bias))


@HANDLERS.handles("DequantizeLinear")
def dequantize(c: Call) -> Any:
    raise Refused("quantized activations: icc reads files with quantized weights")


@HANDLERS.handles("DynamicQuantizeLinear", "QuantizeLinear", "MatMulInteger", "QLinearMatMul")
def quantized(c: Call) -> Any:
    raise Refused("quantized activations: give the file with float or MatMulNBits weights")


_REDUCED = {"ReduceMean": "mean", "ReduceSum": "sum", "ReduceMax": "amax", "ReduceMin": "amin", "ReduceProd": "prod"}


@HANDLERS.handles(*_REDUCED)
def reduce(c: Call) -> Any:
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


def _known_reduction(c: Call, value: Known, axes: list[int] | None, keep: bool) -> Known:
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
def reduce_l2(c: Call) -> Any:
    value, axes = c.tensor(0), c.axes(1)
    squares = (value * value).sum(axes, keepdim=bool(c.attribute("keepdims", 1)))
    return squares.sqrt()


@HANDLERS.handles("ArgMax")
def argmax(c: Call) -> Any:
    return c.tensor(0).argmax(c.attribute("axis", 0), keepdim=bool(c.attribute("keepdims", 1)))


@HANDLERS.handles("TopK")
def topk(c: Call) -> Any:
    value, k = c.tensor(0), int(c.known(1).item())
    return list(torch.topk(value, k, c.attribute("axis", -1), bool(c.attribute("largest", 1))))


@HANDLERS.handles("CumSum")
def cumsum(c: Call) -> Any:
    if c.attribute("exclusive", 0) or c.attribute("reverse", 0):
        raise Refused("a running sum of this kind")
    return torch.cumsum(c.tensor(0), int(c.known(1).item()), dtype=c.tensor(0).dtype)


@HANDLERS.handles("Softmax", "LogSoftmax")
def softmax(c: Call) -> Any:
    value, axis = c.tensor(0), c.attribute("axis", -1)
    return torch.log_softmax(value, axis) if c.node.op_type == "LogSoftmax" else torch.softmax(value, axis)


@HANDLERS.handles("Elu", "Celu")
def elu(c: Call) -> Any:
    return functional.elu(c.tensor(0), c.attribute("alpha", 1.0))


@HANDLERS.handles("LeakyRelu")
def leaky_relu(c: Call) -> Any:
    return functional.leaky_relu(c.tensor(0), c.attribute("alpha", 0.01))


@HANDLERS.handles("HardSigmoid")
def hard_sigmoid(c: Call) -> Any:
    return torch.clamp(c.tensor(0) * c.attribute("alpha", 0.2) + c.attribute("beta", 0.5), 0.0, 1.0)


@HANDLERS.handles("Gelu", "com.microsoft.Gelu")
def gelu(c: Call) -> Any:
    return functional.gelu(c.tensor(0), approximate=c.attribute("approximate", "none"))


@HANDLERS.handles("com.microsoft.FastGelu", "com.microsoft.BiasGelu")
def fast_gelu(c: Call) -> Any:
    value = c.tensor(0) if c.given(1) is None else c.tensor(0) + c.tensor(1)
    return functional.gelu(value, approximate="tanh" if c.node.op_type == "FastGelu" else "none")


@HANDLERS.handles("Swish", "com.microsoft.QuickGelu")
def swish(c: Call) -> Any:
    alpha = c.attribute("alpha", 1.0 if c.node.op_type == "Swish" else 1.702)
    value = c.tensor(0)
    return functional.silu(value) if alpha == 1.0 else value * torch.sigmoid(value * alpha)


def _optional(c: Call, index: int) -> Tensor | None:
    return None if c.given(index) is None else c.tensor(index)


@HANDLERS.handles("LayerNormalization")
def layer_norm(c: Call) -> Any:
    value = c.tensor(0)
    if c.attribute("axis", -1) % value.dim() != value.dim() - 1:
        raise Refused("a norm over several axes")
    width = value.shape[-1]
    return functional.layer_norm(value, (width,), c.tensor(1), _optional(c, 2), c.attribute("epsilon", 1e-5))


@HANDLERS.handles("RMSNormalization", "SimplifiedLayerNormalization")
def rms_norm(c: Call) -> Any:
    value = c.tensor(0)
    if c.attribute("axis", -1) % value.dim() != value.dim() - 1:
        raise Refused("a norm over several axes")
    return functional.rms_norm(value, (value.shape[-1],), c.tensor(1), c.attribute("epsilon", 1e-5))


@HANDLERS.handles("com.microsoft.SkipLayerNormalization", "com.microsoft.SkipSimplifiedLayerNormalization")
def skip_norm(c: Call) -> Any:
    """(norm(input + skip + bias), mean, inverse deviation, input + skip + bias)."""
    simplified = "Simplified" in c.node.op_type
    total = c.tensor(0) + c.tensor(1)
    bias = _optional(c, 3 if simplified else 4)
    total = total if bias is None else total + bias
    eps, width = c.attribute("epsilon", 1e-12), (total.shape[-1],)
    if simplified:
        result = functional.rms_norm(total, width, c.tensor(2), eps)
    else:
        result = functional.layer_norm(total, width, c.tensor(2), _optional(c, 3), eps)
    return [result, None, None, total]
