"""The roofline model (Williams, Waterman and Patterson 2009): the least time of work, from its bytes and its FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Roofline:
    """A machine. bandwidth: of its memory, bytes per second. rate: FLOPs (or 8-bit operations) per second; by default
    arithmetic takes no time. Both above 0."""

    bandwidth: float
    rate: float = inf

    def memory_seconds(self, nbytes: float) -> float:
        """How many seconds it takes to read or write `nbytes` bytes."""
        return nbytes / self.bandwidth

    def arithmetic_seconds(self, flops: float) -> float:
        """How many seconds `flops` FLOPs take."""
        return flops / self.rate

    def seconds(self, nbytes: float, flops: float) -> float:
        """The least time in seconds if memory and arithmetic overlap: the larger of the two times."""
        return max(self.memory_seconds(nbytes), self.arithmetic_seconds(flops))

    def among(self, parts: int) -> Roofline:
        """The roofline of one of `parts` equal parts of the machine, such as a multiprocessor."""
        return Roofline(self.bandwidth / parts, self.rate / parts)

    def attainable(self, intensity: float) -> float:
        """The most FLOPs per second of work that does `intensity` FLOPs per byte."""
        return min(self.bandwidth * intensity, self.rate)

    @property
    def ridge(self) -> float:
        """The FLOPs per byte above which arithmetic is the limit."""
        return self.rate / self.bandwidth
