"""What the templates of kernels around a product are rendered from: those that bring rows to 8 bits, sort the slots of
experts, and unpack a matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....program.coded_rows import MICRO_STEP, micro_words
from ....program.layout import Layout
from ..layouts.float8 import Float8Rows
from ..layouts.registry import LAYOUTS
from ..tiling.choice import power_of_two
from ..tiling.product import ProductMode
from .product import WeightProduct

MOST_LANES = 16384  # values of a row that a program holds: 32 per thread of 16 warps


@dataclass(frozen=True)
class SortSource:
    """The slots of a product with experts, sorted into blocks."""

    op: WeightProduct[Any]
    block: int
    padded: bool  # see ProductSource

    @property
    def experts(self) -> int:
        """How many matrices there are."""
        return self.op.experts

    @property
    def topk(self) -> int:
        """Experts of a row."""
        return self.op.topk

    @property
    def buckets(self) -> int:
        """A power of two that holds all experts and the slots of none."""
        return 1 << self.op.experts.bit_length()

    def most_blocks(self, rows: str) -> str:
        """How many blocks of slots there are at most, as the source says it. rows: the name of the number of rows."""
        return self.op.most_blocks(self.block, rows)


@dataclass(frozen=True)
class RowsSource:
    """The rows of a product in 8 bits, as its mode takes them."""

    op: WeightProduct[Any]
    mode: ProductMode

    @property
    def lanes(self) -> int:
        """Values that are read together: a power of two, a whole row where registers hold it."""
        return min(max(power_of_two(self.op.step.k), MICRO_STEP), MOST_LANES)

    @property
    def warps(self) -> int:
        """Warps of a program: one per 1024 lanes, at least 4."""
        return max(self.lanes // 1024, 4)

    @property
    def chunks(self) -> int:
        """In how many pieces a row is read."""
        return -(-self.op.step.k // self.lanes)

    @property
    def as_bits(self) -> str:
        """Makes codes what is stored."""
        return "" if self.mode.exact else ".to(tl.uint8, bitcast=True)"

    @property
    def words(self) -> int:
        """Words of powers of two that a row has: four of them, of 32 values each, to a word."""
        return micro_words(self.op.step.k)

    @property
    def x_row(self) -> str:
        """Where a row of x begins."""
        stride = self.op.x.stride
        if self.op.x_per_slot:
            return f"(row // TOPK).to(tl.int64) * {stride} + row % TOPK * K"
        return f"row.to(tl.int64) * {stride}"


UNPACKED_ROWS = 64  # of a program of linear/unpack_bytes.py.jinja
UNPACKED = 256  # columns of a program of linear/unpack.py.jinja


@dataclass(frozen=True)
class UnpackSource:
    """A matrix of codes [n, k] whose values are stored in 16 bits, as a table of n rows."""

    op: WeightProduct[Any]

    @property
    def macros(self) -> str:
        """The template that says how codes are read."""
        assert self.op.codes is not None
        return self.op.codes.macros

    @property
    def layout(self) -> Layout:
        """How the matrix lies in memory."""
        return self.op.layout

    @property
    def rows(self) -> int:
        """Rows of a group that a program makes bytes of."""
        return UNPACKED_ROWS

    @property
    def bytes_layout(self) -> Float8Rows:
        """How W lies in memory as 8-bit floats."""
        found = LAYOUTS.of(self.op.bytes_stored)
        assert isinstance(found, Float8Rows)
        return found

    @property
    def by_groups(self) -> bool:
        """Whether the values of a group are made together: the columns of a program are whole groups."""
        return self.op.codes is not None and self.op.codes.as_values and UNPACKED % self.op.codes.group == 0

    @property
    def table(self) -> dict[str, int]:
        """The facts of it that the layouts' macros ask of a table."""
        return {"table_rows": self.op.step.n, "n": self.op.step.k}
