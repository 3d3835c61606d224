"""`q4` and `q8`: integer codes in tiles of 16 rows, for products with int8 activations (see tiles.py)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ....program.layout import Arrays
from ....weights.formats.affine import GroupAffine
from ..arithmetic import Arithmetic
from .codes import CodeTiles, Reader
from .elements import round_up
from .tiles import (
    HEADER,
    TILE,
    byte_lines,
    headers,
    nibble_lines,
    of_byte_lines,
    of_headers,
    of_nibble_lines,
    split_scales,
    tiled,
)

NIBBLES = Reader(
    "a 4-bit product", "cpp/layouts/q4.cpp.jinja", ("low", "high"), "dot_u4", without_quads=Arithmetic.LONG_CHAINS
)
BYTES = Reader("an 8-bit product", "cpp/layouts/q8.cpp.jinja", ("raw",), "dot_u8", without_quads=Arithmetic.PAIRS)


def quant_tile_bytes(k: int, bits: int, group: int) -> int:
    """Bytes of one q4 or q8 tile of 16 rows."""
    return k // group * (HEADER + group * TILE * bits // 8)


@dataclass(frozen=True)
class AffineTiles(CodeTiles):
    """Consecutive tiles; each has, per group of k, a header and lines of codes."""

    format: GroupAffine  # type: ignore[reportIncompatibleVariableOverride]  # frozen, so narrower is right

    @classmethod
    def of(cls, form: GroupAffine) -> AffineTiles:
        """The layout of a format: q4 or q8."""
        return cls(f"q{form.bits}", form)

    @property
    def label(self) -> str:
        return f"{self.format.bits}-bit"

    @property
    def reader(self) -> Reader:
        return NIBBLES if self.format.bits == 4 else BYTES

    def tile_bytes(self, k: int) -> int:
        return quant_tile_bytes(k, self.format.bits, self.format.group)

    def pack_matrix(self, parts: Arrays) -> np.ndarray:
        codes, halves, unit, zeros = self.tiles(parts)
        lines = nibble_lines(codes) if self.format.bits == 4 else byte_lines(codes)
        return np.concatenate([headers(halves, unit, zeros), lines], axis=2).reshape(-1)

    def tiles(self, parts: Arrays) -> tuple[np.ndarray, ...]:
        """Codes [tiles, 16, groups, group], f16 scales, their units, and zero points; missing rows of the last tile are
        zero. ValueError if the groups do not fit the layout (`misfit`)."""
        group, (_, k) = self.format.group, parts["codes"].shape
        if reason := self.misfit(*parts["codes"].shape):
            raise ValueError(reason)
        halves, unit = split_scales(tiled(parts["scales"].astype(np.float32, copy=False)))
        codes = tiled(parts["codes"])
        return codes.reshape(*codes.shape[:2], k // group, group), halves, unit, tiled(parts["zeros"])

    def unpack_matrix(self, packed: np.ndarray, n: int, k: int) -> dict[str, np.ndarray]:
        tiles = packed.reshape(round_up(n, TILE) // TILE, k // self.format.group, -1)
        scales, zeros = of_headers(tiles, n)
        lines = tiles[:, :, HEADER:]
        codes = of_nibble_lines(lines) if self.format.bits == 4 else of_byte_lines(lines)
        return {"codes": codes.reshape(-1, k)[:n], "scales": scales, "zeros": zeros}
