"""Collective operations of ranks, see compiler/ops/collective.py."""

from __future__ import annotations

from typing import ClassVar

from ....runtime.format.operands import Operand
from .base import FLOATS, VALUES, Step, step_type


class Collective(Step, frozen=True, kw_only=True):
    """A step that waits for the same step of the other ranks. x, y: n elements of a row, dense."""

    DTYPES: ClassVar = {"x": FLOATS, "y": FLOATS}
    x: Operand
    y: Operand
    n: int


@step_type
class AllReduce(Collective, frozen=True, kw_only=True, tag="all_reduce"):
    """y [n] = the sum of the ranks' x [n], added in the order of ranks."""

    ranks: int = 0

    def widths(self) -> dict[str, int]:
        return dict.fromkeys(("x", "y"), self.n)


@step_type
class ReduceScatter(Collective, frozen=True, kw_only=True, tag="reduce_scatter"):
    """y [n] = the sum of the ranks' x [n], added in the order of ranks: each rank gets its own rows; in a step of fewer
    than `least` rows every rank gets all."""

    ranks: int
    least: int

    def widths(self) -> dict[str, int]:
        return dict.fromkeys(("x", "y"), self.n)


@step_type
class GatherRows(Collective, frozen=True, kw_only=True, tag="all_gather_rows"):
    """y [n] = x [n] of the rank that owns the row; x and y are the same memory."""

    ranks: int
    least: int

    def widths(self) -> dict[str, int]:
        return dict.fromkeys(("x", "y"), self.n)

    def problem(self) -> str:
        return "" if self.x == self.y else "rows are gathered where they lie"


@step_type
class AllGather(Collective, frozen=True, kw_only=True, tag="all_gather"):
    """y [outer, ranks, n] = the ranks' x [outer, n], line by line."""

    outer: int
    ranks: int

    def widths(self) -> dict[str, int]:
        return {"x": self.outer * self.n, "y": self.outer * self.ranks * self.n}


@step_type
class Transfer(Collective, frozen=True, kw_only=True, tag="transfer"):
    """y [n] on stage `stage` = x [n] of the stage before it; other ranks skip the step. x and y have one type."""

    DTYPES: ClassVar = {"x": VALUES, "y": VALUES}
    stage: int

    def widths(self) -> dict[str, int]:
        return dict.fromkeys(("x", "y"), self.n)
