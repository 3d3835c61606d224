"""Matrices of MXFP4 times rows of MXFP8 (`--quant mxfp4a8`, sm_100): kernels and interpreted plans against float64."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from building import build
from icc.compiler.backends.triton.interpreter import run_spec
from icc.compiler.backends.triton.kernels.linear import LinearKernel
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.backends.triton.tiling.choice import Config, Tuner
from icc.compiler.targets import TARGETS
from icc.compiler.weights.formats.registry import find_format
from icc.runtime.format.plan import OperandArg, ScratchArg, SizeArg
from interpreting import LIMITS, make_kernel, run_kernel
from products import Forced, check, rows
from races import detecting, shuffle
from sizes import soak
from test_few_rows import weight
from test_w8a8 import IDS, reference
from torch import Tensor

FORM = "mxfp4a8"
TILE: Config = {"decode": 0, "m": 16, "n": 128, "k": 128, "warps": 4, "stages": 2, "splits": 1}


def micro(x: Tensor) -> Tensor:
    """Rows rounded to MXFP8, float64: the scale is the smallest power of two that holds a group's largest value, unlike
    the spec's, which may clip values between 448 and 512 times the scale."""
    groups = x.double().unflatten(-1, (-1, 32))
    power = torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-118) / 448))
    scaled = (groups / torch.exp2(power)).float()
    return (scaled.to(torch.float8_e4m3fn).double() * torch.exp2(power)).flatten(-2)


