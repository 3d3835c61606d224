"""Rows and weights of 8 bits on matrix units, with a scale per row: int8 and 8-bit floats."""

from __future__ import annotations

from typing import ClassVar

from ..choice import Config
from ..machine import Machine, sums_of_steps
from ..product import ProductFacts, ProductMode, decode_tilings, row_heights


class EightMode(ProductMode):
    """What both have in common."""

    item = 1
    eight = True
    scaled_rows = True
    large_share: ClassVar[float] = 0.75
    decode_instructions: ClassVar[float] = 0.6
    decode_template = "decode_eight"
    tile_template = "w8a8"

    def candidates(self, machine: Machine, p: ProductFacts) -> list[Config]:
        return [*(decode_tilings(machine, p) if p.rows <= 16 else []), *self._tiles(machine, p)]

    def _tiles(self, machine: Machine, p: ProductFacts) -> list[Config]:
        """Products of 8 bits on matrix units, which take at least 16 rows and 32 of K.

        Sums of int8 are whole numbers, and stay so: K is not split.
        """
        assert p.codes is not None
        floats = self.floats
        m = row_heights(p)
        m += ([64] if p.rows >= 128 and not p.experts else []) + ([256] if floats and p.rows >= 256 else [])
        steps = -(-p.k // 128)
        splits = [1, *(s for s in (2, 4, 8) if floats and steps >= 4 * s and p.rows <= 1024 and not p.experts)]
        sums = 64 if not floats or machine.level < 90 else 128
        return [
            {"decode": 0, "m": rows, "n": n, "k": k, "warps": warps, "stages": depth, "splits": split}
            for rows in m
            for n, warps in ((32, 4), (64, 4), (128, 4), (128, 8)) if n >= 64 or not floats or machine.level < 90
            for k in ((p.codes.group,) if p.blocks else (64, 128))
            for depth in ((2,) if machine.hip else (3, 4))
            for split in splits
            if rows * n * (p.parts + self.beside(machine, p)) <= sums * machine.target.warp_size * warps
        ]  # fmt: skip


class Int8Mode(EightMode):
    """Whole numbers, whose sums are exact."""

    name = "int8"
    exact = True
    codes_type = "*i8"


class Fp8Mode(EightMode):
    """8-bit floats, whose sums matrix units may keep with fewer bits than float32."""

    name = "fp8"
    floats = True
    row_pointer = ".to(tl.pointer_type(tl.float8e4nv))"

    def beside(self, machine: Machine, p: ProductFacts) -> bool:
        return sums_of_steps(machine.level) or p.blocks
