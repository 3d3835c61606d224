"""8-bit floats (weights/formats/float8.py) row by row, followed by their float32 scales, block by block.

Matrix instructions multiply them with rows of e4m3 if a GPU has such instructions, else as bf16 or f16, exactly.
Sections are padded to 64 bytes; experts [E, N, K] follow one another. NaN is 480 in products of 16 bits: readers of
files refuse it, and no encoder makes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ....program.layout import Arrays
from ....targets import FLOAT8_LEVEL
from ....weights.formats.float8 import Float8
from ...cpu.layouts.elements import round_up
from .codes import CodeGroups, Rows8, Unpacking

ALIGN = 64
STEP = 128  # most values of K at a time


@dataclass(frozen=True)
class Float8Rows(CodeGroups):
    """Codes [N, K], then scales [blocks of K, N], so that the scales of a tile are contiguous."""

    format: Float8  # type: ignore[reportIncompatibleVariableOverride]  # frozen, so narrower is right

    @classmethod
    def of(cls, form: Float8) -> Float8Rows:
        """The row layout of a format, under the format's name."""
        return cls(f"g{form.name}", form)

    @property
    def macros(self) -> str:
        return "triton/layouts/float8.py.jinja"

    @property
    def group(self) -> int:
        """Values that a kernel reads at a time: a power of two, within one block."""
        size = self.format.group
        return min(size & -size, STEP) if size else STEP

    @property
    def fields(self) -> int:
        return 1

    @property
    def unpacking(self) -> Unpacking:
        scale_bytes = 4 if self.format.group else 0
        return Unpacking(self.name, self.group, 8, scale_bytes, 2.8, 3.2, 10, 20, whole=not self.format.group)

    def rows8(self, level: int) -> Rows8:
        """As `CodeGroups.rows8`; instructions need at least 32 values of one block."""
        return "fp8" if level >= FLOAT8_LEVEL and self.group >= 32 and not self.format.alone else ""

    def misfit(self, n: int, k: int) -> str:
        return ""

    def codes_nbytes(self, n: int, k: int) -> int:
        """Bytes of the codes of one matrix: the offset of its scales."""
        return round_up(n * k, ALIGN)

    def matrix_nbytes(self, n: int, k: int) -> int:
        return self.codes_nbytes(n, k) + round_up(4 * n * self.format.blocks(k), ALIGN)

    def pack_matrix(self, parts: Arrays) -> np.ndarray:
        codes, scales = parts["codes"], np.ascontiguousarray(parts["scales"], np.float32)
        packed = np.zeros(self.matrix_nbytes(*codes.shape), np.uint8)
        packed[: codes.size] = codes.reshape(-1)
        start = self.codes_nbytes(*codes.shape)
        packed[start : start + scales.nbytes] = np.ascontiguousarray(scales.T).reshape(-1).view(np.uint8)
        return packed

    def unpack_matrix(self, packed: np.ndarray, n: int, k: int) -> dict[str, np.ndarray]:
        start, blocks = self.codes_nbytes(n, k), self.format.blocks(k)
        scales = packed[start : start + 4 * n * blocks].view(np.float32).reshape(blocks, n).T
        return {"codes": packed[: n * k].reshape(n, k), "scales": scales}
