"""Events of the prefix caches: a follower knows what the caches find, at every moment."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from icc.runtime.batch.scheduled import StepOutcome
from icc.runtime.kv.config import GroupConfig
from icc.runtime.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEvents
from icc.runtime.kv.policy import KeepAll, Latest, Window
from icc.runtime.kv.prefix_cache import BlockKey
from icc.runtime.kv.sequence import CachedSequence
from icc.runtime.scheduler.config import SchedulerConfig
from icc.runtime.scheduler.request import RequestSpec
from icc.runtime.scheduler.scheduler import Scheduler

Blocks = dict[tuple[int, BlockKey], tuple[BlockKey | None, tuple[int, ...]]]


def follow(blocks: Blocks, events: Sequence[KVEvent], size: int) -> None:
    """Apply events as an indexer does, with checks."""
    for event in events:
        if isinstance(event, AllBlocksCleared):
            blocks.clear()
        elif isinstance(event, BlockRemoved):
            for key in event.keys:
                del blocks[event.group, key]
        else:
            assert len(event.tokens) == size * len(event.keys)
            parent = event.parent
            for number, key in enumerate(event.keys):
                assert (event.group, key) not in blocks
                blocks[event.group, key] = parent, event.tokens[number * size : (number + 1) * size]
                parent = key


def scheduler(blocks: int, *policies: object, size: int = 4) -> Scheduler:
    groups = tuple(GroupConfig(blocks, size, policy=policy) for policy in policies or (KeepAll(),))  # type: ignore[arg-type]
    return Scheduler(SchedulerConfig(max_batch_size=4, max_step_tokens=16, max_logit_rows=4, groups=groups))


def step(engine: Scheduler, token: int) -> None:
    batch = engine.schedule()
    rows = [sequence.request_id for sequence in batch.sequences if sequence.num_logits]
    engine.update([StepOutcome(number, token) for number in rows])


@pytest.mark.parametrize("policies", [(KeepAll(),), (KeepAll(), Window(6)), (KeepAll(), Latest(4))], ids=str)
def test_who_follows_knows_what_is_found(policies: tuple[object, ...]) -> None:
    """Checked after every step, with shared blocks, eviction and preemption."""
    source, events, blocks = random.Random(1), KVEvents(), Blocks()
    engine = scheduler(14, *policies)
    engine.kv.record(events)
    tokens: dict[int, list[int]] = {}
    for number in range(120):
        begin = [source.randrange(3)] * source.randrange(1, 24)
        tokens[number] = [*begin, *(source.randrange(9) for _ in range(source.randrange(1, 12)))]
        engine.add(RequestSpec(number, tuple(tokens[number]), source.randrange(4, 16)))
        for _ in range(3):
            step(engine, source.randrange(9))
            follow(blocks, events.take(), 4)
            for index, group in enumerate(engine.kv.groups):
                found = {key for at, key in blocks if at == index}
                assert found == set(group.cache._block_of)  # pyright: ignore[reportPrivateUsage]
    assert engine.num_preemptions
    for (group, key), (parent, content) in blocks.items():
        assert len(content) == 4 and (parent is None or parent != key), group


def test_blocks_that_follow_one_another_are_one_event() -> None:
    engine, events = scheduler(16), KVEvents()
    engine.kv.record(events)
    engine.add(RequestSpec(1, tuple(range(14)), 4, salt=b"salt"))
    step(engine, 99)
    [first] = events.take()
    assert isinstance(first, BlockStored)
    assert (first.group, first.parent, first.tokens, first.salt) == (0, None, tuple(range(12)), b"salt")
    for token in (98, 97, 96):
        step(engine, token)
    [second] = events.take()
    assert isinstance(second, BlockStored)
    assert (second.parent, second.tokens, len(second.keys)) == (first.keys[-1], (12, 13, 99, 98), 1)


def test_an_adapter_tells_of_the_blocks_that_are_its_own() -> None:
    """They begin with the block in which its sequence starts to differ."""
    engine, events = scheduler(16), KVEvents()
    engine.kv.record(events)
    engine.add(RequestSpec(1, tuple(range(14)), 1, own_salt=b"adapter", own_from=6))
    step(engine, 99)
    plain, own = events.take()
    assert isinstance(plain, BlockStored) and isinstance(own, BlockStored)
    assert (plain.own_salt, plain.tokens) == (b"", tuple(range(4)))
    assert (own.own_salt, own.tokens, own.parent) == (b"adapter", tuple(range(4, 12)), plain.keys[0])


def test_what_was_not_taken_is_of_no_use_when_all_is_cleared() -> None:
    events = KVEvents()
    events.removed(0, BlockKey(b"a"))
    events.removed(0, BlockKey(b"b"))
    events.removed(1, BlockKey(b"b"))
    keys = [event.keys for event in events.take() if isinstance(event, BlockRemoved)]
    assert keys == [(BlockKey(b"a"), BlockKey(b"b")), (BlockKey(b"b"),)]  # the keys of a group are in one event
    events.removed(0, BlockKey(b"a"))
    events.cleared()
    assert events.take() == [AllBlocksCleared()] and not events.take()


def test_blocks_that_come_from_elsewhere_are_found_and_told_of() -> None:
    """Two of the blocks were cached already; the sequence is admitted with all four."""
    engine, events = scheduler(8), KVEvents()
    engine.add(RequestSpec(1, tuple(range(10)), 1))
    step(engine, 99)
    engine.kv.record(events)
    sequence = CachedSequence(tokens=list(range(20)))
    assert engine.kv.found(sequence, 16) is None
    assert engine.kv.found(sequence, 8) is not None
    [adopted] = engine.kv.adopt(sequence, 16) or ()
    assert sorted(adopted) == [2, 3]
    [stored] = events.take()
    assert isinstance(stored, BlockStored) and stored.tokens == tuple(range(8, 16))
    engine.check()
    assert engine.kv.is_idle and engine.kv.cached_length(sequence) == 16
    engine.add(RequestSpec(2, tuple(range(20)), 1))
    [scheduled] = engine.schedule().sequences
    assert len(scheduled.token_ids) == 4


def test_nothing_comes_from_elsewhere_where_there_is_no_room() -> None:
    """Cached blocks are not evicted for other blocks of the same prompt."""
    engine = scheduler(5)
    engine.add(RequestSpec(1, tuple(range(50, 58)), 8))
    step(engine, 99)  # it uses two of the blocks, and runs
    before = [set(group.cache.blocks) for group in engine.kv.groups]
    assert engine.kv.adopt(CachedSequence(tokens=list(range(20))), 16) is None
    assert [set(group.cache.blocks) for group in engine.kv.groups] == before
    assert engine.kv.adopt(CachedSequence(tokens=list(range(20))), 12) is not None
    assert engine.kv.adopt(CachedSequence(tokens=list(range(20))), 16) is None  # it would need to evict the first three
    engine.kv.groups[0].due.zeros.append(0)
    assert engine.kv.adopt(CachedSequence(tokens=list(range(30, 40))), 4) is None
    engine.check()
