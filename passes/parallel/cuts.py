"""The part of an axis that each rank has, and how it changes when axes are split, joined and sliced."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ...compiler.weights.formats.base import Ranges
from ...compiler.weights.shards import Cuts

Seed = tuple[str, int]
"""A product whose columns are divided: its node's name, and the number of the piece that its result is sliced into."""


class Conflict(Exception):
    """A value cannot be divided in the current way. `seeds`: the products whose division led to it."""

    def __init__(self, reason: str, *states: State) -> None:
        super().__init__(reason)
        self.seeds = frozenset[Seed]().union(*(state.seeds for state in states if state is not None))


@dataclass(frozen=True)
class Cut:
    """Each rank has its ranges of an axis; axes are counted without the row axis."""

    axis: int
    cuts: Cuts
    seeds: frozenset[Seed]

    @property
    def size(self) -> int:
        """How many elements of the axis a rank has."""
        return sum(end - begin for begin, end in self.cuts[0])

    def is_whole(self, size: int) -> bool:
        """Whether every rank has all of the axis, which has `size` elements."""
        return all(own == ((0, size),) for own in self.cuts)

    @property
    def divides(self) -> bool:
        """Whether no two ranks have the same elements."""
        taken = sorted(one for ranges in self.cuts for one in ranges)
        return all(a[1] <= b[0] for a, b in itertools.pairwise(taken))


@dataclass(frozen=True)
class Partial:
    """The value is the sum of the ranks' values."""

    seeds: frozenset[Seed]


@dataclass(frozen=True)
class Routed:
    """Per slot of `index`, only the rank with the expert has the value. zeros: the other ranks have zeros there, not
    undefined numbers."""

    index: str
    zeros: bool
    seeds: frozenset[Seed]


@dataclass(frozen=True)
class Unknown:
    """The state of values that depend on a conflict."""

    seeds: frozenset[Seed] = frozenset()


State = Cut | Partial | Routed | Unknown | None
"""How a value is divided among the ranks; None if each has all of it."""


def evenly(begin: int, end: int, parts: int, ranks: int) -> Cuts:
    """By rank, one of `parts` equal ranges of [begin, end). With more ranks than parts, neighbouring ranks have the
    same part."""
    size = (end - begin) // parts
    owners = [rank * parts // ranks for rank in range(ranks)]
    return tuple(((begin + own * size, begin + (own + 1) * size),) for own in owners)


def joined(pieces: Sequence[Cuts]) -> Cuts:
    """By rank, its ranges of all pieces, which are placed one after the other."""
    return tuple(compact([one for own in ranks for one in own]) for ranks in zip(*pieces, strict=True))


def compact(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """The smallest number of ranges with these elements in this order."""
    found: list[tuple[int, int]] = []
    for begin, end in ranges:
        if found and found[-1][1] == begin:
            found[-1] = found[-1][0], end
        elif begin < end:
            found.append((begin, end))
    return tuple(found)


def reshaped(cut: Cut, old: Sequence[int], new: Sequence[int]) -> Cut:
    """The cut of a value of shape `old` after a reshape to `new`; Conflict if the ranks' parts are not parts of one
    axis of `new`."""
    before, inner = prod(old[: cut.axis]), prod(old[cut.axis + 1 :])
    for axis, size in enumerate(new):
        outer, under = prod(new[:axis]), prod(new[axis + 1 :])
        if before % outer or size * under * outer != prod(new) or size == 1 < old[cut.axis]:
            continue
        repeats, span = before // outer, old[cut.axis] * inner
        if size * under != repeats * span:
            continue
        cuts = tuple(_blocks(own, repeats, span, inner, under) for own in cut.cuts)
        if all(found is not None for found in cuts):
            return Cut(axis, tuple(found for found in cuts if found is not None), cut.seeds)
    raise Conflict(f"the ranks' parts of axis {cut.axis} of {list(old)} are no parts of an axis of {list(new)}", cut)


def _blocks(own: Ranges, repeats: int, span: int, inner: int, under: int) -> Ranges | None:
    """Ranges of an axis as ranges of an axis whose elements are `under` numbers each; None if they are not whole
    elements."""
    found: list[tuple[int, int]] = []
    for repeat in range(repeats):
        for begin, end in own:
            first, last = repeat * span + begin * inner, repeat * span + end * inner
            if first % under or last % under:
                return None
            found.append((first // under, last // under))
    return compact(found)


def sliced(cut: Cut, begin: int, end: int, step: int) -> tuple[Cut, tuple[int, int]]:
    """The cut after a slice [begin, end) of the axis, every `step`-th element, and the begin and end of the slice
    within a rank's own elements. Conflict if these differ between ranks."""
    places: set[tuple[int, int]] = set()
    cuts: list[Ranges] = []
    for own in cut.cuts:
        kept: list[tuple[int, int]] = []
        position, first, last = 0, -1, -1
        for low, high in own:
            start = max(low, begin)
            start += -(start - begin) % step
            stop = min(high, end)
            if start < stop:
                if first < 0:
                    first = position + start - low
                elif (position + start - low - first) % step:
                    raise Conflict("a slice takes elements of ranks at unequal distances", cut)
                last = position + stop - low
                kept.append(((start - begin) // step, (stop - begin + step - 1) // step))
            position += high - low
        count = sum(b - a for a, b in kept)
        if not count or -(-(last - first) // step) != count:
            raise Conflict("a slice leaves a rank nothing, or what is not in one piece", cut)
        places.add((first, last))
        cuts.append(compact(kept))
    sizes = {sum(b - a for a, b in own) for own in cuts}
    if len(sizes) > 1 or len({(first, -(-(last - first) // step)) for first, last in places}) > 1:
        raise Conflict("a slice takes other elements of each rank", cut)
    return Cut(cut.axis, tuple(cuts), cut.seeds), min(places)


def elements(ranges: Ranges) -> list[int]:
    """The numbers of all elements of some ranges, in their order."""
    return [element for begin, end in ranges for element in range(begin, end)]
