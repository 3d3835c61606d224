"""CachedSequence: the tokens of a sequence, and where each KV group keeps what was computed of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .prefix_cache import BlockKey, apart_key, child_key, root_key

NO_BLOCK = -1  # in a table, where the sequence has given its block back and reads it no more


def slot_of(table: Any, position: Any, block_size: int) -> Any:
    """The address of a position in its group: the slot, block * block_size + offset, where its KV lies.

    An int for an int; for an array of positions and a table that is one, an array.
    """
    return table[position // block_size] * block_size + position % block_size


@dataclass(slots=True, eq=False)
class BlockTable:
    """A sequence's blocks in one group: `blocks[position // block_size]`, or NO_BLOCK. prompt: tokens it began with."""

    prompt: int = 0
    blocks: list[int] = field(default_factory=list[int])
    host_slots: dict[int, int] = field(default_factory=dict[int, int])  # where its blocks are while it is preempted
    num_published: int = 0  # blocks at the front that the prefix cache has seen
    released: dict[int, int] = field(default_factory=dict[int, int])  # begin and end of each run of NO_BLOCK
    stepped: set[int] = field(default_factory=set[int])  # blocks of states that came one by one, as an answer's do
    marked: frozenset[int] = frozenset()  # blocks of states that others are likely to go on from
    _frozen: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.blocks)

    def held(self) -> Iterator[int]:
        """The blocks that it has."""
        return (block for block in self.blocks if block != NO_BLOCK)

    def frozen(self) -> tuple[int, ...]:
        """The table as a tuple; the same object as long as it has not changed, so that copies can be saved."""
        if self._frozen is None:
            self._frozen = tuple(self.blocks)
        return self._frozen

    def extend(self, blocks: list[int]) -> None:
        """Put blocks behind those that are there."""
        if blocks:
            self.blocks += blocks
            self._frozen = None

    def punch(self, begin: int, end: int) -> list[int]:
        """Take the blocks [begin, end) out, leaving NO_BLOCK; the caller releases them."""
        taken = [block for block in self.blocks[begin:end] if block != NO_BLOCK]
        if taken:
            self.blocks[begin:end] = [NO_BLOCK] * (end - begin)
            self._frozen = None
        return taken

    def cut(self, length: int) -> list[int]:
        """Take the blocks behind the first `length` away; the caller releases them."""
        taken = [block for block in self.blocks[length:] if block != NO_BLOCK]
        if len(self.blocks) > length:
            del self.blocks[length:]
            self._frozen = None
        return taken

    def replace(self, number: int, block: int) -> int:
        """Put another block in the place of one; that one, which the caller releases."""
        taken, self.blocks[number] = self.blocks[number], block
        self._frozen = None
        return taken

    def forked(self, length: int) -> BlockTable:
        """A table of the first `length` blocks of this one, which the caller shares."""
        return BlockTable(
            self.prompt,
            self.blocks[:length],
            num_published=self.num_published,
            released=dict(self.released),
            stepped=set(self.stepped),
            marked=self.marked,
        )

    def clear(self) -> list[int]:
        """Forget everything but what is in host memory; the blocks, which the caller releases."""
        taken = self.cut(0)
        self.num_published = 0
        self.released.clear()
        self.stepped.clear()
        return taken


@dataclass(slots=True, eq=False, kw_only=True)
class CachedSequence:
    """A sequence of which the first `num_computed_tokens` have their KV in the cache: in `tables`, one per group.

    While it has no blocks, that of `num_saved_tokens` may be in host memory. Sequences share blocks only with those of
    equal `salt`, and from the block of token `own_from` on only with those of equal `own_salt` there, too; b"" where
    they do not come apart. The first `salt_from` tokens, a multiple of every group's blocks, are shared by all.
    """

    tokens: list[int] = field(default_factory=list[int])
    salt: bytes = b""
    salt_from: int = 0
    own_salt: bytes = b""
    own_from: int = 0
    use_cache: bool = True  # whether it takes what others have computed
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0  # behind those, in all steps under way
    num_saved_tokens: int = 0
    publish_at: int = 0  # how many tokens must be computed before another block is full
    first_turn: int = 0  # tokens of the conversation's first turn, with which others are likely to begin
    branch: int = 0  # tokens that are cached but for the state behind them: others began so, and more may
    tables: tuple[BlockTable, ...] = ()
    _frozen_tables: tuple[tuple[int, ...], ...] = ()
    _keys: dict[int, list[BlockKey]] = field(default_factory=dict[int, list[BlockKey]])  # by block size

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, computed or not."""
        return len(self.tokens)

    def frozen_tables(self) -> tuple[tuple[int, ...], ...]:
        """The block table of each group, as steps get them; the same object as long as none has changed."""
        tables = tuple([table.frozen() for table in self.tables])
        if tables != self._frozen_tables:  # which compares objects that are the same by their identity
            self._frozen_tables = tables
        return self._frozen_tables

    def key(self, index: int, block_size: int) -> BlockKey:
        """The prefix-cache key of full block `index`, where blocks have that size."""
        keys = self._keys.setdefault(block_size, [])
        while len(keys) <= index:
            first = len(keys) * block_size
            parent = keys[-1] if keys else root_key(b"" if self.salt_from else self.salt)
            if self.salt and 0 < self.salt_from == first:
                parent = apart_key(parent, self.salt, 0)
            if self.own_salt and first <= self.own_from < first + block_size:
                parent = apart_key(parent, self.own_salt, self.own_from - first)
            keys.append(child_key(parent, self.tokens[first : first + block_size]))
        return keys[index]

    def keys_of(self, num_tokens: int) -> dict[int, list[BlockKey]]:
        """The keys that are known, by block size, of a sequence that begins with so many of these tokens."""
        return {size: keys[: num_tokens // size] for size, keys in self._keys.items()}

    def known_keys(self, block_size: int) -> list[BlockKey]:
        """The keys that were asked for so far."""
        return self._keys.get(block_size, [])
