"""Codes of 7 bits for products that sum in 16 bits: what `--quant int8` stores for encoders on CPUs.

Where no instruction multiplies bytes and sums in 32 bits (AVX2), products of 8 bits overflow the 16 of `vpmaddubsw`.
With 7 bits on both sides two of its results fit, which makes a product of 64 pairs five instructions; onnxruntime calls
that `reduce_range`. Groups along K, and activations with a zero point, win back more than the bit (see NOTES).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .affine import GroupAffine, fp16_scale
from .base import Parts
from .channel import ZERO

TOP = 63  # of a weight's code, either way
LEVELS = 127  # of an activation's


@dataclass(frozen=True)
class ReducedInt8(GroupAffine):
    """w = (code - 128) scale, codes from 65 to 191.

    Parts as those of `GroupAffine`: the zero points are all 128.
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
