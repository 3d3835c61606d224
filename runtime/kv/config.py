"""The capacity of a KV group, and the demand of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .policy import CachePolicy, KeepAll, Latest


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """The capacity of a KV group: `num_blocks` blocks of `block_size` tokens; policy: which tokens of a sequence are
    kept.

    host_blocks: blocks of host memory for the KV of preempted requests; with 0, their KV is computed again.
    """

    num_blocks: int
    block_size: int
    host_blocks: int = 0
    policy: CachePolicy = field(default_factory=KeepAll)

    @property
    def holds_states(self) -> bool:
        """Whether a block holds one recurrent state, not KV of each token."""
        return isinstance(self.policy, Latest)

    def __post_init__(self) -> None:
        assert self.num_blocks >= 1 and self.block_size >= 1 and self.host_blocks >= 0, self


class Demand(NamedTuple):
    """The most that a request needs at once: `width` sequences of `length` tokens, which share their first `shared`
    tokens."""

    length: int
    shared: int = 0
    width: int = 1
