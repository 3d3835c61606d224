"""Scheduler and block pool: each behaviour once, by example."""

from __future__ import annotations

from typing import Any

import pytest
from icc.runtime.batch.scheduled import Draft, ScheduledBatch, StepOutcome, Verdict
from icc.runtime.errors import CapacityError, RequestError
from icc.runtime.kv.block_pool import BlockPool
from icc.runtime.kv.config import GroupConfig
from icc.runtime.kv.policy import WithinStep
from icc.runtime.kv.prefix_cache import PrefixCache, child_key, root_key
from icc.runtime.scheduler.request import RequestSpec, ScheduledRequest
from icc.runtime.scheduler.scheduler import Scheduler, SchedulerConfig


def scheduler(blocks: int = 16, block_size: int = 4, batch: int = 4, tokens: int = 8, rows: int = 8) -> Scheduler:
    return Scheduler(SchedulerConfig(batch, tokens, rows, (GroupConfig(blocks, block_size),)))


def shape(batch: ScheduledBatch) -> list[tuple[int, int, int, int]]:
    """(request, start, tokens, logits) of each sequence."""
    return [(s.request_id, s.start, len(s.token_ids), s.num_logits) for s in batch.sequences]


def step(s: Scheduler, token: int | None = 1, verdict: Verdict = Verdict.CONTINUE) -> list[tuple[int, int, int, int]]:
    """Run a step in which every sequence that wants logits samples `token`."""
    batch = s.schedule()
    s.update([StepOutcome(q.request_id, token, verdict) for q in batch.sequences if q.num_logits])
    s.check()
    return shape(batch)


def test_a_long_prompt_is_cut_into_chunks_beside_decodes() -> None:
    s = scheduler()
    s.add(RequestSpec(1, (1, 2, 3), 9))
    assert step(s) == [(1, 0, 3, 1)]
    s.add(RequestSpec(2, tuple(range(17)), 9))
    assert step(s) == [(1, 3, 1, 1), (2, 0, 7, 0)]
    assert step(s) == [(1, 4, 1, 1), (2, 7, 7, 0)]
    assert step(s) == [(1, 5, 1, 1), (2, 14, 3, 1)]
    assert step(s) == [(1, 6, 1, 1), (2, 17, 1, 1)]


def test_a_sequence_whose_tokens_see_later_ones_runs_in_one_step_and_leaves_nothing() -> None:
    s = Scheduler(SchedulerConfig(4, 16, 8, (GroupConfig(20, 4, policy=WithinStep()),)))
    for request_id, length in enumerate((9, 6, 3, 1, 16, 2), start=1):
        s.add(RequestSpec(request_id, tuple(range(length)), 0, first_row=request_id == 2))
    batch = s.schedule()  # the third one would fit, but must not be served before earlier requests
    assert shape(batch) == [(1, 0, 9, 1), (2, 0, 6, 1)] and [q.first_row for q in batch.sequences] == [False, True]
    assert [done.request_id for done in s.update([StepOutcome(1, None), StepOutcome(2, None)])] == [1, 2]
    assert [step(s, None), step(s, None), step(s, None)] == [
        [(3, 0, 3, 1), (4, 0, 1, 1)],
        [(5, 0, 16, 1)],
        [(6, 0, 2, 1)],
    ]
    assert s.kv.is_idle and not s.kv.groups[0].pool.num_cached
    s.add(RequestSpec(7, tuple(range(9)), 0))
    assert step(s, None) == [(7, 0, 9, 1)], "nothing of the first is found again"
    with pytest.raises(CapacityError, match="one step"):
        s.add(RequestSpec(8, tuple(range(17)), 0))


def test_a_cached_prefix_is_not_computed_again() -> None:
    s = scheduler(tokens=16, rows=4)
    s.add(RequestSpec(1, tuple(range(10)), 1))
    assert step(s) == [(1, 0, 10, 1)]
    assert s.kv.groups[0].pool.num_cached == 2  # the third block is not full
    s.add(RequestSpec(2, (*range(8), 99), 1))
    assert step(s) == [(2, 8, 1, 1)]
    s.add(RequestSpec(3, tuple(range(8)), 1))  # the last token must run, so the last block is computed again
    assert step(s) == [(3, 4, 4, 1)]
    s.add(RequestSpec(4, (*range(8), 99), 1, salt=b"other"))
    assert step(s) == [(4, 0, 9, 1)]
    s.add(RequestSpec(5, (*range(8), 99), 1, use_cache=False))
    assert step(s) == [(5, 0, 9, 1)]


