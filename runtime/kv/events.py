"""KVEvents: which blocks were added to and removed from the prefix caches, as values, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .prefix_cache import BlockKey


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive full blocks of a group were added to its prefix cache.

    group: its index in `KVCache.groups`. parent: the key of the block before them, None at the beginning of a sequence.
    tokens: those of all blocks, the same number per key. salt, own_salt: see CachedSequence; own_salt is b"" before
    position `own_from`.
    """

    group: int
    keys: tuple[BlockKey, ...]
    parent: BlockKey | None
    tokens: tuple[int, ...]
    salt: bytes = b""
    own_salt: bytes = b""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks of a group were removed from its prefix cache."""

    group: int
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix caches of all groups are empty."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass
class KVEvents:
    """Collects events until they are taken; consecutive events that fit together are merged."""

    _events: list[KVEvent] = field(default_factory=list[KVEvent])

    def stored(self, event: BlockStored) -> None:
        """Add an event, or merge it with the last one."""
        last = self._events[-1] if self._events else None
        same = isinstance(last, BlockStored) and (last.group, last.salt, last.own_salt) == (
            event.group, event.salt, event.own_salt,
        )  # fmt: skip
        if isinstance(last, BlockStored) and same and event.parent == last.keys[-1]:
            joined = last.keys + event.keys, last.parent, last.tokens + event.tokens
            self._events[-1] = BlockStored(event.group, *joined, event.salt, event.own_salt)
        else:
            self._events.append(event)

    def removed(self, group: int, key: BlockKey) -> None:
        """Record that a block was removed."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group == group:
            self._events[-1] = BlockRemoved(group, (*last.keys, key))
        else:
            self._events.append(BlockRemoved(group, (key,)))

    def cleared(self) -> None:
        """Record that the caches are empty; events that were not taken yet are dropped."""
        self._events = [AllBlocksCleared()]

    def take(self) -> Sequence[KVEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events
