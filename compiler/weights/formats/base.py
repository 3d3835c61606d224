"""The base class of storage formats: which arrays hold a weight, and which float32 values they stand for.

A format knows nothing of passes and back ends. How a back end lays its arrays out in memory is a `Layout` of the back
end (see program/layout.py), one per format.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

Parts = dict[str, Tensor]
"""The arrays of an encoded weight by name, in the form that passes use: one code per element, scales in float32."""


Ranges = tuple[tuple[int, int], ...]
"""Ranges [begin, end) of an axis, one after the other."""


class Misfit(ValueError):
    """A weight cannot be stored in a format; the message says why."""


@dataclass(frozen=True)
class Array:
    """One array of an encoded weight. dtype: of an element in memory. bits: that an element needs."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int

    @property
    def working(self) -> torch.dtype:
        """The dtype in `Parts`, where 16-bit floats are float32."""
        return torch.float32 if self.dtype in (torch.float16, torch.bfloat16) else self.dtype


@dataclass(frozen=True)
class Encoded:
    """A weight in some format, and the signal-to-noise ratio in dB of the values that it stands for."""

    parts: Parts
    snr_db: float


class StorageFormat(ABC):
    """How a weight [..., N, K] is stored. A value object: equal formats store in the same way."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in graph texts, such as q4g128; `find_format` reads it."""

    @property
    def block(self) -> tuple[int, int]:
        """The numbers of rows and columns that share scales and the like."""
        return (1, 1)

    @property
    def row_group(self) -> int:
        """The number of values of an activation row that share a scale in products that read int8 rows."""
        return self.block[1]

    @property
    def unsigned_rows(self) -> bool:
        """Whether such products read rows as codes from 0 to 127 with a zero point per group, instead of -127 to
        127."""
        return False

    @property
    def serves_tables(self) -> bool:
        """Whether the format is accurate enough for token embeddings, whose rows are read singly, so that no sum
        averages errors."""
        return False

    @abstractmethod
    def arrays(self, shape: Sequence[int]) -> dict[str, Array]:
        """The arrays of a weight of `shape` by name, in their fixed order."""

    @abstractmethod
    def decode(self, parts: Parts) -> Tensor:
        """The values that `parts` stand for, float32 [..., N, K]: the reference of every kernel."""

    def encode(self, values: Tensor, clip: Tensor | None = None) -> Encoded:
        """Store float `values` [..., N, K]. clip: [..., N, blocks of K], the share of each block's largest magnitude
        that bounds its range; None: all of it. Misfit if the format can only be read."""
        raise Misfit(f"{self.name} is a format of files; nothing is encoded in it")

    def rounded(self, values: Tensor, clip: Tensor | None = None) -> Tensor:
        """`values` [..., N, K] rounded as `encode` would store them, float32. clip: see `encode`."""
        return self.decode(self.encode(values, clip).parts)

    def coded_rows(self, rows: Tensor) -> Tensor:
        """Activations [n, K], rounded as in products that read int8 rows, float32."""
        groups = torch.unflatten(rows, -1, (-1, self.row_group))
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        return (groups / scale).round_().mul_(scale).flatten(-2)

    def fitted(self, k: int) -> StorageFormat:
        """This format for rows of `k` values, with smaller blocks if necessary. Misfit if no blocks fit."""
        if k % self.block[1]:
            raise Misfit(f"K = {k} is not a multiple of {self.block[1]}")
        return self

    def nbytes(self, shape: Sequence[int]) -> int:
        """The bytes of a weight of `shape`, without padding of a back end."""
        return sum(-(-prod(a.shape) * a.bits // 8) for a in self.arrays(shape).values())

    def bits_per_weight(self, shape: Sequence[int]) -> float:
        """Bits per weight, including scales."""
        return 8 * self.nbytes(shape) / max(1, prod(shape))

    def merges_with(self, other: StorageFormat) -> bool:
        """Whether rows in both formats can be rows of one weight."""
        return self == other

    def join(self, parts: Sequence[Parts]) -> Parts:
        """The parts of weights joined along their first axis. Their formats must merge with each other."""
        return {name: torch.cat([p[name] for p in parts]) for name in parts[0]}

    def cut(self, parts: Parts, shape: Sequence[int], axis: int, ranges: Ranges) -> Parts:
        """The parts, in the format `cut_to`, of only these ranges of an axis of a weight of `shape`. Misfit if a range
        begins or ends within a block."""
        return {name: _cut(value, shape[axis], axis, ranges, self.name) for name, value in parts.items()}

    def cut_to(self, shape: Sequence[int], axis: int, ranges: Ranges) -> StorageFormat:
        """The format of the result of `cut`: here that of the whole. Misfit if the weight cannot be cut there."""
        self._check_cut(self, shape, axis, ranges)
        return self

    def _check_cut(self, local: StorageFormat, shape: Sequence[int], axis: int, ranges: Ranges) -> None:
        block = local.block[1] if axis == len(shape) - 1 else 1
        misfit = Misfit(f"{self.name} has blocks along axis {axis} of {list(shape)} that {ranges} would cut")
        if any(place % block for one in ranges for place in one if place < shape[axis]):
            raise misfit
        size = sum(end - begin for begin, end in ranges)
        own = (*shape[:axis], size, *shape[axis + 1 :])
        whole = {name: torch.empty(a.shape, device="meta") for name, a in self.arrays(shape).items()}
        found = {name: tuple(value.shape) for name, value in self.cut(whole, shape, axis, ranges).items()}
        if found != {name: a.shape for name, a in local.arrays(own).items()}:
            raise misfit

    def hold(self, parts: Parts, shape: Sequence[int]) -> Parts:
        """The parts of a weight of `shape` in less memory: 4-bit codes two per byte, narrow floats. `release` undoes
        it."""
        arrays = self.arrays(shape)
        return {name: _hold(value, arrays[name]) for name, value in parts.items()}

    def release(self, held: Parts, shape: Sequence[int]) -> Parts:
        """The parts that `hold` was given."""
        arrays = self.arrays(shape)
        return {name: _release(value, arrays[name]) for name, value in held.items()}

    def __str__(self) -> str:
        return self.name


def _cut(value: Tensor, size: int, axis: int, ranges: Ranges, name: str) -> Tensor:
    """The ranges of an axis of `size` elements of an array [..]; an array with one entry for the whole axis is
    unchanged."""
    entries = value.shape[axis]
    if entries == 1 < size:
        return value
    block = size // entries
    if any(place % block for one in ranges for place in one):
        raise Misfit(f"{name} has blocks of {block} along axis {axis}, which {ranges} cut")
    pieces = [value.narrow(axis, begin // block, (end - begin) // block) for begin, end in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)


def _hold(value: Tensor, array: Array) -> Tensor:
    if array.bits == 4 and array.shape[-1] % 2 == 0:
        return value[..., 0::2] | (value[..., 1::2] << 4)
    return value.to(array.dtype)


def _release(value: Tensor, array: Array) -> Tensor:
    if value.shape != array.shape:
        value = torch.stack((value & 15, value >> 4), dim=-1).flatten(-2)
    return value.to(array.working)


def decibels(signal: float, noise: float) -> float:
    """10 log10(signal / noise), at most 200, which also stands for no noise and for no signal."""
    return min(200.0, 10.0 * math.log10(signal / noise)) if noise > 0 and signal > 0 else 200.0
