"""Formats of 16 values and a scale per block: the stored values, and the kernels of both back ends."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import products
import pytest
import torch
from icc.compiler.backends.cpu.layouts.blocks import BlockTiles
from icc.compiler.backends.cpu.layouts.registry import LAYOUTS as CPU_LAYOUTS
from icc.compiler.backends.triton.layouts.registry import LAYOUTS as TRITON_LAYOUTS
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.parser import parse_graph
from icc.compiler.weights.formats.base import Misfit, Parts
from icc.compiler.weights.formats.registry import find_format
from icc.compiler.weights.formats.tables import TableFormat
from icc.compiler.weights.handles import PackedWeight
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from interpreting import make_kernel, run_kernel
from run_lowered import lower_graph, optimize, run_lowered
from test_ggml_kernels import few_blocks, int8_rows

__all__ = ["few_blocks"]
NAMES = ["nf4g64", "nf4_f32g32", "fp4_f32g64", "mxfp4", "iq4_nl", "nvfp4_xg64"]
OURS = {"nf4g64": 20.0, "nf4g32": 20.5, "mxfp4": 17.5, "iq4_nl": 20.0}


def random_parts(form: TableFormat, *shape: int, seed: int = 0) -> Parts:
    rng = torch.Generator().manual_seed(seed)
    found: Parts = {}
    for name, array in form.arrays(shape).items():
        if name == "codes":
            found[name] = torch.randint(0, 16, shape, generator=rng, dtype=torch.uint8)
        elif name == "exponents":
            found[name] = torch.randint(118, 124, array.shape, generator=rng, dtype=torch.uint8)
        elif name == "group_scales":  # also subnormal numbers
            found[name] = torch.randint(0, 120, array.shape, generator=rng, dtype=torch.uint8)
        else:
            found[name] = (torch.rand(array.shape, generator=rng) * 0.02 + 0.001).to(array.dtype).to(torch.float32)
    return found


@pytest.mark.parametrize("name", OURS)
def test_what_is_encoded(name: str) -> None:
    form = find_format(name)
    assert form.name == name
    weight = torch.randn(40, 192, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[3, :64] = 0
    encoded = form.encode(weight)
    assert encoded.snr_db > OURS[name]
    held = form.release(form.hold(encoded.parts, (40, 192)), (40, 192))
    assert torch.equal(form.decode(held), form.rounded(weight)) and form.decode(held)[3, :32].abs().max() < 1e-6
    again = form.encode(form.decode(encoded.parts))  # values of the format are kept
    kept = torch.ones(40, 192, dtype=torch.bool)
    kept[3] = name != "mxfp4"  # mxfp4 has no zero scale: zeros become small values
    assert torch.equal(form.decode(again.parts)[kept], form.decode(encoded.parts)[kept]) or name == "iq4_nl"


def test_groups_fit_the_width() -> None:
    assert find_format("nf4", 128).fitted(576).name == "nf4g64"
    assert find_format("mxfp4").fitted(96).name == "mxfp4"
    for name, k in (("mxfp4", 80), ("nf4", 24)):
        with pytest.raises(Misfit, match=f"K = {k} is not a multiple of"):
            find_format(name).fitted(k)
    with pytest.raises(Misfit, match="a format of files"):
        find_format("nvfp4_xg64").encode(torch.ones(2, 64))


@pytest.mark.parametrize("layouts", [CPU_LAYOUTS, TRITON_LAYOUTS], ids=["cpu", "triton"])
@pytest.mark.parametrize("name", NAMES)
def test_layouts_lose_nothing(layouts, name: str) -> None:
    form = find_format(name)
    assert form.name == name
    for shape in ((40, 192), (2, 17, 64)):
        parts = {part: value.numpy() for part, value in random_parts(form, *shape).items()}
        layout = layouts.find(form, "product")
        packed = layout.pack(parts)
        assert packed.size == layout.nbytes(shape)
        again = layout.unpack(packed, shape)
        assert all(again[part].tobytes() == value.tobytes() for part, value in parts.items())


def test_tables_that_are_no_integers_are_read_to_eight_bits() -> None:
    for name, bound in (("nf4g64", 0.004), ("fp4_f32g64", 0.0032)):
        form = find_format(name)
        read = BlockTiles.of(form).reader  # type: ignore[arg-type]
        seen = [level / read.units for level in read.entries]
        assert max(abs(a - b) for a, b in zip(seen, form.table, strict=True)) < bound


def test_on_the_cpu(tmp_path: Path, few_blocks: None) -> None:
    """A table and three products, each in another format, in one library."""
    widths, names = (40, 192, 64, 128, 35), ["nf4_f32g32", "fp4_f32g64", "nvfp4_xg64", "nf4g64"]
    lines = ["  %0: f32[T, 192] = icc.embedding(%token_ids, @w0: f32[40, 192])\n"]
    lines += [
        f"  %{i}: f32[T, {n}] = icc.linear(%{i - 1}, @w{i}: f32[{n}, {k}], None)\n"
        for i, (k, n) in enumerate(pairwise(widths[1:]), 1)
    ]
    graph = parse_graph(f"graph(%token_ids: i64[T]):\n{''.join(lines)}  return %3\n")
    for i, name in enumerate(names):
        shape = (40, 192) if i == 0 else (widths[i + 1], widths[i])
        form = find_format(name)
        graph.weights[f"w{i}"] = PackedWeight.pack(random_parts(form, *shape, seed=i), form, shape)
    lowered = lower_graph(optimize(graph))
    assert {w.format for w in lowered.program.weights.values()} == set(names)
    ids = np.random.default_rng(0).integers(0, 40, 11).tolist()
    found = run_lowered(lowered, tmp_path, ids)
    x = graph.weights["w0"].load()[ids]
    for i in (1, 2, 3):
        x = (
            int8_rows(x, 16 if names[i].startswith("nvfp4") else 32) @ graph.weights[f"w{i}"].load().double().T
        ).float()
    # kernels round the tables of NF4 and FP4 to eight bits
    assert np.abs(found - x.numpy()).max() < 0.02 * float(x.abs().max())
    rows = run_rows(graph, tmp_path, ids)
    assert np.array_equal(rows, graph.weights["w0"].load()[ids].numpy())


def run_rows(graph, folder: Path, ids: list[int]) -> np.ndarray:
    """The rows [ids, width] that the graph's table alone gives."""
    rows = parse_graph(
        "graph(%token_ids: i64[T]):\n  %0: f32[T, 192] = icc.embedding(%token_ids, @w0: f32[40, 192])\n  return %0\n"
    )
    rows.weights["w0"] = graph.weights["w0"]
    return run_lowered(lower_graph(optimize(rows)), folder / "rows", ids)


