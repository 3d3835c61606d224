"""The block formats of GGUF files: bit-exact values, and layouts that lose nothing."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_models import random_blocks
from icc.compiler.backends.cpu.layouts.registry import LAYOUTS as CPU
from icc.compiler.backends.triton.layouts.registry import LAYOUTS as TRITON
from icc.compiler.errors import TensorError
from icc.compiler.frontend.source.gguf.tensors import BlockTensor
from icc.compiler.weights.formats.base import Misfit
from icc.compiler.weights.formats.ggml import GGML_FORMATS, block_bytes, parts_of
from icc.compiler.weights.formats.registry import find_format
from icc.compiler.weights.handles import GivenRows
from icc.runtime.format.gguf import GgufTensor

KINDS = sorted(GGML_FORMATS)


def blocks(kind: str, rows: int, k: int, seed: int = 0) -> np.ndarray:
    number = gguf.GGMLQuantizationType[kind.upper()]
    return random_blocks(number, rows, k, np.random.default_rng(seed))


def parts(kind: str, raw: np.ndarray) -> dict[str, torch.Tensor]:
    form = GGML_FORMATS[kind]
    return parts_of(form, torch.from_numpy(raw.reshape(*raw.shape[:-1], -1, block_bytes(form))))


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_gguf_to_the_last_bit(kind: str) -> None:
    form, raw = find_format(kind), blocks(kind, 6, 768)
    if kind == "mxfp4":
        raw.reshape(6, -1, 17)[0, :4, 0] = (0, 1, 2, 254)  # the smallest powers of two, and the largest
    found = parts(kind, raw)
    assert {name: (a.shape, a.working) for name, a in form.arrays((6, 768)).items()} == {
        name: (tuple(value.shape), value.dtype) for name, value in found.items()
    }
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.upper()])
    assert form.decode(found).numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_what_gguf_quantizes(kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind.upper()]
    raw = gguf.quants.quantize(np.random.default_rng(1).standard_normal((5, 96), np.float32), number)
    expected = gguf.quants.dequantize(raw, number)
    assert find_format(kind).decode(parts(kind, raw)).numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layouts", [CPU, TRITON], ids=["cpu", "triton"])
def test_layouts_lose_nothing_and_add_little(layouts, kind: str) -> None:
    form = GGML_FORMATS[kind]
    k = max(form.size, 64) * 3  # does not fill the last header
    for shape in ((40, k), (7, k), (2, 17, k)):
        found = {n: v.numpy() for n, v in parts(kind, blocks(kind, int(np.prod(shape[:-1])), k)).items()}
        found = {n: v.reshape(*shape[:-1], -1) for n, v in found.items()}
        layout = layouts.find(form, "product")
        packed = layout.pack(found)
        assert packed.size == layout.nbytes(shape)
        again = layout.unpack(packed, shape)
        assert again.keys() == found.keys()
        assert all(again[name].tobytes() == value.tobytes() for name, value in found.items())
    stored = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
    if layouts is CPU and not kind.startswith(("iq1", "iq2", "iq3", "tq", "nv")):
        assert layout.nbytes((1600, 2048)) <= 1.037 * 1600 * 2048 // stored[0] * stored[1]


def test_a_block_has_a_size() -> None:
    form = find_format("q4_k")
    assert form.name == "q4_k" and form.bits_per_weight((4, 512)) == 4.5
    with pytest.raises(Misfit, match="multiple of 256"):
        form.fitted(128)
    with pytest.raises(ValueError, match="multiple of 256"):
        CPU.find(form, "product").pack({"codes": np.zeros((4, 128), np.uint8)})


def tensor(path: Path, kind: str, raw: np.ndarray, shape: tuple[int, ...]) -> BlockTensor:
    path.write_bytes(raw.tobytes())
    return BlockTensor(GgufTensor("blk.0.w", path, 0, raw.nbytes, shape, kind), GGML_FORMATS[kind])


def test_rows_in_another_order_keep_their_blocks(tmp_path: Path) -> None:
    raw = blocks("q5_k", 6, 512)
    weight = tensor(tmp_path / "a", "q5_k", raw, (6, 512))
    moved = GivenRows((weight,), torch.tensor([5, 0, 3, 1, 2, 4]))
    assert moved.describe() == "q5_k[6, 512]" and moved.given
    assert torch.equal(moved.load(), weight.load()[[5, 0, 3, 1, 2, 4]])
    gate = tensor(tmp_path / "b", "q5_k", raw, (2, 3, 512))
    both = GivenRows((gate, gate))
    assert both.shape == (2, 6, 512)
    assert torch.equal(both.load(), torch.cat([gate.load(), gate.load()], 1))


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    raw = blocks("q4_0", 2, 64)
    raw[1, :2] = np.array([np.nan], np.float16).view(np.uint8)
    with pytest.raises(TensorError, match=r"'blk\.0\.w': has scales that are NaN or Inf"):
        tensor(tmp_path / "a", "q4_0", raw, (2, 64)).parts()
