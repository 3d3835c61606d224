"""Steps that are scheduled before the previous step's results are known: they are right, and the device does not
wait.

Time is modelled: no clock is read, so that nothing depends on the machine.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from icc import SamplingParams
from icc.runtime.batch.scheduled import ScheduledBatch
from icc.runtime.executor.sampling import Sampled, SamplingRow
from icc.runtime.format.batch import TOP_LOGPROBS
from icc.runtime.format.manifest import Manifest
from icc.runtime.kv.config import GroupConfig
from icc.runtime.kv.policy import Window
from icc.runtime.loop.engine_loop import EngineLoop
from icc.runtime.loop.fake import FakeDevice, context_hash
from icc.runtime.scheduler.request import RequestSpec, ScheduledRequest

SEQUENCES, STOP = 64, 9
FACTS: dict[str, Any] = {"vocab_size": 64, "max_seq_len": 2048, "eos_token_ids": [STOP]}
MakeManifest = Callable[..., Manifest]
HOST_S = 1.8e-3  # the loop and the executor per step of 128 sequences (benchmarks/NOTES.md); here there are 64


def h100_seconds(batch: ScheduledBatch) -> float:
    """Seconds of a step of an 8B model of 4 bits: bytes at 70 % of an H100's bandwidth, or products at 60 % of its
    peak."""
    read = 4.7e9 + 131e3 * sum(sequence.end for sequence in batch.sequences)
    return max(read / (0.7 * 3.35e12), 2 * 8e9 * batch.num_tokens / (0.6 * 990e12))


class ModelledDevice:
    """Samples in the order of its stream, in modelled time. The host takes `HOST_S` per step, half of it before the
    device has the step and half after its results are there. Every 101st token ends an answer.
    """

    inputs, samples, vocab_size = (), True, 64
    max_batch_size, max_step_tokens, max_logit_rows = SEQUENCES, 512, SEQUENCES

    def __init__(self, groups: tuple[GroupConfig, ...]) -> None:
        self.groups = groups
        self.now = self.busy = self.free_at = 0.0  # seconds
        self.steps = Counted()
        self._under_way: deque[tuple[float, int]] = deque()
        self._sampled = 0

    def submit(self, batch: ScheduledBatch, rows: Sequence[SamplingRow | None]) -> int:
        self.now += HOST_S / 2
        seconds = h100_seconds(batch)
        self.busy += seconds
        self.free_at = max(self.now, self.free_at) + seconds
        self._under_way.append((self.free_at, len(rows)))
        self.steps.count(batch)
        return 0

    def collect(self, ticket: int) -> Sampled:
        end, rows = self._under_way.popleft()
        self.now = max(self.now, end) + HOST_S / 2
        tokens = np.array([STOP if (self._sampled + row) % 101 == 0 else 1 for row in range(rows)], dtype=np.int32)
        self._sampled += rows
        tops = np.zeros((rows, TOP_LOGPROBS), np.float32)
        return Sampled(tokens, tops[:, 0], tops.astype(np.int32), tops)

    def step(self, batch: ScheduledBatch) -> np.ndarray:
        raise AssertionError("the device samples")

    def close(self) -> None:
        pass


class Counted:
    """Counts steps, steps with chunks of prompts, and steps with all sequences."""

    def __init__(self) -> None:
        self.all = self.mixed = self.full = 0

    def count(self, batch: ScheduledBatch) -> None:
        self.all += 1
        self.mixed += batch.num_tokens > len(batch.sequences)
        self.full += len(batch.sequences) == SEQUENCES


def serve(
    manifest: Manifest, groups: tuple[GroupConfig, ...], ahead: bool = True, requests: int = 300
) -> ModelledDevice:
    """Serve requests until the last one has arrived: they arrive faster than 64 at a time can be served, and some are
    cancelled."""
    device, source = ModelledDevice(groups), random.Random(0)
    loop = EngineLoop(manifest, device, None)
    if not ahead:
        loop.scheduler.schedule_ahead = lambda: None  # type: ignore[method-assign]
    arrivals = deque(sorted(source.uniform(0, 2.0) for _ in range(requests)))
    live = []
    while arrivals:
        while arrivals and (arrivals[0] <= device.now or not loop.has_work()):
            device.now = max(device.now, arrivals.popleft())
            prompt = [source.randrange(10, 64) for _ in range(source.randint(20, 400))]
            live += loop.add(prompt, SamplingParams(max_tokens=source.randint(50, 300), temperature=0.0))
        if source.random() < 0.02:
            loop.end(source.choice(live))
        loop.step()
    loop.scheduler.check()
    return device


def idle(device: ModelledDevice) -> float:
    """The share of the time in which the device was idle, although there was always work."""
    return 1 - device.busy / device.free_at


GROUPS = {
    "all": (GroupConfig(4000, 16),),
    "window": (GroupConfig(4000, 16), GroupConfig(3000, 16, policy=Window(64))),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_a_device_waits_less_than_3_percent_though_requests_come_and_go(toy_manifest: MakeManifest, kind: str) -> None:
    device = serve(toy_manifest(**FACTS), GROUPS[kind])
    steps = device.steps
    assert steps.all > 200 and steps.mixed > steps.all / 2 and steps.full > steps.all / 2, "the mix is no mix"
    assert idle(device) < 0.03


@pytest.mark.parametrize("seed", range(4))
def test_tokens_do_not_depend_on_what_ran_ahead(toy_manifest: MakeManifest, seed: int) -> None:
    """Requests come, stop, are cancelled and lose their blocks in the midst of chunks; each gets its own tokens."""
    source = random.Random(seed)
    window = GroupConfig(30, 4, source.choice([0, 6]), Window(source.choice([3, 9])))
    device = FakeDevice(
        num_blocks=18, host_blocks=source.choice([0, 8]), max_batch_size=6, max_step_tokens=12, max_logit_rows=8,
        rule=context_hash, more_groups=(window,),
    )  # fmt: skip
    loop = EngineLoop(toy_manifest(vocab_size=64, max_seq_len=64, eos_token_ids=[STOP]), device, None)
    live, ended = [], []
    for count in range(400):
        if count < 300 and source.random() < 0.3:
            prompt = [source.randrange(10, 64) for _ in range(source.randint(1, 30))]
            params = SamplingParams(max_tokens=source.randint(1, 20), temperature=0.0, ignore_eos=source.random() < 0.5)
            live += loop.add(prompt, params)
        if live and source.random() < 0.04:
            loop.end(source.choice(live))
        loop.step()
        loop.scheduler.check()
        ended += [request for request in live if request.finish_reason]
        live = [request for request in live if not request.finish_reason]
    assert not live and loop.scheduler.kv.is_idle and loop.scheduler.num_preemptions > 1
    assert {request.finish_reason for request in ended} == {"stop", "length", "abort"}
    for request in ended:
        tokens = list(request.prompt)
        for token in request.token_ids:
            assert token == context_hash(tokens, 64), request
            tokens.append(token)
        room = 64 - len(request.prompt)
        full = len(request.token_ids) == min(request.params.max_tokens, room)
        stopped = request.token_ids[-1:] == [STOP] and not request.params.ignore_eos
        assert {"length": full, "stop": stopped, "abort": True}[request.finish_reason or ""], request


def test_one_step_after_the_other_hides_nothing(toy_manifest: MakeManifest) -> None:
    assert idle(serve(toy_manifest(**FACTS), GROUPS["all"], ahead=False)) > 0.15


def test_the_step_behind_which_a_request_has_all_its_tokens_is_its_last() -> None:
    """No step is started ahead for it then."""
    request = ScheduledRequest(spec=RequestSpec(1, (5, 6, 7), 3), arrival=0, tokens=[5, 6, 7])
    found = []
    for token in (8, 9, 10):
        found.append(request.is_last_step)
        request.tokens.append(token)
    assert found == [False, False, True]
