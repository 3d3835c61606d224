"""How products read blocks of files: sizes and places in a tile (see blocks.py), and the C++ that unpacks codes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ....weights.formats.blocks import BlockFormat
from ..arithmetic import Arithmetic
from .codes import Reader
from .scales import SCALE_BYTES
from .tiles import TILE

_PIECES = {8: ("raw",), 4: ("low", "high"), 2: ("first", "second", "third", "fourth")}


@dataclass(frozen=True)
class BlockReader(Reader):
    """Reader of a block format. base: bits of a code in the lines; fine: bits in the line before them."""

    form: BlockFormat | None = None
    base: int = 4
    span: int = 1

    @property
    def step(self) -> int:
        """Values along K whose products are summed before they are scaled."""
        assert self.form is not None
        return self.form.row_group

    @property
    def fine(self) -> int:
        """Bits of a code that lie in the line before the codes: those above `base`; 0 for none."""
        assert self.form is not None
        return self.form.bits - self.base

    @property
    def fine_steps(self) -> int:
        """Number of steps whose upper bits fill a line."""
        return 32 // (self.step * self.fine) if self.fine else 1

    @property
    def line_bytes(self) -> int:
        """Bytes of the lines of one step."""
        return self.step * TILE * self.base // 8

    @property
    def step_bytes(self) -> int:
        """Bytes of one step: its lines, and its share of the upper bits."""
        return self.line_bytes + (64 // self.fine_steps if self.fine else 0)

    @property
    def group_steps(self) -> int:
        """Steps of a group."""
        assert self.form is not None
        return self.form.group // self.step

    @property
    def groups(self) -> int:
        """Groups of a span."""
        return self.span // self.group_steps

    @property
    def blocks(self) -> int:
        """Blocks of a span."""
        return self.span // self.block_steps

    @property
    def block_steps(self) -> int:
        """Steps of a block."""
        assert self.form is not None
        return self.form.size // self.step

    @property
    def mins_at(self) -> int:
        """Where the minima or the zeros of blocks are in a header, in bytes from its beginning; no format has both."""
        assert self.form is not None
        return self.blocks * TILE * SCALE_BYTES[self.form.scale]

    @property
    def group_scales_at(self) -> int:
        """Where the integer scales of groups are in a header, in bytes from its beginning."""
        assert self.form is not None
        return self.mins_at + self.blocks * TILE * (2 * self.form.mins + self.form.zeros)

    @property
    def group_mins_at(self) -> int:
        """Where the integer minima of groups are, in bytes from the header's beginning; u4 has them in the upper half
        of the scales' bytes."""
        return self.group_scales_at + self.groups * TILE

    @property
    def header_bytes(self) -> int:
        """Bytes of a span's header: scales of blocks, then those of groups."""
        assert self.form is not None
        kind = self.form.group_scales
        own = 0 if kind == "none" else 2 if self.form.mins and kind != "u4" else 1
        return self.group_scales_at + own * self.groups * TILE

    @property
    def entries(self) -> tuple[int, ...]:
        """The entries of the code table, in units."""
        assert self.form is not None
        entries = [round(level * self.units) for level in self.form.table]
        return (*entries, *[0] * (16 - len(entries)))

    @property
    def shift(self) -> str:
        """The offset by which codes, or entries of a table, exceed the levels that they stand for, in C++."""
        assert self.form is not None
        if self.dot == "dot_table":
            return "TABLE_BIAS"
        return str(-min(self.entries) if self.form.table else self.form.zero)

    @property
    def zero(self) -> str:
        assert self.form is not None
        if self.form.mins or self.form.zeros:
            return ""
        return self.shift + (" - BYTE_BIAS" if self.dot == "dot_u8" else "")

    @property
    def signed(self) -> bool:
        """Whether kernels with sums of 16 bits read codes as signed bytes: unsigned 8-bit codes would overflow."""
        return self.dot != "dot_u4"

    @property
    def chain(self) -> int:
        """How many groups of four k of a step a 16-bit sum can hold: each adds two products, and the limit is 32767."""
        assert self.form is not None
        top = (
            128 if self.signed else max(self.entries) - min(self.entries) if self.form.table else 2**self.form.bits - 1
        )
        most = 32767 // (2 * 127 * top)
        return max(n for n in range(1, self.step // 4 + 1) if n <= most and self.step // 4 % n == 0)

    @property
    def middle(self) -> int:
        """The offset by which signed codes are below their levels."""
        assert self.form is not None
        return 128 - self.form.zero if self.form.bits == 8 else 0

    @property
    def units(self) -> float:
        """The factor that turns table entries into bytes: 1 if they are integers. Others are rounded to 8 bits, like
        activations, with the factor that gives the smallest error."""
        assert self.form is not None
        return _units(self.form.table)

    @property
    def factor(self) -> float:
        """The factor by which products multiply scales."""
        assert self.form is not None
        return self.form.factor / self.units

    @property
    def load(self) -> str:
        """The simd.h function that reads 16 scales, and the type that it takes."""
        assert self.form is not None
        kinds = {"f16": ("load_f16", "uint16_t"), "bf16": ("load_bf16", "uint16_t"), "f32": ("vload", "float")}
        name, kind = kinds[self.form.scale]
        return f"{name}((const {kind}*)"


@functools.cache
def _units(table: tuple[float, ...]) -> float:
    if all(level == int(level) for level in table):
        return 1.0
    wide = 127 / max(abs(level) for level in table)

    def error(units: float) -> float:
        return sum((level - round(level * units) / units) ** 2 for level in table)

    return min((wide * (1 - i / 1024) for i in range(128)), key=error)


def _span(form: BlockFormat) -> int:
    """Steps of a span: whole blocks; small blocks are combined until they fill a header of 64 bytes."""
    few = 1 if form.size > form.group else 4 if form.power else 1 if form.mins or form.zeros else 2
    return few * form.size // form.row_group


def reader_of(form: BlockFormat) -> BlockReader:
    """How products read a format."""
    base = form.bits if form.bits in (2, 4, 8) else 2 if form.bits == 3 else 4
    span = max(form.table, default=0) - min(form.table, default=0)
    dot = "dot_u8" if form.bits == 8 else "dot_table" if span * _units(form.table) > 127 else "dot_u4"
    return BlockReader(
        f"a product with {form.name} blocks", "cpp/layouts/blocks.cpp.jinja", _PIECES[base],
        dot, 0, form, base, _span(form), without_quads=Arithmetic.SHORT,
    )  # fmt: skip
