"""Quantized weight handles: rounding against numpy, packing, concatenation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from icc.compiler.weights.handles import Constant, PackedWeight, RoundedWeight, RowConcat, quant_parts, round_to_groups


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
    parts, snr = round_to_groups(weight, bits, group)
    codes, scales, zeros = numpy_round(weight.numpy(), bits, group)
    assert (parts.codes.numpy() == codes).all()
    assert (parts.scales.numpy() == scales).all()
    assert (parts.zeros.numpy() == zeros).all()
    error = parts.dequantize() - weight
    assert snr == pytest.approx(10 * torch.log10(weight.square().sum() / error.square().sum()).item(), abs=1e-3)
    assert snr > (17 if bits == 4 else 40)


def test_scales_are_fp16_values_and_extreme_weights_stay_finite() -> None:
    weight = torch.tensor([[1e-9] * 16, [3e38] * 16, [0.0] * 16, [-7.3] * 16, [5.1] * 16])
    parts, _ = round_to_groups(weight, 4, 16)
    assert torch.equal(parts.scales, parts.scales.half().float())
    assert torch.isfinite(parts.dequantize()).all()
    assert torch.allclose(parts.dequantize()[2:], weight[2:], rtol=1e-3)


def test_clip_shrinks_the_range() -> None:
    weight = torch.cat([torch.linspace(-1, 1, 31), torch.tensor([8.0])]).reshape(1, 32)
    whole, _ = round_to_groups(weight, 4, 32)
    clipped, _ = round_to_groups(weight, 4, 32, torch.full((1, 1), 0.25))
    assert clipped.scales.item() == pytest.approx(whole.scales.item() / 3, rel=1e-2)  # [-1, 2] instead of [-1, 8]
    inner = slice(0, 31)
    assert (clipped.dequantize() - weight)[0, inner].abs().max() < (whole.dequantize() - weight)[0, inner].abs().max()


def test_rounded_weight_is_lazy_and_describes_itself() -> None:
    class Counting(Constant):
        loads = 0

        def load(self) -> torch.Tensor:
            Counting.loads += 1
            return super().load()

    weight = RoundedWeight(Counting(torch.randn(32, 64).bfloat16()), 4, 32)
    assert (Counting.loads, weight.snr_db) == (0, None)
    assert (weight.shape, weight.dtype, weight.describe()) == ((32, 64), torch.float32, "q4g32[32, 64]")
    assert weight.load().dtype == torch.float32
    assert Counting.loads == 1 and weight.snr_db is not None


@pytest.mark.parametrize("shape", [(16, 64), (3, 16, 32)])
@pytest.mark.parametrize("bits", [4, 8])
def test_packing_keeps_every_code(shape: tuple[int, ...], bits: int) -> None:
    parts, snr = round_to_groups(torch.randn(*shape), bits, 16)
    packed = PackedWeight.pack(parts, bits, 16, snr)
    again = packed.parts()
    assert torch.equal(again.codes, parts.codes) and torch.equal(again.zeros, parts.zeros)
    assert torch.equal(again.scales, parts.scales)
    assert packed.held.codes.numel() * 8 == parts.codes.numel() * bits
    assert packed.shape == shape


def test_row_concat() -> None:
    sources = [Constant(torch.randn(n, 32)) for n in (16, 24)]
    plain = RowConcat(tuple(sources))
    assert torch.equal(plain.load(), torch.cat([s.value for s in sources]))
    assert (plain.describe(), quant_parts(plain)) == ("f32[40, 32]", None)
    rounded = RowConcat(tuple(RoundedWeight(s, 4, 16) for s in sources))
    parts = quant_parts(rounded)
    assert parts is not None
    assert torch.equal(parts.dequantize(), rounded.load())
    assert rounded.describe() == "q4g16[40, 32]"
    mixed = RowConcat((RoundedWeight(sources[0], 4, 16), RoundedWeight(sources[1], 8, 16)))
    assert quant_parts(mixed) is None
    assert RowConcat((Constant(torch.ones(2)), Constant(torch.zeros(1)))).load().tolist() == [1, 1, 0]
