"""The micro-kernels that products and attention call: their parameters, and which micro-kernels a program needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...render import render
from ..arithmetic import Arithmetic
from ..isa import Block, Isa
from ..layouts.codes import Reader
from ..layouts.dense import Tiles
from .attention import AttentionParams
from .base import KernelParams
from .linear import SCREENED_ROWS, DenseParams, LinearQParams, QuantParams, blocks_of, vector_arithmetic


@dataclass(frozen=True)
class DenseMicroParams:
    """A micro-kernel of values, `mr` rows x `nt` tiles, which prefetches `prefetch` bytes ahead in each tile. group:
    values along K that share a scale; 0 if there is one scale for all, or none."""

    name: str
    ctype: str
    mr: int
    nt: int
    prefetch: int
    template: str = Tiles.micro
    group: int = 0
    unroll: int = 4
    arithmetic: ClassVar[str] = "floats"
    zero: ClassVar[str] = ""


@dataclass(frozen=True)
class QuantMicroParams:
    """A micro-kernel of codes, `mr` rows x `nt` tiles; the `reader` of their layout says how they are read. Few float
    sums stay in registers."""

    name: str
    reader: Reader
    mr: int
    nt: int
    prefetch: int
    in_registers: bool
    arithmetic: Arithmetic = Arithmetic.QUADS
    by_element: bool = False

    @property
    def loads(self) -> int:
        """With `by_element`, how many loads of sixteen bytes bring all groups of four bytes of x that a line is
        multiplied with; 0 if there is one group, which is broadcast as without `by_element`."""
        fours = self.mr * len(self.reader.pieces)
        return -(-fours // 4) if self.by_element and fours > 1 else 0

    @property
    def template(self) -> str:
        """The template, relative to codegen_templates, by how products are summed."""
        return self.arithmetic.template

    @property
    def zero(self) -> str:
        """The zero point of all codes, in C++, if integer sums begin at minus the zero times the sum of x; else "".
        Sums with no start value (SHORT) or in tiles would need an extra instruction for it, as many as subtracting it
        later."""
        return self.reader.zero if self.arithmetic in (Arithmetic.QUADS, Arithmetic.MATRICES) else ""

    def begin(self, row: int) -> str:
        """The start value of the integer sums of a row of x, in C++."""
        if self.zero:
            return f"set1_quad((const int8_t*)(sums + {row}))"
        if self.arithmetic is Arithmetic.QUADS and self.reader.dot == "dot_u8":
            return f"begin_bytes(sums[{row}])"
        return "vi(0)"

    @property
    def ready(self) -> bool:
        """Whether lines of codes are bytes, which need no unpacking."""
        return self.reader.pieces == ("raw",)

    @property
    def staged(self) -> bool:
        """Whether codes are unpacked once for all rows: registers do not hold them while more than two rows pass."""
        return self.mr > 2

    @property
    def together(self) -> int:
        """Rows of x that are multiplied with a vector of codes while it is in registers; for long chains an even share
        of `mr`. The 16-bit sums of four rows take half of the registers."""
        return self.mr // -(-self.mr // 4) if self.arithmetic is Arithmetic.LONG_CHAINS else 4

    @property
    def line_k(self) -> int:
        """k positions in one 64-byte line of codes."""
        return self.reader.line_k


@dataclass(frozen=True)
class MicroTableParams:
    """The list of micro-kernels that gemm.h picks from."""

    kind: str
    name: str
    micros: tuple[DenseMicroParams | QuantMicroParams, ...]
    template: ClassVar[str] = "cpp/linear/micro_table.cpp.jinja"


def quant_micro(name: str, reader: Reader, block: Block, isa: Isa) -> QuantMicroParams:
    """The micro-kernel of a block on a level."""
    if block.matrix:
        few, arithmetic = False, Arithmetic.TILES if isa.tile_blocks else Arithmetic.MATRICES
    else:
        few, arithmetic = block.rows * block.tiles <= isa.float_sums, vector_arithmetic(reader, isa)
        if few and arithmetic is Arithmetic.LONG_CHAINS:  # with few rows the time goes into reading codes
            arithmetic = Arithmetic.QUADS
    return QuantMicroParams(name, reader, block.rows, block.tiles, block.prefetch, few, arithmetic, isa.by_element)


def micro_sources(kernels: list[KernelParams[Any]], isa: Isa) -> list[str]:
    """The micro-kernels that the kernels call, each once."""
    parts: list[str] = []
    dense = {k.layout.format.name: k.layout for k in kernels if isinstance(k, DenseParams)}
    for fmt, layout in sorted(dense.items()):
        kind, group = layout.micro, layout.scale_group
        micros = tuple(
            DenseMicroParams(f"dense_{fmt}_{b.name}", layout.ctype, b.rows, b.tiles, b.prefetch, kind, group)
            for b in isa.dense_blocks
        )
        table = MicroTableParams("DenseMicro", layout.table, micros)
        parts += [render(m.template, m) for m in micros] + [render(table.template, table)]
    products = [k for k in kernels if isinstance(k, QuantParams)]
    # if there are several groups, the smallest decides: it costs the most besides products
    by_group = sorted(products, key=lambda k: -k.layout.group)
    tables = {k.layout.table: (k.layout.reader, blocks_of(k.layout.reader, isa, k.layout.group)) for k in by_group}
    for k in products:
        if isinstance(k, LinearQParams) and k.step.screened and (screener := k.layout.screener):
            blocks = blocks_of(screener, isa, k.layout.group)
            tables[k.screen_table] = screener, tuple(b for b in blocks if b.rows <= SCREENED_ROWS)
    for name, (reader, blocks) in sorted(tables.items()):
        quants = tuple(quant_micro(f"{name.lower()}_{b.name}", reader, b, isa) for b in blocks)
        table = MicroTableParams("QuantMicro", name, quants)
        parts += [render(m.template, m) for m in quants] + [render(table.template, table)]
    attention = dict.fromkeys(m for k in kernels if isinstance(k, AttentionParams) for m in k.micros())
    return parts + [render(m.template, m) for m in attention]
