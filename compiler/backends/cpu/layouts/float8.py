"""8-bit floats (weights/formats/float8.py) in tiles of 16 output rows, for products with float rows.

A tile has for each block of K the float32 scales of its rows (64 bytes), then their codes, `codes[k][16]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ....program.layout import Arrays, MatrixLayout
from ....weights.formats.float8 import Float8
from .dense import ValueTiles
from .elements import round_up
from .tiles import TILE, tiled

HEADER = 4 * TILE


@dataclass(frozen=True)
class Float8Tiles(ValueTiles, MatrixLayout):
    """Consecutive tiles, each of a multiple of 64 bytes; experts [E, N, K] follow one another."""

    format: Float8  # type: ignore[reportIncompatibleVariableOverride]  # frozen, so narrower is right
    macros: ClassVar[str] = "cpp/layouts/float8.cpp.jinja"
    micro: ClassVar[str] = "cpp/linear/micro_scaled.cpp.jinja"

    @classmethod
    def of(cls, form: Float8) -> Float8Tiles:
        """The layout of a format, under the format's name."""
        return cls(form.name, form)

    @property
    def ctype(self) -> str:
        return "E4m3"

    @property
    def scale_group(self) -> int:
        return self.format.group

    def misfit(self, n: int, k: int) -> str:
        return ""

    def tile_bytes(self, k: int) -> int:
        """Bytes of a tile of k columns: a header with scales for each block of K, and the codes; a multiple of 64."""
        return round_up(HEADER * self.format.blocks(k) + TILE * k, 64)

    def tile_size(self, k: int) -> str:
        return str(self.tile_bytes(k))

    def matrix_nbytes(self, n: int, k: int) -> int:
        return round_up(n, TILE) // TILE * self.tile_bytes(k)

    def pack_matrix(self, parts: Arrays) -> np.ndarray:
        codes, scales = tiled(parts["codes"]), tiled(parts["scales"].astype(np.float32, copy=False))
        packed = np.zeros((len(codes), self.tile_bytes(codes.shape[2])), np.uint8)
        for block, header, body, here in self._blocks(codes.shape[2]):
            packed[:, header] = np.ascontiguousarray(scales[:, :, block]).view(np.uint8)
            packed[:, body] = codes[:, :, here].transpose(0, 2, 1).reshape(len(codes), -1)
        return packed.reshape(-1)

    def unpack_matrix(self, packed: np.ndarray, n: int, k: int) -> dict[str, np.ndarray]:
        tiles = packed.reshape(-1, self.tile_bytes(k))
        codes = np.zeros((len(tiles), TILE, k), np.uint8)
        scales = np.zeros((len(tiles), TILE, self.format.blocks(k)), np.float32)
        for block, header, body, here in self._blocks(k):
            scales[:, :, block] = np.ascontiguousarray(tiles[:, header]).view(np.float32)
            codes[:, :, here] = tiles[:, body].reshape(len(tiles), -1, TILE).transpose(0, 2, 1)
        return {"codes": codes.reshape(-1, k)[:n], "scales": scales.reshape(-1, scales.shape[2])[:n]}

    def _blocks(self, k: int) -> list[tuple[int, slice, slice, slice]]:
        """For each block of K: its number, the bytes of a tile that hold its scales, those that hold its codes, and its
        columns."""
        found, size, at = [], self.format.group or k, 0
        for block, first in enumerate(range(0, k, size)):
            width = min(size, k - first)
            body = at + HEADER
            found.append((block, slice(at, body), slice(body, body + TILE * width), slice(first, first + width)))
            at = body + TILE * width
        return found
