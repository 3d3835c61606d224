"""What the templates of `triton/linear/` are rendered from: one product with one tiling."""

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
    """A product and how it is cut; what the templates ask for."""

    # -- addresses and masks ------------------------------------------------------------------------------------------

    @property
    def expert_offset(self) -> str:
        """What is added to w_ptr for the program's expert, as the source says it: elements of values, bytes of codes.
        "" where all rows have one matrix."""
        if not self.op.experts:
            return ""
        s, codes = self.op.step, self.op.codes
        return f" + expert * {codes.matrix_nbytes(s.n, s.k) if codes else s.n * s.k}"

    @property
    def y_row(self) -> str:
        """Where row (or slot) r of y begins."""
        op = self.op
        if not op.experts:
            return f"r.to(tl.int64) * {op.step.y.stride}"
        return f"((r // TOPK).to(tl.int64) * {op.step.y.stride} + r % TOPK * WIDTH)"

    @staticmethod
    def all_of(*conditions: str | bool) -> str:
        """The masks among `conditions` joined by &, as the source says it; "None" if there are none."""
        return " & ".join(c for c in conditions if isinstance(c, str)) or "None"

    @property
    def n_tail(self) -> bool:
        """Whether the last program of a row of tiles has columns beyond those of y, which it must mask."""
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
        """The norm that the program that ends last applies to y; None where the launch does no norm."""
        return self.op.norm if any(arg.name == "norm_y_ptr" for arg in self.args) else None

    @property
    def merges(self) -> bool:
        """Whether the program of a split tile that ends last finishes the tile."""
        return self.tile.splits > 1 and any(arg.name == "counters_ptr" for arg in self.args)

    @property
    def padded(self) -> bool:
        """Whether rows may only fill a graph: those of sequences without context, which no expert is read for."""
        return any(arg.name == "context_lens" for arg in self.args)

    # -- what is asked for before x is there ---------------------------------------------------------------------------

    @property
    def asked_lines(self) -> int:
        """Lines of 128 bytes that a program for few rows asks for of each part of W: one per thread in all."""
        return max(32 * self.tile.warps // len(self.parts), 1)

    @property
    def asks(self) -> list[str]:
        """Where `line` of a program's first weights lies, in bytes from w_ptr on, for each kind of line; none where it
        does not ask for weights."""
        if not (self.op.ahead and self.tile.decode) or self.op.experts or self.mode.eight:
            return []
        layout = self.op.layout
        if isinstance(layout, AffineGroups) and self.mode.codes_operands:
            return [line for part in self.parts if part.stride == 1 for line in self._lines_of_codes(part, layout)]
        return [self._line_of_rows(part) for part in self.parts if self.mode.dense]

    def _lines_of_codes(self, part: ColumnPart, codes: AffineGroups) -> list[str]:
        """Where a program's codes of a group lie, which are together, and their words."""
        s = self.op.step
        row, each = f"({part.offset} + first)", max(2 * codes.span * self.tile.n // _LINE, 1)
        group = f"tl.minimum(line // {each}, {-(-s.k // codes.group) - 1})"
        words = codes.codes_nbytes(s.n, s.k)
        return [
            f"({group} * {s.n} + {row}) * {2 * codes.span} + line % {each} * {_LINE}",
            f"({words} + ({group} * {s.n} + {row}) * 4)",
        ]

    def _line_of_rows(self, part: ColumnPart) -> str:
        """Where the first values of each of a program's rows lie."""
        row = 2 * self.op.step.k
        each = max(min(self.asked_lines // self.tile.n, row // _LINE), 1)
        column = f"tl.minimum(first + line // {each}, WIDTH - 1)"
        return f"({part.offset} + {column} * {part.stride}).to(tl.int64) * {row} + line % {each} * {_LINE}"

    @property
    def slice_count(self) -> str:
        """Slices of K that a program for few rows takes part in, as the source says it."""
        return "slices" if self.op.experts else "SLICES"

    @property
    def share(self) -> int:
        """Steps of K of a program of a split tile; the last program may have fewer."""
        return -(-self.slices // self.tile.splits)

    @property
    def equal_shares(self) -> bool:
        """Whether the programs of a split tile take as many steps each: a loop whose number of turns is known. Values
        of blocks behind the end of K are masked where K ends within a step, and so are whole steps that a program has
        behind it."""
        masked = self.mode.value_operands and self.k_tail
        return self.tile.splits > 1 and (masked or self.slices % self.tile.splits == 0)

    @property
    def step_range(self) -> str:
        """The first step of K of a program and the one behind its last, as the source says them; from 0 on where all
        programs take as many."""
        if self.equal_shares:
            return f"0, {self.share}"
        if self.tile.splits > 1:
            first = f"tl.program_id(1) * {self.share}"
            return f"{first}, tl.minimum({first} + {self.share}, STEPS)"
        return "0, steps" if self.op.experts else "0, STEPS"

    @property
    def halves(self) -> bool:
        """Whether a tile is finished in two halves: sums and other operands together would not fit into registers."""
        tile = self.tile
        sums = tile.m * tile.n // (32 * tile.warps)
        large = not tile.decode and tile.splits == 1 and not self.op.experts
        beside = self._operands.beside
        return large and beside > 0 and sums * (len(self.parts) + beside) > 128

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
    def parts(self) -> tuple[ColumnPart, ...]:
        """The columns of the product that the epilogue reads, each with sums of its own; one without an epilogue."""
        return self._operands.parts

    @property
    def extras(self) -> tuple[ExtraOperand, ...]:
        """What the epilogue reads beside the product."""
        return self._operands.extras

    @property
    def changes(self) -> tuple[ChangeOperand, ...]:
        """What adapters add to the product."""
        return self._operands.changes

    @property
    def by_slot(self) -> bool:
        """Whether a tile is finished slot by slot, on matrix units, rather than row by row: one of many rows."""
        return not self.tile.decode and not self.by_row

    @property
    def by_row(self) -> bool:
        """Whether a program finishes columns of a single row: it adds up the sums of a split."""
        return self.tile.splits > 1 and not self.merges

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
