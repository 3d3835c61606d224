"""The scheduler with little memory: all orders of a few requests, and many requests with memory for one."""

from __future__ import annotations

import itertools

import pytest
from icc.runtime.kv.config import GroupConfig
from icc.runtime.scheduler.request import RequestSpec
from icc.runtime.scheduler.scheduler import Scheduler, SchedulerConfig
from shadow_device import Device


def test_all_orders_of_three_requests_in_four_blocks() -> None:
    """Exhaustive: the arrival time of each of three requests, and the time at which the second is aborted, if it is."""
    prompts = [(0, 1, 0), (0, 1, 0, 1, 1), (0, 1)]
    for arrivals in itertools.product(range(4), repeat=3):
        for abort_at in (None, 0, 1, 2, 3, 5):
            config = SchedulerConfig(2, 4, 2, (GroupConfig(4, 2, arrivals[0]),))
            scheduler = Scheduler(config)
            device = Device(config, scheduler)
            ended: list[int] = []
            for now in range(40):
                for request_id, arrival in enumerate(arrivals):
                    if arrival == now:
                        spec = RequestSpec(request_id, prompts[request_id], 4 - request_id)
                        scheduler.add(spec)
                        device.add(spec)
                batch = scheduler.schedule()
                assert batch.sequences or not scheduler.has_work()
                outcomes = device.run(batch)
                if abort_at == now and scheduler.abort(1):
                    ended.append(1)
                device.sampled(outcomes)
                ended += [done.request_id for done in scheduler.update(outcomes)]
                scheduler.check()
            assert sorted(ended) == [0, 1, 2], (arrivals, abort_at)


@pytest.mark.parametrize("host", [0, 9, 500])
@pytest.mark.parametrize(("blocks", "new"), [(17, 26), (20, 26), (33, 26), (64, 120)])
def test_little_memory_preempts_each_request_at_most_four_times(blocks: int, new: int, host: int) -> None:
    """KV for about one of the largest request: all complete, few preemptions (RELIABILITY R3)."""
    config = SchedulerConfig(16, 32, 16, (GroupConfig(blocks, 2, host),))
    scheduler = Scheduler(config)
    device = Device(config, scheduler)
    for request_id in range(40):
        spec = RequestSpec(request_id, tuple((request_id >> bit) & 1 for bit in range(1 + request_id % 5)), new)
        scheduler.add(spec)
        device.add(spec)
    requests = dict(scheduler.queues.requests)
    ended, steps = [], 0
    while scheduler.has_work():
        batch = scheduler.schedule()
        assert batch.sequences
        outcomes = device.run(batch)
        device.sampled(outcomes)
        ended += [done.reason for done in scheduler.update(outcomes)]
        if steps % 16 == 0:
            scheduler.check()
        steps += 1
    assert ended == ["length"] * 40
    assert max(request.num_preemptions for request in requests.values()) <= 4
    assert steps < 40 * (new + 5)
    assert (scheduler.num_swaps > 0) == (host > 0) and scheduler.num_swaps <= scheduler.num_preemptions
    if host == 500:  # memory for all requests: nothing is computed twice
        assert scheduler.num_swaps == scheduler.num_preemptions
        assert device.computed <= sum(1 + i % 5 + new - 1 for i in range(40))
