"""StepCosts: what the steps of an engine process have taken lately, and where a prompt is computed best by that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .router import ReplicaLoad

_DECAY = 0.97  # what is left of a measurement with each further one
_BUSY_S = 10.0  # over which sequences are averaged
_ARRIVALS_S = 30.0  # and prompts that come
_COMING = 0.25  # sequences that come while a long prompt runs, at least, also where none has lately
_OTHER_STEPS = 2  # of the replica that answers: one ends before KV is taken, one computes the rest of the prompt


class UnitCost:
    """Seconds per unit of some work, of which the latest counts the most; None before any was measured."""

    def __init__(self) -> None:
        self._units = self._seconds = 0.0

    def add(self, units: int, seconds: float) -> None:
        """Count some work, and the seconds that it took."""
        self._units = self._units * _DECAY + units
        self._seconds = self._seconds * _DECAY + seconds

    @property
    def seconds(self) -> float | None:
        """What one unit takes now."""
        return self._seconds / self._units if self._units else None


class StepCosts:
    """Measured by one engine process: prompt, seconds per token of a prompt; taken, seconds per token whose KV comes
    from elsewhere; step, seconds of a step in which sequences go on by a token. busy: sequences at once, on average."""

    def __init__(self) -> None:
        self.prompt, self.taken, self.step = UnitCost(), UnitCost(), UnitCost()
        self.busy = 0.0
        self._at: float | None = None
        self._arrivals, self._arrived = 0.0, 0.0  # per second, at a time

    def arrive(self, now: float) -> None:
        """Count a prompt that this process will answer, at `now`."""
        self._arrivals, self._arrived = self.arrivals(now) + 1 / _ARRIVALS_S, now

    def arrivals(self, now: float) -> float:
        """Prompts per second that have come lately."""
        return self._arrivals * math.exp(-max(now - self._arrived, 0.0) / _ARRIVALS_S)

    def add(self, tokens: int, seconds: float, running: int, now: float) -> None:
        """A report of so many running sequences, at `now`, by any clock in seconds; of a step of so many tokens, if it
        took any time."""
        if self._at is not None:
            self.busy += (running - self.busy) * -math.expm1(-(now - self._at) / _BUSY_S)
        self._at = now
        if tokens > 2 * running + 16:  # by far the most of them are of prompts
            self.prompt.add(tokens, seconds)
        elif tokens:
            self.step.add(1, seconds)


Candidates = Sequence[tuple[ReplicaLoad, int]]


@dataclass(frozen=True)
class Placement:
    """answers: the replica that answers a prompt; computes: the one that computes it for that, None where it does so
    itself; tokens: how many have to be computed."""

    answers: int
    computes: int | None
    tokens: int


@dataclass(frozen=True)
class Site:
    """A replica for a prompt of which `tokens` have to be computed there. busy: sequences that go on there at once, on
    average; arrivals: prompts per second that come there."""

    load: ReplicaLoad
    tokens: int
    busy: float = 0.0
    arrivals: float = 0.0

    @classmethod
    def of(cls, load: ReplicaLoad, tokens: int, measured: StepCosts, now: float) -> Site:
        """As the replica has measured."""
        return cls(load, tokens, measured.busy, measured.arrivals(now))

    @property
    def delayed(self) -> float:
        """Sequences that a prompt keeps from their next tokens there."""
        return max(self.busy, self.load.decoding)


@dataclass(frozen=True)
class Costs:
    """What all replicas of an engine have measured, in seconds; unit: tokens by which cached prefixes grow;
    step_tokens: the most that a step takes."""

    prompt: float
    taken: float
    step: float
    unit: int
    step_tokens: int = 0

    @classmethod
    def of(cls, measured: Sequence[StepCosts], unit: int, step_tokens: int = 0) -> Costs | None:
        """The mean of those who have measured; None where nobody has run a prompt. KV of which nothing is known costs
        nothing to take: the first that is taken is measured."""
        prompt, taken, step = (
            [found for one in measured if (found := getattr(one, name).seconds) is not None]
            for name in ("prompt", "taken", "step")
        )
        if not prompt:
            return None
        return cls(_mean(prompt), _mean(taken), _mean(step), unit, step_tokens)

    def pays(self, here: Site, there: Site) -> bool:
        """Whether a prompt is better computed there for the replica here, which answers, than by that one itself. One
        that a single step takes is not: it keeps others for that step wherever it runs.

        Both ways cost what the prompt waits, itself and in its queue; what it keeps from the next tokens of sequences
        that go on where it runs, each of whose steps takes a chunk of it; and, if it moves, what that takes, of these
        sequences and of its own time. Prompts that come here meanwhile would wait for what is left of it.
        """
        if there.tokens <= max(self.unit, self.step_tokens):
            return False
        moved = there.tokens - self.unit  # the last tokens are always computed here
        run, run_there, delayed = here.tokens * self.prompt, there.tokens * self.prompt, max(here.delayed, _COMING)
        stays = here.load.waiting * self.prompt + (1 + delayed) * run + here.arrivals * run**2 / 2
        moves = there.load.waiting * self.prompt + (1 + there.delayed) * run_there
        return moves + (delayed + 1) * moved * self.taken + _OTHER_STEPS * self.step < stays


def place(
    prompt: Candidates, costs: Costs | None, measured: Sequence[StepCosts], prefills: int, now: float
) -> Placement:
    """Where a prompt goes. prompt: where it can go, the best first, and the tokens that have to be computed there, as
    a Router has them. costs: None where nothing is known, or its KV is of use to no other replica. measured: by all
    replicas, of which the first `prefills` compute for the others.

    The router says who answers, of all: one that computes prompts answers, too, as long as no prompt is in the way.
    Where that is one of the others, the prompt is computed for it where that costs less than to compute it there.
    """
    answers, tokens = prompt[0]
    first = [one for one in prompt if one[0].replica < prefills]
    if costs is not None and first and answers.replica >= prefills:
        here, there = (Site.of(load, count, measured[load.replica], now) for load, count in (prompt[0], first[0]))
        if costs.pays(here, there):
            return Placement(answers.replica, there.load.replica, there.tokens)
    return Placement(answers.replica, None, tokens)


def _mean(found: Sequence[float]) -> float:
    return sum(found) / len(found) if found else 0.0
