"""4-bit codes times 8-bit rows (`--quant rtn4a8` and similar): kernels and interpreted plans against float64."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from building import build
from icc.compiler.backends.triton.kernels.linear import LinearKernel
from icc.compiler.backends.triton.layouts.registry import LAYOUTS
from icc.compiler.backends.triton.objects.compile import compile_specs
from icc.compiler.backends.triton.objects.loops import loop_faults
from icc.compiler.backends.triton.objects.sass import SassCode, disassemble
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.backends.triton.tiling.choice import Config, Tuner
from icc.compiler.backends.triton.tiling.linear import LinearTilings, pick
from icc.compiler.backends.triton.tiling.product import ProductFacts
from icc.compiler.errors import UsageError
from icc.compiler.ops.body import Body
from icc.compiler.options import CompileOptions
from icc.compiler.program.steps.linear import Columns, Epilogue
from icc.compiler.targets import TARGETS
from icc.compiler.weights.formats.affine import GroupAffine
from icc.compiler.weights.formats.float8 import Float8
from icc.passes import pipelines
from interpreting import LIMITS, make_kernel, run_kernel
from products import DTYPES, Forced, check, rows, weight
from races import detecting, shuffle
from sizes import soak
from test_linear_objects import product as linear_product
from test_w8a8 import IDS, reference, row_parts
from torch import Tensor

TILE: Config = {"decode": 0, "m": 16, "n": 64, "warps": 4, "stages": 2, "splits": 1, "eight": 1}
GATED = Epilogue(Body.parse("t0 = silu a0; t1 = mul t0 a1"), (Columns(0, 1), Columns(17, 1)), 16)


def rounded(x: Tensor, target: str) -> Tensor:
    """Rows after rounding for products on `target`, float64; codes are computed in float32, as in kernels."""
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
        *soak(("h100", "f16", 128, 128, None, 1), ("a100", "bf16", 32, 96, None, 1)),
    ],
)
def test_products(target: str, kind: str, group: int, k: int, epilogue: Epilogue | None, splits: int) -> None:
    """Odd numbers of rows and columns, a bias, strided rows."""
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


@pytest.mark.parametrize(("kind", "group", "splits"), [("bf16", 64, 2), *soak(("f16", 128, 1), ("bf16", 32, 1))])
def test_matrices_of_8_bits_are_made_first_where_rows_are_many(kind: str, group: int, splits: int) -> None:
    """Values do not change: codes minus zero points are exact in e4m3."""
    torch.manual_seed(1)
    n, k, count = 67, 4 * group, 18
    w = weight((n, k), kind, 4, group)
    x, y = rows(count, k, k + 8, kind), torch.full((count + 1, n), torch.nan)
    kernel = make_kernel(
        "linear_q", k=k, n=n, strides={"x": k + 8}, types=(kind, "u8", "", "f32"), stored=f"q4a8g{group}"
    )
    config = {**TILE, "splits": splits, "k": group, "unpacked": 1}
    with detecting(shuffle):
        specs = run_kernel(
            kernel, [x, w.packed, None], [y], shape=Shape(count, False), sizes={"num_tokens": count},
            tuner=Forced(config),
        )  # fmt: skip
    assert [spec.entry for spec in specs[:3]] == ["linear_unpack", "linear_rows", "linear_w8a8"]
    check(y, rounded(x[:, :k], "h100") @ w.values.T, "f32")


INSTRUCTION = {
    "h100": r"QGMMA\.64x128x32\.F32\.E4M3\.E4M3",
    "a100": r"IMMA\.16832\.S8\.S8",
    "l4": r"QMMA\.16832\.F32\.E4M3\.E4M3",
}


@pytest.mark.parametrize("target", ["h100", *soak("a100", "l4")])
def test_objects(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only 8-bit matrix instructions, code operands in registers, no spills, no fault in a loop."""
    monkeypatch.setenv("ICC_CACHE_DIR", str(tmp_path))
    config = {"decode": 0, "m": 128, "n": 64, "k": 128, "warps": 4, "stages": 3, "splits": 1, "eight": 1}
    specs = linear_product("o", "q4a8g128").launches(Shape(1024, False), LIMITS, Forced(config, target))
    [made] = compile_specs([s for s in specs if s.entry == "linear_w8a8"], TARGETS[target]).values()
    text = disassemble(made.binary)
    used = set(re.findall(r"\b\w*MMA\.[\w.]+", text))
    assert used and all(re.match(INSTRUCTION[target], name) for name in used), used
    assert made.spill_bytes == 0 and loop_faults("linear_w8a8", made.loops) == ()
    if target == "h100":  # per step, each lane unpacks 64 codes and adds 64 sums
        [loop] = SassCode(text).loops()
        assert len(loop) <= 340 and not any(line.name.startswith("STS") for line in loop)


