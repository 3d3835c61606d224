"""BlockPool: the ids of the KV blocks, their reference counts, and the order of their eviction."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from .prefix_cache import PrefixCache


class BlockPool:
    """Reference-counted block ids `0 .. num_blocks - 1`.

    Every block is in exactly one of three states:
    - owned: reference count > 0, in that many block tables;
    - cached: reference count 0 but its content can still be found in the prefix cache;
    - free: reference count 0 and no content.
    Allocation takes free blocks first, then evicts cached blocks, least recently released first.
    A block may be pinned: the pin counts as an owner until the block's content is discarded.
    """

    def __init__(self, num_blocks: int, cache: PrefixCache) -> None:
        self._cache = cache
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first, so that little memory is touched
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._pinned: set[int] = set()
        self._reserved: set[int] = set()  # blocks whose content is still being written

    @property
    def num_blocks(self) -> int:
        """The number of all blocks."""
        return len(self._refs)

    @property
    def num_free(self) -> int:
        """The number of blocks without an owner and without content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """The number of blocks without an owner whose content can still be found."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """The number of blocks that can be allocated now: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def is_idle(self) -> bool:
        """Whether no block table holds a block."""
        return not self.num_used

    @property
    def num_used(self) -> int:
        """The number of blocks in block tables, not counting pinned and reserved ones."""
        return self.num_blocks - self.num_available - len(self._pinned | self._reserved)

    def references(self, block: int) -> int:
        """The block's reference count: block tables, pins and reservations."""
        return self._refs[block]

    def can_allocate(self, count: int) -> bool:
        """Whether `count` blocks can be allocated, if cached blocks are evicted."""
        return count <= self.num_available

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference. Requires `can_allocate`."""
        assert self.can_allocate(count), (count, self.num_available)
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        block, _ = self._cached.popitem(last=False)
        self._cache.forget(block)
        return block

    def share(self, block: int) -> None:
        """Add a reference to an owned or cached block."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def pin(self, block: int) -> None:
        """Keep an owned or cached block from being evicted. Does nothing if it is pinned."""
        if block not in self._pinned:
            self.share(block)
            self._pinned.add(block)

    def unpin(self, block: int) -> None:
        """Allow the block to be evicted again. Does nothing if it is not pinned."""
        if block in self._pinned:
            self._pinned.remove(block)
            self.release([block])

    def reserve(self, count: int) -> list[int]:
        """Take `count` blocks to be filled between steps; `unreserve` gives each back. Requires `can_allocate`."""
        blocks = self.allocate(count)
        self._reserved.update(blocks)
        return blocks

    def unreserve(self, block: int) -> None:
        """End a reservation: the block is filled and published, or not wanted any more."""
        self._reserved.remove(block)
        self.release([block])

    def release(self, table: Sequence[int]) -> None:
        """Drop one reference of each block of a table.

        Last block first, so that the tail of a sequence is evicted before its head, which others are likelier to share.
        """
        for block in reversed(table):
            self._refs[block] -= 1
            assert self._refs[block] >= 0, block
            if self._refs[block] > 0:
                continue
            if self._cache.holds(block):
                self._cached[block] = None
            else:
                self._free.append(block)

    def discard(self, block: int) -> None:
        """Remove the block from the prefix cache, because its content is wrong. Owners keep the block."""
        self._cache.forget(block)
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)
        self.unpin(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert free + cached + owned == all, and that reference counts are the number of tables holding a block."""
        held = Counter(block for table in (*tables, self._pinned, self._reserved) for block in table)
        references = [0] * self.num_blocks
        for block, count in held.items():
            references[block] = count
        assert self._refs == references, "reference counts"
        free, cached, owned = set(self._free), set(self._cached), held.keys()
        assert len(free) == len(self._free), "a block is free twice"
        states = (free, cached), (free, owned), (cached, owned)
        assert all(one.isdisjoint(other) for one, other in states), "a block is in two states"
        assert len(free) + len(cached) + len(owned) == self.num_blocks, "a block is lost"
        assert self._cache.blocks >= cached | self._pinned, "a cached or pinned block has no content"
        assert free.isdisjoint(self._cache.blocks), "a free block has content"
        self._cache.check()
