"""The memory through which ranks on GPUs give each other pieces of values: an area per rank, which all of them see.

An area has a word for each rank and program by which that rank tells of its turns, then a word for each program with
its own last turn, then two places for each program's pieces, which take turns.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_RANKS = 8  # on GPUs: those of one machine, each of which reaches the memory of all others
GONE = 1 << 62  # told in the place of a turn, by whom nobody need wait for any more


class ExchangeArea(NamedTuple):
    """Sizes of an area. programs: of a launch, at most. piece: float32 of a program's piece, at most."""

    programs: int = 64
    piece: int = 4096

    @property
    def turns_at(self) -> int:
        """The byte at which the programs' own turns begin; before it lie the words by which ranks signal each other."""
        return MAX_RANKS * self.programs * 8

    @property
    def data_at(self) -> int:
        """Byte where the pieces begin."""
        return self.turns_at + self.programs * 8

    @property
    def nbytes(self) -> int:
        """Bytes of an area."""
        return self.data_at + 2 * self.programs * self.piece * 4


EXCHANGE = ExchangeArea()
