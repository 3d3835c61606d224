"""The order in which the programs of a step kernel compute tiles, and what each waits for; fixed at compile time.

A stage is the work of one launch: its tiles are the programs of that launch. The tiles of all stages form one list, in
the order of the program; of P programs, program p computes tiles p, p + P, p + 2 P .. of it. A stage has a counter of
its finished tiles; a stage that touches memory that another stage wrote, or writes memory that it touched, waits for
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from .....runtime.format.plan import STEP_COUNTERS


@dataclass(frozen=True)
class Span:
    """Bytes [begin, end) of a memory: "arena", "scratch", "counters", "kv" of a layer, or a weight's."""

    memory: str
    begin: int
    end: int

    def meets(self, other: Span) -> bool:
        """Whether the two spans share a byte."""
        return self.memory == other.memory and self.begin < other.end and other.begin < self.end


@dataclass(frozen=True)
class Wait:
    """A wait until `counter` is at least `count`."""

    counter: int
    count: int


@dataclass(frozen=True)
class TileStage:
    """The tiles of one launch. early: the part of `reads` that is prefetched before the stage waits. before: number of
    tiles of earlier stages. signal: the counter that each tile adds 1 to."""

    name: str
    tiles: int
    reads: frozenset[Span] = frozenset()
    writes: frozenset[Span] = frozenset()
    early: frozenset[Span] = frozenset()
    before: int = 0
    waits: tuple[Wait, ...] = ()
    signal: int = -1


def touches_after(later: TileStage, earlier: TileStage) -> bool:
    """Whether `later` must wait for `earlier`: it touches memory that `earlier` writes, or writes memory that it
    reads."""
    return _meet(later.writes, earlier.reads | earlier.writes) or _meet(later.reads, earlier.writes)


def _meet(some: Iterable[Span], others: Iterable[Span]) -> bool:
    return any(one.meets(other) for one in some for other in others)


def schedule(stages: Sequence[TileStage]) -> tuple[TileStage, ...]:
    """The stages with their counters and waits; waits that another wait implies are left out."""
    made: list[TileStage] = []
    behind: list[set[int]] = []  # by stage: the stages that are done when it begins
    before = 0
    for number, stage in enumerate(stages):
        done, waits = set[int](), []
        for other in reversed(range(number)):
            if other not in done and touches_after(stage, made[other]):
                waits.append(Wait(other, made[other].tiles))
                done |= {other} | behind[other]
        made.append(replace(stage, before=before, waits=tuple(waits), signal=number))
        behind.append(done)
        before += stage.tiles
    return tuple(made)


def faults(stages: Sequence[TileStage]) -> Iterator[str]:
    """The faults of a schedule, in words, checked independently of `schedule`.

    No deadlock with any number of programs: consider the first tile of the list that is not done. Its program has
    finished its earlier tiles, as they precede it in the list, and every counter that the tile waits for must be raised
    by preceding tiles, which are done. No race: two stages of which one writes memory that the other touches are
    ordered if the later one waits for a counter's final value: then all tiles that raise it are done, and so is all
    that these waited for. This covers reused memory.
    """
    total: dict[int, int] = {}
    for stage in stages:
        total[stage.signal] = total.get(stage.signal, 0) + stage.tiles
    counted: dict[int, int] = {}
    behind: list[set[int]] = []
    tiles = 0
    for number, stage in enumerate(stages):
        if stage.before != tiles:
            yield f"{stage.name} begins at tile {stage.before}, {tiles} tiles come before it"
        done = set[int]()
        for wait in stage.waits:
            if wait.count > counted.get(wait.counter, 0):
                found = counted.get(wait.counter, 0)
                yield f"{stage.name} waits for {wait.count} tiles at counter {wait.counter}, {found} come before it"
            if wait.count >= total.get(wait.counter, 0):
                done |= {n for n, other in enumerate(stages[:number]) if other.signal == wait.counter}
        behind.append(done.union(*(behind[other] for other in done)))
        for other, earlier in enumerate(stages[:number]):
            if other not in behind[number] and touches_after(stage, earlier):
                yield f"{stage.name} touches memory of {earlier.name} and does not wait for it"
            if _meet(stage.early, earlier.writes):
                yield f"{stage.name} asks for what {earlier.name} writes before it waits"
        if not 0 <= stage.signal < STEP_COUNTERS - 1:
            yield f"{stage.name} counts at {stage.signal}, there are {STEP_COUNTERS - 1} counters"
        counted[stage.signal] = counted.get(stage.signal, 0) + stage.tiles
        tiles += stage.tiles
