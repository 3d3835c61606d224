"""Writes the opcodes of elementwise bodies as ONNX ops, with torch's type promotion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.body import Body, Number
from ..ops.pointwise import OPCODES
from .builder import Builder


@dataclass(frozen=True)
class Typed:
    """The name of an ONNX value, and a meta tensor of its dtype and shape, on which torch computes shapes and
    promotions."""

    name: str
    meta: Tensor


Emit = Callable[[Builder, list[str], torch.dtype], str]


def _plain(op: str) -> Emit:
    return lambda b, args, dtype: b.add(op, *args)


def _truncated(b: Builder, args: list[str], dtype: torch.dtype) -> str:
    return b.add("Mul", b.add("Sign", *args), b.add("Floor", b.add("Abs", *args)))


def _floordiv(b: Builder, args: list[str], dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return b.add("Floor", b.add("Div", *args))
    return b.add("Div", b.add("Sub", args[0], b.add("Mod", *args)), args[1])  # ONNX rounds towards zero


def _remainder(b: Builder, args: list[str], dtype: torch.dtype) -> str:
    """The remainder with the divisor's sign; Mod has this sign for integers only."""
    if not dtype.is_floating_point:
        return b.add("Mod", *args)
    return b.add("Sub", args[0], b.add("Mul", b.add("Floor", b.add("Div", *args)), args[1]))


def _expm1(b: Builder, args: list[str], dtype: torch.dtype) -> str:
    """2 t / (1 - t) with t = tanh(x / 2) near 0, where exp(x) - 1 has no digits left."""
    t = b.add("Tanh", b.add("Mul", args[0], b.number(0.5)))
    near = b.add("Div", b.add("Mul", t, b.number(2.0)), b.add("Sub", b.number(1.0), t))
    far = b.add("Sub", b.add("Exp", args[0]), b.number(1.0))
    return b.add("Where", b.add("Less", b.add("Abs", args[0]), b.number(1.0)), near, far)


def _log1p(b: Builder, args: list[str], dtype: torch.dtype) -> str:
    """log(u) x / (u - 1) with u = 1 + x, which cancels the rounding of u (Kahan)."""
    u = b.add("Add", args[0], b.number(1.0))
    off = b.add("Sub", u, b.number(1.0))
    same = b.add("Equal", off, b.number(0.0))
    safe = b.add("Where", same, b.number(1.0), off)
    return b.add("Where", same, args[0], b.add("Div", b.add("Mul", b.add("Log", u), args[0]), safe))


def _gelu(approximate: str) -> Emit:
    return lambda b, args, dtype: b.add("Gelu", *args, approximate=approximate)


_SAME = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "pow": "Pow", "maximum": "Max", "minimum": "Min",
    "neg": "Neg", "abs": "Abs", "sign": "Sign", "exp": "Exp", "log": "Log", "sin": "Sin", "cos": "Cos", "tan": "Tan",
    "tanh": "Tanh", "erf": "Erf", "sigmoid": "Sigmoid", "relu": "Relu", "softplus": "Softplus", "sqrt": "Sqrt",
    "reciprocal": "Reciprocal", "floor": "Floor", "ceil": "Ceil", "round": "Round", "copy": "Identity",
}  # fmt: skip
_EMIT: dict[str, Emit] = {
    **{opcode: _plain(op) for opcode, op in _SAME.items()},
    "floordiv": _floordiv,
    "remainder": _remainder,
    "expm1": _expm1,
    "log1p": _log1p,
    "silu": lambda b, args, dtype: b.add("Mul", args[0], b.add("Sigmoid", args[0])),
    "gelu_erf": _gelu("none"),
    "gelu_tanh": _gelu("tanh"),
    "rsqrt": lambda b, args, dtype: b.add("Reciprocal", b.add("Sqrt", *args)),
    "trunc": _truncated,
}
_COMPARED = {"eq": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual"}
_LOGICAL = {"logical_and": "And", "logical_or": "Or", "logical_not": "Not"}
_CONVERTED = {"to_f32": torch.float32, "to_i32": torch.int32, "to_bool": torch.bool}


def emit_body(b: Builder, body: Body, arguments: list[Typed]) -> Typed:
    """Add the nodes of a body over `arguments`, and return its result, of the dtype that torch gives it."""

    def literal(value: Number) -> Typed:
        dtype = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float32
        return Typed(b.constant(value, dtype), torch.empty((), dtype=dtype, device="meta"))

    return body.evaluate(arguments, literal, lambda _, opcode, operands: _apply(b, opcode, operands))


def _apply(b: Builder, opcode: str, operands: list[Typed]) -> Typed:
    result = OPCODES[opcode](*(o.meta for o in operands))
    return Typed(_emitted(b, opcode, operands, result.dtype), result)


def _emitted(b: Builder, opcode: str, operands: list[Typed], dtype: torch.dtype) -> str:
    def cast(wanted: torch.dtype, chosen: list[Typed]) -> list[str]:
        return [o.name if o.meta.dtype == wanted else b.cast(o.name, wanted) for o in chosen]

    if opcode in _CONVERTED:
        return b.cast(operands[0].name, _CONVERTED[opcode])
    if opcode in _LOGICAL:
        return b.add(_LOGICAL[opcode], *cast(torch.bool, operands))
    if opcode == "where":
        return b.add("Where", *cast(torch.bool, operands[:1]), *cast(dtype, operands[1:]))
    if opcode in _COMPARED or opcode == "ne":
        common = _promoted(operands)
        if opcode == "ne":
            return b.add("Not", b.add("Equal", *cast(common, operands)))
        return b.add(_COMPARED[opcode], *cast(common, operands))
    if opcode not in _EMIT:
        raise ValueError(f"the opcode {opcode}")
    return _EMIT[opcode](b, cast(dtype, operands), dtype)


def _promoted(operands: list[Typed]) -> torch.dtype:
    """The dtype in which two operands are compared; booleans are compared as numbers."""
    found: Any = operands[0].meta
    dtype = torch.result_type(found, operands[1].meta)
    return torch.int32 if dtype == torch.bool else dtype
