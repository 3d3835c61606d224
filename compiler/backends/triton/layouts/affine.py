"""`gq4` and `gq8`: one layout of integer codes for every number of rows, two sections per matrix [N, K], each padded to
64 bytes:

    codes u16 [K/g, N, g*bits/16]   of the g codes of a row's group, element j holds codes j, j + span, j + 2 span ...
                                    from its low bits up; span = g*bits/16
    words u32 [K/g, N]              scale as float32 rounded to its upper 24 bits, zero point in the low 8

so that w = (code - zero) * scale. Group-major: a tile of rows of one group is contiguous in memory, and needs one
aligned load per 32 codes and one word per row. Fields are a span apart: shifting and masking a register of two elements
gives two neighbouring k in the two halves of a register, the form in which matrix instructions read 16-bit operands.
Experts `[E, N, K]` follow one another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ....program.layout import Arrays
from ....targets import FLOAT8_LEVEL
from ....weights.formats.affine import GroupAffine
from ...cpu.layouts.elements import round_up
from .codes import CodeGroups, Rows8, Unpacking

ALIGN = 64


def codes_nbytes(n: int, k: int, bits: int) -> int:
    """Bytes of the codes of one matrix: the offset of its words."""
    return round_up(n * k * bits // 8, ALIGN)


def matrix_nbytes(n: int, k: int, bits: int, group: int) -> int:
    """Bytes of one matrix: the distance of experts."""
    return codes_nbytes(n, k, bits) + round_up(4 * n * (k // group), ALIGN)


def _words(scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """Scale f32 and zero point u8 in one u32: the scale keeps 16 significant bits, rounded to nearest even."""
    bits = np.ascontiguousarray(scales, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7F) + ((bits >> np.uint32(8)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFFFF00)) | zeros.astype(np.uint32)


def stored_scales(scales: np.ndarray) -> np.ndarray:
    """The scales that kernels multiply by in place of `scales`, of any shape; the relative error is at most 2**-16."""
    return _words(scales, np.zeros(scales.shape, np.uint8)).view(np.float32)


_COSTS = {  # instructions per value in kernels for few rows and for many, and their registers, by bits
    4: (1.1, 1.6, 0, 0),
    8: (2.2, 4.0, 35, 40),
}


@dataclass(frozen=True)
class AffineGroups(CodeGroups):
    """Codes and words, group-major."""

    format: GroupAffine  # type: ignore[reportIncompatibleVariableOverride]  # frozen, so narrower is right

    @classmethod
    def of(cls, form: GroupAffine) -> AffineGroups:
        """The layout of a format: gq4 or gq8."""
        return cls(f"gq{form.bits}", form)

    @property
    def macros(self) -> str:
        return "triton/layouts/affine.py.jinja"

    @property
    def unpacking(self) -> Unpacking:
        bits, group = self.format.bits, self.format.group
        name = f"gq{bits}{'a8' * self.format.rows8}g{group}"
        return Unpacking(name, group, bits, 4, *_COSTS[bits], doubled=bits == 8, whole=True)

    @property
    def fields(self) -> int:
        return 16 // self.format.bits

    def many_rows8(self, level: int) -> Rows8:
        """As `CodeGroups.many_rows8`; 8-bit instructions need at least 32 values of one group, and HIP's are not
        used."""
        if not self.format.rows8 or self.format.bits != 4 or self.group < 32 or not level:
            return ""
        return "fp8" if level >= FLOAT8_LEVEL else "int8"

    def codes_nbytes(self, n: int, k: int) -> int:
        """Bytes of the codes of one matrix: the offset of its words."""
        return codes_nbytes(n, k, self.format.bits)

    def matrix_nbytes(self, n: int, k: int) -> int:
        return matrix_nbytes(n, k, self.format.bits, self.format.group)

    def pack_matrix(self, parts: Arrays) -> np.ndarray:
        bits, group, codes = self.format.bits, self.format.group, parts["codes"]
        n, k = codes.shape
        if reason := self.misfit(n, k):
            raise ValueError(reason)
        fields, groups = 16 // bits, k // group
        spans = codes.reshape(n, groups, fields, group // fields)
        elements = np.zeros((groups, n, group // fields), np.uint16)
        for i in range(fields):
            elements |= spans[:, :, i].transpose(1, 0, 2).astype(np.uint16) << np.uint16(bits * i)
        packed = np.zeros(self.matrix_nbytes(n, k), np.uint8)
        packed[: elements.nbytes] = elements.reshape(-1).view(np.uint8)
        words = np.ascontiguousarray(_words(parts["scales"], parts["zeros"]).T)
        start = codes_nbytes(n, k, bits)
        packed[start : start + words.nbytes] = words.reshape(-1).view(np.uint8)
        return packed

    def unpack_matrix(self, packed: np.ndarray, n: int, k: int) -> dict[str, np.ndarray]:
        bits, groups = self.format.bits, k // self.format.group
        fields = 16 // bits
        elements = packed[: n * k * bits // 8].view(np.uint16).reshape(groups, n, -1)
        spans = [(elements >> np.uint16(bits * i)) & np.uint16(2**bits - 1) for i in range(fields)]
        codes = np.stack(spans, axis=2).transpose(1, 0, 2, 3).reshape(n, k).astype(np.uint8)
        start = codes_nbytes(n, k, bits)
        words = packed[start : start + 4 * n * groups].view(np.uint32).reshape(groups, n).T
        scales = (words & np.uint32(0xFFFFFF00)).copy().view(np.float32)
        return {"codes": codes, "scales": scales, "zeros": (words & np.uint32(255)).astype(np.uint8)}
