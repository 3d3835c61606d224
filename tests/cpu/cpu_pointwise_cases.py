"""Pointwise chains against the reference interpreter of the dialect, every opcode included."""

from __future__ import annotations

import numpy as np
import torch
from cpu_harness import Builder, Case
from icc.compiler.ops.body import Body
from icc.compiler.ops.pointwise import OPCODES
from icc.compiler.program.placed import contiguous
from icc.compiler.program.steps.pointwise import Pointwise

UNARY_RANGES = {"log": (0.01, 9.0), "log1p": (-0.9, 9.0), "sqrt": (0.0, 9.0), "rsqrt": (0.01, 9.0), "tan": (-1.2, 1.2)}
BINARY = (
    "add",
    "sub",
    "mul",
    "div",
    "floordiv",
    "remainder",
    "maximum",
    "minimum",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "logical_and",
    "logical_or",
)
INTEGER_UNARY = ("neg", "abs", "sign", "relu", "floor", "to_f32", "to_i32", "to_bool", "logical_not", "copy")
SKIPPED = ("where", "pow", *BINARY)


def reference(inputs: list[np.ndarray], body: str) -> torch.Tensor:
    """The body over float64 copies of the inputs."""
    tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in inputs]

    def literal(value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)

    def run(_: str, opcode: str, args: list[torch.Tensor]) -> torch.Tensor:
        return args[0].double() if opcode == "to_f32" else OPCODES[opcode](*args)

    wide = [t.double() if t.is_floating_point() else t for t in tensors]
    return Body.parse(body).evaluate(wide, literal, run)


def add_chain(
    b: Builder,
    name: str,
    shape: list[int],
    inputs: list[tuple[str, str, list[int], tuple[float, float]]],
    body: str,
    out: str = "f32",
    tolerance: float = 2e-6,
) -> None:
    """inputs: (kind "row" or "weight", dtype, own shape broadcast to `shape`, value range)."""
    walks, operands, feeds, fixed = [], [], {}, {}
    rng = np.random.default_rng(len(b.cases))
    for i, (kind, dtype, own, (low, high)) in enumerate(inputs):
        full = [1] * (len(shape) - len(own)) + own
        strides, step = [], 1
        for size in reversed(full):
            strides.insert(0, 0 if size == 1 else step)
            step *= size

        def draw(rng: np.random.Generator, rows: int, own=own, low=low, high=high, dtype=dtype) -> np.ndarray:
            x = rng.uniform(low, high, (rows, *own))
            return x.astype(np.float32) if dtype == "f32" else np.floor(x).astype(np.int32)

        walks.append(tuple(strides))
        if kind == "row":
            operands.append(b.buffer(f"{name}.in{i}", own, dtype))
            feeds[f"{name}.in{i}"] = draw
        else:
            fixed[i] = draw(rng, 1)
            operands.append(b.plain(f"{name}.w{i}", fixed[i][0], dtype))
    y = b.buffer(f"{name}.y", shape, out)
    walks.append(contiguous(tuple(shape)))
    b.step(Pointwise(args=tuple(operands), y=y, body=Body.parse(body), shape=tuple(shape), walks=tuple(walks)))

    def expect(a: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        arrays = []
        for i, (_, _, own, _) in enumerate(inputs):
            x = fixed.get(i, a.get(f"{name}.in{i}"))
            arrays.append(x.reshape(len(x), *([1] * (len(shape) - len(own))), *own))
        value = reference(arrays, body).numpy()
        return {y.name: np.broadcast_to(value, a[y.name].shape)}

    b.cases.append(Case(f"pointwise_{name}", feeds, expect, tolerance))


def add_pointwise(b: Builder) -> None:
    for opcode in OPCODES:
        if opcode not in SKIPPED:
            out = "i32" if opcode in ("to_i32", "to_bool", "logical_not") else "f32"
            low_high = UNARY_RANGES.get(opcode, (-12.0, 12.0))
            tolerance = 5e-6 if opcode in ("expm1", "exp") else 2e-6
            add_chain(b, opcode, [19], [("row", "f32", [19], low_high)], f"t0 = {opcode} a0", out, tolerance)
    for opcode in INTEGER_UNARY:
        out = "f32" if opcode == "to_f32" else "i32"
        add_chain(b, f"{opcode}_i32", [19], [("row", "i32", [19], (-9.0, 9.0))], f"t0 = {opcode} a0", out)
    for opcode in BINARY:
        two = [("row", "f32", [5, 7], (-4.0, 4.0)), ("row", "f32", [1, 7], (-4.0, 4.0))]
        add_chain(b, opcode, [5, 7], two, f"t0 = {opcode} a0 a1; t1 = to_f32 t0")
        whole = [("row", "i32", [3, 5], (-9.0, 9.0)), ("row", "i32", [3, 5], (1.0, 5.0))]
        if opcode != "div":
            add_chain(b, f"{opcode}_i32", [3, 5], whole, f"t0 = {opcode} a0 a1", "i32")
    x, wide = ("row", "f32", [2100], (-9.0, 9.0)), ("weight", "f32", [2100], (-1.0, 1.0))
    add_chain(b, "silu_mul", [2100], [x, x], "t0 = silu a0; t1 = mul t0 a1")
    add_chain(b, "weight", [2100], [x, wide], "t0 = mul a0 a1; t1 = gelu_tanh t0; t2 = mul t1 0.5")
    add_chain(b, "where", [33], [("row", "f32", [33], (-1.0, 1.0))], "t0 = gt a0 0.25; t1 = where t0 a0 -inf")
    add_chain(b, "pow", [9], [("row", "f32", [9], (0.1, 3.0))], "t0 = pow a0 3; t1 = pow t0 0.5; t2 = pow t1 2")
    add_chain(b, "pow_i32", [9], [("row", "i32", [9], (-9.0, 9.0))], "t0 = pow a0 3; t1 = pow t0 2", "i32")
    add_chain(
        b,
        "middle",
        [4, 3, 6],
        [
            ("row", "f32", [4, 3, 6], (-2.0, 2.0)),
            ("row", "f32", [4, 1, 6], (-2.0, 2.0)),
            ("weight", "f32", [3, 1], (-2.0, 2.0)),
        ],
        "t0 = add a0 a1; t1 = mul t0 a2",
    )
    add_chain(b, "scalar", [1], [("row", "f32", [1], (-2.0, 2.0))], "t0 = mul a0 2; t1 = add t0 1.5")
    add_chain(
        b,
        "mixed",
        [21],
        [("row", "i32", [21], (-9.0, 9.0)), ("row", "f32", [21], (-9.0, 9.0))],
        "t0 = mul a0 a1; t1 = lt a0 3; t2 = where t1 t0 a0; t3 = remainder t2 2.5",
    )
