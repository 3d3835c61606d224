"""Pointwise kernels against the op's reference in float64: every opcode, edge values, broadcasts and storage types."""

from __future__ import annotations

import pytest
import torch
from icc.compiler.backends.errors import CodegenError
from icc.compiler.backends.triton.kernels.body import TritonValue, translate
from icc.compiler.backends.triton.kernels.pointwise import column_offset
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.ops.body import Body, Number
from icc.compiler.ops.pointwise import OPCODES
from interpreting import make_kernel, run_kernel
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's warnings about NaN and infinities

TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i32": torch.int32}
BINARY = (
    "add", "sub", "mul", "div", "floordiv", "remainder", "pow", "maximum", "minimum", "eq", "ne", "lt", "le", "gt",
    "ge", "logical_and", "logical_or",
)  # fmt: skip
UNARY = [o for o in OPCODES if o not in BINARY and o != "where"]
WHOLE_UNARY = [o for o in UNARY if o not in ("silu", "gelu_erf", "gelu_tanh", "softplus")]  # torch refuses these
EDGES = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1e-6, -1e-4, 30.0, -30.0, torch.inf, -torch.inf, torch.nan])


def reference(inputs: list[Tensor], body: str, wide: bool = True) -> Tensor:
    """The body over float64 copies of the inputs (or over the inputs themselves)."""

    def literal(value: Number) -> Tensor:
        floats = torch.float64 if wide else torch.float32
        return torch.tensor(value, dtype=floats if isinstance(value, float) else None)

    def run(_: str, opcode: str, args: list[Tensor]) -> Tensor:
        return args[0].double() if opcode == "to_f32" and wide else OPCODES[opcode](*args)

    given = [t.double() if wide and t.is_floating_point() else t for t in inputs]
    return Body.parse(body).evaluate(given, literal, run)


def run(inputs: list[Tensor], body: str, kinds: list[str], out: str = "f32", rows: int = 3) -> Tensor:
    """The kernel's result [rows, ...]. inputs: [rows or 1, ...], broadcast to a common shape; 1 row means a constant.
    kinds: storage types."""
    shape = torch.broadcast_shapes(*(t.shape[1:] for t in inputs))
    stored = [t.to(TORCH[k]) for t, k in zip(inputs, kinds, strict=True)]
    walks = [t[0].expand(shape).stride() for t in stored]
    width = max(1, int(torch.Size(shape).numel())) + 3
    y = torch.full((rows, width), 77, dtype=TORCH[out])
    strides = {f"args.{i}": t.stride(0) if t.shape[0] > 1 else 0 for i, t in enumerate(stored)} | {"y": width}
    kernel = make_kernel(
        "pointwise", types=(*kinds, out), aligned=(False,) * (len(kinds) + 1), strides=strides, shape=tuple(shape),
        walks=(*walks, torch.empty(shape).stride()), body=Body.parse(body),
    )  # fmt: skip
    # a graph's integers may wrap; in other kernels only addresses are integers
    run_kernel(kernel, stored, [y], shape=Shape(16, False), wraps=out == "i32")
    assert (y[:, width - 3 :] == 77).all()
    return y[:, : width - 3].view(rows, *shape)


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-6, atol: float = 1e-30) -> None:
    expected = expected.expand(found.shape)
    if found.is_floating_point():
        torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=atol, equal_nan=True)
    else:
        assert torch.equal(found, expected.to(found.dtype))


def sample(opcode: str, rows: int, width: int) -> Tensor:
    """Values [rows, width] of all magnitudes, and the edge values."""
    torch.manual_seed(len(opcode))
    x = torch.randn(rows, width) * torch.logspace(-7, 1.3, width)
    x[0, : len(EDGES)] = EDGES
    return x


@pytest.mark.parametrize("opcode", UNARY)
def test_unary(opcode: str) -> None:
    x = sample(opcode, 3, 150)
    if opcode == "to_i32":
        x = x.nan_to_num(0, 1e5, -1e5)
    body = f"t0 = {opcode} a0"
    expected = reference([x], body)
    found = run([x], body, ["f32"], "i32" if opcode in ("to_i32", "to_bool") else "f32")
    tails = {"gelu_erf": 1e-6, "gelu_tanh": 1e-15}  # below -3, 1 + erf cancels, as in torch; exp's error grows
    close(found, expected, atol=tails.get(opcode, 1e-30))


@pytest.mark.parametrize("opcode", WHOLE_UNARY)
def test_unary_whole(opcode: str) -> None:
    x = torch.randint(-9, 9, (3, 19))
    body = f"t0 = {opcode} a0"
    expected = reference([x.int()], body)
    close(run([x], body, ["i32"], "f32" if expected.is_floating_point() else "i32"), expected)


@pytest.mark.parametrize("opcode", BINARY)
def test_binary(opcode: str) -> None:
    n = len(EDGES)
    pairs = torch.cat([torch.cartesian_prod(EDGES, EDGES), torch.randn(55, 2) * torch.logspace(-3, 3, 55)[:, None]])
    x, y = pairs[:, 0].repeat(3, 1), pairs[:, 1].repeat(3, 1)
    body = f"t0 = {opcode} a0 a1"
    found = run([x, y], body, ["f32", "f32"])
    expected = reference([x, y], body)
    if opcode in ("floordiv", "remainder", "pow"):  # float64 has other halfway cases and overflows
        expected = reference([x, y], body, wide=False)
    close(found, expected)
    assert found.shape == (3, n * n + 55)


