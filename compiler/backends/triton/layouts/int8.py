"""int8 rows with a scale each (weights/formats/channel.py): codes i8 [N, K], scales f32 [N], both padded to 64 bytes.

Products whose rows share one matrix multiply them with int8 rows of x on matrix units; other products unpack them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ....program.layout import Arrays
from ....weights.formats.channel import ZERO, ChannelInt8
from ...cpu.layouts.elements import round_up
from .codes import CodeGroups, Rows8, Unpacking

ALIGN = 64
STEP = 128  # values of K at a time


@dataclass(frozen=True)
class Int8Rows(CodeGroups):
    """Codes minus 128, so that they are signed."""

    format: ChannelInt8  # type: ignore[reportIncompatibleVariableOverride]  # frozen, so narrower is right

    @classmethod
    def of(cls, form: ChannelInt8) -> Int8Rows:
        """The layout of a format, named gi8."""
        return cls("gi8", form)

    @property
    def macros(self) -> str:
        return "triton/layouts/int8.py.jinja"

    @property
    def group(self) -> int:
        return STEP

    @property
    def unpacking(self) -> Unpacking:
        return Unpacking("gi8", STEP, 8, 0, 0.2, 0.2)

    def rows8(self, level: int) -> Rows8:
        return "int8"

    def misfit(self, n: int, k: int) -> str:
        return f"{n} x {k} codes of 8 bits need 64-bit addresses" if n * k >= 2**31 else ""

    def codes_nbytes(self, n: int, k: int) -> int:
        """Bytes of the codes of one matrix: the offset of its scales."""
        return round_up(n * k, ALIGN)

    def matrix_nbytes(self, n: int, k: int) -> int:
        return self.codes_nbytes(n, k) + round_up(4 * n, ALIGN)

    def pack_matrix(self, parts: Arrays) -> np.ndarray:
        codes, scales = parts["codes"], np.ascontiguousarray(parts["scales"], np.float32)
        packed = np.zeros(self.matrix_nbytes(*codes.shape), np.uint8)
        packed[: codes.size] = codes.reshape(-1) ^ np.uint8(ZERO)
        start = self.codes_nbytes(*codes.shape)
        packed[start : start + scales.nbytes] = scales.reshape(-1).view(np.uint8)
        return packed

    def unpack_matrix(self, packed: np.ndarray, n: int, k: int) -> dict[str, np.ndarray]:
        start = self.codes_nbytes(n, k)
        scales = packed[start : start + 4 * n].view(np.float32).reshape(n, 1)
        codes = packed[: n * k].reshape(n, k) ^ np.uint8(ZERO)
        return {"codes": codes, "scales": scales, "zeros": np.full((n, 1), ZERO, np.uint8)}
