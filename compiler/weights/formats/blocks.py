"""Formats of files whose values lie in blocks: small codes, a scale per block, and perhaps a smaller one per group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .base import Array, Misfit, Parts, StorageFormat
from .grouped import per_group

GroupScale = Literal["none", "u4", "u6", "i8"]
STEP = 16
_GROUP_SCALES = {"u4": (torch.uint8, 4), "u6": (torch.uint8, 6), "i8": (torch.int8, 8)}


@dataclass(frozen=True)
class BlockFormat(StorageFormat):
    """w = scale (level(code)) - min, with level(code) = code - zero, or an entry of `levels`. All in float32.

    A block is `size` values along K, a group is `group` of them. The scale of a group is that of its block (float16, or
    a power of two where `power`) times `factor`, a power of two, times its own integer where `group_scales` says so;
    with `mins`, so is what is taken off, which then is never below zero.

    Parts: codes uint8 [..., N, K]; scales float32 [..., N, K / size] (float16 values), or exponents uint8; with group
    scales, group_scales [..., N, K / group]; with mins, mins and group_mins of the same types and shapes.
    """

    kind: str
    bits: int
    group: int
    size: int
    zero: int = 0
    levels: tuple[int, ...] = ()
    mins: bool = False
    group_scales: GroupScale = "none"
    power: bool = False
    factor: float = 1.0

    @property
    def name(self) -> str:
        return self.kind

    @property
    def block(self) -> tuple[int, int]:
        """Products read their rows as int8 with a scale per 16 values, whatever a group is: twice as exact as 32."""
        return (1, STEP)

    def fitted(self, k: int) -> BlockFormat:
        """Itself: a file's blocks are what they are."""
        if k % self.size:
            raise Misfit(f"K = {k} is not a multiple of {self.size}")
        return self

    def arrays(self, shape: Sequence[int]) -> dict[str, Array]:
        blocks, groups = per_group(shape, self.size), per_group(shape, self.group)
        found = {"codes": Array(tuple(shape), torch.uint8, self.bits)}
        if self.power:
            found["exponents"] = Array(blocks, torch.uint8, 8)
        else:
            found["scales"] = Array(blocks, torch.float16, 16)
        if self.mins:
            found["mins"] = Array(blocks, torch.float16, 16)
        if self.group_scales != "none":
            kind, bits = _GROUP_SCALES[self.group_scales]
            found["group_scales"] = Array(groups, kind, bits)
            if self.mins:
                found["group_mins"] = Array(groups, kind, bits)
        return found

    def decode(self, parts: Parts) -> Tensor:
        codes = parts["codes"].unflatten(-1, (-1, self.group))
        scale, offset = self.levels_of(parts)
        if self.levels:
            level = torch.tensor(self.levels, dtype=torch.float32)[codes.to(torch.int64)]
        else:
            level = codes.to(torch.float32).sub_(self.zero)
        values = level.mul_(scale.unsqueeze(-1))
        return (values if offset is None else values.sub_(offset.unsqueeze(-1))).flatten(-2)

    def levels_of(self, parts: Parts) -> tuple[Tensor, Tensor | None]:
        """What a group's levels are multiplied by, and what is taken off then: float32 [..., N, K / group]."""
        scale = two_to(parts["exponents"]) if self.power else parts["scales"].to(torch.float32) * self.factor
        return self._of_groups(scale, parts, "group_scales"), (
            self._of_groups(parts["mins"].to(torch.float32), parts, "group_mins") if self.mins else None
        )

    def _of_groups(self, values: Tensor, parts: Parts, own: str) -> Tensor:
        """Values of blocks, for each of their groups, times what the groups have of their own."""
        spread = values.repeat_interleave(self.size // self.group, -1)
        return spread if self.group_scales == "none" else spread * parts[own].to(torch.float32)


def two_to(exponents: Tensor) -> Tensor:
    """2^(e - 128) of e8m0 exponents, float32: half of what they stand for, because levels are doubled."""
    bits = exponents.to(torch.int32)
    return torch.where(bits < 2, 0x00200000 << bits, (bits - 1).clamp(min=0) << 23).view(torch.float32)