@pytest.mark.parametrize("k", [96, 16384 + 32])
def test_rows_are_rounded_in_groups(k: int) -> None:
    count, words = 4, -(-k // 128)
    x = torch.randn(count, k) * torch.exp2(torch.randint(-30, 30, (count, k // 32)).double()).repeat_interleave(32, 1)
    x = x.float()
    x[1, :32] = 0
    x[1, 32:64] = 448 * 0.5  # just holds
    x[2, 3], x[2, 40] = torch.nan, -torch.inf
    kernel = make_kernel("linear_q", k=k, n=32, types=("f32", "u8", "", "f32"), stored=FORM)
    first = kernel.launches(Shape(16, False), LIMITS, Tuner(TARGETS["b200"]))[0]
    codes = torch.full((count, k), 255, dtype=torch.uint8)
    powers = torch.full((count, words), -1, dtype=torch.int32)
    values: dict[Any, Any] = {OperandArg("x"): x, ScratchArg("codes"): codes, ScratchArg("scales"): powers}
    run_spec(first, {**values, SizeArg("num_tokens"): count}, {"num_tokens": count})
    found = powers.view(torch.uint8)
    assert not found[:, k // 32 :].any()  # padding: NaN would spoil a sum of zeros
    assert found[1, 0] == 0 and found[1, 1] == 127 - 1
    assert found[2, 0] == found[2, 1] == 255 and (found == 255).sum() == 2
    scale = torch.exp2(found[:, : k // 32].double() - 127).repeat_interleave(32, 1)
    decoded = codes.view(torch.float8_e4m3fn).double() * scale
    whole = [0, 1, 3]
    assert torch.equal(decoded[whole], micro(x[whole]))


@pytest.mark.parametrize(
    ("tiling", "k", "shape"),
    [({}, 384, None), ({"m": 16, "splits": 2, "k": 256}, 1440, None), ({}, 352, Shape(1, True))],
    ids=["tile", "split", "one"],
)
def test_products(tiling: Config, k: int, shape: Shape | None) -> None:
    """K = 1440 is no multiple of words or steps; with a bias, a stride and padding of rows."""
    torch.manual_seed(0)
    n, count = 40, 17 if shape is None else 1
    packed, values = weight(FORM, n, k)
    x, y, bias = rows(count, k, k + 8, "bf16"), torch.full((count + 1, n), torch.nan), torch.randn(n)
    kernel = make_kernel("linear_q", k=k, n=n, types=("bf16", "u8", "f32", "f32"), stored=FORM, strides={"x": k + 8})
    few: Config = {"decode": 1, "m": 1, "n": 8, "k": 512, "warps": 4, "stages": 2, "splits": 1}
    tuner = Forced(few if shape else {**TILE, **tiling}, "b200")
    specs = run_kernel(
        kernel, [x, packed, bias], [y], shape=shape or Shape(32, False), sizes={"num_tokens": count}, tuner=tuner
    )
    assert [spec.entry for spec in specs] == (["linear_decode"] if shape else ["linear_rows", "linear_scaled"])
    check(y, micro(x[:, :k]) @ values.T + bias.double(), "f32")


@pytest.mark.parametrize(("count", "per_slot"), [(2, True), (19, False), *soak((2, False), (19, True))])
def test_experts(count: int, per_slot: bool) -> None:
    torch.manual_seed(3)
    experts, topk, n, k = 4, 3, 17, 160
    packed, values = weight(FORM, experts, n, k)
    x = rows(count, (topk if per_slot else 1) * k, (topk if per_slot else 1) * k + 8, "bf16")
    index = torch.randint(0, experts, (count, topk), dtype=torch.int32)
    index[0, 1] = -1
    kernel = make_kernel(
        "expert_linear_q", k=k, n=n, experts=experts, topk=topk, x_per_slot=per_slot, stored=FORM,
        strides={"x": x.shape[1]}, types=("bf16", "u8", "", "i32", "f32"),
    )  # fmt: skip
    y = torch.full((count + 1, topk * n), torch.nan)
    few: Config = {"decode": 1, "m": 1, "n": 4, "k": 512, "warps": 4, "stages": 2, "splits": 1}
    with detecting(shuffle):
        specs = run_kernel(
            kernel, [x, packed, None, index], [y], shape=Shape(2 if count == 2 else 32, False),
            sizes={"num_tokens": count}, tuner=Forced(few if count == 2 else TILE, "b200"),
        )  # fmt: skip
    many = ["linear_rows", "expert_count", "expert_place", "linear_scaled"]
    assert [spec.entry for spec in specs] == (["linear_decode"] if count == 2 else many)
    given = x[:, : x.shape[1] - 8].reshape(count, -1, k).expand(-1, topk, -1)
    found = torch.zeros(count, topk, n, dtype=torch.float64)
    for e in range(experts):
        at = torch.where(index == e)
        found[at] = micro(given[at]) @ values[e].T
    check(y, found.reshape(count, -1), "f32")


@pytest.mark.parametrize(
    ("family", "target"), [("llama", "b200"), *soak(("gpt_oss", "b200"), ("gpt_oss", "h100"), ("mixtral", "b200"))]
)
def test_interpreted_plan(family: str, target: str, tiny: ModuleType, tmp_path: Path) -> None:
    """The logits of an engine for sm_100, and of one for another target, whose rows are not rounded."""
    tiny.save_tiny(tiny.tiny_configs()[family], tmp_path)
    engine = build(tmp_path, FORM, target=TARGETS[target])
    assert any(spec.entry == "linear_scaled" for spec in engine.specs.values()) == (target == "b200")
    rounded = micro if target == "b200" else Tensor.double
    expected = reference(engine.graph, IDS, {type(find_format(FORM)): rounded}).float().numpy()
    with engine.llm() as llm:
        found = llm.logits(IDS)
    # a value halfway between two of e4m3 may be rounded either way
    assert np.abs(found - expected).max() <= 1e-2 * np.abs(expected).max()


@pytest.mark.parametrize("target", ["a100", "l40s", "h100", "b200", "mi300x"])
def test_where_rows_of_mxfp8_are_multiplied(target: str) -> None:
    level = TARGETS[target].level
    for stored, native in (("mxfp4a8", True), ("mxfp4", False)):
        kernel = make_kernel("linear_q", k=256, n=64, types=("bf16", "u8", "", "bf16"), stored=stored)
        assert isinstance(kernel, LinearKernel)
        assert kernel.mode(level).name == ("mxfp8" if native and target == "b200" else "blocks")
