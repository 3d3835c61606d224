"""PinnedPrefixes: prefixes of prompts that stay in an engine's prefix cache for all requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ..executor.base import Executor
from ..kv.cache import KVCache
from ..kv.config import Demand
from ..kv.sequence import CachedSequence
from .blocks import KVBlocks, digest_of, in_reach
from .compiled import PromptsOfEngine

log = logging.getLogger("icc.engine")


@dataclass(frozen=True)
class PinnedPrefix:
    """The first `length` of `tokens`. content: gives the bytes of its blocks; None if they must be computed. numbers:
    the indices of these blocks in each group. source: its name in messages."""

    source: str
    tokens: tuple[int, ...]
    length: int
    numbers: Sequence[Sequence[int]] = ()
    content: Callable[[], memoryview] | None = None

    def sequence(self) -> CachedSequence:
        """A sequence of these tokens without salts, to look them up in the prefix cache."""
        return CachedSequence(tokens=list(self.tokens[: self.length]))


class PinnedPrefixes:
    """The prefixes that an engine was compiled with. longest: tokens of the longest sequence, for which room must be
    left."""

    def __init__(self, prefixes: Sequence[PinnedPrefix], blocks: KVBlocks | None, longest: int) -> None:
        self._prefixes, self._blocks, self._longest = list(prefixes), blocks, longest
        self._multiple = 1

    @classmethod
    def of(cls, compiled: PromptsOfEngine, executor: Executor) -> PinnedPrefixes:
        """The prefixes of an engine; with their stored blocks if those fit the cache of `executor`."""
        manifest, reach = compiled.manifest, in_reach(executor)
        blocks = None if reach is None else KVBlocks(digest_of(manifest), reach)
        usable = blocks is not None and compiled.fits(blocks.identity)
        found = [
            PinnedPrefix(
                one.source,
                tuple(one.tokens),
                one.length,
                one.numbers,
                partial(compiled.content, one) if usable and one.file else None,
            )
            for one in compiled.prompts
        ]
        return cls(found, blocks, manifest.limits.max_seq_len)

    def install(self, kv: KVCache) -> None:
        """Pin all prefixes in an empty cache, and write their stored blocks to it. A prefix without room is left out,
        with a warning."""
        self._multiple = kv.multiple
        for prefix in list(self._prefixes):
            sequence = prefix.sequence()
            if not kv.pinnable(sequence, prefix.length, Demand(self._longest)):
                log.warning("the KV cache has no room for compiled prompt %s: requests compute it", prefix.source)
                self._prefixes.remove(prefix)
                continue
            kv.pin(sequence, prefix.length)
            if prefix.content is not None and self._blocks is not None:
                self._blocks.adopt(kv, sequence, prefix.length, prefix.numbers, prefix.content())

    def missing(self, kv: KVCache) -> list[tuple[int, ...]]:
        """The token ids of the prefixes that are not in the cache and must be computed."""
        return [one.tokens[: one.length] for one in self._prefixes if kv.found(one.sequence(), one.length) is None]

    def common(self, tokens: Sequence[int]) -> int:
        """The length in tokens of the longest beginning that a prompt shares with a prefix, in whole blocks of every
        group."""
        return max((self._common(prefix, tokens) for prefix in self._prefixes), default=0)

    def _common(self, prefix: PinnedPrefix, tokens: Sequence[int]) -> int:
        size, length = self._multiple, min(prefix.length, len(tokens))
        if tuple(tokens[:length]) == prefix.tokens[:length]:
            return length // size * size
        at = 0
        while tuple(tokens[at : at + size]) == prefix.tokens[at : at + size]:
            at += size
        return at
