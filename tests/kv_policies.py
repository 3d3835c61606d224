"""Cache policies that icc does not have, which show what a new kind of group must define."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sinks:
    """Keeps the first tokens and a window of the last ones, like StreamingLLM (Xiao et al. 2023)."""

    sinks: int
    size: int

    def kept(self, position: int) -> Sequence[range]:
        first = max(position - self.size + 1, 0)
        if first <= self.sinks:
            return (range(position),) if position else ()
        return tuple(part for part in (range(self.sinks), range(first, position)) if part)

    def most_blocks(self, length: int, block_size: int) -> int:
        sinks, across = -(-self.sinks // block_size), (self.size + block_size - 2) // block_size + 1
        return min(-(-length // block_size), sinks + across)


@dataclass(frozen=True)
class Chunks:
    """A token attends to its own chunk only, as in Llama 4's local layers; all blocks are freed when a chunk ends."""

    size: int

    def kept(self, position: int) -> Sequence[range]:
        first = position // self.size * self.size
        return (range(first, position),) if first < position else ()

    def most_blocks(self, length: int, block_size: int) -> int:
        across = (self.size + block_size - 2) // block_size + 1
        return min(-(-length // block_size), across)
