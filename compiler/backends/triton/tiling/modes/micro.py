"""MXFP4 weights and MXFP8 rows, which matrix units of sm_100 scale themselves by a power of two per 32 values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from .....program.coded_rows import micro_words
from ..choice import Config
from ..machine import INLINE, Machine
from ..product import ProductFacts, ProductMode, Work, few_tiling, row_heights

SCALED_STEP = 0.22e-6  # seconds of a step of MXFP4 besides its product: copying scales to the matrix unit


class MicroMode(ProductMode):
    """Rows of MXFP8; a single row is multiplied with W in float32."""

    name = "mxfp8"
    item = 1
    eight = True
    powers = True
    runs_ahead = False
    large_share: ClassVar[float] = 0.75
    decode_instructions: ClassVar[float] = 0.6
    decode_template = "decode_wide"
    tile_template = "scaled"
    rows_template = "rows_micro"
    scales_type = "*i32"
    row_pointer = ".to(tl.pointer_type(tl.float8e4nv))"

    def few_rows(self, p: ProductFacts) -> int:
        return 8 if p.experts else 0 if p.coded else INLINE

    def inline(self, decode: bool, rows: int) -> bool:
        return decode

    def scale_words(self, k: int) -> int:
        return micro_words(k)

    def shared_row(self, p: ProductFacts, k: int) -> int:
        return k * self.item

    def candidates(self, machine: Machine, p: ProductFacts) -> list[Config]:
        return [*(few_tiling(p) if p.few else []), *self._tiles(p)]

    def bounds(self, bounds: Sequence[float], work: Work, c: Config) -> list[float]:
        return [*bounds, work.waves * work.steps * (SCALED_STEP + work.matrix_seconds)]

    def instructions(self, machine: Machine, p: ProductFacts, c: Config) -> float:
        if c["decode"]:
            return super().instructions(machine, p, c)
        copies = c["m"] * c["k"] / 16 + p.parts * c["n"] * c["k"] / 16  # of 16 and 8 bytes
        return 3.5 * copies / 32 + c["warps"] * (60 + 45 * p.parts)

    def _tiles(self, p: ProductFacts) -> list[Config]:
        """Tilings of MXFP4 and MXFP8, whose instructions take 128 columns."""
        m = row_heights(p)
        m += ([64] if p.rows >= 128 else []) + ([256] if p.rows >= 256 else []) if not p.experts else []
        return [
            {"decode": 0, "m": rows, "n": 128, "k": k, "warps": warps, "stages": depth, "splits": split}
            for rows in m
            for warps in (4, 8) if rows * p.parts <= 32 * warps
            for k in (128, 256) if k <= max(p.k, 128)
            for depth in (3, 4)
            for split in (1, *(s for s in (2, 4, 8) if -(-p.k // k) >= 4 * s and p.rows <= 1024 and not p.experts))
        ]  # fmt: skip
