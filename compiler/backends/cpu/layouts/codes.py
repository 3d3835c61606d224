"""The interface of a CPU layout of codes: tiles of 16 rows that products with int8 rows read."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from ....program.layout import MatrixLayout
from ..arithmetic import Arithmetic
from .elements import round_up
from .tiles import HEADER, TILE


@dataclass(frozen=True)
class Reader:
    """How a micro-kernel reads the lines of a layout; micro_quant.cpp.jinja takes its parameters from here.

    title: the name of the product in the kernel's comment. macros: the template with the macros that
    cpp/layouts/header.cpp.jinja lists. pieces: the variables that the codes of a line are unpacked into, four k of 16
    rows each. dot: the function of simd.h that multiplies a piece with activations. header: bytes of a group before its
    lines. without_quads: the arithmetic if no instruction sums the products of four bytes (never PAIRS for a screened
    head, which packs its rows once for both of its lists of micro-kernels). planes: for LONG_CHAINS the lines of
    nibbles that make up the codes: the names of the pointers to them, and the weight of a nibble there.
    """

    title: str
    macros: str
    pieces: tuple[str, ...]
    dot: str
    header: int = HEADER
    without_quads: Arithmetic = field(default=Arithmetic.QUADS, kw_only=True)
    planes: tuple[tuple[str, int], ...] = field(default=(("w", 1),), kw_only=True)

    @property
    def line_k(self) -> int:
        """k positions in one 64-byte line of codes."""
        return 4 * len(self.pieces)

    @property
    def zero(self) -> str:
        """The offset by which all codes exceed their levels, as `dot` sees them, in C++; "" if rows have their own
        zeros."""
        return ""


@dataclass(frozen=True)
class CodeTiles(MatrixLayout):
    """Tiles that follow one another, each with a header and lines of codes per group of k.

    Its kernels use the macros of `reader`, and those of `screener` if a head may first read only a part of the codes.
    """

    coded: ClassVar[bool] = True
    int8_rows: ClassVar[bool] = True
    tiled: ClassVar[bool] = True

    @property
    @abstractmethod
    def label(self) -> str:
        """The name of the tiles in the comments of kernels, such as 4-bit."""

    @property
    @abstractmethod
    def reader(self) -> Reader:
        """How products read the codes."""

    @property
    def group(self) -> int:
        """Values along K between two scales of the rows."""
        return self.format.row_group

    @property
    def macros(self) -> str:
        """The template with the macros that tables are read with, too."""
        return self.reader.macros

    @property
    def screener(self) -> Reader | None:
        """How products that screen read the codes; None if no product screens."""
        return None

    @property
    def table(self) -> str:
        """The list of micro-kernels, by its C++ name."""
        return f"QUANT_{self.name.upper()}"

    @abstractmethod
    def tile_bytes(self, k: int) -> int:
        """Bytes from one tile to the next."""

    def low_bytes(self, k: int) -> int:
        """Bytes of a tile in a second plane behind all tiles; 0 if the layout has one plane."""
        return 0

    def matrix_nbytes(self, n: int, k: int) -> int:
        return round_up(n, TILE) // TILE * (self.tile_bytes(k) + self.low_bytes(k))
