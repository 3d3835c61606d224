"""The body of a pointwise kernel as Triton lines.

Values are float32, int32 or boolean (int1) tensors of any shapes that broadcast; mixed arithmetic is done in float32,
division and elementary functions always. The lines call functions of `codegen_templates/triton/math.py.jinja`, which a
template includes after `common.py.jinja`; each line assigns the register it is named after.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ....ops.body import Body, Number
from ...errors import CodegenError

# opcode -> function of one float32 tensor
FLOAT_FUNCTIONS = {
    "exp": "tl.exp", "expm1": "expm1", "log": "tl.log", "log1p": "log1p", "sin": "sine", "cos": "cosine",
    "tan": "tangent", "tanh": "tanh", "erf": "tl.erf", "sigmoid": "sigmoid", "silu": "silu", "gelu_erf": "gelu_erf",
    "gelu_tanh": "gelu_tanh", "softplus": "softplus", "sqrt": "tl.sqrt_rn", "rsqrt": "tl.rsqrt",
}  # fmt: skip
ROUNDINGS = {"floor": "tl.floor", "ceil": "tl.ceil", "round": "round_even", "trunc": "truncate"}
OPERATORS = {"add": "+", "sub": "-", "mul": "*"}
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
EXTREMES = {"maximum": "tl.maximum", "minimum": "tl.minimum"}
# opcode -> function of two tensors: of float32, of int32
PAIRS = {
    "floordiv": ("floordiv", "int_floordiv"),
    "remainder": ("remainder", "int_remainder"),
    "pow": ("power", "int_power"),
}
# of booleans, torch adds and multiplies to booleans
BOOLEAN = {"add": "|", "mul": "&", "maximum": "|", "minimum": "&"}
# exponents that need no general power
POWERS = {
    1.0: "{0}", 2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", 4.0: "({0} * {0}) * ({0} * {0})", 0.5: "tl.sqrt_rn({0})",
    -0.5: "tl.rsqrt({0})", -1.0: "1.0 / {0}", -2.0: "1.0 / ({0} * {0})",
}  # fmt: skip


@dataclass(frozen=True)
class Value:
    """A Triton expression and its kind, "f" (float32), "i" (int32) or "b" (int1); `number` is set for literals."""

    text: str
    kind: str
    number: float | None = None

    @property
    def tensor(self) -> str:
        """As a tensor: methods and functions need one."""
        if self.number is None:
            return self.text
        return f"tl.full((), {self.text}, {({'f': 'tl.float32', 'i': 'tl.int32', 'b': 'tl.int1'})[self.kind]})"

    def to(self, kind: str) -> Value:
        """Converted to kind "f" or "i"; floats are truncated."""
        if kind == self.kind:
            return self
        if self.number is not None:
            return _number(self.number) if kind == "f" else _whole(int(self.number))
        return Value(f"{self.text}.to({'tl.float32' if kind == 'f' else 'tl.int32'})", kind)

    @property
    def mask(self) -> str:
        """Truth as torch has it: NaN is true."""
        return self.tensor if self.kind == "b" else f"({self.tensor} != 0)"


def _number(value: float) -> Value:
    """A float literal, rounded to float32 where Triton would otherwise make it a float64."""
    try:
        rounded = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        rounded = math.copysign(math.inf, value)
    if math.isnan(value) or math.isinf(rounded):
        return Value(f'float("{rounded}")', "f", rounded)
    if rounded != 0 and abs(rounded) < 2**-126:
        return Value(f"tl.full((), {rounded!r}, tl.float32)", "f")
    return Value(repr(rounded if abs(value) > 3e38 else value), "f", value)


def _whole(value: int) -> Value:
    clamped = max(-(2**31) + 1, min(2**31 - 1, value))
    return Value(str(clamped), "i", clamped)


def literal(value: Number) -> Value:
    """A number of the body."""
    if isinstance(value, bool):
        return Value(str(value), "b", float(value))
    return _whole(value) if isinstance(value, int) else _number(value)


def _pow(base: Value, exponent: Value, kind: str) -> Value:
    number = exponent.number
    if number in POWERS and (kind == "f" or number in (1, 2, 3, 4)):
        return Value(POWERS[number].format(base.to(kind).tensor), kind)
    return _pair("pow", [base, exponent], kind)


def _pair(opcode: str, args: Sequence[Value], kind: str) -> Value:
    function = PAIRS[opcode][kind == "i"]
    return Value(f"{function}({', '.join(a.to(kind).tensor for a in args)})", kind)


def _where(condition: Value, left: Value, right: Value) -> Value:
    kinds = left.kind + right.kind
    kind = "f" if "f" in kinds else "b" if kinds == "bb" else "i"
    return Value(f"tl.where({condition.mask}, {left.to(kind).text}, {right.to(kind).text})", kind)


def apply(opcode: str, args: Sequence[Value]) -> Value:
    """The value of one instruction, as an expression over its operands."""
    if all(a.number is not None for a in args):  # Triton would fold Python numbers instead of making a tensor
        args = [Value(args[0].tensor, args[0].kind), *args[1:]]
    kinds = {a.kind for a in args}
    kind = "f" if "f" in kinds else "i"
    first = args[0]
    if opcode in FLOAT_FUNCTIONS:
        return Value(f"{FLOAT_FUNCTIONS[opcode]}({first.to('f').tensor})", "f")
    if opcode in BOOLEAN and kinds == {"b"}:
        return Value(f"{first.tensor} {BOOLEAN[opcode]} {args[1].tensor}", "b")
    if opcode in OPERATORS or opcode in COMPARISONS:
        left, right = (a.to(kind).text for a in args)
        sign = (OPERATORS | COMPARISONS)[opcode]
        return Value(f"{left} {sign} {right}", "b" if opcode in COMPARISONS else kind)
    if opcode in EXTREMES:
        both = ", ".join(a.to(kind).text for a in args)
        return Value(f"{EXTREMES[opcode]}({both}, propagate_nan=tl.PropagateNan.ALL)", kind)
    if opcode in ROUNDINGS:
        return Value(f"{ROUNDINGS[opcode]}({first.tensor})", "f") if kind == "f" else first
    if opcode == "pow":
        return _pow(args[0], args[1], kind)
    if opcode in PAIRS:
        return _pair(opcode, args, kind)
    if opcode == "where":
        return _where(args[0], args[1], args[2])
    return _simple(opcode, args, kind)


def _simple(opcode: str, args: Sequence[Value], kind: str) -> Value:
    """Opcodes whose form is their own."""
    x = args[0]
    same = x if kind == "f" else x.to("i")
    if opcode == "div":
        return Value(f"{x.to('f').text} / {args[1].to('f').text}", "f")
    if opcode in ("logical_and", "logical_or"):
        return Value(f"{x.mask} {'&' if opcode == 'logical_and' else '|'} {args[1].mask}", "b")
    unary = {
        "neg": Value(f"{same.text} * -1{'.0' if kind == 'f' else ''}", kind),  # Triton's -x is 0 - x: 0.0 for 0.0
        "abs": Value(f"tl.abs({same.tensor})", kind),
        "sign": Value(f"sign_of({same.tensor})", kind),
        "relu": Value(f"tl.maximum({same.text}, 0, propagate_nan=tl.PropagateNan.ALL)", kind),
        "reciprocal": Value(f"1.0 / {x.to('f').text}", "f"),
        "logical_not": Value(f"~{x.mask}", "b"),
        "to_f32": x.to("f"),
        "to_i32": x.to("i"),
        "to_bool": Value(x.mask, "b"),
        "copy": x,
    }
    if opcode not in unary:
        raise CodegenError(f"pointwise body: no code for opcode {opcode!r}")
    return unary[opcode]


def translate(body: Body, arguments: Sequence[Value]) -> tuple[list[str], Value]:
    """The lines, and the result, given the inputs a<i>."""
    lines: list[str] = []

    def assign(register: str, opcode: str, args: list[Value]) -> Value:
        value = apply(opcode, args)
        lines.append(f"{register} = {value.tensor}")
        return Value(register, value.kind)

    return lines, body.evaluate(arguments, literal, assign)
