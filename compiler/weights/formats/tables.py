"""Formats whose codes select one of 16 values, times a scale per block: NF4, FP4, MXFP4, NVFP4 and IQ4_NL.

They differ only in their table, in the number of values that share a scale, and in the type of the scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .base import Misfit, Parts
from .blocks import SCALE_TYPES, STEP, BlockFormat, ScaleType
from .grouped import GROUPS, GroupFormat

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution, so that codes are about equally frequent (Dettmers et al. 2023,
arXiv:2305.14314), with bitsandbytes' values."""

FP4 = (0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25)
"""bitsandbytes' positive 4-bit floats."""

E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The 4-bit floats of the Open Compute Project (Microscaling Formats 1.0), doubled, so that they are integers."""

IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""llama.cpp's levels, which are denser where weights are more frequent."""

_LARGEST = {"f16": 65504.0, "bf16": 3.0e38, "f32": 3.0e38}
_SMALLEST = {"f16": 2.0**-24, "bf16": 2.0**-120, "f32": 2.0**-120}


@dataclass(frozen=True)
class TableFormat(BlockFormat, GroupFormat):
    """w = table[code] scale. Formats with one scale per group can be encoded as a GroupFormat."""

    @property
    def serves_tables(self) -> bool:
        return False

    @property
    def name(self) -> str:
        return self.kind

    def fitted(self, k: int) -> TableFormat:
        """This format: its block size is fixed. Misfit if blocks do not divide `k`."""
        if k % self.size:
            raise Misfit(f"K = {k} is not a multiple of {self.size}")
        return self

    @cached_property
    def _order(self) -> tuple[Tensor, Tensor]:
        """The distinct values of the table, [n], in ascending order, and their codes, [n]."""
        places = {value: code for code, value in reversed(list(enumerate(self.table)))}
        values = sorted(places)
        return torch.tensor(values, dtype=torch.float32), torch.tensor([places[v] for v in values])

    def fit(self, groups: Tensor, clip: Tensor | None = None) -> Parts:
        if self.group_scales != "none":
            raise Misfit(f"{self.name} is a format of files; nothing is encoded in it")
        peak = groups.abs().amax(-1)
        peak = peak if clip is None else peak * clip
        if self.power:
            return {"exponents": self._exponents(groups, peak)}
        top = max(abs(value) for value in self.table)
        scale = (peak / top).clamp(_SMALLEST[self.scale], _LARGEST[self.scale])
        return {"scales": scale.to(SCALE_TYPES[self.scale]).to(torch.float32)}

    def _exponents(self, groups: Tensor, peak: Tensor) -> Tensor:
        """Exponents of scales, uint8 [.., groups], for groups [.., groups, group] and their peaks: the least power of
        two with which the table reaches the peak, or half of it, whichever has the smaller error."""
        top = max(abs(value) for value in self.table)
        least = torch.ceil(torch.log2((peak / top).clamp(min=2.0**-120))).clamp(-126, 127)
        best, error = least, None
        for power in (least, least - 1):
            scale = torch.exp2(power).unsqueeze(-1)
            noise = (self.value(self.code(groups, scale), scale) - groups).square_().sum(-1)
            better = noise < error if error is not None else torch.ones_like(noise, dtype=torch.bool)
            best, error = torch.where(better, power, best), noise if error is None else torch.minimum(noise, error)
        return (best + 128).clamp_(2, 254).to(torch.uint8)

    def levels(self, parts: Parts) -> tuple[Tensor, ...]:
        return (self.levels_of(parts)[0],)

    def code(self, values: Tensor, *levels: Tensor) -> Tensor:
        table, codes = self._order
        places = torch.bucketize((values / levels[0]).contiguous(), (table[1:] + table[:-1]) / 2)
        return codes[places].to(torch.float32)

    def value(self, codes: Tensor, *levels: Tensor) -> Tensor:
        return self.values[codes.to(torch.int64)].mul_(levels[0])


@dataclass(frozen=True)
class GroupedTable(TableFormat):
    """A table format whose groups become smaller if K requires it."""

    @property
    def row_group(self) -> int:
        """Up to 32: larger steps of products are faster, and no file fixes the groups."""
        return min(self.group, 32)

    @property
    def name(self) -> str:
        return f"{self.kind}g{self.group}"

    def fitted(self, k: int) -> GroupedTable:
        """This format with the largest group, up to its own, that divides `k`. Misfit if none does."""
        group = next((g for g in GROUPS if g <= self.group and k % g == 0), 0)
        if not group:
            raise Misfit(f"K = {k} is not a multiple of {GROUPS[-1]}")
        return replace(self, group=group, size=group)


def nf4(group: int, scale: ScaleType = "f16") -> GroupedTable:
    """4-bit NormalFloat; nf4g64 has float16 scales, nf4_f32g64 float32 ones."""
    return _table("nf4", NF4, group, scale)


def fp4(group: int, scale: ScaleType = "f32") -> GroupedTable:
    """bitsandbytes' FP4."""
    return _table("fp4", (*FP4, *(-value for value in FP4)), group, scale)


def _table(kind: str, table: tuple[float, ...], group: int, scale: ScaleType) -> GroupedTable:
    name = kind if scale == "f16" else f"{kind}_{scale}"
    return GroupedTable(kind=name, bits=4, group=group, size=group, table=table, scale=scale)


def nvfp4(size: int) -> TableFormat:
    """NVFP4 of ModelOpt and compressed-tensors: an E4M3 scale per 16 values, times a scale per `size` values (in these
    checkpoints, one per tensor)."""
    return TableFormat(
        kind=f"nvfp4_xg{size}", bits=4, group=STEP, size=size, table=E2M1, scale="f32", group_scales="e4m3", factor=0.5
    )


MXFP4_FORMAT = TableFormat(kind="mxfp4", bits=4, group=32, size=32, table=E2M1, scale="e8m0")
MXFP4A8_FORMAT = replace(MXFP4_FORMAT, kind="mxfp4a8", micro_rows=True)
IQ4_NL_FORMAT = TableFormat(kind="iq4_nl", bits=4, group=32, size=32, table=IQ4_NL)
GGML_NVFP4 = TableFormat(kind="nvfp4", bits=4, group=STEP, size=STEP, table=E2M1)
