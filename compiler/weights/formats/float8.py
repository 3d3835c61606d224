"""8-bit floats with 4 exponent and 3 mantissa bits (E4M3, "FN": no infinities), and a scale per row or per block of a
row.

Micikevicius et al. 2022, "FP8 formats for deep learning". Scales that checkpoints have per tensor, per output channel
or per block of rows and columns (DeepSeek-V3: 128 x 128) are stored per row and block of columns, which costs at most 3
%.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Array, Encoded, Parts, StorageFormat, decibels

TOP = 448.0  # the largest value
NAN = 0x7F  # with either sign; there is no infinity
_TINY = 2.0**-100  # with a smaller scale, values would not be normal numbers
_ROWS = 1 << 22  # values that are rounded at once


@dataclass(frozen=True)
class Float8(StorageFormat):
    """w = value(code) scale, computed in float32.

    group: number of values along K that share a scale, fewer at the end of a row; 0: one scale per row. alone: whether
    only weights have 8 bits (W8A16), so that products do not round their rows to e4m3 even if a GPU has instructions
    for it.

    Parts: codes uint8 [..., N, K], the bits of the floats; scales float32 [..., N, blocks of K].
    """

    group: int = 0
    alone: bool = False

    @property
    def name(self) -> str:
        kind = "e4m3w" if self.alone else "e4m3"
        return f"{kind}_kg{self.group}" if self.group else kind

    @property
    def block(self) -> tuple[int, int]:
        return (1, self.group or 1)

    @property
    def serves_tables(self) -> bool:
        return True

    def fitted(self, k: int) -> Float8:
        """This format: rows may have any length."""
        return self

    def blocks(self, k: int) -> int:
        """The number of scales of a row of `k` values."""
        return -(-k // self.group) if self.group else 1

    def arrays(self, shape: Sequence[int]) -> dict[str, Array]:
        *lead, k = shape
        return {
            "codes": Array(tuple(shape), torch.uint8, 8),
            "scales": Array((*lead, self.blocks(k)), torch.float32, 32),
        }

    def decode(self, parts: Parts) -> Tensor:
        return e4m3_values(parts["codes"]).mul_(self._spread(parts["scales"], parts["codes"].shape[-1]))

    def encode(self, values: Tensor, clip: Tensor | None = None) -> Encoded:
        """Round to nearest, ties to even, with scales that map the largest magnitude of a block to the largest
        number."""
        k = values.shape[-1]
        rows = values.reshape(-1, k)
        clips = None if clip is None else clip.reshape(len(rows), -1)
        codes = torch.empty(rows.shape, dtype=torch.uint8)
        scales = torch.empty(len(rows), self.blocks(k), dtype=torch.float32)
        signal = noise = 0.0
        step = max(1, _ROWS // k)
        for start in range(0, len(rows), step):
            here = slice(start, start + step)
            wanted = rows[here].to(torch.float32)
            peak = self._peaks(wanted) if clips is None else self._peaks(wanted) * clips[here].to(torch.float32)
            scales[here] = (peak / TOP).clamp_(min=_TINY)
            ratio = wanted / self._spread(scales[here], k)
            codes[here] = ratio.clamp_(-TOP, TOP).to(torch.float8_e4m3fn).view(torch.uint8)
            kept = self.decode({"codes": codes[here], "scales": scales[here]})
            signal += float(wanted.square().sum(dtype=torch.float64))
            noise += float(kept.sub_(wanted).square_().sum(dtype=torch.float64))
        lead = values.shape[:-1]
        parts = {"codes": codes.reshape(values.shape), "scales": scales.reshape(*lead, -1)}
        return Encoded(parts, decibels(signal, noise))

    def _peaks(self, rows: Tensor) -> Tensor:
        """The largest magnitude of each block of rows [n, K]: [n, blocks of K]."""
        if not self.group:
            return rows.abs().amax(-1, keepdim=True)
        return torch.stack([piece.abs().amax(-1) for piece in torch.split(rows, self.group, -1)], -1)

    def _spread(self, scales: Tensor, k: int) -> Tensor:
        """Scales [.., blocks of K], repeated to [.., K], or one per row that broadcasts."""
        scales = scales.to(torch.float32)
        return scales.repeat_interleave(self.group, -1)[..., :k] if self.group else scales


def e4m3_values(codes: Tensor) -> Tensor:
    """The values of codes, float32 of the same shape; a new tensor."""
    return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
