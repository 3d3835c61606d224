"""Turns the body of a pointwise kernel into C++ lines over sixteen-lane values, and its shapes into loops.

A body is SSA text, `t0 = mul a0 a1`, with the opcodes of `compiler/ops/pointwise.py`. Values are float (VF) or integer
(VI); booleans are integers 0 and 1. Mixed arithmetic is done in float, division and elementary functions always.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ...errors import CodegenError
from ..layouts.elements import C_TYPES
from .params import KernelParams

INTEGER_DTYPES = ("i32", "bool")
PIECE = 1024  # elements of the last axis that one thread takes at a time

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
class Value:
    """A C++ expression and its kind: "f" (VF), "i" (VI) or "b" (VI of 0 and 1)."""

    text: str
    kind: str

    def as_float(self) -> str:
        return self.text if self.kind == "f" else f"to_float({self.text})"

    def as_int(self) -> str:
        return f"to_int_trunc({self.text})" if self.kind == "f" else self.text

    def as_mask(self) -> str:
        return f"ne({self.text}, vf(0.0f))" if self.kind == "f" else f"is_true({self.text})"


def literal(text: str) -> Value:
    """A number; whole numbers written without a point are integers."""
    if text in ("True", "False"):
        return Value(f"vi({int(text == 'True')})", "b")
    if text.lstrip("-").isdigit():
        clamped = max(-(2**31) + 1, min(2**31 - 1, int(text)))
        return Value(f"vi({clamped})", "i")
    try:
        number = float(text)
    except ValueError:
        raise CodegenError(f"pointwise kernel: {text!r} is neither an operand nor a number") from None
    if math.isnan(number):
        return Value("vf(NAN)", "f")
    if number in (float("inf"), float("-inf")):
        return Value("vf(INFINITY)" if number > 0 else "vf(-INFINITY)", "f")
    return Value(f"vf({number!r}f)", "f")


def _numeric(opcode: str, args: list[Value], floats: list[str], ints: list[str], whole: bool) -> Value:
    """Opcodes that keep integers integers."""
    if opcode in ("maximum", "minimum"):
        name = "vmax" if opcode == "maximum" else "vmin"
        return Value(f"{name}({', '.join(ints if whole else floats)})", "i" if whole else "f")
    if opcode in ("floordiv", "remainder"):
        return Value(f"v{opcode}({', '.join(ints if whole else floats)})", "i" if whole else "f")
    if opcode == "pow":
        power = f"vpow({', '.join(floats)})"
        if args[1].text in ("vi(2)", "vf(2.0f)"):
            power = f"({floats[0]} * {floats[0]})"
        return Value(f"to_int_nearest({power})", "i") if whole else Value(power, "f")
    return Value(f"v{opcode}({args[0].text})", "i" if whole else "f")  # abs and sign


def apply(opcode: str, args: list[Value]) -> Value:
    """The value of one instruction."""
    floats = [a.as_float() for a in args]
    ints = [a.text for a in args]
    whole = all(a.kind != "f" for a in args)
    if opcode in FLOAT_FUNCTIONS:
        return Value(f"{FLOAT_FUNCTIONS[opcode]}({floats[0]})", "f")
    if opcode in OPERATORS:
        left, right = ints if whole else floats
        return Value(f"({left} {OPERATORS[opcode]} {right})", "i" if whole else "f")
    if opcode in COMPARISONS:
        left, right = ints if whole else floats
        return Value(f"to_bool({opcode}({left}, {right}))", "b")
    if opcode in ROUNDINGS:
        return args[0] if whole else Value(f"vround<{ROUNDINGS[opcode]}>({floats[0]})", "f")
    if opcode in NUMERIC:
        return _numeric(opcode, args, floats, ints, whole)
    if opcode == "where":
        left, right = args[1], args[2]
        both_whole = left.kind != "f" and right.kind != "f"
        kind = ("b" if left.kind == right.kind == "b" else "i") if both_whole else "f"
        sides = (left.text, right.text) if both_whole else (left.as_float(), right.as_float())
        return Value(f"select({args[0].as_mask()}, {sides[0]}, {sides[1]})", kind)
    simple = {
        "div": lambda: Value(f"({floats[0]} / {floats[-1]})", "f"),
        "neg": lambda: Value(f"(vi(0) - {ints[0]})", "i") if whole else Value(f"vneg({floats[0]})", "f"),
        "relu": lambda: apply("maximum", [args[0], Value("vi(0)", "i")]),
        "rsqrt": lambda: Value(f"(vf(1.0f) / vsqrt({floats[0]}))", "f"),
        "reciprocal": lambda: Value(f"(vf(1.0f) / {floats[0]})", "f"),
        "logical_and": lambda: Value(f"to_bool(both({args[0].as_mask()}, {args[1].as_mask()}))", "b"),
        "logical_or": lambda: Value(f"(to_bool({args[0].as_mask()}) | to_bool({args[1].as_mask()}))", "b"),
        "logical_not": lambda: Value(f"(vi(1) - to_bool({args[0].as_mask()}))", "b"),
        "to_f32": lambda: Value(floats[0], "f"),
        "to_i32": lambda: Value(args[0].as_int(), "i"),
        "to_bool": lambda: Value(f"to_bool({args[0].as_mask()})", "b"),
        "copy": lambda: args[0],
    }
    if opcode not in simple:
        raise CodegenError(f"pointwise kernel: no code for opcode {opcode!r}")
    return simple[opcode]()


@dataclass(frozen=True)
class Access:
    """One operand over the merged dims: element type, stride between rows, stride per dim."""

    dtype: str
    row_stride: int
    strides: tuple[int, ...]
    line_offset: str = "0"

    @property
    def ctype(self) -> str:
        return C_TYPES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class PointwiseParams(KernelParams):
    """What the template takes: merged dims, operand accesses and the loop body as C++ lines."""

    template: ClassVar[str] = "cpp/pointwise/pointwise.cpp.jinja"
    dims: tuple[int, ...]
    inputs: tuple[Access, ...]
    outputs: tuple[Access, ...]
    body: tuple[str, ...]
    piece: int = PIECE

    @property
    def lines(self) -> int:
        return math.prod(self.dims[:-1])


def _access(text: str) -> Access:
    dtype, row_stride, strides = text.split(":")
    return Access(dtype, int(row_stride), tuple(int(s) for s in strides.split(",") if s))


def _merge(dims: list[int], operands: list[Access]) -> tuple[tuple[int, ...], list[Access]]:
    """Drops dims of size 1 and joins neighbours that every operand walks with one stride."""
    keep = [d for d, size in enumerate(dims) if size != 1]
    sizes = [dims[d] for d in keep]
    strides = [[a.strides[d] for d in keep] for a in operands]
    d = len(sizes) - 2
    while d >= 0:
        if all(s[d] == s[d + 1] * sizes[d + 1] for s in strides):
            sizes[d : d + 2] = [sizes[d] * sizes[d + 1]]
            for s in strides:
                s[d : d + 2] = [s[d + 1]]
        d -= 1
    if not sizes:
        sizes, strides = [1], [[0 if i < len(operands) else 1] for i in range(len(operands))]
    merged = [
        Access(a.dtype, a.row_stride, tuple(s), _line_offset(sizes, s)) for a, s in zip(operands, strides, strict=True)
    ]
    return tuple(sizes), merged


def _line_offset(sizes: list[int], strides: list[int]) -> str:
    """C++ for where line number `line` (all dims but the last) starts."""
    terms, below = [], 1
    for d in range(len(sizes) - 2, -1, -1):
        if strides[d]:
            terms.append(f"line / {below} % {sizes[d]} * {strides[d]}")
        below *= sizes[d]
    return f"({' + '.join(terms)})" if terms else "0"


def pointwise_params(fn: str, params: dict[str, object]) -> PointwiseParams:
    """Build the template's params from `Kernel.params` (shape, inputs, body, outputs, rows)."""
    get = {key: value for key, value in params.items()}
    inputs = [_access(text) for text in get["inputs"]]  # type: ignore[union-attr]
    split = [text.split(":", 1) for text in get["outputs"]]  # type: ignore[union-attr]
    outputs = [_access(rest) for _, rest in split]
    dims = [int(d) for d in get["shape"]]  # type: ignore[union-attr]
    for access in inputs + outputs:
        if len(access.strides) != len(dims) or access.dtype not in C_TYPES:
            raise CodegenError(f"pointwise kernel {fn}: operand {access} does not fit shape {dims}")
    sizes, merged = _merge(dims, inputs + outputs)

    env: dict[str, Value] = {}
    lines: list[str] = []
    for i, access in enumerate(merged[: len(inputs)]):
        whole = access.dtype in INTEGER_DTYPES
        kind = {"i32": "i", "bool": "b"}.get(access.dtype, "f")
        lines.append(
            f"const {'VI' if whole else 'VF'} v{i} = load_{'i' if whole else 'f'}<{access.strides[-1]}>(a{i}, j, n);"
        )
        env[f"a{i}"] = Value(f"v{i}", kind)

    def operand(text: str) -> Value:
        return env[text] if text in env else literal(text)

    for line in get["body"]:  # type: ignore[union-attr]
        target, _, right = str(line).partition(" = ")
        opcode, *names = right.split()
        value = apply(opcode, [operand(name) for name in names])
        lines.append(f"const {'VF' if value.kind == 'f' else 'VI'} {target} = {value.text};")
        env[target] = Value(target, value.kind)
    for i, (access, (register, _)) in enumerate(zip(merged[len(inputs) :], split, strict=True)):
        value = operand(register)
        if access.dtype in INTEGER_DTYPES:
            text = f"to_bool({value.as_mask()})" if access.dtype == "bool" else value.as_int()
            lines.append(f"store_i<{access.strides[-1]}>(y{i}, j, n, {text});")
        else:
            lines.append(f"store_f<{access.strides[-1]}>(y{i}, j, n, {value.as_float()});")
    return PointwiseParams(
        fn=fn,
        rows=str(get.get("rows", "tokens")),
        dims=sizes,
        inputs=tuple(merged[: len(inputs)]),
        outputs=tuple(merged[len(inputs) :]),
        body=tuple(lines),
    )