@pytest.mark.parametrize("opcode", [o for o in BINARY if o != "div"])
def test_binary_whole(opcode: str) -> None:
    x, y = torch.randint(-9, 9, (3, 5, 7)).int(), torch.randint(1, 6, (3, 1, 7)).int()
    signs = torch.tensor([1, -1, 1, -1, 1])[:, None] if opcode in ("floordiv", "remainder", "mul") else 1
    body = f"t0 = {opcode} a0 a1"
    y = (y * signs).int()
    close(run([x, y], body, ["i32", "i32"], "i32"), reference([x, y], body))


def test_wrapping_whole() -> None:
    x = torch.tensor([[-(2**31), 7, -7, 2**31 - 1, 5, -3]]).int().repeat(3, 1)
    y = torch.tensor([[-1, 0, 0, 2, -1, 40]]).int().repeat(3, 1)
    assert run([x, y], "t0 = floordiv a0 a1", ["i32"] * 2, "i32")[0].tolist() == [-(2**31), 0, 0, 2**30 - 1, -5, -1]
    assert run([x, y], "t0 = remainder a0 a1", ["i32"] * 2, "i32")[0].tolist() == [0, 7, -7, 1, 0, 37]
    powers = torch.pow(x, y.clamp(min=0)).tolist()[0]
    assert run([x, y], "t0 = maximum a1 0; t1 = pow a0 t0", ["i32"] * 2, "i32")[0].tolist() == powers


CHAINS = {
    "literals": "t0 = gt a0 0.25; t1 = where t0 a0 -inf; t2 = minimum t1 1e39; t3 = maximum t2 -3",
    "powers": "t0 = abs a0; t1 = pow t0 3; t2 = pow t1 0.5; t3 = pow t2 -2; t4 = pow t3 1.7",
    "booleans": (
        "t0 = gt a0 0; t1 = lt a0 0.5; t2 = add t0 t1; t3 = mul t2 t1; t4 = logical_not t3; t5 = where t4 t0 False; "
        "t6 = add t5 1; t7 = mul t6 a0; t8 = where t5 1.5 t7"
    ),
    "constants": "t0 = add 1 2.5; t1 = copy 3; t2 = mul t0 t1; t3 = sub t2 a0; t4 = mul t3 -1e-40",
    "copy": "t0 = copy a0",
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_chain(name: str) -> None:
    x = torch.randn(3, 33)
    close(run([x], CHAINS[name], ["f32"]), reference([x], CHAINS[name], wide=name != "constants"), 4e-6)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_storage_types(kind: str) -> None:
    x, w = torch.randn(3, 2, 300).to(TORCH[kind]), torch.randn(1, 300)
    found = run([x, w], "t0 = silu a0; t1 = mul t0 a1", [kind, "f32"], kind)
    nearest = {"bf16": (2.0**-8, 1e-30), "f16": (2.0**-11, 2.0**-25)}[kind]  # f16 numbers may be subnormal
    close(found, torch.nn.functional.silu(x.double()) * w, *nearest)


def test_broadcasts_and_strides() -> None:
    body = "t0 = add a0 a1; t1 = mul t0 a2; t2 = sub t1 a3; t3 = add t2 a4"
    x, middle, constant, scalar = torch.randn(3, 4, 3, 6), torch.randn(3, 4, 1, 6), torch.randn(1, 3, 1), torch.randn(1)
    per_row = torch.randn(3, 2)[:, :1]
    found = run([x, middle, constant, scalar, per_row], body, ["f32"] * 5)
    close(found, reference([x, middle, constant, scalar, per_row[:, :, None, None]], body), 2e-5)
    wide = torch.randn(3, 8, 10)
    close(run([wide[:, ::2, 1:9:2]], "t0 = mul a0 2", ["f32"]), wide[:, ::2, 1:9:2] * 2)
    turned = torch.randn(3, 40, 30).transpose(1, 2)
    close(run([turned], "t0 = copy a0", ["f32"]), turned)


@pytest.mark.parametrize("cols", [1, 3, 1024, 1280, 1100])
def test_tiles(cols: int) -> None:
    x = torch.randn(5, cols)
    close(run([x, x], "t0 = mul a0 a1", ["f32", "f32"], rows=5), x.double() ** 2)


def test_scalars_of_rank_zero() -> None:
    x = torch.randn(40)
    close(run([x], "t0 = mul a0 2; t1 = add t0 1.5", ["f32"], rows=40), x.double() * 2 + 1.5)


def test_column_offset() -> None:
    assert column_offset((6, 4), (8, 1)) == "at // 4 * 8 + at % 4"
    assert column_offset((5, 6, 4), (0, 1, 0)) == "at // 4 % 6"


def test_gaps_are_named() -> None:
    with pytest.raises(CodegenError, match="'erfinv'"):
        translate(Body.parse("t0 = erfinv a0"), [TritonValue("x", "f")])
