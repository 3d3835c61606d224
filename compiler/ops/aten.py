"""Elementwise aten ops as instructions of `icc.pointwise`, so that generic fusion can compile them.

Each entry takes a `BodyWriter` and the op's operands (of the body, or numbers) and returns the result.
"""

from __future__ import annotations

from typing import Any

import torch

from .base import OPS, Cost, Instructions, Op, tensor_bytes
from .body import BodyWriter, Operand
from .traits import Traits


def _simple(opcode: str) -> Instructions:
    return lambda b, *args: b(opcode, *args)


def _clamp(b: BodyWriter, x: Any, low: Any = None, high: Any = None) -> Operand:
    if low is not None:
        x = b("maximum", x, low)
    return b("minimum", x, high) if high is not None else b("copy", x) if low is None else x


def _softplus(b: BodyWriter, x: Any, beta: Any = 1, threshold: Any = 20) -> Operand:
    if beta == 1:
        return b("softplus", x)
    return b("div", b("softplus", b("mul", x, float(beta))), float(beta))


def _leaky_relu(b: BodyWriter, x: Any, slope: float = 0.01) -> Operand:
    return b("where", b("gt", x, 0.0), x, b("mul", x, slope))


def _elu(b: BodyWriter, x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Operand:
    grown = b("mul", b("expm1", b("mul", x, float(input_scale))), float(alpha) * float(scale))
    return b("where", b("gt", x, 0.0), b("mul", x, float(scale)), grown)


def _pow(b: BodyWriter, x: Any, exponent: Any) -> Operand:
    if exponent == 2:
        return b("mul", x, x)
    if exponent == 3:
        return b("mul", b("mul", x, x), x)
    if exponent == 0.5:
        return b("sqrt", x)
    return b("pow", x, exponent)


# op name without overload -> builder
POINTWISE: dict[str, Instructions] = {
    **{f"aten.{n}": _simple(n) for n in ("mul", "neg", "abs", "sign", "exp", "expm1", "log", "log1p", "sin", "cos")},
    **{f"aten.{n}": _simple(n) for n in ("tan", "tanh", "erf", "sigmoid", "silu", "relu", "sqrt", "rsqrt", "floor")},
    **{f"aten.{n}": _simple(n) for n in ("ceil", "round", "trunc", "reciprocal", "maximum", "minimum", "where")},
    **{f"aten.{n}": _simple(n) for n in ("eq", "ne", "lt", "le", "gt", "ge", "remainder", "logical_not")},
    **{f"aten.{n}": _simple(n) for n in ("logical_and", "logical_or")},
    "aten.bitwise_and": _simple("logical_and"),
    "aten.bitwise_or": _simple("logical_or"),
    "aten.bitwise_not": _simple("logical_not"),
    "aten.floor_divide": _simple("floordiv"),
    "aten.pow": _pow,
    "aten.clamp": _clamp,
    "aten.clamp_min": lambda b, x, low: b("maximum", x, low),
    "aten.clamp_max": lambda b, x, high: b("minimum", x, high),
    "aten.hardtanh": lambda b, x, low=-1.0, high=1.0: _clamp(b, x, low, high),
    "aten.relu6": lambda b, x: _clamp(b, x, 0.0, 6.0),
    "aten.softplus": _softplus,
    "aten.leaky_relu": _leaky_relu,
    "aten.elu": _elu,
    "aten.rsub": lambda b, x, y, alpha=1: b("sub", y, x),
    "aten.square": lambda b, x: b("mul", x, x),
    "aten.masked_fill": lambda b, x, mask, value: b("where", mask, value, x),
    "aten.addcmul": lambda b, x, y, z: b("add", x, b("mul", y, z)),
    "aten.lerp": lambda b, x, y, w: b("add", x, b("mul", w, b("sub", y, x))),
    "aten.log_sigmoid": lambda b, x: b("neg", b("softplus", b("neg", x))),
    "aten.hardswish": lambda b, x: b("div", b("mul", x, _clamp(b, b("add", x, 3.0), 0.0, 6.0)), 6.0),
    "aten.hardsigmoid": lambda b, x: b("div", _clamp(b, b("add", x, 3.0), 0.0, 6.0), 6.0),
    "aten.mish": lambda b, x: b("mul", x, b("tanh", b("softplus", x))),
}

# ops with options that the frontend has normalized before
ARITHMETIC: dict[str, Instructions] = {
    "aten.add": _simple("add"),
    "aten.sub": _simple("sub"),
    "aten.div": _simple("div"),
}


def _conversion(b: BodyWriter, x: Any, dtype: torch.dtype) -> Operand:
    """The instruction that converts x to a dtype; in a kernel floats are float32 and integers int32."""
    return b("to_bool" if dtype == torch.bool else "to_f32" if dtype.is_floating_point else "to_i32", x)


_HOMOGENEOUS = {"add": (0, 1), "sub": (0, 1), "div": (0,), "neg": (0,), "abs": (0,), "relu": (0,), "leaky_relu": (0,)}


def _cost(x: torch.Tensor, *rest: object) -> Cost:
    return Cost(float(x.numel()), 2 * tensor_bytes(x))


def _declare(name: str, instructions: Instructions) -> None:
    """Declare an elementwise op under all its overloads; for arithmetic, those without a rounding mode."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten."))
    found = Traits(elementwise=True, homogeneous=_HOMOGENEOUS.get(name.removeprefix("aten."), ()))
    targets = (packet.Tensor, packet.Scalar) if name in ARITHMETIC else (packet,)
    OPS.add(Op(name, packet, packet, found, 0.0, instructions, _cost, doc=f"{name}, as torch has it."), *targets)


for _name, _instructions in {**POINTWISE, **ARITHMETIC}.items():
    _declare(_name, _instructions)

_convert = torch.ops.prims.convert_element_type.default
OPS.add(
    Op(
        "prims.convert_element_type", _convert, _convert, Traits(elementwise=True, homogeneous=(0,)), 0.0,
        _conversion, _cost, doc="The values in another element type.",
    )
)  # fmt: skip
