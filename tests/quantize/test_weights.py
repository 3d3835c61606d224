"""Quantized weight handles: rounding against numpy, packing, concatenation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from icc.compiler.errors import UsageError
from icc.compiler.weights.formats.affine import GroupAffine
from icc.compiler.weights.formats.base import Misfit
from icc.compiler.weights.formats.dense import F32
from icc.compiler.weights.formats.registry import find_format
from icc.compiler.weights.handles import Constant, PackedWeight, RoundedWeight, RowConcat


def numpy_round(weight: np.ndarray, bits: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Asymmetric rounding, one group at a time."""
    n, k = weight.shape
    codes = np.zeros((n, k), np.uint8)
    scales = np.zeros((n, k // group), np.float32)
    zeros = np.zeros((n, k // group), np.uint8)
    top = 2**bits - 1
    for i in range(n):
        for g in range(k // group):
            part = weight[i, g * group : (g + 1) * group]
            low, high = min(part.min(), np.float32(0)), max(part.max(), np.float32(0))
            scale = np.float32(np.float16((high - low) / np.float32(top)))
            zero = np.clip(np.round(-low / scale), 0, top)
            codes[i, g * group : (g + 1) * group] = np.clip(np.round(part / scale) + zero, 0, top)
            scales[i, g], zeros[i, g] = scale, zero
    return codes, scales, zeros


@pytest.mark.parametrize(("bits", "group", "k"), [(4, 128, 256), (4, 16, 48), (8, 64, 128)])
def test_rounding_equals_numpy(bits: int, group: int, k: int) -> None:
    weight = torch.randn(9, k, generator=torch.Generator().manual_seed(1)) * 0.1
    form = GroupAffine(group, bits)
    encoded = form.encode(weight)
    parts, snr = encoded.parts, encoded.snr_db
    codes, scales, zeros = numpy_round(weight.numpy(), bits, group)
    assert (parts["codes"].numpy() == codes).all()
    assert (parts["scales"].numpy() == scales).all()
    assert (parts["zeros"].numpy() == zeros).all()
    error = form.decode(parts) - weight
    assert snr == pytest.approx(10 * torch.log10(weight.square().sum() / error.square().sum()).item(), abs=1e-3)
    assert snr > (17 if bits == 4 else 40)
    assert torch.equal(form.rounded(weight), form.decode(parts))


def test_scales_are_fp16_values_and_extreme_weights_stay_finite() -> None:
    weight = torch.tensor([[1e-9] * 16, [3e38] * 16, [0.0] * 16, [-7.3] * 16, [5.1] * 16])
    form = GroupAffine(16, 4)
    parts = form.encode(weight).parts
    assert torch.equal(parts["scales"], parts["scales"].half().float())
    assert torch.isfinite(form.decode(parts)).all()
    assert torch.allclose(form.decode(parts)[2:], weight[2:], rtol=1e-3)


def test_clip_shrinks_the_range() -> None:
    weight, form = torch.cat([torch.linspace(-1, 1, 31), torch.tensor([8.0])]).reshape(1, 32), GroupAffine(32, 4)
    whole, clipped = form.encode(weight).parts, form.encode(weight, torch.full((1, 1), 0.25)).parts
    # [-1, 2] instead of [-1, 8]
    assert clipped["scales"].item() == pytest.approx(whole["scales"].item() / 3, rel=1e-2)
    inner = slice(0, 31)
    errors = [(form.decode(parts) - weight)[0, inner].abs().max() for parts in (clipped, whole)]
    assert errors[0] < errors[1]


def test_rounded_weight_is_lazy_and_describes_itself() -> None:
    class Counting(Constant):
        loads = 0

        def load(self) -> torch.Tensor:
            Counting.loads += 1
            return super().load()

    weight = RoundedWeight(Counting(torch.randn(32, 64).bfloat16()), GroupAffine(32, 4))
    assert (Counting.loads, weight.snr_db) == (0, None)
    assert (weight.shape, weight.dtype, weight.describe()) == ((32, 64), torch.float32, "q4g32[32, 64]")
    assert weight.load().dtype == torch.float32
    assert Counting.loads == 1 and weight.snr_db is not None


@pytest.mark.parametrize("shape", [(16, 64), (3, 16, 32)])
@pytest.mark.parametrize("bits", [4, 8])
def test_packing_keeps_every_code_in_the_bytes_that_the_format_states(shape: tuple[int, ...], bits: int) -> None:
    form = GroupAffine(16, bits)
    encoded = form.encode(torch.randn(*shape))
    packed = PackedWeight.pack(encoded.parts, form, shape, encoded.snr_db)
    again = packed.parts()
    assert all(torch.equal(again[name], value) for name, value in encoded.parts.items())
    assert sum(held.numel() * held.itemsize for held in packed.held.values()) == form.nbytes(shape)
    assert form.bits_per_weight(shape) == bits + 24 / 16
    assert packed.shape == shape


def test_row_concat() -> None:
    sources = [Constant(torch.randn(n, 32)) for n in (16, 24)]
    plain = RowConcat(tuple(sources))
    assert torch.equal(plain.load(), torch.cat([s.value for s in sources]))
    assert (plain.describe(), plain.storage) == ("f32[40, 32]", F32)
    rounded = RowConcat(tuple(RoundedWeight(s, GroupAffine(16, 4)) for s in sources))
    assert torch.equal(rounded.storage.decode(rounded.parts()), rounded.load())
    assert rounded.describe() == "q4g16[40, 32]"
    mixed = RowConcat(tuple(RoundedWeight(s, GroupAffine(16, bits)) for s, bits in zip(sources, (4, 8), strict=True)))
    assert mixed.storage == F32
    assert RowConcat((Constant(torch.ones(2)), Constant(torch.zeros(1)))).load().tolist() == [1, 1, 0]


@pytest.mark.parametrize("name", ["f32", "bf16", "f16", "i32", "q4g32", "q8g128"])
def test_formats_are_found_by_the_names_that_graph_texts_show(name: str) -> None:
    form = find_format(name)
    assert (form.name, str(form)) == (name, name) and form == find_format(name)
    with pytest.raises(UsageError, match="unknown storage format 'q5g32'"):
        find_format("q5g32")


def test_a_format_takes_the_largest_group_that_fits() -> None:
    assert [find_format("q4", 64).fitted(k).name for k in (256, 96, 48)] == ["q4g64", "q4g32", "q4g16"]
    with pytest.raises(Misfit, match="K = 40 is not a multiple of 16"):
        find_format("q4").fitted(40)
