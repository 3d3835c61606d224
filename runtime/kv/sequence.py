"""CachedSequence: the tokens of a sequence, and its block tables in all KV groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .prefix_cache import BlockKey, apart_key, child_key, root_key

NO_BLOCK = -1  # an entry of a table whose block was released, because the sequence does not read it any more


def slot_of(table: Any, position: Any, block_size: int) -> Any:
    """The slot of a position's KV in its group: block * block_size + offset.

    An int for an int; for an array of positions and an array as table, an array of the same shape.
    """
    return table[position // block_size] * block_size + position % block_size


@dataclass(slots=True, eq=False)
class BlockTable:
    """A sequence's blocks in one group: `blocks[position // block_size]`, or NO_BLOCK. prompt: the length of its
    prompt."""

    prompt: int = 0
    blocks: list[int] = field(default_factory=list[int])
    host_slots: dict[int, int] = field(default_factory=dict[int, int])  # table index -> host slot, while preempted
    num_published: int = 0  # leading blocks offered to the prefix cache
    released: dict[int, int] = field(default_factory=dict[int, int])  # begin and end of each run of NO_BLOCK
    stepped: set[int] = field(default_factory=set[int])  # indices of states of an answer, which came one by one
    marked: frozenset[int] = frozenset()  # indices of states that other requests are likely to need
    _frozen: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.blocks)

    def held(self) -> Iterator[int]:
        """Its blocks, without NO_BLOCK."""
        return (block for block in self.blocks if block != NO_BLOCK)

    def frozen(self) -> tuple[int, ...]:
        """The table as a tuple; the same object until the table changes, so that readers can skip copies."""
        if self._frozen is None:
            self._frozen = tuple(self.blocks)
        return self._frozen

    def extend(self, blocks: list[int]) -> None:
        """Append blocks."""
        if blocks:
            self.blocks += blocks
            self._frozen = None

    def punch(self, begin: int, end: int) -> list[int]:
        """Replace blocks [begin, end) by NO_BLOCK; returns those taken out, which the caller releases."""
        taken = [block for block in self.blocks[begin:end] if block != NO_BLOCK]
        if taken:
            self.blocks[begin:end] = [NO_BLOCK] * (end - begin)
            self._frozen = None
        return taken

    def cut(self, length: int) -> list[int]:
        """Shorten the table to `length` blocks; returns those cut off, which the caller releases."""
        taken = [block for block in self.blocks[length:] if block != NO_BLOCK]
        if len(self.blocks) > length:
            del self.blocks[length:]
            self._frozen = None
        return taken

    def replace(self, number: int, block: int) -> int:
        """Replace the block at index `number`; returns the old one, which the caller releases."""
        taken, self.blocks[number] = self.blocks[number], block
        self._frozen = None
        return taken

    def forked(self, length: int) -> BlockTable:
        """A new table with the first `length` blocks of this one; the caller adds the references."""
        return BlockTable(
            self.prompt,
            self.blocks[:length],
            num_published=self.num_published,
            released=dict(self.released),
            stepped=set(self.stepped),
            marked=self.marked,
        )

    def clear(self) -> list[int]:
        """Empty the table, except its host slots; returns the blocks, which the caller releases."""
        taken = self.cut(0)
        self.num_published = 0
        self.released.clear()
        self.stepped.clear()
        return taken


@dataclass(slots=True, eq=False, kw_only=True)
class CachedSequence:
    """A sequence whose first `num_computed_tokens` tokens have KV in the cache: in `tables`, one per group.

    While it has no blocks, the KV of `num_saved_tokens` tokens may be in host memory. Sequences share blocks only if
    their `salt` is equal, and from the block of token `own_from` on only if `own_salt` and its place are equal, too;
    b"": no restriction. All sequences may share the first `salt_from` tokens, a multiple of every group's block size.
    """

    tokens: list[int] = field(default_factory=list[int])
    salt: bytes = b""
    salt_from: int = 0
    own_salt: bytes = b""
    own_from: int = 0
    use_cache: bool = True  # whether it may use blocks that others computed
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0  # after the computed ones, in all steps in flight
    num_saved_tokens: int = 0
    publish_at: int = 0  # the number of computed tokens at which the next block is full
    first_turn: int = 0  # tokens of the conversation's first turn, which others are likely to share
    branch: int = 0  # tokens that are cached except for the state after them: others began alike, and more may follow
    tables: tuple[BlockTable, ...] = ()
    _frozen_tables: tuple[tuple[int, ...], ...] = ()
    _keys: dict[int, list[BlockKey]] = field(default_factory=dict[int, list[BlockKey]])  # by block size

    @property
    def num_tokens(self) -> int:
        """How many tokens are known so far, computed or not."""
        return len(self.tokens)

    def frozen_tables(self) -> tuple[tuple[int, ...], ...]:
        """The block table of each group, as steps get them; the same object until a table changes."""
        tables = tuple([table.frozen() for table in self.tables])
        if tables != self._frozen_tables:  # compares by identity first, so unchanged tables cost little
            self._frozen_tables = tables
        return self._frozen_tables

    def key(self, index: int, block_size: int) -> BlockKey:
        """The prefix-cache key of full block `index`, for blocks of `block_size` tokens."""
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
        """The known keys, by block size, of the first `num_tokens` tokens."""
        return {size: keys[: num_tokens // size] for size, keys in self._keys.items()}

    def known_keys(self, block_size: int) -> list[BlockKey]:
        """The keys that were computed so far, for this block size."""
        return self._keys.get(block_size, [])
