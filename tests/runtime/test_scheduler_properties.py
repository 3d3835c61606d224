"""The scheduler as a state machine under random events, with a shadow of the contents of each slot of each KV group."""

from __future__ import annotations

import random
from collections import Counter
from unittest import mock

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from icc.runtime.batch.scheduled import ScheduledBatch, StepOutcome, Verdict
from icc.runtime.errors import CapacityError
from icc.runtime.kv.config import GroupConfig
from icc.runtime.kv.policy import CachePolicy, KeepAll, Latest, Window
from icc.runtime.scheduler.beams import Beams
from icc.runtime.scheduler.request import RequestSpec
from icc.runtime.scheduler.scheduler import Scheduler, SchedulerConfig
from kv_policies import Chunks, Sinks
from shadow_device import ALPHABET, Device
from sizes import size_of

POLICIES: list[CachePolicy] = [
    KeepAll(), Window(1), Window(2), Window(3), Window(5), Window(8), Sinks(2, 3), Sinks(1, 1), Chunks(4), Latest(),
]  # fmt: skip


HOST = st.sampled_from([0, 0, 1, 3, 12])
SECOND = st.builds(GroupConfig, st.integers(2, 12), st.integers(1, 4), HOST, st.sampled_from(POLICIES))


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(2, 12),
        block_size=st.integers(1, 4),
        batch=st.integers(1, 4),
        extra_tokens=st.integers(0, 8),
        extra_rows=st.integers(0, 3),
        host=HOST,
        policy=st.sampled_from([KeepAll(), *POLICIES]),
        second=st.none() | SECOND,
    )
    def start(
        self, blocks: int, block_size: int, batch: int, extra_tokens: int, extra_rows: int, host: int,
        policy: CachePolicy = POLICIES[0], second: GroupConfig | None = None,
    ) -> None:  # fmt: skip
        rows = batch + min(extra_rows, extra_tokens)
        groups = (GroupConfig(blocks, block_size, host, policy),) + (() if second is None else (second,))
        self.config = SchedulerConfig(batch, batch + extra_tokens, rows, groups)
        self.scheduler = Scheduler(self.config)
        self.device = Device(self.config, self.scheduler)
        self.live: dict[int, RequestSpec] = {}
        self.ended: set[int] = set()
        self.flight: ScheduledBatch | None = None  # scheduled before the last step's results were accounted for
        self.next_id = self.branched = 0
        self.source = random.Random(0)

    @rule(
        tokens=st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=14),
        new=st.integers(0, 8),
        priority=st.sampled_from([0, 0, 0, 1]),
        salt=st.sampled_from([b"", b"", b"other"]),
        use_cache=st.booleans(),
        client=st.sampled_from(["", "a"]),
        beams=st.sampled_from([1, 1, 2, 3, 4]),
    )
    def add(
        self, tokens: list[int], new: int, priority: int, salt: bytes, use_cache: bool, client: str = "", beams: int = 1
    ) -> None:
        self.next_id += 1
        score = new == 0
        spec = RequestSpec(
            self.next_id, tuple(tokens), new, priority, salt, score, use_cache and not score, client,
            first_turn=len(tokens) // 2, beams=1 if score else beams,
        )  # fmt: skip
        if spec.beams > self.scheduler.config.max_batch_size or self.scheduler.kv.too_small([spec.demand]) is not None:
            with pytest.raises(CapacityError):
                self.scheduler.add(spec)
            return
        self.scheduler.add(spec)
        self.live[spec.request_id] = spec
        self.device.add(spec)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 100))
    def fork(self, pick: int) -> None:
        spec = self.live[sorted(self.live)[pick % len(self.live)]]
        self.add(list(spec.token_ids), spec.max_new_tokens, spec.priority, spec.salt, True, beams=spec.beams)

    @rule(
        stop=st.sampled_from([None, None, None, Verdict.STOP, Verdict.ERROR]),
        late_abort=st.sampled_from([None, None, None, 0, 1]),
        ahead=st.booleans(),
        guesses=st.none() | st.integers(0, 1 << 20),
        preempt=st.sampled_from([None, None, 0, 1]),  # more often than memory runs out
        abort_too=st.booleans(),
    )
    def step(
        self,
        stop: Verdict | None = None,
        late_abort: int | None = None,
        ahead: bool = False,
        guesses: int | None = None,
        preempt: int | None = None,
        abort_too: bool = False,
    ) -> None:
        if preempt is not None and not self.flight and preempt < self.scheduler.num_running:
            request = self.scheduler.queues.running[preempt]
            self.scheduler.queues.preempt(request)
            if abort_too:
                self.abort_id(request.id)
        drafts = {} if guesses is None or self.flight else self.device.drafts(guesses)
        batch = self.flight or self.device.zeroed(self.scheduler.schedule(drafts))
        assert batch.sequences or not self.live, "there is work but nothing is scheduled"
        outcomes = self.device.run(batch)
        self.flight = self.scheduler.schedule_ahead() if ahead else None
        if self.flight is not None:
            self.device.count_ahead(batch, self.device.zeroed(self.flight))
        if stop is not None and outcomes and self.may_get(stop, outcomes[0]):
            outcomes[0] = outcomes[0]._replace(verdict=stop)
        if late_abort is not None and late_abort < len(batch.sequences):
            request_id = batch.sequences[late_abort].request_id
            if request_id in self.live:
                self.abort_id(request_id)
        self.device.sampled(outcomes)
        if stop is Verdict.ERROR and outcomes and outcomes[0].verdict is stop and outcomes[0].request_id in self.live:
            self.device.spoil(outcomes[0].request_id)
        for done in self.scheduler.update(outcomes):
            self.end(done.request_id)
        self.branch()

    def may_get(self, verdict: Verdict, outcome: StepOutcome) -> bool:
        """Scores cannot be stopped; beams end by an error, or all at once."""
        return outcome.token_id is not None or (outcome.request_id in self.device.beams and verdict is Verdict.ERROR)

    def branch(self) -> None:
        """Requests all of whose beams were sampled branch again, or end."""
        for request_id, looked_at in list(self.device.looked_at.items()):
            if looked_at != self.device.beams[request_id].keys():
                continue
            spec = self.live[request_id]
            if len(next(iter(self.device.beams[request_id].values()))) + 1 == len(spec.token_ids) + spec.max_new_tokens:
                self.abort_id(request_id)
            elif all(not beam.num_remaining for beam in self.scheduler.queues.beams[request_id].members.values()):
                self.device.branch(request_id, spec.beams, self.source)
                self.branched += 1

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 100))
    def abort(self, pick: int) -> None:
        self.abort_id(sorted(self.live)[pick % len(self.live)])

    def abort_id(self, request_id: int) -> None:
        assert self.scheduler.abort(request_id)
        assert not self.scheduler.abort(request_id)
        self.end(request_id)

    def end(self, request_id: int) -> None:
        assert request_id not in self.ended, "a request ended twice"
        spec = self.live.pop(request_id)
        self.ended.add(request_id)
        assert len(self.device.forget(request_id)) <= len(spec.token_ids) + spec.max_new_tokens

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            here = {request.id for request in self.scheduler.queues.running + self.scheduler.queues.waiting}
            assert here == self.live.keys() == set(self.scheduler.request_ids)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        # every step computes a token of the first request in rank, which is never preempted
        bound = sum(spec.cost for spec in self.live.values()) * 2
        while self.live:
            assert bound >= 0, "no progress"
            bound -= 1
            self.step()
        assert self.scheduler.kv.is_idle and not self.scheduler.has_work()
        for group, config in zip(self.scheduler.kv.groups, self.config.groups, strict=True):
            assert group.host.num_free == config.host_blocks


