"""Reductions, softmax and running sums against torch in float64: odd sizes, strided rows, NaN and infinities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.ops.rowwise import REDUCTIONS
from interpreting import make_kernel, run_kernel
from sizes import soak
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's warnings about NaN and infinities

TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i32": torch.int32}
# relative: half a unit in the last place of 16-bit types
TOLERANCE = {"f32": 1e-5, "bf16": 2.0**-8, "f16": 2.0**-11, "i32": 0.0}
SHAPE = Shape(16, False)


def draw(*shape: int, kind: str = "f32", extra: int = 5) -> tuple[Tensor, Tensor]:
    """Random rows with unused NaN elements between them: (all of it [rows, width], the values [rows, *shape[1:]])."""
    torch.manual_seed(sum(shape))
    values = torch.randint(-9, 9, shape) if kind == "i32" else torch.randn(shape)
    values = values.to(TORCH[kind])
    flat = torch.full((shape[0], values[0].numel() + extra), 99 if kind == "i32" else torch.nan, dtype=TORCH[kind])
    flat[:, : values[0].numel()] = values.flatten(1)
    return flat, values


def run(name: str, flat: Tensor, kind: str, out_shape: tuple[int, ...], out_kind: str = "", **params: Any) -> Tensor:
    """The kernel's result over padded rows; the padding must not be written."""
    out_kind = out_kind or kind
    width = torch.Size(out_shape[1:]).numel()
    y = torch.full((out_shape[0], width + 3), 77, dtype=TORCH[out_kind])
    strides = {"x": flat.shape[1], "y": width + 3}
    kernel = make_kernel(name, types=(kind, out_kind), aligned=(False, False), strides=strides, **params)
    run_kernel(kernel, [flat], [y], shape=SHAPE)
    assert (y[:, width:] == 77).all()
    return y[:, :width].view(out_shape)


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize(("rows", "outer", "n", "inner"), [(3, 2, 7, 3), (5, 1, 1, 1), (2, 3, 33, 1), (2, 1, 1100, 1)])
def test_reduce(op: str, rows: int, outer: int, n: int, inner: int) -> None:
    if op == "prod" and n > 100:
        n = 40
    flat, x = draw(rows, outer, n, inner)
    sizes = {"outer": outer, "n": n, "inner": inner}
    found = run("reduce", flat, "f32", (rows, outer, inner), "i32" if op == "argmax" else "f32", reduction=op, **sizes)
    torch.testing.assert_close(found.double(), REDUCTIONS[op](x.double(), 2).double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", ["sum", "amax", "amin", "prod", "argmax"])
def test_reduce_whole(op: str) -> None:
    flat, x = draw(3, 2, 5, kind="i32")
    assert torch.equal(run("reduce", flat, "i32", (3, 2), reduction=op, outer=2, n=5), REDUCTIONS[op](x, 2).int())


@pytest.mark.parametrize("op", ["amax", "amin", "argmax"])
def test_reduce_edges(op: str) -> None:
    """NaN wins, the first of equal values is taken, and -0.0 equals 0.0."""
    x = torch.tensor(
        [[1.0, torch.nan, torch.inf, torch.nan], [-0.0, 0.0, -1.0, 0.0], [-torch.inf] * 4,
         [torch.inf, 2.0, torch.inf, -torch.inf], [-3.0, -2.0, -2.0, -5.0]]
    )  # fmt: skip
    found = run("reduce", x, "f32", (5, 1), "i32" if op == "argmax" else "f32", reduction=op, outer=1, n=4)[:, 0]
    torch.testing.assert_close(found.double(), REDUCTIONS[op](x, 1).double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_reduce_storage(kind: str) -> None:
    flat, x = draw(3, 2, 65, kind=kind)
    found = run("reduce", flat, kind, (3, 2), "f32", reduction="sum", outer=2, n=65)
    torch.testing.assert_close(found.double(), x.double().sum(2), rtol=1e-5, atol=1e-5)
    found = run("reduce", flat, kind, (3, 2), reduction="amax", outer=2, n=65)
    assert torch.equal(found, x.amax(2))


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(("rows", "outer", "n"), [(3, 2, 17), (1, 1, 64), (9, 3, 1), (2, 2, 8200)])
def test_softmax(kind: str, rows: int, outer: int, n: int) -> None:
    flat, x = draw(rows, outer, n, kind=kind)
    found = run("softmax", flat, kind, (rows, outer, n), outer=outer, n=n)
    torch.testing.assert_close(found.double(), torch.softmax(x.double(), -1), rtol=TOLERANCE[kind], atol=2e-7)


@pytest.mark.parametrize(
    ("kind", "rows", "outer", "n"), [("f32", 3, 3, 64), ("bf16", 2, 1, 1024), *soak(("f16", 17, 2, 16))]
)
def test_hadamard(kind: str, rows: int, outer: int, n: int) -> None:
    flat, x = draw(rows, outer, n, kind=kind)
    i = torch.arange(n)
    parity = sum((i[:, None] & i[None, :]) >> bit & 1 for bit in range(n.bit_length())) % 2
    expected = x.double() @ (1 - 2.0 * parity).double() / n**0.5
    found = run("hadamard", flat, kind, (rows, outer, n), outer=outer, n=n)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[kind], atol=1e-5)


def test_softmax_edges() -> None:
    x = torch.tensor([[1.0, -torch.inf, 300.0], [-torch.inf] * 3, [torch.nan, 1.0, 2.0], [torch.inf, 1.0, 2.0]])
    found = run("softmax", x, "f32", (4, 1, 3), outer=1, n=3)
    torch.testing.assert_close(found[:, 0], torch.softmax(x, -1), rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["f32", "bf16", "i32"])
@pytest.mark.parametrize(("rows", "outer", "n"), [(3, 2, 9), (2, 1, 4100)])
def test_cumsum(kind: str, rows: int, outer: int, n: int) -> None:
    flat, x = draw(rows, outer, n, kind=kind)
    found = run("cumsum", flat, kind, (rows, outer, n), outer=outer, n=n)
    torch.testing.assert_close(found.double(), x.double().cumsum(-1), rtol=TOLERANCE[kind], atol=5e-4)
