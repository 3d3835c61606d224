"""Products of few rows with the block formats of files, in float32 without matrix units, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from icc.compiler.backends.triton.layouts.registry import LAYOUTS
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.ops.body import Body
from icc.compiler.program.steps.linear import Columns, Epilogue
from icc.compiler.weights.formats.registry import find_format
from interpreting import make_kernel, run_kernel
from products import Forced, check, rows
from sizes import soak
from torch import Tensor

KINDS = ("q4_k", "mxfp4")
MORE = (
    "q4_0",
    "nf4g64",
    "q2_k",
    "q3_k",
    "q4_1",
    "q5_0",
    "q5_k",
    "q6_k",
    "q8_0",
    "iq2_xs",
    "iq4_nl",
    "iq4_xs",
    "nvfp4_xg64",
    "fp4_f32g64",
    "oq2g32",
    "oq3_bf16g128",
    "oq4_bf16g64",
    "oq5g64",
    "oq6_bf16g64",
    "oq8g64",
    "t2_f32g128",
)
GATE = Epilogue(Body.parse("t0 = silu a0; t1 = mul t0 a1"), (Columns(0, 1), Columns(17, 1)), 17)


def weight(kind: str, *shape: int) -> tuple[Tensor, Tensor]:
    """A packed weight, and its values [.., n, k]: small scales and any codes."""
    form: Any = find_format(kind)
    source = torch.Generator().manual_seed(len(kind) + shape[-1])
    parts = {}
    for name, array in form.arrays(shape).items():
        size = tuple(array.shape)
        if name == "exponents":
            parts[name] = torch.randint(110, 124, size, generator=source).to(array.working)
        elif array.working.is_floating_point:
            parts[name] = (torch.rand(size, generator=source) * 0.02).to(array.dtype).to(array.working)
        else:
            top = (len(getattr(form, "table", ())) or 2**form.bits) if name == "codes" else 60
            parts[name] = torch.randint(0, top, size, generator=source).to(array.working)
    packed = LAYOUTS.find(form, "product").pack({name: value.numpy() for name, value in parts.items()})
    return torch.from_numpy(packed), form.decode(parts).double()


@pytest.mark.parametrize("kind", [*KINDS, *soak(*MORE)])
def test_rows_of_every_number(kind: str) -> None:
    """K is no multiple of a step's columns; the last block of columns is not full."""
    torch.manual_seed(0)
    n, k = 5, 768
    packed, values = weight(kind, n, k)
    for count, stated in ((1, 1), (3, 4)):
        x, y = rows(count, k, k + 8, "bf16"), torch.full((count + 1, n), torch.nan)
        kernel = make_kernel(
            "linear_q", k=k, n=n, types=("bf16", "u8", "f32", "f32"), stored=kind, strides={"x": k + 8}
        )
        bias = torch.randn(n)
        sizes = {"num_tokens": count}
        specs = run_kernel(kernel, [x, packed, bias], [y], shape=Shape(stated, True), sizes=sizes)
        assert [spec.entry for spec in specs] == ["linear_decode"]
        check(y, x[:, :k].double() @ values.T + bias.double(), "f32")


# blocks that do not end with steps of 128, or whose rows have no whole words besides their codes
ODD = (("s4g32b224", 672), ("nvfp4_xg48", 144), ("mxfp4", 352))
OFTEN = ("q4_0", "iq2_xs")


@pytest.mark.parametrize(
    ("kind", "k"),
    [
        *((kind, 768) for kind in OFTEN),
        *ODD,
        *soak(*((kind, 768) for kind in (*KINDS, *MORE) if kind not in OFTEN), ("n4g32b160", 800), ("zq4g32", 96)),
    ],
)
def test_many_rows_on_matrix_units(kind: str, k: int) -> None:
    torch.manual_seed(0)
    n, count = 40, 19
    packed, values = weight(kind, n, k)
    x, y = rows(count, k, k + 8, "bf16"), torch.full((count + 1, n), torch.nan)
    kernel = make_kernel("linear_q", k=k, n=n, types=("bf16", "u8", "", "f32"), stored=kind, strides={"x": k + 8})
    step = 256 if k == 768 else 128
    tiling = {"decode": 0, "m": 16, "n": 32, "k": step, "warps": 4, "stages": 2, "splits": 1}
    sizes = {"num_tokens": count}
    for more, entries in (({}, ["linear_tile"]), ({"k": 64, "unpacked": 1}, ["linear_unpack", "linear_tile"])):
        tuner = Forced({**tiling, **more})
        specs = run_kernel(kernel, [x, packed, None], [y], shape=Shape(32, False), sizes=sizes, tuner=tuner)
        assert [spec.entry for spec in specs] == entries
        check(y, x[:, :k].double() @ values.to(torch.bfloat16).double().T, "f32")
        y.fill_(torch.nan)


