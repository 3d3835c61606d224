"""CachePolicy: which positions of a sequence the layers of a KV group still read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .places import CompressedPrompt, HeavyHitters


class CachePolicy(Protocol):
    """Which positions a group keeps. Blocks without kept positions are released while the request runs."""

    def kept(self, position: int) -> Sequence[range]:
        """The positions before `position` that the token there or a later one reads: ascending ranges with gaps between
        them.

        A position that is not kept is never kept again as `position` grows.
        """
        ...

    def most_blocks(self, length: int, block_size: int) -> int:
        """The most blocks that hold `kept(p)` and p itself, for any p below `length`; it never falls as `length`
        grows."""
        ...


@dataclass(frozen=True, slots=True)
class KeepAll(CachePolicy):
    """Every token reads all tokens before it."""

    def kept(self, position: int) -> Sequence[range]:
        return (range(position),) if position else ()

    def most_blocks(self, length: int, block_size: int) -> int:
        return -(-length // block_size)


@dataclass(frozen=True, slots=True)
class WithinStep(CachePolicy):
    """Tokens also read later tokens (bidirectional attention): the whole sequence must be in one step, and nothing is
    kept after it."""

    def kept(self, position: int) -> Sequence[range]:
        return ()

    def most_blocks(self, length: int, block_size: int) -> int:
        return -(-length // block_size)


@dataclass(frozen=True, slots=True)
class Window(CachePolicy):
    """A token reads the last `size` tokens, itself among them."""

    size: int

    def kept(self, position: int) -> Sequence[range]:
        first = max(position - self.size + 1, 0)
        return (range(first, position),) if first < position else ()

    def most_blocks(self, length: int, block_size: int) -> int:
        across = (self.size + block_size - 2) // block_size + 1  # if they begin in the last slot of a block
        return min(-(-length // block_size), across)


@dataclass(frozen=True, slots=True)
class Streaming(CachePolicy):
    """A token reads the first `sinks` tokens and the last `size`, with itself (StreamingLLM: Xiao et al. 2023)."""

    size: int
    sinks: int

    def kept(self, position: int) -> Sequence[range]:
        first = max(position - self.size + 1, 0)
        if first <= self.sinks:
            return (range(position),) if position else ()
        return tuple(part for part in (range(self.sinks), range(first, position)) if part)

    def most_blocks(self, length: int, block_size: int) -> int:
        sinks, across = -(-self.sinks // block_size), (self.size + block_size - 2) // block_size + 1
        return min(-(-length // block_size), sinks + across)


@dataclass(frozen=True, slots=True)
class Latest(CachePolicy):
    """A token reads only the recurrent state that the previous token left; each block holds one state.

    checkpoints: how many more states per sequence of a full batch are kept for the prefix cache, besides those in use.
    """

    checkpoints: int = 0

    def kept(self, position: int) -> Sequence[range]:
        return (range(position - 1, position),) if position else ()

    def most_blocks(self, length: int, block_size: int) -> int:
        return min(-(-length // block_size), 3)  # the state that is read, those after the last two blocks of a chunk


def _keeps_all(size: int) -> CachePolicy:
    return KeepAll()


def _within_step(size: int) -> CachePolicy:
    return WithinStep()


# The policies that an engine's program can name; each is made from the sizes in the KV group.
POLICIES: dict[str, Callable[..., CachePolicy]] = {
    "all": _keeps_all,
    "window": Window,
    "streaming": Streaming,
    "h2o": HeavyHitters,
    "snapkv": CompressedPrompt,
    "step": _within_step,
    "state": Latest,
}
EVICTING = ("streaming", "h2o", "snapkv")  # policies that evict tokens that the model would read: lossy; two sizes each


def kept_blocks(policy: CachePolicy, block_size: int, position: int) -> list[range]:
    """The indices, as ranges, of the blocks that hold the positions that a policy keeps at a position."""
    ranges: list[range] = []
    for kept in policy.kept(position):
        first, end = kept.start // block_size, -(-kept.stop // block_size)
        if ranges and first <= ranges[-1].stop:
            first = ranges.pop().start
        ranges.append(range(first, end))
    return ranges
