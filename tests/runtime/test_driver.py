"""LoopDriver: the events that a listener gets for tasks, whatever happens to them, and that no task remains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from icc.runtime.batch.scheduled import ScheduledBatch
from icc.runtime.errors import IccError, RequestError
from icc.runtime.format.manifest import EmbeddingFacts, Manifest
from icc.runtime.llm import LLM
from icc.runtime.loop.driver import EngineTask, LoopDriver, TaskListener
from icc.runtime.loop.fake import FakeDevice, FakeExecutor
from icc.runtime.query import Query
from icc.runtime.requests.params import SamplingParams
from icc.runtime.requests.prompt_logprobs import PromptScores

POISON = 40  # a prompt that begins with this token fails


class Heard(TaskListener[EngineTask]):
    """Keeps all events."""

    def __init__(self) -> None:
        self.tokens: dict[EngineTask, list[int | None]] = {}
        self.said: list[tuple[str, EngineTask]] = []

    def outputs(self, task: EngineTask) -> None:
        for generation in task.generations:
            while generation.outputs:
                self.tokens.setdefault(task, []).append(generation.outputs.popleft().token_id)

    def read(self, task: EngineTask) -> None:
        self.said.append(("read", task))

    def failed(self, task: EngineTask, error: Exception) -> None:
        self.said.append((f"failed: {error}", task))

    def lost(self, task: EngineTask, error: Exception) -> None:
        self.said.append((f"lost: {error}", task))


class Side:
    def __init__(self, manifest: Manifest, executor: FakeExecutor) -> None:
        self.loop = LLM(manifest, executor).loop
        self.executor, self.heard = executor, Heard()
        self.driver = LoopDriver(self.loop, self.heard)

    def submit(self, *prompt: int, scored: int | None = None, vector: bool = False, **params: Any) -> EngineTask:
        given = SamplingParams(**{"max_tokens": 3, "temperature": 0.0, **params})
        task = EngineTask(Query(prompt, given, vector=vector), scored=scored)
        self.driver.submit(task)
        return task

    def run(self) -> None:
        while self.driver.has_work():
            self.driver.step()
        assert not self.driver._generating and not self.driver._reading and self.loop.scheduler.kv.is_idle

    def fail(self, error: Callable[[ScheduledBatch], bool]) -> None:
        """Let the steps fail for which `error` is true."""
        step = self.executor.step

        def fails(batch: ScheduledBatch) -> np.ndarray:
            if error(batch):
                raise OSError("the device failed")
            return step(batch)

        self.executor.step = fails  # type: ignore[method-assign]


@pytest.fixture(params=[FakeExecutor, FakeDevice])
def make(request: Any, toy_manifest: Callable[..., Manifest]) -> Callable[..., Side]:
    def side(embeds: bool = False, **changes: Any) -> Side:
        manifest = toy_manifest(vocab_size=64, max_seq_len=64, eos_token_ids=[], **changes)
        if embeds:
            manifest = msgspec.structs.replace(manifest, embedding=EmbeddingFacts("mean", False, 64))
        return Side(manifest, request.param(vocab_size=64))

    return side


def test_each_task_is_told_of_its_own_outputs(make: Callable[..., Side]) -> None:
    side = make()
    first, second = side.submit(1), side.submit(10, n=2, max_tokens=2)
    other = side.loop.add([30], SamplingParams(max_tokens=2, temperature=0.0))[0]  # added without a listener
    assert not first.done
    side.run()
    assert side.heard.tokens == {first: [2, 3, 4], second: [11, 11, 12, 12]} and not side.heard.said
    assert first.done and second.done and [output.token_id for output in other.outputs] == [31, 32]


def test_a_prompt_is_read_before_it_is_completed(make: Callable[..., Side]) -> None:
    side = make()
    task = side.submit(5, 6, 9, scored=1)
    assert not task.generations and not task.done
    side.run()
    assert side.heard.said == [("read", task)] and side.heard.tokens == {task: [10, 11, 12]} and task.done
    assert isinstance(task.reading, PromptScores) and [one.token_id for one in task.reading.logprobs] == [6, 9]


def test_a_prompt_that_fills_the_context_is_told_of_at_once(make: Callable[..., Side]) -> None:
    side = make()
    task = side.submit(*[1] * 64)
    assert side.heard.tokens == {task: [None]} and task.done and not side.driver.has_work()


def test_a_vector_is_with_its_task(make: Callable[..., Side]) -> None:
    side = make(embeds=True)
    tasks = [side.submit(*prompt, vector=True) for prompt in ((1, 2), (3,))]
    side.run()
    assert side.heard.said == [("read", task) for task in tasks] and all(task.done for task in tasks)
    assert [task.vector is not None and task.vector.tolist() for task in tasks] == [
        [5.0 if at in (2, 3) else 0.0 for at in range(64)], [10.0 if at == 4 else 0.0 for at in range(64)],
    ]  # fmt: skip


@pytest.mark.parametrize("scored", [None, 1])
def test_a_task_that_is_ended_early_is_told_of_no_more(make: Callable[..., Side], scored: int | None) -> None:
    side = make()
    task, other = side.submit(*range(20), scored=scored, max_tokens=20), side.submit(10)
    side.driver.step()
    before = list(side.heard.tokens.get(task, ()))
    side.driver.abort(task, "deadline")
    side.driver.abort(task)
    assert [one.finish_reason for one in task.generations] == ["deadline"] * len(task.generations)
    side.run()
    assert side.heard.tokens.get(task, []) == before and side.heard.tokens[other] == [11, 12, 13]
    assert not side.heard.said
    side.driver.abort(EngineTask(Query([1])))  # a task that was never submitted


def test_a_wrong_task_is_refused_and_nothing_is_left(make: Callable[..., Side]) -> None:
    side = make()
    with pytest.raises(RequestError):
        side.submit(99)
    late = side.submit(5, 6, scored=1, stop_token_ids=(99,))  # its prompt can be scored
    side.run()
    assert [said for said, _ in side.heard.said] == ["read", f"failed: {late.error}"] and late.done
    assert "stop_token_ids" in str(late.error) and not side.heard.tokens


def test_a_fault_ends_the_task_that_it_is_of(make: Callable[..., Side]) -> None:
    side = make()
    side.fail(lambda batch: any(s.start == 0 and s.token_ids[0] == POISON for s in batch.sequences))
    bad, read, good = side.submit(POISON), side.submit(POISON, 1, scored=1), side.submit(1)
    side.run()
    assert side.heard.tokens[good] == [2, 3, 4] and good.error is None
    assert bad.generations[0].finish_reason == "error" and bad.done and bad.error is None
    assert side.heard.said == [("failed: the device failed", read)] and isinstance(read.error, OSError)


def test_all_are_told_when_the_device_has_failed_for_good(make: Callable[..., Side]) -> None:
    side = make()
    side.submit(1)
    side.run()
    tasks = [side.submit(1, max_tokens=9), side.submit(2, 3, scored=0)]
    side.fail(lambda batch: True)
    with pytest.raises(OSError, match="the device failed"):
        side.run()
    assert side.heard.said == [("lost: the device failed", task) for task in tasks]
    assert all(task.done and isinstance(task.error, OSError) for task in tasks) and not side.driver.has_work()


def test_closing_tells_all(make: Callable[..., Side]) -> None:
    side = make()
    tasks = [side.submit(1), side.submit(2, n=2), side.submit(3, 4, scored=0)]
    side.driver.close(IccError("closed"))
    assert side.heard.said == [("lost: closed", task) for task in tasks] and not side.driver.has_work()


def test_without_a_listener_outputs_stay_with_their_completions(make: Callable[..., Side]) -> None:
    side = make()
    driver: LoopDriver[EngineTask] = LoopDriver(side.loop)
    task = EngineTask(Query([1], SamplingParams(max_tokens=3, temperature=0.0)))
    driver.submit(task)
    while not task.done:
        driver.step()
    assert [output.token_id for output in task.generations[0].outputs] == [2, 3, 4]
    assert np.concatenate(list(driver.scores(Query([1, 2, 3])))).argmax(1).tolist() == [2, 3, 4]
