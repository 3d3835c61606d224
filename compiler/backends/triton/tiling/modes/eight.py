"""Rows and weights of 8 bits on matrix units, with a scale per row: int8 and 8-bit floats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ..choice import Config
from ..estimate import ISSUE_PER_SM
from ..machine import Machine, sums_of_steps
from ..product import ProductFacts, ProductMode, Work, decode_tilings, row_heights

MOST_SUMS = 128  # sums of a thread, those of a step included; with more, values spill
SERIAL = 0.8  # share of the time of a step's two parts if a program is alone on a multiprocessor
MANY = 128  # rows from which on codes of 4 bits may be multiplied with rows of 8 bits


class EightMode(ProductMode):
    """The base of modes with rows of 8 bits."""

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
        """Tilings of 8-bit products on matrix units, which need at least 16 rows and 32 values of K.

        Sums of int8 stay integers: K is not split.
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
    """int8 operands, whose sums are exact."""

    name = "int8"
    coding = "int8"
    exact = True
    codes_type = "*i8"


class Fp8Mode(EightMode):
    """8-bit floats, whose sums matrix units may keep with fewer bits than float32."""

    name = "fp8"
    coding = "fp8"
    floats = True
    row_pointer = ".to(tl.pointer_type(tl.float8e4nv))"

    def beside(self, machine: Machine, p: ProductFacts) -> bool:
        return sums_of_steps(machine.level) or p.blocks


class GroupsMode(ProductMode):
    """Codes of 4 bits minus their zero points, exact in 8 bits; a group's sum is multiplied by its scale in float32
    (W4A8).

    code_instructions: instructions per value of W that make it an operand; sum_instructions: per sum of a step.
    """

    apart = True
    code_instructions: ClassVar[float]
    sum_instructions: ClassVar[float]

    def candidates(self, machine: Machine, p: ProductFacts) -> list[Config]:
        """Tilings of many rows; few rows have another mode. None on sm_100, whose matrix units read no registers:
        operands made in registers would go through shared memory."""
        assert p.codes is not None
        if (p.rows < MANY and not p.experts) or machine.level >= 100:
            return []
        heights = row_heights(p) + ([64] if not p.experts else []) + ([256] if p.rows >= 256 and not p.experts else [])
        steps = -(-p.k // p.codes.group)
        splits = [1, *(s for s in (2, 4, 8) if steps >= 4 * s and p.rows <= 1024 and not p.experts)]
        return [
            {"decode": 0, "m": rows, "n": n, "k": p.codes.group, "warps": warps, "stages": depth, "splits": split}
            for rows in heights
            for n, warps in ((64, 4), (128, 4), (128, 8))
            for depth in (3, 4)
            for split in splits
            if rows * n * (p.parts + 1) <= MOST_SUMS * machine.target.warp_size * warps
        ]  # fmt: skip

    def bounds(self, bounds: Sequence[float], work: Work, c: Config) -> list[float]:
        """A program's matrix instructions and its other instructions wait for each other; only another program can fill
        the gaps."""
        alone = SERIAL * work.waves * work.steps * (work.instructions / ISSUE_PER_SM + work.matrix_seconds)
        return [*bounds, alone]

    def beside(self, machine: Machine, p: ProductFacts) -> bool:
        return True

    def whole(self, machine: Machine, p: ProductFacts, c: Config) -> bool:
        return False

    def instructions(self, machine: Machine, p: ProductFacts, c: Config) -> float:
        columns = c["n"] * p.parts / 32
        loads = 60 + c["m"] * c["k"] / 512 * 3
        unpacked = columns * c["k"] * self.code_instructions
        return unpacked + columns * c["m"] * self.sum_instructions + c["warps"] * 60 + loads


class Int8GroupsMode(GroupsMode, Int8Mode):
    """Rows of int8, for targets without instructions for 8-bit floats."""

    name = "int8 groups"
    code_instructions = 1.1
    sum_instructions = 2.1


class Fp8GroupsMode(GroupsMode, Fp8Mode):
    """Rows of e4m3."""

    name = "fp8 groups"
    code_instructions = 1.8
    sum_instructions = 1.1
