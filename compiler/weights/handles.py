"""Weights as lazy handles: a shape, a dtype and a way to compute the values, which are not kept.

A pass that needs values calls `load`; passes that only move or combine weights wrap handles in handles. A compile
therefore streams the weights, and its peak memory is a few times its largest layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .formats.base import Parts, StorageFormat
from .formats.dense import Dense


class Weight(ABC):
    """A constant of the graph. shape, dtype: those of the result of `load`."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def load(self) -> Tensor:
        """Read or compute the values, of `shape`; the caller must not modify the result."""

    @property
    def storage(self) -> StorageFormat:
        """The format in which the values are stored by default."""
        return Dense(self.dtype)

    def parts(self) -> Parts:
        """The arrays that `storage` names; the caller must not modify them."""
        return {"values": self.load()}

    def describe(self) -> str:
        """The type in graph texts, such as bf16[64, 32]."""
        return f"{self.storage.name}[{', '.join(map(str, self.shape))}]"


@dataclass
class Constant(Weight):
    """A small value, of any shape, that the trace or a pass made."""

    value: Tensor
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        self.shape, self.dtype = tuple(self.value.shape), self.value.dtype

    def load(self) -> Tensor:
        return self.value


@dataclass
class Derived(Weight):
    """The result of `fn` on other weights, computed at every load. sources: these weights, for passes that analyse how
    a value is made."""

    fn: Callable[..., Tensor]
    sources: tuple[Weight, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def load(self) -> Tensor:
        value = self.fn(*(source.load() for source in self.sources))
        assert tuple(value.shape) == self.shape, f"derived weight has shape {tuple(value.shape)}, not {self.shape}"
        return value


def derive(fn: Callable[..., Tensor], *sources: Weight) -> Derived:
    """A Derived weight, whose shape and dtype come from running `fn` on meta tensors."""
    meta = fn(*(torch.empty(s.shape, dtype=s.dtype, device="meta") for s in sources))
    return Derived(fn, sources, tuple(meta.shape), meta.dtype)


class QuantizedWeight(Weight):
    """A weight whose values are representable in a storage format.

    snr_db: the signal-to-noise ratio of the stored values in dB; None until `parts` has run, unless known before.
    given: whether the checkpoint stores it quantized; a requested quantization starts from these values.
    """

    format: StorageFormat
    snr_db: float | None = None
    given: ClassVar[bool] = False

    @property
    def storage(self) -> StorageFormat:
        return self.format

    @abstractmethod
    def parts(self) -> Parts:
        """The arrays of the format."""

    def load(self) -> Tensor:
        return self.format.decode(self.parts())


@dataclass
class RoundedWeight(QuantizedWeight):
    """`source`, encoded in `format` at every call of `parts`. clip: [..., N, blocks of K], see `StorageFormat.encode`;
    None: no clipping."""

    source: Weight
    format: StorageFormat
    clip: Tensor | None = None
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False, default=torch.float32)
    snr_db: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.shape = self.source.shape

    def parts(self) -> Parts:
        encoded = self.format.encode(self.source.load(), self.clip)
        self.snr_db = encoded.snr_db
        return encoded.parts


@dataclass
class PackedWeight(QuantizedWeight):
    """Parts that a pass computed or read from a file, held in compact form."""

    held: Parts
    format: StorageFormat
    shape: tuple[int, ...]
    snr_db: float | None = None
    dtype: torch.dtype = field(init=False, default=torch.float32)

    @classmethod
    def pack(
        cls, parts: Parts, storage: StorageFormat, shape: Sequence[int], snr_db: float | None = None
    ) -> PackedWeight:
        """A weight of these parts. snr_db: in dB; None if it is not known."""
        return cls(storage.hold(parts, shape), storage, tuple(shape), snr_db)

    def parts(self) -> Parts:
        return self.format.release(self.held, self.shape)


@dataclass
class GivenRows(QuantizedWeight):
    """The rows of weights of the checkpoint in one format, matrices or experts: the rows of all `pieces`, in the order
    `order`: [rows], or [E, rows] for each expert; None: one piece after the other."""

    pieces: tuple[QuantizedWeight, ...]
    order: Tensor | None = None
    format: StorageFormat = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False, default=torch.float32)
    given: ClassVar[bool] = True

    def __post_init__(self) -> None:
        first = self.pieces[0]
        self.format = first.format
        assert all(self.format.merges_with(p.format) for p in self.pieces), "stored differently"
        *lead, _, k = first.shape
        rows = sum(p.shape[-2] for p in self.pieces) if self.order is None else self.order.shape[-1]
        self.shape = (*lead, rows, k)

    def parts(self) -> Parts:
        found = [piece.parts() for piece in self.pieces]
        joined = {
            name: torch.cat([p[name] for p in found], -2) if len(found) > 1 else v for name, v in found[0].items()
        }
        if self.order is None:
            return joined
        return {name: _rows_in_order(value, self.order) for name, value in joined.items()}


