"""Operands of 16 bits on matrix units: dense weights, codes unpacked in registers, and values converted from blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ...layouts.codes import VALUE_STEP
from ..choice import Config
from ..machine import Machine
from ..product import ProductFacts, ProductMode, Work, decode_tilings, few_tiling, row_heights

ALONE = 1.35e-9  # seconds between two instructions of a warp that converts blocks to values, each waiting for others
NARROW_ROWS = 512  # rows that the kernel for few rows may process one by one instead of sorted by matrix
CROWDED = 1.5  # factor by which its instructions take longer than others, over all warps of a multiprocessor


class DenseMode(ProductMode):
    """Dense W, read directly; also the base of tiles of codes."""

    name = "dense"
    dense = True

    def candidates(self, machine: Machine, p: ProductFacts) -> list[Config]:
        few = p.rows <= (NARROW_ROWS if p.narrow else 16)
        found = [*(decode_tilings(machine, p) if few else []), *self._tiles(machine, p)]
        return [config for config in found if config["decode"] or self._keeps_registers(machine, p, config)]

    def _tiles(self, machine: Machine, p: ProductFacts) -> list[Config]:
        m = row_heights(p)
        m += [64] if p.rows >= 128 else []
        m += [32] if p.rows == 64 and 0 < machine.level < 90 and p.parts > 1 else []
        m += [256] if p.rows >= 256 else []
        steps = -(-p.k // (p.codes.group if p.codes else 64))
        splits = [1, *(s for s in (2, 4, 8) if steps >= 4 * s and p.rows <= 1024 and not p.experts)]
        shapes = [(64, 4), (64, 8), (128, 4), (128, 8)]
        if 0 < machine.level < 90 and p.codes:  # a warp computes 16 columns: with fewer, several would compute the same
            shapes = [(32, 4) if p.doubled else (32, 2), (64, 2), *shapes]
        elif machine.level < 90:
            shapes = [(32, 2), (32, 4), *shapes] if machine.target.rdna else [(32, 4), *shapes]
        elif p.codes and machine.level >= 100:  # the newest read their left operand from tensor memory, or run per warp
            shapes = [(32, 2), (64, 2), *([(128, 4)] if p.codes.whole else [])]
        elif p.codes:  # with fewer than 16 columns per warp, several would compute the same
            shapes = [(64, 4), (128, 8)]
        return [
            {"decode": 0, "m": rows, "n": n, "k": k, "warps": warps, "stages": depth, "splits": split}
            for rows in m
            for n, warps in shapes
            for k in ((p.codes.group,) if p.codes else (64,))
            for depth in ((2,) if machine.hip else (3, 4, 5))
            for split in splits
            if self._apart(machine, p, rows, n, warps)
        ]  # fmt: skip

    def _apart(self, machine: Machine, p: ProductFacts, rows: int, n: int, warps: int) -> bool:
        """Whether instructions of single warps on codes compute nothing twice, and x is copied 16 bytes at a time; for
        codes of 4 bits each of x's four pieces is copied by itself. Codes of two fields are exempt: no other tiles fit
        registers."""
        if machine.target.rdna:
            return rows * n >= 256 * warps
        if p.codes is None or p.doubled or not 0 < machine.level < 90:
            return True
        return (n >= 16 * warps or rows >= 16 * warps) and (p.codes.bits > 4 or rows >= 8 * warps)

    def _keeps_registers(self, machine: Machine, p: ProductFacts, c: Config) -> bool:
        """Whether a tile fits into registers; found by compiling all of them for sm_80, sm_90, sm_100 and gfx942."""
        sums = c["m"] * c["n"] // (machine.target.warp_size * c["warps"])
        old = machine.level < 90
        if not p.codes:
            crowded = old and (sums > 64 or (p.parts > 1 and sums > 32 and (c["warps"] < 8 or c["m"] > 128)))
            whole = sums * (p.parts + p.extras) <= 128 and not crowded
            halves = not old and not p.experts and sums * (2 * p.parts + p.extras) <= 384  # see ProductSource.halves
            return whole or (sums * p.parts <= 128 and halves)
        if self.whole(machine, p, c):
            room = c["warps"] >= 8 and not p.doubled
            if machine.level >= 100:  # tensor memory holds 512 columns: the sums, and a step of each part of W
                room = p.parts == 1 and not p.doubled
                return sums * p.parts <= (256 if room else 128)
            return sums * p.parts <= (128 if room else 64)
        if machine.hip and p.doubled and c["n"] > 64:
            return False
        limit = 64 if not p.doubled or (p.parts == 1 and not old) else 32
        if machine.target.rdna:
            limit = min(limit, 256 // machine.target.fragment_registers)
        if c["n"] > 16 * c["warps"]:  # a warp unpacks more than 16 columns at once
            sums *= 2
        most = 64 if c["n"] < 64 else 32 if p.doubled and p.parts > 1 and old else 128
        crowded = old and p.parts > 1 and (c["n"] > 64 or (c["m"] == 64 and (c["n"] == 64 or p.codes.bits == 8)))
        return sums * p.parts <= limit and c["m"] <= most and not crowded


class CodesMode(DenseMode):
    """Codes are converted to operands in the registers that matrix instructions read."""

    name = "codes"
    dense = False
    codes_operands = True
    large_share: ClassVar[float] = 0.6
    decode_template = "decode_codes"


class BlocksMode(ProductMode):
    """Blocks are converted to values step by step; few rows are multiplied with them in float32."""

    name = "blocks"
    value_operands = True
    large_share: ClassVar[float] = 0.6
    decode_template = "decode_wide"

    def few_rows(self, p: ProductFacts) -> int:
        return 8

    def candidates(self, machine: Machine, p: ProductFacts) -> list[Config]:
        return [*(few_tiling(p) if p.rows <= 8 else []), *self._tiles(machine, p)]

    def bounds(self, bounds: Sequence[float], work: Work, c: Config) -> list[float]:
        memory, cache, matrix, issue, *others = bounds
        alone = work.waves * work.steps * work.instructions / c["warps"] * ALONE
        return [memory, cache, matrix, issue * CROWDED, *others, alone]

    def _tiles(self, machine: Machine, p: ProductFacts) -> list[Config]:
        """Tilings of values of blocks on matrix units. None has 32 columns for four NVIDIA warps, which would convert
        and multiply all values twice; on sm_100 two warps are used, because more wait for each other at 8 barriers a
        step."""
        assert p.codes is not None
        m = row_heights(p)
        m += [64] if p.rows >= 128 else []
        k, old = max(VALUE_STEP, p.codes.group), 0 < machine.level < 90
        shapes = [(32, 2)] if machine.level >= 100 else [(64, 4), (128, 8)]
        if machine.hip and p.rows < 64:
            shapes = [(32, 4), *shapes]
        splits = [1, *(s for s in (2, 4, 8) if -(-p.k // k) >= 4 * s and p.rows <= 256 and not p.experts)]
        return [
            {"decode": 0, "m": rows, "n": n, "k": k, "warps": warps, "stages": depth, "splits": split}
            for rows in m
            for n, warps in shapes
            for depth in ((2,) if machine.hip else (3, 4))
            for split in splits
            if rows * n * p.parts <= (32 if old or warps == 2 else 64) * machine.target.warp_size * warps
        ]  # fmt: skip
