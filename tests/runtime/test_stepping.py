"""Single steps of an executor: the state after failed steps, trials of a device, and sampling on the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from icc.runtime.batch.scheduled import ScheduledBatch, ScheduledSequence
from icc.runtime.format.manifest import Manifest
from icc.runtime.kv.config import GroupConfig
from icc.runtime.kv.policy import Window
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeDevice, FakeExecutor
from icc.runtime.loop.stepping import Stepper
from icc.runtime.requests.generation import Generation
from icc.runtime.requests.params import SamplingParams
from icc.runtime.speculate.speculator import Speculator
from icc.runtime.speculate.typical import TypicalAcceptance
from oracle_drafters import Fixed

from .test_typical import SMALL, TREE

STEP = ScheduledBatch((ScheduledSequence(-1, (0,), 0, ((0,), (0,)), 1),))  # one token, in the first block of each group


class Numbered(FakeDevice):
    """Records the collected tickets, and fails for ticket 1."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.collected: list[int] = []

    def collect(self, ticket: int) -> Any:
        self.collected.append(ticket)
        if ticket == 1:
            raise OSError("the device failed")
        return super().collect(ticket)


def test_a_loop_knows_how_many_tokens_its_last_step_had(toy_manifest: Callable[..., Manifest]) -> None:
    with LLM(toy_manifest(), FakeExecutor()) as llm:
        counts = [llm.loop.last_step_tokens]
        llm.loop.add([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
        for _ in range(3):
            llm.loop.step()
            counts.append(llm.loop.last_step_tokens)
        assert counts == [0, 3, 1, 0], "a step without work has none"


def test_a_speculator_forgets_each_generation_once_and_hears_of_no_other_request(
    toy_manifest: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`forget` also wakes a speculator that has paused."""
    told: list[int] = []
    monkeypatch.setattr(Speculator, "forget", lambda self, request_id: told.append(request_id))
    loop = LLM(toy_manifest(), FakeExecutor(), speculator=Speculator(Fixed(TREE))).loop
    [generation], score = loop.add([1, 2], SamplingParams(max_tokens=2)), loop.add_score([1, 2])
    for request in (generation, score, generation):
        loop.end(request)
    assert told == [generation.request_id] and not loop.has_work()


def test_all_steps_under_way_are_dropped_the_oldest_first() -> None:
    device = Numbered(more_groups=[GroupConfig(4, 4, 0, Window(4))])
    stepper = Stepper(device)
    assert [stepper.start(STEP, {}).ticket, stepper.start(STEP, {}).ticket] == [1, 2]
    stepper.drop()
    assert device.collected == [1, 2]
    stepper.drop()
    assert device.collected == [1, 2], "they are dropped once"


def test_a_device_is_tried_with_one_token_into_the_first_block_of_each_group() -> None:
    executor = FakeExecutor(more_groups=[GroupConfig(4, 4, 0, Window(4))])
    assert Stepper(executor).works()
    assert executor.batches == [STEP]
    executor.step = lambda batch: (_ for _ in ()).throw(OSError("gone"))  # type: ignore[method-assign]
    assert not Stepper(executor).works()


def test_a_device_leaves_all_rows_of_typical_acceptance_to_the_host(toy_manifest: Callable[..., Manifest]) -> None:
    device = FakeDevice(vocab_size=SMALL, max_step_tokens=64, max_logit_rows=64)
    given: list[list[bool]] = []
    submit = device.submit
    device.submit = lambda batch, rows: (given.append([row is None for row in rows]), submit(batch, rows))[1]  # type: ignore[method-assign,assign]
    llm = LLM(
        toy_manifest(vocab_size=SMALL, eos_token_ids=[]), device, speculator=Speculator(Fixed(TREE), adaptive=False)
    )
    assert llm.loop.speculator is not None
    llm.loop.speculator.typical = TypicalAcceptance()
    llm.generate([[1, 2]], SamplingParams(max_tokens=8, temperature=1.0, seed=1))
    assert [True] in given and [True] * (len(TREE) + 1) in given and all(all(rows) for rows in given)


@pytest.mark.parametrize("executor", [FakeExecutor, FakeDevice])
def test_a_speculator_is_told_how_long_a_step_took(
    executor: type[FakeExecutor], toy_manifest: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    monkeypatch.setattr(Speculator, "learn", lambda self, batch, outcomes, rows, seconds: told.append(seconds))
    llm = LLM(toy_manifest(vocab_size=SMALL, eos_token_ids=[]), executor(vocab_size=SMALL))
    llm.loop.speculator = Speculator(Fixed(TREE), adaptive=False)
    before = time.perf_counter()
    llm.generate([[1, 2]], SamplingParams(max_tokens=4, temperature=0.0))
    assert told and min(told) > 0 and sum(told) <= time.perf_counter() - before


def test_whoever_waits_for_a_device_that_has_failed_for_good_is_told_so(toy_manifest: Callable[..., Manifest]) -> None:
    """Each request ends, even if it was never in a step, and nothing is left to run."""
    executor = FakeExecutor(vocab_size=64, max_batch_size=1)
    loop = LLM(toy_manifest(vocab_size=64), executor).loop
    executor.step = lambda batch: (_ for _ in ()).throw(OSError("gone"))  # type: ignore[method-assign]
    waiting: list[Generation] = [loop.add([number], SamplingParams(max_tokens=4))[0] for number in (1, 2, 3)]
    with pytest.raises(OSError, match="gone"):
        loop.step()
    assert [generation.finish_reason for generation in waiting] == ["error"] * 3
    assert not loop.has_work() and not loop.requests.trial.running and loop.scheduler.kv.is_idle
