"""Packed layouts: round trips, sizes, and the precision of stored scales."""

from __future__ import annotations

import numpy as np
import pytest
from icc.compiler.backends.cpu.layouts.affine import AffineTiles
from icc.compiler.backends.cpu.layouts.dense import ROWS, TILES
from icc.compiler.backends.cpu.layouts.split import SplitTiles
from icc.compiler.backends.cpu.layouts.tiles import stored_scales
from icc.compiler.weights.formats.affine import GroupAffine
from icc.runtime.format.bfloat16 import bf16_bits, bf16_values

DENSE = {layout.name: layout for layout in (*ROWS.values(), *TILES.values()) if layout.name != "i32"}


@pytest.mark.parametrize("fmt", DENSE)
@pytest.mark.parametrize("shape", [(1, 1), (15, 3), (16, 8), (17, 5), (3, 33, 7)])
def test_dense_round_trip(fmt: str, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    layout = DENSE[fmt]
    packed = layout.pack({"values": values})
    assert packed.dtype == np.uint8 and packed.size == layout.nbytes(shape) and packed.size % 64 == 0
    error = {"f32": 0.0, "bf16": 2**-8, "f16": 2**-11}[fmt.removeprefix("tile_")]
    assert np.all(np.abs(layout.unpack(packed, shape)["values"] - values) <= error * np.abs(values))


def test_bf16_input_is_kept_and_nan_survives() -> None:
    bits = np.array([[0x3F80, 0x7FC1, 0xFF80, 0x0001]], np.uint16)
    assert np.array_equal(ROWS["bf16"].pack({"values": bits})[:8].view(np.uint16), bits[0])
    signalling = np.array([0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(bf16_values(bf16_bits(signalling))[0])


@pytest.mark.parametrize(
    ("name", "bits", "kind"), [("q4", 4, AffineTiles), ("q8", 8, AffineTiles), ("q8s", 8, SplitTiles)]
)
@pytest.mark.parametrize(("n", "k", "group"), [(1, 16, 16), (15, 64, 32), (16, 128, 128), (33, 256, 64)])
def test_quantized_round_trip(name: str, bits: int, kind: type[AffineTiles], n: int, k: int, group: int) -> None:
    rng, layout = np.random.default_rng(1), kind.of(GroupAffine(group, bits))
    assert layout.name == name
    codes = rng.integers(0, 2**bits, (n, k)).astype(np.uint8)
    zeros = rng.integers(0, 2**bits, (n, k // group)).astype(np.uint8)
    scales = (10.0 ** rng.uniform(-3, 3, (n, k // group))).astype(np.float32)
    packed = layout.pack({"codes": codes, "scales": scales, "zeros": zeros})
    assert packed.size == layout.nbytes((n, k)) and packed.size % 64 == 0
    got = layout.unpack(packed, (n, k))
    assert np.array_equal(got["codes"], codes) and np.array_equal(got["zeros"], zeros)
    assert np.array_equal(got["scales"], stored_scales(scales))
    largest = np.abs(scales).max()
    assert np.all(np.abs(got["scales"] - scales) <= np.maximum(2.0**-11 * scales, 2.0**-24 * largest))
    twice = {"codes": np.stack([codes] * 2), "scales": np.stack([scales] * 2), "zeros": np.stack([zeros] * 2)}
    assert np.array_equal(layout.pack(twice), np.concatenate([packed, packed]))
    assert np.array_equal(layout.unpack(layout.pack(twice), (2, n, k))["codes"], twice["codes"])


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1.0, 1e20])
def test_scales_keep_eleven_bits_at_any_magnitude(magnitude: float) -> None:
    scales = (np.random.default_rng(2).uniform(0.5, 1.0, (20, 3)) * magnitude).astype(np.float32)
    assert np.all(np.abs(stored_scales(scales) / scales - 1) <= 2.0**-11)


def test_group_that_does_not_fit_is_refused() -> None:
    codes = np.zeros((4, 40), np.uint8)
    with pytest.raises(ValueError, match="multiple of 16"):
        AffineTiles.of(GroupAffine(8, 4)).pack(
            {"codes": codes, "scales": np.ones((4, 5), np.float32), "zeros": np.zeros((4, 5), np.uint8)}
        )
