"""Integers of a kernel as linear forms of unknowns, and the bounds that can be proved for them.

A number is an integer, or an array with an entry for each sample: a program of the grid at given sizes of the batch.
Values that depend only on program numbers and sizes are therefore known. Positions in a block, counters of loops and
numbers read from memory are unknowns between two bounds, with facts that relate them to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd

import numpy as np

Number = int | np.ndarray
_NEVER = 2**60
_DEEPEST = 5  # facts that are combined for one bound, at most
_MOST = 120  # combinations of each number of facts that are tried, at most


@dataclass(eq=False)
class UnknownInteger:
    """An integer from `low` to `high` that `divisor` divides. Each of its facts is a form that is at most 0."""

    low: Number
    high: Number
    divisor: int = 1
    facts: list[Form] = field(default_factory=list)


@dataclass(frozen=True)
class Form:
    """constant + sum of terms, each an unknown times a factor that is not 0 everywhere."""

    constant: Number
    terms: dict[UnknownInteger, Number] = field(default_factory=dict)

    @staticmethod
    def of(unknown: UnknownInteger) -> Form:
        """The form 1 * unknown."""
        return Form(0, {unknown: 1})

    @property
    def known(self) -> bool:
        """Whether it has no unknowns."""
        return not self.terms

    def plus(self, other: Form, times: Number = 1) -> Form:
        """self + times * other."""
        terms = dict(self.terms)
        for unknown, factor in other.terms.items():
            total = terms.get(unknown, 0) + factor * times
            if np.any(total):
                terms[unknown] = total
            else:
                terms.pop(unknown, None)
        return Form(self.constant + other.constant * times, terms)

    def times(self, factor: Number) -> Form:
        """factor * self."""
        return Form(0).plus(self, factor) if np.any(factor) else Form(0)

    @property
    def low(self) -> Number:
        """The form's least value by the bounds of its unknowns; facts are not used."""
        return -self.times(-1).high

    @property
    def high(self) -> Number:
        """The form's largest value by the bounds of its unknowns; facts are not used."""
        total = self.constant
        for unknown, factor in self.terms.items():
            if isinstance(factor, int):
                total = total + factor * (unknown.high if factor > 0 else unknown.low)
            else:
                total = total + np.where(factor > 0, factor * unknown.high, factor * unknown.low)
        return total

    @property
    def step(self) -> int:
        """A number that divides each of its terms; 0 if it has none."""
        return gcd(*(_divisor(factor) * unknown.divisor for unknown, factor in self.terms.items()))

    @property
    def divisor(self) -> int:
        """A number that divides the form; 0 for the form 0."""
        return gcd(_divisor(self.constant), self.step)

    @property
    def tight(self) -> Form:
        """The tightest integer version of this fact, a form that is at most 0: 32 i < 2880 becomes 32 i <= 2848."""
        step = self.step
        return self if step < 2 else Form(-(-self.constant // step * step), self.terms)


def least(one: Number, other: Number) -> Number:
    """The smaller of two numbers, in each sample."""
    return min(one, other) if isinstance(one, int) and isinstance(other, int) else np.minimum(one, other)


def most(one: Number, other: Number) -> Number:
    """The larger of two numbers, in each sample."""
    return max(one, other) if isinstance(one, int) and isinstance(other, int) else np.maximum(one, other)


def upper(form: Form, facts: Sequence[Form], goal: Number | None = None) -> Number:
    """An upper bound of a form if every fact is at most 0, found by combining these facts and those of the form's
    unknowns. The search ends as soon as the bound is `goal` or less in every sample; None: it runs to its end."""
    never: bool | np.ndarray = False  # samples in which a fact cannot hold, whatever the unknowns are
    for fact in facts:
        never = never | (fact.constant > 0) if fact.known else never
    best = least(form.high, np.where(never, -_NEVER, _NEVER)) if np.any(never) else form.high
    for depth in range(_DEEPEST + 1):
        best = least(best, _BoundSearch(goal).upper(form, tuple(facts), depth))
        if goal is not None and np.all(best <= goal):
            break
    return best


def lower(form: Form, facts: Sequence[Form], goal: Number | None = None) -> Number:
    """A lower bound of a form; see `upper`."""
    return -upper(form.times(-1), facts, None if goal is None else -goal)


def _divisor(number: Number) -> int:
    return abs(number) if isinstance(number, int) else int(np.gcd.reduce(number, axis=None))


def _ratio(factor: Number, by: np.ndarray) -> int:
    """`factor` / `by`, if that is the same positive integer in every sample; else 0."""
    at = int(np.argmax(by != 0))
    times = int((factor if isinstance(factor, int) else factor[at]) // by[at]) if by[at] else 0
    return times if times > 0 and np.array_equal(times * by, np.broadcast_to(factor, by.shape)) else 0


class _BoundSearch:
    """Fourier-Motzkin elimination: facts, at most `depth` of them, are added so that one unknown after the other
    cancels."""

    def __init__(self, goal: Number | None) -> None:
        self._goal, self._left = goal, _MOST

    def upper(self, form: Form, facts: tuple[Form, ...], depth: int) -> Number:
        best = self._whole(form, form.high)
        if depth <= 0 or self._reached(best):
            return best
        for unknown, factor in form.terms.items():
            if not isinstance(factor, int):
                sign = 1 if np.all(factor >= 0) else -1 if np.all(factor <= 0) else 0
            else:
                sign = 1 if factor > 0 else -1
            for number, fact in enumerate((*facts, *unknown.facts)):
                by = fact.terms.get(unknown)
                if self._left and isinstance(by, np.ndarray) and (times := _ratio(factor, by)):
                    self._left -= 1
                    rest = facts[:number] + facts[number + 1 :]
                    best = least(best, self.upper(form.plus(fact, -times), rest, depth - 1))
                if not isinstance(by, int) or by * sign <= 0 or self._left == 0:
                    continue
                self._left -= 1
                rest = facts[:number] + facts[number + 1 :]
                # the form times |by|, less the fact times |factor|: the unknown is gone
                combined = form.times(abs(by)).plus(fact, -abs(factor))
                found = self.upper(combined, rest, depth - 1) // abs(by)
                if abs(by) > 1:  # or the unknown on its own, which is an integer
                    alone = Form(0, {unknown: sign * abs(by)}).plus(fact, -1)
                    bound = self.upper(alone, rest, depth - 2) // abs(by)
                    others = Form(form.constant, {u: f for u, f in form.terms.items() if u is not unknown})
                    found = least(found, self.upper(others, facts, depth - 1) + abs(factor) * bound)
                best = least(best, self._whole(form, found))
                if self._reached(best):
                    return best
        return best

    @staticmethod
    def _whole(form: Form, bound: Number) -> Number:
        """The largest value not above `bound` that the divisors of the terms allow."""
        step = form.step
        return bound - (bound - form.constant) % step if step > 1 else bound

    def _reached(self, bound: Number) -> bool:
        return self._goal is not None and bool(np.all(bound <= self._goal))
