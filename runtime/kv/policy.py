"""CachePolicy: which positions of a sequence the layers of a KV group go on reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .places import CompressedPrompt, HeavyHitters


class CachePolicy(Protocol):
    """What a group keeps; blocks that hold nothing of it are given back while the request runs."""

    def kept(self, position: int) -> Sequence[range]:
        """The positions before `position` that its token or a later one reads: ranges that do not touch, ascending.

        A position that is not among them never is again as `position` grows.
        """
        ...

    def most_blocks(self, length: int, block_size: int) -> int:
        """The most blocks that hold `kept(p)` and p itself, for any p below `length`; never fewer for a larger one."""
        ...


@dataclass(frozen=True, slots=True)
class KeepAll(CachePolicy):
    """Every token reads all before it."""

    def kept(self, position: int) -> Sequence[range]:
        return (range(position),) if position else ()

    def most_blocks(self, length: int, block_size: int) -> int:
        return -(-length // block_size)


@dataclass(frozen=True, slots=True)
class WithinStep(CachePolicy):
    """Tokens read later ones too: all of a sequence must be in one step, and nothing is kept after it."""

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
        across = (self.size + block_size - 2) // block_size + 1  # that begin in the last slot of a block
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
    """A token reads only what the one before it left behind: a recurrent state, of which each block holds one.

    checkpoints: how many states per sequence of a full batch there is room for beside those in use, so that the prefix
    cache finds them.
    """

    checkpoints: int = 0

    def kept(self, position: int) -> Sequence[range]:
        return (range(position - 1, position),) if position else ()

    def most_blocks(self, length: int, block_size: int) -> int:
        return min(-(-length // block_size), 3)  # what is read, and what the last two blocks of a chunk are left with


def _keeps_all(size: int) -> CachePolicy:
    return KeepAll()


def _within_step(size: int) -> CachePolicy:
    return WithinStep()


# What an engine's program can ask for, by name; made of the sizes that stand beside it.
POLICIES: dict[str, Callable[..., CachePolicy]] = {
    "all": _keeps_all,
    "window": Window,
    "streaming": Streaming,
    "h2o": HeavyHitters,
    "snapkv": CompressedPrompt,
    "step": _within_step,
    "state": Latest,
}
EVICTING = ("streaming", "h2o", "snapkv")  # those that give up what the model would read: lossy, of two sizes each


def kept_blocks(policy: CachePolicy, block_size: int, position: int) -> list[range]:
    """The numbers of the blocks that hold what a policy keeps at a position."""
    ranges: list[range] = []
    for kept in policy.kept(position):
        first, end = kept.start // block_size, -(-kept.stop // block_size)
        if ranges and first <= ranges[-1].stop:
            first = ranges.pop().start
        ranges.append(range(first, end))
    return ranges
