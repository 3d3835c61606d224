"""8-bit floats: their values, their layouts, and the kernels of both back ends that multiply with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import products
import pytest
import run_lowered as run_lowered_module
import torch
from icc.compiler.backends.cpu.isa import host_isas
from icc.compiler.backends.cpu.layouts.registry import LAYOUTS as CPU_LAYOUTS
from icc.compiler.backends.triton.layouts.registry import LAYOUTS as TRITON_LAYOUTS
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.graph.parser import parse_graph
from icc.compiler.targets import TARGETS
from icc.compiler.weights.formats.base import Parts
from icc.compiler.weights.formats.float8 import Float8
from icc.compiler.weights.formats.registry import find_format
from icc.compiler.weights.handles import PackedWeight
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from interpreting import make_kernel, run_kernel
from run_lowered import lower_graph, optimize, run_lowered
from sizes import soak

NANS = (0x7F, 0xFF)


def random_parts(form: Float8, *shape: int, seed: int = 0, nan: bool = False) -> Parts:
    """Parts with every code, and scales with exponents of either sign."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    if not nan:
        codes[np.isin(codes, NANS)] = 1
    scales = (rng.random((*shape[:-1], form.blocks(shape[-1]))) * 0.02 + 0.001).astype(np.float32)
    return {"codes": torch.from_numpy(codes), "scales": torch.from_numpy(scales)}


@pytest.mark.parametrize("group", [0, 48])
def test_the_format_keeps_what_it_says(group: int) -> None:
    form = Float8(group)
    assert find_format(form.name) == form and form.fitted(100) == form
    weight = torch.randn(40, 100, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 40)[:, None]
    encoded = form.encode(weight)
    assert encoded.snr_db > 30
    values = form.decode(encoded.parts)
    torch.testing.assert_close(values.abs().amax(1), weight.abs().amax(1), rtol=1e-6, atol=0)
    assert float(((values - weight).abs() / weight.abs().amax(1, keepdim=True)).max()) < 2.0**-4
    again = form.encode(values)  # numbers of the format are encoded exactly
    torch.testing.assert_close(form.decode(again.parts), values, rtol=1e-6, atol=0)
    held = form.release(form.hold(encoded.parts, (40, 100)), (40, 100))
    assert all(torch.equal(held[name], value) for name, value in encoded.parts.items())
    assert form.bits_per_weight((40, 96)) == 8 + 32 * (2 if group else 1) / 96


@pytest.mark.parametrize("layouts", [CPU_LAYOUTS, TRITON_LAYOUTS], ids=["cpu", "triton"])
@pytest.mark.parametrize("group", [0, 48])
@pytest.mark.parametrize("shape", [(40, 96), (35, 100), (3, 17, 70)])
def test_layouts_keep_codes_and_scales(layouts, group: int, shape: tuple[int, ...]) -> None:
    form = Float8(group)
    parts = {name: value.numpy() for name, value in random_parts(form, *shape, nan=True).items()}
    layout = layouts.find(form, "product")
    packed = layout.pack(parts)
    assert packed.size == layout.nbytes(shape) and packed.size % 64 == 0
    for name, value in layout.unpack(packed, shape).items():
        assert np.array_equal(value, parts[name]), name


GRAPH = """graph(%token_ids: i64[T]):
  %0: f32[T, {k}] = icc.embedding(%token_ids, @table: f32[40, {k}])
  %1: f32[T, {n}] = icc.linear(%0, @w: f32[{n}, {k}], None)
  return %1
"""


