"""StepCosts: what the steps of an engine process have taken lately, and where a prompt is computed best by that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .router import ReplicaLoad

_DECAY = 0.97  # what is left of a measurement with each further one
_ARRIVALS_S = 30.0  # over which prompts that come are counted
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
    from elsewhere; step, seconds of a step in which sequences go on by a token."""

    def __init__(self) -> None:
        self.prompt, self.taken, self.step = UnitCost(), UnitCost(), UnitCost()
        self._arrivals, self._arrived = 0.0, 0.0  # per second, at a time

    def arrive(self, now: float) -> None:
        """Count a prompt that this process will answer, at `now`, in seconds by any clock."""
        self._arrivals, self._arrived = self.arrivals(now) + 1 / _ARRIVALS_S, now

    def arrivals(self, now: float) -> float:
        """Prompts per second that have come lately."""
        return self._arrivals * math.exp(-max(now - self._arrived, 0.0) / _ARRIVALS_S)

    def add(self, tokens: int, seconds: float, running: int) -> None:
        """A step of so many tokens, of which so many sequences are left; nothing where it took no time."""
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
    """A replica for a prompt of which `tokens` have to be computed there. kept_for: prompts per second for which a
    replica that computes for no others is to stay free; 0 of others."""

    load: ReplicaLoad
    tokens: int
    kept_for: float = 0.0


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

    def delay(self, site: Site, sites: Sequence[Site], arrivals: float, answers: Site | None) -> float:
        """Seconds that a prompt and all others wait if it is computed at one of the sites: itself, in the queue and
        while it runs; the sequences that go on there, each of whose steps takes a chunk of it; prompts for which the
        site is kept; prompts that come (arrivals: per second) while every replica has some to compute.

        answers: the site that takes its KV, if another one answers: it and its sequences wait for that; else None.
        """
        run = site.tokens * self.prompt
        none_free = min(one.load.waiting * self.prompt + (run if one is site else 0.0) for one in sites)
        found = site.load.waiting * self.prompt + (1 + site.load.decoding) * run
        found += site.kept_for * run**2 / 2 + arrivals * none_free**2 / 2
        if answers is None:
            return found
        moved = site.tokens - self.unit  # the last tokens are computed where it is answered
        return found + (1 + answers.load.decoding) * moved * self.taken + _OTHER_STEPS * self.step


def place(
    prompt: Candidates, costs: Costs | None, measured: Sequence[StepCosts], prefills: int, now: float
) -> Placement:
    """Where a prompt goes. prompt: where it can go, the best first, and the tokens that have to be computed there, as
    a Router has them. costs: None where nothing is known, or its KV is of use to no other replica. measured: by all
    replicas, of which the first `prefills` compute for the others. now: seconds, as in `StepCosts.arrive`.

    A prompt that one step takes goes where the router says: it keeps others for that step wherever it runs. A longer
    one goes where all together wait the least, of equals to one of the first role. That answers it, too, unless it has
    long prompts: then the best of the others does, where no further ones slow the answer down.
    """
    answers, tokens = prompt[0]
    if costs is None or not prefills or tokens <= max(costs.unit, costs.step_tokens):
        return Placement(answers.replica, None, tokens)
    rates = [measured[load.replica].arrivals(now) for load, _ in prompt]
    sites = [
        Site(load, count, rate if load.replica >= prefills else 0.0)
        for (load, count), rate in zip(prompt, rates, strict=True)
    ]
    other = next((site for site in sites if site.load.replica >= prefills), None)
    ways: list[tuple[float, bool, Placement]] = []
    for site in sites:
        replica, first = site.load.replica, site.load.replica < prefills
        answering = other if first and site.load.waiting > costs.step_tokens else None
        placed = Placement(replica, None, site.tokens)
        if answering is not None:
            placed = Placement(answering.load.replica, replica, site.tokens)
        ways.append((costs.delay(site, sites, sum(rates), answering), not first, placed))
    return min(ways, key=lambda way: way[:2])[2]


def _mean(found: Sequence[float]) -> float:
    return sum(found) / len(found) if found else 0.0
