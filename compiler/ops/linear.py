"""Matrix products: dense linear layers, per-token expert layers and per-token batched products."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .base import Cost, op, tensor_bytes
from .traits import Division, Traits

_COLUMNS, _ROWS = Division({"weight": 0, "bias": 0}, -1), Division({"x": -1, "weight": 1}, None, once=("bias",))


@op(Traits(product=(0,), weights=(1, 2), absorbs=(1, 2), by_line=True, divisions=(_ROWS, _COLUMNS)))
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y[..., N] = x[..., K] weight[N, K]^T + bias[N]; None: no bias."""
    return torch.nn.functional.linear(x, weight, bias).clone()


@linear.set_cost
def _linear_cost(x: Tensor, weight: Tensor, bias: Tensor | None) -> Cost:
    rows = x.numel() // x.shape[-1]
    return Cost(2.0 * rows * weight.numel(), tensor_bytes(x, weight, bias) + 4 * rows * weight.shape[0])


@linear.set_samples
def _linear_samples() -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    for t, k, n in ((1, 16, 16), (3, 40, 17), (7, 128, 33)):
        yield torch.randn(t, k), torch.randn(n, k), torch.randn(n)
    yield torch.randn(2, 64), torch.randn(5, 64), None


_EXPERT_DIVISIONS = (
    Division({"x": -1, "weight": 2}, None, once=("bias",)),
    Division({"x": 0, "weight": 0, "bias": 0}, 0),  # if x has a row for each expert, such as a head
    Division({"weight": 1, "bias": 1}, -1),
)


@op(Traits(product=(0,), weights=(1, 2), absorbs=(1, 2), divisions=_EXPERT_DIVISIONS))
def expert_linear(x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor | None) -> Tensor:
    """y[T, S, N] = x[T, K] or x[T, S, K] times weight[E, N, K] of expert index[T, S], plus bias[E, N] unless that is
    None.

    An index outside [0, E) gives zeros (the token is not routed). If index is None, x[T, E, K] has a row for each
    expert, for instance if the experts are heads of attention.
    """
    experts, n, _ = weight.shape
    if index is None:
        index = torch.arange(experts, device=x.device).expand(x.shape[0], -1)
    slots = x.unsqueeze(1).expand(-1, index.shape[1], -1) if x.dim() == 2 else x
    out = x.new_zeros(index.shape[0], index.shape[1], n)
    if x.device.type == "meta":
        return out
    for e in range(experts):
        token, slot = torch.where(index == e)
        if token.numel():
            y = slots[token, slot] @ weight[e].T
            out[token, slot] = y if bias is None else y + bias[e]
    return out


@expert_linear.set_cost
def _expert_cost(x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor | None) -> Cost:
    rows = x.shape[0] * weight.shape[0] if index is None else index.numel()
    touched = min(rows, weight.shape[0]) / weight.shape[0]
    return Cost(2.0 * rows * weight[0].numel(), tensor_bytes(x) + touched * tensor_bytes(weight, bias))


@expert_linear.set_samples
def _expert_samples() -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor | None]]:
    index = torch.randint(0, 5, (7, 2))
    yield torch.randn(7, 32), torch.randn(5, 9, 32), torch.randn(5, 9), index
    yield torch.randn(7, 2, 32), torch.randn(5, 16, 32), None, index
    yield torch.randn(7, 5, 32), torch.randn(5, 9, 32), torch.randn(5, 9), None


@op()
def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Per-token product of a[T, ..., M, K] and b[T or 1, ..., K, N]."""
    return torch.matmul(a, b)


@bmm.set_cost
def _bmm_cost(a: Tensor, b: Tensor) -> Cost:
    return Cost(2.0 * a.numel() * b.shape[-1], tensor_bytes(a, b))


@bmm.set_samples
def _bmm_samples() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.randn(3, 2, 5, 7), torch.randn(3, 2, 7, 4)
    yield torch.randn(3, 2, 1, 7), torch.randn(1, 2, 7, 4)
