"""How much of a KV group there is, and how much a request may need of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .policy import CachePolicy, KeepAll, Latest


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """How much of a KV group there is: blocks of so many tokens, and what its layers keep of a sequence.

    host_blocks: blocks of host memory for the KV of preempted requests; with none, it is computed again.
    """

    num_blocks: int
    block_size: int
    host_blocks: int = 0
    policy: CachePolicy = field(default_factory=KeepAll)

    @property
    def holds_states(self) -> bool:
        """Whether a block holds one state, and not something of each token."""
        return isinstance(self.policy, Latest)

    def __post_init__(self) -> None:
        assert self.num_blocks >= 1 and self.block_size >= 1 and self.host_blocks >= 0, self


class Demand(NamedTuple):
    """The most that a request needs at once: `width` sequences of `length` tokens, of which they share the first
    `shared`."""

    length: int
    shared: int = 0
    width: int = 1
