"""PrefixCache: maps token prefixes to the blocks that hold their KV. Full blocks only, found by a hash chain."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, KeysView, Sequence
from typing import NamedTuple


class BlockKey(NamedTuple):
    """The identity of a full block's content: digest of (salts, all tokens up to and including the block)."""

    digest: bytes


def root_key(salt: bytes = b"") -> BlockKey:
    """The key before the first block. Requests share blocks only if their salts are equal."""
    return BlockKey(hashlib.blake2b(salt, digest_size=32, person=b"icc-kv-root").digest())


def apart_key(parent: BlockKey, salt: bytes, place: int) -> BlockKey:
    """A key that replaces `parent` for requests whose next blocks are shared only if these salts are equal and take
    effect at the same place in the next block."""
    content = parent.digest + place.to_bytes(8, "little") + salt
    return BlockKey(hashlib.blake2b(content, digest_size=32, person=b"icc-kv-apart").digest())


def child_key(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """The key of the block that follows `parent` and holds exactly `token_ids`.

    Fixed-width integers after a fixed-width digest: two different chains never hash the same bytes.
    """
    content = parent.digest + array("q", token_ids).tobytes()
    return BlockKey(hashlib.blake2b(content, digest_size=32, person=b"icc-kv-block").digest())


class PrefixCache:
    """A one-to-one map between keys and blocks. It owns no blocks: the pool reports evictions."""

    def __init__(self) -> None:
        self.on_forget: Callable[[BlockKey], None] | None = None  # called with each key that is removed
        self._block_of: dict[BlockKey, int] = {}
        self._key_of: dict[int, BlockKey] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def find(self, key: BlockKey) -> int | None:
        """The block with that content; None if it is not cached."""
        return self._block_of.get(key)

    def holds(self, block: int) -> bool:
        """Whether the block is in the cache."""
        return block in self._key_of

    @property
    def blocks(self) -> KeysView[int]:
        """All blocks in the cache."""
        return self._key_of.keys()

    def can_publish(self, key: BlockKey, block: int) -> bool:
        """Whether the block may be added: not if the content is cached already (the first block that held it stays) or
        if the block has a key."""
        return key not in self._block_of and block not in self._key_of

    def publish(self, key: BlockKey, block: int) -> None:
        """Add a full, computed block to the cache. Requires `can_publish`."""
        assert self.can_publish(key, block), (key, block)
        self._block_of[key] = block
        self._key_of[block] = key

    def forget(self, block: int) -> None:
        """Remove the block from the cache, if it is there."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
            if self.on_forget is not None:
                self.on_forget(key)

    def check(self) -> None:
        """Assert that both directions of the map agree."""
        assert len(self._key_of) == len(self._block_of)
        assert all(self._key_of.get(block) is key for key, block in self._block_of.items())
