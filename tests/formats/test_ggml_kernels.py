"""Every block format in the kernels of the CPU: rows of a table, and products with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import run_lowered as run_lowered_module
import torch
from cpu_levels import runnable_amx, runnable_avxvnni
from gguf_models import random_blocks
from icc.compiler.backends.cpu.isa import host_isas
from icc.compiler.backends.cpu.kernels import amx
from icc.compiler.frontend.source.gguf.tensors import BlockTensor
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.parser import parse_graph
from icc.compiler.weights.formats.blocks import BlockFormat
from icc.compiler.weights.formats.ggml import GGML_FORMATS
from icc.compiler.weights.formats.registry import find_format
from icc.compiler.weights.handles import Constant, PackedWeight, QuantizedWeight, RoundedWeight
from icc.runtime.format.gguf import GgufTensor
from run_lowered import lower_graph, optimize, run_lowered
from sizes import soak

# all variants of kernels: bits, upper bits in a line of their own, minima, tables, integer scales, powers of two
KINDS = ["q4_0", "q8_0", "q2_k", "q3_k", "q5_k", "q6_k", "iq4_nl", "iq2_xs", "mxfp4"]
OTHERS = soak(*sorted(set(GGML_FORMATS) - set(KINDS)))
# icc's own formats, whose block sizes are no powers of two: tables of 8 levels, upper bits, and codes of 8 bits
MIXED = ["n3g32b192", "s5g32b96", "s8g64b192", *soak("n2g32b192", "n4g32b96", "s6g32b192", "a4g32b96", "a5g64b192")]
# a scale and an offset per group of any size (MLX), and -1, 0 and 1 (BitNet)
GIVEN = ["oq4_bf16g64", "oq8g64", "t2_f32g128", *soak("oq2g32", "oq3g128", "oq5g64", "oq6_bf16g32", "oq8_bf16g32")]
ROWS, N, K = 40, 35, 768


def random_parts(kind: str, rows: int, seed: int) -> QuantizedWeight:
    """Random codes, and scales of both signs and offsets, some of them 0."""
    form, random = find_format(kind), torch.Generator().manual_seed(seed)
    assert isinstance(form, BlockFormat)
    parts: dict[str, torch.Tensor] = {}
    for name, array in form.arrays((rows, K)).items():
        values = torch.randn(array.shape, generator=random) * (torch.rand(array.shape, generator=random) < 0.9)
        parts[name] = (3 * values).to(array.dtype).to(array.working)
    top = 2**form.bits if form.mins else 3
    parts["codes"] = torch.randint(0, top, (rows, K), generator=random, dtype=torch.uint8)
    return PackedWeight.pack(parts, form, (rows, K))


def weight(folder: Path, kind: str, rows: int, seed: int) -> QuantizedWeight:
    if find_format(kind).name.startswith(("oq", "t2")):
        return random_parts(kind, rows, seed)
    if kind not in GGML_FORMATS:
        values = torch.randn(rows, K, generator=torch.Generator().manual_seed(seed))
        return RoundedWeight(Constant(values), find_format(kind))
    raw = random_blocks(gguf.GGMLQuantizationType[kind.upper()], rows, K, np.random.default_rng(seed))
    path = folder / f"{kind}-{seed}"
    path.write_bytes(raw.tobytes())
    return BlockTensor(GgufTensor(kind, path, 0, raw.nbytes, (rows, K), kind), GGML_FORMATS[kind])


def graph_of(folder: Path, kind: str) -> Graph:
    """A graph whose logits are rows of a table through a product; table and matrix have one format."""
    graph = parse_graph(
        "graph(%token_ids: i64[T]):\n"
        f"  %0: f32[T, {K}] = icc.embedding(%token_ids, @table: f32[{ROWS}, {K}])\n"
        f"  %1: f32[T, {N}] = icc.linear(%0, @w: f32[{N}, {K}], None)\n"
        "  return %1\n"
    )
    graph.weights["table"], graph.weights["w"] = weight(folder, kind, ROWS, 1), weight(folder, kind, N, 2)
    return graph


def int8_rows(x: torch.Tensor, group: int) -> torch.Tensor:
    """The values of float32 activations after quantize_rows, float64."""
    groups = x.unflatten(-1, (-1, group))
    peak = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    limit = torch.tensor(127.0)  # torch divides a Python number by a tensor with a rounded reciprocal
    return ((groups * (limit / peak)).round().double() * (peak / limit)).flatten(-2)


@pytest.fixture
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-kernels for two numbers of rows instead of eleven: all have the same source."""
    isa = host_isas()[0]
    some = tuple(b for b in isa.quant_blocks if b.rows in (1, 8))
    monkeypatch.setattr(run_lowered_module, "host_isas", lambda: (replace(isa, quant_blocks=some),))


# table entries (with a bias here), parts of codes, and bytes, whose sums begin at minus 128 times the sum of x
@pytest.mark.parametrize("kind", ["iq4_nl", "q6_k", "q8_0"])
def test_with_avx_vnni(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isa = runnable_avxvnni()
    some = replace(isa, quant_blocks=tuple(b for b in isa.quant_blocks if b.rows in (1, 6)))
    monkeypatch.setattr(run_lowered_module, "host_isas", lambda: (some,))
    check_on_the_cpu(kind, tmp_path)


# entries of a table, upper bits of codes beside the lower ones, four codes in a byte, and whole bytes
@pytest.mark.parametrize("kind", ["iq4_nl", "q6_k", "q2_k", *soak("q5_0", "q8_0")])
def test_with_amx(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isa = runnable_amx()
    some = replace(isa, quant_blocks=isa.quant_blocks[:1], tile_blocks=isa.tile_blocks[:1])
    monkeypatch.setattr(run_lowered_module, "host_isas", lambda: (some,))
    monkeypatch.setattr(amx, "matrix_cycles", lambda *_: 0.0)
    check_on_the_cpu(kind, tmp_path)


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS, *MIXED, *GIVEN])
def test_on_the_cpu(kind: str, tmp_path: Path, few_blocks: None) -> None:
    check_on_the_cpu(kind, tmp_path)


def check_on_the_cpu(kind: str, tmp_path: Path) -> None:
    graph = graph_of(tmp_path, kind)
    lowered = lower_graph(optimize(graph))
    assert {w.format for w in lowered.program.weights.values()} == {kind}
    for count in (1, 11):  # one row, and more rows than a block has
        ids = np.random.default_rng(count).integers(0, ROWS, count).tolist()
        found = run_lowered(lowered, tmp_path / str(count), ids)
        x = graph.weights["table"].load()[ids]
        expected = int8_rows(x, find_format(kind).row_group) @ graph.weights["w"].load().double().T
        assert np.abs(found - expected.numpy()).max() < 2e-5 * float(expected.abs().max()), count
