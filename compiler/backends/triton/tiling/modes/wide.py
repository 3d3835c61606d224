"""Operands in float32, on the ordinary units."""

from __future__ import annotations

from ..choice import Config
from ..machine import Machine
from ..product import ProductFacts, ProductMode, few_tiling


class WideMode(ProductMode):
    """Values of any types are multiplied in float32."""

    name = "wide"
    item = 4
    wide = True
    runs_ahead = False
    decode_template = "decode_wide"

    def few_rows(self, p: ProductFacts) -> int:
        return 8

    def candidates(self, machine: Machine, p: ProductFacts) -> list[Config]:
        """Small tiles only, because such products are rare."""
        if p.few:
            return few_tiling(p)
        split = next((s for s in (8, 4, 2) if p.k >= 256 * s and p.rows <= 64 and not p.experts), 1)
        return [{"decode": 0, "m": 16, "n": 32, "k": 32, "warps": 4, "stages": 2, "splits": split}]

    def rate(self, machine: Machine, p: ProductFacts, c: Config, resident: int) -> float:
        return 0.02
