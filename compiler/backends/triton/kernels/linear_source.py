"""What the templates of `triton/linear/` are rendered from: one product with one tiling."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ....program.coded_rows import MICRO_STEP, micro_words
from ....program.layout import Layout
from ....weights.formats.float8 import Float8
from ..spec import Arg
from ..tiling.choice import power_of_two
from ..tiling.machine import LinearTiling, sums_of_steps, whole_groups
from ..tiling.product import ProductMode
from .body import translate
from .epilogue import EpilogueOperands, ExtraOperand, Part, epilogue_operands
from .norm import NormKernel
from .product import WeightProduct

ASKED = 256  # bytes of W that a thread asks for before it waits


@dataclass(frozen=True)
class ProductSource:
    """A product and how it is cut; what the templates ask for."""

    op: WeightProduct[Any]
    tile: LinearTiling
    args: tuple[Arg, ...]
    level: int  # compute capability, 0 for HIP

    @property
    def cuda(self) -> bool:
        """Whether the target is of CUDA, whose inline assembly the macros may use; else it is of HIP."""
        return self.level > 0

    @property
    def mode(self) -> ProductMode:
        """In what the product multiplies on this target: 16-bit values, codes of 8 bits and their like."""
        return self.op.mode(self.level)

    @property
    def layout(self) -> Layout:
        """How W lies in memory."""
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
        """Whether codes become values before they are multiplied: see layouts/affine.py.jinja."""
        codes = self.op.codes is not None and self.op.codes.unpacking.whole
        return codes and not self.tile.decode and whole_groups(self.level, self.tile.n, self.tile.warps)

    @property
    def bias(self) -> int:
        """What is added to a field when it is read as an operand: bf16 has no subnormals that a product could keep, and
        those of f16 would lose bits when they are scaled."""
        if self.op.x.dtype == "bf16":
            return 128
        return 1024 if self.whole_values else 0

    @property
    def magic(self) -> str:
        """The pattern that is or-ed to a field: of a number whose last mantissa bit is worth 1, or none."""
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
        """The macro that takes four codes of 4 bits apart: with lop3 on CUDA, elsewhere with shifts and masks."""
        return "nibbles" if self.cuda else "fields"

    @property
    def fields(self) -> int:
        """Pieces of x that meet one element of codes."""
        return self.op.codes.fields if self.op.codes else 1

    # -- rows of 8 bits -----------------------------------------------------------------------------------------------

    @property
    def eight(self) -> bool:
        """Whether rows are multiplied in 8 bits, with a scale each."""
        return self.mode.scaled_rows

    @property
    def micro(self) -> bool:
        """Whether they are, with a power of two per 32 values."""
        return self.mode.powers

    @property
    def inline(self) -> bool:
        """Whether a program makes the codes of its few rows itself."""
        return (self.eight or self.micro) and not self.reads_codes

    @property
    def reads_codes(self) -> bool:
        """Whether a kernel before this one made rows codes."""
        return any(arg.name == "codes_ptr" for arg in self.args)

    @property
    def row_lanes(self) -> int:
        """Values of the only row that are read together: 32 per thread."""
        return min(power_of_two(self.op.step.k), 1024 * self.tile.warps)

    @property
    def micro_words(self) -> int:
        """Words of powers of two, of a row."""
        return micro_words(self.op.step.k)

    @property
    def few_at(self) -> str:
        """Where the few rows of x begin, or their codes; the only row, where it is that which becomes codes."""
        slot, across = bool(self.op.experts), "rows[None, None, :]"
        if self.inline:
            return f"x_ptr + {self.slot_x('slot')}" if slot else "x_ptr"
        if self.reads_codes:
            row = f"{self.slot_row('slot')}.to(tl.int64) * K + {across} * 0" if slot else f"{across} * K"
            return f"codes_ptr{self.as_rows} + {row}"
        return f"x_ptr + {self.slot_x('slot')} + {across} * 0" if slot else f"x_ptr + {across} * {self.op.x.stride}"

    @property
    def scale_at(self) -> str:
        """Which scales the rows of a program have."""
        return f"{self.slot_row('slot')} + rows * 0" if self.op.experts else "rows"

    def slot_row(self, slot: str) -> str:
        """The row of codes that a slot multiplies."""
        return slot if self.op.x_per_slot else f"({slot} // TOPK)"

    @property
    def blocks(self) -> int:
        """Scales of a column of W."""
        form = self.layout.format
        return form.blocks(self.op.step.k) if isinstance(form, Float8) else 1

    @property
    def as_rows(self) -> str:
        """Makes a pointer to bytes one to the elements of x."""
        return self.mode.row_pointer

    @property
    def in_steps(self) -> bool:
        """Whether the sum of each step is added to the others in float32."""
        return self.mode.floats and sums_of_steps(self.level)

    @property
    def sum_type(self) -> str:
        """The Triton type of sums: int32 of codes times codes, else float32."""
        return "tl.int32" if self.mode.exact else "tl.float32"

    # -- addresses and masks ------------------------------------------------------------------------------------------

    @property
    def expert_offset(self) -> str:
        """What is added to w_ptr for the program's expert, as the source says it: elements of values, bytes of codes.
        "" where all rows have one matrix."""
        if not self.op.experts:
            return ""
        s, codes = self.op.step, self.op.codes
        return f" + expert * {codes.matrix_nbytes(s.n, s.k) if codes else s.n * s.k}"

    def slot_x(self, slot: str) -> str:
        """Where a slot's row of x begins."""
        row = f"({slot} // TOPK).to(tl.int64) * {self.op.x.stride}"
        return f"{row} + {slot} % TOPK * K" if self.op.x_per_slot else row

    @property
    def y_row(self) -> str:
        """Where row (or slot) r of y begins."""
        op = self.op
        if not op.experts:
            return f"r.to(tl.int64) * {op.step.y.stride}"
        return f"((r // TOPK).to(tl.int64) * {op.step.y.stride} + r % TOPK * WIDTH)"

    @staticmethod
    def all_of(*conditions: str | bool) -> str:
        """The conjunction of those that apply; None if there are none."""
        return " & ".join(c for c in conditions if isinstance(c, str)) or "None"

    @property
    def n_tail(self) -> bool:
        """Whether a program's columns may lie outside."""
        return self.op.step.columns % self.tile.n != 0

    @property
    def k_tail(self) -> bool:
        """Whether a program's elements of a row may."""
        return self.op.step.k % (self.tile.k * (self.tile.warps if self.tile.decode else 1)) != 0

    @property
    def word_tail(self) -> bool:
        """Whether its words of powers of two may."""
        return self.micro_words * MICRO_STEP % self.tile.k != 0

    # -- what a kernel asks for while it waits ------------------------------------------------------------------------

    @property
    def asks(self) -> list[str]:
        """Lines that bring a program's first weights near while the kernel before it ends; no kernel writes weights.

        Not of codes: on an H100 a step of these took 2 to 4 % longer than without.
        """
        row, threads = 2 * self.op.step.k, 32 * self.tile.warps
        if self.op.experts or not self.mode.dense or row % ASKED:
            return []
        number, found = f"tl.arange(0, {threads})", []
        each = max(threads // self.tile.n, 1)
        outer, inner = f"{number} // {each}", f"{number} % {each}"
        for part in self.parts:
            column = f"({part.offset} + {part.stride} * first + {outer} * {part.stride})"
            at = f"{column}.to(tl.int64) * K + {inner} * {ASKED // 2}"
            there = f"({outer} < BN) & ({inner} < {row // ASKED}) & (first + {outer} < WIDTH)"
            found.append(f"ask(w_ptr, {at}, {there})")
        return found

    # -- sizes --------------------------------------------------------------------------------------------------------

    @property
    def slices(self) -> int:
        """Slices or steps of K."""
        return -(-self.op.step.k // self.tile.k)

    @property
    def tiles_n(self) -> int:
        """Tiles of columns."""
        return -(-self.op.step.columns // self.tile.n)

    @property
    def tiles_m(self) -> str:
        """Tiles of rows, as the source says it."""
        if self.op.experts:
            return self.op.most_blocks(self.tile.m, "num_rows")
        return "tl.cdiv(num_rows, BM)"

    @property
    def norm(self) -> NormKernel | None:
        """What the program that ends last does with all of y."""
        return self.op.norm if any(arg.name == "norm_y_ptr" for arg in self.args) else None

    @property
    def merges(self) -> bool:
        """Whether the program of a split tile that ends last finishes the tile."""
        return self.tile.splits > 1 and any(arg.name == "counters_ptr" for arg in self.args)

    @property
    def padded(self) -> bool:
        """Whether rows may only fill a graph: those of sequences without context, which no expert is read for."""
        return any(arg.name == "context_lens" for arg in self.args)

    @property
    def slice_count(self) -> str:
        """Slices of K that a program for few rows takes part in, as the source says it."""
        return "slices" if self.op.experts else "SLICES"

    @property
    def step_range(self) -> str:
        """The first step of K of a program and the one behind its last, as the source says them."""
        if self.tile.splits > 1:
            share = -(-self.slices // self.tile.splits)
            return f"tl.program_id(1) * {share}, tl.minimum(tl.program_id(1) * {share} + {share}, STEPS)"
        return "0, steps" if self.op.experts else "0, STEPS"

    @property
    def halves(self) -> bool:
        """Whether a tile is finished in two halves: sums and other operands together would not fit into registers."""
        tile = self.tile
        sums = tile.m * tile.n // (32 * tile.warps)
        large = not tile.decode and tile.splits == 1 and not self.op.experts
        return large and bool(self.extras) and sums * (len(self.parts) + len(self.extras)) > 128

    @property
    def widen(self) -> str:
        """Operands of different types are multiplied in float32."""
        return ".to(tl.float32)" if self.mode.wide else ""

    # -- the epilogue and the arguments -------------------------------------------------------------------------------

    @cached_property
    def _operands(self) -> EpilogueOperands:
        return epilogue_operands(self.op.step)

    @cached_property
    def _epilogue(self) -> tuple[list[str], str]:
        epilogue = self.op.step.epilogue
        if epilogue is None:
            return [], self.parts[0].acc
        lines, result = translate(epilogue.body, self._operands.arguments)
        return lines, result.tensor

    @property
    def parts(self) -> tuple[Part, ...]:
        """The columns of the product that the epilogue reads, each with sums of its own; one without an epilogue."""
        return self._operands.parts

    @property
    def extras(self) -> tuple[ExtraOperand, ...]:
        """What the epilogue reads beside the product."""
        return self._operands.extras

    @property
    def lines(self) -> list[str]:
        """The source lines of the epilogue's body; none without an epilogue."""
        return self._epilogue[0]

    @property
    def arguments(self) -> str:
        """The parameters of the kernel, as the source declares them."""
        return ", ".join(arg.name for arg in self.args)

    @property
    def result(self) -> str:
        """The value that is stored."""
        return self._epilogue[1]
