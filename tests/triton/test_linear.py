"""Products against float64: every combination of operands, odd sizes, strided rows, epilogues, tilings and splits."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from icc.compiler.backends.errors import CodegenError
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.ops.body import Body
from icc.compiler.program.steps.linear import Columns, Epilogue, Extra
from interpreting import LIMITS, TUNER, make_kernel, run_kernel
from products import DTYPES, Forced, Weight, check, rows, weight
from races import detecting, shuffle
from torch import Tensor

# kind, bits, group, k: a group of 16 is too short for matrix instructions, and not every k is a multiple of a program's
# slice
WEIGHTS = [
    ("bf16", 0, 0, 200), ("f16", 0, 0, 72), ("f32", 0, 0, 70), ("bf16", 4, 64, 320), ("f16", 4, 64, 192),
    ("bf16", 8, 32, 96), ("f16", 8, 32, 96), ("bf16", 4, 16, 80), ("f32", 4, 64, 128),
]  # fmt: skip
# rows, phase: both kernels
STEPS = [(1, Shape(1, True)), (3, Shape(4, True)), (19, Shape(32, False))]


def product(x: Tensor, w: Weight, bias: Tensor | None, k: int) -> Tensor:
    y = x[:, :k].double() @ w.values.T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize(("kind", "bits", "group", "k"), WEIGHTS)
@pytest.mark.parametrize(("count", "shape"), STEPS)
def test_rows_of_any_stride(kind: str, bits: int, group: int, k: int, count: int, shape: Shape) -> None:
    torch.manual_seed(0)
    n = 33
    x, w, bias = rows(count, k, k + 8, kind, 2), weight((n, k), kind, bits, group), torch.randn(n)
    y = torch.full((count + 1, n + 3), torch.nan, dtype=DTYPES[kind])
    kernel = make_kernel(
        "linear_q" if bits else "linear", k=k, n=n, strides={"x": k + 8, "y": n + 3},
        types=(kind, w.kind, "f32", kind), aligned=(True, True, False, False), **w.params,
    )  # fmt: skip
    run_kernel(kernel, [x, w.packed, bias], [y], shape=shape, sizes={"num_tokens": count})
    check(y, product(x[:count], w, bias, k), kind)


@pytest.mark.parametrize(("x_kind", "w_kind", "y_kind"), [("bf16", "f32", "f32"), ("f32", "bf16", "bf16")])
def test_operands_of_different_types_are_multiplied_in_float32(x_kind: str, w_kind: str, y_kind: str) -> None:
    x, w = rows(5, 70, 70, x_kind), weight((17, 70), w_kind)
    y = torch.full((5, 17), torch.nan, dtype=DTYPES[y_kind])
    types = (x_kind, w.kind, "", y_kind)
    kernel = make_kernel("linear", k=70, n=17, types=types, rows="logit_rows", **w.params)
    run_kernel(kernel, [x, w.packed, None], [y], shape=Shape(8, True))
    check(y, product(x, w, None, 70), y_kind)


GATE = Body.parse("t0 = silu a0; t1 = mul t0 a1")
SCALE = Body.parse("t0 = mul a0 a1; t1 = add t0 a2; t2 = mul t1 0.5; t3 = add t2 a1")
FORMS = {
    "halves": Epilogue(GATE, (Columns(0, 1), Columns(24, 1)), 24),
    "interleaved": Epilogue(GATE, (Columns(0, 2), Columns(1, 2)), 24),
    "residual": Epilogue(Body.parse("t0 = add a0 a1"), (Columns(0, 1), Extra(1)), 48),
    "scaled": Epilogue(SCALE, (Columns(3, 1), Extra(1), Extra(0)), 40),
}
STRIDES = {"residual": {"extras.0": 50}, "scaled": {"extras.0": 0, "extras.1": 1}}


def finished(form: str, y: Tensor, extras: list[Tensor]) -> Tensor:
    silu = torch.nn.functional.silu
    extras = [e.double() for e in extras]
    return {
        "halves": lambda: silu(y[:, :24]) * y[:, 24:],
        "interleaved": lambda: silu(y[:, ::2]) * y[:, 1::2],
        "residual": lambda: y + extras[0][:, :48],
        "scaled": lambda: (y[:, 3:43] * extras[0] + extras[1][:, None]) * 0.5 + extras[0],
    }[form]()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("bits", "count", "shape"), [(0, 17, STEPS[2][1]), (4, 2, STEPS[1][1])])
def test_epilogues(form: str, bits: int, count: int, shape: Shape) -> None:
    torch.manual_seed(1)
    n, k = 48, 128
    x, w, bias = rows(count, k, k, "bf16"), weight((n, k), "bf16", bits, 64 if bits else 0), torch.randn(n)
    extras = {"residual": [torch.randn(count, 50)], "scaled": [torch.randn(40), torch.randn(count)]}.get(form, [])
    y = torch.full((count, FORMS[form].width), torch.nan)
    kernel = make_kernel(
        "linear_q" if bits else "linear", k=k, n=n, types=("bf16", w.kind, "f32", *["f32"] * len(extras), "f32"),
        epilogue=FORMS[form], strides=STRIDES.get(form, {}), **w.params,
    )  # fmt: skip
    run_kernel(kernel, [x, w.packed, bias, *extras], [y], shape=shape)
    check(y, finished(form, product(x, w, bias, k), extras), "f32")


def test_an_epilogue_input_outside_the_product_is_refused() -> None:
    epilogue = Epilogue(Body.parse("t0 = relu a0"), (Columns(20, 1),), 16)
    with pytest.raises(CodegenError, match=r"Columns\(offset=20, stride=1\) of 16 columns lies outside n = 32"):
        make_kernel("linear", k=16, n=32, stored="bf16", types=("bf16", "bf16", "", "f32"), epilogue=epilogue)


TILINGS = [
    {"decode": 1, "m": 8, "n": 16, "k": 64, "warps": 2, "stages": 2, "splits": 1},
    {"decode": 0, "m": 16, "n": 16, "k": 64, "warps": 4, "stages": 2, "splits": 1},
    {"decode": 0, "m": 16, "n": 32, "k": 64, "warps": 4, "stages": 2, "splits": 3},  # the last program merges
    {"decode": 0, "m": 128, "n": 32, "k": 64, "warps": 4, "stages": 2, "splits": 3},  # another kernel merges
    {"decode": 0, "m": 64, "n": 32, "k": 64, "warps": 1, "stages": 2, "splits": 1},  # finished in two halves
]


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize(
    ("kind", "bits", "target"),
    [("bf16", 0, "h100"), ("bf16", 4, "h100"), ("bf16", 4, "mi300x"), ("f16", 4, "rx7900xtx")],
)
def test_every_cut_gives_the_same(tiling: dict[str, int], kind: str, bits: int, target: str) -> None:
    torch.manual_seed(2)
    count, n, k = (5 if tiling["decode"] else tiling["m"] + 1), 30, 448
    x, w, extra = rows(count, k, k, kind), weight((n, k), kind, bits, 64 if bits else 0), torch.randn(count, n)
    y = torch.full((count, n), torch.nan)
    kernel = make_kernel(
        "linear_q" if bits else "linear", k=k, n=n, types=(kind, w.kind, "", "f32", "f32"),
        epilogue=Epilogue(Body.parse("t0 = add a0 a1"), (Columns(0, 1), Extra(1)), n), **w.params,
    )  # fmt: skip
    shape = Shape(count, bool(tiling["decode"]))
    with detecting(shuffle):
        specs = run_kernel(kernel, [x, w.packed, None, extra], [y], shape=shape, tuner=Forced(tiling, target))
    assert len(specs) == (2 if tiling["splits"] > 1 and tiling["m"] > 64 else 1)
    check(y, product(x, w, None, k) + extra, "f32")


WHOLE = {"decode": 0, "m": 16, "n": 64, "k": 64, "warps": 4, "stages": 2, "splits": 1}  # unpacked when multiplied
UNPACKED = {"decode": 0, "m": 16, "n": 32, "k": 64, "warps": 4, "stages": 2, "splits": 1, "unpacked": 1}


@pytest.mark.parametrize(
    ("tiling", "kind", "bits"),
    [(WHOLE, "bf16", 4), (WHOLE, "f16", 4), (WHOLE, "bf16", 8), (WHOLE, "f16", 8), (UNPACKED, "bf16", 4),
     ({**UNPACKED, "splits": 2}, "f16", 8)],
)  # fmt: skip
def test_codes_that_become_values_first(tiling: dict[str, int], kind: str, bits: int) -> None:
    torch.manual_seed(4)
    count, n, k = 17, 96, 192
    x, w, extra = rows(count, k, k, kind), weight((n, k), kind, bits, 64), torch.randn(count, n)
    y = torch.full((count, n), torch.nan, dtype=DTYPES[kind])
    kernel = make_kernel(
        "linear_q", k=k, n=n, types=(kind, w.kind, "", "f32", kind),
        epilogue=Epilogue(Body.parse("t0 = add a0 a1"), (Columns(0, 1), Extra(1)), n), **w.params,
    )  # fmt: skip
    specs = run_kernel(kernel, [x, w.packed, None, extra], [y], shape=Shape(128, False), tuner=Forced(tiling))
    assert [spec.entry for spec in specs] == {0: ["linear_tile"], 1: ["linear_unpack", "linear_tile"]}[
        tiling.get("unpacked", 0)
    ]
    assert ("def values" in specs[0].source) == (tiling is WHOLE)
    check(y, product(x, w, None, k) + extra, kind)


def test_tiles_of_more_rows_than_a_band() -> None:
    torch.manual_seed(3)
    x, w = rows(150, 40, 40, "bf16"), weight((40, 40), "bf16")
    y = torch.full((150, 40), torch.nan)
    kernel = make_kernel("linear", k=40, n=40, stored="bf16", types=("bf16", "bf16", "", "f32"))
    run_kernel(kernel, [x, w.packed, None], [y], shape=Shape(256, False), tuner=Forced(TILINGS[1]))
    check(y, product(x, w, None, 40), "f32")


def test_phases_of_one_class_share_their_launches() -> None:
    kernel = make_kernel("linear", k=256, n=512, stored="bf16", types=("bf16", "bf16", "", "bf16"))
    few = [kernel.launches(Shape(m, True), LIMITS, TUNER) for m in (1, 2, 4, 8)]
    assert all(f == few[0] for f in few)
    assert kernel.launches(Shape(64, True), LIMITS, TUNER) == kernel.launches(Shape(64, False), LIMITS, TUNER)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_the_assembly_unpacks_as_the_source_says(kind: str) -> None:
    """PTX cannot run here, so the lines are evaluated over all 16-bit elements, two per register."""
    w = weight((32, 128), kind, 4, 64)
    kernel = make_kernel("linear_q", k=128, n=32, types=(kind, "u8", "", kind), **w.params)
    source = kernel.launches(Shape(1, True), LIMITS, TUNER)[0].source
    elements = np.arange(65536, dtype=np.uint32)
    registers: dict[str, np.ndarray] = {"$4": elements | (elements[::-1] << np.uint32(16))}
    for op, operands in re.findall(r"^ +(shr\.u32|lop3\.b32) (.*);$", source, re.M):
        to, first, *rest = operands.split(", ")
        if op == "shr.u32":
            registers[to] = registers[first] >> np.uint32(rest[0])
        else:  # table 0xEA of (a, b, c) is (a & b) | c
            assert rest[2] == "0xEA"
            registers[to] = (registers[first] & np.uint32(int(rest[0], 16))) | np.uint32(int(rest[1], 16))
    for field in range(4):
        found = registers[f"${field}"].view(np.uint16).reshape(-1, 2)
        values = torch.from_numpy(found.astype(np.int16)).view(DTYPES[kind]).double().numpy()
        for half, words in ((0, elements), (1, elements[::-1])):
            codes = (words >> np.uint32(4 * field)) & np.uint32(15)
            expected = 128.0 + codes if kind == "bf16" else codes * 2.0**-24
            np.testing.assert_array_equal(values[:, half], expected)
