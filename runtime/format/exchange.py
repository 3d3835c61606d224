"""The memory through which ranks on GPUs exchange values: one area per rank, which all ranks can access.

An area contains one word per rank and program, in which that rank signals its turn; then one word per program, with the
program's own last turn; then two buffers per program for pieces of values, which are used alternately. A program is
here an instance of a kernel (Triton's term).
"""

from __future__ import annotations

from typing import NamedTuple

MAX_RANKS = 8  # GPUs of one machine, each of which can access the memory of all others
GONE = 1 << 62  # written in place of a turn, so that no program waits for that rank any more


class ExchangeArea(NamedTuple):
    """The sizes of an area. programs: the most programs of a launch. piece: the most float32 values of a program's
    piece."""

    programs: int = 64
    piece: int = 4096

    @property
    def turns_at(self) -> int:
        """The byte offset of the programs' own turns; before it are the words in which ranks signal each other."""
        return MAX_RANKS * self.programs * 8

    @property
    def data_at(self) -> int:
        """The byte offset of the pieces."""
        return self.turns_at + self.programs * 8

    @property
    def nbytes(self) -> int:
        """The size of an area in bytes."""
        return self.data_at + 2 * self.programs * self.piece * 4


EXCHANGE = ExchangeArea()
