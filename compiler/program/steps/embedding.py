"""Gathers of whole rows: from a table by ids, and of the rows whose logits are wanted."""

from __future__ import annotations

from typing import ClassVar

from ....runtime.format.operands import Operand
from ..layout import Stored
from .base import VALUES, Rows, Step, step_type


@step_type
class Embedding(Step, frozen=True, kw_only=True, tag="embedding"):
    """y [n] = table[ids] of a table of `table_rows` rows with the layout `stored`; ids are clamped."""

    DTYPES: ClassVar = {"ids": ("i32",), "table": (*VALUES, "u8")}
    ids: Operand
    table: Operand
    y: Operand
    n: int
    table_rows: int
    stored: Stored

    def widths(self) -> dict[str, int]:
        return {"ids": 1, "y": self.n}


@step_type
class SelectRows(Step, frozen=True, kw_only=True, tag="select_rows"):
    """y [n], one row per wanted logit row, from x, which has one row per token or, in a section that runs after a step,
    per logit row of that step."""

    DTYPES: ClassVar = {"x": VALUES, "y": VALUES}
    x: Operand
    y: Operand
    n: int

    def widths(self) -> dict[str, int]:
        return {"x": self.n, "y": self.n}

    def rows_of(self, name: str) -> tuple[Rows, ...]:
        return ("tokens", "logit_rows") if name == "x" else (self.rows,)
