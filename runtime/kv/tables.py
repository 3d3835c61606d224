"""Tables: which KV blocks each request has, and which of their contents others can find."""

from __future__ import annotations

from collections.abc import Sequence

from ..scheduler.config import SchedulerConfig
from ..scheduler.request import Request
from .block_pool import BlockPool
from .host_blocks import HostBlocks
from .prefix_cache import BlockKey, PrefixCache
from .upkeep import Upkeep


class Tables:
    """Gives blocks to requests and takes them back; all of a request's blocks are in its `block_table`."""

    def __init__(self, config: SchedulerConfig, upkeep: Upkeep) -> None:
        self.block_size = config.block_size
        self.cache = PrefixCache()
        self.pool = BlockPool(config.num_blocks, self.cache)
        self.host = HostBlocks(config.host_blocks, config.block_size, upkeep)
        self._pending: dict[BlockKey, Request] = {}  # prompt blocks that a running request is about to compute

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def missing(self, request: Request, num_tokens: int) -> int:
        """How many blocks more it needs to hold so many tokens."""
        return self.blocks_for(num_tokens) - len(request.block_table)

    def grow(self, request: Request, count: int) -> None:
        """Give it `count` blocks more. Requires that the pool can allocate them."""
        request.block_table += self.pool.allocate(count)

    def cached_prefix(self, request: Request) -> list[int]:
        """Cached blocks that the request's tokens start with; at least one token stays to be computed."""
        blocks: list[int] = []
        if request.spec.use_cache:
            for index in range((request.num_tokens - 1) // self.block_size):
                block = self.cache.find(request.key(index, self.block_size))
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def is_being_computed(self, request: Request, num_found: int) -> bool:
        """Whether a running request is about to compute the first block that this one has nowhere."""
        index = max(num_found, request.num_saved_tokens // self.block_size)
        if not request.spec.use_cache or (index + 1) * self.block_size >= request.num_tokens:
            return False
        return request.key(index, self.block_size) in self._pending

    def has_room(self, request: Request, prefix: Sequence[int], headroom: int) -> bool:
        """Whether it can be opened with that prefix, leaving `headroom` blocks."""
        # cached blocks of the prefix stop being available once they are shared
        revived = sum(self.pool.references(block) == 0 for block in prefix)
        return self.pool.can_allocate(self.blocks_for(request.num_tokens) - len(prefix) + revived + headroom)

    def open(self, request: Request, prefix: list[int]) -> None:
        """Give it blocks for all its tokens, the first of which are in the cache, and what was saved of the rest."""
        for block in prefix:
            self.pool.share(block)
        request.block_table = prefix + self.pool.allocate(self.blocks_for(request.num_tokens) - len(prefix))
        request.num_computed_tokens = len(prefix) * self.block_size
        request.num_published = len(prefix)
        self.host.restore(request, len(prefix))
        for index in range(len(prefix), request.num_tokens // self.block_size):
            self._pending.setdefault(request.key(index, self.block_size), request)

    def publish(self, request: Request) -> None:
        """Make the blocks that are full and computed by now findable."""
        for index in range(request.num_published, request.num_computed_tokens // self.block_size):
            key, block = request.key(index, self.block_size), request.block_table[index]
            self._pending.pop(key, None)
            if self.cache.can_publish(key, block):
                self.cache.publish(key, block)
            request.num_published = index + 1

    def cut(self, request: Request) -> None:
        """Take back what its tokens do not need."""
        self.pool.release(request.cut_table(self.blocks_for(request.num_tokens)))

    def swap_out(self, request: Request) -> bool:
        """Take all its blocks back and keep what is computed in host memory; whether any of it found room there."""
        saved = self.host.save(request)
        self._release(request)
        return saved

    def close(self, request: Request) -> None:
        """Take all its blocks back, in host memory too."""
        self.host.drop(request)
        self._release(request)

    def _release(self, request: Request) -> None:
        for key in request.keys:
            if self._pending.get(key) is request:
                del self._pending[key]
        self.pool.release(request.block_table)
        request.clear_table()

    def spoil(self, request: Request) -> list[int]:
        """What its blocks hold is wrong: nobody finds it any more. Those that nobody else has are returned."""
        for block in request.block_table:
            self.pool.discard(block)
        return [block for block in request.block_table if self.pool.references(block) == 1]

    def check(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        """Assert that blocks are conserved and tables long enough, and who may have blocks where."""
        self.pool.check(request.block_table for request in running)
        self.host.check(waiting)
        assert not any(request.block_table for request in waiting), "a waiting request owns blocks"
        for request in running:
            assert len(request.block_table) >= self.blocks_for(request.num_computed_tokens)
        assert set(self._pending.values()) <= set(running), "a pending block has no owner"
