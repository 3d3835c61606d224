"""Where products of codes are cheaper by AMX's tiles than by vectors: modelled cycles of a core, by rows.

Both take apart codes once per block of rows and scale sums once per group, by vectors, of which two start in a cycle.
Products of bytes are 128 in a cycle by vectors and 1,024 by tiles, for which codes of few bits and integer sums pass
through memory. Cycles of the tile instructions are those of Sapphire Rapids in Intel's Optimization Reference Manual
(its table of AMX's throughput and latency). Nobody has timed these kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..isa import Block
from ..layouts.block_reader import BlockReader
from ..layouts.codes import Reader

TILE_ROWS = 16
LOAD, MULTIPLY, STORE = 8, 16, 16  # cycles between two of a kind
LATENCY = 45 + 52  # from a load to its sums: once per group, as its sums are wanted before the next one's
SCALING = 4  # vector instructions per row and group: to float, zero points, scale, sum


def tile_depth(group: int) -> int:
    """k of a tile where so many have a scale, as panels_amx.h has it."""
    return next(depth for depth in (64, 32, 16) if group % depth == 0)


def vector_cycles(reader: Reader, rows: int, group: int) -> float:
    """What a block of rows takes for 16 output rows and a group along K, with vpdpbusd."""
    return (rows * group / 4 + _taking_apart(reader, group) + SCALING * rows) / 2


def matrix_cycles(reader: Reader, block: Block, group: int) -> float:
    """What it takes by tiles: the busiest unit's cycles, and the wait for the sums, which the block's tiles share."""
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
    """The blocks of a product: those of vectors with at most `few` rows, which wait for weights whatever multiplies
    them, and those that cost less than the first of `matrices`; then these, if that pays for as many rows as it has."""
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
    """Vector instructions that make bytes of the lines of a group."""
    each = 2.0 - 1 / len(reader.pieces) if len(reader.pieces) > 1 else 0.0  # a mask, and but for the first a shift
    if isinstance(reader, BlockReader):
        assert reader.form is not None
        each += 3 * bool(reader.fine) + bool(reader.form.table)
    return each * group / 4
