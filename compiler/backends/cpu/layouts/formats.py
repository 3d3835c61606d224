"""Packed weight formats of the CPU backend: names and sizes, shared by packing and code generation.

Plain `f32 bf16 f16`: row-major. `tile_f32 tile_bf16 tile_f16`: tiles of 16 output rows, `tile[k][16]`. `q4 q8`: tiles
of 16 rows; per group of k a 64-byte header (16 f16 scales, 16 u8 zero points, one f32 that multiplies the scales) and
64-byte lines of codes, a line holding 16 rows x 8 k (q4: k 0..3 in the low nibbles, k 4..7 in the high ones) or x 4 k
(q8), four consecutive k of one row in four consecutive bytes. Experts `[E, N, K]` follow one another.

`q8s` is q8 in two planes, for products that can do with half of the bits at first (screen.h): all tiles with the high
nibbles, as q4 has them, then all tiles with the low ones, without headers. Its headers hold two more f32: at 52 the
largest scale of the tile in this group, at 56 the tile's largest lean (see `pack.leans`).
"""

from __future__ import annotations

from math import prod

TILE = 16
HEADER = 64

PLAIN = {"f32": 4, "bf16": 2, "f16": 2, "i32": 4}
TILED = {"tile_f32": 4, "tile_bf16": 2, "tile_f16": 2}
QUANT_BITS = {"q4": 4, "q8": 8, "q8s": 8}
SPLIT = "q8s"
C_TYPES = {"f32": "float", "bf16": "Bf16", "f16": "Half", "i32": "int32_t", "bool": "int32_t", "i8": "int8_t"}


def round_up(value: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `value`."""
    return (value + unit - 1) // unit * unit


def quant_tile_bytes(k: int, bits: int, group: int) -> int:
    """Bytes of one q4 or q8 tile of 16 rows."""
    return k // group * (HEADER + group * TILE * bits // 8)


def high_tile_bytes(k: int, group: int) -> int:
    """Bytes of one q8s tile in the plane of high nibbles: what a q4 tile takes."""
    return quant_tile_bytes(k, 4, group)


def low_tile_bytes(k: int) -> int:
    """Bytes of one q8s tile in the plane of low nibbles."""
    return k * TILE // 2


def packed_nbytes(fmt: str, shape: tuple[int, ...] | list[int], group: int = 0) -> int:
    """Bytes that a weight of logical `shape` takes in format `fmt`, a multiple of 64."""
    if fmt in PLAIN:
        return round_up(prod(shape) * PLAIN[fmt], 64)
    *experts, n, k = shape
    tiles = prod(experts) * (round_up(n, TILE) // TILE)
    if fmt in TILED:
        return round_up(tiles * TILE * k * TILED[fmt], 64)
    return tiles * quant_tile_bytes(k, QUANT_BITS[fmt], group)
