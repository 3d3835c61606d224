"""Walsh-Hadamard transforms of each token's own values, for rotations that cannot be merged into a weight."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .base import Cost, op, tensor_bytes

MIN_BLOCK, MAX_BLOCK = 16, 1024  # the sizes that kernels support: powers of two


def walsh_hadamard(x: Tensor) -> Tensor:
    """x [..., n] times the Hadamard matrix of Sylvester's order, orthonormal; float32. n is a power of two."""
    value, size, width = x.to(torch.float32), x.shape[-1], 1
    while width < size:
        a, b = value.unflatten(-1, (-1, 2, width)).unbind(-2)
        value = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        width *= 2
    return value * (1 / math.sqrt(size))


@op()
def hadamard(x: Tensor, block: int) -> Tensor:
    """Every `block` elements of the last axis of x[T, ..., K] by their Walsh-Hadamard transform, which is orthonormal
    and its own inverse; block is a power of two that divides K (Ashkboos et al. 2024, QuaRot, arXiv:2404.00456)."""
    return walsh_hadamard(x.unflatten(-1, (-1, block))).flatten(-2).to(x.dtype)


@hadamard.set_cost
def _cost(x: Tensor, block: int) -> Cost:
    return Cost(x.numel() * (math.log2(block) + 1), 2 * tensor_bytes(x))


@hadamard.set_samples
def _samples() -> Iterator[tuple[Tensor, int]]:
    yield torch.randn(3, 48), 16
    yield torch.randn(3, 2, 192), 64
    yield torch.randn(1, 1024), 1024
