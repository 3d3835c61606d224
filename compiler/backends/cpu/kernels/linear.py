"""Products with a weight, and the int8 rows that products with quantized weights read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from ....program.added_changes import adds_changes
from ....program.epilogue import adds_in_place
from ....program.steps.base import QuantizedRows
from ....program.steps.linear import (
    ExpertLinear,
    ExpertLinearQ,
    Linear,
    LinearQ,
    Product,
    QuantizeRows,
    RowProduct,
)
from ..arithmetic import Arithmetic
from ..isa import Block, Isa
from ..layouts.codes import CodeTiles, Reader
from ..layouts.dense import ValueTiles
from ..layouts.registry import LAYOUTS
from . import amx
from .base import KernelParams
from .matrix import with_matrices

P = TypeVar("P", bound=Product)
R = TypeVar("R", bound=RowProduct)

SCREENED_ROWS = 6  # with more rows the time of a head goes into arithmetic, not into reading


def vector_arithmetic(reader: Reader, isa: Isa) -> Arithmetic:
    """How the vector instructions of a level multiply the reader's codes and sum the products."""
    return reader.without_quads if isa.short_sums else Arithmetic.QUADS


def blocks_of(reader: Reader, isa: Isa, group: int) -> tuple[Block, ...]:
    """The blocks of a product with the reader's codes, `group` of which share a scale along K. If the level has matrix
    instructions, a cost model decides where their blocks replace vector blocks. Products of few rows wait for weights
    with either."""
    vectors = _vector_blocks(reader, isa)
    if isa.tile_blocks:
        return amx.choose(reader, group, vectors, isa.tile_blocks, SCREENED_ROWS)
    return with_matrices(vectors, isa.matrix_rows)


def _vector_blocks(reader: Reader, isa: Isa) -> tuple[Block, ...]:
    arithmetic = vector_arithmetic(reader, isa)
    if arithmetic is Arithmetic.LONG_CHAINS:
        return isa.nibble_blocks
    if arithmetic in (Arithmetic.PAIRS, Arithmetic.CHAINS):
        return isa.pair_blocks
    if reader.line_k == 4:  # bytes, whose lines are loaded for every four k: half of the loads with two tiles
        return tuple(b for b in isa.quant_blocks if b.tiles > 1 or b.rows <= 8)
    return isa.quant_blocks


def refuse_epilogue(step: Product) -> str:
    """Why a product cannot have its epilogue; "" if it can."""
    if step.epilogue is None or adds_in_place(step) or (isinstance(step, RowProduct) and adds_changes(step)):
        return ""
    return "products end in what adapters add, and in nothing else"


@dataclass(frozen=True)
class DenseParams(KernelParams[P]):
    """Parameters of products with a weight in tiles of values."""

    @classmethod
    def refusal(cls, step: P) -> str:
        return LAYOUTS.refusal(step.stored, ValueTiles) or refuse_epilogue(step) or super().refusal(step)

    @property
    def layout(self) -> ValueTiles:
        """The layout of W."""
        return LAYOUTS.of(self.step.stored)

    @property
    def tile_size(self) -> str:
        """Bytes of a tile, as a C++ expression."""
        return self.layout.tile_size(self.step.k)

    @property
    def scratch_bytes(self) -> int:
        return self.isa.dense_blocks[-1].rows * self.step.k * 4 + 64


@dataclass(frozen=True)
class QuantParams(KernelParams[P]):
    """Parameters of products of int8 rows with a weight in tiles of codes."""

    @classmethod
    def refusal(cls, step: P) -> str:
        if not isinstance(step.x, QuantizedRows):
            return "products with codes need rows of int8"
        if reason := LAYOUTS.refusal(step.stored, CodeTiles):
            return reason
        return LAYOUTS.of(step.stored).misfit(step.n, step.k) or refuse_epilogue(step) or super().refusal(step)

    @property
    def layout(self) -> CodeTiles:
        """The layout of W."""
        return LAYOUTS.of(self.step.stored)

    @property
    def groups(self) -> int:
        """Number of groups in a row of W; each has a scale."""
        return self.step.k // self.layout.group

    @property
    def scratch_bytes(self) -> int:
        reader = self.layout.reader
        in_pairs = vector_arithmetic(reader, self.isa) is Arithmetic.PAIRS
        row = self.step.k * (2 if in_pairs else 1) + 8 * self.groups
        blocks = self.isa.tile_blocks or blocks_of(reader, self.isa, self.layout.group)
        return blocks[-1].rows * row + 64


