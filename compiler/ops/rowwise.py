"""Ops over one axis of each token's own values: reductions, softmax, top-k and indexed moves (routers need them)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .base import Cost, op, tensor_bytes
from .traits import Traits


def _cost(x: Tensor, *rest: object) -> Cost:
    return Cost(4.0 * x.numel(), 2 * tensor_bytes(x))


REDUCTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda x, d: x.sum(d),
    "mean": lambda x, d: x.mean(d),
    "amax": lambda x, d: x.amax(d),
    "amin": lambda x, d: x.amin(d),
    "prod": lambda x, d: x.prod(d),
    "argmax": lambda x, d: x.argmax(d),
}


@op(Traits(routes=True))
def reduce(x: Tensor, kind: str, dim: int) -> Tensor:
    """Reduce axis `dim` of x [T, ...] (not the token axis) away; kind is one of REDUCTIONS."""
    return REDUCTIONS[kind](x, dim)


@op(Traits(routes=True, by_line=True))
def softmax(x: Tensor) -> Tensor:
    """Softmax over the last axis of x [T, ..., n]."""
    return torch.softmax(x, dim=-1)


@op(Traits(selects=True, by_line=True))
def topk(x: Tensor, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The k largest (or smallest) of the last axis in order, and their indices, [T, ..., k]; ties go to the lower
    index."""
    order = torch.argsort(x, dim=-1, descending=largest, stable=True)[..., :k]
    return torch.gather(x, -1, order), order


@op(Traits(routes=True, by_line=True))
def gather(x: Tensor, index: Tensor) -> Tensor:
    """x[..., index[..., j]] along the last axis."""
    return torch.gather(x, -1, index.long())


@op(Traits(weights=(1,), by_line=True))
def columns(x: Tensor, order: Tensor) -> Tensor:
    """x[..., order]: values x[T, ..., K] in the order in which a weight stores its columns."""
    return x[..., order.long()]


@op(Traits(weights=(1,)))
def expert_columns(x: Tensor, order: Tensor, index: Tensor) -> Tensor:
    """y[T, S, K]: values x[T, K] or x[T, S, K] in the order[E, K] in which expert index[T, S] stores its columns.

    An index outside [0, E) uses the nearest expert's order: the product that reads it gives zeros.
    """
    slots = x.unsqueeze(1).expand(-1, index.shape[1], -1) if x.dim() == 2 else x
    return torch.gather(slots, -1, order[index.long().clamp(0, len(order) - 1)].long())


@op(Traits(routes=True, by_line=True))
def scatter(x: Tensor, index: Tensor, src: Tensor | None, value: float, accumulate: bool) -> Tensor:
    """A copy of x [T, ..., n] in which the elements of the last axis at `index` [T, ..., m] are set to src, or to
    `value` if src is None; with `accumulate` it is added."""
    source = torch.full_like(index, value, dtype=x.dtype) if src is None else src
    out = x.clone()
    return out.scatter_add(-1, index.long(), source) if accumulate else out.scatter(-1, index.long(), source)


@op(Traits(by_line=True))
def cumsum(x: Tensor) -> Tensor:
    """Running sum over the last axis of x [T, ..., n]."""
    return torch.cumsum(x, dim=-1, dtype=x.dtype)


for _op in (reduce, softmax, topk, gather, columns, expert_columns, scatter, cumsum):
    _op.set_cost(_cost)


@reduce.set_samples
def _reduce_samples() -> Iterator[tuple[Tensor, str, int]]:
    for kind in REDUCTIONS:
        yield torch.randn(3, 5, 7), kind, 2
        yield torch.randn(3, 5, 7), kind, 1


@softmax.set_samples
def _softmax_samples() -> Iterator[tuple[Tensor]]:
    yield (torch.randn(3, 5, 7),)
    yield (torch.randn(1, 64),)


@topk.set_samples
def _topk_samples() -> Iterator[tuple[Tensor, int, bool]]:
    yield torch.randn(5, 9), 3, True
    yield torch.tensor([[1.0, 2.0, 2.0, 1.0]]), 2, True
    yield torch.randn(5, 9), 9, False


@gather.set_samples
def _gather_samples() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.randn(3, 7), torch.randint(0, 7, (3, 4))


@columns.set_samples
def _columns_samples() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.randn(3, 37), torch.randperm(37).to(torch.int32)
    yield torch.randn(3, 2, 16), torch.randperm(16).to(torch.int32)


@expert_columns.set_samples
def _expert_columns_samples() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    order = torch.stack([torch.randperm(37) for _ in range(5)]).to(torch.int32)
    yield torch.randn(3, 37), order, torch.randint(0, 5, (3, 2))
    yield torch.randn(3, 2, 37), order, torch.tensor([[4, 0], [5, 1], [-1, 2]])


@scatter.set_samples
def _scatter_samples() -> Iterator[tuple[Tensor, Tensor, Tensor | None, float, bool]]:
    index = torch.stack([torch.randperm(7)[:4] for _ in range(3)])
    yield torch.zeros(3, 7), index, torch.randn(3, 4), 0.0, False
    yield torch.randn(3, 7), index, None, 1.0, False
    yield torch.randn(3, 7), index, torch.randn(3, 4), 0.0, True


@cumsum.set_samples
def _cumsum_samples() -> Iterator[tuple[Tensor]]:
    yield (torch.randn(3, 7),)
