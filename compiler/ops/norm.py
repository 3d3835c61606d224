"""Normalization over the last axis, with and without the residual addition before it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .base import Cost, op, tensor_bytes
from .traits import Traits


def _norm_cost(x: Tensor, *rest: object) -> Cost:
    return Cost(4.0 * x.numel(), 2 * tensor_bytes(x))


@op(Traits(weights=(1,), absorbs=(1,), by_line=True))
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis of x [T, ..., n] (Zhang and Sennrich 2019). A weight of
    None is 1."""
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


@op(Traits(weights=(2,)))
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both [T, ..., n] as x. A weight of None is 1."""
    total = x + residual
    y = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight), total


@op(Traits(weights=(1, 2), absorbs=(1, 2), by_line=True))
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer normalization over the last axis of x [T, ..., n] (Ba et al. 2016). A weight of None is 1, a bias of None
    0."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


@op(Traits(weights=(2, 3)))
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x + residual), x + residual), both [T, ..., n] as x. A weight of None is 1, a bias of None 0."""
    total = x + residual
    return torch.nn.functional.layer_norm(total, x.shape[-1:], weight, bias, eps), total


for _op in (rms_norm, add_rms_norm, layer_norm, add_layer_norm):
    _op.set_cost(_norm_cost)


@rms_norm.set_samples
def _rms_samples() -> Iterator[tuple[Tensor, Tensor | None, float]]:
    yield torch.randn(1, 16), torch.randn(16), 1e-6
    yield torch.randn(5, 3, 24), torch.randn(24), 1e-5
    yield torch.randn(3, 33), None, 1e-5


@add_rms_norm.set_samples
def _add_rms_samples() -> Iterator[tuple[Tensor, Tensor, Tensor | None, float]]:
    yield torch.randn(3, 33), torch.randn(3, 33), torch.randn(33), 1e-5


@layer_norm.set_samples
def _ln_samples() -> Iterator[tuple[Tensor, Tensor | None, Tensor | None, float]]:
    yield torch.randn(3, 33), torch.randn(33), torch.randn(33), 1e-5
    yield torch.randn(2, 16), None, None, 1e-5


@add_layer_norm.set_samples
def _add_ln_samples() -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor | None, float]]:
    yield torch.randn(3, 33), torch.randn(3, 33), torch.randn(33), torch.randn(33), 1e-5
