"""The interface of a layout of codes for the kernels and cost models of the Triton backend."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from ....program.layout import MatrixLayout

WIDE_SLICE = 512  # values of K that a kernel for few rows in float32 reads at a time
VALUE_STEP = 128  # values of K that a kernel which converts codes to values reads at a time, or a group
Rows8 = Literal["", "int8", "fp8", "mxfp8"]  # 8-bit rows, with a scale per row, or per 32 values (MXFP8)


@dataclass(frozen=True)
class Unpacking:
    """The cost of codes in a product, for the estimates of tilings.

    name: the layout, with the properties that tilings depend on. group: values along K per scale; kernels step by
    groups. bits: bits of a code. scale_bytes: bytes of memory per row and group beside the codes. decode_instructions,
    tile_instructions: per value and lane, in kernels for few rows and for many, as counted in disassembled kernels.
    decode_registers, tile_registers: registers that unpacking needs beside the sums. doubled: whether a code takes two
    fields, so that twice as many operands are live. whole: whether tiles multiply scaled values if `whole_groups`
    allows it, so that sums need no scaling between steps. few: whether there is a kernel for few rows in float32.
    """

    name: str
    group: int
    bits: int
    scale_bytes: int
    decode_instructions: float
    tile_instructions: float
    decode_registers: int = 0
    tile_registers: int = 0
    doubled: bool = False
    whole: bool = False
    few: bool = False

    @property
    def value_bytes(self) -> float:
        """Bytes of memory per value, scales included."""
        return self.bits / 8 + self.scale_bytes / self.group

    def shared_bytes(self, k: int) -> int:
        """Bytes of shared memory for the codes of `k` values of a row."""
        return k * self.bits // 8 + 8


@dataclass(frozen=True)
class CodeGroups(MatrixLayout):
    """A matrix of codes that products unpack in registers, with the macros of its template.

    macros: the template that products and tables import; triton/layouts/values.py.jinja documents the macros that it
    must define.
    """

    coded: ClassVar[bool] = True

    @property
    @abstractmethod
    def macros(self) -> str:
        """The template with the layout's macros."""

    @property
    @abstractmethod
    def unpacking(self) -> Unpacking:
        """The cost of unpacking the codes."""

    @property
    def fields(self) -> int:
        """Codes in an element of 16 bits, for products that multiply codes on matrix units; 0 if no product does."""
        return 0

    def rows8(self, level: int) -> Rows8:
        """The 8-bit type of rows that matrix units of a compute capability multiply directly with these codes; "" for
        none."""
        return ""

    def many_rows8(self, level: int) -> Rows8:
        """The 8-bit type that many rows may be converted to instead of 16-bit values, for codes that are unpacked; ""
        for none."""
        return ""

    @property
    def fits_matrix_units(self) -> bool:
        """Whether the codes of a group can be operands of matrix instructions."""
        return self.span >= 16 and self.span & (self.span - 1) == 0

    @property
    def as_values(self) -> bool:
        """Whether tiles multiply values of 16 bits that codes are converted to step by step."""
        return False

    @property
    def span(self) -> int:
        """Elements of 16 bits that hold the codes of one row's group."""
        return self.group // self.fields if self.fields else 0

    def misfit(self, n: int, k: int) -> str:
        if n * k * self.unpacking.bits // 16 >= 2**31:
            return f"{n} x {k} codes of {self.unpacking.bits} bits need 64-bit addresses"
        return super().misfit(n, k)
