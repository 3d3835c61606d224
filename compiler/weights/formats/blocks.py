"""Formats with blocks of values, mostly of model files: small codes, a scale per block, and optionally a smaller one
per group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .base import Array, Encoded, Misfit, Parts, StorageFormat, decibels
from .float8 import e4m3_values
from .grouped import per_group

GroupScale = Literal["none", "u4", "u6", "i8", "e4m3"]
ScaleType = Literal["f16", "bf16", "f32", "e8m0"]
SCALE_TYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
OFFSET_SCALES: dict[torch.dtype, ScaleType] = {torch.float16: "f16", torch.bfloat16: "bf16"}  # of with_offsets
STEP = 16
_GROUP_SCALES = {"u4": (torch.uint8, 4), "u6": (torch.uint8, 6), "i8": (torch.int8, 8), "e4m3": (torch.uint8, 8)}


@dataclass(frozen=True)
class BlockFormat(StorageFormat):
    """w = scale level(code) - min, with level(code) = code - zero, or an entry of `table`. All in float32.

    A block is `size` values along K, a group is `group` of them. The scale of a group is that of its block (of type
    `scale`) times `factor`, a power of two, times the group's own scale unless `group_scales` is "none". With `mins`, a
    minimum is subtracted: that of the block, times the group's own if there are group scales, and then never negative.
    With `zeros` every block has its own zero. micro_rows: whether products may round their rows to MXFP8, e4m3 with a
    power of two per 32 values, if a GPU multiplies these codes with such rows (W4A8).

    Parts: codes uint8 [..., N, K]; scales float32 [..., N, K / size] (values of type `scale`), or exponents uint8;
    zeros uint8 of the same shape; with group scales, group_scales [..., N, K / group]; with mins, mins and group_mins
    of the same types and shapes.
    """

    kind: str
    bits: int
    group: int
    size: int
    zero: int = 0
    table: tuple[float, ...] = ()
    mins: bool = False
    group_scales: GroupScale = "none"
    scale: ScaleType = "f16"
    factor: float = 1.0
    zeros: bool = False
    micro_rows: bool = False

    @property
    def power(self) -> bool:
        """Whether scales are powers of two, stored as exponents."""
        return self.scale == "e8m0"

    @property
    def name(self) -> str:
        return self.kind

    @property
    def block(self) -> tuple[int, int]:
        return (1, self.group)

    @property
    def row_group(self) -> int:
        """Int8 rows have a scale per 32 values; per 16 if a group of codes is no multiple of 32, or if codes have six
        bits, because the upper two bits of 16 values fill a line."""
        return STEP if self.group % 32 or self.bits == 6 else 32

    @property
    def values(self) -> Tensor:
        """The table of levels, float32 [codes]."""
        return torch.tensor(self.table, dtype=torch.float32)

    def fitted(self, k: int) -> BlockFormat:
        """This format: its block size is fixed. Misfit if blocks do not divide `k`."""
        if k % self.size:
            raise Misfit(f"K = {k} is not a multiple of {self.size}")
        return self

    def arrays(self, shape: Sequence[int]) -> dict[str, Array]:
        blocks, groups = per_group(shape, self.size), per_group(shape, self.group)
        found = {"codes": Array(tuple(shape), torch.uint8, self.bits)}
        if self.power:
            found["exponents"] = Array(blocks, torch.uint8, 8)
        else:
            kind = SCALE_TYPES[self.scale]
            found["scales"] = Array(blocks, kind, 8 * kind.itemsize)
        if self.zeros:
            found["zeros"] = Array(blocks, torch.uint8, 8)
        if self.mins:
            found["mins"] = Array(blocks, torch.float16, 16)
        if self.group_scales != "none":
            kind, bits = _GROUP_SCALES[self.group_scales]
            found["group_scales"] = Array(groups, kind, bits)
            if self.mins:
                found["group_mins"] = Array(groups, kind, bits)
        return found

    def encode(self, values: Tensor, clip: Tensor | None = None) -> Encoded:
        """Round each value to its nearest level, with scales by least squares. clip: ignored. Misfit if the format can
        only be read."""
        from .fitting import can_fit, encode_blocks

        if not can_fit(self):
            return super().encode(values, clip)
        parts = encode_blocks(self, values)
        noise = float((self.decode(parts) - values.to(torch.float32)).square_().sum(dtype=torch.float64))
        return Encoded(parts, decibels(float(values.to(torch.float32).square().sum(dtype=torch.float64)), noise))

    def decode(self, parts: Parts) -> Tensor:
        codes = torch.unflatten(parts["codes"], -1, (-1, self.group))
        scale, offset = self.levels_of(parts)
        if self.table:
            level = self.values[codes.to(torch.int64)]
        else:
            zero = self._spread(parts["zeros"]).unsqueeze(-1) if self.zeros else self.zero
            level = codes.to(torch.float32).sub_(zero)
        values = level.mul_(scale.unsqueeze(-1))
        return (values if offset is None else values.sub_(offset.unsqueeze(-1))).flatten(-2)

    def levels_of(self, parts: Parts) -> tuple[Tensor, Tensor | None]:
        """The scale and the minimum of each group, float32 [..., N, K / group]; None without minima."""
        scale = two_to(parts["exponents"]) if self.power else parts["scales"].to(torch.float32) * self.factor
        return self._of_groups(scale, parts, "group_scales"), (
            self._of_groups(parts["mins"].to(torch.float32), parts, "group_mins") if self.mins else None
        )

    def _of_groups(self, values: Tensor, parts: Parts, own: str) -> Tensor:
        """Values of blocks [..., K / size], repeated for each of their groups and multiplied by the groups' own scales
        `own`."""
        spread = self._spread(values)
        if self.group_scales == "none":
            return spread
        return spread * (e4m3_values(parts[own]) if self.group_scales == "e4m3" else parts[own].to(torch.float32))

    def _spread(self, values: Tensor) -> Tensor:
        """Values of blocks [..., K / size], repeated for each of their groups [..., K / group]."""
        return values.repeat_interleave(self.size // self.group, -1)


def two_to(exponents: Tensor) -> Tensor:
    """2^(e - 128) for e8m0 exponents of any shape, float32: half of their value, because levels are doubled."""
    bits = exponents.to(torch.int32)
    return torch.where(bits < 2, 0x00200000 << bits, (bits - 1).clamp(min=0) << 23).view(torch.float32)


def grouped(bits: int, group: int, scale: ScaleType = "f16") -> BlockFormat:
    """w = scale (code - zero), with a scale and a zero per group: GPTQ, AWQ and pack-quantized checkpoints. zq4g128 has
    float16 scales, zq4_bf16g128 bfloat16 ones."""
    kind = f"zq{bits}{'' if scale == 'f16' else '_' + scale}g{group}"
    return BlockFormat(kind, bits, group, group, scale=scale, zeros=True)


def with_offsets(bits: int, group: int, scale: ScaleType = "f16") -> BlockFormat:
    """w = scale code + offset, with two numbers per group: MLX checkpoints. oq4g64 has float16 scales, oq4_bf16g64
    bfloat16 ones. The negative of the offset is stored, as float16."""
    kind = f"oq{bits}{'' if scale == 'f16' else '_' + scale}g{group}"
    return BlockFormat(kind, bits, group, group, scale=scale, mins=True)


def ternary(group: int) -> BlockFormat:
    """w = scale (code - 1), with 2-bit codes and float32 scales, such as t2_f32g128: BitNet checkpoints."""
    return BlockFormat(f"t2_f32g{group}", 2, group, group, zero=1, scale="f32")
