"""Dense weights: plain rows, `f32 bf16 f16 i32`, or tiles of 16 output rows, `tile_f32 tile_bf16 tile_f16`.

Values come as numpy arrays of float32 or float16, or of uint16 holding bf16 bits, and are converted to the stored type.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from .....runtime.format.bfloat16 import bf16_bits, bf16_values
from ....program.layout import Arrays, Layout
from ....weights.formats.dense import BF16, F16, F32, I32, Dense
from .elements import C_TYPES, PLAIN, round_up
from .tiles import TILE

_NUMPY = {"f32": np.float32, "bf16": np.uint16, "f16": np.float16, "i32": np.int32}


def _convert(array: np.ndarray, item: str) -> np.ndarray:
    """`array` in the storage type of item f32, bf16, f16 or i32; uint16 input holds bf16 bits."""
    if item == "i32":
        return array.astype(np.int32)
    if item == "bf16":
        return array if array.dtype == np.uint16 else bf16_bits(array)
    values = bf16_values(array) if array.dtype == np.uint16 else array
    return values.astype(_NUMPY[item])


def _bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of `array`, zero-padded to a multiple of 64."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    padding = -flat.size % 64
    return np.concatenate([flat, np.zeros(padding, np.uint8)]) if padding else flat


@dataclass(frozen=True)
class Rows(Layout):
    """Row-major, any shape."""

    tiled: ClassVar[bool] = False
    macros: ClassVar[str] = "cpp/layouts/rows.cpp.jinja"

    def nbytes(self, shape: Sequence[int]) -> int:
        return round_up(prod(shape) * PLAIN[self.format.name], 64)

    def pack(self, parts: Arrays) -> np.ndarray:
        return _bytes(_convert(parts["values"], self.format.name))

    def unpack(self, packed: np.ndarray, shape: Sequence[int]) -> dict[str, np.ndarray]:
        return {"values": _shown(packed.view(_NUMPY[self.format.name])[: prod(shape)].reshape(shape))}


@dataclass(frozen=True)
class ValueTiles(Layout):
    """Tiles of 16 output rows whose values products multiply with float rows.

    macros: the template of the macros that read tables. micro: the template of the micro-kernels.
    """

    tiled: ClassVar[bool] = True
    macros: ClassVar[str]
    micro: ClassVar[str]

    @property
    @abstractmethod
    def ctype(self) -> str:
        """The C++ type of an element."""

    @property
    def table(self) -> str:
        """The list of micro-kernels, by its C++ name."""
        return f"DENSE_{self.format.name.upper()}"

    @property
    def scale_group(self) -> int:
        """Values along K that share a scale; 0 if there is one scale for all, or none."""
        return 0

    @abstractmethod
    def tile_size(self, k: int) -> str:
        """Bytes of a tile of `k` columns as an expression, in which K is their number."""


@dataclass(frozen=True)
class Tiles(ValueTiles):
    """`tile[k][16]` per 16 output rows; experts [E, N, K] follow one another."""

    tile: ClassVar[int] = TILE
    macros: ClassVar[str] = "cpp/layouts/tiles.cpp.jinja"
    micro: ClassVar[str] = "cpp/linear/micro_dense.cpp.jinja"

    @property
    def ctype(self) -> str:
        return C_TYPES[self.format.name]

    def tile_size(self, k: int) -> str:
        return f"K * 16 * {PLAIN[self.format.name]}"

    def nbytes(self, shape: Sequence[int]) -> int:
        *experts, n, k = shape
        return round_up(prod(experts) * round_up(n, TILE) * k * PLAIN[self.format.name], 64)

    def pack(self, parts: Arrays) -> np.ndarray:
        array = parts["values"]
        n, k = array.shape[-2:]
        item = _convert(array, self.format.name).reshape(-1, n, k)
        padded = round_up(n, TILE)
        tiles = np.zeros((item.shape[0], padded // TILE, k, TILE), item.dtype)
        for expert, weight in zip(tiles, item, strict=True):
            whole = n // TILE
            expert[:whole] = weight[: whole * TILE].reshape(whole, TILE, k).transpose(0, 2, 1)
            if n % TILE:
                expert[whole, :, : n % TILE] = weight[whole * TILE :].T
        return _bytes(tiles)

    def unpack(self, packed: np.ndarray, shape: Sequence[int]) -> dict[str, np.ndarray]:
        *experts, n, k = shape
        padded = round_up(n, TILE)
        flat = packed.view(_NUMPY[self.format.name])[: prod(experts) * padded * k]
        tiles = flat.reshape(-1, padded // TILE, k, TILE).transpose(0, 1, 3, 2)
        return {"values": _shown(tiles.reshape(-1, padded, k)[:, :n].reshape(shape))}


def _shown(values: np.ndarray) -> np.ndarray:
    """Stored values as float32; int32 values unchanged."""
    if values.dtype == np.int32:
        return values
    return bf16_values(values) if values.dtype == np.uint16 else values.astype(np.float32)


ROWS = {form.name: Rows(form.name, form) for form in (F32, BF16, F16, I32)}
TILES = {form.name: Tiles(f"tile_{form.name}", form) for form in (F32, BF16, F16)}


def stored_type(form: Dense) -> str:
    """The element type in which matrices and tables of a dense format are stored: 16-bit types unchanged, else f32."""
    return form.name if form.name in TILES else "f32"
