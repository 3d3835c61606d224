"""`q8s`: q8 in two planes, for products that at first need only half of the bits (screen.h).

First all tiles with the high nibbles, in the form of q4, then all tiles with the low nibbles, without headers. The
headers hold two more f32: at 52 the largest scale of the tile in this group, at 56 the tile's largest lean (see
`leans`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ....program.layout import Arrays
from ....weights.formats.affine import GroupAffine
from ..arithmetic import Arithmetic
from .affine import NIBBLES, AffineTiles, quant_tile_bytes
from .codes import Reader
from .elements import round_up
from .tiles import HEADER, TILE, headers, nibble_lines, of_headers, of_nibble_lines


def high_tile_bytes(k: int, group: int) -> int:
    """Bytes of one q8s tile in the plane of high nibbles, as many as of a q4 tile."""
    return quant_tile_bytes(k, 4, group)


def low_tile_bytes(k: int) -> int:
    """Bytes of one q8s tile in the plane of low nibbles."""
    return k * TILE // 2


BOTH = Reader(
    "an 8-bit product, both planes",
    "cpp/layouts/q8s.cpp.jinja",
    ("low", "high"),
    "dot_u8",
    without_quads=Arithmetic.LONG_CHAINS,
    planes=(("w", 16), ("fine", 1)),
)
HIGH = replace(NIBBLES, title="an 8-bit product, high plane", macros="cpp/layouts/q8s_high.cpp.jinja")


@dataclass(frozen=True)
class SplitTiles(AffineTiles):
    """8-bit codes in two planes: all high nibbles, then all low nibbles."""

    screens: ClassVar[bool] = True

    @classmethod
    def of(cls, form: GroupAffine) -> SplitTiles:
        return cls("q8s", form)

    @property
    def reader(self) -> Reader:
        return BOTH

    @property
    def screener(self) -> Reader | None:
        return HIGH

    def tile_bytes(self, k: int) -> int:
        return high_tile_bytes(k, self.format.group)

    def low_bytes(self, k: int) -> int:
        return low_tile_bytes(k)

    def pack_matrix(self, parts: Arrays) -> np.ndarray:
        codes, halves, unit, zeros = self.tiles(parts)
        header = headers(halves, unit, zeros)
        stored = halves.astype(np.float32) * unit[:, None]
        header[:, :, 52:56] = np.ascontiguousarray(np.abs(stored).max(axis=1))[:, :, None].view(np.uint8)
        lean = leans(codes, zeros, stored).max(axis=1)
        header[:, :, 56:60] = np.repeat(lean[:, None], header.shape[1], axis=1)[:, :, None].view(np.uint8)
        high = np.concatenate([header, nibble_lines(codes >> 4)], axis=2)
        return np.concatenate([high.reshape(-1), nibble_lines(codes & 15).reshape(-1)])

    def unpack_matrix(self, packed: np.ndarray, n: int, k: int) -> dict[str, np.ndarray]:
        tiles, groups = round_up(n, TILE) // TILE, k // self.format.group
        end = tiles * self.tile_bytes(k)
        high, low = packed[:end].reshape(tiles, groups, -1), packed[end:].reshape(tiles, groups, -1)
        scales, zeros = of_headers(high, n)
        codes = of_nibble_lines(high[:, :, HEADER:]) << 4 | of_nibble_lines(low)
        return {"codes": codes.reshape(-1, k)[:n], "scales": scales, "zeros": zeros}


def leans(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """How much of each row's low nibbles, minus 7.5, is parallel to the row: float32 [tiles, 16].

    |r w| / |w|^2 of the row w and its low part r. The part of a product that screening does not see is this share of
    the product plus a random rest. codes: [tiles, 16, groups, group]; zeros, scales: [tiles, 16, groups].
    """
    weights = codes.astype(np.float32) - zeros[..., None]
    rest = (codes & 15).astype(np.float32) - np.float32(7.5)
    squares = (scales / np.maximum(np.abs(scales).max(axis=2, keepdims=True), np.float32(1e-30))) ** 2
    along = np.einsum("trgk,trgk,trg->tr", weights, rest, squares)
    norm = np.einsum("trgk,trgk,trg->tr", weights, weights, squares)
    return np.abs(along) / np.maximum(norm, np.float32(1e-30))
