"""Handlers of elementwise ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .errors import Refused
from .known import Known, computes, elementwise, where
from .table import OnnxCall, Table

HANDLERS = Table()


@dataclass(frozen=True)
class NanTest:
    """Whether elements of `value` are NaN. Exporters test attention probabilities, which are NaN if a query sees no
    key; each query sees some key."""

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


def operand(c: OnnxCall, value: Any) -> Any:
    """A tensor unchanged; a known value of one element as a number."""
    if isinstance(value, Known) and value.is_one and value.array.ndim == 0:
        return value.item()
    return c.as_tensor(value)


def _elementwise(c: OnnxCall) -> Any:
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
            a, b = b, a  # the other ops are commutative
    return _BINARY[op](a, b)


def _divided(c: OnnxCall, a: Any, b: Any) -> Any:
    """Div; integers are rounded towards zero."""
    if not isinstance(a, Tensor) and a == 1 and (root := c.maker(1, "Sqrt")):
        return torch.rsqrt(root.tensor(0))
    floats = any(isinstance(v, float) or (isinstance(v, Tensor) and v.is_floating_point()) for v in (a, b))
    if not isinstance(a, Tensor):
        a = torch.full((), a, dtype=c.inputs[0].dtype, device=c.device)
    return torch.div(a, b) if floats else torch.div(a, b, rounding_mode="trunc")


for _name in (*_BINARY, *_UNARY, "Div"):
    HANDLERS.handles(_name)(_elementwise)


@HANDLERS.handles("Max", "Min", "Sum")
def extremum(c: OnnxCall) -> Any:
    """Max, Min and Sum of any number of operands, which broadcast."""
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
def clip(c: OnnxCall) -> Any:
    """Clip, whose bounds are operands or, in older opsets, attributes; either may be missing."""
    bounds = [c.attributes.get("min"), c.attributes.get("max")]
    for index in (1, 2):
        if c.given(index) is not None:
            bounds[index - 1] = c.known(index).item()
    return torch.clamp(c.tensor(0), *bounds)


@HANDLERS.handles("Mod")
def mod(c: OnnxCall) -> Any:
    """Mod whose result has the divisor's sign; Refused for the dividend's sign."""
    if c.all_known:
        return elementwise("Mod", *c.inputs)
    if c.attribute("fmod", 0):
        raise Refused("a remainder with the sign of the dividend")
    return torch.remainder(c.tensor(0), operand(c, c.inputs[1]))


@HANDLERS.handles("IsNaN")
def is_nan(c: OnnxCall) -> NanTest:
    """IsNaN, which is not computed but resolved in `where_`."""
    return NanTest(c.inputs[0])


@HANDLERS.handles("Where")
def where_(c: OnnxCall) -> Any:
    """Where. A test for NaN is resolved here: the tested value has none. Refused if another value was tested than the
    one that is kept."""
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


@HANDLERS.handles("Elu", "Celu")
def elu(c: OnnxCall) -> Any:
    """Elu and Celu."""
    curve = functional.elu if c.node.op_type == "Elu" else functional.celu
    return curve(c.tensor(0), c.attribute("alpha", 1.0))


@HANDLERS.handles("LeakyRelu")
def leaky_relu(c: OnnxCall) -> Any:
    """LeakyRelu."""
    return functional.leaky_relu(c.tensor(0), c.attribute("alpha", 0.01))


@HANDLERS.handles("HardSigmoid")
def hard_sigmoid(c: OnnxCall) -> Any:
    """HardSigmoid: alpha x + beta, between 0 and 1."""
    return torch.clamp(c.tensor(0) * c.attribute("alpha", 0.2) + c.attribute("beta", 0.5), 0.0, 1.0)


@HANDLERS.handles("Gelu", "com.microsoft.Gelu")
def gelu(c: OnnxCall) -> Any:
    """Gelu, exact or by tanh."""
    return functional.gelu(c.tensor(0), approximate=c.attribute("approximate", "none"))


@HANDLERS.handles("com.microsoft.FastGelu", "com.microsoft.BiasGelu")
def fast_gelu(c: OnnxCall) -> Any:
    """onnxruntime's FastGelu (by tanh) and BiasGelu (exact), with a bias before."""
    value = c.tensor(0) if c.given(1) is None else c.tensor(0) + c.tensor(1)
    return functional.gelu(value, approximate="tanh" if c.node.op_type == "FastGelu" else "none")


@HANDLERS.handles("Swish", "com.microsoft.QuickGelu")
def swish(c: OnnxCall) -> Any:
    """Swish and onnxruntime's QuickGelu: x sigmoid(alpha x)."""
    alpha = c.attribute("alpha", 1.0 if c.node.op_type == "Swish" else 1.702)
    value = c.tensor(0)
    return functional.silu(value) if alpha == 1.0 else value * torch.sigmoid(value * alpha)
