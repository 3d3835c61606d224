"""Group: the blocks of one KV group and their assignment to sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

from .block_pool import BlockPool
from .config import Demand, GroupConfig
from .host_blocks import HostBlocks
from .places import UNLIMITED
from .policy import KeepAll, WithinStep, kept_blocks
from .prefix_blocks import PrefixBlocks
from .prefix_cache import PrefixCache
from .sequence import NO_BLOCK, BlockTable, CachedSequence
from .upkeep import Due


class TableOpening(NamedTuple):
    """The blocks of a group that a sequence gets when it is admitted: a table of `size` blocks.

    shared: cached blocks, by their index in the table. restored: the indices of blocks that are filled from host
    memory. Blocks from index `begin` on are for tokens that are computed next; all others are NO_BLOCK. reserve: how
    many more blocks must be available, which it gets later. marked: see BlockTable.
    """

    shared: dict[int, int]
    restored: list[int]
    begin: int
    size: int
    reserve: int = 0
    marked: frozenset[int] = frozenset()

    @property
    def num_fresh(self) -> int:
        """How many blocks must be allocated for it."""
        return len(self.restored) + self.size - self.begin


class Group:
    """Gives blocks to sequences and takes them back. A sequence's `BlockTable` has all its blocks of the group."""

    holds_states: ClassVar[bool] = False  # whether a block holds one recurrent state, not KV of each token
    evicts: ClassVar[bool] = False  # whether single tokens are evicted, see places.py

    def __init__(self, config: GroupConfig) -> None:
        self.block_size, self.policy = config.block_size, config.policy
        self.within_step = isinstance(config.policy, WithinStep)
        self.cache = PrefixCache()
        self.pool = BlockPool(config.num_blocks, self.cache)
        self.due = Due()
        self.host = HostBlocks(config.host_blocks, self.due)
        self.prefixes = PrefixBlocks(self.pool, self.cache, self.block_size, self.numbers)

    @property
    def num_lent(self) -> int:
        """The number of blocks that requests can have at most: all but those that are or will be pinned."""
        return self.pool.num_blocks - self.prefixes.num_pinned

    def blocks_for(self, num_tokens: int) -> int:
        """The length of a table for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int) -> int:
        """The most blocks that a sequence of `num_tokens` tokens needs at once."""
        return self.policy.most_blocks(num_tokens, self.block_size)

    def most_together(self, demand: Demand) -> int:
        """The most blocks that a request needs at once. Its sequences share the full blocks of their common tokens if
        the policy keeps all tokens; with other policies no sharing is assumed."""
        shared = demand.shared // self.block_size if isinstance(self.policy, KeepAll) else 0
        return shared + (self.most_blocks(demand.length) - shared) * demand.width

    def kept_blocks(self, position: int) -> list[range]:
        """The indices, as ranges, of the blocks that hold tokens kept at a position."""
        return kept_blocks(self.policy, self.block_size, position)

    def numbers(self, position: int) -> Iterator[int]:
        """The indices of the blocks that hold tokens kept at a position, one by one."""
        return (number for kept in self.kept_blocks(position) for number in kept)

    def missing(self, table: BlockTable, num_tokens: int) -> int:
        """How many more blocks a table needs for `num_tokens` tokens."""
        return max(self.blocks_for(num_tokens) - len(table), 0)

    def grow(self, table: BlockTable, num_tokens: int, answering: bool = False) -> None:
        """Extend a table to `num_tokens` tokens. Requires that the pool can allocate the missing blocks. answering:
        whether tokens come one by one, each sampled after the previous one."""
        if missing := self.missing(table, num_tokens):
            table.extend(self.pool.allocate(missing))

    def span(self, table: BlockTable, num_tokens: int) -> int:
        """For how many of `num_tokens` tokens the table may have blocks at once."""
        more = self.most_blocks(num_tokens) - sum(1 for _ in table.held())
        return (len(table) + max(more, 0)) * self.block_size

    def room(self, table: BlockTable) -> int:
        """How many tokens the table could hold with all blocks that can be allocated."""
        return (len(table) + self.pool.num_available) * self.block_size

    def limit(self, table: BlockTable, position: int) -> int:
        """How many tokens from `position` on one step may compute."""
        return UNLIMITED

    # -- admission and release ---------------------------------------------------------------------------------------

    def cached_length(self, sequence: CachedSequence, longest: int, multiple: int) -> int:
        """The longest prefix of up to `longest` tokens whose kept blocks are all cached; a multiple of `multiple`.

        A block that is kept at one length is kept at every shorter length that reaches it: if it is missing, none of
        these is a cached prefix.
        """
        while longest:
            lacking = (n for n in self.numbers(longest) if self.cache.find(sequence.key(n, self.block_size)) is None)
            missing = next(lacking, None)
            if missing is None:
                break
            longest = missing * self.block_size // multiple * multiple
        return longest

    def opening(self, sequence: CachedSequence, table: BlockTable, cached: int) -> TableOpening:
        """The blocks that it gets if `cached` of its tokens are in the prefix cache: for all its tokens, up to the most
        that it may have at once."""
        computed = max(cached, sequence.num_saved_tokens)
        shared: dict[int, int] = {}
        restored: list[int] = []
        for number in self.numbers(computed):
            within = (number + 1) * self.block_size <= cached
            block = self.cache.find(sequence.key(number, self.block_size)) if within else None
            if block is None:
                restored.append(number)
            else:
                shared[number] = block
        begin = computed // self.block_size
        begin += begin in shared or begin in restored  # the kept tokens may end within a block
        rest = self.most_blocks(sequence.num_tokens) - len(shared) - len(restored)
        return TableOpening(shared, restored, begin, begin + min(self.blocks_for(sequence.num_tokens) - begin, rest))

    def has_room(self, opening: TableOpening, headroom: int) -> bool:
        """Whether its blocks, and `headroom` more, can be allocated."""
        # cached blocks are no longer available when they are shared
        revived = sum(self.pool.references(block) == 0 for block in opening.shared.values())
        return self.pool.can_allocate(opening.num_fresh + opening.reserve + revived + headroom)

    def open(self, table: BlockTable, opening: TableOpening, cached: int) -> None:
        """Give the table the blocks of an opening. Requires `has_room`."""
        for block in opening.shared.values():
            self.pool.share(block)
        blocks = [NO_BLOCK] * opening.size
        fresh = self.pool.allocate(opening.num_fresh)
        for number, block in zip([*opening.restored, *range(opening.begin, opening.size)], fresh, strict=True):
            blocks[number] = block
        for number, block in opening.shared.items():
            blocks[number] = block
        table.extend(blocks)
        table.num_published = cached // self.block_size
        table.marked = opening.marked
        self.host.restore(table, opening.restored)

    def publish(self, sequence: CachedSequence, table: BlockTable) -> None:
        """Add full, computed blocks to the prefix cache, and release those that are not read again."""
        full = sequence.num_computed_tokens // self.block_size
        if full == table.num_published or self.within_step:
            return
        for number in range(table.num_published, full):
            block = table.blocks[number]
            if block != NO_BLOCK and self.cache.can_publish(sequence.key(number, self.block_size), block):
                self.prefixes.publish(sequence, number, block)
        table.num_published = full
        self.release_unread(table, sequence.num_computed_tokens)

    def release_unread(self, table: BlockTable, position: int) -> None:
        """Release blocks without tokens kept at a position; the block of the position itself stays."""
        at = 0
        for kept in [*self.kept_blocks(position), range(position // self.block_size, len(table))]:
            if at < kept.start:
                self.pool.release(table.punch(table.released.get(at, at), kept.start))
                table.released[at] = kept.start
            at = max(at, kept.stop)

    def cut(self, table: BlockTable, num_tokens: int) -> None:
        """Release the blocks that `num_tokens` tokens do not need."""
        self.pool.release(table.cut(self.blocks_for(num_tokens)))

    def close(self, table: BlockTable) -> None:
        """Release all blocks of the table."""
        self.pool.release(table.clear())

    # -- beams: sequences with a common beginning --------------------------------------------------------------------

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """A table for a sequence that begins with the `num_tokens` computed tokens; it shares their blocks."""
        forked = table.forked(self.blocks_for(num_tokens))
        for block in forked.held():
            self.pool.share(block)
        return forked

    def shared_ahead(self, table: BlockTable, position: int) -> list[int]:
        """The indices of the shared blocks that the token at `position` changes: the last block, unless it is full."""
        number, offset = divmod(position, self.block_size)
        return [number] if offset and self.pool.references(table.blocks[number]) > 1 else []

    def own(self, table: BlockTable, position: int) -> None:
        """Replace the blocks of `shared_ahead` by copies. Requires that the pool can allocate as many."""
        numbers = self.shared_ahead(table, position)
        fresh = self.pool.allocate(len(numbers))
        self.due.copies += [(table.blocks[number], block) for number, block in zip(numbers, fresh, strict=True)]
        self.pool.release([table.replace(number, block) for number, block in zip(numbers, fresh, strict=True)])

    def savable(self, table: BlockTable, num_tokens: int, multiple: int) -> int:
        """How many of the first `num_tokens` tokens (all, or a multiple of `multiple`) host memory has room for, so
        that the sequence can continue after them."""
        while num_tokens:
            fits = sum(map(len, self.kept_blocks(num_tokens))) <= self.host.num_free
            if fits and all(table.blocks[number] != NO_BLOCK for number in self.numbers(num_tokens)):
                break
            num_tokens = (num_tokens - 1) // multiple * multiple
        return num_tokens

    def spoil(self, sequence: CachedSequence, table: BlockTable) -> None:
        """Discard all that a sequence computed, because it is wrong: its blocks leave the prefix cache, and those that
        no other sequence has are zeroed."""
        spoilt = list(table.held())
        keys = sequence.known_keys(self.block_size)
        missing = len(keys) - len(table)
        for key, block in zip(keys, [*table.blocks, *[NO_BLOCK] * missing], strict=False):
            if block == NO_BLOCK and (found := self.cache.find(key)) is not None:  # released, but still cached
                spoilt.append(found)
        for block in spoilt:
            self.pool.discard(block)
        held = set(table.held())
        self.due.zeros += [block for block in spoilt if self.pool.references(block) == (block in held)]

    def check(self, running: Sequence[tuple[CachedSequence, BlockTable]], waiting: Sequence[BlockTable]) -> None:
        """Assert that no block is lost, and that tables are neither too short nor too long."""
        self.pool.check(list(table.held()) for _, table in running)
        self.host.check(waiting)
        assert not any(table.blocks for table in waiting), "a waiting sequence owns blocks"
        for sequence, table in running:
            self._check_sequence(sequence, table)

    def _check_sequence(self, sequence: CachedSequence, table: BlockTable) -> None:
        assert len(table) >= self.blocks_for(sequence.num_computed_tokens)
        kept = list(self.numbers(sequence.num_computed_tokens))
        assert all(table.blocks[number] != NO_BLOCK for number in kept), "a block is gone that is still read"
        chunk = max(sequence.num_scheduled_tokens - 1, 0)  # a step in flight still has the blocks that it reads
        most = self.most_blocks(sequence.num_tokens) + self.blocks_for(chunk)
        assert sum(1 for _ in table.held()) <= most, "more blocks than it may have"
