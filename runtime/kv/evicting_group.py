"""EvictingGroup: the blocks of a KV group whose layers evict single tokens and compact the others."""

from __future__ import annotations

from typing import ClassVar

from .config import GroupConfig
from .group import Group, TableOpening
from .places import UNLIMITED, Places
from .sequence import BlockTable, CachedSequence


class EvictingGroup(Group):
    """The tokens in its blocks are no prefix of a sequence. Blocks are therefore not shared through the prefix cache
    and not kept in host memory, and a sequence that lost its blocks is computed again, with the same result. A
    sequence's part of a step ends where an eviction is due.
    """

    evicts: ClassVar[bool] = True
    policy: Places  # type: ignore[assignment]

    def __init__(self, config: GroupConfig) -> None:
        assert isinstance(config.policy, Places)
        super().__init__(config)

    def missing(self, table: BlockTable, num_tokens: int) -> int:
        return max(self.blocks_for(self.policy.held(num_tokens, table.prompt)) - len(table), 0)

    def span(self, table: BlockTable, num_tokens: int) -> int:
        return num_tokens

    def room(self, table: BlockTable) -> int:
        places = super().room(table)
        return UNLIMITED if places >= self.policy.most(UNLIMITED) else places

    def limit(self, table: BlockTable, position: int) -> int:
        return self.policy.until(position, table.prompt)

    def cached_length(self, sequence: CachedSequence, longest: int, multiple: int) -> int:
        return 0

    def opening(self, sequence: CachedSequence, table: BlockTable, cached: int) -> TableOpening:
        lengths = sequence.num_tokens, min(table.prompt, sequence.num_tokens)  # a table shrinks by an eviction
        return TableOpening({}, [], 0, self.blocks_for(max(self.policy.held(n, table.prompt) for n in lengths)))

    def has_room(self, opening: TableOpening, headroom: int) -> bool:
        """Whether the sequence can be admitted. With a policy that bounds its table no headroom is needed, because a
        running sequence never grows beyond the bound."""
        return super().has_room(opening, headroom if self.policy.most(UNLIMITED) == UNLIMITED else 0)

    def publish(self, sequence: CachedSequence, table: BlockTable) -> None:
        """Publish nothing, because the tokens in a block are not known. After a prompt is compressed, release the
        blocks that only the whole prompt needed."""
        if sequence.num_computed_tokens >= table.prompt:
            self.cut(table, sequence.num_computed_tokens + sequence.num_scheduled_tokens + 1)

    def release_unread(self, table: BlockTable, position: int) -> None:
        return

    def cut(self, table: BlockTable, num_tokens: int) -> None:
        self.pool.release(table.cut(self.blocks_for(self.policy.held(num_tokens, table.prompt))))

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        return super().fork(table, len(table) * self.block_size)

    def shared_ahead(self, table: BlockTable, position: int) -> list[int]:
        """All shared blocks: reading a token changes its score in its block, and may move it to another block."""
        return [number for number, block in enumerate(table.blocks) if self.pool.references(block) > 1]

    def savable(self, table: BlockTable, num_tokens: int, multiple: int) -> int:
        return 0

    def _check_sequence(self, sequence: CachedSequence, table: BlockTable) -> None:
        assert len(table) >= self.blocks_for(self.policy.place(sequence.num_computed_tokens, table.prompt))
        assert len(table) <= self.most_blocks(sequence.num_tokens + 1), "more blocks than it may have"