def of_many(facts: ProductFacts, tuner: Tuner) -> Config:
    """A tiling with 8-bit rows from 16 rows on, if the product may have them; else the usual choice."""
    many = replace(facts, rows=max(facts.rows, 128))
    found = [c for c in LinearTilings(tuner.target).candidates(many) if c.get("eight")] if facts.rows >= 16 else []
    return {**found[0], "m": 16, "n": 64, "warps": 4} if found else pick(facts, tuner)


@pytest.mark.parametrize(
    ("quant", "target"), [("rtn4a8", "h100"), ("rtn4a8", "a100"), ("gptq4a8", "h100"), *soak(("awq4a8", "l4"))]
)
def test_interpreted_plan(
    quant: str, target: str, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts use 8-bit rows, decodes 16-bit rows."""
    monkeypatch.setattr("icc.compiler.backends.triton.kernels.linear.pick", of_many)
    tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path / "m")
    engine = build(tmp_path / "m", quant, target=TARGETS[target])
    entries = [spec.entry for spec in engine.specs.values()]
    others = entries.count("linear_tile") + entries.count("linear_decode")
    assert entries.count("linear_w8a8") >= 3 and others >= 3
    more = {GroupAffine(group, 4, rows8=True): lambda x: rounded(x, target) for group in (32, 64, 128)}
    expected = reference(engine.graph, IDS, more).float().numpy()
    with engine.llm() as llm:
        found = llm.logits(IDS)
    # a value halfway between two codes may be rounded either way
    assert np.abs(found - expected).max() <= 1e-2 * np.abs(expected).max()


@pytest.mark.parametrize("target", ["a100", "a10g", "l4", "rtx5090", "h100", "b200", "mi300x"])
def test_where_rows_of_8_bits_may_be_multiplied(target: str) -> None:
    """From 128 rows on, with groups of at least 32; for experts only 8-bit floats, because their rows are not
    smoothed."""
    level = TARGETS[target].level
    wanted = "fp8 groups" if TARGETS[target].float8 else "int8 groups" if level else None
    for stored, native in (("q4a8g128", True), ("q4a8g32", True), ("q4a8g16", False), ("q4g128", False)):
        kernel = make_kernel("linear_q", k=256, n=64, types=("bf16", "u8", "", "bf16"), stored=stored)
        assert isinstance(kernel, LinearKernel)
        many = kernel.many_mode(level)
        assert (many.name if many else None) == (wanted if native else None)
        for count in (1, 64, 128, 4096):
            configs = LinearTilings(TARGETS[target]).candidates(kernel.product(count, level))
            assert any(c.get("eight") for c in configs) == (native and bool(level) and count >= 128)
            assert all(not c["decode"] for c in configs if c.get("eight"))
    experts = make_kernel(
        "expert_linear_q", k=64, n=32, stored="q4a8g32", experts=3, topk=2, types=("bf16", "u8", "", "i32", "bf16")
    )
    assert (experts.many_mode(level) is not None) == TARGETS[target].float8  # type: ignore[attr-defined]


def test_what_is_stored_is_that_of_sixteen_bit_rows() -> None:
    """For GPUs the bytes of a weight are equal; for CPUs the passes are equal, because their products always round
    rows."""
    parts = GroupAffine(32, 4).encode(torch.randn(24, 64)).parts
    arrays = {name: value.numpy() for name, value in parts.items()}
    plain, eight = (LAYOUTS.find(GroupAffine(32, 4, rows8=rows8), "product") for rows8 in (False, True))
    assert plain.name == eight.name and np.array_equal(plain.pack(arrays), eight.pack(arrays))
    for method in ("rtn4", "awq4", "gptq4"):
        assert pipelines.quantize(method + "a8", "int8", (), [[1]], cpu=True) == pipelines.quantize(
            method, "int8", (), [[1]], cpu=True
        )


def test_targets_without_such_products_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no products with rows of 8 bits for --target mi300x") as refusal:
        CompileOptions(tmp_path, tmp_path, target="mi300x", quant="awq4a8")
    assert refusal.value.hint == "use --quant awq4"


def test_deterministic_engines_have_one_form_for_all_steps(tiny: ModuleType, tmp_path: Path) -> None:
    """All steps use 16-bit rows, like decodes."""
    tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path / "m")
    engine = build(tmp_path / "m", "rtn4a8", deterministic=True)
    assert not any(spec.entry == "linear_w8a8" for spec in engine.specs.values())
