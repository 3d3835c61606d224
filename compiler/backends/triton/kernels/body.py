"""The body of a pointwise kernel as Triton lines.

Values are float32, int32 or boolean (int1) tensors of any shapes that broadcast; mixed arithmetic is done in float32;
division and elementary functions always are. The lines call functions of `codegen_templates/triton/math.py.jinja`,
which a template includes after `common.py.jinja`; each line assigns the register it is named after.
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
# for booleans: in torch their sums and products are booleans
BOOLEAN = {"add": "|", "mul": "&", "maximum": "|", "minimum": "&"}
# exponents that need no general power
POWERS = {
    1.0: "{0}", 2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", 4.0: "({0} * {0}) * ({0} * {0})", 0.5: "tl.sqrt_rn({0})",
    -0.5: "tl.rsqrt({0})", -1.0: "1.0 / {0}", -2.0: "1.0 / ({0} * {0})",
}  # fmt: skip


@dataclass(frozen=True)
class TritonValue:
    """A Triton expression and its kind, "f" (float32), "i" (int32) or "b" (int1); `number` is set for literals."""

    text: str
    kind: str
    number: float | None = None

    @property
    def tensor(self) -> str:
        """The expression as a tensor, which methods and functions of Triton need; literals are converted."""
        if self.number is None:
            return self.text
        return f"tl.full((), {self.text}, {({'f': 'tl.float32', 'i': 'tl.int32', 'b': 'tl.int1'})[self.kind]})"

    def to(self, kind: str) -> TritonValue:
        """Converted to kind "f" or "i"; floats are truncated."""
        if kind == self.kind:
            return self
        if self.number is not None:
            return _number(self.number) if kind == "f" else _whole(int(self.number))
        return TritonValue(f"{self.text}.to({'tl.float32' if kind == 'f' else 'tl.int32'})", kind)

    @property
    def mask(self) -> str:
        """The expression as a boolean; as in torch, NaN is true."""
        return self.tensor if self.kind == "b" else f"({self.tensor} != 0)"


def _number(value: float) -> TritonValue:
    """A float literal, rounded to float32 if Triton would otherwise make it a float64."""
    try:
        rounded = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        rounded = math.copysign(math.inf, value)
    if math.isnan(value) or math.isinf(rounded):
        return TritonValue(f'float("{rounded}")', "f", rounded)
    if rounded != 0 and abs(rounded) < 2**-126:
        return TritonValue(f"tl.full((), {rounded!r}, tl.float32)", "f")
    return TritonValue(repr(rounded if abs(value) > 3e38 else value), "f", value)


def _whole(value: int) -> TritonValue:
    clamped = max(-(2**31) + 1, min(2**31 - 1, value))
    return TritonValue(str(clamped), "i", clamped)


def literal(value: Number) -> TritonValue:
    """A number of the body."""
    if isinstance(value, bool):
        return TritonValue(str(value), "b", float(value))
    return _whole(value) if isinstance(value, int) else _number(value)


def _pow(base: TritonValue, exponent: TritonValue, kind: str) -> TritonValue:
    number = exponent.number
    if number in POWERS and (kind == "f" or number in (1, 2, 3, 4)):
        return TritonValue(POWERS[number].format(base.to(kind).tensor), kind)
    return _pair("pow", [base, exponent], kind)


def _pair(opcode: str, args: Sequence[TritonValue], kind: str) -> TritonValue:
    function = PAIRS[opcode][kind == "i"]
    return TritonValue(f"{function}({', '.join(a.to(kind).tensor for a in args)})", kind)


def _where(condition: TritonValue, left: TritonValue, right: TritonValue) -> TritonValue:
    kinds = left.kind + right.kind
    kind = "f" if "f" in kinds else "b" if kinds == "bb" else "i"
    return TritonValue(f"tl.where({condition.mask}, {left.to(kind).text}, {right.to(kind).text})", kind)


def apply(opcode: str, args: Sequence[TritonValue]) -> TritonValue:
    """The value of one instruction, as an expression over its operands."""
    if all(a.number is not None for a in args):  # Triton would fold Python numbers instead of making a tensor
        args = [TritonValue(args[0].tensor, args[0].kind), *args[1:]]
    kinds = {a.kind for a in args}
    kind = "f" if "f" in kinds else "i"
    first = args[0]
    if opcode in FLOAT_FUNCTIONS:
        return TritonValue(f"{FLOAT_FUNCTIONS[opcode]}({first.to('f').tensor})", "f")
    if opcode in BOOLEAN and kinds == {"b"}:
        return TritonValue(f"{first.tensor} {BOOLEAN[opcode]} {args[1].tensor}", "b")
    if opcode in OPERATORS or opcode in COMPARISONS:
        left, right = (a.to(kind).text for a in args)
        sign = (OPERATORS | COMPARISONS)[opcode]
        return TritonValue(f"{left} {sign} {right}", "b" if opcode in COMPARISONS else kind)
    if opcode in EXTREMES:
        both = ", ".join(a.to(kind).text for a in args)
        return TritonValue(f"{EXTREMES[opcode]}({both}, propagate_nan=tl.PropagateNan.ALL)", kind)
    if opcode in ROUNDINGS:
        return TritonValue(f"{ROUNDINGS[opcode]}({first.tensor})", "f") if kind == "f" else first
    if opcode == "pow":
        return _pow(args[0], args[1], kind)
    if opcode in PAIRS:
        return _pair(opcode, args, kind)
    if opcode == "where":
        return _where(args[0], args[1], args[2])
    return _simple(opcode, args, kind)


def _simple(opcode: str, args: Sequence[TritonValue], kind: str) -> TritonValue:
    """The value of an opcode with an expression of its own."""
    x = args[0]
    same = x if kind == "f" else x.to("i")
    if opcode == "div":
        return TritonValue(f"{x.to('f').text} / {args[1].to('f').text}", "f")
    if opcode in ("logical_and", "logical_or"):
        return TritonValue(f"{x.mask} {'&' if opcode == 'logical_and' else '|'} {args[1].mask}", "b")
    unary = {
        "neg": TritonValue(f"{same.text} * -1{'.0' if kind == 'f' else ''}", kind),  # Triton's -x is 0 - x: 0.0 for 0.0
        "abs": TritonValue(f"tl.abs({same.tensor})", kind),
        "sign": TritonValue(f"sign_of({same.tensor})", kind),
        "relu": TritonValue(f"tl.maximum({same.text}, 0, propagate_nan=tl.PropagateNan.ALL)", kind),
        "reciprocal": TritonValue(f"1.0 / {x.to('f').text}", "f"),
        "logical_not": TritonValue(f"~{x.mask}", "b"),
        "to_f32": x.to("f"),
        "to_i32": x.to("i"),
        "to_bool": TritonValue(x.mask, "b"),
        "copy": x,
    }
    if opcode not in unary:
        raise CodegenError(f"pointwise body: no code for opcode {opcode!r}")
    return unary[opcode]


def translate(body: Body, arguments: Sequence[TritonValue]) -> tuple[list[str], TritonValue]:
    """The source lines of a body, and its result, given the inputs a<i>."""
    lines: list[str] = []

    def assign(register: str, opcode: str, args: list[TritonValue]) -> TritonValue:
        value = apply(opcode, args)
        lines.append(f"{register} = {value.tensor}")
        return TritonValue(register, value.kind)

    return lines, body.evaluate(arguments, literal, assign)
