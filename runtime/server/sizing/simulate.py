"""Simulation of traffic on replicas with and without roles: the scheduler, the prefix cache, the router and the
placement of prompts are those of the server; only the steps are not run (Splitwise's and Vidur's simulators model all
of these: Patel et al. 2024, arXiv 2311.18677; Agrawal et al. 2024, arXiv 2405.05465)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ...errors import CapacityError, UsageError
from ...kv.cache import KVCache
from ...requests.params import SamplingParams
from ...scheduler.request import RequestSpec
from ...scheduler.scheduler import Scheduler
from ..engine.messages import Submit
from ..engine.router import ReplicaLoad, Router, prefix_keys
from ..engine.step_costs import Costs, place
from .replica import ReplicaWork, VirtualReplica
from .step_table import StepTable
from .traffic import Arrival

_FIRST_TOKEN, _TOKENS = 3, 30_000  # the range of token ids in prompts


@dataclass(frozen=True)
class Fleet:
    """How many replicas there are; the first `prefills` of them also compute prompts for the others."""

    replicas: int
    prefills: int = 0


@dataclass
class SimulatedAnswer:
    """The answer of a request: the time of each of its tokens, in seconds of the traffic's clock."""

    arrival: Arrival
    times: list[float] = field(default_factory=list[float])

    @property
    def first(self) -> float:
        """Seconds from arrival to the first token."""
        return self.times[0] - self.arrival.time

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive tokens."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def simulate(table: StepTable, traffic: Sequence[Arrival], fleet: Fleet) -> list[SimulatedAnswer]:
    """The answer of each request, in order. UsageError for a request that no replica can ever run."""
    return _Simulation(table, traffic, fleet).run()


class _Simulation:
    def __init__(self, table: StepTable, traffic: Sequence[Arrival], fleet: Fleet) -> None:
        _check(table, traffic)
        self._replicas = [VirtualReplica(number, table) for number in range(fleet.replicas)]
        self._prefills, self._router = fleet.prefills, Router()
        self._served = [SimulatedAnswer(arrival) for arrival in traffic]
        self._prompts = prompts_of(traffic)
        self._unit, steps = KVCache(table.config.groups).prefix_blocks
        self._tokens = self._unit * steps
        self._moving = dict.fromkeys(range(fleet.replicas), 0)  # prompts still computed elsewhere, by answering replica
        self._moves, self._step_tokens = table.taken is not None, table.max_step_tokens

    def run(self) -> list[SimulatedAnswer]:
        arriving = 0
        while True:
            turns = [replica for replica in self._replicas if replica.next_at is not None]
            soonest = min(turns, key=lambda replica: (replica.next_at or 0.0, replica.number), default=None)
            due = self._served[arriving].arrival.time if arriving < len(self._served) else None
            if due is not None and (soonest is None or due <= (soonest.next_at or 0.0)):
                self._send(arriving, due)
                arriving += 1
            elif soonest is not None:
                assert soonest.next_at is not None
                soonest.turn(soonest.next_at)
            else:
                return self._served

    def _send(self, number: int, now: float) -> None:
        """Route a request as EnginePool does."""
        keys, length = prefix_keys(Submit(0, self._prompts[number], SamplingParams())), len(self._prompts[number])
        order = [*self._replicas[self._prefills :], *self._replicas[: self._prefills]]
        ranked = self._router.ranked(keys, length, [self._load(one) for one in order])
        measured = [one.costs for one in self._replicas]
        costs = Costs.of(measured, self._unit, self._step_tokens) if self._moves else None
        placed = place(ranked, costs, measured, self._prefills, now)
        target = self._replicas[placed.answers]
        target.costs.arrive(now)
        answer = ReplicaWork(self._spec(number), placed.tokens, partial(self._told, number))
        if placed.computes is None:
            target.send(answer, now)
        else:
            self._router.ran(placed.computes, keys, self._tokens)
            self._hand_over(answer, placed.tokens, self._replicas[placed.computes], target, now)
        self._router.ran(placed.answers, keys, self._tokens)

    def _hand_over(
        self, answer: ReplicaWork, cost: int, source: VirtualReplica, target: VirtualReplica, now: float
    ) -> None:
        spec = answer.spec._replace(max_new_tokens=1)

        def told(time: float, ended: bool) -> None:
            self._moving[target.number] -= 1
            answer.cost = self._unit
            target.send(answer, time)

        self._moving[target.number] += 1
        source.send(ReplicaWork(spec, cost, told, lambda time, length: target.take(answer, length, time)), now)

    def _load(self, replica: VirtualReplica) -> ReplicaLoad:
        found = replica.load()
        sequences = found.sequences + self._moving[replica.number]
        return replace(found, sequences=sequences)

    def _spec(self, number: int) -> RequestSpec:
        return RequestSpec(number, self._prompts[number], self._served[number].arrival.output_tokens)

    def _told(self, number: int, time: float, ended: bool) -> None:
        self._served[number].times.append(time)


def prompts_of(traffic: Sequence[Arrival]) -> list[tuple[int, ...]]:
    """Random token ids for each request; only requests with the same prefix begin with the same tokens."""
    found: list[tuple[int, ...]] = []
    prefixes: dict[str, np.ndarray] = {}
    for number, arrival in enumerate(traffic):
        own = np.random.default_rng([1, number]).integers(_FIRST_TOKEN, _TOKENS, arrival.prompt_tokens)
        shared = min(arrival.prefix_tokens, arrival.prompt_tokens) if arrival.prefix else 0
        if shared:
            begin = prefixes.get(arrival.prefix)
            if begin is None or len(begin) < shared:
                seed = [2, *arrival.prefix.encode()]
                begin = prefixes[arrival.prefix] = np.random.default_rng(seed).integers(_FIRST_TOKEN, _TOKENS, shared)
            own[:shared] = begin[:shared]
        found.append(tuple(own.tolist()))
    return found


def _check(table: StepTable, traffic: Sequence[Arrival]) -> None:
    scheduler = Scheduler(table.config)
    longest = max(traffic, key=lambda one: one.prompt_tokens + one.output_tokens)
    tokens = longest.prompt_tokens + longest.output_tokens
    if 0 < table.max_seq_len < tokens:
        raise UsageError(
            f"a request of the traffic cannot run: it has {tokens} tokens, the engine takes {table.max_seq_len}",
            "leave it out, or compile the engine with a larger --max-seq-len",
        )
    try:
        scheduler.validate(RequestSpec(0, (0,) * longest.prompt_tokens, longest.output_tokens))
    except CapacityError as error:
        raise UsageError(f"a request of the traffic cannot run: {error.message}", error.hint) from error