RUNS, AT_ONCE = size_of("state_machine"), 1000  # hypothesis keeps its examples in memory: gigabytes for 10,000


@pytest.mark.parametrize("part", range(-(-RUNS // AT_ONCE)))
def test_whatever_happens_in_whatever_order(part: int) -> None:
    run_state_machine_as_test(
        hypothesis.seed(part)(type("Part", (SchedulerMachine,), {})),
        settings=hypothesis.settings(
            max_examples=min(RUNS, AT_ONCE),
            stateful_step_count=size_of("state_machine_steps"),
            deadline=None,
            database=None,
            suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much],
        ),
    )


def walk(seed: int, with_beams: float) -> SchedulerMachine:
    """Apply the machine's rules at random: longer runs with fuller caches than hypothesis tries."""
    source = random.Random(seed)
    machine = SchedulerMachine()
    blocks, size, batch = source.randint(6, 16), source.randint(1, 4), source.randint(1, 4)
    if with_beams:
        blocks, batch = blocks + 8, batch + 3
    room = source.randint(0, 16), source.randint(0, 12), source.choice([0, 2, 6, 40])
    second = GroupConfig(source.randint(4, 12), size, source.choice([2, 6, 40]), source.choice(POLICIES))
    machine.start(blocks, size, batch, *room, second=source.choice([None, second, second]))
    for _ in range(120):
        kind = source.random()
        if len(machine.live) < 5 and kind < 0.3:
            tokens = [source.randrange(ALPHABET) for _ in range(source.randint(1, 14))]
            new, salt = source.randint(0, 16), source.choice([b"", b"other"])
            beams = source.randint(2, batch - 1) if with_beams and source.random() < with_beams else 1
            machine.add(tokens, new, 0, salt, source.random() < 0.8, beams=beams)
        elif kind < 0.34 and machine.live:
            machine.abort(source.randrange(100))
        else:
            machine.step(
                source.choice([None] * 16 + [Verdict.STOP, Verdict.ERROR]), source.choice([None] * 9 + [0]),
                source.random() < 0.3, source.choice([None, source.randrange(1 << 20)]),
                source.choice([None] * 5 + [0, 1]), source.random() < 0.1,
            )  # fmt: skip
        machine.consistent()
    machine.teardown()
    return machine


def test_random_walks_with_swaps_and_trees() -> None:
    seen: Counter[str] = Counter()
    ahead: Counter[str] = Counter()
    for seed in range(100):
        machine = walk(seed, with_beams=0)
        seen += machine.device.seen
        ahead += machine.device.ahead
    both = {"moves outs", "moves ins", "moves outs ins", "outs ins", "zeros ins", "zeros outs ins"}
    assert both <= {name for name, count in seen.items() if count >= 2}, seen
    mixed = {"answers behind chunks", "prompts behind chunks", "answers behind tokens", "waited", "in vain"}
    assert mixed <= {name for name, count in ahead.items() if count >= 50}, ahead


def test_random_walks_with_beams() -> None:
    """Requests that fork, reorder their beams, lose their blocks and end, among requests without beams."""
    copied: Counter[str] = Counter()
    branched = folded = 0
    for seed in range(80):
        with mock.patch.object(Beams, "unfold", autospec=True, side_effect=Beams.unfold) as unfold:
            machine = walk(seed, with_beams=0.6)
        copied += machine.device.copied
        branched += machine.branched
        folded += unfold.call_count
    assert branched > 300 and folded > 50 and copied["copies"] > 300, (branched, folded, copied)
    assert copied["copies outs"] and copied["copies moves"], copied
