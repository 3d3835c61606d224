"""7-bit codes for products that accumulate in 16 bits, which `--quant int8` stores for encoders on CPUs.

Without an instruction that multiplies bytes and sums in 32 bits (AVX2), products of 8 bits overflow the 16 bits of
`vpmaddubsw`. With 7 bits on both sides the sum of two of its results fits, so that a product of 64 pairs takes five
instructions; onnxruntime calls this `reduce_range`. Groups along K, and activations with a zero point, regain more
accuracy than the bit costs (see NOTES).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .affine import GroupAffine, fp16_scale
from .base import Parts
from .channel import ZERO

TOP = 63  # largest distance of a weight's code from ZERO
LEVELS = 127  # largest code of an activation


@dataclass(frozen=True)
class ReducedInt8(GroupAffine):
    """w = (code - 128) scale, with codes from 65 to 191.

    The parts are those of `GroupAffine`; all zero points are 128.
    """

    @property
    def name(self) -> str:
        return f"i7g{self.group}"

    @property
    def unsigned_rows(self) -> bool:
        return True

    def fit(self, groups: Tensor, clip: Tensor | None = None) -> Parts:
        peak = groups.abs().amax(-1)
        scale = fp16_scale(peak / TOP if clip is None else peak * clip / TOP)
        return {"scales": scale, "zeros": torch.full_like(scale, float(ZERO))}

    def code(self, values: Tensor, *levels: Tensor) -> Tensor:
        return super().code(values, *levels).clamp_(ZERO - TOP, ZERO + TOP)

    def coded_rows(self, rows: Tensor) -> Tensor:
        groups = torch.unflatten(rows, -1, (-1, self.group))
        low, high = groups.amin(-1, keepdim=True).clamp(max=0.0), groups.amax(-1, keepdim=True).clamp(min=0.0)
        scale = (high - low).clamp(min=1e-30) / LEVELS
        zero = torch.round(-low / scale)
        codes = ((groups / scale).round_() + zero).clamp_(0, LEVELS)
        return ((codes - zero) * scale).flatten(-2)
