"""Packed weight formats of the Triton backend: names, sizes and where the sections of a matrix begin.

Plain `f32 bf16 f16 i32`: row-major, as on the CPU. `gq4 gq8`: one layout for every number of rows, two sections per
matrix [N, K], each padded to 64 bytes:

    codes u16 [K/g, N, g*bits/16]   of the g codes of a row's group, element j holds codes j, j + span, j + 2 span ...
                                    from its low bits up; span = g*bits/16
    words u32 [K/g, N]              scale as float32 rounded to its upper 24 bits, zero point in the low 8

so that w = (code - zero) * scale. Group-major: a tile of rows of one group is one contiguous piece of memory, and needs
one aligned load per 32 codes and one word per row. Fields a span apart: shifting and masking a register of two elements
gives two neighbouring k in the two halves of a register, which is how matrix instructions take 16-bit operands.
Experts `[E, N, K]` follow one another.
"""

from __future__ import annotations

from math import prod

from ...cpu.layouts.formats import PLAIN, round_up
from ...cpu.layouts.formats import packed_nbytes as plain_nbytes

QUANT_BITS = {"gq4": 4, "gq8": 8}
ALIGN = 64


def codes_nbytes(n: int, k: int, bits: int) -> int:
    """Bytes of the codes of one matrix: where its words begin."""
    return round_up(n * k * bits // 8, ALIGN)


def matrix_nbytes(n: int, k: int, bits: int, group: int) -> int:
    """Bytes of one matrix: how far experts are apart."""
    return codes_nbytes(n, k, bits) + round_up(4 * n * (k // group), ALIGN)


def packed_nbytes(fmt: str, shape: tuple[int, ...] | list[int], group: int = 0) -> int:
    """Bytes that a weight of logical `shape` takes in format `fmt`, a multiple of 64."""
    if fmt in PLAIN:
        return plain_nbytes(fmt, shape)
    *experts, n, k = shape
    return prod(experts) * matrix_nbytes(n, k, QUANT_BITS[fmt], group)
