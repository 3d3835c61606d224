"""The packed format: round trips at odd sizes, stated sizes, and the precision of scales in words."""

from __future__ import annotations

import numpy as np
import pytest
from icc.compiler.backends.triton.layouts.affine import AffineGroups, stored_scales
from icc.compiler.backends.triton.layouts.registry import LAYOUTS
from icc.compiler.weights.formats.affine import GroupAffine
from icc.compiler.weights.formats.dense import BF16


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k", "group"), [(1, 16, 16), (17, 384, 128), (5, 96, 32), (64, 320, 64)])
def test_round_trip(bits: int, n: int, k: int, group: int) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2**bits, (2, n, k)).astype(np.uint8)
    zeros = rng.integers(0, 2**bits, (2, n, k // group)).astype(np.uint8)
    scales = np.exp(rng.normal(0, 9, zeros.shape)).astype(np.float32)
    layout = AffineGroups.of(GroupAffine(group, bits))
    packed = layout.pack({"codes": codes, "scales": scales, "zeros": zeros})
    assert layout.name == f"gq{bits}" and packed.dtype == np.uint8 and packed.size == layout.nbytes((2, n, k))
    assert layout.matrix_nbytes(n, k) % 64 == 0
    got = layout.unpack(packed, (2, n, k))
    np.testing.assert_array_equal(got["codes"], codes)
    np.testing.assert_array_equal(got["scales"], stored_scales(scales))
    np.testing.assert_array_equal(got["zeros"], zeros)


def test_scales_keep_sixteen_bits() -> None:
    scales = np.exp(np.random.default_rng(1).normal(0, 20, 4096)).astype(np.float32)
    np.testing.assert_allclose(stored_scales(scales), scales, rtol=2**-16)
    assert stored_scales(np.float32([0.0, 1.0, -0.5])).tolist() == [0.0, 1.0, -0.5]


def test_bits_per_weight() -> None:
    assert LAYOUTS.find(GroupAffine(128, 4), "product").nbytes((4096, 4096)) * 8 == 4.25 * 4096 * 4096
    assert LAYOUTS.find(BF16, "product").nbytes((3, 5, 7)) == 256


def test_a_group_that_does_not_divide_k_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a multiple of 16 that divides K = 40"):
        AffineGroups.of(GroupAffine(16, 4)).pack(
            {"codes": np.zeros((4, 40), np.uint8), "scales": np.ones((4, 2)), "zeros": np.zeros((4, 2), np.uint8)}
        )
