"""Sizing: how many replicas of which role meet a service level for some traffic."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .simulate import Fleet, SimulatedAnswer, simulate
from .step_table import StepTable
from .traffic import Arrival

PERCENTILE = 99
_FORM = re.compile(r"(ttft|itl)=(\d+(?:\.\d+)?)(ms|s)?")


@dataclass(frozen=True)
class ServiceLevel:
    """The 99th percentile that is allowed, in seconds: of the time to the first token, and of the time between
    tokens."""

    ttft: float
    itl: float


@dataclass(frozen=True)
class Outcome:
    """The result of traffic on a fleet. ttft, itl: seconds to the first token and between tokens, by percentile."""

    fleet: Fleet
    ttft: dict[str, float]
    itl: dict[str, float]
    meets: bool

    def excess(self, slo: ServiceLevel) -> float:
        """The larger of the two ratios to the level; at most 1 if the level is met."""
        return max(self.ttft[f"p{PERCENTILE}"] / slo.ttft, self.itl.get(f"p{PERCENTILE}", 0.0) / slo.itl)


def read_slo(text: str) -> ServiceLevel:
    """A level from a text such as ttft=1s,itl=50ms. ValueError for any other text."""
    found: dict[str, float] = {}
    for part in text.split(","):
        match = _FORM.fullmatch(part.strip())
        if match is None or match[1] in found:
            raise ValueError(f"{text!r} is no service level like ttft=1s,itl=50ms")
        found[match[1]] = float(match[2]) * (1e-3 if match[3] == "ms" else 1.0)
    if found.keys() != {"ttft", "itl"} or not min(found.values()) > 0:
        raise ValueError(f"{text!r} is no service level like ttft=1s,itl=50ms")
    return ServiceLevel(**found)


def size(
    table: StepTable,
    traffic: Sequence[Arrival],
    slo: ServiceLevel,
    most: int,
    progress: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Simulate the traffic on fleets of 1, 2, .. replicas with each division of roles, up to `most` replicas or the
    first number that meets the level. progress: called with each outcome."""
    found: list[Outcome] = []
    for replicas in range(1, most + 1):
        for prefills in range(replicas if table.taken is not None else 1):
            fleet = Fleet(replicas, prefills)
            found.append(outcome(simulate(table, traffic, fleet), slo, fleet))
            progress(found[-1])
        if any(one.meets for one in found):
            break
    return found


def best(outcomes: Sequence[Outcome], slo: ServiceLevel) -> Outcome:
    """The best outcome: among fleets that meet the level, the least `excess` with the fewest replicas; if none does,
    the least `excess` of all."""
    kept = [one for one in outcomes if one.meets]
    return min(kept or outcomes, key=lambda one: (one.fleet.replicas if kept else 0, one.excess(slo)))


def outcome(served: Sequence[SimulatedAnswer], slo: ServiceLevel, fleet: Fleet) -> Outcome:
    """The percentiles of simulated answers, and whether they meet the level."""
    ttft, itl = percentiles([one.first for one in served]), percentiles([gap for one in served for gap in one.gaps])
    name = f"p{PERCENTILE}"
    meets = ttft[name] <= slo.ttft and itl.get(name, 0.0) <= slo.itl
    return Outcome(fleet, ttft, itl, meets)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """The percentiles that are shown, by name; {} without times."""
    return {f"p{p}": float(np.percentile(seconds, p)) for p in (50, 90, PERCENTILE)} if seconds else {}
