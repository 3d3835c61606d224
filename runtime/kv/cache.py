"""KVCache: all KV groups of an engine; a sequence has blocks in all groups or in none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm
from typing import NamedTuple

from .config import Demand, GroupConfig
from .events import KVEvents
from .evicting_group import EvictingGroup
from .group import Group, TableOpening
from .places import Places
from .policy import KeepAll
from .prefix_cache import BlockKey
from .sequence import BlockTable, CachedSequence, slot_of
from .state_group import StateGroup
from .upkeep import Upkeep


class Prefix(NamedTuple):
    """The blocks that a waiting sequence would get if it was admitted now; `length` of its tokens are cached in every
    group."""

    length: int
    openings: tuple[TableOpening, ...]


def make_group(config: GroupConfig) -> Group:
    """Make the group for a configuration."""
    kind = StateGroup if config.holds_states else EvictingGroup if isinstance(config.policy, Places) else Group
    return kind(config)


class KVCache:
    """All groups. A prefix counts as cached if every group has all blocks that it keeps of it."""

    def __init__(self, configs: Sequence[GroupConfig]) -> None:
        self.groups = tuple(make_group(config) for config in configs)
        self.evicts = any(group.evicts for group in self.groups)  # then KV that was computed in vain cannot be undone
        self.keeps_states = any(group.holds_states for group in self.groups)
        self._multiple = lcm(*(group.block_size for group in self.groups))  # tokens that fill blocks in all groups
        self.whole = any(group.within_step for group in self.groups)  # a sequence runs in one step, and no KV is kept
        self._pending: dict[BlockKey, CachedSequence] = {}  # blocks that a running sequence is about to compute

    @property
    def is_idle(self) -> bool:
        """Whether no sequence has a block."""
        return all(group.pool.is_idle for group in self.groups)

    def record(self, events: KVEvents) -> None:
        """Record in `events` which blocks the prefix caches gain and lose from now on."""
        for number, group in enumerate(self.groups):
            group.prefixes.record(events, number)

    @property
    def prefix_blocks(self) -> tuple[int, int]:
        """The granularity of cached prefixes in tokens, and how many units of it the cache holds: in the groups that
        keep whole sequences, or, if there are none, in every group."""
        keeping = [group for group in self.groups if isinstance(group.policy, KeepAll)] or self.groups
        return self._multiple, min(group.pool.num_blocks * group.block_size // self._multiple for group in keeping)

    def empty_tables(self, prompt: int = 0) -> tuple[BlockTable, ...]:
        """Empty tables for a sequence whose prompt has `prompt` tokens."""
        return tuple(BlockTable(prompt) for _ in self.groups)

    # -- capacity ----------------------------------------------------------------------------------------------------

    def too_small(self, demands: Sequence[Demand]) -> Group | None:
        """A group that cannot hold all these demands at once, in steps of one token; None if all groups can."""
        for group in self.groups:
            if sum(map(group.most_together, demands)) > group.num_lent:
                return group
        return None

    def places_for(self, num_tokens: int) -> int:
        """How many tokens fit in tables that are allocated for `num_tokens` tokens."""
        return min(group.blocks_for(num_tokens) * group.block_size for group in self.groups)

    def holds(self, sequence: CachedSequence, num_tokens: int) -> bool:
        """Whether its tables are long enough for `num_tokens` tokens."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            if len(table.blocks) * group.block_size < num_tokens:
                return False
        return True

    def can_grow(self, wanted: Sequence[tuple[CachedSequence, int]], guesses: bool = False) -> bool:
        """Whether all these sequences can have tables for the given numbers of tokens. guesses: the further tokens are
        guesses, after which no states are stored."""
        for index, group in enumerate(self.groups):
            if guesses and group.holds_states:
                continue
            missing = sum(group.missing(sequence.tables[index], length) for sequence, length in wanted)
            if not group.pool.can_allocate(missing):
                return False
        return True

    def grow(self, sequence: CachedSequence, num_tokens: int, guesses: bool = False) -> None:
        """Give a sequence blocks for `num_tokens` tokens. Requires `can_grow`."""
        answering = sequence.num_tokens <= num_tokens <= sequence.num_computed_tokens + 2  # + 2: perhaps one step later
        for group, table in zip(self.groups, sequence.tables, strict=True):
            if not (guesses and group.holds_states):
                group.grow(table, num_tokens, answering)

    def span(self, sequence: CachedSequence, num_tokens: int) -> int:
        """For how many of `num_tokens` tokens the sequence may have blocks at once."""
        pairs = zip(self.groups, sequence.tables, strict=True)
        return min(num_tokens, *(group.span(table, num_tokens) for group, table in pairs))

    def room(self, sequence: CachedSequence) -> int:
        """How many tokens its tables could hold with all blocks that can be allocated."""
        return min(group.room(table) for group, table in zip(self.groups, sequence.tables, strict=True))

    def limit(self, sequence: CachedSequence) -> int:
        """How many of its next tokens one step may compute."""
        pairs = zip(self.groups, sequence.tables, strict=True)
        started = sequence.num_computed_tokens + sequence.num_scheduled_tokens
        return min(group.limit(table, started) for group, table in pairs)

    # -- admission and release ---------------------------------------------------------------------------------------

    def cached_length(self, sequence: CachedSequence) -> int:
        """How many of a waiting sequence's tokens are cached in every group; at least one token is left to compute."""
        length, before, sequence.branch = 0, -1, 0
        if sequence.use_cache and not self.whole:
            length = (sequence.num_tokens - 1) // self._multiple * self._multiple
        while length != before:  # until no group shortens it
            before = length
            for group in self.groups:
                length = group.cached_length(sequence, length, self._multiple)
        return length

    def is_being_computed(self, sequence: CachedSequence, cached: int) -> bool:
        """Whether a running sequence is about to compute the first block that this sequence lacks."""
        index = max(cached, sequence.num_saved_tokens) // self._multiple
        if not sequence.use_cache or self.whole or (index + 1) * self._multiple >= sequence.num_tokens:
            return False
        return sequence.key(index, self._multiple) in self._pending

    def prefix(self, sequence: CachedSequence, cached: int) -> Prefix:
        """The blocks that it would get, given that `cached` of its tokens are cached."""
        pairs = zip(self.groups, sequence.tables, strict=True)
        return Prefix(cached, tuple(group.opening(sequence, table, cached) for group, table in pairs))

    def has_room(self, prefix: Prefix, headroom: int) -> bool:
        """Whether the sequence can be admitted, with `headroom` blocks of each group left over."""
        return all(
            group.has_room(opening, headroom) for group, opening in zip(self.groups, prefix.openings, strict=True)
        )

    def open(self, sequence: CachedSequence, prefix: Prefix) -> None:
        """Admit a sequence: share its cached blocks, restore its saved ones, and allocate blocks for more. Requires
        `has_room`."""
        for group, table, opening in zip(self.groups, sequence.tables, prefix.openings, strict=True):
            group.open(table, opening, prefix.length)
        sequence.num_computed_tokens = max(prefix.length, sequence.num_saved_tokens)
        sequence.num_saved_tokens = sequence.publish_at = 0
        if self.whole:
            return
        for index in range(prefix.length // self._multiple, sequence.num_tokens // self._multiple):
            self._pending.setdefault(sequence.key(index, self._multiple), sequence)

    def publish(self, sequence: CachedSequence) -> None:
        """Add its full, computed blocks to the prefix cache, and release blocks that are not read again."""
        if sequence.num_computed_tokens < sequence.publish_at:
            return
        pairs = list(zip(self.groups, sequence.tables, strict=True))
        if self._pending:
            published = min(table.num_published * group.block_size for group, table in pairs)
            for index in range(published // self._multiple, sequence.num_computed_tokens // self._multiple):
                self._pending.pop(sequence.key(index, self._multiple), None)
        for group, table in pairs:
            group.publish(sequence, table)
        sequence.publish_at = min((table.num_published + 1) * group.block_size for group, table in pairs)

    def release_unread(self, sequence: CachedSequence) -> None:
        """Release blocks that are not read again."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.release_unread(table, sequence.num_computed_tokens)

    def cut(self, sequence: CachedSequence) -> None:
        """Release blocks that its next token does not need. Accepted guesses may have to be computed again; their
        blocks are then allocated as for any other chunk."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.cut(table, min(sequence.num_tokens, sequence.num_computed_tokens + 1))

    def swap_out(self, sequence: CachedSequence) -> bool:
        """Release all its blocks and save their content in host memory; False if nothing could be saved."""
        pairs = list(zip(self.groups, sequence.tables, strict=True))
        saved, before = sequence.num_computed_tokens, -1
        while saved != before:
            before = saved
            for group, table in pairs:
                saved = group.savable(table, saved, self._multiple)
        for group, table in pairs:
            group.host.save(table, group.numbers(saved))
        self._release(sequence)
        sequence.num_saved_tokens = saved
        return saved > 0

    # -- beams: sequences with a common beginning --------------------------------------------------------------------

    def fork(self, sequence: CachedSequence) -> tuple[BlockTable, ...]:
        """Tables for a sequence that begins with all computed tokens of this one; they share its blocks."""
        pairs = zip(self.groups, sequence.tables, strict=True)
        return tuple(group.fork(table, sequence.num_computed_tokens) for group, table in pairs)

    def can_go_on(self, sequence: CachedSequence, num_tokens: int) -> bool:
        """Whether a forked sequence can have tables for `num_tokens` tokens, and copies of the shared blocks that it
        changes."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            copied = len(group.shared_ahead(table, sequence.num_computed_tokens))
            if not group.pool.can_allocate(group.missing(table, num_tokens) + copied):
                return False
        return True

    def own(self, sequence: CachedSequence) -> None:
        """Give it copies of the shared blocks that its next token changes (copy on write). Requires `can_go_on`."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.own(table, sequence.num_computed_tokens)

    def close(self, sequence: CachedSequence) -> None:
        """Release all its blocks, those in host memory too."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.host.drop(table)
        self._release(sequence)

    def _release(self, sequence: CachedSequence) -> None:
        for key in sequence.known_keys(self._multiple):
            if self._pending.get(key) is sequence:
                del self._pending[key]
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.close(table)
        sequence.num_computed_tokens = sequence.num_saved_tokens = 0

    def spoil(self, sequence: CachedSequence) -> None:
        """Discard all that it computed, because it is wrong: its blocks leave the prefix cache, and those that no other
        sequence has are zeroed."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.spoil(sequence, table)

    # -- KV from outside ---------------------------------------------------------------------------------------------

    def found(self, sequence: CachedSequence, length: int) -> list[dict[int, int]] | None:
        """The cached blocks that each group keeps of a sequence's first `length` tokens, by their index in the table;
        None if one is not cached."""
        found: list[dict[int, int]] = []
        for group in self.groups:
            blocks = {n: block for n, block in group.prefixes.found(sequence, length).items() if block is not None}
            if group.prefixes.lacking(sequence, length):
                return None
            found.append(blocks)
        return found

    def adopt(self, sequence: CachedSequence, length: int) -> list[dict[int, int]] | None:
        """Allocate the blocks that are kept of a sequence's first `length` tokens and not cached. They are published at
        once, so the caller must write them before the next step. For each group by index in the table; None, with
        nothing changed, if there is no room, or if upkeep of blocks is due. length: a multiple of every group's block
        size."""
        assert length % self._multiple == 0
        if self.whole or self.evicts or any(group.due.any for group in self.groups):
            return None
        held = [
            [block for block in group.prefixes.found(sequence, length).values() if block is not None]
            for group in self.groups
        ]
        for group, blocks in zip(self.groups, held, strict=True):
            for block in blocks:  # so that these are not evicted for the new ones
                group.pool.share(block)
        fits = all(group.pool.can_allocate(group.prefixes.lacking(sequence, length)) for group in self.groups)
        adopted = [group.prefixes.adopt(sequence, length) for group in self.groups] if fits else None
        for group, blocks in zip(self.groups, held, strict=True):
            group.pool.release(blocks)
        return adopted

    def reserve(self, sequence: CachedSequence, length: int) -> list[dict[int, int]] | None:
        """As `adopt`, but the blocks are published only by `settle`, before which they must be written. None if there
        is no room, or if a group cannot keep blocks."""
        if self.whole or self.evicts:
            return None
        if not all(group.pool.can_allocate(group.prefixes.lacking(sequence, length)) for group in self.groups):
            return None
        return [group.prefixes.reserve(sequence, length) for group in self.groups]

    def settle(self, sequence: CachedSequence, reserved: Sequence[dict[int, int]], filled: bool) -> None:
        """End a reservation. filled: the blocks are written and are published; if not, they are not wanted any more."""
        for group, blocks in zip(self.groups, reserved, strict=True):
            group.prefixes.settle(sequence, blocks, filled)

    # -- pinned prefixes ---------------------------------------------------------------------------------------------

    def pinnable(self, sequence: CachedSequence, length: int, demand: Demand) -> bool:
        """Whether a prefix can be pinned so that a request with this demand still fits. length: in tokens, a multiple
        of every group's block size."""
        if self.whole or self.evicts:
            return False
        return all(
            group.most_together(demand) + group.prefixes.num_unpinned(sequence, length) <= group.num_lent
            for group in self.groups
        )

    def pin(self, sequence: CachedSequence, length: int) -> None:
        """Never evict the blocks that are kept of a sequence's first `length` tokens, whether they are computed yet or
        not. Requires `pinnable`."""
        for group in self.groups:
            group.prefixes.pin(sequence, length)

    def unpin(self, sequence: CachedSequence, length: int) -> None:
        """Undo one `pin` of this prefix."""
        for group in self.groups:
            group.prefixes.unpin(sequence, length)

    @property
    def multiple(self) -> int:
        """The number of tokens that fills whole blocks in every group; lengths of cached prefixes are multiples of
        it."""
        return self._multiple

    # -- before the next step ----------------------------------------------------------------------------------------

    def move(self, sequence: CachedSequence, places: Iterable[tuple[int, int]]) -> None:
        """Schedule copies of KV within a sequence, in every group and in this order: (source, target) positions."""
        places = list(places)
        for group, table in zip(self.groups, sequence.tables, strict=True):
            for source, target in places:
                pair = (slot_of(table.blocks, place, group.block_size) for place in (source, target))
                group.due.moves.append((next(pair), next(pair)))

    def upkeep(self) -> tuple[Upkeep, ...]:
        """The upkeep that is due in each group."""
        return tuple([group.due.upkeep() for group in self.groups])

    def upkeep_done(self) -> None:
        """Clear the upkeep, which a step now carries out."""
        for group in self.groups:
            group.due.clear()

    def check(self, running: Sequence[CachedSequence], waiting: Sequence[CachedSequence]) -> None:
        """Assert every invariant of every group."""
        for index, group in enumerate(self.groups):
            pairs = [(sequence, sequence.tables[index]) for sequence in running]
            group.check(pairs, [sequence.tables[index] for sequence in waiting])
        assert set(map(id, self._pending.values())) <= set(map(id, running)), "a pending block has no owner"
