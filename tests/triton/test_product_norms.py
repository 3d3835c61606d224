"""Products that end in a norm: bit-equal to a product followed by a norm."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from icc.compiler.backends.triton.kernels.linear import LinearKernel
from icc.compiler.backends.triton.plan import kernel_of
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.program.steps.linear import NormInputs, NormOutputs
from icc.runtime.format.operands import BufferOperand, WeightOperand
from interpreting import LIMITS, TUNER, make_kernel, run_kernel
from paged import DTYPES
from products import Forced
from step_making import operand_names

K, N, GAP = 64, 40, 3
# a tile whose K is split: its last program finishes it, and the last of all tiles normalizes
SPLIT = Forced({"decode": 0, "m": 16, "n": 16, "k": 16, "warps": 4, "stages": 2, "splits": 4})


def joined(norm: str, kind: str) -> LinearKernel:
    """A kernel of x W^T, plus r if the norm adds, normalized: r and the sum are in float32, like a residual."""
    plain = make_kernel("linear", k=K, n=N, stored=kind, types=(kind, kind, "", kind))
    adds = norm.startswith("add_")
    ins = NormInputs(
        BufferOperand("r", "f32", N + GAP) if adds else None, WeightOperand("norm", "f32"),
        WeightOperand("shift", "f32") if "layer" in norm else None,
    )  # fmt: skip
    outs = NormOutputs(BufferOperand("normed", kind, N), BufferOperand("sum", "f32", N) if adds else None)
    step = msgspec.structs.replace(plain.step, norm_in=ins, norm_out=outs, norm=norm, eps=1e-5)
    kernel: Any = kernel_of(step)
    return kernel


@pytest.mark.parametrize("norm", ["rms_norm", "add_rms_norm", "add_layer_norm"])
@pytest.mark.parametrize(("rows", "tuner"), [(1, TUNER), (3, TUNER), (19, TUNER), (1, SPLIT), (19, SPLIT)])
def test_the_same_bits(norm: str, rows: int, tuner: Tuner) -> None:
    torch.manual_seed(rows)
    kind, kernel = "bf16", joined(norm, "bf16")
    x, w = torch.randn(rows, K).to(DTYPES[kind]), torch.randn(N, K).to(DTYPES[kind])
    more = {"norm_in.w": torch.randn(N), "norm_in.bias": torch.randn(N), "norm_in.r": torch.randn(rows, N + GAP)}
    shape = Shape(rows, True) if rows < 4 else Shape(32, False)

    def results(step: Any) -> dict[str, torch.Tensor]:
        y = torch.full((rows, N), torch.nan, dtype=DTYPES[kind])
        given = {**more, "norm_out.y": torch.full_like(y, torch.nan), "norm_out.sum": torch.full((rows, N), torch.nan)}
        run_kernel(step, [x, w, None], [y], shape=shape, more=given, tuner=tuner)
        if kernel.norm is not None and step is not kernel:
            found = {"x": y, "r": given["norm_in.r"], "w": given["norm_in.w"], "bias": given["norm_in.bias"]}
            found |= {"y": given["norm_out.y"], "sum": given["norm_out.sum"]}
            ins, outs = ([found[name] for name in names] for names in operand_names(kernel.norm.step))
            run_kernel(kernel.norm, ins, outs, shape=shape)
        return {"y": y, **given}

    apart: Any = kernel_of(msgspec.structs.replace(kernel.step, norm_in=None, norm_out=None, norm=""))
    once, twice = results(kernel), results(apart)
    for name, tensor in once.items():
        assert torch.equal(tensor.view(torch.uint8), twice[name].view(torch.uint8)), name
    assert once["norm_out.y"].isfinite().all()
    launches = [spec.entry for spec in kernel.launches(shape, LIMITS, tuner)]
    product = "linear_tile" if rows == 19 or tuner is SPLIT else "linear_decode"
    assert launches == [product] + ["norm"] * (rows > 1)
