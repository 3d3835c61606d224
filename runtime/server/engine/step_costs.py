"""StepCosts: the recent times of an engine process's steps, and the best replica for a prompt by them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .router import ReplicaLoad

_DECAY = 0.97  # weight of a measurement after each later one
_ARRIVALS_S = 30.0  # time constant of the rate of arrivals
_OTHER_STEPS = 2  # steps of the answering replica: one ends before KV is taken, one computes the rest of the prompt


class UnitCost:
    """Seconds per unit of some work, a decaying mean of measurements."""

    def __init__(self) -> None:
        self._units = self._seconds = 0.0

    def add(self, units: int, seconds: float) -> None:
        """Add a measurement: how many units took how many seconds."""
        self._units = self._units * _DECAY + units
        self._seconds = self._seconds * _DECAY + seconds

    @property
    def seconds(self) -> float | None:
        """The current seconds per unit; None before the first measurement."""
        return self._seconds / self._units if self._units else None


class StepCosts:
    """Measurements of one engine process. prompt: seconds per prompt token; taken: seconds per token whose KV comes
    from another process; step: seconds of a decode step."""

    def __init__(self) -> None:
        self.prompt, self.taken, self.step = UnitCost(), UnitCost(), UnitCost()
        self._arrivals, self._arrived = 0.0, 0.0  # prompts per second, and the time of that value

    def arrive(self, now: float) -> None:
        """Count a prompt that this process will answer. now: in seconds, by any clock."""
        self._arrivals, self._arrived = self.arrivals(now) + 1 / _ARRIVALS_S, now

    def arrivals(self, now: float) -> float:
        """The recent rate of arrivals, in prompts per second. now: as in `arrive`."""
        return self._arrivals * math.exp(-max(now - self._arrived, 0.0) / _ARRIVALS_S)

    def add(self, tokens: int, seconds: float, running: int) -> None:
        """Add a step of `tokens` tokens, after which `running` sequences run; 0 tokens are a heartbeat and do not
        count."""
        if tokens > 2 * running + 16:  # nearly all of them are prompt tokens
            self.prompt.add(tokens, seconds)
        elif tokens:
            self.step.add(1, seconds)


Candidates = Sequence[tuple[ReplicaLoad, int]]


@dataclass(frozen=True)
class Placement:
    """answers: the replica that answers a prompt; computes: the replica that computes the prompt for it, None if it
    does so itself; tokens: how many have to be computed."""

    answers: int
    computes: int | None
    tokens: int


@dataclass(frozen=True)
class Site:
    """A candidate replica for a prompt, of which `tokens` have to be computed there. kept_for: the rate, in prompts per
    second, for which a replica that computes only its own prompts should stay free; 0 for other replicas."""

    load: ReplicaLoad
    tokens: int
    kept_for: float = 0.0


@dataclass(frozen=True)
class Costs:
    """Means over all replicas of an engine, in seconds, see StepCosts. unit: tokens by which cached prefixes grow;
    step_tokens: the most tokens of a step."""

    prompt: float
    taken: float
    step: float
    unit: int
    step_tokens: int = 0

    @classmethod
    def of(cls, measured: Sequence[StepCosts], unit: int, step_tokens: int = 0) -> Costs | None:
        """The means over the replicas with measurements; None if no replica has run a prompt. Before the first
        measurement, taking KV counts as free."""
        prompt, taken, step = (
            [found for one in measured if (found := getattr(one, name).seconds) is not None]
            for name in ("prompt", "taken", "step")
        )
        if not prompt:
            return None
        return cls(_mean(prompt), _mean(taken), _mean(step), unit, step_tokens)

    def delay(self, site: Site, sites: Sequence[Site], arrivals: float, answers: Site | None) -> float:
        """The total delay in seconds, of this and other requests, if a prompt is computed at `site`: its own time in
        the queue and in its steps; that of sequences that decode there, whose steps each include a chunk of it; that of
        prompts for which the site is kept free; that of prompts that arrive while every replica is busy. arrivals:
        prompts per second.

        answers: the site that takes the KV and answers, whose sequences wait for that; None if `site` answers itself.
        """
        run = site.tokens * self.prompt
        none_free = min(one.load.waiting * self.prompt + (run if one is site else 0.0) for one in sites)
        found = site.load.waiting * self.prompt + (1 + site.load.decoding) * run
        found += site.kept_for * run**2 / 2 + arrivals * none_free**2 / 2
        if answers is None:
            return found
        moved = site.tokens - self.unit  # the answering replica computes the last tokens
        return found + (1 + answers.load.decoding) * moved * self.taken + _OTHER_STEPS * self.step


def place(
    prompt: Candidates, costs: Costs | None, measured: Sequence[StepCosts], prefills: int, now: float
) -> Placement:
    """Choose the replicas that compute and answer a prompt. prompt: its candidates with the tokens to compute there,
    the best first, from a Router. costs: None if nothing was measured, or no other replica can use the prompt's KV.
    measured: of all replicas; the first `prefills` also compute prompts for the others. now: seconds, as in
    `StepCosts.arrive`.

    A prompt that fits into one step goes to the Router's choice: it delays others by one step wherever it runs. A
    longer prompt goes where the total delay is least; among equals, to one of the first `prefills`. That replica also
    answers, unless more prompt tokens wait there than fit into a step: then the best of the other replicas answers,
    where later long prompts do not slow the answer down.
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
