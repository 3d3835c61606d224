"""Turns the body of a pointwise kernel into C++ lines over sixteen-lane values, and its shapes into loops.

Values are float (VF) or integer (VI); booleans are integers 0 and 1. Mixed arithmetic is done in float; division and
elementary functions always are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from ....ops.body import Body, Number
from ....program.steps.pointwise import Pointwise
from ....program.strides import Access
from ...errors import CodegenError
from ..layouts.elements import C_TYPES
from .base import KernelParams

INTEGER_DTYPES = ("i32", "bool")
PIECE = 1024  # elements of the last axis that a thread computes at a time

# opcode -> C++ over floats only
FLOAT_FUNCTIONS = {
    "exp": "vexp", "expm1": "vexpm1", "log": "vlog", "log1p": "vlog1p", "sin": "vsin", "cos": "vcos", "tan": "vtan",
    "tanh": "vtanh", "erf": "verf", "sigmoid": "vsigmoid", "silu": "vsilu", "gelu_erf": "vgelu_erf",
    "gelu_tanh": "vgelu_tanh", "softplus": "vsoftplus", "sqrt": "vsqrt",
}  # fmt: skip
ROUNDINGS = {
    "floor": "_MM_FROUND_TO_NEG_INF",
    "ceil": "_MM_FROUND_TO_POS_INF",
    "round": "_MM_FROUND_TO_NEAREST_INT",
    "trunc": "_MM_FROUND_TO_ZERO",
}
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
NUMERIC = ("maximum", "minimum", "floordiv", "remainder", "pow", "abs", "sign")
OPERATORS = {"add": "+", "sub": "-", "mul": "*"}


@dataclass(frozen=True)
class CppValue:
    """A C++ expression and its kind: "f" (VF), "i" (VI) or "b" (VI of 0 and 1)."""

    text: str
    kind: str

    def as_float(self) -> str:
        """The expression as a VF; masks become 0 and 1."""
        return self.text if self.kind == "f" else f"to_float({self.text})"

    def as_int(self) -> str:
        """The expression as a VI; floats are cut towards zero."""
        return f"to_int_trunc({self.text})" if self.kind == "f" else self.text

    def as_mask(self) -> str:
        """The expression as a mask of the lanes that are not 0."""
        return f"ne({self.text}, vf(0.0f))" if self.kind == "f" else f"is_true({self.text})"


def literal(value: Number) -> CppValue:
    """A number of the body."""
    if isinstance(value, bool):
        return CppValue(f"vi({int(value)})", "b")
    if isinstance(value, int):
        return CppValue(f"vi({max(-(2**31) + 1, min(2**31 - 1, value))})", "i")
    if math.isnan(value):
        return CppValue("vf(NAN)", "f")
    if math.isinf(value):
        return CppValue("vf(INFINITY)" if value > 0 else "vf(-INFINITY)", "f")
    return CppValue(f"vf({value!r}f)", "f")


def _numeric(opcode: str, args: list[CppValue], floats: list[str], ints: list[str], whole: bool) -> CppValue:
    """The value of an opcode that gives integers for integers."""
    if opcode in ("maximum", "minimum"):
        name = "vmax" if opcode == "maximum" else "vmin"
        return CppValue(f"{name}({', '.join(ints if whole else floats)})", "i" if whole else "f")
    if opcode in ("floordiv", "remainder"):
        return CppValue(f"v{opcode}({', '.join(ints if whole else floats)})", "i" if whole else "f")
    if opcode == "pow":
        power = f"vpow({', '.join(floats)})"
        if args[1].text in ("vi(2)", "vf(2.0f)"):
            power = f"({floats[0]} * {floats[0]})"
        return CppValue(f"to_int_nearest({power})", "i") if whole else CppValue(power, "f")
    return CppValue(f"v{opcode}({args[0].text})", "i" if whole else "f")  # abs and sign


def apply(opcode: str, args: list[CppValue]) -> CppValue:
    """The value of one instruction. CodegenError for an unknown opcode."""
    floats = [a.as_float() for a in args]
    ints = [a.text for a in args]
    whole = all(a.kind != "f" for a in args)
    if opcode in FLOAT_FUNCTIONS:
        return CppValue(f"{FLOAT_FUNCTIONS[opcode]}({floats[0]})", "f")
    if opcode in OPERATORS:
        left, right = ints if whole else floats
        return CppValue(f"({left} {OPERATORS[opcode]} {right})", "i" if whole else "f")
    if opcode in COMPARISONS:
        left, right = ints if whole else floats
        return CppValue(f"to_bool({opcode}({left}, {right}))", "b")
    if opcode in ROUNDINGS:
        return args[0] if whole else CppValue(f"vround<{ROUNDINGS[opcode]}>({floats[0]})", "f")
    if opcode in NUMERIC:
        return _numeric(opcode, args, floats, ints, whole)
    if opcode == "where":
        left, right = args[1], args[2]
        both_whole = left.kind != "f" and right.kind != "f"
        kind = ("b" if left.kind == right.kind == "b" else "i") if both_whole else "f"
        sides = (left.text, right.text) if both_whole else (left.as_float(), right.as_float())
        return CppValue(f"select({args[0].as_mask()}, {sides[0]}, {sides[1]})", kind)
    simple = {
        "div": lambda: CppValue(f"({floats[0]} / {floats[-1]})", "f"),
        "neg": lambda: CppValue(f"(vi(0) - {ints[0]})", "i") if whole else CppValue(f"vneg({floats[0]})", "f"),
        "relu": lambda: apply("maximum", [args[0], CppValue("vi(0)", "i")]),
        "rsqrt": lambda: CppValue(f"(vf(1.0f) / vsqrt({floats[0]}))", "f"),
        "reciprocal": lambda: CppValue(f"(vf(1.0f) / {floats[0]})", "f"),
        "logical_and": lambda: CppValue(f"to_bool(both({args[0].as_mask()}, {args[1].as_mask()}))", "b"),
        "logical_or": lambda: CppValue(f"(to_bool({args[0].as_mask()}) | to_bool({args[1].as_mask()}))", "b"),
        "logical_not": lambda: CppValue(f"(vi(1) - to_bool({args[0].as_mask()}))", "b"),
        "to_f32": lambda: CppValue(floats[0], "f"),
        "to_i32": lambda: CppValue(args[0].as_int(), "i"),
        "to_bool": lambda: CppValue(f"to_bool({args[0].as_mask()})", "b"),
        "copy": lambda: args[0],
    }
    if opcode not in simple:
        raise CodegenError(f"pointwise kernel: no code for opcode {opcode!r}")
    return simple[opcode]()


@dataclass(frozen=True)
class Walk:
    """One operand as the loops walk it: C++ element type, and strides between rows, lines and elements of a line."""

    ctype: str
    row_stride: int
    line_offset: str  # C++ expression for the start of line number `line` (all dims but the last)
    strides: tuple[int, ...]

    @staticmethod
    def of(access: Access, dims: tuple[int, ...]) -> Walk:
        """The walk of an operand over iteration dims `dims` (at least one); its strides are broadcast to them."""
        return Walk(C_TYPES[access.dtype], access.row_stride, _line_offset(dims, access.strides), access.strides)


@dataclass(frozen=True)
class PointwiseParams(KernelParams[Pointwise]):
    """The loops over lines of the last dim, in chunks, and their body as C++ lines."""

    template: ClassVar[str] = "cpp/pointwise/pointwise.cpp.jinja"
    piece: ClassVar[int] = PIECE

    @cached_property
    def _walk(self) -> tuple[tuple[int, ...], tuple[Access, ...]]:
        """Shape and operands; a shape of one element is one line."""
        shape, accesses = self.step.normal_form()
        if shape:
            return shape, accesses
        return (1,), tuple(replace(access, strides=(0,)) for access in accesses)

    @property
    def dims(self) -> tuple[int, ...]:
        """The dims per row that the loops go over, merged as far as the operands allow; at least one."""
        return self._walk[0]

    @property
    def inputs(self) -> tuple[Walk, ...]:
        """The operands that are read."""
        return tuple(Walk.of(access, self.dims) for access in self._walk[1][:-1])

    @property
    def output(self) -> Walk:
        """The operand that is written."""
        return Walk.of(self._walk[1][-1], self.dims)

    @property
    def body(self) -> tuple[str, ...]:
        """The C++ lines that compute one chunk of a line."""
        *inputs, output = self._walk[1]
        return tuple(_lines(self.step.body, inputs, output))

    @property
    def lines(self) -> int:
        """Lines of a row: the product of all dims but the last."""
        return math.prod(self.dims[:-1])


def _line_offset(dims: Sequence[int], strides: Sequence[int]) -> str:
    terms, below = [], 1
    for d in range(len(dims) - 2, -1, -1):
        if strides[d]:
            terms.append(f"line / {below} % {dims[d]} * {strides[d]}")
        below *= dims[d]
    return f"({' + '.join(terms)})" if terms else "0"


def _lines(body: Body, inputs: Sequence[Access], output: Access) -> Iterator[str]:
    """C++ that loads the inputs into v<i>, computes the registers and stores the last."""
    arguments = []
    for i, access in enumerate(inputs):
        whole = access.dtype in INTEGER_DTYPES
        yield f"const {'VI' if whole else 'VF'} v{i} = load_{'i' if whole else 'f'}<{access.strides[-1]}>(a{i}, j, n);"
        arguments.append(CppValue(f"v{i}", {"i32": "i", "bool": "b"}.get(access.dtype, "f")))
    lines = []

    def assign(register: str, opcode: str, args: list[CppValue]) -> CppValue:
        value = apply(opcode, args)
        lines.append(f"const {'VF' if value.kind == 'f' else 'VI'} {register} = {value.text};")
        return CppValue(register, value.kind)

    result = body.evaluate(arguments, literal, assign)
    yield from lines
    if output.dtype in INTEGER_DTYPES:
        text = f"to_bool({result.as_mask()})" if output.dtype == "bool" else result.as_int()
        yield f"store_i<{output.strides[-1]}>(y0, j, n, {text});"
    else:
        yield f"store_f<{output.strides[-1]}>(y0, j, n, {result.as_float()});"
