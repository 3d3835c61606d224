"""Per-row products against float64: both layouts, vectors and tiles, own and shared matrices, every type."""

from __future__ import annotations

import pytest
import torch
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.targets import TARGETS
from interpreting import LIMITS, TUNER, make_kernel, run_kernel

TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
KINDS = {"f32": ("f32",) * 3, "bf16": ("bf16",) * 3, "mixed": ("bf16", "f32", "f32"), "f16": ("f16", "f16", "f32")}


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("rows", "batch", "m", "k", "n", "shared"),
    [(3, 2, 3, 9, 17, False), (2, 1, 18, 40, 33, False), (2, 3, 1, 300, 40, True), (40, 2, 1, 33, 20, True),
     (9, 1, 3, 64, 64, True), (1, 1, 70, 32, 32, True)],
)  # fmt: skip
def test_bmm(kinds: str, transposed: bool, rows: int, batch: int, m: int, k: int, n: int, shared: bool) -> None:
    torch.manual_seed(k)
    types = KINDS[kinds]
    a = torch.randn(rows, batch, m, k).to(TORCH[types[0]])
    b = torch.randn(1 if shared else rows, batch, *((n, k) if transposed else (k, n))).to(TORCH[types[1]])
    expected = a.double() @ (b.mT if transposed else b).double()
    poison = torch.full((rows, 3), torch.nan)
    flat = torch.cat([a.flatten(1), poison.to(a.dtype)], 1)
    right = b if shared else torch.cat([b.flatten(1), poison.to(b.dtype)], 1)
    c = torch.full((rows, batch * m * n + 3), 66, dtype=TORCH[types[2]])
    kernel = make_kernel(
        "bmm", batch=batch, m=m, k=k, n=n, b_transposed=transposed,
        strides={"a": flat.shape[1], "b": 0 if shared else right.shape[1], "c": c.shape[1]}, types=types,
        aligned=(False,) * 3,
    )  # fmt: skip
    run_kernel(kernel, [flat, right], [c], shape=Shape(max(rows, 16), False))
    found = c[:, : batch * m * n].view(expected.shape).double()
    tolerance = 2.0**-8 if types[2] == "bf16" else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert (c[:, batch * m * n :] == 66).all()


def test_phases_share_kernels() -> None:
    """Few rows use no tiles; with a matrix per row, the kernel does not depend on the phase."""

    def sources(b_row_stride: int) -> list[str]:
        kernel = make_kernel(
            "bmm", batch=4, m=1, k=128, n=512, strides={"a": 512, "b": b_row_stride, "c": 2048},
            types=("f32",) * 3, aligned=(True,) * 3,
        )  # fmt: skip
        return [kernel.launches(Shape(t, t < 512), LIMITS, TUNER)[0].source for t in (1, 8, 16, 512)]

    shared = sources(0)
    assert shared[0] == shared[1] and "total = dot(" not in shared[1] and "total = dot(" in shared[2]
    assert len(set(sources(4 * 128 * 512))) == 1


def test_reading_hides_arithmetic() -> None:
    """An A100 is bound by reads here: tiles of 128 columns win, because they read `a` fewer times."""
    kernel = make_kernel(
        "bmm", batch=1, m=64, k=128, n=256, strides={"a": 8192, "b": 32768, "c": 16384}, types=("bf16",) * 3,
        aligned=(True,) * 3,
    )  # fmt: skip
    [launch] = kernel.launches(Shape(64, False), LIMITS, Tuner(TARGETS["a100"]))
    assert launch.grid[1].constant == 2
