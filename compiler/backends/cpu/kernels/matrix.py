"""The number of rows from which products of int8 rows use instructions on matrices of bytes (arm64's smmla).

The counts are instructions for eight k of a tile of 16 rows of W, without those that both ways need to load lines and
unpack codes. tests/cpu/test_arm64.py compares both counts with clang's output.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..isa import Block

TILE_REGISTERS = 4  # of 16 bytes: four k of a tile


def lane_count(rows: int) -> int:
    """Instructions with dot products of lanes: per row and four k one product per register, and one load per 16 k, of
    which each product takes four."""
    return 2 * rows * TILE_REGISTERS + -(-2 * rows // 4)


def matrix_count(rows: int) -> int:
    """Instructions with matrices: the halves of eight k are interleaved and stored once (st2, which counts as two zips
    and a store), then read for every block of at most 12 rows of x, half of the tile at a time. A load fills two
    registers, and a loop has three instructions of its own."""
    once = 2 * TILE_REGISTERS + TILE_REGISTERS
    blocks = -(-rows // 12)
    passes = 2 * blocks
    loads = blocks * TILE_REGISTERS + -(-rows // 2)
    return once + loads + rows * TILE_REGISTERS + 3 * passes


def with_matrices(lanes: tuple[Block, ...], rows: Sequence[int]) -> tuple[Block, ...]:
    """The blocks of `lanes`; from the first number in `rows` at which matrices need fewer instructions, matrix
    blocks."""
    better = tuple(Block(count, 1, matrix=True) for count in rows if matrix_count(count) < lane_count(count))
    least = min((block.rows for block in better), default=None)
    return lanes if least is None else (*(block for block in lanes if block.rows < least), *better)
