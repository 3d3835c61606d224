"""How a product's operands are multiplied, for the templates of `triton/linear/`: rows and codes, in 16 bits or in
8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....program.coded_rows import micro_words
from ....program.layout import Layout
from ....weights.formats.float8 import Float8
from ..spec import Arg
from ..tiling.choice import power_of_two
from ..tiling.machine import LinearTiling, sums_of_steps, whole_groups
from ..tiling.product import ProductMode
from .product import WeightProduct


@dataclass(frozen=True)
class ProductOperands:
    """The operands of a product that is computed in tiles."""

    op: WeightProduct[Any]
    tile: LinearTiling
    args: tuple[Arg, ...]
    level: int  # compute capability, 0 for HIP
    subnormals: bool = True  # of f16, see Target

    @property
    def cuda(self) -> bool:
        """Whether the target is CUDA, whose inline assembly the macros may use; else it is HIP."""
        return self.level > 0

    @property
    def mode(self) -> ProductMode:
        """The kind of numbers that the product multiplies on this target: 16-bit values, codes of 8 bits, and so on."""
        return self.op.tiled_mode(self.level, self.tile)

    @property
    def layout(self) -> Layout:
        """The layout of W."""
        return self.op.layout

    @property
    def macros(self) -> str:
        """The template that says how W is read."""
        return self.op.codes.macros if self.op.codes else "triton/layouts/rows.py.jinja"

    @property
    def x_type(self) -> str:
        """The Triton type of 16 bits in which values are multiplied."""
        return {"bf16": "tl.bfloat16", "f16": "tl.float16"}[self.op.x.dtype]

    # -- codes as 16-bit operands -------------------------------------------------------------------------------------

    @property
    def whole_values(self) -> bool:
        """Whether codes are converted to values before they are multiplied: see layouts/affine.py.jinja."""
        codes = self.op.codes is not None and self.op.codes.unpacking.whole
        return codes and not self.tile.decode and whole_groups(self.level, self.tile.n, self.tile.warps)

    @property
    def bias(self) -> int:
        """The offset of a field that is read as an operand: products do not keep bf16's subnormals, nor those of f16 on
        some targets, and f16's would lose bits when they are scaled."""
        if self.op.x.dtype == "bf16":
            return 128
        return 1024 if self.whole_values or not self.subnormals else 0

    @property
    def magic(self) -> str:
        """The bit pattern that is or-ed to a field: a number whose last mantissa bit is worth 1, or 0."""
        return {128: "0x4300", 1024: "0x6400", 0: "0"}[self.bias]

    @property
    def magic_pair(self) -> str:
        """`magic` for both halves of a word of 32 bits."""
        return "0" if not self.bias else self.magic + self.magic[2:]

    @property
    def unit(self) -> str:
        """Undoes the 2^-24 that the last bit of a subnormal f16 is worth."""
        return "" if self.bias else " * 16777216.0"

    @property
    def unpack(self) -> str:
        """The macro that unpacks four codes of 4 bits: with lop3 on CUDA, elsewhere with shifts and masks."""
        return "nibbles" if self.cuda else "fields"

    @property
    def fields(self) -> int:
        """Pieces of x that are multiplied with one element of codes."""
        return self.op.codes.fields if self.op.codes else 1

    # -- rows of 8 bits -----------------------------------------------------------------------------------------------

    @property
    def eight(self) -> bool:
        """Whether rows are multiplied in 8 bits, with a scale each."""
        return self.mode.scaled_rows

    @property
    def micro(self) -> bool:
        """Whether rows are multiplied in 8 bits, with a power of two per 32 values (MXFP8)."""
        return self.mode.powers

    @property
    def inline(self) -> bool:
        """Whether a program quantizes its few rows itself."""
        return (self.eight or self.micro) and not self.reads_codes

    @property
    def reads_codes(self) -> bool:
        """Whether an earlier kernel quantized the rows to codes."""
        return any(arg.name == "codes_ptr" for arg in self.args)

    @property
    def row_lanes(self) -> int:
        """Values of a single row that are read together: 32 per thread."""
        return min(power_of_two(self.op.step.k), 1024 * self.tile.warps)

    @property
    def micro_words(self) -> int:
        """Words of 32 bits that hold the powers of two of a row: one for each 128 values."""
        return micro_words(self.op.step.k)

    @property
    def few_at(self) -> str:
        """Where the few rows of x or their codes begin; the single row if the program quantizes it itself."""
        slot, across = bool(self.op.experts), "rows[None, None, :]"
        if self.inline:
            return f"x_ptr + {self.slot_x('slot')}" if slot else "x_ptr"
        if self.reads_codes:
            row = f"{self.slot_row('slot')}.to(tl.int64) * K + {across} * 0" if slot else f"{across} * K"
            return f"codes_ptr{self.as_rows} + {row}"
        return f"x_ptr + {self.slot_x('slot')} + {across} * 0" if slot else f"x_ptr + {across} * {self.op.x.stride}"

    @property
    def scale_at(self) -> str:
        """The indices of the scales of a program's rows, as an expression."""
        return f"{self.slot_row('slot')} + rows * 0" if self.op.experts else "rows"

    def slot_x(self, slot: str) -> str:
        """Where a slot's row of x begins, as an expression: elements from x_ptr."""
        row = f"({slot} // TOPK).to(tl.int64) * {self.op.x.stride}"
        return f"{row} + {slot} % TOPK * K" if self.op.x_per_slot else row

    def slot_row(self, slot: str) -> str:
        """The number of the row of codes that a slot multiplies, as an expression."""
        return slot if self.op.x_per_slot else f"({slot} // TOPK)"

    @property
    def blocks(self) -> int:
        """Scales of a column of W."""
        form = self.layout.format
        return form.blocks(self.op.step.k) if isinstance(form, Float8) else 1

    @property
    def by_step(self) -> bool:
        """Whether the scales of W's columns multiply the sum of each step of K, not the sum of all steps."""
        return self.mode.apart or self.blocks > 1

    @property
    def as_rows(self) -> str:
        """The cast of a pointer to bytes to a pointer to elements of x."""
        return self.mode.row_pointer

    @property
    def in_steps(self) -> bool:
        """Whether the sum of each step is added to the others in float32."""
        return self.mode.floats and sums_of_steps(self.level)

    @property
    def sum_type(self) -> str:
        """The Triton type of sums: int32 of codes times codes, else float32."""
        return "tl.int32" if self.mode.exact and not self.by_step else "tl.float32"