@pytest.mark.parametrize(("kind", "k", "splits"), [("nf4g64", 320, 2), ("mxfp4", 352, 4)])
def test_programs_of_a_split_tile_take_as_many_steps_each(kind: str, k: int, splits: int) -> None:
    """K has three steps of 128, the last one incomplete: further columns of the last program are masked."""
    torch.manual_seed(0)
    n, count = 40, 19
    packed, values = weight(kind, n, k)
    x, y = rows(count, k, k + 8, "bf16"), torch.full((count + 1, n), torch.nan)
    kernel = make_kernel("linear_q", k=k, n=n, types=("bf16", "u8", "", "f32"), stored=kind, strides={"x": k + 8})
    tuner = Forced({"decode": 0, "m": 16, "n": 32, "k": 128, "warps": 4, "stages": 2, "splits": splits})
    specs = run_kernel(kernel, [x, packed, None], [y], shape=Shape(32, False), sizes={"num_tokens": count}, tuner=tuner)
    assert specs[0].entry == "linear_tile" and f"for turn in tl.range(0, {4 // splits}," in specs[0].source
    check(y, x[:, :k].double() @ values.to(torch.bfloat16).double().T, "f32")


def test_unpacking_groups_of_more_columns_than_a_program_has() -> None:
    """For instance in W8A8, whose rows have one scale each."""
    torch.manual_seed(0)
    n, k, count = 40, 512, 19
    packed, values = weight("zq8g512", n, k)
    x, y = rows(count, k, k, "bf16"), torch.full((count, n), torch.nan)
    kernel = make_kernel("linear_q", k=k, n=n, types=("bf16", "u8", "", "f32"), stored="zq8g512")
    tuner = Forced({"decode": 0, "m": 16, "n": 32, "k": 64, "warps": 4, "stages": 2, "splits": 1, "unpacked": 1})
    run_kernel(kernel, [x, packed, None], [y], shape=Shape(32, False), tuner=tuner)
    check(y, x.double() @ values.to(torch.bfloat16).double().T, "f32")


def test_two_parts_and_experts() -> None:
    torch.manual_seed(0)
    k = 256
    packed, values = weight("q4_k", 34, k)
    x, y = rows(2, k, k, "bf16"), torch.full((2, 17), torch.nan)
    kernel = make_kernel("linear_q", k=k, n=34, types=("bf16", "u8", "", "f32"), stored="q4_k", epilogue=GATE)
    run_kernel(kernel, [x, packed, None], [y], shape=Shape(2, True))
    gate, up = (x.double() @ values.T).split(17, dim=1)
    check(y, torch.nn.functional.silu(gate) * up, "f32")

    packed, values = weight("mxfp4", 4, 19, k)
    index = torch.tensor([[3, 0], [1, -1]], dtype=torch.int32)
    y = torch.full((2, 2 * 19), torch.nan)
    kernel = make_kernel(
        "expert_linear_q", k=k, n=19, experts=4, topk=2, types=("bf16", "u8", "", "i32", "f32"), stored="mxfp4"
    )
    specs = run_kernel(kernel, [x, packed, None, index], [y], shape=Shape(2, False))
    assert [spec.entry for spec in specs] == ["linear_decode"]
    found = torch.stack([x[0].double() @ values[3].T, x[0].double() @ values[0].T, x[1].double() @ values[1].T])
    check(y.view(4, 19)[:3], found, "f32")
    assert not y.view(4, 19)[3].any()
