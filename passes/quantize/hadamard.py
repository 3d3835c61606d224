"""Random orthogonal matrices that spread outliers over all channels, and are applied without being materialized."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...compiler.ops.hadamard import walsh_hadamard


@dataclass(frozen=True)
class Rotation:
    """Q [size, size], for rows of `size` values: random signs, then the Kronecker product of a Hadamard matrix, of the
    power of two that divides the size, with a random orthogonal matrix of the odd rest (Ashkboos et al. 2024, QuaRot,
    arXiv:2404.00456)."""

    size: int
    seed: int = 0

    @property
    def power(self) -> int:
        """The size of the Hadamard matrix."""
        return self.size & -self.size

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(self.seed)
        signs = torch.randint(0, 2, (self.size,), generator=random) * 2.0 - 1.0
        rest, _ = torch.linalg.qr(
            torch.randn(self.size // self.power, self.size // self.power, generator=random, dtype=torch.float64)
        )
        return signs, rest.to(torch.float32)

    def __call__(self, x: Tensor) -> Tensor:
        """x Q for x [..., blocks of size], separately for each block of the last axis; float32."""
        signs, rest = self._parts
        value = x.to(torch.float32).unflatten(-1, (-1, self.size)) * signs
        value = walsh_hadamard(value.unflatten(-1, (self.power, -1)).transpose(-1, -2)).transpose(-1, -2)
        return (value @ rest).flatten(-3)

    def rows(self, weight: Tensor) -> Tensor:
        """The weight [..., N, K] whose outputs are the outputs of `weight` times Q."""
        return self(weight.transpose(-1, -2)).transpose(-1, -2)