def _rows_in_order(value: Tensor, order: Tensor) -> Tensor:
    """The rows of value [..., N, X] in an order [rows], or those of each expert in its own [E, rows]."""
    if order.dim() == 1:
        return value.index_select(-2, order)
    return torch.stack([own.index_select(0, rows) for own, rows in zip(value, order, strict=True)])


@dataclass
class GatheredRows(QuantizedWeight):
    """A weight [..., N, K] of rows of the checkpoint's matrices [n, K] in one format, such as those of experts. index:
    [..., N], row numbers in the concatenation of `pieces`."""

    pieces: tuple[QuantizedWeight, ...]
    index: Tensor
    format: StorageFormat = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False, default=torch.float32)
    given: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.format = self.pieces[0].format
        assert all(self.format.merges_with(p.format) for p in self.pieces), "stored differently"
        self.shape = (*self.index.shape, self.pieces[0].shape[-1])

    def parts(self) -> Parts:
        rows, start = self.index.reshape(-1), 0
        found: Parts = {}
        for piece in self.pieces:
            here = torch.nonzero((rows >= start) & (rows < start + piece.shape[0])).squeeze(-1)
            for name, value in piece.parts().items():
                if name not in found:
                    found[name] = value.new_empty(len(rows), *value.shape[1:])
                found[name][here] = value[rows[here] - start]
            start += piece.shape[0]
        return {name: value.reshape(*self.index.shape, -1) for name, value in found.items()}


@dataclass
class Transposed(Weight):
    """Matrices [..., K, N] whose transpose `source` [..., N, K] is stored, in blocks along K. Transposing them again
    returns `source` with its blocks."""

    source: QuantizedWeight
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        *lead, n, k = self.source.shape
        self.shape, self.dtype = (*lead, k, n), self.source.dtype

    def load(self) -> Tensor:
        return self.source.load().mT


@dataclass
class SortedColumns(Weight):
    """A weight [..., N, K] whose columns are stored in another order: column j of `source` is column order[..., j] of
    this. A product can read `source` if it reorders its input.

    order: [K], or [..., parts, K] if each of the matrices, and each of its `parts` (equal numbers of consecutive rows,
    such as gate and up), has its own order.
    """

    source: QuantizedWeight
    order: Tensor
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        self.shape, self.dtype = self.source.shape, self.source.dtype
        assert self.order.dim() in (1, len(self.shape)), "an order for all, or for each part of each matrix"

    def load(self) -> Tensor:
        stored = self.source.load()
        values = torch.empty_like(stored)
        if self.order.dim() == 1:
            values[..., self.order] = stored
            return values
        parts, rows = self.order.shape[-2], self.shape[-2] // self.order.shape[-2]
        for found, held, orders in zip(
            *(v.reshape(-1, *v.shape[-2:]) for v in (values, stored, self.order)), strict=True
        ):
            for part in range(parts):
                found[part * rows : (part + 1) * rows, orders[part]] = held[part * rows : (part + 1) * rows]
        return values


def is_quantized(weight: Weight) -> bool:
    """Whether a weight is stored as codes, perhaps transposed or with reordered columns."""
    return isinstance(weight, (QuantizedWeight, Transposed, SortedColumns))


@dataclass
class RowConcat(Weight):
    """Weights of one dtype joined along their first axis, the outputs, such as merged QKV."""

    pieces: tuple[Weight, ...]
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        first = self.pieces[0]
        assert all(p.shape[1:] == first.shape[1:] and p.dtype == first.dtype for p in self.pieces), "rows differ"
        self.shape, self.dtype = (sum(p.shape[0] for p in self.pieces), *first.shape[1:]), first.dtype

    @property
    def storage(self) -> StorageFormat:
        first = self.pieces[0].storage
        return first if all(first.merges_with(p.storage) for p in self.pieces) else Dense(self.dtype)

    def parts(self) -> Parts:
        storage = self.storage
        if isinstance(storage, Dense):
            return super().parts()
        return storage.join([piece.parts() for piece in self.pieces])

    def load(self) -> Tensor:
        return torch.cat([piece.load() for piece in self.pieces])

    def describe(self) -> str:
        names = {p.storage.name for p in self.pieces}
        return f"{'+'.join(sorted(names))}[{', '.join(map(str, self.shape))}]"


def pieces_of(weight: Weight) -> tuple[Weight, ...]:
    """The weights whose rows a weight joins, or itself."""
    return weight.pieces if isinstance(weight, RowConcat) else (weight,)
