"""A storage format of an outside package: nl4, a table of 16 levels and a scale per group, for both back ends.

The levels are those of llama.cpp's IQ4_NL: closer together where weights are. Nothing in icc knows the format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from icc.compiler.backends.cpu.layouts.codes import CodeTiles, Reader
from icc.compiler.backends.cpu.layouts.registry import LAYOUTS as CPU_LAYOUTS
from icc.compiler.backends.cpu.layouts.tiles import (
    HEADER,
    TILE,
    headers,
    nibble_lines,
    of_headers,
    of_nibble_lines,
    split_scales,
    tiled,
)
from icc.compiler.backends.render import add_templates
from icc.compiler.backends.triton.layouts.codes import CodeGroups, Unpacking
from icc.compiler.backends.triton.layouts.registry import LAYOUTS as TRITON_LAYOUTS
from icc.compiler.program.layout import Arrays
from icc.compiler.weights.formats.base import Array, Parts
from icc.compiler.weights.formats.grouped import GroupFormat, per_group
from icc.compiler.weights.formats.registry import register_format
from torch import Tensor

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_TABLE = torch.tensor(LEVELS, dtype=torch.float32)
_BETWEEN = (_TABLE[1:] + _TABLE[:-1]) / 2


@dataclass(frozen=True)
class Nl4(GroupFormat):
    """Parts: codes uint8 [..., N, K] below 16; scales (fp16 values) [..., N, K / group]. w = LEVELS[code] * scale."""

    @property
    def name(self) -> str:
        return f"nl4g{self.group}"

    def arrays(self, shape: Sequence[int]) -> dict[str, Array]:
        return {
            "codes": Array(tuple(shape), torch.uint8, 4),
            "scales": Array(per_group(shape, self.group), torch.float16, 16),
        }

    def fit(self, groups: Tensor, clip: Tensor | None = None) -> Parts:
        peak = groups.abs().amax(-1) * (1.0 if clip is None else clip)
        return {"scales": (peak / 127).clamp(min=2.0**-24).to(torch.float16).to(torch.float32)}

    def levels(self, parts: Parts) -> tuple[Tensor, ...]:
        return (parts["scales"].to(torch.float32),)

    def code(self, values: Tensor, *levels: Tensor) -> Tensor:
        return torch.bucketize(values / levels[0], _BETWEEN).to(torch.float32)

    def value(self, codes: Tensor, *levels: Tensor) -> Tensor:
        return _TABLE[codes.to(torch.int64)] * levels[0]


@dataclass(frozen=True)
class Nl4Tiles(CodeTiles):
    """Tiles as for q4; every zero point is 128, which shifts the table's entries to be unsigned."""

    @property
    def label(self) -> str:
        return "table"

    @property
    def reader(self) -> Reader:
        return Reader("a product with a table", "nl4.cpp.jinja", ("low", "high"), "dot_u8")

    def tile_bytes(self, k: int) -> int:
        return k // self.group * (HEADER + self.group * TILE // 2)

    def pack_matrix(self, parts: Arrays) -> np.ndarray:
        halves, unit = split_scales(tiled(parts["scales"]))
        codes = tiled(parts["codes"])
        lines = nibble_lines(codes.reshape(*codes.shape[:2], -1, self.group))
        zeros = np.full(halves.shape, 128, np.uint8)
        return np.concatenate([headers(halves, unit, zeros), lines], axis=2).reshape(-1)

    def unpack_matrix(self, packed: np.ndarray, n: int, k: int) -> dict[str, np.ndarray]:
        tiles = packed.reshape(-1, k // self.group, self.tile_bytes(self.group))
        codes = of_nibble_lines(tiles[:, :, HEADER:]).reshape(-1, k)[:n]
        return {"codes": codes, "scales": of_headers(tiles, n)[0]}


@dataclass(frozen=True)
class Nl4Rows(CodeGroups):
    """Two codes per byte, row by row, and after all codes the scales as float32."""

    @property
    def macros(self) -> str:
        return "nl4.py.jinja"

    @property
    def unpacking(self) -> Unpacking:
        return Unpacking(self.format.name, self.group, 4, 4, 2.0, 2.0)

    def codes_nbytes(self, n: int, k: int) -> int:
        """The bytes of all codes: the offset of the scales."""
        return (n * k // 2 + 63) // 64 * 64

    def matrix_nbytes(self, n: int, k: int) -> int:
        return self.codes_nbytes(n, k) + (4 * n * (k // self.group) + 63) // 64 * 64

    def pack_matrix(self, parts: Arrays) -> np.ndarray:
        codes, scales = parts["codes"], np.ascontiguousarray(parts["scales"], np.float32)
        packed = np.zeros(self.matrix_nbytes(*codes.shape), np.uint8)
        packed[: codes.size // 2] = (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(-1)
        start = self.codes_nbytes(*codes.shape)
        packed[start : start + scales.nbytes] = scales.reshape(-1).view(np.uint8)
        return packed

    def unpack_matrix(self, packed: np.ndarray, n: int, k: int) -> dict[str, np.ndarray]:
        pairs = packed[: n * k // 2].reshape(n, -1)
        start = self.codes_nbytes(n, k)
        scales = packed[start : start + 4 * n * (k // self.group)].view(np.float32).reshape(n, -1)
        return {"codes": np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(n, k), "scales": scales}


def register() -> None:
    """Register the format, as an entry point of icc.formats does."""
    add_templates(Path(__file__).with_name("templates"))
    register_format("nl4", Nl4)
    CPU_LAYOUTS.register(Nl4, lambda form, role: Nl4Tiles("nl4", form))
    TRITON_LAYOUTS.register(Nl4, lambda form, role: Nl4Rows("nl4", form))
