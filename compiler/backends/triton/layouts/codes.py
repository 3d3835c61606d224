"""What the kernels and cost models of the Triton backend ask of a layout of codes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from ....program.layout import MatrixLayout

WIDE_SLICE = 512  # of K, that a kernel for few rows in float32 takes at a time
VALUE_STEP = 128  # of K, that a kernel takes at a time which makes values of codes, or a group
Rows8 = Literal["", "int8", "fp8", "mxfp8"]  # of 8 bits, with scales of rows, or of 32 values (MXFP8); "": none


@dataclass(frozen=True)
class Unpacking:
    """What codes cost a product, as the tilings' estimates see it.

    name: of the layout, with what tilings depend on. group: values along K per scale; kernels step by groups.
    bits: of a code. scale_bytes: of memory per row and group beside the codes.
    decode_instructions, tile_instructions: per value and lane, in kernels for few rows and for many, as counted in
    disassembled kernels. decode_registers, tile_registers: that unpacking needs beside the sums. doubled: whether a
    code takes two fields, so that twice as many operands are alive. whole: whether tiles multiply values, scales and
    all, where `whole_groups` says so, so that no sum is taken up between steps. few: whether there is a kernel for few
    rows in float32.
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
        """Bytes of memory per value, scales and all."""
        return self.bits / 8 + self.scale_bytes / self.group

    def shared_bytes(self, k: int) -> int:
        """Bytes of shared memory for the codes of `k` values of a row."""
        return k * self.bits // 8 + 8


@dataclass(frozen=True)
class CodeGroups(MatrixLayout):
    """A matrix of codes that products take apart in registers, with the macros of its template.

    macros: the template that products and tables import; triton/layouts/values.py.jinja tells what it must have.
    """

    coded: ClassVar[bool] = True

    @property
    @abstractmethod
    def macros(self) -> str:
        """The template with the layout's macros."""

    @property
    @abstractmethod
    def unpacking(self) -> Unpacking:
        """What unpacking the codes costs."""

    @property
    def fields(self) -> int:
        """Codes in an element of 16 bits, for products that multiply codes on matrix units; 0 where none do."""
        return 0

    def rows8(self, level: int) -> Rows8:
        """What rows become that matrix units of a compute capability multiply with these codes as they are."""
        return ""

    def many_rows8(self, level: int) -> Rows8:
        """What rows may become instead of values of 16 bits where there are many, for codes that are taken apart."""
        return ""

    @property
    def fits_matrix_units(self) -> bool:
        """Whether the codes of a group are operands of matrix instructions."""
        return self.span >= 16 and self.span & (self.span - 1) == 0

    @property
    def as_values(self) -> bool:
        """Whether tiles multiply values of 16 bits, made step by step."""
        return False

    @property
    def span(self) -> int:
        """Elements of 16 bits that hold the codes of one row's group."""
        return self.group // self.fields if self.fields else 0

    def misfit(self, n: int, k: int) -> str:
        if n * k * self.unpacking.bits // 16 >= 2**31:
            return f"{n} x {k} codes of {self.unpacking.bits} bits need 64-bit addresses"
        return super().misfit(n, k)