def test_the_same_prompt_at_the_same_time_is_computed_once() -> None:
    s = scheduler(tokens=16, rows=4)
    for request_id in (1, 2, 3):
        s.add(RequestSpec(request_id, tuple(range(10)), 3))
    assert step(s) == [(1, 0, 10, 1)]
    assert step(s) == [(1, 10, 1, 1), (2, 8, 2, 1), (3, 8, 2, 1)]
    assert s.kv.groups[0].pool.num_free + s.kv.groups[0].pool.num_cached == 16 - (2 + 3)


def test_an_aborted_first_request_does_not_hold_up_those_that_wait_for_its_prefix() -> None:
    s = scheduler(tokens=4, rows=4)
    s.add(RequestSpec(1, tuple(range(10)), 3))
    s.add(RequestSpec(2, tuple(range(10)), 3))
    assert step(s) == [(1, 0, 4, 0)]
    s.abort(1)
    assert step(s) == [(2, 4, 4, 0)]


def test_preemption_takes_the_latest_and_gives_the_same_tokens_back() -> None:
    s = scheduler(blocks=5, block_size=2, tokens=8)
    s.add(RequestSpec(1, (1, 2, 3), 6))
    s.add(RequestSpec(2, (5, 6), 6))
    assert step(s, 7) == [(1, 0, 3, 1), (2, 0, 2, 1)]
    assert step(s, 7) == [(1, 3, 1, 1), (2, 2, 1, 1)]
    assert step(s, 7) == [(1, 4, 1, 1), (2, 3, 1, 1)]  # five blocks: 3 + 2
    assert step(s, 7) == [(1, 5, 1, 1)]  # request 2 needs a third block, is the last in rank, and is preempted itself
    assert s.num_running == 1 and s.num_waiting == 1
    while s.num_running == 1 and s.has_work():
        assert step(s, 7)[0][0] == 1 or s.num_running
        if s.num_waiting == 0:
            break
    s.check()
    while s.has_work():
        step(s, 7)
    assert s.kv.groups[0].pool.num_available == 5


def test_priority_goes_before_arrival() -> None:
    s = scheduler(batch=1, tokens=8)
    s.add(RequestSpec(1, (1,), 1, priority=1))
    s.add(RequestSpec(2, (2,), 1, priority=0))
    assert [step(s)[0][0], step(s)[0][0]] == [2, 1]


def test_all_logits_are_cut_by_the_rows_that_fit() -> None:
    s = scheduler(batch=2, tokens=8, rows=3)
    s.add(RequestSpec(1, tuple(range(7)), 0, all_logits=True, use_cache=False))
    assert [step(s), step(s), step(s)] == [[(1, 0, 3, 3)], [(1, 3, 3, 3)], [(1, 6, 1, 1)]]
    assert not s.has_work()


def test_what_can_never_fit_is_refused() -> None:
    s = scheduler(blocks=2, block_size=4)
    s.add(RequestSpec(1, (1,) * 8, 1))  # the one new token is never computed
    with pytest.raises(CapacityError, match="needs 3 KV blocks of 4 tokens, the cache has 2"):
        s.add(RequestSpec(2, (1,) * 8, 2))
    with pytest.raises(RequestError, match="in use"):
        s.add(RequestSpec(1, (1,), 1))
    with pytest.raises(RequestError, match="at least one token"):
        s.add(RequestSpec(3, (), 1))


def test_an_error_makes_the_blocks_unfindable() -> None:
    s = scheduler(tokens=16, rows=4)
    s.add(RequestSpec(1, tuple(range(9)), 4))
    step(s)
    assert len(s.kv.groups[0].cache) == 2
    step(s, verdict=Verdict.ERROR)
    assert len(s.kv.groups[0].cache) == 0 and s.kv.groups[0].pool.num_free == 16
    s.add(RequestSpec(2, tuple(range(9)), 1))
    assert step(s) == [(2, 0, 9, 1)]


def test_a_block_table_is_the_same_object_while_it_does_not_change() -> None:
    s = scheduler()
    s.add(RequestSpec(1, (1, 2), 9))
    tables = []
    for _ in range(4):
        batch = s.schedule()
        tables.append(batch.sequences[0].block_tables[0])
        s.update([StepOutcome(1, 1)])
    assert tables[0] is tables[1] is tables[2] and len(tables[3]) == 2


def test_pool_evicts_the_least_recently_released_tail_first() -> None:
    cache = PrefixCache()
    pool = BlockPool(3, cache)
    table = pool.allocate(3)
    key = root_key()
    for block in table:
        key = child_key(key, [block])
        cache.publish(key, block)
    pool.release(table)
    assert (pool.num_free, pool.num_cached) == (0, 3)
    assert pool.allocate(1) == [table[2]]  # the tail is evicted before the head
    assert not cache.holds(table[2]) and cache.holds(table[0])
    pool.share(table[0])
    pool.check([[table[2]], [table[0]]])
    assert not pool.can_allocate(2)


