"""Operands that Triton would multiply wrongly are refused, and groups of 16 values are multiplied in pairs."""

from __future__ import annotations

import on_ptx
import pytest
import torch
from icc.compiler.backends.triton import interpreter
from icc.compiler.backends.triton.objects.compile import compile_specs
from icc.compiler.backends.triton.objects.operands import narrow_operands
from icc.compiler.backends.triton.spec import ONE, Arg, LaunchSpec, Shape
from icc.compiler.targets import TARGETS
from icc.runtime.format.plan import SizeArg
from interpreting import make_kernel, run_kernel
from products import Forced, check, rows
from test_few_rows import weight

LAYOUT = "#mma{n} = #ttg.nvidia_mma<{{versionMajor = {version}, versionMinor = 0, warpsPerCTA = [4, 1]}}>\n"
DOT = (
    "    %9 = tt.dot %7, %8, %6 : tensor<32x{k}xbf16, #ttg.dot_op<{{opIdx = 0, parent = #mma, kWidth = {width}}}>> * "
    "tensor<{k}x16xbf16, #ttg.dot_op<{{opIdx = 1, parent = #mma, kWidth = {width}}}>> -> tensor<32x16xf32, #mma>\n"
)
SOURCE = """import triton
import triton.language as tl


@triton.jit
def narrow(w_ptr, x_ptr, y_ptr):
    n, m, half, k = tl.arange(0, 32), tl.arange(0, 16), tl.arange(0, WIDE // 2), tl.arange(0, WIDE)
    code = tl.load(w_ptr + n[:, None] * (WIDE // 2) + half[None, :]).to(tl.int32)
    w = tl.reshape(tl.join((code & 15).to(tl.bfloat16), (code >> 4 & 15).to(tl.bfloat16)), (32, WIDE))
    x = tl.load(x_ptr + m[None, :] * WIDE + k[:, None])
    y = tl.dot(w, x, tl.zeros([32, 16], tl.float32))
    tl.store(y_ptr + n[:, None] * 16 + m[None, :], y)
"""


@pytest.mark.parametrize(
    ("k", "width", "version", "found"),
    [(16, 8, 2, ((16, 8),)), (32, 8, 2, ()), (16, 4, 2, ()), (16, 8, 3, ()), (32, 16, 2, ((32, 16),))],
)
def test_operands_wider_than_k(k: int, width: int, version: int, found: tuple[tuple[int, int], ...]) -> None:
    other = (
        f"    %5 = tt.broadcast %4 : tensor<32x1xf32, #ttg.dot_op<{{opIdx = 0, parent = #mma, kWidth = {width}}}>>\n"
    )
    ir = LAYOUT.format(n="", version=version) + other + DOT.format(k=k, width=width)
    assert narrow_operands(ir) == found


def test_triton_still_needs_the_check() -> None:
    """Triton makes such operands from 16 values in half bytes, but not from 32; once it no longer does, remove the
    check."""
    types = {"w_ptr": "*u8", "x_ptr": "*bf16", "y_ptr": "*fp32"}
    args = tuple(Arg(name, kind, SizeArg("num_tokens")) for name, kind in types.items())
    for wide, refused in ((16, True), (32, False)):
        spec = LaunchSpec(SOURCE.replace("WIDE", str(wide)), "narrow", args, (ONE, ONE, ONE))
        reasons: dict[str, str] = {}
        compile_specs([spec], TARGETS["a100"], refused=reasons)
        assert bool(reasons) == refused, reasons


@pytest.mark.parametrize("kind", ["nvfp4_xg64", "q2_k"])
def test_groups_of_16_values_as_compiled(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Triton's interpreter and the compiled code agree."""
    monkeypatch.setattr(interpreter, "instead", lambda spec, grid, args: on_ptx.launch(spec, grid, args, "a100"))
    torch.manual_seed(0)
    n, k, count = 24, 256, 5
    packed, values = weight(kind, n, k)
    x, y = rows(count, k, k, "bf16"), torch.full((count + 1, n), torch.nan)
    kernel = make_kernel("linear_q", k=k, n=n, types=("bf16", "u8", "", "f32"), stored=kind)
    tuner = Forced({"decode": 0, "m": 16, "n": 32, "k": 128, "warps": 4, "stages": 2, "splits": 1}, "a100")
    run_kernel(kernel, [x, packed, None], [y], shape=Shape(16, False), sizes={"num_tokens": count}, tuner=tuner)
    check(y, x.double() @ values.to(torch.bfloat16).double().T, "f32")
