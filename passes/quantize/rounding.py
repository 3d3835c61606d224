"""Rounding to groups in float, for searches that need the rounded values only."""

from __future__ import annotations

from torch import Tensor

from ...compiler.weights.handles import group_range


def round_values(weight: Tensor, bits: int, group: int, clip: Tensor | None = None) -> Tensor:
    """What `round_to_groups` would store, as float32."""
    grouped = weight.unflatten(-1, (-1, group))
    scale, zero = group_range(grouped, bits, clip)
    scale, zero = scale.unsqueeze(-1), zero.unsqueeze(-1)
    return (grouped / scale).round_().add_(zero).clamp_(0, 2**bits - 1).sub_(zero).mul_(scale).flatten(-2)
