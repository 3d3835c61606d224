"""The roofline (Williams, Waterman and Patterson 2009): the least time of work, by its bytes and its FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Roofline:
    """bandwidth: bytes per second that memory gives. rate: FLOPs (or operations of 8 bits) per second; without it,
    arithmetic takes no time. Both above 0."""

    bandwidth: float
    rate: float = inf

    def memory_seconds(self, nbytes: float) -> float:
        """Seconds until so many bytes are read or written."""
        return nbytes / self.bandwidth

    def arithmetic_seconds(self, flops: float) -> float:
        """Seconds that so many FLOPs take."""
        return flops / self.rate

    def seconds(self, nbytes: float, flops: float) -> float:
        """The least time of both, which run side by side: the larger."""
        return max(self.memory_seconds(nbytes), self.arithmetic_seconds(flops))

    def among(self, parts: int) -> Roofline:
        """What each of so many equal parts of the machine has, such as one multiprocessor."""
        return Roofline(self.bandwidth / parts, self.rate / parts)

    def attainable(self, intensity: float) -> float:
        """FLOPs per second at most of work that does so many FLOPs per byte."""
        return min(self.bandwidth * intensity, self.rate)

    @property
    def ridge(self) -> float:
        """FLOPs per byte from which on arithmetic is the limit."""
        return self.rate / self.bandwidth
