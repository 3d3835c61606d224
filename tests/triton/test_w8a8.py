"""8-bit rows times 8-bit matrices, int8 and e4m3: kernels and interpreted plans against float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from building import build
from icc.compiler.backends.triton.interpreter import run_spec
from icc.compiler.backends.triton.kernels.linear import LinearKernel
from icc.compiler.backends.triton.layouts.registry import LAYOUTS
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import eager
from icc.compiler.ops import OPS
from icc.compiler.ops.body import Body
from icc.compiler.program.steps.linear import Columns, Epilogue
from icc.compiler.targets import TARGETS
from icc.compiler.weights.formats.base import StorageFormat
from icc.compiler.weights.formats.channel import ChannelInt8
from icc.compiler.weights.formats.float8 import Float8
from icc.compiler.weights.handles import pieces_of
from icc.runtime.format.plan import OperandArg, ScratchArg, SizeArg
from interpreting import LIMITS, make_kernel, run_kernel
from products import DTYPES, Forced, check, rows
from races import detecting, shuffle
from sizes import soak
from torch import Tensor, fx

IDS = [3, 17, 4, 44, 9, 2, 11, 30]


def rounded(x: Tensor, form: object) -> Tensor:
    """Rows after rounding for products with a matrix of that format."""
    if isinstance(form, ChannelInt8):
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale + 0.5).floor() * scale
    assert isinstance(form, Float8)
    return Float8().decode(row_parts(x)).double()


def row_parts(x: Tensor) -> dict[str, Tensor]:
    """Rows as codes and scales: encoded like the format, but multiplied by the reciprocal of the scale."""
    peaks = x.float().abs().amax(-1, keepdim=True)
    codes = (x.float() * (torch.full_like(peaks, 448) / peaks)).to(torch.float8_e4m3fn)
    return {"codes": codes.view(torch.uint8), "scales": peaks / 448}


Rounding = Mapping[type[StorageFormat] | StorageFormat, Callable[[Tensor], Tensor]]


def reference(graph: Graph, ids: list[int], more: Rounding | None = None) -> Tensor:
    """Logits [T, vocab] in float64, with inputs of products rounded as by kernels. more: further roundings, by format
    or class of formats; None: none."""
    products = {OPS[name].overload for name in ("linear", "expert_linear")}
    env: dict[fx.Node, Any] = {}
    inputs = {"token_ids": torch.tensor(ids)}
    for node in graph.nodes:
        if node.op == "get_attr":
            value = graph.weight(node).load()
            env[node] = value.double() if value.is_floating_point() else value
        elif node.op == "placeholder":
            env[node] = inputs.get(str(node.target), torch.arange(len(ids)))
        elif node.op == "call_function":
            args = fx.map_arg(node.args, lambda n: env[n])
            if node.target in products:
                form = pieces_of(graph.weight(node.args[1]))[0].storage
                known = [round_rows for of, round_rows in (more or {}).items() if of in (form, type(form))]
                if known:
                    args = (known[0](args[0]), *args[1:])
                elif isinstance(form, ChannelInt8 | Float8):
                    args = (rounded(args[0], form), *args[1:])
            env[node] = eager(node.target)(*args, **node.kwargs)
    return env[graph.output]


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_interpreted_plan(quant: str, tiny: ModuleType, tmp_path: Path) -> None:
    tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path / "m")
    engine = build(tmp_path / "m", quant)
    assert sum(spec.entry == "linear_w8a8" for spec in engine.specs.values()) >= 3
    expected = reference(engine.graph, IDS).float().numpy()
    with engine.llm() as llm:
        found = llm.logits(IDS)
    # a value halfway between two of e4m3 may be rounded either way
    assert np.abs(found - expected).max() <= (1e-3 if quant == "int8" else 1e-2) * np.abs(expected).max()


TILINGS = {
    "decode": {"decode": 1, "m": 8, "n": 16, "warps": 2, "stages": 2, "splits": 1},
    "tile": {"decode": 0, "m": 16, "n": 64, "warps": 4, "stages": 2, "splits": 1},
    "split": {"decode": 0, "m": 16, "n": 64, "warps": 4, "stages": 2, "splits": 2},
}
GATED = Epilogue(Body.parse("t0 = silu a0; t1 = mul t0 a1"), (Columns(0, 1), Columns(17, 1)), 16)


def random_matrix(form: Float8 | ChannelInt8, *shape: int) -> tuple[Tensor, Tensor]:
    """A random matrix packed for kernels, and its values in float64."""
    parts = form.encode(torch.randn(shape) * torch.rand(*shape[:-1], 1)).parts
    packed = LAYOUTS.find(form, "product").pack({name: value.numpy() for name, value in parts.items()})
    return torch.from_numpy(packed), form.decode(parts).double()


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize(
    ("kind", "group", "k", "epilogue", "target"),
    [
        ("bf16", 0, 200, GATED, "h100"),
        ("f16", 128, 384, None, "b200"),
        *soak(("f32", 96, 250, None, "l40s"), ("bf16", 64, 131, GATED, "h100"), ("bf16", 0, 131, None, "b200")),
    ],
)
def test_products(
    kind: str, group: int, k: int, epilogue: Epilogue | None, target: str, tiling: str, request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(0)
    form, n, count = Float8(group), 33, 5 if tiling == "decode" else 17
    step = LAYOUTS.find(form, "product").group
    packed, values = random_matrix(form, n, k)
    x, bias = rows(count, k, k + 8, kind, 1), torch.randn(n)
    width = n if epilogue is None else epilogue.width
    y = torch.full((count + 1, width), torch.nan, dtype=DTYPES[kind])
    facts = {"epilogue": epilogue} if epilogue else {}
    kernel = make_kernel(
        "linear_q", k=k, n=n, strides={"x": k + 8}, types=(kind, "u8", "f32", kind), stored=form.name, **facts
    )  # fmt: skip
    specs = run_kernel(
        kernel, [x, packed, bias], [y], shape=Shape(count, tiling == "decode"), sizes={"num_tokens": count},
        tuner=Forced({**TILINGS[tiling], "k": step}, target),
    )  # fmt: skip
    assert [spec.entry for spec in specs[:2]] == [
        "linear_rows",
        "linear_decode" if tiling == "decode" else "linear_w8a8",
    ]
    found = rounded(x[:count, :k], form).double() @ values.T + bias.double()
    if epilogue is not None:
        found = torch.nn.functional.silu(found[:, :16]) * found[:, 17:]
    check(y, found, kind)


@pytest.mark.parametrize("form", [Float8(), Float8(128), ChannelInt8(640, 8)], ids=["e4m3", "blocks", "int8"])
def test_a_single_row_becomes_codes_where_it_is_multiplied(form: Float8 | ChannelInt8) -> None:
    """Bit-equal to a separate kernel before the product, which only steps of more rows launch."""
    torch.manual_seed(1)
    n, k = 33, 5000 if form.name == "e4m3" else 640
    packed, values = random_matrix(form, n, k)
    x = rows(1, k, k + 8, "bf16", 1)
    kernel = make_kernel("linear_q", k=k, n=n, strides={"x": k + 8}, types=("bf16", "u8", "", "f32"), stored=form.name)
    tuner, found = Forced({**TILINGS["decode"], "k": 128}), []
    for most in (1, 2):
        y = torch.full((2, n), torch.nan)
        specs = run_kernel(
            kernel, [x, packed, None], [y], shape=Shape(most, True), sizes={"num_tokens": 1}, tuner=tuner
        )
        assert [spec.entry for spec in specs] == ["linear_rows"] * (most - 1) + ["linear_decode"]
        found.append(y)
    check(found[0], rounded(x[:1, :k].double(), form) @ values.T, "f32")
    assert torch.equal(found[0][0], found[1][0])


EXPERTS, TOPK = 4, 3


@pytest.mark.parametrize(("tiling", "group"), [("decode", 0), ("decode", 128), ("tile", 0), ("tile", 128)])
@pytest.mark.parametrize("per_slot", [False, True])
def test_experts(tiling: str, group: int, per_slot: bool) -> None:
    torch.manual_seed(3)
    form, n, k = Float8(group), 17, 256
    packed, values = random_matrix(form, EXPERTS, n, k)
    for count in (1, 3) if tiling == "decode" else (19,):
        x = rows(count, (TOPK if per_slot else 1) * k, (TOPK if per_slot else 1) * k + 8, "bf16")
        index = torch.randint(0, EXPERTS, (count, TOPK), dtype=torch.int32)
        index[0, 1] = -1
        kernel = make_kernel(
            "expert_linear_q", k=k, n=n, experts=EXPERTS, topk=TOPK, x_per_slot=per_slot, stored=form.name,
            strides={"x": x.shape[1]}, types=("bf16", "u8", "", "i32", "f32"),
        )  # fmt: skip
        y = torch.full((count + 1, TOPK * n), torch.nan)
        shape = Shape(count, False) if tiling == "decode" else Shape(32, False)
        with detecting(shuffle):
            specs = run_kernel(
                kernel, [x, packed, None, index], [y], shape=shape, sizes={"num_tokens": count},
                tuner=Forced({**TILINGS[tiling], "n": 64 if tiling == "tile" else 16, "k": 128}),
            )  # fmt: skip
        assert [spec.entry for spec in specs] == {
            1: ["linear_decode"], 3: ["linear_rows", "linear_decode"],
            19: ["linear_rows", "expert_count", "expert_place", "linear_w8a8"],
        }[count]  # fmt: skip
        given = x[:, : x.shape[1] - 8].reshape(count, -1, k).expand(-1, TOPK, -1)
        found = torch.zeros(count, TOPK, n, dtype=torch.float64)
        for e in range(EXPERTS):
            at = torch.where(index == e)
            found[at] = rounded(given[at], form).double() @ values[e].T
        check(y, found.reshape(count, -1), "f32")


@pytest.mark.parametrize("k", [130, 16400])
def test_rows_are_rounded_as_the_format_rounds(k: int) -> None:
    form, count = Float8(), 3
    x = torch.randn(count, k) * 10
    x[1] = 0
    x[2, 5] = torch.inf
    kernel = make_kernel("linear_q", k=k, n=32, types=("f32", "u8", "", "f32"), stored=form.name)
    first = kernel.launches(Shape(count, False), LIMITS, Tuner(TARGETS["h100"]))[0]
    codes, scales = torch.zeros(count, k, dtype=torch.uint8), torch.zeros(count, 1)
    values = {OperandArg("x"): x, ScratchArg("codes"): codes, ScratchArg("scales"): scales.view(torch.uint8)}
    run_spec(first, {**values, SizeArg("num_tokens"): count}, {"num_tokens": count})
    wanted, encoded = row_parts(x[:1]), form.encode(x[:1]).parts
    assert torch.equal(scales[:1], wanted["scales"]) and torch.equal(codes[:1], wanted["codes"])
    assert (codes[:1] != encoded["codes"]).float().mean() < 1e-2  # except ties
    assert not codes[1].any() and not scales[1].any() and scales[2].isnan()


def test_conversions_of_the_interpreter_are_those_of_torch() -> None:
    import triton.runtime.interpreter as interpreter

    make_kernel("linear", k=16, n=16, stored="f32").launches(Shape(1, True), LIMITS, Tuner(TARGETS["h100"]))
    from icc.compiler.backends.triton.interpreter import load_source

    load_source("import triton.language as tl\n")
    convert = interpreter._convert_float  # type: ignore[attr-defined]
    codes = np.arange(256, dtype=np.uint8)
    own = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    for kind, bits in ((tl.float16, np.float16), (tl.float32, np.float32)):
        np.testing.assert_array_equal(
            convert(codes, tl.float8e4nv, kind, None).view(bits), own.to(torch.float32).numpy()
        )
    wide = torch.cat([own.float()[~own.float().isnan()] * (1 + d) for d in (-0.06, -0.03, 0.0, 0.03)])
    found = convert(wide.numpy(), tl.float32, tl.float8e4nv, None)
    np.testing.assert_array_equal(found, wide.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy())


@pytest.mark.parametrize("target", ["a100", "a10g", "l4", "h100", "b200", "mi300x"])
def test_where_rows_of_e4m3_are_multiplied(target: str) -> None:
    """On targets with instructions for them, with blocks of at least 32; otherwise 16-bit floats are multiplied."""
    level = TARGETS[target].level
    for stored, native in (
        ("e4m3", True),
        ("e4m3_kg128", True),
        ("e4m3_kg32", True),
        ("e4m3_kg48", False),
        ("e4m3w", False),
    ):
        kernel = make_kernel("linear_q", k=256, n=64, types=("bf16", "u8", "", "bf16"), stored=stored)
        assert isinstance(kernel, LinearKernel)
        assert (kernel.mode(level).name == "fp8") == (native and level >= 89)
    experts = make_kernel(
        "expert_linear_q", k=64, n=32, stored="e4m3", experts=3, topk=2, types=("bf16", "u8", "", "i32", "bf16")
    )
    assert experts.mode(level).name == ("fp8" if level >= 89 else "codes")  # type: ignore[attr-defined]
