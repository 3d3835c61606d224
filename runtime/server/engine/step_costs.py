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


@dataclass(frozen=True)
class Costs:
    """What all replicas of an engine have measured, in seconds; unit: tokens by which cached prefixes grow."""

    prompt: float
    taken: float
    step: float
    unit: int

    @classmethod
    def of(cls, measured: Sequence[StepCosts], unit: int) -> Costs | None:
        """The mean of those who have measured; None where nobody has run a prompt. KV of which nothing is known costs
        nothing to take: the first that is taken is measured."""
        prompt, taken, step = (
            [found for one in measured if (found := getattr(one, name).seconds) is not None]
            for name in ("prompt", "taken", "step")
        )
        if not prompt:
            return None
        return cls(_mean(prompt), _mean(taken), _mean(step), unit)

    def pays(self, tokens: int, busy: float, here: ReplicaLoad, there: ReplicaLoad, arrivals: float = 0.0) -> bool:
        """Whether a prompt, of which `tokens` have to be computed, is better computed there for the replica here, which
        answers: what it would keep from their next tokens here, against how long it takes to move, itself included.
        busy: sequences that go on here at once, on average. arrivals: prompts per second that come here, and would wait
        for what is left of it."""
        moved = tokens - self.unit  # the last tokens are always computed here
        if moved <= 0:
            return False
        delayed = max(busy, here.sequences, _COMING)
        stays = (here.waiting + delayed * moved) * self.prompt + arrivals * (moved * self.prompt) ** 2 / 2
        moves = there.waiting * self.prompt + (delayed + 1) * moved * self.taken + _OTHER_STEPS * self.step
        return moves < stays


def _mean(found: Sequence[float]) -> float:
    return sum(found) / len(found) if found else 0.0
