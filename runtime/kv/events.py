"""KVEvents: what became findable in the prefix caches and what ceased to be, as values, in the order of its coming."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .prefix_cache import BlockKey


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Full blocks of a group that follow one another can be found.

    group: its number in `KVCache.groups`. parent: the key of the block before them, None at a beginning. tokens: all of
    them, equally many per key. salt, own_salt: see CachedSequence; own_salt is b"" before the sequence comes apart.
    """

    group: int
    keys: tuple[BlockKey, ...]
    parent: BlockKey | None
    tokens: tuple[int, ...]
    salt: bytes = b""
    own_salt: bytes = b""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks of a group cannot be found any more."""

    group: int
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing can be found any more, in any group."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass
class KVEvents:
    """Collects events until they are taken; neighbours that belong together become one."""

    _events: list[KVEvent] = field(default_factory=list[KVEvent])

    def stored(self, event: BlockStored) -> None:
        """Blocks can be found from now on."""
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
        """A block cannot be found any more."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group == group:
            self._events[-1] = BlockRemoved(group, (*last.keys, key))
        else:
            self._events.append(BlockRemoved(group, (key,)))

    def cleared(self) -> None:
        """The caches are empty: what was not taken yet is of no use."""
        self._events = [AllBlocksCleared()]

    def take(self) -> Sequence[KVEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events
