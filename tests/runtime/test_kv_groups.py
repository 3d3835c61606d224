"""KV groups side by side: each behaviour once, by example."""

from __future__ import annotations

import pytest
from icc.runtime.batch.scheduled import ScheduledBatch, StepOutcome, Verdict
from icc.runtime.errors import CapacityError
from icc.runtime.kv.cache import KVCache
from icc.runtime.kv.config import GroupConfig
from icc.runtime.kv.group import Group
from icc.runtime.kv.places import HeavyHitters
from icc.runtime.kv.policy import CachePolicy, KeepAll, Latest, Window, WithinStep
from icc.runtime.kv.prefix_cache import BlockKey
from icc.runtime.kv.sequence import NO_BLOCK, CachedSequence
from icc.runtime.scheduler.request import RequestSpec
from icc.runtime.scheduler.scheduler import Scheduler, SchedulerConfig
from kv_policies import Chunks, Sinks


def two_groups(
    full: int = 40, window: int = 8, size: int = 6, tokens: int = 16, host: int = 0, batch: int = 2
) -> Scheduler:
    """A group that keeps all tokens, and one with a window of `size` tokens; blocks have 4 tokens."""
    groups = GroupConfig(full, 4, host), GroupConfig(window, 4, host, Window(size))
    return Scheduler(SchedulerConfig(batch, tokens, tokens, groups))


def step(s: Scheduler, verdict: Verdict = Verdict.CONTINUE) -> ScheduledBatch:
    """Run a step in which every sequence that wants logits samples 1."""
    batch = s.schedule()
    s.update([StepOutcome(q.request_id, 1, verdict) for q in batch.sequences if q.num_logits])
    s.check()
    return batch


def run(s: Scheduler, spec: RequestSpec) -> int:
    """Run a request alone to its end. Returns how many of its tokens were cached."""
    s.add(spec)
    cached = step(s).sequences[0].start
    while s.has_work():
        step(s)
    return cached


def used(group: Group) -> int:
    return group.pool.num_blocks - group.pool.num_available


def test_blocks_behind_the_window_are_given_back_while_the_request_runs() -> None:
    s = two_groups(batch=1)
    s.add(RequestSpec(1, tuple(range(30)), 100))
    full, window = s.kv.groups
    most = 0
    for _ in range(90):
        [sequence] = step(s).sequences
        most = max(most, sum(block != NO_BLOCK for block in sequence.block_tables[1]))
    assert sequence.start == 117 and used(full) == 30
    assert sequence.block_tables[1][:27] == (NO_BLOCK,) * 27 and NO_BLOCK not in sequence.block_tables[1][27:]
    assert used(window) <= 3 == window.most_blocks(1000)
    assert most == 6  # 16 tokens of a chunk, and the window of its first token


def test_a_window_group_alone_needs_no_more_blocks_for_a_longer_text() -> None:
    s = Scheduler(SchedulerConfig(1, 4, 4, (GroupConfig(3, 4, 0, Window(6)),)))
    assert run(s, RequestSpec(1, tuple(range(500)), 300)) == 0
    with pytest.raises(CapacityError, match="needs 4 KV blocks of 4 tokens, the cache has 3"):
        Scheduler(SchedulerConfig(1, 4, 4, (GroupConfig(3, 4, 0, Window(12)),))).add(RequestSpec(1, (1,) * 13, 1))


def test_a_prefix_needs_only_the_end_of_it_in_a_window_group() -> None:
    s = two_groups(window=9)
    run(s, RequestSpec(1, tuple(range(40)), 1))
    full, window = s.kv.groups
    assert len(full.cache) == 10 and len(window.cache) == 9  # old blocks stay cached until others need them
    assert run(s, RequestSpec(2, (*range(38), 7, 7, 7), 1)) == 36
    for number in range(7):
        window.pool.discard(window.cache.find(key_of(window, number)) or 0)
    assert run(s, RequestSpec(3, (*range(38), 7, 7), 1)) == 36
    assert run(s, RequestSpec(4, (*range(30), 7, 7), 1)) == 0  # blocks 5 and 6 are gone


