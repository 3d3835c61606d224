"""VirtualReplica: the scheduler of an engine process in virtual time, with durations of steps from a StepTable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ...batch.scheduled import ScheduledBatch, StepOutcome
from ...kv.sequence import CachedSequence
from ...scheduler.request import RequestSpec
from ...scheduler.scheduler import Scheduler
from ..engine.router import ReplicaLoad
from ..engine.step_costs import StepCosts
from .step_table import StepTable

_INTAKE = 16  # prompts started per step, as in Worker


@dataclass(eq=False)
class ReplicaWork:
    """A prompt on a replica. cost: tokens to compute, from the router. told: called with the time of each token, and
    whether it is the last. given: called after a step with the time, and how many of the prompt's tokens are in the
    cache; None if no other replica takes them. taken: how many tokens were taken from another replica."""

    spec: RequestSpec
    cost: int
    told: Callable[[float, bool], None]
    given: Callable[[float, int], None] | None = None
    begun: bool = False
    sequence: CachedSequence = field(init=False)
    length: int = 0
    taken: int = 0

    def __post_init__(self) -> None:
        self.sequence = CachedSequence(tokens=list(self.spec.token_ids))


class VirtualReplica:
    """One engine process. `next_at`: when its step ends, in seconds; None if it has nothing to do."""

    def __init__(self, number: int, table: StepTable) -> None:
        self.number, self._table, self._scheduler = number, table, Scheduler(table.config)
        self.costs, self.steps = StepCosts(), 0
        tokens, seconds = table.prompt[-1]
        self.costs.prompt.add(tokens, seconds)  # as measured by a server that has run for a while
        self.costs.step.add(1, table.decode[0][1])
        if table.taken is not None:
            self.costs.taken.add(tokens, tokens * table.taken)
        self.next_at: float | None = None
        self._arrived: list[ReplicaWork] = []
        self._parts: list[tuple[ReplicaWork, int]] = []  # (prompt that runs elsewhere, its tokens so far), to be taken
        self._works: dict[int, ReplicaWork] = {}
        self._batch: ScheduledBatch | None = None
        self._began = 0.0
        self._giving = 0.0  # seconds to give the KV of the last step to other replicas

    def load(self) -> ReplicaLoad:
        """The load of the replica, for the router."""
        works = [*self._works.values(), *self._arrived]
        pools = [group.pool for group in self._scheduler.kv.groups]
        blocks = sum(pool.num_blocks for pool in pools)
        usage = 1 - sum(pool.num_available for pool in pools) / blocks
        waiting = sum(work.cost for work in works if not work.begun)
        decoding = sum(work.begun for work in works)
        return ReplicaLoad(self.number, waiting, len(works), self._table.max_batch_size, usage, True, decoding)

    def send(self, work: ReplicaWork, now: float) -> None:
        """Add a prompt at time `now`, in seconds; it is started before the next step."""
        self._arrived.append(work)
        self._wake(now)

    def take(self, work: ReplicaWork, length: int, now: float) -> None:
        """Announce the KV of a prompt's first `length` tokens at time `now`, in seconds."""
        self._parts.append((work, length))
        self._wake(now)

    def _wake(self, now: float) -> None:
        if self._batch is None:
            self.next_at = now if self.next_at is None else min(self.next_at, now)

    def turn(self, now: float) -> None:
        """End the current step, if there is one, at time `now`, in seconds, and start the next."""
        self.next_at = None
        if self._batch is not None:
            self._end(self._batch, now)
        seconds, self._giving = self._take_parts() + self._giving, 0.0
        arrived, self._arrived = self._arrived[:_INTAKE], self._arrived[_INTAKE:]
        for work in arrived:
            self._scheduler.add(work.spec)
            self._works[work.spec.request_id] = work
        batch = self._scheduler.schedule()
        if not batch.sequences:
            self._scheduler.update(())
            if seconds:
                self.next_at = now + seconds
            return
        self._batch, self._began = batch, now + seconds
        self.next_at = self._began + self._table.seconds(batch)

    def _take_parts(self) -> float:
        """Take announced KV into the prefix cache; returns the seconds that this takes."""
        parts, self._parts, tokens = self._parts, [], 0
        for work, length in parts:
            if self._scheduler.kv.adopt(work.sequence, length) is not None:
                tokens, work.taken = tokens + length - work.taken, length
        seconds = tokens * (self._table.taken or 0.0)
        if tokens:
            self.costs.taken.add(tokens, seconds)
        return seconds

    def _end(self, batch: ScheduledBatch, now: float) -> None:
        self._batch, self.steps = None, self.steps + 1
        outcomes = [StepOutcome(one.request_id, 0) for one in batch.sequences if one.num_logits]
        ended = {done.request_id for done in self._scheduler.update(outcomes)}
        for work in self._works.values():
            if work.given is not None:
                length = self._scheduler.kv.cached_length(work.sequence)
                if length > work.length:
                    self._giving += (length - work.length) * (self._table.given or 0.0)
                    work.length = length
                    work.given(now + self._giving, length)
        for outcome in outcomes:
            work = self._works[outcome.request_id]
            work.begun = True
            if outcome.request_id in ended:
                del self._works[outcome.request_id]
            work.told(now, outcome.request_id in ended)
        self.costs.add(batch.num_tokens, now - self._began, self._scheduler.num_running)
