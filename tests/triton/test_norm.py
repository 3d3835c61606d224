"""Norm kernels against float64, at widths that are no power of two, strided rows and both storage types."""

from __future__ import annotations

import pytest
import torch
from icc.compiler.backends.triton.spec import Shape
from interpreting import make_kernel, run_kernel


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm"])
@pytest.mark.parametrize(("d", "groups", "extra"), [(1, 1, 0), (7, 3, 5), (96, 2, 0), (257, 1, 3)])
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_norm(op: str, d: int, groups: int, extra: int, kind: str) -> None:
    torch.manual_seed(0)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[kind]
    rows, width, adds, centered = 3, d * groups, op.startswith("add"), "layer" in op
    x, r = torch.randn(rows, width + extra).to(dtype), torch.randn(rows, width)
    w, b = torch.randn(d), torch.randn(d)
    y, total = torch.full((rows, width), torch.nan, dtype=dtype), torch.full((rows, width), torch.nan)
    ins = [(x, kind), *([(r, "f32")] if adds else []), (w, "f32"), *([(b, "f32")] if centered else [])]
    outs = [(y, kind), *([(total, "f32")] if adds else [])]
    types = tuple(t for _, t in (*ins, *outs))
    facts = {"types": types, "aligned": (False,) * len(types), "strides": {"x": width + extra}}
    kernel = make_kernel(op, d=d, groups=groups, eps=1e-5, **facts)
    run_kernel(kernel, [t for t, _ in ins], [t for t, _ in outs], shape=Shape(16, False))

    wide = x[:, :width].double() + (r.double() if adds else 0)
    if adds:
        torch.testing.assert_close(total.double(), wide, rtol=1e-6, atol=1e-6)
    z = wide.view(rows, groups, d)
    z = z - z.mean(-1, keepdim=True) if centered else z
    expected = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-5) * w + (b if centered else 0)
    tolerance = 2e-5 if kind == "f32" else 1e-2
    torch.testing.assert_close(y.double(), expected.view(rows, width), rtol=tolerance, atol=tolerance)