@pytest.mark.parametrize("isa", [host_isas()[0].name, *soak(*(isa.name for isa in host_isas()[1:]))])
@pytest.mark.parametrize(("group", "k"), [(0, 131), (48, 230)])
def test_on_the_cpu(group: int, k: int, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    level = next(level for level in host_isas() if level.name == isa)
    level = replace(level, dense_blocks=tuple(b for b in level.dense_blocks if b.rows in (1, 2)))
    monkeypatch.setattr(run_lowered_module, "host_isas", lambda: (level,))
    form, n = Float8(group), 35
    graph = parse_graph(GRAPH.format(n=n, k=k))
    table, w = random_parts(form, 40, k), random_parts(form, n, k, seed=1)
    w["codes"][7, 3] = NANS[1]
    graph.weights["table"] = PackedWeight.pack(table, form, (40, k))
    graph.weights["w"] = PackedWeight.pack(w, form, (n, k))
    lowered = lower_graph(optimize(graph))
    assert {weight.format for weight in lowered.program.weights.values()} == {form.name}
    ids = np.random.default_rng(0).integers(0, 40, 11).tolist()
    found = run_lowered(lowered, tmp_path, ids)
    expected = (form.decode(table)[ids].double() @ form.decode(w).double().T).numpy()
    assert np.isnan(found[:, 7]).all() and np.isnan(expected[:, 7]).all()
    others = np.arange(n) != 7
    assert np.abs(found - expected)[:, others].max() < 2e-6 * np.abs(expected[:, others]).max()


TILINGS = [
    {"decode": 1, "m": 8, "n": 16, "k": 0, "warps": 2, "stages": 2, "splits": 1},
    {"decode": 0, "m": 16, "n": 16, "k": 0, "warps": 4, "stages": 2, "splits": 2},
]


@pytest.mark.parametrize("tiling", TILINGS, ids=["decode", "tile"])
@pytest.mark.parametrize(
    ("kind", "group", "k", "target"),
    [("bf16", 0, 200, "a100"), ("bf16", 64, 200, "a100"), ("f16", 128, 384, "a100"), ("f16", 128, 384, "rx7900xtx")],
)
def test_on_matrix_units(kind: str, group: int, k: int, target: str, tiling: dict[str, int]) -> None:
    """Products in 16 bits, for GPUs without instructions for 8-bit floats; triton/test_w8a8.py tests other GPUs."""
    torch.manual_seed(0)
    form, n, count = Float8(group), 33, 5 if tiling["decode"] else 17
    parts = random_parts(form, n, k)
    layout = TRITON_LAYOUTS.find(form, "product")
    packed = torch.from_numpy(layout.pack({name: value.numpy() for name, value in parts.items()}))
    x, bias = products.rows(count, k, k + 8, kind, 1), torch.randn(n)
    y = torch.full((count + 1, n), torch.nan, dtype=products.DTYPES[kind])
    kernel = make_kernel(
        "linear_q", k=k, n=n, strides={"x": k + 8}, types=(kind, "u8", "f32", kind), stored=form.name
    )  # fmt: skip
    tuner = products.Forced({**tiling, "k": layout.group}, target)
    run_kernel(
        kernel, [x, packed, bias], [y], shape=Shape(count, bool(tiling["decode"])), sizes={"num_tokens": count},
        tuner=tuner,
    )  # fmt: skip
    products.check(y, x[:count, :k].double() @ form.decode(parts).double().T + bias.double(), kind)


@pytest.mark.parametrize(("kind", "group"), [("f32", 0), ("bf16", 48)])
def test_in_float32(kind: str, group: int) -> None:
    """Rows of float32, and group sizes that matrix instructions do not take."""
    form, n, k = Float8(group), 33, 130
    parts = random_parts(form, n, k)
    packed = TRITON_LAYOUTS.find(form, "product").pack({name: value.numpy() for name, value in parts.items()})
    x, y = products.rows(3, k, k, kind), torch.full((3, n), torch.nan, dtype=products.DTYPES[kind])
    kernel = make_kernel("linear_q", k=k, n=n, types=(kind, "u8", "", kind), stored=form.name)
    run_kernel(kernel, [x, torch.from_numpy(packed), None], [y], shape=Shape(4, True), tuner=Tuner(TARGETS["a100"]))
    products.check(y, x.double() @ form.decode(parts).double().T, kind)


def test_the_quantization(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path)
    graph = load_graph(tmp_path, 64)
    ids = np.random.default_rng(0).integers(3, 119, 13).tolist()
    before = interpret(graph, ids)
    run_passes(graph, pipelines.canonicalize(), PassContext())
    context = PassContext()
    run_passes(graph, pipelines.quantize("fp8", "none", (), ()), context)
    assert len(context.quant_records) == 14 and {record.format for record in context.quant_records} == {"e4m3"}
    assert min(record.weight_snr_db for record in context.quant_records) > 30
    after = torch.log_softmax(interpret(graph, ids), -1)
    wanted = torch.log_softmax(before, -1)
    assert float(((wanted - after) * wanted.exp()).sum(-1).mean()) < 1e-2
