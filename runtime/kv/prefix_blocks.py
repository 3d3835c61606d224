"""PrefixBlocks: the blocks of a KV group that hold prefixes of sequences: lookup, pins, and blocks filled from
outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from .block_pool import BlockPool
from .events import BlockStored, KVEvents
from .prefix_cache import BlockKey, PrefixCache
from .sequence import CachedSequence


class PrefixBlocks:
    """The blocks of a group that hold the first tokens of sequences, whichever request computed them. Blocks have the
    index that they have in a sequence's table. `numbers` maps a number of tokens to the indices of the blocks that the
    group keeps for them."""

    def __init__(
        self, pool: BlockPool, cache: PrefixCache, block_size: int, numbers: Callable[[int], Iterator[int]]
    ) -> None:
        self._pool, self._cache, self._block_size, self._numbers = pool, cache, block_size, numbers
        self._record: tuple[int, KVEvents] | None = None
        self._pins: dict[BlockKey, int] = {}  # the number of pins of each pinned block, which need not be cached yet

    @property
    def num_pinned(self) -> int:
        """The number of blocks that are pinned, or will be when they are computed."""
        return len(self._pins)

    def record(self, events: KVEvents, number: int) -> None:
        """Record in `events`, for group `number`, which blocks are added to the prefix cache and removed from it."""
        self._record = number, events
        self._cache.on_forget = partial(events.removed, number)

    def publish(self, sequence: CachedSequence, number: int, block: int) -> None:
        """Add block `number` of a sequence, which is full and computed, to the prefix cache. Requires `can_publish`."""
        key = sequence.key(number, self._block_size)
        self._cache.publish(key, block)
        if key in self._pins:
            self._pool.pin(block)
        if self._record is not None:
            self._record[1].stored(self._stored(self._record[0], sequence, number))

    def found(self, sequence: CachedSequence, length: int) -> dict[int, int | None]:
        """The cached blocks that are kept of a sequence's first `length` tokens, by index; None for a block that is not
        cached."""
        return {number: self._cache.find(sequence.key(number, self._block_size)) for number in self._numbers(length)}

    def lacking(self, sequence: CachedSequence, length: int) -> int:
        """How many blocks that are kept of a sequence's first `length` tokens are not cached."""
        return list(self.found(sequence, length).values()).count(None)

    def reserve(self, sequence: CachedSequence, length: int) -> dict[int, int]:
        """Allocate the blocks that `found` lacks, by index; they are published by `settle`. Requires free blocks."""
        numbers = [number for number, block in self.found(sequence, length).items() if block is None]
        return dict(zip(numbers, self._pool.reserve(len(numbers)), strict=True))

    def settle(self, sequence: CachedSequence, reserved: dict[int, int], filled: bool) -> None:
        """End a reservation. If the blocks are `filled`, they are published, except those that another request has
        computed meanwhile."""
        for number, block in reserved.items():
            if filled and self._cache.can_publish(sequence.key(number, self._block_size), block):
                self.publish(sequence, number, block)
            self._pool.unreserve(block)

    def adopt(self, sequence: CachedSequence, length: int) -> dict[int, int]:
        """Allocate the blocks that `found` lacks, by index, and publish them at once. Requires free blocks."""
        numbers = [number for number, block in self.found(sequence, length).items() if block is None]
        blocks = dict(zip(numbers, self._pool.allocate(len(numbers)), strict=True))
        for number, block in blocks.items():
            self.publish(sequence, number, block)
        self._pool.release(list(blocks.values()))
        return blocks

    def pin(self, sequence: CachedSequence, length: int) -> None:
        """Pin the blocks that are kept of a sequence's first `length` tokens, now or when they are computed."""
        for number in self._numbers(length):
            key = sequence.key(number, self._block_size)
            self._pins[key] = self._pins.get(key, 0) + 1
            if (block := self._cache.find(key)) is not None:
                self._pool.pin(block)

    def unpin(self, sequence: CachedSequence, length: int) -> None:
        """Undo one `pin`."""
        for number in self._numbers(length):
            key = sequence.key(number, self._block_size)
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
                if (block := self._cache.find(key)) is not None:
                    self._pool.unpin(block)

    def num_unpinned(self, sequence: CachedSequence, length: int) -> int:
        """How many blocks `pin` would pin that are not pinned yet."""
        return sum(sequence.key(number, self._block_size) not in self._pins for number in self._numbers(length))

    def _stored(self, group: int, sequence: CachedSequence, number: int) -> BlockStored:
        parent = sequence.key(number - 1, self._block_size) if number else None
        tokens = tuple(sequence.tokens[number * self._block_size : (number + 1) * self._block_size])
        own = sequence.own_salt if sequence.own_from < (number + 1) * self._block_size else b""
        salt = sequence.salt if sequence.salt_from < (number + 1) * self._block_size else b""
        return BlockStored(group, (sequence.key(number, self._block_size),), parent, tokens, salt, own)
