"""Packed layouts: round trips, sizes, and the precision of stored scales."""

from __future__ import annotations

import numpy as np
import pytest
from icc.compiler.backends.cpu.layouts import pack
from icc.compiler.backends.cpu.layouts.formats import QUANT_BITS


@pytest.mark.parametrize("fmt", ["f32", "bf16", "f16", "tile_f32", "tile_bf16", "tile_f16"])
@pytest.mark.parametrize("shape", [(1, 1), (15, 3), (16, 8), (17, 5), (3, 33, 7)])
def test_dense_round_trip(fmt: str, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    packed = pack.pack_dense(values, fmt)
    assert packed.dtype == np.uint8 and packed.size == pack.packed_nbytes(fmt, shape) and packed.size % 64 == 0
    error = {"f32": 0.0, "bf16": 2**-8, "f16": 2**-11}[fmt.removeprefix("tile_")]
    assert np.all(np.abs(pack.unpack_dense(packed, fmt, shape) - values) <= error * np.abs(values))


def test_bf16_input_is_kept_and_nan_survives() -> None:
    bits = np.array([[0x3F80, 0x7FC1, 0xFF80, 0x0001]], np.uint16)
    assert np.array_equal(pack.pack_dense(bits, "bf16")[:8].view(np.uint16), bits[0])
    signalling = np.array([0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(pack.bf16_values(pack.bf16_bits(signalling))[0])


@pytest.mark.parametrize("fmt", ["q4", "q8", "q8s"])
@pytest.mark.parametrize(("n", "k", "group"), [(1, 16, 16), (15, 64, 32), (16, 128, 128), (33, 256, 64)])
def test_quantized_round_trip(fmt: str, n: int, k: int, group: int) -> None:
    rng, bits = np.random.default_rng(1), QUANT_BITS[fmt]
    codes = rng.integers(0, 2**bits, (n, k)).astype(np.uint8)
    zeros = rng.integers(0, 2**bits, (n, k // group)).astype(np.uint8)
    scales = (10.0 ** rng.uniform(-3, 3, (n, k // group))).astype(np.float32)
    packed = pack.pack_quantized(codes, scales, zeros, fmt, group)
    assert packed.size == pack.packed_nbytes(fmt, (n, k), group) and packed.size % 64 == 0
    got_codes, got_scales, got_zeros = pack.unpack_quantized(packed, (n, k), fmt, group)
    assert np.array_equal(got_codes, codes) and np.array_equal(got_zeros, zeros)
    assert np.array_equal(got_scales, pack.stored_scales(scales))
    largest = np.abs(scales).max()
    assert np.all(np.abs(got_scales - scales) <= np.maximum(2.0**-11 * scales, 2.0**-24 * largest))


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1.0, 1e20])
def test_scales_keep_eleven_bits_at_any_magnitude(magnitude: float) -> None:
    scales = (np.random.default_rng(2).uniform(0.5, 1.0, (20, 3)) * magnitude).astype(np.float32)
    assert np.all(np.abs(pack.stored_scales(scales) / scales - 1) <= 2.0**-11)


def test_group_that_does_not_fit_is_refused() -> None:
    codes = np.zeros((4, 40), np.uint8)
    with pytest.raises(ValueError, match="multiple of 16"):
        pack.pack_quantized(codes, np.ones((4, 5), np.float32), np.zeros((4, 5), np.uint8), "q4", 8)
