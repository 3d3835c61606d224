"""The place in the cache of each token, for policies that evict single tokens at any position.

A place is a slot in the blocks of a sequence, in the order of its table. The tokens that are kept after an eviction
move to the first places, for every head its own tokens. Positions are part of the keys (rotary embedding), so places
need not keep their order. Kernels compute the same places: `place` in codegen_templates/cpp/evict.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

UNLIMITED = 1 << 40  # tokens


@runtime_checkable
class Places(Protocol):
    """A CachePolicy that evicts single tokens, so that a token's place is not its position."""

    def place(self, position: int, prompt: int) -> int:
        """The place of the token at `position`, in a sequence whose prompt has `prompt` tokens."""
        ...

    def until(self, position: int, prompt: int) -> int:
        """How many tokens from `position` on a step may compute before an eviction is due."""
        ...

    def held(self, length: int, prompt: int) -> int:
        """How many places a sequence needs blocks for when the last of `length` tokens is computed."""
        ...

    def most(self, length: int) -> int:
        """The most places that a sequence of up to `length` tokens ever takes."""
        ...

    def kept(self, position: int) -> Sequence[range]:
        """The places of the tokens that are kept when `position` tokens are computed (CachePolicy returns positions
        here)."""
        ...

    def most_blocks(self, length: int, block_size: int) -> int:
        """See CachePolicy."""
        return -(-self.most(length) // block_size)


@dataclass(frozen=True, slots=True)
class HeavyHitters(Places):
    """Keep at most `budget` tokens. When there are so many, an eighth of them is evicted: those that received the least
    attention so far (H2O: Zhang et al. 2023; in bulk as ScissorHands: Liu et al. 2023), but none of the last `recent`
    tokens."""

    budget: int
    recent: int

    @property
    def kept_then(self) -> int:
        """How many tokens stay after an eviction."""
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
        """All places in use; each head may hold other positions in them."""
        return (range(self.place(position, 0)),) if position else ()


@dataclass(frozen=True, slots=True)
class CompressedPrompt(Places):
    """Keep all of a prompt while it is read, then `budget` tokens of it: the last `recent`, and those to which these
    paid the most attention (SnapKV: Li et al. 2024). Keep all of the answer."""

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
        """All positions, as if the whole sequence was prompt: an upper bound."""
        return (range(position),) if position else ()
