"""KeptPrompts: beginnings of prompts that requests ask to be kept for a while, in the cache and on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..kv.cache import KVCache
from ..kv.config import Demand
from ..kv.sequence import CachedSequence
from .blocks import KVBlocks
from .store import PromptStore, StoredPrompt

_MOST = 4096  # beginnings at once
_SHARE = 0.5  # of the blocks of a cache, that may be pinned
_PATIENCE_S = 120.0  # that what is asked for may take until it is computed
_COPIED = 4 << 20  # bytes from disk that are put into the cache between two steps


@dataclass(eq=False)
class _Kept:
    """The first `length` tokens of a sequence, kept until `until`, which is `seconds` after they were used last.
    pinned: in which cache they are; asked: when they were last, or used."""

    sequence: CachedSequence
    length: int
    seconds: float
    until: float
    asked: float
    pinned: KVCache | None = None
    stored: bool = False


@dataclass(eq=False)
class _Arriving:
    """A prompt that is being read, and then copied block by block; `waiting` are called when it is there, or is not to
    be had."""

    sequence: CachedSequence
    waiting: list[Callable[[], None]]
    kv: KVCache | None = None
    found: StoredPrompt | None = None
    blocks: list[dict[int, int]] = field(default_factory=list[dict[int, int]])
    left: list[tuple[int, int, memoryview]] = field(default_factory=list[tuple[int, int, memoryview]])


class KeptPrompts:
    """All of an engine process; its methods are called between steps. cache: the one at work, which is another after a
    step that failed. longest: tokens of the longest sequence, for which room is left. blocks, store: None where the
    cache is out of reach, or nothing is kept on disk. clock: seconds."""

    def __init__(
        self,
        cache: Callable[[], KVCache],
        longest: int,
        blocks: KVBlocks | None = None,
        store: PromptStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache, self._longest, self._blocks, self._store, self._clock = cache, longest, blocks, store, clock
        self._kept: dict[bytes, _Kept] = {}
        self._arriving: dict[bytes, _Arriving] = {}

    @property
    def busy(self) -> bool:
        """Whether something is on its way."""
        return bool(self._arriving)

    @property
    def num_kept(self) -> int:
        """How many beginnings are pinned."""
        return sum(one.pinned is not None for one in self._kept.values())

    # -- what requests ask -------------------------------------------------------------------------------------------

    def keep(self, sequence: CachedSequence, length: int, seconds: float) -> None:
        """Keep the first `length` tokens, as many as are whole blocks, once they are computed, until they were not used
        for so long. The last token of a prompt is not kept, so that the same prompt finds what is."""
        length = min(length, sequence.num_tokens - 1) // self._cache().multiple * self._cache().multiple
        if not length or (len(self._kept) >= _MOST and self._key(sequence, length) not in self._kept):
            return
        key, now = self._key(sequence, length), self._clock()
        kept = self._kept.setdefault(key, _Kept(sequence, length, seconds, now + seconds, now))
        kept.until, kept.seconds, kept.asked = max(kept.until, now + seconds), max(kept.seconds, seconds), now

    def use(self, sequence: CachedSequence) -> None:
        """A prompt comes: what it begins with is kept on."""
        if not self._kept:
            return
        for key in self._keys(sequence):
            if (kept := self._kept.get(key)) is not None:
                kept.asked = self._clock()
                kept.until = max(kept.until, kept.asked + kept.seconds)
                if kept.stored and self._store is not None:
                    self._store.touch(key)

    def fetch(self, sequence: CachedSequence, then: Callable[[], None]) -> bool:
        """Have what is on disk of a prompt's beginning read, if it is more than the cache has; whether it is, and
        `then` is called when the prompt is to go on."""
        if self._store is None:
            return False
        keys, cache = self._keys(sequence), self._cache()
        number = self._store.find(keys)
        if number is None or (number + 1) * cache.multiple <= cache.cached_length(sequence):
            return False
        key = keys[number]
        if key in self._arriving:
            self._arriving[key].waiting.append(then)
            return True
        arriving = self._arriving[key] = _Arriving(sequence, [then])
        self._store.read(key, lambda found, content: self._read(key, arriving, found, content))
        return True

    # -- between steps -----------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Pin what is computed by now, go on with what comes from disk, and give up what is over."""
        if self._store is not None:
            self._store.finished()
        for key, arriving in list(self._arriving.items()):
            if arriving.found is not None and self._copy(arriving):
                self._arrived(key, arriving)
        if self._kept:
            self._pin()
            self._expire()

    def sweep(self) -> None:
        """Have the files removed that are kept no longer."""
        if self._store is not None:
            self._store.sweep()

    def _pin(self) -> None:
        cache = self._cache()
        for key, kept in self._kept.items():
            if kept.pinned is cache:
                continue
            kept.pinned = None  # in a cache that is gone
            found = cache.found(kept.sequence, kept.length)
            if found is None or not self._has_room(cache, kept):
                continue
            cache.pin(kept.sequence, kept.length)
            kept.pinned = cache
            if self._store is not None and self._blocks is not None and not kept.stored:
                self._save(key, kept, found)

    def _has_room(self, cache: KVCache, kept: _Kept) -> bool:
        """Whether it may be pinned, with those given up that were used longest ago."""

        def fits() -> bool:
            lent = [group.pool.num_blocks for group in cache.groups]
            pinned = [group.pool.num_blocks - group.num_lent for group in cache.groups]
            more = [group.prefixes.num_unpinned(kept.sequence, kept.length) for group in cache.groups]
            within = all(p + m <= n * _SHARE for p, m, n in zip(pinned, more, lent, strict=True))
            return within and cache.pinnable(kept.sequence, kept.length, Demand(self._longest))

        others = sorted((one for one in self._kept.values() if one.pinned is cache), key=lambda one: one.until)
        for other in others:
            if fits() or other.until >= kept.until:
                break
            cache.unpin(other.sequence, other.length)
            other.pinned, other.until = None, 0.0
        return fits()

    def _save(self, key: bytes, kept: _Kept, found: list[dict[int, int]]) -> None:
        """Write it to disk; until that is done its blocks have a pin more, so that nobody changes them."""
        assert self._store is not None and self._blocks is not None
        cache, kept.stored = self._cache(), True
        cache.pin(kept.sequence, kept.length)
        numbers = [sorted(held) for held in found]
        self._store.save(
            key,
            kept.length,
            numbers,
            list(self._blocks.read(found)),
            kept.seconds,
            lambda: self._cache() is cache and cache.found(kept.sequence, kept.length) == found,
            lambda: cache.unpin(kept.sequence, kept.length),
        )

    def _expire(self) -> None:
        now = self._clock()
        for key in [key for key, kept in self._kept.items() if self._is_over(kept, now)]:
            kept = self._kept.pop(key)
            if kept.pinned is (cache := self._cache()):
                cache.unpin(kept.sequence, kept.length)

    def _is_over(self, kept: _Kept, now: float) -> bool:
        return kept.until <= now or (kept.pinned is None and kept.asked + _PATIENCE_S <= now)

    # -- what comes from disk ----------------------------------------------------------------------------------------

    def _read(self, key: bytes, arriving: _Arriving, found: StoredPrompt | None, content: memoryview) -> None:
        """It is read: get blocks for it."""
        cache, blocks = self._cache(), self._blocks
        assert blocks is not None
        reserved = None
        if found is not None and blocks.nbytes(found.numbers) == found.nbytes:
            given = [set(numbers) for numbers in found.numbers]
            needed = [set(group.numbers(found.length)) for group in cache.groups]
            if all(map(set.issubset, needed, given)):
                reserved = cache.reserve(arriving.sequence, found.length)
        if found is None or reserved is None:
            self._go_on(key, arriving)
            return
        arriving.kv, arriving.found, arriving.blocks = cache, found, reserved
        at = 0
        for group, numbers in enumerate(found.numbers):
            for number in numbers:
                if number in reserved[group]:
                    arriving.left.append((group, reserved[group][number], content[at : at + blocks.sizes[group]]))
                at += blocks.sizes[group]

    def _copy(self, arriving: _Arriving) -> bool:
        """Copy some of it; whether all is there, or it is not wanted any more."""
        assert self._blocks is not None
        if arriving.kv is not self._cache():
            return True
        copied = 0
        while arriving.left and copied < _COPIED:
            group, block, content = arriving.left.pop()
            self._blocks.write(group, block, content)
            copied += len(content)
        return not arriving.left

    def _arrived(self, key: bytes, arriving: _Arriving) -> None:
        assert arriving.found is not None
        if arriving.kv is (cache := self._cache()):
            cache.settle(arriving.sequence, arriving.blocks, filled=True)
            self.keep(arriving.sequence, arriving.found.length, arriving.found.seconds)
            if (kept := self._kept.get(key)) is not None:
                kept.stored = True
        self._go_on(key, arriving)

    def _go_on(self, key: bytes, arriving: _Arriving) -> None:
        del self._arriving[key]
        for then in arriving.waiting:
            then()

    # -- keys --------------------------------------------------------------------------------------------------------

    def _keys(self, sequence: CachedSequence) -> Sequence[bytes]:
        """Keys of the whole blocks that a sequence begins with; one token is always left to be computed."""
        size = self._cache().multiple
        return [sequence.key(n, size).digest for n in range((sequence.num_tokens - 1) // size)]

    def _key(self, sequence: CachedSequence, length: int) -> bytes:
        size = self._cache().multiple
        return sequence.key(length // size - 1, size).digest
