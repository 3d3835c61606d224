"""Allocates bits: chooses a format for each weight or cache, with the least total damage that fits the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from ..compiler.errors import UsageError
from ..compiler.weights.formats.base import StorageFormat

_UNITS = 4096


@dataclass(frozen=True)
class Option:
    """One format of a weight or of a layer's cache, by its name in reports: its bytes, and the damage, the mean KL
    divergence per token that it is expected to cause. format: the format of a weight; None leaves the weight
    unchanged."""

    name: str
    nbytes: int
    damage: float
    format: StorageFormat | None = None

    @classmethod
    def of(cls, form: StorageFormat | None, nbytes: int, damage: float) -> Option:
        """The option to store a weight in `form`; None: as it is stored now. nbytes: the weight's size in that form.
        damage: see `Allocation.damage`."""
        return cls("as stored" if form is None else form.name, nbytes, damage, form)


@dataclass(frozen=True)
class Curve:
    """The options of one weight, or of a layer's cache."""

    name: str
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Allocation:
    """The choices. fixed: bytes of everything without a choice; frontier: bytes and damage of the whole model at every
    step of the search."""

    curves: tuple[Curve, ...]
    chosen: tuple[int, ...]
    budget: int
    fixed: int
    frontier: tuple[tuple[int, float], ...] = field(default=(), repr=False)

    @property
    def options(self) -> list[Option]:
        """The choice for each curve."""
        return [curve.options[i] for curve, i in zip(self.curves, self.chosen, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return self.fixed + sum(option.nbytes for option in self.options)

    @property
    def damage(self) -> float:
        """The damage of all choices together: the expected mean KL divergence per token, in nats."""
        return sum(option.damage for option in self.options)

    def as_json(self) -> dict[str, Any]:
        """The choices, bytes and at most some 40 points of the frontier, as plain values for report.json."""
        steps = max(1, len(self.frontier) // 40)
        return {
            "budget": self.budget,
            "bytes": self.nbytes,
            "fixed": self.fixed,
            "expected_kl": _digits(self.damage),
            "curve": [[nbytes, _digits(damage)] for nbytes, damage in self.frontier[::steps]],
            "choices": [
                {
                    "name": curve.name,
                    "format": curve.options[i].name,
                    "bytes": curve.options[i].nbytes,
                    "expected_kl": _digits(curve.options[i].damage),
                    "others": {
                        o.name: [o.nbytes, _digits(o.damage)] for o in curve.options if o is not curve.options[i]
                    },
                }
                for curve, i in zip(self.curves, self.chosen, strict=True)
            ],
        }


def check_smallest(nbytes: int, budget: int) -> None:
    """Raise UsageError if the smallest formats, which take `nbytes` in all, do not fit into `budget` bytes."""
    if nbytes > budget:
        least, factor = -(-nbytes // 10_000) / 100, -(-100 * nbytes // budget) / 100
        raise UsageError(
            f"the weights take {nbytes:,} bytes in the smallest formats, more than {budget:,}",
            f"--size {least:g}MB or more (--bits: {factor:,.2f} times as many); a smaller --max-seq-len makes position "
            "tables smaller",
        )


def allocate(curves: Sequence[Curve], budget: int, fixed: int = 0) -> Allocation:
    """The choices with the smaller sum of damages, found by a Lagrangian search (all trades up to one price per byte,
    then any that still fit) or by dynamic programming over rounded bytes, which is better if few weights share the
    budget. UsageError if even the smallest formats do not fit."""
    hulls = [_hull(curve.options) for curve in curves]
    chosen = [hull[0] for hull in hulls]
    spent = fixed + sum(curve.options[i].nbytes for curve, i in zip(curves, chosen, strict=True))
    check_smallest(spent, budget)
    damage = sum(curve.options[i].damage for curve, i in zip(curves, chosen, strict=True))
    frontier = [(spent, damage)]
    for number, after in _trades(curves, hulls):
        before, option = curves[number].options[chosen[number]], curves[number].options[after]
        reached = chosen[number] == hulls[number][hulls[number].index(after) - 1]  # the steps before this one did fit
        if not reached or spent + option.nbytes - before.nbytes > budget:
            continue  # another weight may have a smaller step
        chosen[number], spent = after, spent + option.nbytes - before.nbytes
        damage += option.damage - before.damage
        frontier.append((spent, damage))
    found = [chosen, _best_of_rounded(curves, budget - fixed)]
    for choice in found:
        _fill(curves, choice, budget - fixed - _sum(curves, choice, "nbytes"))
    best = min(found, key=lambda choice: _sum(curves, choice, "damage"))
    return Allocation(tuple(curves), tuple(best), budget, fixed, tuple(frontier))


def _sum(curves: Sequence[Curve], chosen: Sequence[int], what: str) -> Any:
    return sum(getattr(curve.options[i], what) for curve, i in zip(curves, chosen, strict=True))


def _best_of_rounded(curves: Sequence[Curve], budget: int) -> list[int]:
    """The best choices if the bytes beyond each weight's smallest option are rounded up to units, a fixed part of the
    budget."""
    least = [min(option.nbytes for option in curve.options) for curve in curves]
    room = budget - sum(least)
    unit = max(1, -(-room // _UNITS))
    count = room // unit
    damages = np.zeros(count + 1)  # least damage of the curves so far, by the units that they may take
    choices: list[np.ndarray] = []
    for curve, own in zip(curves, least, strict=True):
        every = np.full((len(curve.options), count + 1), np.inf)
        for i, option in enumerate(curve.options):
            units = -(-(option.nbytes - own) // unit)
            if units <= count:
                every[i, units:] = damages[: count + 1 - units] + option.damage
        choices.append(every.argmin(axis=0))
        damages = every.min(axis=0)
    chosen, left = [0] * len(curves), count
    for number in reversed(range(len(curves))):
        chosen[number] = int(choices[number][left])
        left -= -(-(curves[number].options[chosen[number]].nbytes - least[number]) // unit)
    return chosen


def _hull(options: Sequence[Option]) -> list[int]:
    """The options, by their numbers, on the lower convex hull of damage over bytes: from the smallest on, each step
    reduces damage by less per byte than the step before."""
    hull: list[int] = []
    for i in sorted(range(len(options)), key=lambda i: (options[i].nbytes, options[i].damage)):
        if hull and options[i].damage >= options[hull[-1]].damage:
            continue
        while len(hull) > 1 and _gain(options, hull[-1], i) >= _gain(options, hull[-2], hull[-1]):
            hull.pop()
        if hull and options[i].nbytes == options[hull[-1]].nbytes:
            hull.pop()
        hull.append(i)
    return hull


def _gain(options: Sequence[Option], before: int, after: int) -> float:
    """The damage that is avoided per additional byte."""
    more = options[after].nbytes - options[before].nbytes
    return (options[before].damage - options[after].damage) / more if more else float("inf")


def _trades(curves: Sequence[Curve], hulls: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """(curve, option that it steps to), the largest gain per byte first."""
    found = [
        (-_gain(curve.options, before, after), number, step, after)
        for number, (curve, hull) in enumerate(zip(curves, hulls, strict=True))
        for step, (before, after) in enumerate(pairwise(hull))
    ]
    return [(number, after) for _, number, _, after in sorted(found)]


def _fill(curves: Sequence[Curve], chosen: list[int], room: int) -> None:
    """Spend the remaining `room` bytes: repeat the change that reduces damage most among those that fit."""
    while True:
        best, most = None, 0.0
        for number, curve in enumerate(curves):
            now = curve.options[chosen[number]]
            for i, option in enumerate(curve.options):
                if option.nbytes - now.nbytes <= room and now.damage - option.damage > most:
                    best, most = (number, i), now.damage - option.damage
        if best is None:
            return
        number, i = best
        room -= curves[number].options[i].nbytes - curves[number].options[chosen[number]].nbytes
        chosen[number] = i


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
