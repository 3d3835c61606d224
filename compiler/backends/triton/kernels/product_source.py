"""The parameters of the templates of `triton/linear/`: one product with one tiling."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ....program.coded_rows import MICRO_STEP
from ..layouts.affine import AffineGroups
from .body import translate
from .epilogue import ChangeOperand, ColumnPart, EpilogueOperands, ExtraOperand, epilogue_operands
from .norm import NormKernel
from .product_operands import ProductOperands

_LINE = 128  # bytes of a cache that are read together


@dataclass(frozen=True)
class ProductSource(ProductOperands):
    """A product, its tiling, and the expressions that the templates use."""

    # -- addresses and masks ------------------------------------------------------------------------------------------

    @property
    def expert_offset(self) -> str:
        """The expression added to w_ptr for the program's expert: elements of values, bytes of codes. "" if all rows
        share one matrix."""
        if not self.op.experts:
            return ""
        s, codes = self.op.step, self.op.codes
        return f" + expert * {codes.matrix_nbytes(s.n, s.k) if codes else s.n * s.k}"

    @property
    def y_row(self) -> str:
        """The expression for where row (or slot) r of y begins."""
        op = self.op
        if not op.experts:
            return f"r.to(tl.int64) * {op.step.y.stride}"
        return f"((r // TOPK).to(tl.int64) * {op.step.y.stride} + r % TOPK * WIDTH)"

    @staticmethod
    def all_of(*conditions: str | bool) -> str:
        """The masks among `conditions` joined by &, as an expression; "None" if there are none."""
        return " & ".join(c for c in conditions if isinstance(c, str)) or "None"

    @property
    def n_tail(self) -> bool:
        """Whether the last program of a row of tiles has columns beyond the end of y, which it must mask."""
        return self.op.step.columns % self.tile.n != 0

    @property
    def k_tail(self) -> bool:
        """Whether the last step of K reaches beyond the elements of a row, which it must mask."""
        return self.op.step.k % (self.tile.k * (self.tile.warps if self.tile.decode else 1)) != 0

    @property
    def word_tail(self) -> bool:
        """Whether the last step of K reaches beyond the words of a row's powers of two (MXFP8), which it must mask."""
        return self.micro_words * MICRO_STEP % self.tile.k != 0

    # -- sizes --------------------------------------------------------------------------------------------------------

    @property
    def slices(self) -> int:
        """The number of slices or steps of K."""
        return -(-self.op.step.k // self.tile.k)

    @property
    def tiles_n(self) -> int:
        """Tiles of columns."""
        return -(-self.op.step.columns // self.tile.n)

    @property
    def tiles_m(self) -> str:
        """The number of tiles of rows, as an expression."""
        if self.op.experts:
            return self.op.most_blocks(self.tile.m, "num_rows")
        return "tl.cdiv(num_rows, BM)"

    @property
    def norm(self) -> NormKernel | None:
        """The norm that the program that ends last applies to y; None if the launch does no norm."""
        return self.op.norm if any(arg.name == "norm_y_ptr" for arg in self.args) else None

    @property
    def merges(self) -> bool:
        """Whether the program of a split tile that ends last finishes the tile."""
        return self.tile.splits > 1 and any(arg.name == "counters_ptr" for arg in self.args)

    @property
    def padded(self) -> bool:
        """Whether some rows may only fill a graph: rows of sequences without context, for which no expert is read."""
        return any(arg.name == "context_lens" for arg in self.args)

    # -- weights that are prefetched before x is ready -----------------------------------------------------------------

    @property
    def asked_lines(self) -> int:
        """Lines of 128 bytes of each part of W that a program for few rows prefetches: one per thread in all."""
        return max(32 * self.tile.warps // len(self.parts), 1)

    @property
    def asks(self) -> list[str]:
        """Where `line` of a program's first weights lies, in bytes from w_ptr, for each kind of line; empty if the
        program prefetches no weights."""
        if not (self.op.ahead and self.tile.decode) or self.op.experts or self.mode.eight:
            return []
        layout = self.op.layout
        if isinstance(layout, AffineGroups) and self.mode.codes_operands:
            return [line for part in self.parts if part.stride == 1 for line in self._lines_of_codes(part, layout)]
        return [self._line_of_rows(part) for part in self.parts if self.mode.dense]

    def _lines_of_codes(self, part: ColumnPart, codes: AffineGroups) -> list[str]:
        """Where a program's codes of a group lie, which are contiguous, and where their words lie."""
        s = self.op.step
        row, each = f"({part.offset} + first)", max(2 * codes.span * self.tile.n // _LINE, 1)
        group = f"tl.minimum(line // {each}, {-(-s.k // codes.group) - 1})"
        words = codes.codes_nbytes(s.n, s.k)
        return [
            f"({group} * {s.n} + {row}) * {2 * codes.span} + line % {each} * {_LINE}",
            f"({words} + ({group} * {s.n} + {row}) * 4)",
        ]

    def _line_of_rows(self, part: ColumnPart) -> str:
        """The place of the first values of each of a program's rows."""
        row = 2 * self.op.step.k
        each = max(min(self.asked_lines // self.tile.n, row // _LINE), 1)
        column = f"tl.minimum(first + line // {each}, WIDTH - 1)"
        return f"({part.offset} + {column} * {part.stride}).to(tl.int64) * {row} + line % {each} * {_LINE}"

    @property
    def slice_count(self) -> str:
        """Slices of K that a program for few rows takes part in, as an expression."""
        return "slices" if self.op.experts else "SLICES"

    @property
    def share(self) -> int:
        """Steps of K of a program of a split tile; the last program may have fewer."""
        return -(-self.slices // self.tile.splits)

    @property
    def equal_shares(self) -> bool:
        """Whether all programs of a split tile take the same number of steps, so that the loop's length is known. If K
        ends within a step, values behind its end are masked, and with them whole steps behind it."""
        masked = self.mode.value_operands and self.k_tail
        return self.tile.splits > 1 and (masked or self.slices % self.tile.splits == 0)

    @property
    def step_range(self) -> str:
        """The first step of K of a program and the one behind its last, as expressions; from 0 on if all programs take
        the same number of steps."""
        if self.equal_shares:
            return f"0, {self.share}"
        if self.tile.splits > 1:
            first = f"tl.program_id(1) * {self.share}"
            return f"{first}, tl.minimum({first} + {self.share}, STEPS)"
        return "0, steps" if self.op.experts else "0, STEPS"

    @property
    def halves(self) -> bool:
        """Whether a tile is finished in two halves, because sums and other operands together would not fit into
        registers."""
        tile = self.tile
        sums = tile.m * tile.n // (32 * tile.warps)
        large = not tile.decode and tile.splits == 1 and not self.op.experts
        beside = self._operands.beside
        return large and beside > 0 and sums * (len(self.parts) + beside) > 128

    @property
    def widen(self) -> str:
        """The conversion of operands of different types, which are multiplied in float32; else ""."""
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
    def parts(self) -> tuple[ColumnPart, ...]:
        """The columns of the product that the epilogue reads, each with its own sums; one part if there is no
        epilogue."""
        return self._operands.parts

    @property
    def extras(self) -> tuple[ExtraOperand, ...]:
        """The operands that the epilogue reads besides the product."""
        return self._operands.extras

    @property
    def changes(self) -> tuple[ChangeOperand, ...]:
        """The terms that adapters add to the product."""
        return self._operands.changes

    @property
    def by_slot(self) -> bool:
        """Whether a tile is finished slot by slot on matrix units, as tiles of many rows are, and not row by row."""
        return not self.tile.decode and not self.by_row

    @property
    def by_row(self) -> bool:
        """Whether a program finishes columns of a single row, because it adds up the sums of a split."""
        return self.tile.splits > 1 and not self.merges

    @property
    def lines(self) -> list[str]:
        """The source lines of the epilogue's body; empty without an epilogue."""
        return self._epilogue[0]

    @property
    def arguments(self) -> str:
        """The parameters of the kernel, as the source declares them."""
        return ", ".join(arg.name for arg in self.args)

    @property
    def result(self) -> str:
        """The value that is stored."""
        return self._epilogue[1]