@dataclass(frozen=True)
class ChangeParams:
    """The term that adapters add to columns [begin, end) of a product, with C++ expressions of the operands."""

    begin: int
    end: int
    rank: int
    slots: int
    low: str
    up: str
    shift: str


class RowParams(KernelParams[R]):
    """Parameters of products of rows: the terms that adapters add."""

    @property
    def headers(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("linear/changes.h",) if self.step.changes else ()

    @property
    def changes(self) -> list[ChangeParams]:
        """The terms that adapters add, in the order of the columns."""
        step, numbers = self.step, {name: number for number, name in enumerate(self.step.inputs)}
        [change] = step.changes or (None,)
        if change is None or change.stored is None:
            return []
        up_type = LAYOUTS.of(change.stored).ctype

        def pointer(name: str, element: str) -> str:
            return f"c.input<const {element}>({numbers[name]})"

        return [
            ChangeParams(
                begin,
                end,
                change.rank,
                change.slots,
                f"{{{pointer(f'low.{i}', 'float')}, {low.stride}}}",
                pointer(f"up.{i}", up_type),
                pointer(f"shift.{i}", "float"),
            )
            for i, ((begin, end), low) in enumerate(zip(change.spans, step.low, strict=True))
        ]

    @property
    def slot(self) -> int:
        """The number of the input that says which adapter a row has."""
        return list(self.step.inputs).index("slot")


@dataclass(frozen=True)
class LinearParams(RowParams[Linear], DenseParams[Linear]):
    """y = x W^T plus the terms of adapters."""

    template: ClassVar[str] = "cpp/linear/linear.cpp.jinja"


@dataclass(frozen=True)
class LinearQParams(RowParams[LinearQ], QuantParams[LinearQ]):
    """y = x W^T plus the terms of adapters; a greedy batch may need only the largest value of a row, see screen.h."""

    template: ClassVar[str] = "cpp/linear/linear_q.cpp.jinja"

    @property
    def screen_table(self) -> str:
        """The C++ name of the table with the upper halves of the codes, which screening reads."""
        return f"{self.layout.table}_HIGH"

    @property
    def scratch_bytes(self) -> int:
        return max(super().scratch_bytes, self._screen_bytes() if self.step.screened else 0)

    def _screen_bytes(self) -> int:
        """Scratch bytes of a thread that screens: a panel, a norm per row and group, and a margin per row and tile."""
        rows, tiles = SCREENED_ROWS, self.step.n // 16 + 1
        return rows * (self.step.k + 8 * self.groups) + 4 * rows * (self.groups + tiles) + 3 * 64


@dataclass(frozen=True)
class ExpertLinearParams(DenseParams[ExpertLinear]):
    """Products with dense weights of experts."""

    @property
    def template(self) -> str:  # type: ignore[override]
        kind = "add" if self.step.epilogue else "few" if self._few_tiles else "linear"
        return f"cpp/linear/expert_{kind}.cpp.jinja"

    @property
    def headers(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("linear/lone.h",) if self.template.endswith("expert_few.cpp.jinja") else ()

    @property
    def _few_tiles(self) -> bool:
        """Whether experts have few tiles, as the A of adapters has, so that threads take turns in computing one tile
        more."""
        return self.step.index is not None and self.step.topk == 1 and self.step.x_per_slot and self.step.n <= 128


@dataclass(frozen=True)
class ExpertLinearQParams(QuantParams[ExpertLinearQ]):
    """Products with quantized weights of experts."""

    template: ClassVar[str] = "cpp/linear/expert_linear_q.cpp.jinja"


@dataclass(frozen=True)
class QuantizeRowsParams(KernelParams[QuantizeRows]):
    """x -> codes, scales, sums."""

    template: ClassVar[str] = "cpp/linear/quantize_rows.cpp.jinja"

    @classmethod
    def refusal(cls, step: QuantizeRows) -> str:
        if step.group % 16 or step.k % step.group:
            return f"group {step.group} must be a multiple of 16 that divides k = {step.k}"
        return super().refusal(step)

    @property
    def groups(self) -> int:
        """Number of groups in a row of x; each has a scale."""
        return self.step.k // self.step.group
