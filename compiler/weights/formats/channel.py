"""8-bit codes with one scale per output channel, for products with int8 activations: `--quant int8`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from .affine import GroupAffine, fp16_scale
from .base import Misfit, Parts, Ranges

_STEP = 16  # values of K that kernels read at once
ZERO = 128


@dataclass(frozen=True)
class ChannelInt8(GroupAffine):
    """w = (code - 128) scale, with codes from 1 to 255. A group is a whole row.

    The parts are those of `GroupAffine`; all zero points are 128.
    """

    @property
    def name(self) -> str:
        return f"i8g{self.group}"

    def fitted(self, k: int) -> Self:
        """This format with rows of `k` values as groups. Misfit if `k` is not a multiple of 16."""
        if k % _STEP:
            raise Misfit(f"K = {k} is not a multiple of {_STEP}")
        return replace(self, group=k)

    def cut_to(self, shape: Sequence[int], axis: int, ranges: Ranges) -> ChannelInt8:
        """The remaining part of a row keeps the row's scale."""
        if axis < len(shape) - 1:
            return self
        return replace(self, group=sum(end - begin for begin, end in ranges))

    def fit(self, groups: Tensor, clip: Tensor | None = None) -> Parts:
        peak = groups.abs().amax(-1)
        scale = fp16_scale(peak / (ZERO - 1) if clip is None else peak * clip / (ZERO - 1))
        return {"scales": scale, "zeros": torch.full_like(scale, float(ZERO))}

    def code(self, values: Tensor, *levels: Tensor) -> Tensor:
        return super().code(values, *levels).clamp_(min=1)
