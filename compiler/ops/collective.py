"""What ranks do together: several processes run one graph with different weights (Shoeybi et al. 2019, Megatron-LM,
arXiv:1909.08053).

The references of these ops take one rank's value, and serve as types. What ranks give each other is `across`, which the
interpreter asks with the values of all ranks.
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
def transfer(x: Tensor, stage: int) -> Tensor:
    """x[T, ...] as the rank before `stage` has it, on the rank `stage`; no other rank has it (Huang et al. 2019, GPipe,
    arXiv:1811.06965)."""
    return x.clone()


def _sum(values: Sequence[Tensor]) -> list[Tensor]:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return [total] * len(values)


def _joined(values: Sequence[Tensor], ranks: int) -> list[Tensor]:
    assert len(values) == ranks, f"{len(values)} ranks, not {ranks}"
    return [torch.cat(list(values), dim=-1)] * ranks


def _moved(values: Sequence[Tensor], stage: int) -> list[Tensor]:
    """Numbers that are none show where another rank reads them."""
    nowhere = torch.full_like(values[0], float("nan") if values[0].is_floating_point() else -1)
    return [values[stage - 1].clone() if rank == stage else nowhere for rank in range(len(values))]


_ACROSS: dict[Any, Callable[..., list[Tensor]]] = {
    all_reduce.overload: _sum, all_gather.overload: _joined,
    transfer.overload: _moved,
}  # fmt: skip


def across(target: Any, args: Sequence[tuple[Any, ...]]) -> list[Tensor]:
    """The results of a collective op on all ranks, for the arguments of all ranks."""
    return _ACROSS[target]([own[0] for own in args], *args[0][1:])


@all_reduce.set_cost
def _reduce_cost(x: Tensor) -> Cost:
    return Cost(float(x.numel()), 2 * tensor_bytes(x))


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


@transfer.set_samples
def _transfer_samples() -> Iterator[tuple[Tensor, int]]:
    yield torch.randn(3, 16), 1
