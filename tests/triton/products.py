"""Inputs and float64 references of the tests of products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from icc.compiler.backends.triton.layouts.affine import AffineGroups, stored_scales
from icc.compiler.backends.triton.tiling.choice import Config, Tuner
from icc.compiler.targets import TARGETS
from icc.compiler.weights.formats.affine import GroupAffine
from torch import Tensor

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# stored values are rounded to the type; float32 sums of 16-bit products depend on their order
TOLERANCE = {"f32": 2e-5, "bf16": 8e-3, "f16": 1e-3}


class Forced(Tuner):
    """A tuner that picks one tiling, whatever it costs."""

    def __init__(self, config: Config, target: str = "h100") -> None:
        super().__init__(TARGETS[target])
        object.__setattr__(self, "config", config)

    def pick(self, key: str, candidates: Sequence[Config], cost: Callable[[Config], float]) -> Config:
        return self.config  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Weight:
    """A weight in the kernel's layout, its values [.., N, K], and the params that describe it."""

    packed: Tensor
    values: Tensor
    params: dict[str, Any]
    kind: str


def weight(shape: tuple[int, ...], kind: str, bits: int = 0, group: int = 0) -> Weight:
    """A random weight [.., N, K]; quantized if `bits` is not 0."""
    if not bits:
        dense = (torch.randn(shape) / shape[-1] ** 0.5).to(DTYPES[kind])
        return Weight(dense, dense.double(), {"stored": kind}, kind)
    rng = np.random.default_rng(sum(shape) + bits)
    groups = (*shape[:-1], shape[-1] // group)
    codes = rng.integers(0, 2**bits, shape).astype(np.uint8)
    zeros = rng.integers(0, 2**bits, groups).astype(np.uint8)
    scales = (rng.random(groups) * 0.1 + 0.01).astype(np.float32) / 2 ** (bits - 4)
    wide = (codes - np.repeat(zeros, group, -1).astype(float)) * np.repeat(stored_scales(scales), group, -1)
    packed = torch.from_numpy(
        AffineGroups.of(GroupAffine(group, bits)).pack({"codes": codes, "scales": scales, "zeros": zeros})
    )
    return Weight(packed, torch.from_numpy(wide), {"stored": f"q{bits}g{group}"}, "u8")


def rows(count: int, width: int, stride: int, kind: str, padding: int = 0) -> Tensor:
    """Random rows [count + padding, stride]: `width` columns of `count` rows have values, all others are NaN."""
    x = torch.full((count + padding, stride), torch.nan)
    x[:count, :width] = torch.randn(count, width)
    return x.to(DTYPES[kind])


def check(y: Tensor, expected: Tensor, kind: str) -> None:
    """Check that `y` is equal within the rounding of `kind`, and still NaN outside."""
    count, width = expected.shape
    tolerance = TOLERANCE[kind]
    scale = float(expected.abs().max())
    torch.testing.assert_close(y[:count, :width].double(), expected, rtol=tolerance, atol=tolerance * scale)
    assert y[count:].isnan().all() and y[:, width:].isnan().all()
