"""Integer codes with a scale and a zero point per group: q4 and q8, w = (code - zero) scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Array, Parts
from .grouped import GroupFormat, per_group

_FP16_MAX, _FP16_TINY = 65504.0, 2.0**-24


@dataclass(frozen=True)
class GroupAffine(GroupFormat):
    """Parts: codes uint8 [..., N, K]; scales (fp16 values) and zeros uint8 [..., N, K / group].

    Asymmetric; zero is always one of the levels. rows8: whether products of many rows may quantize the activations to 8
    bits (W4A8), if a GPU has instructions for that; the stored data are the same.
    """

    bits: int
    rows8: bool = False

    @property
    def name(self) -> str:
        return f"q{self.bits}{'a8' * self.rows8}g{self.group}"

    @property
    def serves_tables(self) -> bool:
        return self.bits >= 8

    @property
    def top(self) -> int:
        """The largest code."""
        return 2**self.bits - 1

    def arrays(self, shape: Sequence[int]) -> dict[str, Array]:
        groups = per_group(shape, self.group)
        return {
            "codes": Array(tuple(shape), torch.uint8, self.bits),
            "scales": Array(groups, torch.float16, 16),
            "zeros": Array(groups, torch.uint8, 8),
        }

    def fit(self, groups: Tensor, clip: Tensor | None = None) -> Parts:
        low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
        if clip is not None:
            bound = torch.maximum(-low, high) * clip
            low, high = torch.maximum(low, -bound), torch.minimum(high, bound)
        scale = fp16_scale((high - low) / self.top)
        return {"scales": scale, "zeros": torch.round(-low / scale).clamp(0, self.top)}

    def levels(self, parts: Parts) -> tuple[Tensor, ...]:
        return parts["scales"].to(torch.float32), parts["zeros"].to(torch.float32)

    def code(self, values: Tensor, *levels: Tensor) -> Tensor:
        scale, zero = levels
        return (values / scale).round_().add_(zero).clamp_(0, self.top)

    def value(self, codes: Tensor, *levels: Tensor) -> Tensor:
        scale, zero = levels
        return (codes - zero).mul_(scale)


def fp16_scale(scale: Tensor) -> Tensor:
    """Scales of any shape, rounded as they are stored: positive float16 values, in float32."""
    return scale.clamp(_FP16_TINY, _FP16_MAX).to(torch.float16).to(torch.float32)
