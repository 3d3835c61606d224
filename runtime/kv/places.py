"""Which place of its cache a token takes where tokens are given up one by one, whatever their position.

A place is a slot of the blocks of a sequence, in the order of its table. What is kept after an eviction moves to the
first places, of every head its own tokens; positions are in the keys (rotary embedding), so places need not tell them.
Kernels reckon with the same: `place` in codegen_templates/cpp/evict.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

UNLIMITED = 1 << 40  # tokens


@runtime_checkable
class Places(Protocol):
    """A CachePolicy whose tokens have places."""

    def place(self, position: int, prompt: int) -> int:
        """Where the token at `position` of a sequence goes that began with so many tokens of a prompt."""
        ...

    def until(self, position: int, prompt: int) -> int:
        """How many tokens from `position` on a step may have: after them comes an eviction."""
        ...

    def held(self, length: int, prompt: int) -> int:
        """The places that it needs blocks for when the last of `length` tokens is computed."""
        ...

    def most(self, length: int) -> int:
        """The most places that up to so many tokens ever take."""
        ...

    def kept(self, position: int) -> Sequence[range]:
        """The places that hold what is kept when `position` tokens are computed; places where CachePolicy has
        positions."""
        ...

    def most_blocks(self, length: int, block_size: int) -> int:
        """See CachePolicy."""
        return -(-self.most(length) // block_size)


@dataclass(frozen=True, slots=True)
class HeavyHitters(Places):
    """At most `budget` tokens: when there are so many, an eighth of them goes, those that got the least attention so
    far (H2O: Zhang et al. 2023; in bulk as ScissorHands: Liu et al. 2023), none of the `recent` last."""

    budget: int
    recent: int

    @property
    def kept_then(self) -> int:
        """How many stay when some go."""
        return self.budget - self.budget // 8

    def place(self, position: int, prompt: int) -> int:
        if position < self.budget:
            return position
        return self.kept_then + (position - self.budget) % (self.budget - self.kept_then)

    def until(self, position: int, prompt: int) -> int:
        return self.budget - self.place(position, prompt)

    def held(self, length: int, prompt: int) -> int:
        return self.most(length)

    def most(self, length: int) -> int:
        return min(length, self.budget)

    def kept(self, position: int) -> Sequence[range]:
        """All places that are used; heads differ in which positions they hold there."""
        return (range(self.place(position, 0)),) if position else ()


@dataclass(frozen=True, slots=True)
class CompressedPrompt(Places):
    """All of a prompt while it is read, then `budget` tokens of it: the last `recent`, and those that they gave the
    most attention (SnapKV: Li et al. 2024). All of the answer."""

    budget: int
    recent: int

    def place(self, position: int, prompt: int) -> int:
        if position < prompt or prompt <= self.budget:
            return position
        return self.budget + position - prompt

    def until(self, position: int, prompt: int) -> int:
        return prompt - position if position < prompt else UNLIMITED

    def held(self, length: int, prompt: int) -> int:
        return length if length <= prompt else self.place(length, prompt)

    def most(self, length: int) -> int:
        return length

    def kept(self, position: int) -> Sequence[range]:
        """All positions, as of a sequence that is all prompt: there can be no more."""
        return (range(position),) if position else ()
