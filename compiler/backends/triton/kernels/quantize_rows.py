"""The kernel before a product that quantizes its rows to 8 bits: with a scale per row, or powers of two (MXFP8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .....runtime.format.plan import extent
from ....program.coded_rows import MICRO_STEP, micro_words
from ...render import render
from ..spec import ONE, Arg, LaunchSpec, scratch_arg
from ..tiling.choice import power_of_two
from ..tiling.product import ProductMode
from .product import TEMPLATES, WeightProduct

MOST_LANES = 16384  # values of a row that a program holds: 32 per thread of 16 warps


@dataclass(frozen=True)
class RowsSource:
    """The rows of a product in 8 bits, in the form that its mode needs."""

    op: WeightProduct[Any]
    mode: ProductMode

    @property
    def lanes(self) -> int:
        """Values that are read together: a power of two, a whole row if registers hold it."""
        return min(max(power_of_two(self.op.step.k), MICRO_STEP), MOST_LANES)

    @property
    def warps(self) -> int:
        """Warps of a program: one per 1024 lanes, at least 4."""
        return max(self.lanes // 1024, 4)

    @property
    def chunks(self) -> int:
        """The number of chunks in which a row is read."""
        return -(-self.op.step.k // self.lanes)

    @property
    def as_bits(self) -> str:
        """The conversion of codes to the type that is stored."""
        return "" if self.mode.exact else ".to(tl.uint8, bitcast=True)"

    @property
    def words(self) -> int:
        """Words that hold a row's powers of two: four to a word, one per 32 values."""
        return micro_words(self.op.step.k)

    @property
    def x_row(self) -> str:
        """The expression for where a row of x begins."""
        stride = self.op.x.stride
        if self.op.x_per_slot:
            return f"(row // TOPK).to(tl.int64) * {stride} + row % TOPK * K"
        return f"row.to(tl.int64) * {stride}"


def quantize_rows(op: WeightProduct[Any], mode: ProductMode) -> LaunchSpec:
    """The launch that writes x in 8 bits to scratch."""
    source = RowsSource(op, mode)
    text = render(f"{TEMPLATES}/{mode.rows_template}.py.jinja", source, op.step)
    rows = op.slots if op.x_per_slot else extent(op.num_rows)
    args = (op.operand_args["x_ptr"], *quantized_args(mode), op.count)
    return LaunchSpec(text, "linear_rows", args, (rows, ONE, ONE), num_warps=source.warps)


def quantized_args(mode: ProductMode) -> tuple[Arg, Arg]:
    """The arguments with the codes and scales that the launch writes."""
    return scratch_arg("codes", mode.codes_type), scratch_arg("scales", mode.scales_type)


def quantized_scratch(op: WeightProduct[Any], mode: ProductMode, tokens: int) -> dict[str, int]:
    """Bytes of the codes and scales of `tokens` rows of x."""
    rows = tokens * (op.topk if op.x_per_slot else 1)
    return {"codes": rows * op.step.k, "scales": 4 * rows * mode.scale_words(op.step.k)}
