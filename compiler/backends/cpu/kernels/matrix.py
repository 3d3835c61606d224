"""From how many rows on products of int8 rows take instructions whose operands are matrices of bytes (arm64's smmla).

What is counted are the instructions for eight k of a tile of 16 rows of W, beside those that both ways need: lines are
loaded and codes taken out of them alike. tests/cpu/test_arm64.py holds both counts against what clang makes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..isa import Block

TILE_REGISTERS = 4  # of 16 bytes: four k of a tile


def lane_count(rows: int) -> int:
    """By dot products of lanes: for four k of a row a product per register, and a load for four times four k, of which
    products take one."""
    return 2 * rows * TILE_REGISTERS + -(-2 * rows // 4)


def matrix_count(rows: int) -> int:
    """By matrices: the halves of eight k are put together and stored once (st2, which counts as two zips and a store),
    then read for every block of x, at most 12 rows of it, with half of the tile at a time. A load fills two registers,
    a loop has three instructions of its own."""
    once = 2 * TILE_REGISTERS + TILE_REGISTERS
    blocks = -(-rows // 12)
    passes = 2 * blocks
    loads = blocks * TILE_REGISTERS + -(-rows // 2)
    return once + loads + rows * TILE_REGISTERS + 3 * passes


def with_matrices(lanes: tuple[Block, ...], rows: Sequence[int]) -> tuple[Block, ...]:
    """Blocks of lanes, and from where they take fewer instructions those of matrices with these numbers of rows."""
    better = tuple(Block(count, 1, matrix=True) for count in rows if matrix_count(count) < lane_count(count))
    least = min((block.rows for block in better), default=None)
    return lanes if least is None else (*(block for block in lanes if block.rows < least), *better)