def key_of(group: Group, number: int) -> BlockKey:
    """The key of block `number` of the tokens 0, 1, 2, ..."""
    return CachedSequence(tokens=list(range(100))).key(number, group.block_size)


def test_groups_have_blocks_of_their_own_size() -> None:
    groups = GroupConfig(40, 4), GroupConfig(20, 6, 0, Window(6))
    s = Scheduler(SchedulerConfig(2, 64, 64, groups))
    run(s, RequestSpec(1, tuple(range(40)), 1))
    assert run(s, RequestSpec(2, tuple(range(40)), 1)) == 36  # full blocks in both groups: a multiple of 12


def test_a_preempted_request_is_kept_whole_or_not_at_all() -> None:
    """A part of it would not suffice to continue a window."""
    for host, saved in ((20, 1), (5, 0)):
        s = two_groups(host=host)
        s.add(RequestSpec(1, tuple(range(30)), 20))
        for _ in range(5):
            step(s)
        before = s.queues.running[0].num_computed_tokens
        s.queues.preempt(s.queues.running[0])
        assert s.num_swaps == saved
        out = step(s)  # no other request ran in between
        assert [len(upkeep.swap_outs) for upkeep in out.upkeep] == ([9, 2] if saved else [0, 0])
        assert [len(upkeep.swap_ins) for upkeep in out.upkeep] == [1 if saved else 0] * 2  # others are cached still
        assert out.sequences[0].start == (before if saved else 32)


def test_what_a_failed_request_has_given_back_is_not_found_either() -> None:
    s = two_groups()
    s.add(RequestSpec(1, tuple(range(30)), 20))
    step(s)
    step(s, Verdict.ERROR)
    assert not any(len(group.cache) for group in s.kv.groups) and s.kv.is_idle
    s.add(RequestSpec(2, (1, 2), 1))
    zeros = [upkeep.zeros for upkeep in step(s).upkeep]
    assert [len(set(blocks)) for blocks in zeros] == [8, 8]


def test_a_prefill_that_finds_no_blocks_waits_and_the_first_in_rank_goes_on() -> None:
    s = two_groups(window=5, tokens=64)
    for request_id in (1, 2):
        s.add(RequestSpec(request_id, tuple(range(100 * request_id, 100 * request_id + 40)), 2))
    steps = []
    while s.has_work():
        steps.append([(q.request_id, len(q.token_ids)) for q in step(s).sequences])
    assert steps[0] == [(1, 20)]  # five blocks of four
    assert sum(count for row in steps for request, count in row if request == 2) >= 41


def test_states_are_kept_where_steps_end() -> None:
    """Kept are the state after each chunk of a prompt, and the last one of an answer; states have a group of their own,
    beside one with all keys."""
    groups = GroupConfig(60, 4), GroupConfig(20, 4, 0, Latest())
    s = Scheduler(SchedulerConfig(2, 16, 16, groups))
    states = s.kv.groups[1]
    assert run(s, RequestSpec(1, tuple(range(40)), 1)) == 0
    found = [n for n in range(10) if states.cache.find(key_of(states, n)) is not None]
    assert {2, 3, 6, 7, 8, 9} <= set(found) and len(found) <= 7 and used(states) == 0  # steps of 16, 16 and 8 tokens
    assert run(s, RequestSpec(2, (*range(39), 7, 7, 7), 1)) == 36
    assert run(s, RequestSpec(3, (*range(30), 7, 7), 1)) == 16 + 12
    before = len(states.cache)
    assert run(s, RequestSpec(4, tuple(range(100, 110)), 80)) == 0
    assert len(states.cache) - before <= 4
    assert run(s, RequestSpec(5, (*range(100, 110), *[1] * 79, 7), 1)) == 88