def test_keys_depend_on_every_token_and_on_the_salt() -> None:
    keys = {child_key(root_key(salt), tokens) for salt in (b"", b"a") for tokens in ([1, 2], [2, 1], [1], [12], [258])}
    assert len(keys) == 10
    assert child_key(child_key(root_key(), [1]), [2]) != child_key(root_key(), [1, 2])


def order_of_service(s: Scheduler) -> list[int]:
    """Request ids in the order of admission; every request samples one token."""
    order: list[int] = []
    while s.has_work():
        order += [request for request, start, _, _ in step(s) if start == 0]
    return order


def test_clients_are_served_in_turn_however_many_requests_each_has_sent() -> None:
    s = scheduler(batch=1)
    for request_id in range(6):
        s.add(RequestSpec(request_id, (1,), 1, client="many"))
    s.add(RequestSpec(10, (1,), 1, client="few"))
    s.add(RequestSpec(11, (1,), 1, client="few"))
    assert order_of_service(s) == [0, 10, 1, 11, 2, 3, 4, 5]


def test_a_client_pays_for_the_tokens_it_asks_for_and_not_for_those_it_leaves() -> None:
    s = scheduler(batch=1)
    s.add(RequestSpec(1, (1,), 30, client="long"))
    for request_id in (2, 3):
        s.add(RequestSpec(request_id, (1,), 3, client="short"))
    s.add(RequestSpec(4, (1,), 1, client="long"))
    s.abort(1)  # its 31 tokens were never served, but request 4 got its place in the queue while they counted
    s.add(RequestSpec(5, (1,), 1, client="long"))
    assert order_of_service(s) == [2, 3, 4, 5]
    s.add(RequestSpec(6, (1,), 30, client="long"))
    assert step(s, verdict=Verdict.STOP) == [(6, 0, 1, 1)]
    s.add(RequestSpec(7, (1,), 1, client="long"))
    s.add(RequestSpec(8, (1,), 1, client="short"))
    assert order_of_service(s) == [7, 8]


def test_what_a_request_leaves_is_its_client_s_at_once() -> None:
    """The next request takes the place where the last one began, before an equally late request of another client."""
    s = scheduler(batch=1)
    s.add(RequestSpec(1, (1,), 30, client="long"))  # from 0 to 31
    s.add(RequestSpec(2, (1,), 1, client="long"))  # from 31 to 33
    s.add(RequestSpec(3, (1,), 31, client="other"))  # from 0 to 32
    s.add(RequestSpec(4, (1,), 1, client="other"))  # from 32 on
    s.abort(1)
    s.add(RequestSpec(5, (1,), 1, client="long"))  # from 31 on, not from 33
    assert order_of_service(s) == [3, 2, 5, 4]


def test_priority_goes_before_fairness() -> None:
    s = scheduler(batch=1)
    for request_id in (1, 2):
        s.add(RequestSpec(request_id, (1,), 1, priority=0, client="a"))
    s.add(RequestSpec(3, (1,), 1, priority=1, client="b"))
    assert order_of_service(s) == [1, 2, 3]


def test_guesses_that_are_accepted_become_tokens_and_are_moved_to_their_places() -> None:
    """All of a chain, whose tokens are in place; a branch of a tree, whose tokens move; too many accepted guesses are a
    bug."""

    def take(parents: tuple[int, ...], *accepted: int, again: bool = False) -> tuple[list[int], int, list[Any]]:
        request = ScheduledRequest(
            spec=RequestSpec(1, (1, 2, 3), 9), arrival=0, tokens=[1, 2, 3], num_computed_tokens=3
        )
        request.draft = Draft((7, 8, 9), parents)
        moves = request.take_accepted(accepted, again)
        return request.tokens[3:], request.num_computed_tokens, moves

    assert take((-1, 0, 1), 0, 1, 2) == ([7, 8, 9], 6, [])
    assert take((-1, -1, 1), 1, 2) == ([8, 9], 5, [(4, 3), (5, 4)])
    assert take((-1, 0, 1), 0, 1, 2, again=True) == ([7, 8, 9], 3, [])
    assert take((-1, 0, 1)) == ([], 3, [])
    with pytest.raises(AssertionError):
        take((-1, 0, 1), 0, 1, 2, 2)


def test_guesses_share_what_room_is_left() -> None:
    """Eight tokens per step for three decoding requests leave five guesses: the first request gets all three of its
    own."""
    s = scheduler(tokens=8, rows=64)
    for request_id in (1, 2, 3):
        s.add(RequestSpec(request_id, (request_id,), 9))
    step(s)
    drafts = {request_id: Draft.chain((7, 8, 9)) for request_id in (1, 2, 3)}
    assert [len(q.token_ids) for q in s.schedule(drafts).sequences] == [4, 3, 1]
