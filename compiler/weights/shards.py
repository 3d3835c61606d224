"""Weights that are divided between ranks. Every rank runs the same graph; only these handles differ."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .formats.base import Parts, Ranges, StorageFormat
from .formats.dense import Dense
from .handles import SortedColumns, Transposed, Weight

Cuts = tuple[Ranges, ...]
"""The ranges of an axis on each rank, with equally many elements on all."""


@dataclass
class Shard(Weight):
    """One rank's part of `source`: the ranges cuts[rank] of `axis`, one after the other, in the format of `source`.

    last: caches the parts of `source` for the next ranks; None: no cache. Misfit if a block of the storage format would
    be cut.
    """

    source: Weight
    axis: int
    cuts: Cuts
    rank: int = 0
    last: LastParts | None = field(default=None, repr=False, compare=False)
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        whole = self.source.shape
        size = sum(end - begin for begin, end in self.cuts[self.rank])
        self.shape = (*whole[: self.axis], size, *whole[self.axis + 1 :])
        self.dtype = self.source.dtype
        for ranges in self.cuts:
            self.source.storage.cut_to(whole, self.axis, ranges)

    @property
    def storage(self) -> StorageFormat:
        return self.source.storage.cut_to(self.source.shape, self.axis, self._own)

    def load(self) -> Tensor:
        whole = self.source.storage
        if isinstance(whole, Dense):
            return whole.cut({"values": self.source.load()}, self.source.shape, self.axis, self._own)["values"]
        return self.storage.decode(self.parts())

    def parts(self) -> Parts:
        whole = self.source.storage
        if isinstance(whole, Dense):
            return {"values": self.load()}
        parts = self.source.parts() if self.last is None else self.last.parts(self.source)
        return whole.cut(parts, self.source.shape, self.axis, self._own)

    @property
    def _own(self) -> Ranges:
        return self.cuts[self.rank]


@dataclass
class OnFirst(Weight):
    """`source` on rank 0, zeros on the others: a term that is added once to a sum over ranks."""

    source: Weight
    rank: int = 0
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        self.shape, self.dtype = self.source.shape, self.source.dtype

    def load(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype) if self.rank else self.source.load()


class LastParts:
    """A cache of the parts of one weight: its ranks need them one after the other, and encoding takes time."""

    def __init__(self) -> None:
        self._source: Weight | None = None
        self._parts: Parts = {}

    def parts(self, source: Weight) -> Parts:
        """The result of `source.parts()`, computed once for consecutive calls with the same weight."""
        if self._source is not source:
            self._source, self._parts = None, {}  # freed first, so that only one is in memory
            self._source, self._parts = source, source.parts()
        return self._parts


def shard(weight: Weight, axis: int, cuts: Cuts) -> Weight:
    """Rank 0's part of a weight. Misfit if its storage format cannot be cut there."""
    if isinstance(weight, Transposed) and axis >= len(weight.shape) - 2:
        return Transposed(shard(weight.source, 2 * len(weight.shape) - 3 - axis, cuts))  # type: ignore[arg-type]
    if isinstance(weight, SortedColumns) and axis == len(weight.shape) - 2 and weight.order.dim() == 1:
        return SortedColumns(shard(weight.source, axis, cuts), weight.order)  # type: ignore[arg-type]
    return Shard(weight, axis, cuts)


def cut_of(weight: Weight) -> tuple[int, Cuts] | None:
    """The axis of a weight that ranks divide, and each one's ranges; None if every rank has the whole weight."""
    if isinstance(weight, Shard):
        return weight.axis, weight.cuts
    if isinstance(weight, SortedColumns):
        return cut_of(weight.source)
    found = cut_of(weight.source) if isinstance(weight, Transposed) else None
    rank = len(weight.shape)
    return found if found is None or found[0] < rank - 2 else (2 * rank - 3 - found[0], found[1])


def undivided(weight: Weight) -> Weight:
    """The whole weight that is divided between ranks or on rank 0 only; `weight` itself if every rank has it."""
    if isinstance(weight, (Shard, OnFirst)):
        return weight.source
    if isinstance(weight, (SortedColumns, Transposed)) and cut_of(weight) is not None:
        return replace(weight, source=undivided(weight.source))
    return weight


def of_rank(weight: Weight, rank: int, last: LastParts | None = None) -> Weight:
    """Another rank's part of a weight; the weight itself if all ranks have the same. last: see Shard."""
    changed: dict[str, Any] = {}
    if is_dataclass(weight):
        for part in fields(weight):
            if part.init:
                value = getattr(weight, part.name)
                if (other := _of_rank(value, rank, last)) is not value:
                    changed[part.name] = other
        if isinstance(weight, Shard):
            return replace(weight, **changed, rank=rank, last=last)
        if isinstance(weight, OnFirst):
            return replace(weight, **changed, rank=rank)
    return replace(weight, **changed) if changed else weight  # type: ignore[type-var]


def _of_rank(value: Any, rank: int, last: LastParts | None) -> Any:
    if isinstance(value, Weight):
        return of_rank(value, rank, last)
    if isinstance(value, tuple) and value and isinstance(value[0], Weight):
        found = tuple(of_rank(part, rank, last) for part in value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        return found if any(a is not b for a, b in zip(found, value, strict=True)) else value  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return value  # pyright: ignore[reportUnknownVariableType]
