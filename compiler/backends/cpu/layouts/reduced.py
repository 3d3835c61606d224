"""`i7`: codes of 7 bits (weights/formats/reduced.py) in tiles of 16 rows, for products with unsigned rows of 7 bits.

Per group of k a tile has 16 float32 scales, 16 float32 sums of codes, and lines of signed codes as q8 has them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ....program.layout import Arrays
from ....weights.formats.channel import ZERO
from ....weights.formats.reduced import ReducedInt8
from ..arithmetic import Arithmetic
from .codes import CodeTiles, Reader
from .elements import round_up
from .tiles import TILE, byte_lines, of_byte_lines, tiled

HEADER = 2 * 4 * TILE
SIGNED = Reader(
    "a product of 7 bits", "cpp/layouts/i7.cpp.jinja", ("raw",), "dot_i7", HEADER, without_quads=Arithmetic.CHAINS
)


@dataclass(frozen=True)
class ReducedTiles(CodeTiles):
    """Consecutive tiles; each has, per group of k, a header and lines of codes."""

    format: ReducedInt8  # type: ignore[reportIncompatibleVariableOverride]  # frozen, so narrower is right

    @classmethod
    def of(cls, form: ReducedInt8) -> ReducedTiles:
        """The layout of 7-bit codes, named "i7"."""
        return cls("i7", form)

    @property
    def label(self) -> str:
        return "7-bit"

    @property
    def reader(self) -> Reader:
        return SIGNED

    def tile_bytes(self, k: int) -> int:
        return k // self.format.group * (HEADER + self.format.group * TILE)

    def pack_matrix(self, parts: Arrays) -> np.ndarray:
        group, (n, k) = self.format.group, parts["codes"].shape
        if reason := self.misfit(n, k):
            raise ValueError(reason)
        codes = tiled((parts["codes"].astype(np.int16) - ZERO).astype(np.int8))
        codes = codes.reshape(*codes.shape[:2], k // group, group)
        header = np.stack([tiled(parts["scales"].astype(np.float32)), codes.sum(3, np.float32)], axis=3)
        header = np.ascontiguousarray(header.transpose(0, 2, 3, 1)).view(np.uint8)  # [tiles, groups, 2, 64]
        lines = byte_lines(codes).view(np.uint8)
        return np.concatenate([header.reshape(*lines.shape[:2], HEADER), lines], axis=2).reshape(-1)

    def unpack_matrix(self, packed: np.ndarray, n: int, k: int) -> dict[str, np.ndarray]:
        tiles = packed.reshape(round_up(n, TILE) // TILE, k // self.format.group, -1)
        scales = np.ascontiguousarray(tiles[:, :, : 4 * TILE]).view(np.float32).transpose(0, 2, 1)
        scales = scales.reshape(-1, k // self.format.group)[:n]
        codes = of_byte_lines(tiles[:, :, HEADER:]).reshape(-1, k)[:n] + np.uint8(ZERO)
        return {"codes": codes, "scales": scales, "zeros": np.full_like(scales, ZERO, np.uint8)}
