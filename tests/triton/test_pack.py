"""The packed format: round trips at odd sizes, sizes as stated, and what the words keep of the scales."""

from __future__ import annotations

import numpy as np
import pytest
from icc.compiler.backends.triton.layouts.formats import matrix_nbytes, packed_nbytes
from icc.compiler.backends.triton.layouts.pack import pack_quantized, stored_scales, unpack_quantized


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k", "group"), [(1, 16, 16), (17, 384, 128), (5, 96, 32), (64, 320, 64)])
def test_round_trip(bits: int, n: int, k: int, group: int) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2**bits, (2, n, k)).astype(np.uint8)
    zeros = rng.integers(0, 2**bits, (2, n, k // group)).astype(np.uint8)
    scales = np.exp(rng.normal(0, 9, zeros.shape)).astype(np.float32)
    packed = pack_quantized(codes, scales, zeros, bits, group)
    assert packed.dtype == np.uint8 and packed.size == packed_nbytes(f"gq{bits}", (2, n, k), group)
    size = matrix_nbytes(n, k, bits, group)
    assert size % 64 == 0
    for expert in range(2):
        got = unpack_quantized(packed[expert * size : (expert + 1) * size], (n, k), bits, group)
        np.testing.assert_array_equal(got[0], codes[expert])
        np.testing.assert_array_equal(got[1], stored_scales(scales[expert]))
        np.testing.assert_array_equal(got[2], zeros[expert])


def test_scales_keep_sixteen_bits() -> None:
    scales = np.exp(np.random.default_rng(1).normal(0, 20, 4096)).astype(np.float32)
    np.testing.assert_allclose(stored_scales(scales), scales, rtol=2**-16)
    assert stored_scales(np.float32([0.0, 1.0, -0.5])).tolist() == [0.0, 1.0, -0.5]


def test_bits_per_weight() -> None:
    assert packed_nbytes("gq4", (4096, 4096), 128) * 8 == 4.25 * 4096 * 4096
    assert packed_nbytes("bf16", (3, 5, 7)) == 256


def test_a_group_that_does_not_divide_k_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a multiple of 16 that divides K = 40"):
        pack_quantized(np.zeros((4, 40), np.uint8), np.ones((4, 2), np.float32), np.zeros((4, 2), np.uint8), 4, 16)
