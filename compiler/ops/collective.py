"""Collective ops of ranks: several processes run one graph with different weights (Shoeybi et al. 2019, Megatron-LM,
arXiv:1909.08053).

The references of these ops take one rank's value and serve only to infer types. `across` computes the exchange; the
interpreter calls it with the values of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .base import Cost, op, tensor_bytes
from .traits import Traits


@op(Traits(collective=True))
def all_reduce(x: Tensor) -> Tensor:
    """The sum of the ranks' x[T, ...], added in the order of ranks, on every rank."""
    return x.clone()


@op(Traits(collective=True))
def all_gather(x: Tensor, ranks: int) -> Tensor:
    """The ranks' x[T, ..., K] one after the other along the last axis, on every rank: [T, ..., ranks * K]."""
    return torch.cat([x] * ranks, dim=-1)


@op(Traits(collective=True))
def reduce_scatter(x: Tensor, least: int) -> Tensor:
    """The sum of the ranks' x[T, ...], added in the order of ranks: each rank gets it for its own rows (see
    `own_rows`), and any values in other rows; with fewer than `least` rows every rank gets all."""
    return x.clone()


@op(Traits(collective=True))
def all_gather_rows(x: Tensor, least: int) -> Tensor:
    """x[T, ...] on every rank, each row from the rank that owns it; with fewer than `least` rows every rank already has
    all."""
    return x.clone()


@op(Traits(collective=True))
def transfer(x: Tensor, stage: int) -> Tensor:
    """x[T, ...] of each rank of the stage before `stage`, on the corresponding rank of `stage`; no other rank gets it
    (Huang et al. 2019, GPipe, arXiv:1811.06965)."""
    return x.clone()


def own_rows(rows: int, rank: int, ranks: int) -> slice:
    """The rows of a step that a rank owns, divided as evenly as possible."""
    return slice(rows * rank // ranks, rows * (rank + 1) // ranks)


def _sum(values: Sequence[Tensor]) -> list[Tensor]:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return [total] * len(values)


def _joined(values: Sequence[Tensor], ranks: int) -> list[Tensor]:
    assert len(values) == ranks, f"{len(values)} ranks, not {ranks}"
    return [torch.cat(list(values), dim=-1)] * ranks


def _sum_by_rows(values: Sequence[Tensor], least: int) -> list[Tensor]:
    """As `reduce_scatter`; NaN marks rows that a rank does not own, so that a wrong read shows."""
    total, *_ = found = _sum(values)
    if len(total) < least:
        return found
    parts = [torch.full_like(total, float("nan")) for _ in values]
    for rank, part in enumerate(parts):
        own = own_rows(len(total), rank, len(values))
        part[own] = total[own]
    return parts


def _rows_joined(values: Sequence[Tensor], least: int) -> list[Tensor]:
    if len(values[0]) < least:
        return list(values)
    rows = [value[own_rows(len(value), rank, len(values))] for rank, value in enumerate(values)]
    return [torch.cat(rows)] * len(values)


def _moved(values: Sequence[Tensor], stage: int, parts: int) -> list[Tensor]:
    """As `transfer`; NaN (-1 for integers) marks the value on other ranks, so that a wrong read shows."""
    nowhere = torch.full_like(values[0], float("nan") if values[0].is_floating_point() else -1)
    return [values[rank - parts].clone() if rank // parts == stage else nowhere for rank in range(len(values))]


_ACROSS: dict[Any, Callable[..., list[Tensor]]] = {
    all_reduce.overload: _sum, all_gather.overload: _joined,
    reduce_scatter.overload: _sum_by_rows,
    all_gather_rows.overload: _rows_joined,
}  # fmt: skip


def across(target: Any, args: Sequence[tuple[Any, ...]], parts: int) -> list[Tensor]:
    """The results [T, ..] of a collective op on all ranks, for the arguments of all ranks; `parts` ranks form a
    stage."""
    values = [own[0] for own in args]
    if target is transfer.overload:
        return _moved(values, args[0][1], parts)
    groups = (values[first : first + parts] for first in range(0, len(values), parts))
    return [found for group in groups for found in _ACROSS[target](group, *args[0][1:])]


@all_reduce.set_cost
def _reduce_cost(x: Tensor) -> Cost:
    return Cost(float(x.numel()), 2 * tensor_bytes(x))


@reduce_scatter.set_cost
def _reduce_scatter_cost(x: Tensor, least: int) -> Cost:
    return Cost(float(x.numel()), 2 * tensor_bytes(x))


@all_gather_rows.set_cost
def _gather_rows_cost(x: Tensor, least: int) -> Cost:
    return Cost(0.0, 2 * tensor_bytes(x))


@all_gather.set_cost
def _gather_cost(x: Tensor, ranks: int) -> Cost:
    return Cost(0.0, (1 + ranks) * tensor_bytes(x))


@transfer.set_cost
def _transfer_cost(x: Tensor, stage: int) -> Cost:
    return Cost(0.0, 2 * tensor_bytes(x))


@all_reduce.set_samples
def _reduce_samples() -> Iterator[tuple[Tensor]]:
    yield (torch.randn(1, 16),)
    yield (torch.randn(7, 33),)


@all_gather.set_samples
def _gather_samples() -> Iterator[tuple[Tensor, int]]:
    yield torch.randn(3, 16), 1


@reduce_scatter.set_samples
def _reduce_scatter_samples() -> Iterator[tuple[Tensor, int]]:
    yield torch.randn(3, 16), 1


@all_gather_rows.set_samples
def _gather_rows_samples() -> Iterator[tuple[Tensor, int]]:
    yield torch.randn(3, 16), 1


@transfer.set_samples
def _transfer_samples() -> Iterator[tuple[Tensor, int]]:
    yield torch.randn(3, 16), 1
