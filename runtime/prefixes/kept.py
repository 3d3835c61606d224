"""KeptPrompts: prefixes of prompts that requests ask to keep for a while, in the cache and on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..kv.cache import KVCache
from ..kv.config import Demand
from ..kv.sequence import CachedSequence
from .blocks import KVBlocks
from .store import PromptStore, StoredPrompt

_MOST = 4096  # kept prefixes at once
_SHARE = 0.5  # share of a cache's blocks that may be pinned
_PATIENCE_S = 120.0  # seconds that a requested prefix may take until it is computed
_COPIED = 4 << 20  # bytes from disk that are copied to the cache between two steps


@dataclass(eq=False)
class _Kept:
    """The first `length` tokens of a sequence, kept until `until`, which is `seconds` after their last use. pinned: the
    cache in which they are pinned, None if they are not. asked: when they were last requested or used."""

    sequence: CachedSequence
    length: int
    seconds: float
    until: float
    asked: float
    pinned: KVCache | None = None
    stored: bool = False


@dataclass(eq=False)
class _Arriving:
    """A prompt that is read from disk and then copied block by block. waiting: called when it is in the cache, or when
    this failed."""

    sequence: CachedSequence
    waiting: list[Callable[[], None]]
    kv: KVCache | None = None
    found: StoredPrompt | None = None
    blocks: list[dict[int, int]] = field(default_factory=list[dict[int, int]])
    left: list[tuple[int, int, memoryview]] = field(default_factory=list[tuple[int, int, memoryview]])


class KeptPrompts:
    """All kept prefixes of an engine process; its methods are called between steps. cache: gives the current cache,
    which is replaced after a failed step. longest: tokens of the longest sequence, for which room must be left. blocks:
    None if this process cannot access the cache. store: None if nothing is kept on disk. clock: gives seconds."""

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
        """Whether a prompt is being read or copied from disk."""
        return bool(self._arriving)

    @property
    def num_kept(self) -> int:
        """How many prefixes are pinned."""
        return sum(one.pinned is not None for one in self._kept.values())

    # -- what requests ask -------------------------------------------------------------------------------------------

    def keep(self, sequence: CachedSequence, length: int, seconds: float) -> None:
        """Keep the first `length` tokens, rounded down to whole blocks, when they are computed, until they have not
        been used for `seconds`. A prompt's last token is not kept, because the same prompt must compute at least one
        token."""
        length = min(length, sequence.num_tokens - 1) // self._cache().multiple * self._cache().multiple
        if not length or (len(self._kept) >= _MOST and self._key(sequence, length) not in self._kept):
            return
        key, now = self._key(sequence, length), self._clock()
        kept = self._kept.setdefault(key, _Kept(sequence, length, seconds, now + seconds, now))
        kept.until, kept.seconds, kept.asked = max(kept.until, now + seconds), max(kept.seconds, seconds), now

    def use(self, sequence: CachedSequence) -> None:
        """A prompt arrived: extend the time of the kept prefixes that it begins with."""
        if not self._kept:
            return
        for key in self._keys(sequence):
            if (kept := self._kept.get(key)) is not None:
                kept.asked = self._clock()
                kept.until = max(kept.until, kept.asked + kept.seconds)
                if kept.stored and self._store is not None:
                    self._store.touch(key)

    def fetch(self, sequence: CachedSequence, then: Callable[[], None]) -> bool:
        """Start to read a stored prefix of a prompt from disk, if it is longer than the cached one. True if so; `then`
        is called when the prompt may continue."""
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
        """Pin prefixes that are computed by now, continue copying from disk, and drop expired prefixes."""
        if self._store is not None:
            self._store.finished()
        for key, arriving in list(self._arriving.items()):
            if arriving.found is not None and self._copy(arriving):
                self._arrived(key, arriving)
        if self._kept:
            self._pin()
            self._expire()

    def sweep(self) -> None:
        """Remove expired files."""
        if self._store is not None:
            self._store.sweep()

    def _pin(self) -> None:
        cache = self._cache()
        for key, kept in self._kept.items():
            if kept.pinned is cache:
                continue
            kept.pinned = None  # its cache no longer exists
            found = cache.found(kept.sequence, kept.length)
            if found is None or not self._has_room(cache, kept):
                continue
            cache.pin(kept.sequence, kept.length)
            kept.pinned = cache
            if self._store is not None and self._blocks is not None and not kept.stored:
                self._save(key, kept, found)

    def _has_room(self, cache: KVCache, kept: _Kept) -> bool:
        """Whether a prefix may be pinned; the ones that expire soonest are unpinned if needed."""

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
        """Write a prefix to disk; until that is done its blocks are pinned once more, so that they do not change."""
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
        """Reserve blocks for a prompt that was read from disk."""
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
        """Copy a part of a prompt to the cache; True if all of it is copied, or if its cache no longer exists."""
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
        """The keys of the whole blocks at the beginning of a sequence; at least one token is left to compute."""
        size = self._cache().multiple
        return [sequence.key(n, size).digest for n in range((sequence.num_tokens - 1) // size)]

    def _key(self, sequence: CachedSequence, length: int) -> bytes:
        size = self._cache().multiple
        return sequence.key(length // size - 1, size).digest
