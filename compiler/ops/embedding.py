"""Row gathers: token embeddings, position tables, and the choice of rows whose logits are wanted."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .base import Cost, op, tensor_bytes
from .traits import Traits


@op(Traits(weights=(1,)))
def embedding(index: Tensor, table: Tensor) -> Tensor:
    """table[index]: index[T] integers, table[V, ...]. Also serves tables computed over all positions."""
    return table[index]


@embedding.set_cost
def _embedding_cost(index: Tensor, table: Tensor) -> Cost:
    return Cost(0.0, 2.0 * index.numel() * tensor_bytes(table[0]))


@embedding.set_samples
def _embedding_samples() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.tensor([0, 4, 2]), torch.randn(5, 7)
    yield torch.tensor([3]), torch.randn(4, 16)


@op(Traits(selects_rows=True, homogeneous=(0,)))
def select_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]: the token rows whose logits the scheduler asked for; the result has one row per logit row."""
    return x[rows]


@select_rows.set_cost
def _select_cost(x: Tensor, rows: Tensor) -> Cost:
    return Cost(0.0, 2.0 * rows.numel() * tensor_bytes(x[0]))


@select_rows.set_samples
def _select_samples() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.randn(5, 9), torch.tensor([1, 4])
