"""Norms that also write their output in 8 bits: the codes that a separate kernel before the product would write."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from icc.compiler.backends.triton.interpreter import run_spec
from icc.compiler.backends.triton.plan import kernel_of
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.program.coded_rows import micro_words
from icc.compiler.program.steps.base import CodedRows
from icc.compiler.targets import TARGETS
from icc.runtime.format.operands import BufferOperand
from icc.runtime.format.plan import OperandArg, ScratchArg, SizeArg
from interpreting import LIMITS, make_kernel, run_kernel
from sizes import soak
from step_making import make_step


@pytest.mark.parametrize(
    ("coding", "stored", "d"), [("fp8", "e4m3", 200), ("mxfp8", "mxfp4a8", 96), *soak(("int8", "i8g208", 208))]
)
def test_a_norm_writes_what_its_reader_would_make(coding: str, stored: str, d: int) -> None:
    torch.manual_seed(0)
    rows, words = 3, micro_words(d) if coding == "mxfp8" else 1
    kinds = ("i8" if coding == "int8" else "u8", "i32" if coding == "mxfp8" else "f32")
    coded = CodedRows(BufferOperand("c", kinds[0], d), BufferOperand("s", kinds[1], words))
    plain: Any = make_step("add_rms_norm", ("bf16", "bf16", "f32", "bf16", "bf16"), d=d, eps=1e-6)
    step = msgspec.structs.replace(plain, coding=coding, coded=coded)
    x, r = (torch.randn(rows, d).to(torch.bfloat16) for _ in range(2))
    r[1] = -x[1]
    r[2, 5] = torch.inf
    y, total = (torch.empty(rows, d, dtype=torch.bfloat16) for _ in range(2))
    codes, scales = torch.empty(rows, d, dtype=torch.uint8), torch.empty(rows, words, dtype=torch.int32)
    more = {"coded.codes": codes, "coded.scales": scales}
    wraps = coding == "mxfp8"  # the exponent of the non-finite row
    run_kernel(kernel_of(step), [x, r, torch.randn(d)], [y, total], shape=Shape(4, True), more=more, wraps=wraps)
    kernel = make_kernel("linear_q", k=d, n=32, types=("bf16", "u8", "", "f32"), stored=stored)
    own = kernel.launches(Shape(32, False), LIMITS, Tuner(TARGETS["b200"]))[0]
    assert own.entry == "linear_rows"
    found, wanted = torch.empty_like(codes), torch.empty_like(scales)
    values: dict[Any, Any] = {OperandArg("x"): y, ScratchArg("codes"): found, ScratchArg("scales"): wanted}
    run_spec(own, {**values, SizeArg("num_tokens"): rows}, {"num_tokens": rows}, not wraps)
    assert torch.equal(scales[:2], wanted[:2]) and torch.equal(codes[:2], found[:2])
    if coding != "mxfp8":
        assert scales.view(torch.float32)[2].isnan()
    assert not (codes[1] & 127).any()