def test_states_are_kept_where_others_are_likely_to_go_on() -> None:
    """States are kept after the first turn of a conversation, and where a second prompt diverges from the first; all in
    one large step."""

    def cached(first_turn: int, *prompts: tuple[int, ...]) -> list[int]:
        s = Scheduler(SchedulerConfig(2, 64, 64, (GroupConfig(60, 4), GroupConfig(20, 4, 0, Latest()))))
        return [run(s, RequestSpec(n, prompt, 3, first_turn=first_turn)) for n, prompt in enumerate(prompts)]

    system = tuple(range(22))
    talks = [(*system, *[100 + n] * 30) for n in range(4)]
    assert cached(22, *talks) == [0, 20, 20, 20]
    assert cached(0, *talks) == [0, 0, 20, 20]
    assert cached(0, talks[0], (*talks[0][:39], 7, 7, 7), talks[0][:38]) == [0, 0, 36]
    assert cached(51, talks[0], talks[0]) == [0, 48]
    assert cached(3, talks[0], talks[1]) == [0, 0]  # shorter than a block


@pytest.mark.parametrize(
    "policy", [KeepAll(), Window(1), Window(2), Window(7), Window(32), Sinks(3, 5), Sinks(4, 1), Chunks(6), Latest()]
)
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_policies_keep_their_word(policy: CachePolicy, block_size: int) -> None:
    """A token that was dropped never returns, and at most the stated number of blocks is held; some policy reaches
    it."""
    group = Group(GroupConfig(1, block_size, 0, policy))
    before: set[int] = set()
    largest = 0
    for position in range(80):
        kept = {p for part in policy.kept(position) for p in part}
        assert kept <= before | {position - 1} and all(p < position for p in kept)
        assert set(group.numbers(position)) == {p // block_size for p in kept}
        largest = max(largest, len({*group.numbers(position), position // block_size}))
        assert largest <= group.most_blocks(position + 1)
        before = kept
    assert group.most_blocks(80) - largest <= isinstance(policy, Sinks | Chunks | Latest)


def sequence_of(cache: KVCache, count: int) -> CachedSequence:
    return CachedSequence(tokens=list(range(count)), tables=cache.empty_tables())


def test_a_prompt_waits_for_another_only_where_that_saves_it_a_block() -> None:
    """The last token of a prompt is always computed, so that waiting for the block which it completes saves nothing."""
    cache = KVCache((GroupConfig(20, 4), GroupConfig(20, 2)))  # the common block size is 4 tokens
    first = sequence_of(cache, 12)
    cache.open(first, cache.prefix(first, 0))
    assert [cache.is_being_computed(sequence_of(cache, count), 0) for count in (1, 4, 5, 8, 9, 12)] == [
        False, False, True, True, True, True,
    ]  # fmt: skip
    assert [cache.is_being_computed(sequence_of(cache, count), 4) for count in (5, 8, 9, 12)] == [
        False, False, True, True,
    ]  # fmt: skip
    assert not cache.is_being_computed(sequence_of(cache, 30), 12), "that block nobody computes"
    saved = sequence_of(cache, 13)
    saved.num_saved_tokens = 11  # they end in the block before the last
    assert cache.is_being_computed(saved, 4)
    saved.num_saved_tokens = 12
    assert not cache.is_being_computed(saved, 4)


@pytest.mark.parametrize(
    ("tokens", "computed", "blocks"),
    [(9, 2, [1, 2]), (9, 3, [1, 2]), (9, 4, [2, 3]), (9, 7, [2, 4]), (9, 8, [3, 5]), (8, 8, [2, 4])],
)
def test_what_is_cut_is_what_the_next_token_does_not_need(tokens: int, computed: int, blocks: list[int]) -> None:
    cache = KVCache((GroupConfig(20, 4), GroupConfig(20, 2)))
    sequence = sequence_of(cache, tokens)
    cache.open(sequence, cache.prefix(sequence, 0))
    cache.grow(sequence, 16)
    sequence.num_computed_tokens = computed
    cache.cut(sequence)
    assert [len(table) for table in sequence.tables] == blocks
    assert [used(group) for group in cache.groups] == blocks, "and it is free again"


@pytest.mark.parametrize(("policy", "blocks"), [(KeepAll(), 2), (WithinStep(), 0)])
def test_nobody_waits_for_blocks_of_a_cache_that_keeps_nothing(policy: CachePolicy, blocks: int) -> None:
    cache = KVCache((GroupConfig(20, 4, 0, policy),))
    sequence = sequence_of(cache, 9)
    cache.open(sequence, cache.prefix(sequence, cache.cached_length(sequence)))
    assert len(cache._pending) == blocks and cache.is_being_computed(sequence_of(cache, 9), 0) == bool(blocks)


def test_blocks_of_one_token_are_looked_up_as_others_are() -> None:
    cache = KVCache((GroupConfig(20, 1),))
    assert cache.cached_length(sequence_of(cache, 2)) == 0, "nobody has computed the first"


def test_tables_hold_what_their_shortest_has_blocks_for() -> None:
    cache = KVCache((GroupConfig(20, 4), GroupConfig(20, 2)))
    sequence = sequence_of(cache, 9)
    cache.grow(sequence, 5)  # two blocks of 4, three of 2
    assert [cache.holds(sequence, count) for count in (5, 6, 7, 8)] == [True, True, False, False]


def test_a_fork_shares_all_and_who_writes_first_copies_the_last_block() -> None:
    groups = (GroupConfig(20, 4), GroupConfig(20, 4, 0, Latest()), GroupConfig(20, 4, 0, HeavyHitters(64, 16)))
    cache = KVCache(groups)
    one = CachedSequence(tokens=list(range(10)), tables=cache.empty_tables(10))
    cache.open(one, cache.prefix(one, 0))
    cache.grow(one, 10)
    one.num_computed_tokens = 10
    before = [used(group) for group in cache.groups]
    other = CachedSequence(tokens=[*range(10), 7], tables=cache.fork(one), num_computed_tokens=10)
    assert [used(group) for group in cache.groups] == before, "a fork takes nothing"
    cache.own(other)
    assert [len(group.due.copies) for group in cache.groups] == [1, 1, 3], (
        "what is read changes where tokens are evicted"
    )
    for group, table, copy in zip(cache.groups, one.tables, other.tables, strict=True):
        assert group.due.copies[-1] == (table.blocks[2], copy.blocks[2])
        assert (table.blocks[:2] == copy.blocks[:2]) == (not group.evicts)
    cache.own(one)
    assert [len(group.due.copies) for group in cache.groups] == [1, 1, 3], "it is the only one that still has them"
    full = CachedSequence(tokens=list(range(8)), tables=cache.empty_tables(8))
    cache.open(full, cache.prefix(full, 0))
    full.num_computed_tokens = 8
    cache.own(CachedSequence(tokens=[*range(8), 7], tables=cache.fork(full), num_computed_tokens=8))
    assert len(cache.groups[0].due.copies) == 1, "full blocks are never written"


def test_beams_keep_their_places_in_the_batch() -> None:
    s = Scheduler(SchedulerConfig(5, 16, 16, (GroupConfig(40, 4),)))
    s.add(RequestSpec(1, tuple(range(9)), 4, beams=3))
    s.add(RequestSpec(2, tuple(range(20, 25)), 4, beams=3))
    s.add(RequestSpec(3, tuple(range(30, 34)), 4))
    batch = s.schedule()
    assert [(q.request_id, q.num_logits) for q in batch.sequences] == [(1, 1)], "two beams more will come"
    s.update([StepOutcome(1, None)])
    assert s.branch(1, [(0, 50), (0, 51)]) == [0, 1]
    batch = s.schedule()
    s.update([StepOutcome(1, None, beam=q.beam) for q in batch.sequences])
    assert [(q.beam, q.token_ids, q.start) for q in batch.sequences] == [(0, (50,), 9), (1, (51,), 9)]
    [upkeep] = batch.upkeep
    assert len(upkeep.copies) == 1, "the block of the last token is copied once"
    tables = [q.block_tables[0] for q in batch.sequences]
    assert s.branch(1, [(1, 60), (1, 61), (1, 62)]) == [1, 0, 2]
    batch = s.schedule()
    assert [q.token_ids for q in batch.sequences] == [(61,), (60,), (62,)]
    assert len(batch.upkeep[0].copies) == 2 and tables[1][:2] == batch.sequences[1].block_tables[0][:2]
    s.update([StepOutcome(1, None, beam=q.beam) for q in batch.sequences])
    assert s.abort(1)
    assert [q.request_id for q in s.schedule().sequences] == [2, 3]
    s.check()
