"""Decides whether products of codes are cheaper with AMX's tiles than with vectors, by modelled cycles of a core.

Both unpack codes once per block of rows and scale sums once per group, with vector instructions, two of which start per
cycle. Vectors make 128 products of bytes per cycle, tiles 1,024, but tiles pass unpacked codes and integer sums through
memory. Cycles of the tile instructions are those of Sapphire Rapids in Intel's Optimization Reference Manual (its table
of AMX's throughput and latency). Nobody has timed these kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..isa import Block
from ..layouts.block_reader import BlockReader
from ..layouts.codes import Reader

TILE_ROWS = 16
LOAD, MULTIPLY, STORE = 8, 16, 16  # cycles between two instructions of one kind
LATENCY = 45 + 52  # from a load to its sums: once per group, as its sums are wanted before the next one's
SCALING = 4  # vector instructions per row and group: to float, zero points, scale, sum


def tile_depth(group: int) -> int:
    """Values along K of a tile if `group` of them share a scale; panels_amx.h computes the same."""
    return next(depth for depth in (64, 32, 16) if group % depth == 0)


def vector_cycles(reader: Reader, rows: int, group: int) -> float:
    """Cycles that a block of rows takes for 16 output rows and a group along K, with vpdpbusd."""
    return (rows * group / 4 + _taking_apart(reader, group) + SCALING * rows) / 2


def matrix_cycles(reader: Reader, block: Block, group: int) -> float:
    """Cycles that it takes with tiles: those of the busiest unit, and the wait for the sums, which the block's tiles
    share."""
    bands, steps = block.rows // TILE_ROWS, group // tile_depth(group)
    through_memory = 0 if reader.pieces == ("raw",) else group / 4
    units = (
        MULTIPLY * bands * steps,
        LOAD * (1 + bands / block.tiles) * steps + block.rows,
        STORE * bands + block.rows + through_memory,
        (_taking_apart(reader, group) + SCALING * block.rows) / 2,
    )
    return max(units) + LATENCY / block.tiles


def choose(
    reader: Reader, group: int, vectors: Sequence[Block], matrices: Sequence[Block], few: int
) -> tuple[Block, ...]:
    """The blocks of a product: vector blocks of at most `few` rows, which wait for weights in any case, and vector
    blocks that cost less than the first of `matrices`; then `matrices`, if the first pays off at its number of rows."""
    first = matrices[0]
    tiles, left, by_vectors = matrix_cycles(reader, first, group), first.rows, 0.0
    while left > 0:
        rows = next((block.rows for block in vectors if block.rows >= left), vectors[-1].rows)
        by_vectors, left = by_vectors + vector_cycles(reader, rows, group), left - rows
    if by_vectors <= tiles:
        return tuple(vectors)
    kept = (b for b in vectors if b.rows <= few or vector_cycles(reader, b.rows, group) < tiles)
    return (*kept, *matrices)


def _taking_apart(reader: Reader, group: int) -> float:
    """Vector instructions that unpack the lines of a group to bytes."""
    each = 2.0 - 1 / len(reader.pieces) if len(reader.pieces) > 1 else 0.0  # a mask, and a shift for all but the first
    if isinstance(reader, BlockReader):
        assert reader.form is not None
        each += 3 * bool(reader.fine) + bool(reader.form.table)
    return each * group / 4