@pytest.mark.parametrize("name", ["nf4_f32g64", "fp4_f32g64", "nvfp4_xg64", "mxfp4"])
def test_on_a_gpu(name: str) -> None:
    form, n, k = find_format(name), 33, 192
    parts = random_parts(form, n, k)  # type: ignore[arg-type]
    packed = TRITON_LAYOUTS.find(form, "product").pack({part: value.numpy() for part, value in parts.items()})
    x, y = products.rows(3, k, k, "f32"), torch.full((3, n), torch.nan)
    kernel = make_kernel("linear_q", k=k, n=n, types=("f32", "u8", "", "f32"), stored=form.name)
    run_kernel(kernel, [x, torch.from_numpy(packed), None], [y], shape=Shape(4, True))
    products.check(y, x.double() @ form.decode(parts).double().T, "f32")


def test_as_methods_of_a_compile(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path)
    for quant, form, group in (("nf4", "nf4g64", None), ("nf4", "nf4g32", 32), ("mxfp4", "mxfp4", None)):
        graph = load_graph(tmp_path, 64)
        for phase in (pipelines.canonicalize(), pipelines.quantize(quant, "int8", (), (), group)):
            run_passes(graph, phase, PassContext())
        names = [weight.storage.name for weight in graph.weights.values()]
        down = "nf4g32" if quant == "nf4" else "mxfp4"  # rows of 96
        assert names.count(form) + (names.count(down) if down != form else 0) == 14
        assert names.count("q8g64") + names.count("q8g32") == 1  # the head
