"""Codes of 4 bits times rows of 8 (`--quant rtn4a8` and its like): kernels and interpreted plans against float64."""

from __future__ import annotations

import pytest
import torch
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.backends.triton.tiling.choice import Config
from icc.compiler.ops.body import Body
from icc.compiler.program.steps.linear import Columns, Epilogue
from icc.compiler.targets import TARGETS
from icc.compiler.weights.formats.float8 import Float8
from interpreting import make_kernel, run_kernel
from products import DTYPES, Forced, check, rows, weight
from races import detecting, shuffle
from sizes import soak
from test_w8a8 import row_parts
from torch import Tensor

TILE: Config = {"decode": 0, "m": 16, "n": 64, "warps": 4, "stages": 2, "splits": 1, "eight": 1}
GATED = Epilogue(Body.parse("t0 = silu a0; t1 = mul t0 a1"), (Columns(0, 1), Columns(17, 1)), 16)


def rounded(x: Tensor, target: str) -> Tensor:
    """Rows as products see them there, float64; made codes in float32, as kernels do it."""
    if TARGETS[target].float8:
        return Float8().decode(row_parts(x)).double()
    peak = x.float().abs().amax(-1, keepdim=True)
    return (x.float() * (127 / peak) + 0.5).floor().double() * (peak / 127)


@pytest.mark.parametrize(
    ("target", "kind", "group", "k", "epilogue", "splits"),
    [
        ("h100", "bf16", 128, 384, GATED, 1),
        ("a100", "f16", 64, 320, None, 2),
        ("a100", "bf16", 128, 128, GATED, 1),
        ("l4", "bf16", 32, 224, None, 1),
        *soak(
            ("h100", "f16", 128, 128, None, 1), ("b200", "bf16", 128, 640, GATED, 2), ("a100", "bf16", 32, 96, None, 1)
        ),
    ],
)
def test_products(target: str, kind: str, group: int, k: int, epilogue: Epilogue | None, splits: int) -> None:
    """Odd numbers of rows and columns, a bias, rows with a stride of their own."""
    torch.manual_seed(0)
    n, count = 33, 17
    w = weight((n, k), kind, 4, group)
    x, bias = rows(count, k, k + 8, kind, 1), torch.randn(n)
    width = n if epilogue is None else epilogue.width
    y = torch.full((count + 1, width), torch.nan, dtype=DTYPES[kind])
    facts = {"epilogue": epilogue} if epilogue else {}
    kernel = make_kernel(
        "linear_q", k=k, n=n, strides={"x": k + 8}, types=(kind, "u8", "f32", kind), stored=f"q4a8g{group}", **facts
    )  # fmt: skip
    with detecting(shuffle):
        specs = run_kernel(
            kernel, [x, w.packed, bias], [y], shape=Shape(count, False), sizes={"num_tokens": count},
            tuner=Forced({**TILE, "splits": splits, "k": group}, target),
        )  # fmt: skip
    assert [spec.entry for spec in specs[:2]] == ["linear_rows", "linear_w8a8"]
    found = rounded(x[:count, :k], target) @ w.values.T + bias.double()
    if epilogue is not None:
        found = torch.nn.functional.silu(found[:, :16]) * found[:, 17:]
    check(y, found, kind)
