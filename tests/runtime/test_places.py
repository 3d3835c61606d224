"""Groups that evict within a sequence: steps end where evictions happen, and a sequence has no more blocks than
allowed."""

from __future__ import annotations

import pytest
from icc.runtime.batch.scheduled import StepOutcome
from icc.runtime.kv.config import GroupConfig
from icc.runtime.kv.places import CompressedPrompt, HeavyHitters, Places
from icc.runtime.scheduler.request import RequestSpec
from icc.runtime.scheduler.scheduler import Scheduler, SchedulerConfig


def places(policy: Places, length: int, prompt: int) -> list[int]:
    """The slots of a sequence's tokens, computed one by one: a slot is free, or its token was evicted."""
    return [policy.place(position, prompt) for position in range(length)]


def test_an_eighth_goes_when_the_budget_is_full() -> None:
    policy = HeavyHitters(16, 4)
    assert places(policy, 22, 5) == [*range(16), 14, 15, 14, 15, 14, 15]
    assert [policy.until(p, 5) for p in (0, 9, 15, 16, 17, 18)] == [16, 7, 1, 2, 1, 2]
    assert policy.most_blocks(1000, 4) == 4 == policy.most_blocks(16, 4)


def test_a_prompt_is_compressed_once() -> None:
    policy = CompressedPrompt(8, 2)
    assert places(policy, 15, 12) == [*range(12), 8, 9, 10]
    assert places(policy, 12, 8) == list(range(12))
    assert [policy.until(p, 12) for p in (0, 11)] == [12, 1] and policy.until(12, 12) > 1 << 30


@pytest.mark.parametrize("policy", [HeavyHitters(16, 4), CompressedPrompt(8, 2)], ids=["h2o", "snapkv"])
def test_steps_and_blocks(policy: Places) -> None:
    """Prompts beyond the budget, long answers, preemption and steps scheduled ahead."""
    scheduler = Scheduler(SchedulerConfig(3, 16, 16, (GroupConfig(24, 4, 4, policy),)))
    prompts = {1: 30, 2: 5, 3: 23}
    for request, count in prompts.items():
        scheduler.add(RequestSpec(request, tuple(range(count)), 40))
    [group], steps, after = scheduler.kv.groups, 0, 0
    while scheduler.has_work():
        batches = [scheduler.schedule()]
        if batches[0].sequences and (ahead := scheduler.schedule_ahead()) is not None:
            batches.append(ahead)
        for batch in batches:
            for sequence in batch.sequences:
                prompt = prompts[sequence.request_id]
                assert sequence.prompt == prompt
                assert len(sequence.token_ids) <= policy.until(sequence.start, prompt)
                last = policy.place(sequence.start, prompt) + len(sequence.token_ids) - 1
                assert last // 4 < len(sequence.block_tables[0])
            scheduler.update([StepOutcome(s.request_id, 7) for s in batch.sequences if s.num_logits])
            scheduler.check()
        for request in scheduler.queues.running:
            if request.num_computed_tokens > request.tables[0].prompt:
                grown = request.num_computed_tokens - request.tables[0].prompt + 2
                most = 16 if isinstance(policy, HeavyHitters) else max(8, min(request.tables[0].prompt, 8)) + grown
                assert len(request.tables[0]) <= group.blocks_for(most)
                after += 1
        steps += 1
        if steps % 4 == 0 and scheduler.num_running > 1:
            scheduler.queues.preempt(scheduler.queues.running[-1])
    assert scheduler.kv.is_idle and scheduler.num_preemptions > 1 and after > 20
