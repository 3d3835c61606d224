"""Formats that round every value independently, to one of the levels of its group of values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from ...quantization import GROUPS
from .base import Encoded, Misfit, Parts, StorageFormat, decibels

# rows are rounded in chunks of this many values, so that temporaries are small compared to the largest weight
_BLOCK = 1 << 22


@dataclass(frozen=True)
class GroupFormat(StorageFormat):
    """A code per value in the part "codes", and per `group` values along K further parts that define the codes' values.

    All ways to round (to nearest, AWQ, GPTQ) use four methods: `fit` chooses the parts per group, `levels` reads them
    as float32 arrays with an entry per group, and `code` and `value` convert values to codes and back, element by
    element, with levels that broadcast.
    """

    group: int

    @property
    def block(self) -> tuple[int, int]:
        return (1, self.group)

    @abstractmethod
    def fit(self, groups: Tensor, clip: Tensor | None = None) -> Parts:
        """All parts but the codes, for values [..., K / group, group]. clip: [..., K / group], see `encode`; None: no
        clipping."""

    @abstractmethod
    def levels(self, parts: Parts) -> tuple[Tensor, ...]:
        """The levels for `code` and `value` from a weight's parts, float32 [..., K / group] each."""

    @abstractmethod
    def code(self, values: Tensor, *levels: Tensor) -> Tensor:
        """The nearest codes of `values`, as integers in float32 of the same shape; a new tensor."""

    @abstractmethod
    def value(self, codes: Tensor, *levels: Tensor) -> Tensor:
        """The values of codes, float32 of the same shape; a new tensor."""

    def fitted(self, k: int) -> Self:
        """This format with the largest group, up to its own, that divides `k`. Misfit if none does."""
        group = next((g for g in GROUPS if g <= self.group and k % g == 0), 0)
        if not group:
            raise Misfit(f"K = {k} is not a multiple of {GROUPS[-1]}")
        return replace(self, group=group)

    def with_codes(self, codes: Tensor, fitted: Parts) -> Parts:
        """All parts of a weight: the given codes [..., N, K] and the parts of `fit`."""
        arrays = self.arrays(codes.shape)
        return {name: value.to(arrays[name].working) for name, value in {"codes": codes, **fitted}.items()}

    def decode(self, parts: Parts) -> Tensor:
        grouped = torch.unflatten(parts["codes"], -1, (-1, self.group)).to(torch.float32)
        return self.value(grouped, *(level.unsqueeze(-1) for level in self.levels(parts))).flatten(-2)

    def rounded(self, values: Tensor, clip: Tensor | None = None) -> Tensor:
        grouped = torch.unflatten(values, -1, (-1, self.group))
        levels = [level.unsqueeze(-1) for level in self.levels(self.fit(grouped, clip))]
        return self.value(self.code(grouped, *levels), *levels).flatten(-2)

    def encode(self, values: Tensor, clip: Tensor | None = None) -> Encoded:
        """Round values [..., N, K] to nearest, in chunks of rows. clip: [..., N, K / group]; None: no clipping."""
        k, lead = values.shape[-1], values.shape[:-1]
        rows = values.reshape(-1, k // self.group, self.group)
        clips = None if clip is None else clip.reshape(rows.shape[:2])
        parts = {name: torch.empty(a.shape, dtype=a.working) for name, a in self.arrays((len(rows), k)).items()}
        signal = noise = 0.0
        step = max(1, _BLOCK // k)
        for start in range(0, len(rows), step):
            here = slice(start, start + step)
            wanted = rows[here].to(torch.float32)
            fitted = self.fit(wanted, None if clips is None else clips[here].to(torch.float32))
            levels = [level.unsqueeze(-1) for level in self.levels(fitted)]
            codes = self.code(wanted, *levels)
            signal += float(wanted.square().sum(dtype=torch.float64))
            noise += float((wanted - self.value(codes, *levels)).square_().sum(dtype=torch.float64))
            for name, value in {**fitted, "codes": codes.flatten(-2)}.items():
                parts[name][here] = value.to(parts[name].dtype)
        shaped = {name: value.reshape(*lead, value.shape[-1]) for name, value in parts.items()}
        return Encoded(shaped, decibels(signal, noise))


def per_group(shape: Sequence[int], group: int) -> tuple[int, ...]:
    """The shape of an array with one entry per group of a weight [..., K]."""
    return (*shape[:-1], shape[-1] // group)
